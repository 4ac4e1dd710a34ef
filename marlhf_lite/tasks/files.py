"""Read the rows of a file, here or at an address, and account for what lies in it: JSON lines, JSON, CSV or Parquet."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from marlhf_lite.tasks.addresses import content_at, unpack
from marlhf_lite.tasks.csv_rows import check_no_name_is_twice, rows_of_table
from marlhf_lite.tasks.encodings import decode
from marlhf_lite.tasks.json_rows import rows_of_lines, rows_of_value, split_lines
from marlhf_lite.tasks.no_data import HEAD, refuse_lookalike
from marlhf_lite.utils.errors import InputError, one_line

PACKED = (".gz", ".bz2", ".xz")
TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*TEXTS, ".parquet")
for _packed in PACKED:
    SUFFIXES += tuple(f"{suffix}{_packed}" for suffix in TEXTS)
KNOWN = f"{', '.join(TEXTS)}, each also {', '.join(PACKED)}; .parquet"


@dataclass(frozen=True)
class FileAccount:
    """What lies in a file: its rows were read, and each other line has a kind."""

    name: str
    rows: int
    # 0 if the rows are not lines of text, as in Parquet, or if one value has all rows
    lines: int = 0
    other_lines: Mapping[str, int] = field(default_factory=dict)  # kind -> their number
    first_of_several: str = ""  # the place of the first row with line breaks, if a row has any

    def __str__(self) -> str:
        """Return the account as a sum, such as `a.csv: 12 lines = 10 rows + 1 header + 1 blank`."""
        if not self.lines:
            return f"{self.name}: {self.rows} rows"
        parts = [f"{self.rows} rows"]
        for kind, count in self.other_lines.items():
            part = f"{count} {kind}"
            if kind == "inside quotes":
                part += f" (first: {self.first_of_several})"
            if count:
                parts.append(part)
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
    path = str(path)
    is_address = "://" in path
    if is_address:
        name = urlsplit(path).path  # without a query such as ?download=true
    else:
        path = os.path.expanduser(path)
        name = path
    suffixes = [suffix for suffix in SUFFIXES if name.lower().endswith(suffix)]
    if not suffixes:
        raise InputError(f"{path}: {_fault_of_name(name)}")
    _, kind_of_rows, *_ = suffixes[0].split(".")  # jsonl of `.jsonl.gz`
    kind = f".{kind_of_rows}"
    packing = suffixes[0].removeprefix(kind)  # empty if the file is not packed
    try:
        content = content_at(path) if is_address else Path(path).read_bytes()
        if packing:
            refuse_lookalike(content, packing)
            content = unpack(content, packing)
        refuse_lookalike(content, kind)
        rows, account = _rows_and_account(content, kind, path)
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


def _fault_of_name(name: str) -> str:
    """Return what is wrong with a file whose name does not say what it is: its first bytes, or the name itself."""
    if os.path.isfile(name):  # what it begins with may say that it is an archive, for example
        with open(name, "rb") as file:
            head = file.read(HEAD)
        try:
            refuse_lookalike(head, kind="")
        except InputError as error:
            return str(error)
    extension = "".join(Path(name).suffixes[-2:])
    return f"unknown extension {extension!r}: known are {KNOWN}"


def _rows_and_account(content: bytes, kind: str, name: str) -> tuple[list, FileAccount]:
    """Return the rows in the content of a file of this kind, such as `.csv`, and the account of its lines."""
    if kind == ".parquet":
        rows = _rows_of_parquet(content)
        return rows, FileAccount(name, len(rows))
    text = decode(content)
    if kind in (".csv", ".tsv"):
        table = rows_of_table(text)
        account = FileAccount(
            name,
            rows=len(table.rows),
            lines=len(split_lines(text)),
            other_lines=table.other_lines,
            first_of_several=table.first_of_several,
        )
        return table.rows, account
    if kind == ".json":
        rows = rows_of_value(text)
        return rows, FileAccount(name, len(rows))
    rows, blank = rows_of_lines(text)
    lines = len(split_lines(text))
    return rows, FileAccount(name, rows=len(rows), lines=lines, other_lines={"blank": blank})


def _rows_of_parquet(content: bytes) -> list[dict]:
    """Return the rows of a Parquet file; columns of JSON text are parsed.

    `datasets`, which parses them, too, describes its columns in the metadata of the file. Other libraries mark columns
    of JSON by their type.
    """
    import pyarrow.parquet  # takes long to import, and files of text need none of it

    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
    # Of two columns with one name, a row would only have the last.
    check_no_name_is_twice(file.schema_arrow.names)
    table = file.read()
    rows = table.to_pylist()
    metadata = table.schema.metadata or {}
    description = metadata.get(b"huggingface")
    features = json.loads(description)["info"]["features"] if description else {}
    for column in table.schema:
        if str(column.type) == "extension<arrow.json>":
            features.setdefault(column.name, {"_type": "Json"})
    for column, feature in features.items():
        if _has_json(feature):
            for row in rows:
                row[column] = _with_json_parsed(row[column], feature)
    return rows


def _has_json(feature) -> bool:
    """Return whether a feature (the type of a column, as `datasets` describes it), or a part of it, is JSON text."""
    if isinstance(feature, list):
        return any(_has_json(part) for part in feature)
    if not isinstance(feature, dict):
        return False
    return feature.get("_type") == "Json" or any(_has_json(part) for part in feature.values())


def _with_json_parsed(value, feature):
    """Return a value with its JSON texts parsed; its feature, a list or a dict, says where they are (`_has_json`)."""
    if value is None:
        return None
    if isinstance(feature, list):  # a list, as older versions of `datasets` describe it
        return [_with_json_parsed(item, feature[0]) for item in value]
    if feature.get("_type") == "Json":
        return json.loads(value) if isinstance(value, str) else value
    if "feature" in feature and isinstance(value, list):  # a list of a newer version
        return [_with_json_parsed(item, feature["feature"]) for item in value]
    if isinstance(value, dict):
        feature_of = feature.get("feature", feature)  # name -> feature
        parsed = dict(value)
        for name in value.keys() & feature_of.keys():
            parsed[name] = _with_json_parsed(value[name], feature_of[name])
        return parsed
    return value
