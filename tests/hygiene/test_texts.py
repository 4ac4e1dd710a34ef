"""Texts: links lead somewhere, pictures have words, the glossary's names exist, notebooks are as a run left them."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(p for folder in ("docs", "book", "benchmarks", "tests") for p in ROOT.glob(f"{folder}/*.md")),
]
NOTEBOOKS = sorted([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("notebooks/solutions/*.ipynb")])
LESSONS = [path for path in NOTEBOOKS if path.parent.name == "notebooks"]

every_text = pytest.mark.parametrize(
    "path", PAGES + NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT))
)
every_notebook = pytest.mark.parametrize(
    "path", NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT / "notebooks"))
)


def cells(path: Path, kind: str = "") -> list[dict]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [
        cell | {"source": "".join(cell["source"])} for cell in found if kind in cell["cell_type"]
    ]


def prose(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    return "\n\n".join(cell["source"] for cell in cells(path, "markdown"))


def anchors(path: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    headings = [re.sub(r"[`*]", "", line) for line in re.findall(r"^#+ (.*)$", prose(path), re.M)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_text
def test_links_lead_somewhere_and_diagrams_have_words(path):
    for link in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", prose(path), flags=re.S)
    ):
        place, _, section = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = path.parent / place if place else path
        assert target.exists(), link
        assert not section or target.suffix != ".md" or section in anchors(target), link
    # it may be a link itself
    drawing = r"!\[([^]]*)\]\(([^)]*diagrams/[^)]*)\)(?:\]\([^)]*\))?(\n\n?.*)?"
    for alt, place, after in re.findall(drawing, prose(path)):
        assert len(alt) >= 20 and re.match(r"\n\n?\*[^*\n]", after), (
            f"a text and a caption for {place}"
        )
    assert not re.search(r"^% ", prose(path), re.M), (
        "in the site a line that begins so is a comment"
    )


@every_text
def test_no_line_of_a_paragraph_begins_a_list_by_accident(path):
    """As "… cut at −1 and" and, on the next line, "1. You know …", or a formula that breaks before its minus."""
    lines = re.sub(r"```.*?```", "", prose(path), flags=re.S).splitlines()
    for before, line in pairwise(lines):
        begins_a_list = re.match(r"([-+*]|\d+[.)]) ", line)
        is_in_a_paragraph = before.strip() and not re.match(r"\s|[-+*] |\d+[.)] |[#|<]", before)
        introduces_it = before.rstrip().endswith(":")
        assert not (begins_a_list and is_in_a_paragraph and not introduces_it), line


@every_notebook
def test_a_notebook_alone_has_all_its_pictures(path):
    found = cells(path)
    for place, cell in enumerate(found):
        assert not re.search(r"!\[[^]]*\]\((?!https:)|\bfigures/", cell["source"]), (
            "from the package: `diagram`, `play`"
        )
        if re.match(r"diagram\(", cell["source"]):
            assert re.match(r"\*(\*\*)?[^*\n]", found[place + 1]["source"]), (
                "a caption stands below"
            )


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 220
    assert not [
        line
        for line in lines
        if len(line) > 120 and not line.startswith(("|", "[![", "![", "<!--"))
    ]


def test_the_page_on_tests_names_every_file_of_tests():
    named = set(re.findall(r"`(test_\w+\.py)`", prose(ROOT / "tests" / "README.md")))
    assert named == {path.name for path in ROOT.glob("tests/test_*.py")}


def test_every_name_in_the_glossary_is_in_the_library():
    rows = [
        re.split(r"(?<!\\)\|", line)[1:-1]
        for line in prose(ROOT / "GLOSSARY.md").splitlines()
        if line[:2] == "| "
    ]
    assert len(rows) > 40 and all(len(row) == 5 for row in rows)
    paths = [
        path for package in ("marlhf_lite", "marlhf_lab") for path in (ROOT / package).rglob("*")
    ]
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths if path.suffix == ".py")
    known = set(re.findall(r"\w+", code)) | {p.stem for p in paths}
    names = {
        word
        for row in rows
        for quoted in re.findall(r"`([^`]+)`", row[3])
        for word in re.findall(r"\w+", quoted)
    }
    assert not names - known


# Notebooks as committed


@every_notebook
def test_outputs_are_of_one_run_from_top_to_bottom(path):
    filled = [cell for cell in cells(path, "code") if cell["source"].strip()]
    assert [cell["execution_count"] for cell in filled] == list(range(1, len(filled) + 1))
    outputs = [output for cell in filled for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert not [
        o for o in outputs if o["output_type"] == "stream" and not "".join(o["text"]).strip()
    ], "blanks"
    assert "profile cpu" in str(outputs), "commit the outputs of `make notebooks`"


@every_notebook
def test_first_cells_install_take_a_profile_and_set_up(path):
    """What papermill, juv, Colab and Kaggle meet; whoever lacks the library is told what to type."""
    install, parameters, setup = cells(path, "code")[:3]
    line = r"!env \| grep .* && echo git\+https://github\.com/\S+/\S+.* \| grep -v OWNER/ \| xargs -r pip install -q"
    assert re.fullmatch(line, install["source"]), "without an address it does nothing"
    assert "parameters" in parameters["metadata"]["tags"] and 'profile = ""' in parameters["source"]
    assert re.search(
        r'# /// script\n# dependencies = \["marlhf-lite\[notebooks\] @ git.*\n# ///',
        parameters["source"],
    )
    assert "%pip install ./marlhf.zip" in setup["source"] and "%pip install git+" in setup["source"]
    assert "setup(seed=0, profile=profile" in setup["source"]


@every_notebook
def test_pictures_are_seen_where_nobody_trusts_the_notebook(path):
    """There JupyterLab shows neither SVG nor pages, and GitHub no pages."""
    outputs = [output for cell in cells(path, "code") for output in cell["outputs"]]
    for output, after in zip(outputs, [*outputs[1:], {}], strict=True):
        data = output.get("data", {})
        assert "image/svg+xml" not in data or "image/png" in data
        assert "<iframe" not in str(data) or "image/png" in after["data"], "a picture stands below"


@every_notebook
def test_file_is_small_and_its_cells_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) <= 420_000
    assert '"iopub.execute_input"' not in text, (
        "execute without record_timing: times make noisy diffs"
    )
    assert not re.search(r"(?<![\w.])/tmp/", text), "a path of the machine"
    for cell in cells(path, "code"):
        lines = cell["source"].splitlines()
        # an address can be long
        wide = [line for line in lines if len(line) > 88 and "git+https://" not in line]
        assert len(lines) <= 40 and not wide, cell["source"]
        assert len(re.findall(r"^(?:from|import) ", cell["source"], re.M)) <= 8, (
            "import where it is first needed"
        )
        assert not re.search(r"\bif\s+.*smoke", cell["source"]), (
            "profiles are chosen in one place, not in cells"
        )


@every_notebook
def test_sections_and_figures_are_counted_and_badges_lead_to_this_file(path):
    text = "\n".join(cell["source"] for cell in cells(path))
    for kind in (r"^## (\d+) ·", r"\*Figure (\d+)\. "):
        numbers = [int(number) for number in re.findall(kind, text, re.M)]
        assert numbers == list(range(1, len(numbers) + 1)), kind
    letters = re.findall(r"^### ([A-Z]) ·", text, re.M)  # sections for the careful reader
    assert letters == [chr(ord("A") + place) for place in range(len(letters))]
    first, where = cells(path, "markdown")[0]["source"], path.relative_to(ROOT).as_posix()
    for site in (
        "colab.research.google.com/github/",
        "kaggle.com/kernels/welcome?src=https://github.com/",
    ):
        assert re.findall(re.escape(site) + r"[\w.-]+/[\w.-]+/blob/main/([^)\s]+)", first) == [
            where
        ]


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.name)
def test_a_lesson_has_exercises_solutions_and_symbols(path):
    text = prose(path)
    assert (path.parent / "solutions" / path.name).is_file() and f"solutions/{path.name}" in text
    assert re.search(r"^## .*Exercises", text, re.M) and re.search(r"^## .*Symbols", text, re.M)
