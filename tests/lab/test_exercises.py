"""Checks of exercises take NumPy arrays, and show a refused answer beside a hint, in IPython."""

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from marlhf_lab.figures import exercises

CHECK = """
if twice is ...:
    print("no answer yet")
else:
    x = torch.tensor([1.0, 2.0])
    given = twice(x) if callable(twice) else twice
    assert torch.allclose(given, 2 * x), "every number doubles"
    print("right")
"""


@pytest.fixture
def shell():
    shell = InteractiveShell()
    for _ in range(2):  # a set-up cell may run twice
        exercises.watch(shell)
    shell.run_cell("import numpy as np, torch")
    return shell


@pytest.mark.parametrize(
    "answer, said",
    [
        ("twice = ...", "no answer yet"),
        ("twice = np.array([2.0, 4.0])", "right"),
        ("twice = torch.tensor([2.0, 4.0])", "right"),
        ("twice = lambda x: 2 * np.asarray(x)", "right"),
        (
            "twice = np.array([2.0, 5.0])",
            "your answer: twice = tensor([2., 5.])\nhint: every number doubles.",
        ),
        (
            "def twice(x): return x",
            "your answer: twice(…) returned tensor([1., 2.])\nhint: every number doubles.",
        ),
    ],
)
def test_an_answer_is_taken_and_shown(shell, capsys, answer, said):
    shell.run_cell(answer)
    result = shell.run_cell(CHECK)
    out = capsys.readouterr().out
    assert said in out and out.count("hint:") == said.count("hint:")
    assert (result.error_in_exec is not None) == ("hint" in said)


def test_other_cells_and_other_errors_are_left_alone(shell, capsys):
    for cell in ("assert False, 'no exercise'", "array = np.ones(2); array is ...; 1 / 0"):
        shell.run_cell(cell)
    assert "hint:" not in capsys.readouterr().out


def test_what_is_taken():
    assert (
        exercises.taken(np.arange(3)).dtype == torch.int64
        and exercises.taken(np.array([True])).dtype == torch.bool
    )
    once = exercises.taken(lambda: np.zeros(1))
    assert exercises.taken(once) is once
    for other in (1.5, {"mean": np.ones(2)}, np.array(["text"]), int):
        assert exercises.taken(other) is other
    assert (
        exercises.shown("x", "y" * 10**6).endswith("…")
        and len(exercises.shown("x", "y" * 10**6)) < 1000
    )
