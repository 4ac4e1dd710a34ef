"""`--resume FOLDER`: a run goes on with the options it was started with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

from marlhf_lite.config.options import CheckpointConfig, LoggingConfig
from marlhf_lite.experiments.workspace import flat
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder

# What may change from one part of a run to the next: how long it is, what it leaves behind and what fits into memory,
# not what it computes (a micro-batch changes it by rounding).
FREE = {
    "micro_batch_size",
    "updates",
    "prompt_epochs",
    "output_dir",
    "overwrite",
    "resume",
    *(f.name for kind in (CheckpointConfig, LoggingConfig) for f in fields(kind)),
}


def with_resumed(argv: Sequence[str]) -> list[str]:
    """The words of a command line, with the config and folder of the run that `--resume` names.

    Raises `InputError` where that is no run.
    """
    words = [word for word in argv for word in (word.split("=", 1) if word.startswith("--resume=") else [word])]
    if "--resume" not in words:
        return list(argv)
    place = words.index("--resume") + 1
    if place == len(words) or words[place].startswith("--"):
        raise InputError("--resume: give the run's folder")
    folder = Path(words[place])
    RunFolder.open(folder)
    if (folder / "checkpoints").is_dir():
        raise InputError(f"--resume {folder}: the folder of one stage: give the run that it stands in")
    if any(word.split("=")[0] in ("--config", "--output_dir", "--overwrite") for word in words):
        raise InputError("--resume: takes its options from the run: leave out --config, --output_dir and --overwrite")
    return ["--config", str(folder / "config.yaml"), *words, "--output_dir", str(folder)]


def check_same(options: SimpleNamespace) -> None:
    """Raises `InputError` where an option that changes results differs from the run's own."""
    started = RunFolder.open(options.run.resume).config
    for name, value in flat(options).items():
        if name not in FREE and name in started and started[name] != value:
            raise InputError(
                f"--{name} {value}: the run was started with {started[name]}: leave it out, or start another run"
            )
