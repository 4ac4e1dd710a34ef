"""The tables of docs/results.md: every interval in them is one of the study's records. `make lint` runs it."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = re.split(r"\n(?=## )", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
INTERVAL = re.compile(r"[+−-]?\d+(?:\.\d+)? \[[^\]]+\]")
# Studies whose numbers a section compares with its own.
BESIDE = {"size_small, size_large": ["main"]}
# Intervals that other code computes: of goals that were chosen afterwards, of a fit of critics, of all tasks together.
ELSEWHERE = {"Does MA-RLHF work, and when?": 10, "critic_tries": 4, "steps": 4}


def plain(text: str) -> str:
    """The numbers as records write them: without plus signs, true minus signs and bold type."""
    return text.replace("−", "-").replace("+", "").replace("*", "").replace("-0.00 ", "0.00 ")


def intervals(record) -> list[str]:
    """Every mean with an interval in a summary, with two and with three digits."""
    if isinstance(record, list):
        return [text for item in record for text in intervals(item)]
    if not isinstance(record, dict):
        return []
    found = [text for item in record.values() for text in intervals(item)]
    numbers = [record.get(name) for name in ("mean", "low", "high")]
    if None not in numbers:
        found += [f"{m:z.{n}f} [{a:z.{n}f}, {b:z.{n}f}]" for n in (2, 3) for m, a, b in [numbers]]
    return found


@pytest.mark.parametrize("section", SECTIONS[1:], ids=lambda text: text.splitlines()[0][3:40])
def test_every_interval_of_a_table_is_in_the_records(section):
    title = section.splitlines()[0].removeprefix("## ").partition(":")[0]
    folders = [ROOT / "data" / "results" / name for name in title.split(", ") + BESIDE.get(title, [])]
    records = [plain((folder / "table.md").read_text(encoding="utf-8")) for folder in folders if folder.is_dir()]
    for folder in folders:
        for file in (folder / "summary.json", folder.parent / f"benchmark_{folder.name}.json"):
            if file.is_file():
                records += intervals(json.loads(file.read_text(encoding="utf-8")))
    known = "\n".join(records)
    cells = [x for line in section.splitlines() if line.startswith("| ") for x in INTERVAL.findall(line)]
    missing = [x for x in cells if plain(x) not in known]
    assert len(missing) == ELSEWHERE.get(title, 0), missing
