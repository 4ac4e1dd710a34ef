"""Trackers that also get the metrics of a run: those that accelerate knows, such as TensorBoard and trackio."""

import importlib.util
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from marlhf_lite.utils.errors import InputError

# DPO, RLOO and GRPO report by transformers, which does not know accelerate's aim.
TRACKERS = tuple(sorted({*LOGGER_TYPE_TO_CLASS} - {"aim"}))


def tracker_names(report_to: str) -> list[str]:
    """Return the trackers of `--report_to`. Raises `InputError` if one is unknown, or its package missing."""
    names = [word.strip() for word in report_to.split(",") if word.strip()]
    for word in names:
        if word not in TRACKERS:
            raise InputError(f"--report_to {word}: unknown: choose from {', '.join(TRACKERS)}")
        if importlib.util.find_spec(word) is None:
            raise InputError(
                f"--report_to {word}: the package is missing: pip install {word.replace('_', '-')}"
            )
    return names


def make_accelerator(report_to: str, folder: Path, name: str, config: dict) -> Accelerator:
    """Make an accelerator that logs to the trackers of `--report_to`, if any, under `folder`."""
    names = tracker_names(report_to)
    if not names:
        return Accelerator()
    accelerator = Accelerator(log_with=names, project_dir=str(folder / "trackers"))
    # Trackers take plain values only, so lists and empty options are left out.
    plain = {key: x for key, x in config.items() if isinstance(x, int | float | str | bool)}
    settings = {"wandb": {"dir": str(folder)}} if "wandb" in names else {}
    accelerator.init_trackers(name, config=plain, init_kwargs=settings)
    return accelerator
