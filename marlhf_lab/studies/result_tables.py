"""The tables of `docs/results.md`, from stored results: `make tables` writes them anew, `make lint` compares them.

A table is between `<!-- table: NAME -->` and `<!-- end -->`; `result_tables.yaml` describes it under NAME.
Cells and paragraphs may have numbers in braces, see `numbers_in_texts`.

An entry with `text` is prose, not a table.
"""

import re
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import yaml

from marlhf_lab.studies.answer import answer_table
from marlhf_lab.studies.numbers_in_texts import fill
from marlhf_lab.studies.register import register_table
from marlhf_lite.utils.tables import markdown

TABLES = Path(str(files("marlhf_lab"))) / "studies" / "result_tables.yaml"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)((?:(?!<!--).)*?)\n?(<!-- end -->)", re.S)
MADE_ELSEWHERE = {
    "answer": answer_table,
    "register": register_table,
}


def write_tables(text: str) -> str:
    """Return a page with every marked table made anew."""
    specs = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
    return MARKED.sub(lambda match: f"{match[1]}{table(specs[match[2]])}\n{match[4]}", text)


def table(spec: Mapping) -> str:
    """Return a table as Markdown.

    `spec` is an entry of `result_tables.yaml`: a table that another module makes (`is`), paragraphs (`text`), or
    `columns` and `rows`, with the head of the first column, and the study whose numbers are meant.
    """
    if "is" in spec:
        return MADE_ELSEWHERE[spec["is"]]()
    if "text" in spec:
        return prose(spec["text"])
    columns = spec["columns"]  # head of a column -> its cell, with $1, $2 for a row's names
    lines = []
    for label, row in spec["rows"].items():
        # A row is the names alone, or a mapping with them under `of` and with cells of its own.
        own = row if isinstance(row, dict) else {"of": row}
        names = own.get("of", [])
        if isinstance(names, str):
            names = [names]
        line = [str(label).strip()]
        for heading, cell in zip(columns, own.get("cells", columns.values()), strict=True):
            cell = _named(str(own.get(heading, cell)), names)
            line.append(fill(cell, spec.get("study", "")))
        lines.append(line)
    return markdown([spec["head"], *(str(heading) for heading in columns)], lines)


def prose(text: str) -> str:
    """Fill the numbers into paragraphs and wrap these as the pages of docs/ are wrapped."""
    filled = [fill(paragraph, study="") for paragraph in text.strip().split("\n\n")]
    return "\n\n".join(_wrapped(paragraph) for paragraph in filled)


def _wrapped(paragraph: str) -> str:
    """Wrap a paragraph, or each item of a list of bullets."""
    lines = []
    for item in re.split(r"\n(?=\* )", paragraph):
        indent = "  " if item.startswith("* ") else ""
        lines.append(
            textwrap.fill(
                item, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        )
    return "\n".join(lines)


def _named(cell: str, names: list[str]) -> str:
    """Replace $1, $2 of a column by a row's names."""
    for place, name in enumerate(names, 1):
        cell = cell.replace(f"${place}", name)
    return cell


def main() -> None:
    """Write the tables and the numbers of docs/results.md and of README anew."""
    for page in (Path("docs") / "results.md", Path("README.md")):
        page.write_text(write_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
