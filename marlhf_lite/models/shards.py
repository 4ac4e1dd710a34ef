"""Folders of tensors that several processes wrote, each its part, by torch.distributed.checkpoint.

A folder holds a file or more a process (`__RANK_0.distcp`), and `.metadata`, which says where each part of each tensor
lies. Any number of processes reads it, each what it will hold; `join` needs no processes at all.
"""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePath

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from marlhf_lite.models.shard_names import METADATA, TRAINER_SHARDS
from marlhf_lite.utils.errors import InputError

MODELS = {"": "weights.policy.model.", TRAINER_SHARDS: "model."}  # folder in a checkpoint -> how its names begin
# What the metadata are made of; a file of anything else may come from somebody who wants to run code here.
CLASSES = {("torch", "Size"), ("torch.serialization", "_get_layout")}
MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write what this process holds of the named tensors; all processes take part.

    Raises `OSError` in all processes where the disk is full for one.
    """
    try:
        checkpoint.save(dict(tensors), storage_writer=checkpoint.FileSystemWriter(str(folder)))
    except CheckpointException as error:
        raise OSError(_reason(error)) from error


def read_shards(tensors: Mapping[str, Tensor], folder: Path, no_dist: bool = False) -> None:
    """Fill the named tensors, of which this process may hold a part; all processes take part unless `no_dist`.

    Raises `InputError` where a shard is damaged.
    """
    try:
        checkpoint.load(dict(tensors), storage_reader=_Reader(str(folder)), no_dist=no_dist)
    except CheckpointException as error:
        raise InputError(f"it is damaged ({_reason(error)})") from None


def join_model(folder: Path) -> dict[str, Tensor]:
    """Return the whole weights of the model in a checkpoint by name: of PPO the policy's. Raises as `join`."""
    name, prefix = next(item for item in MODELS.items() if (folder / item[0] / METADATA).is_file())
    return join(folder / name, prefix)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a folder by name. Raises `InputError` where a part of one is missing."""
    metadata, ends = _read_metadata(folder / METADATA), {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, size in sorted(ends.items()):
        if not (folder / name).is_file():
            raise InputError(f"its shard {name} is missing")
        if os.path.getsize(folder / name) < size:
            raise InputError(f"its shard {name} is cut short")
    return {name: tuple(tensor.size) for name, tensor in metadata.state_dict_metadata.items()}


def join(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the whole tensors whose names begin with `prefix`, on the CPU, by the rest of their names.

    Raises `InputError` where a part of one is missing or damaged.
    """
    try:
        names = [name for name in tensor_shapes(folder) if name.startswith(prefix)]
        metadata = _read_metadata(folder / METADATA).state_dict_metadata
        whole = {name: torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype) for name in names}
        read_shards(whole, folder, no_dist=True)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    return {name.removeprefix(prefix): tensor for name, tensor in whole.items()}


def _reason(error: CheckpointException) -> str:
    """What went wrong in the first process where something did, on one line."""
    return " ".join(str(next(iter(error.failures.values()))[0]).split())[:200]


class _Unpickler(pickle.Unpickler):
    """Reads what torch's metadata are made of, and runs nothing else."""

    def find_class(self, module: str, name: str):
        if module.startswith("pathlib"):  # where the folder was when it was written
            return PurePath
        if (
            module in MODULES
            or (module, name) in CLASSES
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


class _Reader(checkpoint.FileSystemReader):
    def read_metadata(self, *args, **kwargs) -> Metadata:
        return _read_metadata(Path(str(self.path)) / METADATA)


def _read_metadata(path: Path) -> Metadata:
    """Raises `InputError` where the file is none of torch's."""
    try:
        with open(path, "rb") as file:
            return _Unpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError, IndexError, TypeError):
        raise InputError(f"it is damaged ({path.name})") from None
