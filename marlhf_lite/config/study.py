"""Options of studies."""

from __future__ import annotations

from dataclasses import dataclass

from marlhf_lite.config.option import option


@dataclass
class StudyConfig:
    """A grid of methods and seeds, each run in a process of its own."""

    name: str = option("main", "main, ablations, tuning, or a YAML file of your own.")
    workers: int = option(0, "Runs at a time, with one thread each; 0: one for each core.", least=0)
    results: str = option("", "Folder of the results, one small file a run. Default: data/results/<name>.")
    work: str = option("", "Folder of checkpoints, responses and logs. Default: runs/study-<name>.")
    starts: str = option("runs/starts", "Folder of SFT and reward adapters, which all studies share.")
    study_figures: str = option("", "Folder of figures. Default: figures/<name>.")
    seeds: str = option("", "Seeds in place of the study's, comma-separated.")
    only: str = option("", "Run these methods alone, comma-separated.")
    redo: bool = option(False, "Run again what stands in the results with other options than the study has now.")
    dry_run: bool = option(False, "List the runs and which are done; run nothing.")
