"""The register of studies in `docs/results.md`: predictions, outcomes, and the effects that could have been seen."""

import json
from importlib.resources import files
from pathlib import Path

import yaml

from marlhf_lab.studies.could_be_seen import seen
from marlhf_lab.studies.results import stored_results
from marlhf_lab.studies.study import load_study
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import interval, markdown

ROWS = Path(str(files("marlhf_lab"))) / "studies" / "register.yaml"
HEADS = ["study", "seeds", "predicted", "primary outcome, or first question", "could have seen"]
MEASURED = {  # study without protocol file and seeds -> its primary outcome, from the record
    "gradient_signal": lambda record: record["found"][record["primary"]]["over_PPO"]["MA-PPO"],
    "baseline_signal": lambda record: record["found"][record["primary"]]["contrasts"]["S - M"],
}


def register_table() -> str:
    """All studies as a Markdown table, each with a link to its table, or to the program that measures it."""
    from marlhf_lab.studies.result_tables import NUMBER, fill  # it makes this table

    lines = []
    for study, (predicted, outcome) in yaml.safe_load(ROWS.read_text(encoding="utf-8")).items():
        if study in MEASURED:
            text = outcome.replace(f"{{{study}}}", measured(study).replace("-", "−"))
            lines.append(
                [
                    f"[{study}](../benchmarks/{study}.py)",
                    "-",
                    predicted,
                    text,
                    "-",
                ]
            )
            continue
        folder = shipped("results") / study
        has_runs, runs = (
            (folder / "table.md").is_file(),
            stored_results(study) if folder.is_dir() else [],
        )
        place = (
            f"../data/results/{study}/table.md"
            if has_runs
            else f"../marlhf_lab/studies/protocols/{study}.yaml"
        )
        seeds, planned = len({run["seed"] for run in runs}), len(load_study(study).seeds)
        count = str(seeds) if seeds == planned else f"{seeds} of {planned}"
        found = (
            (fill(outcome, study), seen(study))
            if has_runs
            else (NUMBER.sub("not there yet", outcome), "-")
        )
        lines.append([f"[{study}]({place})", count, predicted, *found])
    return markdown(HEADS, lines)


def measured(study: str) -> str:
    """The primary outcome of a measurement; "not there yet" without its record."""
    path = shipped(f"results/benchmark_{study}.json")
    if not path.is_file():
        return "not there yet"
    return interval(MEASURED[study](json.loads(path.read_text(encoding="utf-8"))), ".2f")
