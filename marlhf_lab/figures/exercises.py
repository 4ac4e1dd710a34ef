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
    """Return an answer in the form that the checks take.

    A NumPy array of numbers or bools becomes a tensor, floats in torch's default type. A function is wrapped: what it
    returns is converted in the same way, and kept as `returned_last`. Any other answer is returned as it is.
    """
    if isinstance(answer, np.ndarray) and answer.dtype.kind in "fiub":  # floats, integers and bools
        is_float = answer.dtype.kind == "f"
        return torch.as_tensor(answer, dtype=torch.get_default_dtype() if is_float else None)
    is_wrapped = hasattr(answer, "returned_last")
    if not isfunction(answer) or is_wrapped:
        return answer

    @wraps(answer)
    def with_tensors(*args: Any, **kwargs: Any) -> Any:
        with_tensors.returned_last = taken(answer(*args, **kwargs))
        return with_tensors.returned_last

    with_tensors.returned_last = None
    return with_tensors


def shown(name: str, answer: Any) -> str:
    """Return a text that shows an answer: its value, or if it is a function, what the function returned last.

    The text is cut after `LONG` characters.
    """
    if hasattr(answer, "returned_last"):
        text = f"{name}(…) returned {answer.returned_last!r}"
    else:
        text = f"{name} = {answer!r}"
    return text if len(text) <= LONG else text[:LONG] + " …"


def watch(shell: Any = None) -> None:
    """Convert and show the answers of exercises in this IPython shell; without a shell, do nothing."""
    from IPython import get_ipython

    shell = shell or get_ipython()
    if shell is None or hasattr(shell, "marlhf_exercises"):
        return
    shell.marlhf_exercises = True  # a second call must not register again
    shell.events.register("pre_run_cell", _before(shell.user_ns))
    shell.events.register("post_run_cell", _after(shell.user_ns))


def _before(names: dict) -> Callable[[Any], None]:
    """Return what IPython calls before a cell: it converts the answers that the cell checks.

    `names` maps the names of the notebook to their values; the converted answers replace the values there.
    """

    def convert(info: Any) -> None:
        for name in ASKED.findall(info.raw_cell or ""):
            if name in names:
                names[name] = taken(names[name])

    return convert


def _after(names: dict) -> Callable[[Any], None]:
    """Return what IPython calls after a cell: if a check of the cell failed, it shows the answers and the check's hint.

    `names` maps the names of the notebook to their values.
    """

    def explain(result: Any) -> None:
        checked = dict.fromkeys(ASKED.findall(result.info.raw_cell or ""))  # each name once
        if not checked or not isinstance(result.error_in_exec, AssertionError):
            return
        for name in checked:
            if name in names:
                print("your answer:", shown(name, names[name]))
        print(f"hint: {result.error_in_exec}. The exercise has a longer one to unfold.")

    return explain
