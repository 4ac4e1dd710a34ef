"""JSON lines and whole files, written so that a kill or a full disk leaves nothing half done that is read as whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from marlhf_lite.utils.errors import InputError


def write_json(path: str | Path, obj: Any) -> None:
    """Writes `obj` as strict JSON, for result files: whole or not at all, never half; NaN and ±inf become null.

    Takes numbers, strings, lists, dicts, tensors and arrays; raises `InputError` for anything else. Parents are made.
    """
    path = Path(path)
    text = json.dumps(plain(obj, path.name, strict=True), ensure_ascii=False, allow_nan=False, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _encode(text))


def write_atomically(path: Path, data: bytes) -> None:
    """A reader, or a run that is killed, sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_lines(path: Path, rows: Iterable[Mapping]) -> None:
    """Adds a JSON line for each row; NaN and ±inf become null. A line that a crash cut off before is removed.

    Raises `InputError` for a value that JSON cannot hold, `OSError` where the disk is full.
    """
    lines = [_encode(json.dumps(plain(row, path.name, strict=True), ensure_ascii=False) + "\n") for row in rows]
    # Unbuffered: each write is one call to the system, which a signal or a kill does not split.
    with open(path, "a+b", buffering=0) as file:
        _mend_end(file)
        for line in lines:
            if file.write(line) != len(line):
                raise OSError(f"{path}: only part of a line was written; is the disk full?")


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON-lines file, in order; none if there is no file. A cut-off last line is left out.

    Raises `InputError` for a broken line, with its file and number.
    """
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    rows = [_parse(line) for line in lines]
    if None in rows:
        raise InputError(f"{path}, line {rows.index(None) + 1}: not a JSON object: mend or delete the line")
    unfinished = _parse(last)
    return rows if unfinished is None else [*rows, unfinished]


def plain(value: Any, where: str, strict: bool) -> Any:
    """`value` of plain Python types alone; `strict` JSON has no NaN or ±inf."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}: {key}", strict) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, strict) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return plain(value.tolist(), where, strict)
    if isinstance(value, float):
        return None if strict and not math.isfinite(value) else float(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | str):
        return int(value) if isinstance(value, int) else str.__str__(value)  # YAML takes no subclass, such as an enum
    raise InputError(f"{where} is a {type(value).__name__}: give numbers, strings, lists or dicts of them")


def _mend_end(file: Any) -> None:
    """Cuts off a last line that a crash left unfinished; ends one that only lacks its line break."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    last = file.read().rsplit(b"\n", 1)[-1]
    if _parse(last) is None:
        file.truncate(end - len(last))
    else:
        file.write(b"\n")


def _parse(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    return row if isinstance(row, dict) else None


def _encode(text: str) -> bytes:
    # A model may emit half a surrogate pair, which UTF-8 has no bytes for; its escape reads back as the same.
    return text.encode("utf-8", errors="backslashreplace")
