"""One door to every preference data set: an embedded corpus, a local file or folder, or a name on the hub."""

import random
from collections import Counter
from dataclasses import replace

import datasets

from marlhf_lite.tasks.paper_datasets import HUB, form_of
from marlhf_lite.tasks.sources import find_rows
from marlhf_lite.tasks.splits import Task, split_rows
from marlhf_lite.tasks.templates import Form, columns_of, to_preferences
from marlhf_lite.tasks.tiny_tldr.corpus import EMBEDDED
from marlhf_lite.utils.errors import InputError


def load_task(
    dataset: str,
    *,
    size: int | None = None,
    seed: int = 1234,
    bad_rows: str = "error",
    test_fraction: float | None = None,
    streaming: bool = False,
) -> Task:
    """Load, check and split the data of a task (paper, Appendix B.1 and B.2).

    `dataset` is the name of an embedded corpus; else a local file (see `read_rows`) or a folder that
    `datasets.load_dataset` or `save_to_disk` knows; else a name on the hub, `owner/name`. Columns are those that
    `to_preferences` takes, or those of one of the paper's data sets (`marlhf_lite.tasks.paper_datasets`), which also
    sets the shares of the parts. A split called test (validation, valid) becomes the test part, else `test_fraction`
    (a share, or a number of rows; default 0.1, for WebGPT 0.05) is held out. `size` is how many rows to use in all,
    drawn by `seed` from the good ones. `streaming` reads a hub name or a folder of files only until it has `size`
    rows, in an order drawn by `seed` (see `Stream`), and then counts what it has read.

    `counts`: `read`, `kept` and the reasons of `to_preferences`; `beyond_size` and `prompt_in_test`, kept rows that
    were not used; and the size of each part. Raises `InputError` for every fault of the name, the file or the rows.
    """
    if size is not None and size < 1:
        raise InputError(f"--size {size}: give a number of rows from 1 up")
    if streaming and size is None:
        raise InputError("--streaming: it reads on until it has --size rows: give --size")
    if dataset in EMBEDDED:
        return EMBEDDED[dataset](size, seed)
    rows, test = find_rows(dataset, list(EMBEDDED), seed if streaming else None)
    form = HUB[dataset].form if dataset in HUB else form_of(columns_of(rows))
    share = form.test_fraction if test_fraction is None else test_fraction
    limit, test_limit = _limits(size, share, test is not None) if streaming else (None, None)
    rows, counts = to_preferences(_wanted(rows, form), dataset, bad_rows, form, limit)
    if test is not None:
        form = replace(form, convert=form.convert_test or form.convert)
        test, test_counts = to_preferences(_wanted(test, form), f"{dataset} (test)", bad_rows, form, test_limit)
        counts = Counter(counts) + Counter(test_counts)
    return _split(dataset, form.fractions, share, size, seed, rows, test, counts)


def _split(name: str, fractions, test_fraction, size, seed, rows, test, counts) -> Task:
    rows, test = _cut(rows, test, size, seed, test_fraction)
    used = len(rows) + len(test or ())
    try:
        splits = split_rows(rows, seed, fractions, test_fraction, test)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    sizes = {part: len(split) for part, split in splits.items()}
    unused = {"beyond_size": counts["kept"] - used, "prompt_in_test": used - sum(sizes.values())}
    return Task(name, splits, None, dict(counts) | unused | sizes)


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
        test = _draw(test, _test_size(size, test_fraction), seed)
        size = max(size - len(test), 0)
    return _draw(pairs, size, seed), test


def _draw(rows: list[dict], size: int, seed: int) -> list[dict]:
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return rows[:size]


def _limits(size: int, test_fraction: float, test_apart: bool) -> tuple[int, int]:
    """How many rows `_cut` will want, of those for training and of the test set."""
    test = _test_size(size, test_fraction) if test_apart else 0
    return max(size - test, 1), test


def _test_size(size: int, test_fraction: float) -> int:
    return max(round(size * test_fraction) if test_fraction < 1 else int(test_fraction), 1)


def _wanted(rows, form: Form):
    """A data set as a list of rows, without columns the form leaves out: WebGPT's tokens alone take gigabytes."""
    if not isinstance(rows, datasets.Dataset) or not set(form.columns) <= set(rows.column_names):
        return rows
    return rows.select_columns(list(form.columns)).to_list()
