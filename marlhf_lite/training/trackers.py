"""TensorBoard and Weights & Biases, through accelerate."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from accelerate import Accelerator

from marlhf_lite.utils.errors import InputError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def tracker_names(trackers: str) -> list[str]:
    """The comma-separated `trackers`. Raises `InputError` for an unknown one or one whose package is missing."""
    names = [word.strip() for word in trackers.split(",") if word.strip()]
    for word in names:
        if word not in PACKAGES:
            raise InputError(f"--report_to {word}: unknown: choose from {', '.join(PACKAGES)}")
        if importlib.util.find_spec(PACKAGES[word]) is None:
            raise InputError(f"--report_to {word}: the package is missing: pip install {PACKAGES[word]}")
    return names


def make_accelerator(trackers: str, folder: Path, name: str, config: dict) -> Accelerator:
    """An accelerator that logs to the comma-separated `trackers`, under `folder`; with none, a plain one.

    Raises `InputError` for an unknown tracker or one whose package is missing.
    """
    names = tracker_names(trackers)
    if not names:
        return Accelerator()
    accelerator = Accelerator(log_with=names, project_dir=str(folder / "trackers"))
    known = {k: v for k, v in config.items() if isinstance(v, int | float | str | bool)}
    accelerator.init_trackers(
        name, config=known, init_kwargs={"wandb": {"dir": str(folder)}} if "wandb" in names else {}
    )
    return accelerator
