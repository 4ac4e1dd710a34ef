"""Copy the lessons for a class, without outputs and solutions: `python book/handout.py notebooks build/handout`.

Under every exercise stands an empty cell for the answer. Glossary, examples, the plan of the course, cheat sheet,
homework and the page of one update are copied along, and the single file without what the assignment asks for. Diagrams
come from the installed package.
"""

import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbconvert import NotebookExporter
from nbconvert.preprocessors import ClearOutputPreprocessor, Preprocessor

from marlhf_lab.build_it import WHOLE, starter

EXERCISES = re.compile(r"^## .*Exercises", re.M)
EXERCISE = re.compile(r"^(?=\*\*\d+ · |\d+\. \*)", re.M)
NOT_EXERCISES = re.compile(r"^(?=## (?!.*Exercises))", re.M)
LINK = re.compile(r"\[([^][]*)\]\(([^)#\s]*)(?:#[^)]*)?\)")
ALONG = (
    "examples/*.py",
    "GLOSSARY.md",
    "docs/cheat_sheet.html",
    "docs/homework.md",
    "docs/start.md",
    "figures/interactive/one_update.*",
)
WHERE_SOLUTIONS_ARE = re.compile(
    r"Solutions\b(?:(?!\.\s).)*?solutions/(?:(?!\.\s).)*\.(?:\s|$)", re.S
)


class AnswerCells(Preprocessor):
    """Give every exercise an empty code cell, unless a code cell follows it, and do not say where solutions are."""

    def preprocess(self, nb, resources):
        start = 0  # the cell in which the exercises begin
        while nb.cells[start].cell_type != "markdown" or not EXERCISES.search(
            nb.cells[start].source
        ):
            start += 1
        cells = nb.cells[:start]
        next_cells = [*nb.cells[start + 1 :], None]
        for cell, after in zip(nb.cells[start:], next_cells, strict=True):
            if cell.cell_type == "markdown":
                cells += split(cell, after)
            else:
                cells.append(cell)
        nb.cells = cells
        return nb, resources


def split(cell, after) -> list:
    """Split a Markdown cell into its exercises, with an empty answer cell after each that has none yet.

    `after` is the cell that follows in the notebook, or None. If it is a code cell, it is the last exercise's.
    """
    text = WHERE_SOLUTIONS_ARE.sub("", cell.source)
    pieces = []
    for section in NOT_EXERCISES.split(text):
        pieces += [piece for piece in EXERCISE.split(section) if piece.strip()]
    cells = []
    for number, piece in enumerate(pieces):
        cells.append(nbformat.v4.new_markdown_cell(piece.strip(), id=f"{cell.id}-{number}"))
        is_last = number == len(pieces) - 1
        has_answer_cell = is_last and after is not None and after.cell_type == "code"
        if EXERCISE.match(piece) and not has_answer_cell:
            cells.append(nbformat.v4.new_code_cell(id=f"{cell.id}-{number}-answer"))
    return cells


def linked(text: str, folder: Path) -> str:
    """Return a Markdown text without links to files that the handout lacks: of such a link, the words stay.

    `folder` is the folder of the handout in which the text stands.
    """

    def with_or_without(link: re.Match) -> str:
        place = link[2]
        leads_somewhere = not place or "://" in place or (folder / place).exists()
        return link[0] if leads_somewhere else link[1]

    return LINK.sub(with_or_without, text)


def main(notebooks: Path, target: Path) -> None:
    """Write the handout of the notebooks in this folder to `target`, which is emptied first."""
    exporter = NotebookExporter(preprocessors=[ClearOutputPreprocessor, AnswerCells])
    shutil.rmtree(target, ignore_errors=True)
    (target / "notebooks").mkdir(parents=True)
    for path in sorted(notebooks.glob("*.ipynb")):
        lesson, _ = exporter.from_filename(str(path))
        (target / "notebooks" / path.name).write_text(lesson, encoding="utf-8")
    root = notebooks.resolve().parent
    for pattern in ALONG:
        for path in root.glob(pattern):
            copy = target / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    whole = target / WHOLE.relative_to(root)
    whole.write_text(starter(whole.read_text(encoding="utf-8")), encoding="utf-8")
    # Links are looked at when all files are there.
    for name in ("homework.md", "start.md"):
        page = target / "docs" / name
        page.write_text(linked(page.read_text(encoding="utf-8"), page.parent), encoding="utf-8")
    copies = list(target.glob("notebooks/*.ipynb"))
    for path in copies:
        notebook = nbformat.read(path, 4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = linked(cell.source, path.parent)
        nbformat.write(notebook, path)
    print(f"{target}: {len(copies)} notebooks")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
