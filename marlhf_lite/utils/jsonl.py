"""JSON and JSON-lines files that stay whole when the writer is killed."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marlhf_lite.utils.errors import InputError

# In the folder that a command has locked: the lock, and the folder of files that are not yet complete.
LOCK = ".lock"
UNFINISHED = ".unfinished"


def write_json(path: str | Path, obj: Any) -> None:
    """Write `obj` as strict JSON, completely or not at all. NaN and ±inf become null, parent folders are created.

    Raises `InputError` for anything but numbers, strings, lists, dicts, tensors and arrays.
    """
    path = Path(path)
    text = json.dumps(to_jsonable(obj, path.name), ensure_ascii=False, allow_nan=False, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _encode(text))


def read_json(path: Path) -> dict:
    """Read a dict that `write_json` wrote. Raises `InputError`, which names the file, if it is damaged."""
    if (content := _parse(path.read_bytes())) is None:
        raise InputError(f"{path}: it is damaged: delete it, and give the command again")
    return content


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file in one step: a reader finds the old content or the new one, also after a kill."""
    with replaced_at_the_end(path) as temporary, named_fault(path), open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replaced_at_the_end(path: Path) -> Iterator[Path]:
    """Give the path of a new file to write. If the block ends well, that file replaces `path` in one step."""
    temporary = folder_for_unfinished(path) / f".{path.name}.{os.getpid()}.tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def folder_for_unfinished(path: Path) -> Path:
    """Return the folder in which a file or folder is written before it is renamed to `path`.

    If a command has locked a folder above `path`, this is one subfolder of the locked folder, on the same disk, which
    is made if it is missing. A killed writer leaves its half of a file in this subfolder, and the next command in that
    run removes the subfolder and nothing else (`RunLock`). Without a lock it is the folder in which `path` is.
    """
    # A run is at most four folders above: nothing is deeper in it than run / stage / checkpoints / update / file.
    for folder in list(path.absolute().parents)[:4]:
        if (folder / LOCK).exists():
            place = folder / UNFINISHED
            place.mkdir(exist_ok=True)
            return place
    return path.parent


@contextmanager
def named_fault(path: Path) -> Iterator[None]:
    """Inside, an error of the disk gets the file's name, which the operating system leaves out if a write fails."""
    try:
        yield
    except OSError as error:
        if error.errno:  # else a library raised it, with its own text
            error.filename = str(path)
        raise


def apply_umask(folder: Path) -> None:
    """Give the files of weights in a folder the mode of other new files.

    safetensors writes them so that only their owner can read them, but a server that loads them may be another user's.
    """
    os.umask(mask := os.umask(0))  # to read the umask is to set it: so it is set back at once
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def append_lines(path: Path, rows: Iterable[Mapping]) -> None:
    """Append one JSON line per row and flush. NaN and ±inf become null.

    A kill may cut the last line. The next append drops the cut line, so that new rows begin on a new line.
    Raises `InputError` for a value that JSON cannot hold, and `OSError` if the disk is full.
    """
    # All lines are made before the first is written, so a value that JSON cannot hold changes nothing in the file.
    lines = []
    for row in rows:
        text = json.dumps(to_jsonable(row, path.name), ensure_ascii=False)
        lines.append(_encode(text + "\n"))
    # `named_fault` is outside, because the disk may also fail when the file is closed, which writes what is left.
    with named_fault(path), open(path, "a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        if end and file.read(1) != b"\n":  # the last line is cut, or lacks only its line break
            file.seek(0)
            last = file.read().rpartition(b"\n")[2]
            if _parse(last) is None:  # cut
                file.truncate(end - len(last))
            else:
                file.write(b"\n")
        file.writelines(lines)


def read_lines(path: Path) -> list[dict]:
    """Return the objects of a JSON-lines file in order; none if there is no file. A cut last line is skipped.

    Raises `InputError` for any other broken line, with its file and number.
    """
    if not path.exists():
        return []
    # What follows the last line break is empty, a line that a kill has cut, or a whole one without its line break.
    *lines, last = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)  # None if it is no JSON object
        if row is None:
            raise InputError(f"{path}, line {number}: not a JSON object: fix or delete the line")
        rows.append(row)
    last_row = _parse(last)
    if last_row is not None:
        rows.append(last_row)
    return rows


def to_jsonable(value: Any, name: str, allow_nan: bool = False) -> Any:
    """Return `value` in plain Python types: what comes back if it is written as JSON and read again.

    Tuples, tensors and arrays become lists, paths become strings, and so do the keys of dicts. NaN and ±inf become None
    unless `allow_nan`. Raises `InputError`, which calls the value `name`, for a type that JSON does not have.
    """

    def plain(item: Any) -> Any:
        """Return something that JSON has for an item of another type; `json.dumps` asks for it."""
        if isinstance(item, os.PathLike):
            return os.fspath(item)
        if hasattr(item, "tolist"):  # tensors, arrays and their scalars
            return item.tolist()
        kind = type(item).__name__
        raise InputError(
            f"{name}: a value of type {kind}: give numbers, strings, lists or dicts of them"
        )

    # Python writes NaN and ±inf as words that strict JSON lacks. Reading, it gives these words to `parse_constant`.
    text = json.dumps(value, default=plain)
    if allow_nan:
        return json.loads(text)
    return json.loads(text, parse_constant=lambda word: None)


def _parse(text: bytes) -> dict | None:
    """Return the dict that a text says in JSON; None if it says anything else, or is no JSON."""
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _encode(text: str) -> bytes:
    # A model may emit half of a surrogate pair, for which UTF-8 has no bytes. It is written as an escape such as
    # \ud83d, which is valid in JSON and is read as the same half.
    return text.encode("utf-8", errors="backslashreplace")
