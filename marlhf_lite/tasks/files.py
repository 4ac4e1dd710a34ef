"""Local preference files to rows: JSON lines, JSON, CSV and Parquet.

Every fault of a file becomes an `InputError` that names the file, the place in it and the mend.
"""

import contextlib
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from marlhf_lite.utils.errors import InputError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")
_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"


class Rows(list):
    """Rows (dicts) in file order. `place(i)` says where row `i` stands: `line 7` or `row 7`, counted from 1."""

    def __init__(self, rows, places: list[str] | None = None):
        super().__init__(rows)
        self._places = places

    def place(self, index: int) -> str:
        return self._places[index] if self._places else f"row {index + 1}"


def known_suffix(path: str | Path) -> str | None:
    """The suffix of `SUFFIXES` that `path` ends with, whatever its case, or None."""
    name = Path(path).name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def read_rows(path: str | Path) -> Rows:
    """Read a local file into `Rows`, one dict of columns per row.

    `.jsonl` has one object a line (blank lines are skipped), `.json` a list of objects or `{"data": [...]}`, `.csv` a
    header and comma-separated fields, all three in UTF-8 and also gzipped; `.parquet` a flat table. The columns are
    not looked at here, `marlhf_lite.tasks.templates.to_preferences` does that.

    Raises `InputError` where the file is missing, a directory, unreadable, empty, of unknown kind, not UTF-8, cut
    short, or not what its name says.
    """
    path = Path(os.path.expanduser(path))
    _check_file(path)
    suffix = known_suffix(path)
    if suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        kind = suffix.removesuffix(".gz")
        rows = _READERS[kind](_read_text(path), path)
    if not rows:
        raise InputError(f"{path}: the file holds no rows: give at least one preference pair")
    return rows


def _check_file(path: Path) -> None:
    known = ", ".join(SUFFIXES)
    if os.path.isdir(path):  # unlike Path's own, it takes any name without raising
        raise InputError(f"{path}: this is a directory, not a file: name one file in it ({known})")
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file: check the path (relative paths start at {Path.cwd()})")
    if known_suffix(path) is None:
        raise InputError(f"{path}: unknown extension {path.suffix!r}: known are {known}")
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): check its permissions") from None
    if empty:
        raise InputError(f"{path}: the file is empty: give at least one preference pair")


# Bytes to text


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix.lower() == ".gz":
        data = _gunzip(data, path)
    elif data.startswith(_GZIP_MAGIC):
        raise InputError(f"{path}: the file is gzip-compressed: rename it to {path.name}.gz")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: line {line}: not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}): "
            f"save it as UTF-8, for example with iconv -t utf-8"
        ) from None
    text = text.removeprefix(_BOM.decode())
    if not text.strip():
        raise InputError(f"{path}: the file is empty: give at least one preference pair")
    return text


def _gunzip(data: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(data)
    except EOFError:
        raise InputError(f"{path}: the gzip data is cut short: copy or download the file again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        if not data.startswith(_GZIP_MAGIC):
            raise InputError(f"{path}: not gzip data: rename it to {path.stem}, or compress it") from None
        raise InputError(f"{path}: the gzip data is damaged ({error}): copy or download the file again") from None


# Text to rows


def _read_jsonl(text: str, path: Path) -> Rows:
    rows, places = [], []
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028, as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        row = _parse_json(line, path, number, "mend or delete the line")
        rows.append(_as_object(row, f"{path}: {place}"))
        places.append(place)
    return Rows(rows, places)


def _read_json(text: str, path: Path) -> Rows:
    value = _parse_json(text, path, 1, "mend it, or name the file .jsonl if each line is one object")
    if isinstance(value, dict) and "data" in value:
        value = value["data"]
    if not isinstance(value, list):
        raise InputError(
            f'{path}: expected a list of objects or {{"data": [...]}}, found {_kind(value)}: '
            f"wrap the rows in a list, or name the file .jsonl if each line is one object"
        )
    return Rows([_as_object(row, f"{path}: row {i}") for i, row in enumerate(value, start=1)])


def _parse_json(text: str, path: Path, first_line: int, mend: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InputError(f"{path}: line {line} column {error.colno}: invalid JSON ({error.msg}): {mend}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number is too long"
        raise InputError(f"{path}: line {first_line}: invalid JSON ({reason}): {mend}") from None


def _as_object(value, where: str) -> dict:
    if not isinstance(value, dict):
        raise InputError(
            f'{where}: expected an object such as {{"prompt": ...}}, found {_kind(value)}: mend or delete it'
        )
    return value


def _kind(value) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _read_csv(text: str, path: Path) -> Rows:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    with _long_fields(len(text)):
        records = list(_csv_records(reader, path))
    first, header = records[0]
    header = [name.strip() for name in header]
    if "" in header or len(set(header)) < len(header):
        raise InputError(
            f"{path}: line {first}: a column name is empty or repeated in {header}: name every column once"
        )
    for line, fields in records:
        if len(fields) != len(header):
            raise InputError(
                f"{path}: line {line}: {len(fields)} fields where the header has {len(header)}: "
                f"put fields that hold commas or line breaks in double quotes"
            )
    body = records[1:]
    return Rows([dict(zip(header, fields, strict=True)) for _, fields in body], [f"line {line}" for line, _ in body])


def _csv_records(reader, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(first line, fields) of every record that is not a blank line."""
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(f"{path}: line {line}: not CSV ({error}): mend the double quotes") from None
        if fields:
            yield line, fields


@contextlib.contextmanager
def _long_fields(length: int) -> Iterator[None]:
    """Lift the csv module's process-wide limit of 131072 characters a field, and put it back."""
    before = csv.field_size_limit()
    csv.field_size_limit(max(before, length))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_parquet(path: Path) -> Rows:
    try:
        table = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True).read()
        table.column_names  # noqa: B018 - decoded here, may not be UTF-8
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: damaged or not Parquet ({reason}): copy or download the file again") from None
    try:
        return Rows(table.to_pylist())
    except (ValueError, OverflowError):
        row = next(i for i in range(table.num_rows) if _fault(table, i))
        raise InputError(f"{path}: row {row + 1}: {_fault(table, row)}: mend or delete the row") from None


def _fault(table: pyarrow.Table, row: int) -> str:
    """What keeps a row from becoming Python values, or nothing."""
    try:
        table.slice(row, 1).to_pylist()
    except UnicodeDecodeError:
        return "text that is not UTF-8"
    except (ValueError, OverflowError) as error:
        return " ".join(str(error).split())
    return ""


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
