"""The glossary: each name of its code column is in the library, and each symbol stands there once."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (ROOT / "GLOSSARY.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "| word |" not in line
]


def test_every_row_has_five_cells_and_every_word_stands_once():
    assert len(ROWS) > 40
    assert not [row for row in ROWS if len(row) != 5 or not row[1] or not row[2]]
    words = [row[1] for row in ROWS]
    assert sorted(words) == sorted(set(words))


def test_every_name_in_the_code_column_is_in_the_library():
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "marlhf_lite").rglob("*.py"))
    known = set(re.findall(r"\w+", code)) | {p.stem for p in (ROOT / "marlhf_lite").rglob("*")}
    names = {word for row in ROWS for quoted in re.findall(r"`([^`]+)`", row[3]) for word in re.findall(r"\w+", quoted)}
    assert len(names) > 40 and not names - known
