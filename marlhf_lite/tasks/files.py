"""Read the rows of a local file: JSON lines, JSON, CSV or Parquet."""

import csv
import gzip
import json
import os
from pathlib import Path
from typing import TextIO

import pyarrow.parquet

from marlhf_lite.utils.errors import InputError, one_line

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")


def read_file(path: str | Path) -> list[dict]:
    """Return the rows of a local file (one of `SUFFIXES`) in its order; columns are checked by `to_preferences`.

    `.jsonl` has one object a line, `.json` a list of objects, `{"data": [...]}` or one object a line, `.csv` a header
    and comma-separated fields, which stay text; all in UTF-8 and also gzipped. `.parquet` is a flat table.

    Raises:
        InputError: where the file is missing, empty, damaged or of unknown kind; it names the row where it can.
    """
    path, known = Path(os.path.expanduser(path)), ", ".join(SUFFIXES)
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if os.path.isdir(path):
        raise InputError(f"{path}: this is a directory, not a file: name one file in it ({known})")
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file: check the path (relative paths start at {Path.cwd()})")
    if suffix is None:
        raise InputError(f"{path}: unknown extension {path.suffix!r}: known are {known}")
    try:
        rows = _read(path, suffix.removesuffix(".gz"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # such as text that is not UTF-8, or an archive that is cut off
        hint = "check that it is whole and what its name says"
        raise InputError(f"{path}: cannot be read ({one_line(error)}): {hint}") from None
    if not rows:
        raise InputError(f"{path}: the file holds no rows: give at least one preference pair")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f'{path}: row {number}: not an object such as {{"prompt": ...}}: correct or delete it')
    return rows


def _read(path: Path, kind: str) -> list:
    if kind == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        return {".jsonl": _json_lines, ".json": _json, ".csv": _csv}[kind](file)


def _json_lines(file: TextIO) -> list:
    rows = []
    for number, line in enumerate(file, start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise InputError(f"line {number}: not JSON ({error}): correct or delete the line") from None
    return rows


def _json(file: TextIO) -> list:
    try:
        value = json.load(file)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":  # a second object
            raise
        file.seek(0)
        return _json_lines(file)
    value = value.get("data", value) if isinstance(value, dict) else value
    return value if isinstance(value, list) else [value]


def _csv(file: TextIO) -> list[dict]:
    csv.field_size_limit(2**31 - 1)  # a prompt may be longer than the module's 131,072 characters
    rows = list(csv.DictReader(file, strict=True))
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            hint = "put fields that hold commas or line breaks in double quotes"
            raise InputError(f"row {number}: its number of fields is not that of the header: {hint}")
    return rows
