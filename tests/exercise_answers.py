"""Tries an exercise's check with one right and three or more wrong answers, those of data/exercise_answers.yaml."""

import re
from pathlib import Path

import yaml

ANSWERS = yaml.safe_load((Path(__file__).parent / "data" / "exercise_answers.yaml").read_text(encoding="utf-8"))


def name_of(cell: str) -> str | None:
    """The name that an exercise's check in this cell looks at, or None."""
    found = re.search(r"^if (\w+) is \.\.\.|^(\w+) = \.\.\.  #", cell, re.M)
    return (found[1] or found[2]) if found and "assert" in cell else None


def faults(lesson: str, cell: str, names: dict) -> list[str]:
    """A line for each answer that the check in this cell judges wrongly; `names` are those of the lesson so far."""
    name, found = name_of(cell), []
    check = re.sub(r"^\w+ = \.\.\..*", "", cell, flags=re.M)
    for place, answer in enumerate(ANSWERS[lesson][name]):
        scope = dict(names)
        exec(answer, scope)
        try:
            exec(check, scope)
            refused = False
        except AssertionError:
            refused = True
        if refused != (place > 0):
            found.append(f"{lesson} {name}: {'refused' if refused else 'accepted'}: {answer.strip()}")
    return found
