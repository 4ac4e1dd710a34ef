"""The check of the graded homework: a right solution has all points, and each typical fault costs its function's."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from marlhf_lab import homework

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = (
    (ROOT / "docs" / "exam_answers.md").read_text(encoding="utf-8").partition("## The homework")[2]
)
SOLUTION = re.search(r"```python\n(.*?)\nsolution = ", ANSWERS, re.S)[1]
FAULTS = [  # name, what is written, what a student writes in its place
    ("spans", "range(0, T, n)", "range(0, T - n + 1, n)"),
    ("rewards", "sums[-1] + score", "sums[-1]"),
    ("values", "/ (end - start)", ""),
    ("advantages", "lam * ahead", "ahead"),
    ("advantages", "+ following - value", "- value"),
    ("to_tokens", "range(start, end)", "range(1)"),
    ("loss", "min(ratio * a, clipped * a)", "clipped * a"),
    ("loss", "-sum(terms)", "sum(terms)"),
    ("loss", "math.exp(new - old)", "new / nothing"),
]


@pytest.mark.parametrize("name, right, wrong", [("", "", ""), *FAULTS])
def test_each_fault_costs_the_points_of_its_function(name, right, wrong, tmp_path, capsys):
    assert SOLUTION.count(right) == 1 or not right
    path = tmp_path / "answers.py"
    path.write_text(SOLUTION.replace(right, wrong) if right else SOLUTION, encoding="utf-8")
    homework.main(path)
    lines = capsys.readouterr().out.splitlines()
    points = {line.split()[0]: int(line.split()[1]) for line in lines}
    expected = homework.POINTS | ({name: 0} if name else {})
    assert points == expected | {"sum": sum(expected.values())}
    assert all(
        ("is" in line or "ends with NameError" in line) == line.startswith(name or "-")
        for line in lines
    )


def test_a_function_that_is_missing_or_copies_a_number_has_no_points():
    faults = homework.grade(SimpleNamespace(loss=lambda *_: 0.5))
    assert all(faults.values()) and "AttributeError" in faults["spans"] and "0.5" in faults["loss"]


def test_the_page_names_all_functions_with_their_points():
    page = (ROOT / "docs" / "homework.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- `(\w+)\([^`]*`, (\d+) points", page, re.M)
    assert {name: int(points) for name, points in rows} == homework.POINTS
    assert sum(map(int, re.findall(r"(\d+) points:", page))) == 30
