"""Folders of tensors that several processes wrote, each its part, by torch.distributed.checkpoint.

A folder holds at least one file per process (`__0_0.distcp`), and `.metadata`, which says where each part of each
tensor is. Any number of processes reads it, each its own part.

A folder may come from somebody who wants to run code here. Torch's own reader would: `.metadata` is a pickle, and an
entry of bytes is another one. So there are two doors. `read_metadata` builds the classes of a closed list and nothing
else, and then requires that every entry is a tensor whose parts are in files of this folder. `read_shards` uses a
planner that refuses entries of bytes. Accelerate reads the checkpoints of SFT, reward model and DPO itself, and stores
an optimizer's numbers as entries of bytes: `torch_reads_no_code` puts both doors into torch's reader for that time.
"""

import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.shard_names import METADATA


def _classes_of_metadata() -> dict[tuple[str, str], object]:
    """Return everything that torch's metadata of tensors consist of, by the module and the name in the pickle.

    The reader of metadata builds these classes and calls these functions, and nothing else.
    """
    classes = {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    }
    for kind in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.TensorProperties,
        metadata.ChunkStorageMetadata,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
    ):
        classes["torch.distributed.checkpoint.metadata", kind.__name__] = kind
    # Metadata hold the folder in which they were written, as a path of the system that wrote them. A path of another
    # system cannot be made here, so all become a plain `PurePath`. Python 3.13 has these classes in another module.
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            classes[module, name] = PurePath
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            classes["torch", name] = value
    return classes


CLASSES = _classes_of_metadata()
# A file that torch did not write can lead the pickle, and the checks of its result, into any of these.
ERRORS_OF_OTHER_FILES = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    MemoryError,
)


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

    Raises `InputError` if a shard is damaged, or holds anything but tensors.
    """
    try:
        checkpoint.load(
            dict(tensors),
            storage_reader=_Reader(str(folder)),
            planner=_TensorsOnly(),
            no_dist=no_dist,
        )
    except CheckpointException as error:
        raise InputError(f"it is damaged ({_reason(error)})") from None


@contextmanager
def torch_reads_no_code() -> Iterator[None]:
    """Inside this block torch's own reader of shards runs no code from a folder.

    Two methods of torch's classes are replaced for that time: one that would unpickle the metadata of a folder, and one
    that would unpickle an entry of bytes. Such an entry may still hold tensors, numbers, texts and lists.
    """
    reader = checkpoint.FileSystemReader
    planner = DefaultLoadPlanner
    read_pickle = reader.read_metadata
    load_pickle = planner.load_bytes

    def read(self, *args, **kwargs) -> Metadata:
        return read_metadata(Path(str(self.path)), allows_bytes=True)

    def load_plain_values(self, read_item, value) -> None:
        # As torch's own method does: the planner knows where in the nested state an entry belongs.
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))

    reader.read_metadata = read
    planner.load_bytes = load_plain_values
    try:
        yield
    finally:
        reader.read_metadata = read_pickle
        planner.load_bytes = load_pickle


def read_metadata(folder: Path, allows_bytes: bool = False) -> Metadata:
    """Read the metadata, which say where each tensor of a folder is. With `allows_bytes` entries of bytes may be there.

    Raises `InputError` if torch did not write the file, or if it describes anything but tensors in this folder.
    """
    try:
        with open(folder / METADATA, "rb") as file:
            found = _Unpickler(file).load()
        _check_entries(found, folder, allows_bytes)
    except ERRORS_OF_OTHER_FILES:
        raise InputError(f"it is damaged ({METADATA})") from None
    return found


class _Unpickler(pickle.Unpickler):
    """Builds the classes of `CLASSES`. Names are looked up in that table alone, so no dotted name leads elsewhere."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return CLASSES[module, name]


class _Reader(checkpoint.FileSystemReader):
    """Torch's reader of shards, with metadata that run no code."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return read_metadata(Path(str(self.path)))


class _TensorsOnly(DefaultLoadPlanner):
    """Torch's plan of who reads what; it refuses entries of bytes, which torch would unpickle."""

    def load_bytes(self, read_item, value) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


def _check_entries(found: Metadata, folder: Path, allows_bytes: bool) -> None:
    """Raise `ValueError` unless metadata describe tensors whose parts fill them and are in files of the folder.

    Entries of bytes are permitted with `allows_bytes`. Types are compared exactly: torch asks `isinstance`, and acts on
    what a subclass says, which could be made to harm.
    """
    _require(type(found) is Metadata)
    size_on_disk = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    for name, entry in found.state_dict_metadata.items():
        if allows_bytes and type(entry) is BytesStorageMetadata:
            continue
        _require(type(name) is str and type(entry) is TensorStorageMetadata)
        _require(type(entry.size) is torch.Size and type(entry.properties.dtype) is torch.dtype)
        # A tensor with gaps would keep whatever memory holds. One larger than all files could not be filled from them,
        # and its memory would be taken before anybody noticed.
        count = math.prod(entry.size)
        _require(sum(math.prod(chunk.sizes) for chunk in entry.chunks) == count)
        _require(count * entry.properties.dtype.itemsize <= size_on_disk)
    for place in found.storage_data.values():
        _require(type(place) is filesystem._StorageInfo and not place.transform_descriptors)
        # The path may lead out of the folder, by `..` or by a link.
        file = folder / place.relative_path
        _require(file.resolve().parent == folder.resolve())


def _require(is_right: bool) -> None:
    if not is_right:
        raise ValueError("not metadata of tensors")


def _reason(error: CheckpointException) -> str:
    """Return what went wrong in the first process that failed, on one line of at most 200 characters."""
    return " ".join(str(next(iter(error.failures.values()))[0]).split())[:200]
