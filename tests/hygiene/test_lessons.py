"""How a lesson is built: little code of figures and tables, a question every ten minutes, a card at its end."""

import gzip
import html
import json
import re
import sys
from base64 import b64decode
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))
import figure_code  # noqa: E402
import times  # noqa: E402

ANSWER = r"\n\n<details><summary>Answer</summary>\n\n\S.*?\n</details>$"
QUESTION = re.compile(r"^\*\*Checkpoint\.\*\* \S.*?" + ANSWER, re.M | re.S)
CARD = re.compile(
    r"^\| equation \| what it does \| code \|\n\|---\|---\|---\|\n((?:\|.*\|\n?)+)", re.M
)

every_lesson = pytest.mark.parametrize("path", times.LESSONS, ids=lambda p: p.name[:2])


def core(path: Path) -> str:
    """The prose of a lesson's core."""
    found = times.parts(path)
    return "\n\n".join(
        text.strip() for kind, text in found["pause"] + found["core"] if kind == "markdown"
    )


@every_lesson
def test_code_of_figures_and_tables_is_little_of_the_core(path):
    part, whole = figure_code.measure(path)
    assert part <= max(figure_code.LIMIT * whole, figure_code.FEW), f"{part} of {whole} lines"


@every_lesson
def test_checkpoints_and_card(path):
    """docs/teaching.md tells how both are written."""
    text, minutes = core(path), times.measure(path).core
    questions = len(QUESTION.findall(text))
    assert questions == text.count("**Checkpoint.**"), (
        "an answer to hide and show stands below each question"
    )
    assert questions >= minutes // 10, f"{questions} questions in {minutes} minutes"
    (card,) = CARD.findall(text.partition("## Key points")[2])
    rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in card.splitlines()]
    assert 4 <= len(rows) <= 6 and all(len(row) == 3 and "`" in row[2] for row in rows)


def test_pages_in_outputs_are_those_of_figures():
    """A notebook holds a packed copy of the page that its cell plays, and its picture: `make notebooks` renews them."""
    counted = 0
    for path in times.LESSONS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for name in re.findall(r'^play\("(\w+)"', "".join(cell["source"]), re.M):
                page = (ROOT / "figures" / "interactive" / name).with_suffix(".html")
                forms = [output.get("data", {}) for output in cell["outputs"]]
                frame = next(
                    html.unescape("".join(form["text/html"]))
                    for form in forms
                    if "text/html" in form
                )
                packed = re.search(r'atob\("([^"]+)"\)', frame)[1]
                assert gzip.decompress(b64decode(packed)) == page.read_bytes(), (
                    f"{path.name}: old {page.name}"
                )
                picture = next("".join(form["image/png"]) for form in forms if "image/png" in form)
                assert b64decode(picture) == page.with_suffix(".png").read_bytes(), (
                    f"{path.name}: old {name}.png"
                )
                counted += 1
    assert counted >= 4


def test_the_spine_is_read_in_ninety_minutes():
    """The first course of docs/start.md: its sections, which all exist, have at most 6,000 words."""
    pieces = times.spine()
    headings = [text for kind, text in pieces if kind == "markdown" and text.startswith("## ")]
    assert len(headings) == sum(map(len, times.SPINE.values()))
    assert times.words(pieces) <= 6000 and 60 <= times.minutes(pieces) <= 95


def test_each_stop_of_the_spine_leads_to_the_next():
    """A stop is a run of sections of one lesson that follow each other."""
    stops = [
        (number, section)
        for number, sections in times.SPINE.items()
        for i, section in enumerate(sections)
        if i == 0 or int(section) != int(sections[i - 1]) + 1
    ]
    links = re.findall(
        r"^\*Spine: next → (.*)\*$", "\n".join(text for _, text in times.spine()), re.M
    )
    for link, ((before, _), (number, section)) in zip(links, pairwise(stops), strict=True):
        (name,) = (path.name for path in times.LESSONS if path.name.startswith(number))
        assert link == (
            f"section {section}" if number == before else f"[{number}, section {section}]({name})"
        )


def test_what_counts_as_code_of_figures():
    import ast

    cell = "from marlhf_lite.plotting import x\nrows = {'a': one}\nfor i in range(3):\n    print(i)\n    x(rows)\ntable"
    assert figure_code.shown_lines(ast.parse(cell), {"x"}) == {1, 2, 5, 6}
    assert figure_code.shown_lines(ast.parse("a = f(1)\nprint(a)"), {"x"}) == set()
    assert figure_code.imported(
        [ast.parse("import matplotlib.pyplot as plt")], ("matplotlib",)
    ) == {"plt"}
