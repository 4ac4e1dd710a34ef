"""The tables of docs/results.md: they are made from the records, and intervals of all others are in these.

`make tables` writes the marked tables anew. `make lint` runs these tests.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from marlhf_lab.studies.result_tables import MARKED, TABLES, write_tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"\n(?=## )", MARKED.sub("", PAGE))
INTERVAL = re.compile(r"[+−-]?\d+(?:\.\d+)? \[[^\]]+\]")


def test_the_tables_are_those_of_the_records():
    """Where they differ: `make tables`. README has the first."""
    names = [found[2] for found in MARKED.finditer(PAGE)]
    assert sorted(names) == sorted(yaml.safe_load(TABLES.read_text(encoding="utf-8"))) and len(names) >= 32
    assert PAGE.count("<!-- table:") == PAGE.count("<!-- end -->") == len(names)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert MARKED.search(PAGE)[3] in readme
    made, page = write_tables(PAGE).splitlines(), PAGE.splitlines()
    assert [pair for pair in zip(page, made, strict=True) if pair[0] != pair[1]] == []


def plain(text: str) -> str:
    """The numbers as records write them: without plus signs, true minus signs and bold type."""
    return text.replace("−", "-").replace("+", "").replace("*", "").replace("-0.00 ", "0.00 ")


def intervals(record) -> list[str]:
    """Every mean with an interval in a summary, with two and with three digits."""
    if isinstance(record, list):
        return [text for item in record for text in intervals(item)]
    if not isinstance(record, dict):
        return []
    texts = [text for item in record.values() for text in intervals(item)]
    numbers = [record.get(name) for name in ("mean", "low", "high")]
    if None not in numbers:
        texts += [f"{m:z.{n}f} [{a:z.{n}f}, {b:z.{n}f}]" for n in (2, 3) for m, a, b in [numbers]]
    return texts


def test_an_empty_table_does_not_swallow_the_next_one():
    page = "<!-- table: a -->\n<!-- end -->\n\ntext\n\n<!-- table: b -->\n| x |\n<!-- end -->\n"
    assert [(found[2], found[3]) for found in MARKED.finditer(page)] == [("a", ""), ("b", "| x |")]


@pytest.mark.parametrize("section", SECTIONS[1:], ids=lambda text: text.splitlines()[0][3:40])
def test_every_interval_of_a_table_by_hand_is_in_the_records(section):
    title = section.splitlines()[0].removeprefix("## ").partition(":")[0]
    folders = [ROOT / "data" / "results" / name for name in title.split(", ")]
    stored = [folder / "table.md" for folder in folders if (folder / "table.md").is_file()]
    records = [plain(file.read_text(encoding="utf-8")) for file in stored]
    for folder in folders:
        for file in (folder / "summary.json", folder.parent / f"benchmark_{folder.name}.json"):
            if file.is_file():
                records += intervals(json.loads(file.read_text(encoding="utf-8")))
    known = "\n".join(records)
    cells = [x for line in section.splitlines() if line.startswith("| ") for x in INTERVAL.findall(line)]
    assert [x for x in cells if plain(x) not in known] == []
