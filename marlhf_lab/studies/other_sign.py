"""Which studies of the same question found opposite signs, so that no page tells one result without the other."""

import functools
import re
from importlib.resources import files
from pathlib import Path

import yaml

from marlhf_lab.studies.numbers_in_texts import fill

QUESTIONS = Path(str(files("marlhf_lab"))) / "studies" / "questions.yaml"
INTERVAL = re.compile(r"\[([^,\]]+), ([^\]]+)\]")


@functools.cache
def side_of_each_study() -> dict[str, dict[str, int]]:
    """Return question -> study -> the side on which its whole interval lies: 1 above no difference, -1 below it.

    The side is 0 if the interval includes no difference.
    """
    sides = {}
    for question, asked in yaml.safe_load(QUESTIONS.read_text(encoding="utf-8")).items():
        sides[question] = {}
        for study, number in asked["numbers"].items():
            low, high = interval_in(fill(number, study))
            is_above = low > asked["none"]  # the number that means no difference
            is_below = high < asked["none"]
            sides[question][study] = int(is_above) - int(is_below)
    return sides


def interval_in(text: str) -> tuple[float, float]:
    """Read the bounds of an interval as pages write it, with a true minus sign."""
    low, high = INTERVAL.search(text).groups()
    return float(low.replace("−", "-")), float(high.replace("−", "-"))


def studies_with_the_other_sign(study: str) -> list[str]:
    """Return the studies that ask a question of this study and whose interval lies on the other side."""
    found = []
    for sides in side_of_each_study().values():
        mine = sides.get(study, 0)
        found += [other for other, side in sides.items() if mine and side == -mine]
    return found
