"""`marlhf study`, which the laboratory adds to the command line."""

from marlhf_lite.config.checked import option
from marlhf_lite.config.commands import AddedCommand


class StudyCommand(AddedCommand):
    """A grid of methods and seeds: what is not done runs, then the table and figures.

    Write options and presets of its runs below shared in the file of --name.

    example: marlhf study --name main --workers 2
    """

    name: str = option("main", "Study: main, ablations, tuning, or a YAML file of your own.")
    output_dir: str = option(
        "", "Folder for results, table and figures. Default: data/results/<name>, figures/<name>."
    )
    workers: int = option(0, "Number of runs at a time; 0: one for each core.", least=0)
    seeds: str = option(
        "",
        "Seeds to run instead of the study's, comma-separated; the table has all that are complete.",
    )
    only: str = option("", "Methods to run, comma-separated. Default: all.")
    dry_run: bool = option(False, "List of the runs, with what is done already; nothing runs.")
    audit: bool = option(
        False,
        "Table of all stored studies with their provenance, docs/provenance.md; nothing runs.",
    )

    resumes = True

    def run(self) -> None:
        """Run the study, or write the table of all."""
        # heavy imports, after the options are read
        from marlhf_lab.studies.study import STUDIES, run_study

        if self.audit:
            from marlhf_lab.studies.audit import write_page

            print(write_page(STUDIES.parents[2]))
        else:
            run_study(
                name=self.name,
                output_dir=self.output_dir,
                workers=self.workers,
                seeds=self.seeds,
                only=self.only,
                dry_run=self.dry_run,
            )
