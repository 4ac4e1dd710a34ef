"""The tables of `docs/results.md`, from stored results: `make tables` writes them anew, `make lint` compares them.

A table is between `<!-- table: NAME -->` and `<!-- end -->`; `result_tables.yaml` describes it under NAME. Cells may
have numbers in braces, see `numbers_in_texts`. So may paragraphs: an entry with `text` is prose between these marks.
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
# Groups: the mark, NAME, what is between the marks, and the end.
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
    """Return a table, or paragraphs, as Markdown.

    `spec` is an entry of `result_tables.yaml`. It has the name of a table that another module makes (`is`), or
    paragraphs (`text`), or `columns` and `rows`, with the head of the first column (`head`) and the study whose numbers
    are meant (`study`).
    """
    if "is" in spec:
        return MADE_ELSEWHERE[spec["is"]]()
    if "text" in spec:
        return prose(spec["text"])
    columns = spec["columns"]  # head of a column -> its cell, with $1, $2 for a row's names
    lines = []
    for label, row in spec["rows"].items():
        # A row is one name or a list of names (of methods or contrasts), or a mapping with these under `of` and with
        # cells of its own, by heading or all of them under `cells`.
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
    """Return paragraphs with the numbers filled in, wrapped as the pages of docs/ are."""
    filled = [fill(paragraph, study="") for paragraph in text.strip().split("\n\n")]
    return "\n\n".join(_wrapped(paragraph) for paragraph in filled)


def _wrapped(paragraph: str) -> str:
    """Return a paragraph, or each item of a list of bullets, wrapped."""
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
    """Return a cell with $1 replaced by the first of a row's names, $2 by the second, and so on."""
    for place, name in enumerate(names, 1):
        cell = cell.replace(f"${place}", name)
    return cell


def main() -> None:
    """Write the tables and the numbers of docs/results.md and of README anew."""
    for page in (Path("docs") / "results.md", Path("README.md")):
        page.write_text(write_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
