"""What an evaluation is asked for, read from options and checked before anything loads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from marlhf_lite.config.options import EvaluationConfig
from marlhf_lite.evaluation.best_of_n import check_sizes
from marlhf_lite.utils.errors import InputError


@dataclass(frozen=True)
class Plan:
    """Temperatures and samples to draw, and what to make of them."""

    temperatures: tuple[float, ...]
    samples: int = 1
    best_of: tuple[int, ...] = ()


def make_plan(options: EvaluationConfig, temperature: float) -> Plan:
    """The plan that options ask for; `temperature` is that of sampling where none is given.

    Raises `InputError` that names the option, for a bad number and for an N above the samples.
    """
    temperatures = numbers("eval_temperatures", options.eval_temperatures, least=0.0) or (temperature,)
    sizes = numbers("best_of", options.best_of, least=1, whole=True)
    check_sizes(sizes, options.eval_samples, f"--eval_samples {options.eval_samples}, so every method")
    return Plan(temperatures, options.eval_samples, sizes)


def numbers(option: str, text: str, least: float = -math.inf, whole: bool = False) -> tuple:
    """Comma-separated numbers in ascending order, each once; none where `text` is empty."""
    try:
        found = {(int if whole else float)(word) for word in text.split(",")} if text.strip() else set()
    except ValueError:
        found = {math.nan}
    if not all(math.isfinite(x) and x >= least for x in found):
        bound = f" from {least:g} up" if math.isfinite(least) else ""
        raise InputError(f"--{option} {text}: give {'whole ' * whole}numbers{bound}, comma-separated")
    return tuple(sorted(found))
