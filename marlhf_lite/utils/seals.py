"""Seals of what a run saves.

A checkpoint or a saved model carries its hash as a seal: a file at its end, a folder in hashes.json. The seal is
checked whenever either is read: a flipped bit, half a file or a file that was added is an error. A folder without a
seal comes from elsewhere.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import apply_umask, folder_for_unfinished, write_json
from marlhf_lite.utils.shard_names import METADATA

SEAL = "hashes.json"
NO_PART_OF_A_MODEL = (SEAL, "README.md", "log.json", "accuracy.json")
# How to continue without a damaged checkpoint.
DELETE_IT = "delete it, and --resume takes the one before, if there is one"
# In bytes. Of a file larger than LARGE, the first block is hashed and BLOCKS others, evenly spread.
LARGE, BLOCK, BLOCKS = 2 * 2**30, 2**20, 64
# A sealed file ends with this mark and the 64 digits of a hash; torch reads it like a file without them.
_MARK = b"\nsha256 "


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file. In one process it is computed once for each path, size and time of change.

    Of a file larger than LARGE only the size and some blocks count, so that 54 GB of weights, or of shards, take one
    second.
    """
    stat = path.stat()
    return _file_hash(path.absolute(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@cache
def _file_hash(path: Path, size: int, changed: int, moved: int) -> str:
    """Return the hash of a file's content. Of a large file it is the hash of its size and of blocks spread over it.

    `changed` and `moved` are times of the file. They are not read here: with `path` and `size` they are the key under
    which `cache` keeps the hash, so a file that has changed is hashed again.
    """
    with open(path, "rb") as file:
        if size <= LARGE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        starts = [0]
        for i in range(1, BLOCKS + 1):
            starts.append((size - BLOCK) * i // BLOCKS)  # the last block ends with the file
        for start in starts:
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def files_that_count(folder: Path) -> list[str]:
    """Return the names of all files that may be read with a saved model: sorted, relative to its folder.

    Files that no model reads do not count: the seal, a page about the model, the records of its stage, and hidden
    files, which systems and git leave behind. But one hidden file counts, which torch writes and reads in a checkpoint
    of several processes.
    """
    names = []
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts) and name.name != METADATA
        if file.is_file() and not is_hidden and file.name not in NO_PART_OF_A_MODEL:
            names.append(name.as_posix())
    return sorted(names)


def seal(path: Path) -> None:
    """Write the seal of a file, or of everything in a folder, after all of it is on the disk."""
    if path.is_dir():
        hashes = {}
        for name in files_that_count(path):
            with open(path / name, "rb") as opened:
                os.fsync(opened.fileno())
            hashes[name] = file_hash(path / name)
        write_json(path / SEAL, hashes)
        return
    with open(path, "r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        file.write(_MARK + digest.encode())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Give a folder to write to. If the block ends well, it is sealed and replaces `final`; else `final` stays."""
    final = final.resolve()  # if it is a link, the folder that it leads to
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{final.name}.", suffix=".tmp", dir=folder_for_unfinished(final)
    ) as temporary:
        # Inside the temporary folder, which only its owner can read. The block makes this one, with the usual mode.
        place = Path(temporary) / final.name
        yield place
        apply_umask(place)
        seal(place)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(place, final)


def broken(path: Path) -> str:
    """Return the name of a file that does not agree with the seal: it is missing, was added or has changed.

    The name is empty if all is as it was sealed, and for a folder without a seal, which comes from elsewhere.
    """
    if path.is_dir():
        return _broken_in_folder(path)
    # A sealed file ends with a mark and the hash of what stands before it: 64 digits.
    content = memoryview(path.read_bytes())  # all in memory, as torch reads it afterwards
    length = len(_MARK) + 64
    digest = hashlib.sha256(content[:-length]).hexdigest()
    is_whole = content[-length:] == _MARK + digest.encode()
    return "" if is_whole else path.name


def _broken_in_folder(folder: Path) -> str:
    """Return the first file that is not as the seal of a folder says, or the seal itself if it is damaged; else ""."""
    try:
        hashes = json.loads((folder / SEAL).read_bytes())
        for name, right in hashes.items():
            if not (folder / name).is_file() or file_hash(folder / name) != right:
                return name
        for name in files_that_count(folder):
            if name not in hashes:
                return name
    except FileNotFoundError:  # no seal: the folder comes from elsewhere
        return ""
    except (ValueError, AttributeError, OSError):
        return SEAL
    return ""


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run, or a stage of it, has a whole checkpoint: a file, or a folder with its seal."""
    patterns = ("update-*.pt", f"update-*/{SEAL}", f"checkpoint-*/{SEAL}")
    return any(path for pattern in patterns for path in folder.glob(f"**/{pattern}"))


def check_seal(folder: Path) -> None:
    """Raise `InputError` if a saved model has changed since it was saved.

    If `folder` is the name of a model on the hub, there is no such folder, and nothing is checked.
    """
    if folder.is_dir() and (name := broken(folder)):
        fix = f"train it again, or delete {SEAL} there to take it as it is"
        raise InputError(f"{folder}: {name} is not as it was saved: {fix}")
