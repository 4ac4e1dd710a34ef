"""Tries an exercise's check with one right and three or more wrong answers, those of data/exercise_answers.yaml.

The right one is tried as arrays of NumPy, too.
"""

import re
from inspect import isfunction
from pathlib import Path

import torch
import yaml

from marlhf_lab.figures.exercises import taken

ANSWERS = yaml.safe_load(
    (Path(__file__).parent / "data" / "exercise_answers.yaml").read_text(encoding="utf-8")
)


def name_of(cell: str) -> str | None:
    """The name that an exercise's check in this cell looks at, or None."""
    found = re.search(r"^if (\w+) is \.\.\.|^(\w+) = \.\.\.  #", cell, re.M)
    return (found[1] or found[2]) if found and "assert" in cell else None


def in_numpy(answer):
    """The answer with arrays for tensors without a gradient, also those that a function returns."""
    if isinstance(answer, torch.Tensor) and not answer.requires_grad:
        return answer.numpy()
    return (lambda *args, **more: in_numpy(answer(*args, **more))) if isfunction(answer) else answer


def faults(lesson: str, cell: str, names: dict) -> list[str]:
    """A line for each answer that the check in this cell judges wrongly; `names` are those of the lesson so far."""
    name, found = name_of(cell), []
    check = re.sub(r"^\w+ = \.\.\..*", "", cell, flags=re.M)
    answers = ANSWERS[lesson][name]
    for place, answer, form in [
        (0, answers[0], in_numpy),
        *((i, x, lambda y: y) for i, x in enumerate(answers)),
    ]:
        scope = dict(names)
        exec(answer, scope)
        scope[name] = taken(form(scope[name]))
        try:
            exec(check, scope)
            refused = False
        except AssertionError:
            refused = True
        if refused != (place > 0):
            found.append(
                f"{lesson} {name}: {'refused' if refused else 'accepted'}: {answer.strip()}"
            )
    return found
