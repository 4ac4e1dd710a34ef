"""Folders of tensors that several processes wrote, each its part, by torch.distributed.checkpoint.

A folder holds at least one file per process (`__RANK_0.distcp`), and `.metadata`, which says where each part of each
tensor lies. Any number of processes reads it, each its own part; `join_model` needs only one.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path, PurePath

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from marlhf_lite.models.shard_names import METADATA
from marlhf_lite.utils.errors import InputError

# What the metadata consist of. Anything else in a file may come from somebody who wants to run code here.
CLASSES = {("torch", "Size"), ("torch.serialization", "_get_layout")}
MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write this process's part of the named tensors; all processes take part.

    Raises `OSError` in all processes if the disk of one is full.
    """
    try:
        checkpoint.save(dict(tensors), storage_writer=checkpoint.FileSystemWriter(str(folder)))
    except CheckpointException as error:
        raise OSError(_reason(error)) from error


def read_shards(tensors: Mapping[str, Tensor], folder: Path, no_dist: bool = False) -> None:
    """Fill the named tensors, of which this process may hold a part; all processes take part unless `no_dist`.

    Raises `InputError` if a shard is damaged.
    """
    try:
        checkpoint.load(dict(tensors), storage_reader=_Reader(str(folder)), no_dist=no_dist)
    except CheckpointException as error:
        raise InputError(f"it is damaged ({_reason(error)})") from None


def _reason(error: CheckpointException) -> str:
    """What went wrong in the first process that failed, on one line."""
    return " ".join(str(next(iter(error.failures.values()))[0]).split())[:200]


class _Unpickler(pickle.Unpickler):
    """Reads what torch's metadata consist of, and runs nothing else."""

    def find_class(self, module: str, name: str):
        if module.startswith("pathlib"):  # the folder at the time of writing
            return PurePath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module in MODULES or (module, name) in CLASSES or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


class _Reader(checkpoint.FileSystemReader):
    def read_metadata(self, *args, **kwargs) -> Metadata:
        return read_metadata(Path(str(self.path)))


def read_metadata(folder: Path) -> Metadata:
    """Read where each tensor of a folder lies. Raises `InputError` if torch did not write the file."""
    try:
        with open(folder / METADATA, "rb") as file:
            return _Unpickler(file).load()
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        AttributeError,
        ImportError,
        IndexError,
        TypeError,
    ):
        raise InputError(f"it is damaged ({METADATA})") from None
