"""Study times of the notebooks, from their words and lines of code; `course.py` writes them into the pages.

A notebook's core is all that stands before "For the careful reader"; exercises and symbols are not counted.
"""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted(ROOT.glob("notebooks/*.ipynb"))
# Words of prose that a student reads in a minute: of plain text, and where a formula or code has to be thought through.
WORDS = 200
WORDS_BESIDE_CODE_OR_FORMULAS = 90
LINES = 18  # of code, at most 88 columns wide


class StudyTimes(NamedTuple):
    """Minutes of reading: the numbered sections, and the lettered ones."""

    core: int
    optional: int


def parts(path: Path) -> dict[str, list[tuple[str, str]]]:
    """What there is to read in the parts of a notebook: "core", "careful" (for the careful reader) and "rest".

    Each part is a list of pieces (kind of the cell, text). The head of the notebook, which the script of the course
    writes, is left out.
    """
    found = {"core": [], "careful": [], "rest": []}
    part = "core"  # until a heading begins another one
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        text = "".join(cell["source"])
        if number == 0:  # the head ends with the paragraph on Colab and Kaggle
            text = re.sub(r"\A.*?\n\n\*Colab and Kaggle:.*?\n\n", "", text, flags=re.S)
        for piece in re.split(r"^(?=## )", text, flags=re.M):
            if cell["cell_type"] == "markdown":
                if piece.startswith("## For the careful reader"):
                    part = "careful"
                if re.match("## (Exercises|Symbols)", piece):
                    part = "rest"
            found[part].append((cell["cell_type"], piece))
    return found


def words(text: str) -> int:
    """How many words of prose a text has, without links' addresses, HTML tags and the words for pictures."""
    prose = re.sub(r"\]\([^)]*\)|<[^>]*>|!\[[^]]*", " ", text)
    # A sign that stands alone, such as a dash or a table's bar, is no word.
    return sum(any(map(str.isalnum, word)) for word in prose.split())


def minutes(pieces: list[tuple[str, str]]) -> float:
    """Minutes for the words of prose, and for the lines of code that are not empty, in these pieces of a notebook.

    Prose is read more slowly if it has a formula or if the piece before or after it is code.
    """
    total = 0.0
    for place, (kind, text) in enumerate(pieces):
        if kind == "code":
            total += sum(1 for line in text.splitlines() if line.strip()) / LINES
            continue
        neighbours = pieces[max(place - 1, 0) : place + 2]
        is_beside_code = any(neighbour == "code" for neighbour, _ in neighbours)
        is_slow = is_beside_code or "$" in text
        total += words(text) / (WORDS_BESIDE_CODE_OR_FORMULAS if is_slow else WORDS)
    return total


def measure(path: Path) -> StudyTimes:
    """The times of both parts, each rounded up to five minutes, so that printed times add up."""
    found = parts(path)
    core = 5 * math.ceil(minutes(found["core"]) / 5)
    optional = 5 * math.ceil(minutes(found["careful"]) / 5)
    return StudyTimes(core, optional)
