"""Where the rows of a data set are: a local file or folder, or the hub."""

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import datasets
from tqdm.auto import tqdm

from marlhf_lite.tasks.files import known_suffix, read_rows
from marlhf_lite.tasks.paper_datasets import HUB
from marlhf_lite.utils.errors import InputError

BUFFER = 1000  # rows a stream is shuffled through; so many are read before the first is given out
_TEST_SPLITS = ("test", "validation", "valid")
# Row groups: datasets 5 would read ten at a time; 4 reads one, and in order.
_ONE_AT_A_TIME = (
    {"max_buffer_input_shards": 1}
    if "max_buffer_input_shards" in inspect.signature(datasets.IterableDataset.shuffle).parameters
    else {}
)
_PATH_STARTS = ("/", "./", "../", "~", ".\\", "..\\")


class Stream:
    """Rows of a data set that is read as it is used, in an order drawn by `seed`.

    Parquet is read by row groups in random order, one at a time, and rows are shuffled through a buffer of `BUFFER`.
    """

    def __init__(self, split: datasets.IterableDataset, source: str, seed: int):
        self.source = source
        self.column_names = split.column_names or list(next(iter(split), {}))
        self._rows = split.reshard().shuffle(seed=seed, buffer_size=BUFFER, **_ONE_AT_A_TIME)

    def place(self, index: int) -> str:
        return f"row {index + 1} of the stream"

    def __iter__(self) -> Iterator[dict]:
        rows = iter(tqdm(self._rows, desc=self.source, unit=" rows", leave=False))
        while True:
            try:
                row = next(rows, None)
            except Exception as error:
                mend = "run it again, or without --streaming"
                raise InputError(f"--dataset {self.source}: cannot be read ({_reason(error)}): {mend}") from None
            if row is None:
                return
            yield row


Split = Iterable[dict]  # Rows, a datasets.Dataset or a Stream


def find_rows(dataset: str, embedded: list[str], stream_seed: int | None = None) -> tuple[Split, Split | None]:
    """`(rows, those of the test set where it is apart)` of what `load_task` calls `dataset`; with a seed, streamed.

    A single file is read whole all the same. `embedded` are the names that an error message offers. Raises `InputError`
    where there is no such data.
    """
    path = Path(os.path.expanduser(dataset))
    if dataset and os.path.isdir(path):
        return _read_folder(path, embedded, stream_seed)
    if (dataset and os.path.exists(path)) or known_suffix(dataset) or dataset.startswith(_PATH_STARTS):
        return read_rows(dataset), None
    if dataset.count("/") != 1 or not all(dataset.split("/")):
        close = difflib.get_close_matches(dataset, [*embedded, *HUB], n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"--dataset {dataset}: unknown: {meant}{_choices(embedded)}")
    arguments = HUB[dataset].arguments if dataset in HUB else {}
    return _load(dataset, dataset, embedded, datasets.load_dataset, arguments, stream_seed)


def _read_folder(path: Path, embedded: list[str], stream_seed: int | None) -> tuple[Split, Split | None]:
    source = f"{path} (a folder)"
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return _load(str(path), source, embedded, datasets.load_from_disk, {}, None)
    return _load(str(path), source, embedded, datasets.load_dataset, {}, stream_seed)


def _load(
    name: str, source: str, embedded: list[str], load: Callable, arguments: dict, stream_seed: int | None
) -> tuple[Split, Split | None]:
    streaming = {} if stream_seed is None else {"streaming": True}
    try:
        loaded = load(name, **arguments, **streaming)
        if streaming:
            loaded = {part: Stream(split, source, stream_seed) for part, split in loaded.items()}
    except Exception as error:
        raise InputError(f"--dataset {source}: cannot be loaded ({_reason(error)}): {_choices(embedded)}") from None
    if isinstance(loaded, datasets.Dataset):
        return loaded, None
    if "train" not in loaded:
        raise InputError(f"--dataset {source}: no split named train, found {', '.join(loaded)}: name one of them train")
    return loaded["train"], next((loaded[part] for part in _TEST_SPLITS if part in loaded), None)


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error  # datasets wraps what happened in a general error
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:300]


def _choices(embedded: list[str]) -> str:
    return (
        f"give an embedded corpus ({', '.join(embedded)}), a local file or folder (such as ./pairs.jsonl), "
        f"or a name on the hub (owner/name; needs the network)"
    )
