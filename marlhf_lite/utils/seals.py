"""The seal of what a run saves: the hash that a checkpoint or a saved model carries.

A file has it at its end, a folder in hashes.json. It is checked whenever either is read: a flipped bit or half a file
is an error. A folder without a seal comes from elsewhere.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import apply_umask, write_json

SEAL = "hashes.json"
LARGE, BLOCK, BLOCKS = 2 * 2**30, 2**20, 64  # of a larger file the first block is hashed, and BLOCKS evenly spread ones
_MARK = b"\nsha256 "  # and 64 digits end a sealed file; torch reads such a file as one without them


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, once a process for each path, size and time of change.

    A file beyond 2 GB counts by its size and its blocks, so that 54 GB of weights, or of shards, cost a second.
    """
    stat = path.stat()
    return _file_hash(path.absolute(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@cache
def _file_hash(path: Path, size: int, changed: int, moved: int) -> str:
    with open(path, "rb") as file:
        if size <= LARGE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for start in (0, *((size - BLOCK) * i // BLOCKS for i in range(1, BLOCKS + 1))):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def seal(path: Path) -> None:
    """Seal a file, or all that a folder holds, after everything is on the disk."""
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name not in (SEAL, "README.md")]
        write_json(path / SEAL, {file.relative_to(path).as_posix(): _synced_hash(file) for file in files})
        return
    with open(path, "r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        file.write(_MARK + digest.encode())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of `final`, sealed, when the block ends well; else that stays."""
    final = final.resolve()  # of a link, the folder that it leads to
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        apply_umask(temporary)
        seal(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _synced_hash(path: Path) -> str:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return file_hash(path)


def broken(path: Path) -> str:
    """Return what of a sealed file or folder has other content now, or is missing; empty if nothing, or not sealed."""
    if not path.is_dir():
        return "" if _is_sealed(path) else path.name
    try:
        hashes = json.loads((path / SEAL).read_bytes())
        wrong = (n for n, x in hashes.items() if not (path / n).is_file() or file_hash(path / n) != x)
        return next(wrong, "")
    except FileNotFoundError:  # from elsewhere
        return ""
    except (ValueError, AttributeError, OSError):
        return SEAL


def check_seal(folder: Path) -> None:
    """Raise `InputError` if a saved model is not as it was saved; a name that is no folder is a model of the hub."""
    if folder.is_dir() and (name := broken(folder)):
        fix = f"train it again, or delete {SEAL} there to take it as it is"
        raise InputError(f"{folder}: {name} is not as it was saved: {fix}")


def _is_sealed(path: Path) -> bool:
    """Return whether a file ends with the hash of everything before it."""
    length = len(_MARK) + 64
    with open(path, "rb") as file:
        left = max(file.seek(0, os.SEEK_END) - length, 0)
        file.seek(0)
        digest = hashlib.sha256()
        while block := file.read(min(left, BLOCK)):
            digest.update(block)
            left -= len(block)
        return file.read() == _MARK + digest.hexdigest().encode()
