"""One door to every preference data set: an embedded corpus, a local file or folder, or a name on the hub."""

import difflib
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import datasets

from marlhf_lite.errors import InputError
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.files import known_suffix, read_rows
from marlhf_lite.tasks.split import Task, split_rows
from marlhf_lite.tasks.templates import to_preferences

_TEST_SPLITS = ("test", "validation", "valid")
_PATH_STARTS = ("/", "./", "../", "~", ".\\", "..\\")


def load_task(
    dataset: str, *, size: int | None = None, seed: int = 1234, bad_rows: str = "error", test_fraction: float = 0.1
) -> Task:
    """Load, check and split preference data (paper, Appendix B.1 and B.2).

    `dataset` is the name of an embedded corpus; else a local file (see `read_rows`) or a folder that
    `datasets.load_dataset` or `save_to_disk` knows; else a name on the hub, `owner/name`. Columns are those that
    `to_preferences` takes. A split called test (validation, valid) becomes the test part, else `test_fraction` (a
    share, or a number of rows) is held out. `size` is how many rows to use in all, drawn by `seed` from the good ones.

    `counts`: `read`, `kept` and the reasons of `to_preferences`; `beyond_size` and `prompt_in_test`, kept rows that
    were not used; and the size of each part. Raises `InputError` for every fault of the name, the file or the rows.
    """
    if size is not None and size < 1:
        raise InputError(f"--size {size}: give a number of rows from 1 up")
    if dataset in EMBEDDED:
        return EMBEDDED[dataset](size, seed)
    train, test = _read(dataset, list(EMBEDDED))
    pairs, counts = to_preferences(train, dataset, bad_rows)
    test_pairs = None
    if test is not None:
        test_pairs, test_counts = to_preferences(test, f"{dataset} (test)", bad_rows)
        counts = Counter(counts) + Counter(test_counts)
    kept = counts["kept"]
    pairs, test_pairs = _cut(pairs, test_pairs, size, seed, test_fraction)
    used = len(pairs) + len(test_pairs or ())
    try:
        splits = split_rows(pairs, seed, test_fraction=test_fraction, test=test_pairs)
    except InputError as error:
        raise InputError(f"{dataset}: {error}") from None
    sizes = {part: len(split) for part, split in splits.items()}
    unused = {"beyond_size": kept - used, "prompt_in_test": used - sum(sizes.values())}
    return Task(dataset, splits, None, dict(counts) | unused | sizes)


def drop_long_prompts(split: datasets.Dataset, tokenizer, max_tokens: int) -> tuple[datasets.Dataset, int]:
    """`(split without prompts of more than max_tokens tokens, how many were dropped)`.

    Tokens are counted as `tokenizer(prompts)` gives them, special tokens included. Raises `InputError` where no row is
    left.
    """
    prompts, keep = list(split["prompt"]), []
    for start in range(0, len(prompts), 1000):
        ids = tokenizer(prompts[start : start + 1000])["input_ids"]
        keep += [start + i for i, row in enumerate(ids) if len(row) <= max_tokens]
    if prompts and not keep:
        raise InputError(
            f"--max_prompt_length {max_tokens}: all {len(prompts)} prompts are longer: raise it, or use shorter prompts"
        )
    dropped = len(prompts) - len(keep)
    return (split.select(keep) if dropped else split), dropped


def _cut(pairs: list[dict], test: list[dict] | None, size: int | None, seed: int, test_fraction: float):
    """Draw `size` rows in all. A separate test set gets the same number of them that would be held out without it."""
    if size is None:
        return pairs, test
    if test is not None:
        share = round(size * test_fraction) if test_fraction < 1 else int(test_fraction)
        test = _draw(test, max(share, 1), seed)
        size = max(size - len(test), 0)
    return _draw(pairs, size, seed), test


def _draw(rows: list[dict], size: int, seed: int) -> list[dict]:
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return rows[:size]


# Where the rows are


def _read(dataset: str, embedded: list[str]) -> tuple[list[dict], list[dict] | None]:
    """Rows, and those of the test set where it is apart."""
    path = Path(os.path.expanduser(dataset))
    if dataset and os.path.isdir(path):
        return _read_folder(path, embedded)
    if (dataset and os.path.exists(path)) or known_suffix(dataset) or dataset.startswith(_PATH_STARTS):
        return read_rows(dataset), None
    if dataset.count("/") != 1 or not all(dataset.split("/")):
        close = difflib.get_close_matches(dataset, embedded, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"--dataset {dataset}: unknown: {meant}{_choices(embedded)}")
    return _load(dataset, dataset, embedded, datasets.load_dataset)


def _read_folder(path: Path, embedded: list[str]) -> tuple[list[dict], list[dict] | None]:
    saved = any((path / name).exists() for name in ("dataset_dict.json", "state.json"))
    return _load(str(path), f"{path} (a folder)", embedded, datasets.load_from_disk if saved else datasets.load_dataset)


def _load(name: str, source: str, embedded: list[str], load: Callable) -> tuple[list[dict], list[dict] | None]:
    try:
        loaded = load(name)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"--dataset {source}: cannot be loaded ({reason}): {_choices(embedded)}") from None
    if isinstance(loaded, datasets.Dataset):
        return loaded.to_list(), None
    if "train" not in loaded:
        raise InputError(f"--dataset {source}: no split named train, found {', '.join(loaded)}: name one of them train")
    test = next((loaded[part].to_list() for part in _TEST_SPLITS if part in loaded), None)
    return loaded["train"].to_list(), test


def _choices(embedded: list[str]) -> str:
    return (
        f"give an embedded corpus ({', '.join(embedded)}), a local file or folder (such as ./pairs.jsonl), "
        f"or a name on the hub (owner/name; needs the network)"
    )
