"""Read the rows of a local file: JSON lines, JSON, CSV, Parquet or Arrow."""

import bz2
import csv
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import TextIO

import pyarrow.ipc
import pyarrow.parquet

from marlhf_lite.utils.errors import InputError, one_line

OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLES = (".parquet", ".arrow", ".feather")
SUFFIXES = (*TEXTS, *(f"{suffix}{packed}" for suffix in TEXTS for packed in OPENERS), *TABLES)
KNOWN = f"{', '.join(TEXTS)}, each also {', '.join(OPENERS)}; {', '.join(TABLES)}"
SEPARATORS = ",;\t|"


def read_file(path: str | Path) -> list[dict]:
    """Return the rows of a local file (one of `SUFFIXES`) in its order; columns are checked by `to_preferences`.

    `.jsonl` and `.ndjson` have one object a line, `.json` a list of objects, `{"data": [...]}` or one object a line.
    `.csv` and `.tsv` have a header, whose separator is that of the file (one of `SEPARATORS`); their fields stay text.
    All are in UTF-8, or in UTF-16 with its mark, and also packed. `.parquet`, `.arrow` and `.feather` are tables. White
    space around the names of columns is left out.

    Raises:
        InputError: where the file is missing, empty, damaged or of unknown kind; it names the row where it can.
    """
    path = Path(os.path.expanduser(path))
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if os.path.isdir(path):
        raise InputError(f"{path}: this is a directory, not a file: name one file in it ({KNOWN})")
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file: check the path (relative paths start at {Path.cwd()})")
    if suffix is None:
        raise InputError(f"{path}: unknown extension {path.suffix!r}: known are {KNOWN}")
    try:
        rows = _read_table(path) if suffix in TABLES else _read_text(path, suffix)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        hint = "save it as UTF-8, as by iconv -f latin1 -t utf-8"
        raise InputError(f"{path}: cannot be read (not UTF-8: {one_line(error)}): {hint}") from None
    except Exception as error:  # such as an archive that is cut off
        hint = "check that it is whole and what its name says"
        raise InputError(f"{path}: cannot be read ({one_line(error)}): {hint}") from None
    if not rows:
        raise InputError(f"{path}: the file holds no rows: give at least one row")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f'{path}: row {number}: not an object such as {{"prompt": ...}}: correct or delete it')
    return [{name.strip(): value for name, value in row.items()} for row in rows]


def _read_table(path: Path) -> list[dict]:
    if path.suffix.lower() == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    with pyarrow.memory_map(str(path)) as source:
        try:  # what `datasets` writes is a stream, what others write is a file
            return pyarrow.ipc.open_stream(source).read_all().to_pylist()
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(source).read_all().to_pylist()


def _read_text(path: Path, suffix: str) -> list:
    opener = OPENERS.get(path.suffix.lower(), open)
    with opener(path, "rb") as file:
        encoding = "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    with opener(path, "rt", encoding=encoding, newline="") as file:
        if suffix.startswith((".csv", ".tsv")):
            return _csv(file)
        return _json(file) if suffix.startswith(".json") and not suffix.startswith(".jsonl") else _json_lines(file)


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
    header = file.readline()
    file.seek(0)
    separator = max(SEPARATORS, key=header.count)
    spaced = header.count(separator) == header.count(f"{separator} ") > 0  # then a space is part of the separator
    rows = list(csv.DictReader(file, strict=True, delimiter=separator, skipinitialspace=spaced))
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            hint = f"put fields that hold {separator!r} or line breaks in double quotes"
            raise InputError(f"row {number}: its number of fields is not that of the header: {hint}")
    return rows
