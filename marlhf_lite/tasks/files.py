"""Read the rows of a file, here or at an address, and account for what lies in it: JSON lines, JSON, CSV or Parquet."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from marlhf_lite.tasks.addresses import content_at, unpack
from marlhf_lite.tasks.csv_rows import rows_of_table
from marlhf_lite.tasks.encodings import decode
from marlhf_lite.tasks.json_rows import rows_of_lines, rows_of_value, split_lines
from marlhf_lite.tasks.no_data import refuse_lookalike
from marlhf_lite.utils.errors import InputError, one_line

PACKED = (".gz", ".bz2", ".xz")
TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*TEXTS, *(f"{suffix}{packed}" for suffix in TEXTS for packed in PACKED), ".parquet")
KNOWN = f"{', '.join(TEXTS)}, each also {', '.join(PACKED)}; .parquet"


@dataclass(frozen=True)
class FileAccount:
    """What lies in a file: its rows were read, and each other line has a kind."""

    name: str
    rows: int
    lines: int = (
        0  # 0 if the rows are not lines of text, as in Parquet, or if one value holds all rows
    )
    other_lines: Mapping[str, int] = field(default_factory=dict)  # kind -> their number
    first_of_several: str = ""  # the place of the first row with line breaks

    def __str__(self) -> str:
        if not self.lines:
            return f"{self.name}: {self.rows} rows"
        parts = [f"{self.rows} rows"]
        for kind, count in self.other_lines.items():
            where = f" (first: {self.first_of_several})" if kind == "inside quotes" else ""
            if count:
                parts.append(f"{count} {kind}{where}")
        return f"{self.name}: {self.lines} lines = {' + '.join(parts)}"


def read_file(path: str | Path) -> list[dict]:
    """Return the rows of a file in its order; see `read_and_account`."""
    return read_and_account(path)[0]


def read_and_account(path: str | Path) -> tuple[list[dict], FileAccount]:
    """Return the rows of a file (one of `SUFFIXES`) in its order, and an account of its lines.

    `.jsonl` and `.ndjson` have one object per line, `.json` a list of objects, `{"data": [...]}` or one object after
    another. `.csv` and `.tsv` have a header, whose separator (one of `csv_rows.SEPARATORS`) is that of the file; their
    fields stay text, white space around the names of its columns is stripped. All are in UTF-8, UTF-16 or UTF-32, and
    may be packed. `path` may be an address. `shapes.to_preferences` checks the columns.

    Raises:
        InputError: if the file is missing, damaged, of unknown kind or no data at all; it names the row if it can.
    """
    is_address = "://" in str(path)
    path = str(path) if is_address else os.path.expanduser(path)
    name = urlsplit(path).path if is_address else str(path)
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), None)
    if suffix is None:
        raise InputError(f"{path}: unknown extension {Path(name).suffix!r}: known are {KNOWN}")
    kind = f".{suffix.split('.')[1]}"
    packing = suffix.removeprefix(kind)
    try:
        content = content_at(path) if is_address else Path(path).read_bytes()
        if packing:
            refuse_lookalike(content, packing)
            content = unpack(content, packing)
        refuse_lookalike(content, kind)
        rows, account = _rows(content, kind, str(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # such as a truncated archive
        raise InputError(
            f"{path}: cannot be read ({one_line(error)}): check that it is whole, and its name and path"
        ) from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(
                f'{path}: row {number}: not an object such as {{"prompt": ...}}: correct or delete it'
            )
    return rows, account


def _rows(content: bytes, kind: str, name: str) -> tuple[list, FileAccount]:
    if kind == ".parquet":
        rows = _rows_of_parquet(content)
        return rows, FileAccount(name, len(rows))
    text = decode(content)
    if kind in (".csv", ".tsv"):
        table = rows_of_table(text)
        lines = len(split_lines(text))
        return table.rows, FileAccount(
            name, len(table.rows), lines, table.lines, table.first_of_several
        )
    if kind == ".json":
        rows = rows_of_value(text)
        return rows, FileAccount(name, len(rows))
    rows, blank = rows_of_lines(text)
    return rows, FileAccount(name, len(rows), len(split_lines(text)), {"blank": blank})


def _rows_of_parquet(content: bytes) -> list[dict]:
    """Return the rows of a Parquet file; columns that `datasets` stored as JSON are parsed, as it does itself."""
    import pyarrow.parquet  # takes long to import, and files of text need none of it

    table = pyarrow.parquet.read_table(pyarrow.BufferReader(content))
    rows = table.to_pylist()
    stored = (table.schema.metadata or {}).get(b"huggingface")
    features = json.loads(stored)["info"]["features"] if stored else {}
    for column, feature in features.items():
        if _has_json(feature):
            for row in rows:
                row[column] = _parsed(row[column], feature)
    for column_field in table.schema:
        if str(column_field.type) == "extension<arrow.json>" and column_field.name not in features:
            for row in rows:
                row[column_field.name] = _parsed(row[column_field.name], {"_type": "Json"})
    return rows


def _has_json(feature) -> bool:
    """Return whether a feature of `datasets`, or a part of it, is JSON text."""
    if isinstance(feature, list):
        return any(_has_json(part) for part in feature)
    if not isinstance(feature, dict):
        return False
    return feature.get("_type") == "Json" or any(_has_json(part) for part in feature.values())


def _parsed(value, feature):
    """Return a value with its JSON texts parsed, at the places that the feature of `datasets` names."""
    if value is None:
        return None
    if isinstance(feature, list):
        return [_parsed(item, feature[0]) for item in value]
    if feature.get("_type") == "Json":
        return json.loads(value) if isinstance(value, str) else value
    if "feature" in feature and isinstance(value, list):
        return [_parsed(item, feature["feature"]) for item in value]
    if isinstance(value, dict):
        inner = feature.get("feature", feature)
        return {
            name: _parsed(item, inner[name]) if name in inner else item
            for name, item in value.items()
        }
    return value
