"""Checks of exercises in a notebook: arrays of NumPy count as tensors, and a refused answer is shown beside a hint.

A check is a cell with ``if name is ...:``. The cell itself needs no code for this: `watch` learns which cell runs.
"""

import re
from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from typing import Any

import numpy as np
import torch

ASKED = re.compile(r"\b(\w+) is \.\.\.")
LONG = 600  # characters of an answer that are shown


def taken(answer: Any) -> Any:
    """Return an answer with NumPy arrays as tensors, floats in torch's default type; a function is wrapped.

    A wrapped function returns tensors, too, and keeps what it returned last as `said`.
    """
    if isinstance(answer, np.ndarray) and answer.dtype.kind in "fiub":
        return torch.as_tensor(
            answer, dtype=torch.get_default_dtype() if answer.dtype.kind == "f" else None
        )
    if not isfunction(answer) or hasattr(answer, "said"):
        return answer

    @wraps(answer)
    def told(*args: Any, **kwargs: Any) -> Any:
        told.said = taken(answer(*args, **kwargs))
        return told.said

    told.said = None
    return told


def shown(name: str, answer: Any) -> str:
    """Return an answer as one text: its value, or what a function returned last."""
    value = (
        f"{name}(…) returned {answer.said!r}" if hasattr(answer, "said") else f"{name} = {answer!r}"
    )
    return value if len(value) <= LONG else value[:LONG] + " …"


def watch(shell: Any = None) -> None:
    """Convert and show the answers of exercises in this IPython shell; without a shell, do nothing."""
    from IPython import get_ipython

    shell = shell or get_ipython()
    if shell is None or hasattr(shell, "marlhf_exercises"):
        return
    shell.marlhf_exercises = True
    shell.events.register("pre_run_cell", _before(shell.user_ns))
    shell.events.register("post_run_cell", _after(shell.user_ns))


def _before(names: dict) -> Callable[[Any], None]:
    def take(info: Any) -> None:
        for name in ASKED.findall(info.raw_cell or ""):
            if name in names:
                names[name] = taken(names[name])

    return take


def _after(names: dict) -> Callable[[Any], None]:
    def explain(result: Any) -> None:
        asked = dict.fromkeys(ASKED.findall(result.info.raw_cell or ""))
        if asked and isinstance(result.error_in_exec, AssertionError):
            for name in (name for name in asked if name in names):
                print("your answer:", shown(name, names[name]))
            print(f"hint: {result.error_in_exec}. The exercise has a longer one to unfold.")

    return explain
