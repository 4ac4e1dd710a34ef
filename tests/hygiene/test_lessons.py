"""How a lesson is built: its place in the course, little code of figures and tables, questions, a card at its end."""

import ast
import gzip
import html
import json
import re
import sys
from base64 import b64decode
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))
import course  # noqa: E402
import figure_code  # noqa: E402
import times  # noqa: E402

ANSWER = r"\n\n<details><summary>Answer</summary>\n\n\S.*?\n</details>$"
CHECKPOINT = re.compile(r"^\*\*Checkpoint\.\*\* \S.*?" + ANSWER, re.M | re.S)
# Each answer that one may give is a fold: its line is the answer, in plain text, because JupyterLab and the site
# render no Markdown there; what it hides is the feedback on it.
CHOICE = r"<details><summary>[^<`$\n]+</summary>\n\n(?:(?!</?details>).)+\n</details>"
QUESTION = re.compile(
    rf"^\*\*Question\.\*\* \S(?:(?!</?details>).)*?\n\n{CHOICE}(?:\n+{CHOICE})+", re.M | re.S
)
QUESTIONS, MINUTES = 3, 20  # a lesson has at least so many questions, and one in so many minutes
CARD = re.compile(
    r"^\| equation \| what it does \| code \|\n\|---\|---\|---\|\n((?:\|.*\|\n?)+)", re.M
)

every_lesson = pytest.mark.parametrize(
    "path", times.LESSONS, ids=lambda p: p.name.partition("_")[0]
)


def core(path: Path) -> str:
    """The prose of a lesson's core."""
    return "\n\n".join(
        text.strip() for kind, text in times.parts(path)["core"] if kind == "markdown"
    )


@every_lesson
def test_code_of_figures_and_tables_is_little_of_the_core(path):
    part, whole = figure_code.measure(path)
    assert part <= max(figure_code.LIMIT * whole, figure_code.FEW), f"{part} of {whole} lines"


@every_lesson
def test_questions_and_card(path):
    """docs/teaching.md tells how both are written."""
    text, minutes = core(path), times.measure(path).core
    checkpoints, questions = CHECKPOINT.findall(text), QUESTION.findall(text)
    assert len(checkpoints) == text.count("**Checkpoint.**"), (
        "an answer to hide and show stands below each checkpoint"
    )
    assert len(questions) == text.count("**Question.**"), (
        "below each question stand its answers, each with feedback to hide and show"
    )
    is_in_the_course = path in [lesson.path for lesson in course.LESSONS]
    least = max(minutes // MINUTES, QUESTIONS if is_in_the_course else 1)
    asked = len(checkpoints) + len(questions)
    assert asked >= least, f"{asked} questions in {minutes} minutes"
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


def test_heads_feet_and_tables_are_what_the_script_of_the_course_writes():
    for page, text in course.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run `python book/course.py`"


def test_every_notebook_is_a_lesson_or_an_elective_and_each_lesson_leads_to_the_next():
    notebooks = [notebook.path for notebook in course.LESSONS + course.ELECTIVES]
    assert sorted(notebooks) == times.LESSONS
    for lesson, following in zip(course.LESSONS[:-1], course.LESSONS[1:], strict=True):
        cells = json.loads(lesson.path.read_text(encoding="utf-8"))["cells"]
        for cell in (cells[0], cells[-1]):
            last_line = "".join(cell["source"]).splitlines()[-1]
            assert last_line.endswith(f"]({following.path.name})")


OWN_NAMES = (
    ast.FunctionDef,
    ast.Lambda,
    ast.ClassDef,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def of_the_notebook(node: ast.AST):
    """Yield a cell's nodes whose names are the notebook's: not those inside functions and comprehensions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, OWN_NAMES):
            yield from of_the_notebook(child)


def names(nodes, context: type) -> set[str]:
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def overwritten_by_loops(cells: list[str]) -> set[str]:
    """Return names that a cell assigned, the loop of a later cell took for itself, and a cell after it reads."""
    assigned: set[str] = set()
    overwritten: set[str] = set()
    found: set[str] = set()
    for source in cells:
        lines = [line for line in source.splitlines() if not re.match(r"\s*[%!]", line)]
        tree = ast.parse("\n".join(lines))
        by_loops: set[str] = set()
        for node in of_the_notebook(tree):
            if isinstance(node, ast.For):
                by_loops |= names(ast.walk(node.target), ast.Store)
        parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        stored_anywhere = names(ast.walk(tree), ast.Store) | parameters
        found |= overwritten & (names(ast.walk(tree), ast.Load) - stored_anywhere)
        by_statements = names(of_the_notebook(tree), ast.Store) - by_loops
        overwritten = (overwritten - by_statements) | (by_loops & assigned)
        assigned = (assigned | by_statements) - by_loops
    return found


def test_no_loop_takes_a_name_that_a_later_cell_reads():
    """As the loop of a figure once took `place`, and a later figure drew its formula for another token."""
    assert overwritten_by_loops(["x = 1", "for x in y:\n    pass", "print(x)"]) == {"x"}
    assert not overwritten_by_loops(["x = 1", "for x in y:\n    pass", "print([x for x in z])"])
    assert not overwritten_by_loops(["x = 1", "for x in y:\n    print(x)", "x = 2", "print(x)"])
    solutions = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
    for path in [*times.LESSONS, *solutions]:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert not overwritten_by_loops(code), path.name


def test_what_counts_as_code_of_figures():
    cell = "from marlhf_lite.plotting import x\nrows = {'a': one}\nfor i in range(3):\n    print(i)\n    x(rows)\ntable"
    assert figure_code.shown_lines(ast.parse(cell), {"x"}) == {1, 2, 5, 6}
    assert figure_code.shown_lines(ast.parse("a = f(1)\nprint(a)"), {"x"}) == set()
    assert figure_code.imported(
        [ast.parse("import matplotlib.pyplot as plt")], ("matplotlib",)
    ) == {"plt"}
