"""Read the rows of a file, here or at an address: JSON lines, JSON, CSV or Parquet."""

import csv
import io
import json
import os
import urllib.request
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pyarrow.parquet
from fsspec.compression import compr
from fsspec.utils import infer_compression

from marlhf_lite.utils.errors import InputError, one_line

PACKED = (".gz", ".bz2", ".xz")
TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*TEXTS, *(f"{suffix}{packed}" for suffix in TEXTS for packed in PACKED), ".parquet")
KNOWN = f"{', '.join(TEXTS)}, each also {', '.join(PACKED)}; .parquet"
SEPARATORS = ",;\t|"
WEB = ("http://", "https://")


def read_file(path: str | Path) -> list[dict]:
    """Return the rows of a file (one of `SUFFIXES`) in its order; `to_preferences` checks the columns.

    `.jsonl` and `.ndjson` have one object per line, `.json` a list of objects, `{"data": [...]}` or one object per
    line. `.csv` and `.tsv` have a header, whose separator (one of `SEPARATORS`) is that of the file; their fields stay
    text, white space around the names of its columns is stripped. All are in UTF-8, or in UTF-16 with its mark, and may
    be packed. `path` may be an address.

    Raises:
        InputError: if the file is missing, damaged or of unknown kind; it names the row if it can.
    """
    is_address = "://" in str(path)
    path = str(path) if is_address else os.path.expanduser(path)
    name = urlsplit(path).path if is_address else path
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), None)
    if suffix is None:
        raise InputError(f"{path}: unknown extension {Path(name).suffix!r}: known are {KNOWN}")
    try:
        # fsspec opens pages of the web only if aiohttp is installed.
        with urllib.request.urlopen(path) if path.startswith(WEB) else fsspec.open(path) as file:
            rows = _rows(
                compr[infer_compression(name)](file, mode="rb").read(), f".{suffix.split('.')[1]}"
            )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # such as a truncated archive
        is_text = isinstance(error, UnicodeDecodeError)
        hint = "save it as UTF-8, as by iconv -f cp1252 -t utf-8, or " if is_text else ""
        fault = f"{path}: cannot be read ({'not UTF-8: ' * is_text}{one_line(error)})"
        raise InputError(f"{fault}: {hint}check that it is whole, and its name and path") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(
                f'{path}: row {number}: not an object such as {{"prompt": ...}}: correct or delete it'
            )
    return rows


def _rows(content: bytes, kind: str) -> list:
    if kind == ".parquet":
        return pyarrow.parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    return {".json": _json, ".csv": _csv, ".tsv": _csv}.get(kind, _json_lines)(text)


def _json_lines(text: str) -> list:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"line {number}: not JSON ({error}): correct or delete the line"
            ) from None
    return rows


def _json(text: str) -> list:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":  # a second object
            raise
        return _json_lines(text)
    value = value.get("data", value) if isinstance(value, dict) else value
    return value if isinstance(value, list) else [value]


def _csv(text: str) -> list[dict]:
    csv.field_size_limit(2**31 - 1)  # a prompt may be longer than the module's 131,072 characters
    header = text.partition("\n")[0]
    separator = max(SEPARATORS, key=header.count)
    # then the space belongs to the separator
    spaced = header.count(separator) == header.count(f"{separator} ") > 0
    file = io.StringIO(text, newline="")
    reader = csv.DictReader(file, strict=True, delimiter=separator, skipinitialspace=spaced)
    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    if twice := [name for name, count in Counter(reader.fieldnames).items() if count > 1]:
        raise InputError(
            f"more than one column is named {', '.join(twice)}: rename or delete the others"
        )
    hint = f"put fields with {separator!r}, quotes or line breaks in double quotes, and double the quotes in them"
    rows = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise csv.Error("its number of fields differs from the header's")
            rows.append(row)
    except csv.Error as error:
        raise InputError(f"row {len(rows) + 1}: {error}: {hint}") from None
    return rows
