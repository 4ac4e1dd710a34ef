"""What `marlhf` refuses before anything trains: one table, and every problem at once.

A line of `data/faults.txt` is a command line and its problems, each as the option or file that it names and the
function that finds it.
"""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lite import cli
from marlhf_lite.config.support import goes_together, refuse_what_does_not_go_together
from marlhf_lite.experiments import context
from marlhf_lite.utils.errors import InputError, Problems
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.run_folder import RunFolder

TABLE = (Path(__file__).parent / "data" / "faults.txt").read_text(encoding="utf-8").splitlines()
FAULTS = [line.split(" -> ") for line in TABLE if line and line[0] != "#"]


@pytest.fixture
def folder(tmp_path, tiny, sft, rm, pairs, monkeypatch):
    """A folder to work in, with what the table names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # of another case's folder
    monkeypatch.delitem(sys.modules, "own_sampler", raising=False)
    for name in ("half", "notes", "broken", "whole"):
        (tmp_path / name).mkdir()
    texts = {
        "broken_reward.py": "def f(:\n",
        "own_sampler.py": "def made():\n    return print\n",
        "lam.yaml": "lam: 0.5\n",
        "notes/diary.txt": "dear",
    }
    for name, text in (texts | {"broken/config.yaml": "[: broken"}).items():
        (tmp_path / name).write_text(text)
    RunFolder.create("done", {"seed": 1, "policy_learning_rate": 0.5, "n": "5", "updates": 3})
    RunFolder.create("done/ppo", {"updates": 3}).path.joinpath("checkpoints").mkdir()
    for name in ("old/a/policy", "old/b/policy", "done/sft"):
        shutil.copytree(sft, tmp_path / name)
    config = json.loads((Path(tiny.model) / "config.json").read_text())
    config |= {"architectures": ["GemmaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    (tmp_path / "whole" / "model.safetensors").touch()
    for source, name in (
        (sft / "adapter_config.json", "half"),
        (pairs, "pairs.jsonl"),
        (pairs, "done/pairs.jsonl"),
    ):
        shutil.copy(source, tmp_path / name)
    append_lines(tmp_path / "prompts.jsonl", [{"prompt": f"Tell of {i} cats."} for i in range(40)])
    return tmp_path


def problems_of(words, folder, capsys, monkeypatch):
    """The problems of a command: nothing is loaded, printed or left behind."""
    monkeypatch.setattr(
        context,
        "load_base",
        lambda *_: pytest.fail("a model was loaded before the input was checked"),
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a user's module
    before = sorted(folder.rglob("*"))
    if words[0].isupper():  # how `accelerate launch` starts it
        monkeypatch.setenv(f"ACCELERATE_USE_{words.pop(0)}", "true")
    own = {"--output_dir", "--resume", "fly", "generate", "export", "memory"} & set(words)
    with pytest.raises(InputError) as caught:
        cli.dispatch([*words, *([] if own else ["--output_dir", "out"])])
    assert capsys.readouterr() == ("", "") and sorted(folder.rglob("*")) == before
    found = read_problems(caught.value)
    assert len(str(caught.value).splitlines()) == len(found)
    return found


class Problem(NamedTuple):
    """What is wrong with which option, file or row, how to fix it, and the function that found it."""

    field: str
    what: str
    fix: str
    kind: str


def read_problems(error):
    """The problems that the lines of an error tell."""
    if isinstance(error, Problems):
        return [problem for one in error.errors for problem in read_problems(one)]
    field, _, rest = str(error).partition(": ")
    what, _, fix = rest.rpartition(": ")
    return [Problem(field, what or fix, fix if what else "", error.kind)]


# What goes together

PAGE = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
LINES = [
    line
    for line in PAGE.splitlines()
    if line.startswith("| ") and line.count("|") == 11 and "---" not in line
]
AXES, *ROWS = [[cell.split() for cell in line.strip("|").split("|")] for line in LINES]
NAMES = [" ".join(words) for words in AXES]
# What no row has, and users give.
NOWHERE = {"sft": ["shards"], "launch": ["deepspeed"], "stage": []}
VALUES = {
    axis: sorted({value for row in ROWS for value in row[i]} - {"-"}) + NOWHERE.get(axis, [])
    for i, axis in enumerate(NAMES)
}
CELLS = st.fixed_dictionaries({axis: st.sampled_from(VALUES[axis]) for axis in NAMES})


def has_a_row(cell):
    for row in ROWS:
        allowed = dict(zip(NAMES, row, strict=True))
        if all(allowed[axis] == ["-"] or cell[axis] in allowed[axis] for axis in cell):
            return True
    return False


def test_what_goes_together_is_what_a_row_of_the_page_has():
    """All 41,472 combinations: none is refused for nothing, and none that no test runs gets through."""
    for values in itertools.product(*VALUES.values()):
        cell = dict(zip(VALUES, values, strict=True))
        assert goes_together(cell) == has_a_row(cell), cell


@given(CELLS)
def test_a_refusal_says_what_clashes_and_how_to_mend_it(cell):
    if goes_together(cell):
        refuse_what_does_not_go_together(cell, sft="S", data="D")
        return
    with pytest.raises(InputError) as caught:
        refuse_what_does_not_go_together(cell, sft="S", data="D")
    (problem,) = read_problems(caught.value)
    assert (
        problem.what.startswith("does not go with ")
        and problem.fix
        and not re.search(r"[{}]", str(caught.value))
    )


# The table of faults


@pytest.mark.parametrize(("words", "expected"), FAULTS)
def test_fault(words, expected, folder, sft, rm, capsys, monkeypatch):
    places = {"sft": sft, "rm": rm, "here": folder}
    found = problems_of(words.format(**places).split(), folder, capsys, monkeypatch)
    assert {f"{one.field.strip()} : {one.kind}" for one in found} == {
        *expected.format(**places).split(" | ")
    }
    assert all(one.what for one in found)


def test_every_problem_is_a_line_and_the_exit_code_is_2(folder, capsys):
    assert cli.main("ppo --sft nowhere --dataset no.jsonl --output_dir out".split()) == 2
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert (
        shown.out == ""
        and len(lines) == 3
        and all(line.startswith("marlhf: error: --") for line in lines)
    )
    for line, name in zip(lines, ("--sft nowhere", "--rm", "--dataset no.jsonl"), strict=True):
        assert line.startswith(f"marlhf: error: {name}: ")
