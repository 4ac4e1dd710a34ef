"""Names of termination conditions, as options and config files use them, to rules."""

from __future__ import annotations

import math

from marlhf_lite.config import MacroOptions
from marlhf_lite.errors import InputError
from marlhf_lite.macro import FixedNGram, RandomizedNGram, TerminationRule, Whole


def make_rule(how: MacroOptions, seed: int = 0) -> TerminationRule:
    """The rule that `how.termination` names. Raises `InputError` that names the option, for a bad n or lengths."""
    if how.termination == "whole":
        return Whole()
    if how.termination == "randomized":
        return RandomizedNGram(_whole_numbers("lengths", how.lengths.split(",")), how.repeats, seed)
    return FixedNGram(math.inf if how.n == "inf" else _whole_numbers("n", [how.n])[0])


def _whole_numbers(name: str, words: list[str]) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in words)
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        more = ", or inf" if name == "n" else ", comma-separated"
        raise InputError(f"--{name} {','.join(words)}: give whole numbers from 1 up{more}")
    return numbers
