"""Load the preference data of a task: an embedded corpus, a local file or folder, or a data set on the hub."""

import difflib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
from tqdm.auto import tqdm

from marlhf_lite.tasks.embedded import EMBEDDED, load_embedded
from marlhf_lite.tasks.files import SUFFIXES, read_file
from marlhf_lite.tasks.paper_datasets import HUB, form_of
from marlhf_lite.tasks.splits import Task, check_part, draw, make_task
from marlhf_lite.tasks.templates import Form, Write, columns_of, to_preferences
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.utils.errors import InputError, one_line

SHUFFLE_BUFFER = 1000  # rows of a stream that are read before the first one is used
CHOICES = (
    f"give an embedded corpus ({', '.join(EMBEDDED)}), a local file or folder (such as ./pairs.jsonl), "
    "or a name on the hub (owner/name; needs the network)"
)


def load_task(
    dataset: str,
    *,
    size: int | None = None,
    seed: int = 1234,
    bad_rows: str = "error",
    streaming: bool = False,
    template: str = "paper",
    part: str = "",
    chat: Write | None = None,
) -> Task:
    """Load, check and split the data of a task (paper, Appendix B.1 and B.2).

    Args:
        dataset: the name of an embedded corpus, a local file (one of `SUFFIXES`), a folder that
            `datasets.load_dataset` or `save_to_disk` knows, or a name on the hub (`owner/name`). Its columns are those
            that `to_preferences` takes, or those of one of the paper's data sets (`paper_datasets`). Where no split is
            called test, validation or valid, 10 % of the rows are held out, and 5 % for WebGPT.
        size: the number of rows to use in all, drawn by `seed` from the good ones; None uses all. Embedded rows are
            in random order: the first ones are used.
        bad_rows, template: see `to_preferences`, and the prompts of TL;DR and WebGPT in `templates`.
        streaming: read a hub name or a folder of files only until it has `size` rows, in an order drawn by `seed`.
        part: rows of another kind that become the test part alone, such as TL;DR's news articles, `cnn_dm`.
        chat: the chat template that writes rows of messages (`chats.chat_writer`); None writes them as transcripts.

    `Task.counts` has `read`, `kept`, the reasons of `to_preferences`, the size of each part, and two reasons for rows
    that were kept but not used: `beyond_size` and `prompt_in_test`. Raises `InputError` for every fault.
    """
    if streaming and size is None:
        raise InputError("--dataset_streaming: it reads until it has --size rows: give --size")
    if dataset in EMBEDDED:
        return load_embedded(dataset, size, seed, part)
    # 1. Where the rows are, their form, and what writes their prompts.
    rows, test = _find_rows(dataset, seed if streaming else None)
    form = HUB[dataset][0] if dataset in HUB else form_of(columns_of(rows))
    chats = chat is not None and _has_chats(next(iter(rows), {}))
    check_part(dataset, part, form.parts)
    # 2. How many of them. A separate test set gives as many as would be held out without it.
    held_out = None if size is None else max(round(size * form.test_fraction), 1)
    train_size = None if size is None else max(size - held_out, 1) if test is not None else size

    # 3. Convert them to the columns of a task.
    def read(rows: Iterable[dict], name: str, convert: Callable, limit: int | None) -> tuple[list[dict], Counter]:
        source = f"{dataset}{' (streamed)' * streaming}{name}"
        to_row = replace(form, convert=partial(convert, template=chat if chats else template))
        return to_preferences(_wanted(rows, form), source, bad_rows, to_row, limit if streaming else None)

    others = rows if test is None else test
    rows, counts = read(rows, "", form.convert, train_size)
    if test is not None:
        test, test_counts = read(test, " (test)", form.convert_test or form.convert, held_out)
        test, counts = (test if size is None else draw(test, held_out, seed)), counts + test_counts
    # 4. Split them. A part has rows that `convert` drops, and becomes the test part.
    rows = rows if size is None else draw(rows, max(size - len(test or ()), 0), seed)
    shares = {"fractions": form.fractions, "test_fraction": form.test_fraction}
    task = replace(make_task(dataset, rows, seed, counts=counts, test=test, **shares), chats=chats)
    if part:
        of_part, _ = read(others, f" ({part})", form.parts[part], held_out)
        _replace_test(task, part, draw(of_part, held_out, seed))
    return task


def _replace_test(task: Task, part: str, rows: list[dict]) -> None:
    task.splits["test"], task.counts["test"] = datasets.Dataset.from_list(rows), len(rows)
    task.counts.pop(part, None)


def _has_chats(row: dict) -> bool:
    return isinstance(row.get("chosen", row.get("prompt")), list)


def _wanted(rows, form: Form):
    """Return a data set as a list of rows without the columns that the form does not use: WebGPT's take gigabytes."""
    if not isinstance(rows, datasets.Dataset) or not set(form.columns) <= set(rows.column_names):
        return rows
    return rows.select_columns(list(form.columns)).to_list()


def drop_long_prompts(split: datasets.Dataset, tokenizer, max_tokens: int) -> tuple[datasets.Dataset, int]:
    """Drop prompts of more than `max_tokens` tokens, special tokens included; return the rest and the number dropped.

    Raises `InputError` where no row is left.
    """
    prompts, kept = list(split["prompt"]), []
    for start in range(0, len(prompts), 1000):
        ids = encode_prompts(tokenizer, prompts[start : start + 1000])
        kept += [start + i for i, row in enumerate(ids) if len(row) <= max_tokens]
    if prompts and not kept:
        raise InputError(
            f"--max_prompt_length {max_tokens}: all {len(prompts)} prompts are longer: raise it, or use shorter prompts"
        )
    dropped = len(prompts) - len(kept)
    return (split.select(kept) if dropped else split), dropped


# Where the rows are


def _find_rows(dataset: str, stream_seed: int | None) -> tuple[Iterable[dict], Iterable[dict] | None]:
    """Return the rows of `dataset`, and those of its test set or None. With a seed they are streamed; files never."""
    path = Path(os.path.expanduser(dataset))
    if dataset and os.path.isdir(path):  # os.path takes a name of any length; Path's own methods may raise
        if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            return _load(f"{path} (a folder)", datasets.load_from_disk, str(path), None)
        return _load(f"{path} (a folder)", datasets.load_dataset, str(path), stream_seed)
    looks_local = dataset.startswith(("/", ".", "~")) or dataset.lower().endswith(SUFFIXES)
    if dataset and (looks_local or os.path.exists(path)):
        return read_file(path), None
    if dataset.count("/") != 1 or not all(dataset.split("/")):
        close = difflib.get_close_matches(dataset, [*EMBEDDED, *HUB], n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"--dataset {dataset}: unknown: {hint}{CHOICES}")
    arguments = HUB[dataset][1] if dataset in HUB else {}
    return _load(dataset, datasets.load_dataset, dataset, stream_seed, **arguments)


def _load(source: str, load: Callable, name: str, stream_seed: int | None, **arguments):
    if stream_seed is not None:
        arguments["streaming"] = True
    try:
        loaded = load(name, **arguments)
        if stream_seed is not None:
            loaded = {part: Stream(split, source, stream_seed) for part, split in loaded.items()}
    except Exception as error:
        cause = one_line(error.__cause__ or error)  # datasets wraps the cause in a general error
        raise InputError(f"--dataset {source}: cannot be loaded ({cause}): {CHOICES}") from None
    if isinstance(loaded, datasets.Dataset):
        return loaded, None
    if "train" not in loaded:
        raise InputError(f"--dataset {source}: no split named train, found {', '.join(loaded)}: name one of them train")
    return loaded["train"], next((loaded[part] for part in ("test", "validation", "valid") if part in loaded), None)


class Stream:
    """Iterate over rows that are read as they are used, in an order drawn by `seed`.

    Parquet row groups come in random order, one at a time; rows are shuffled in a buffer of `SHUFFLE_BUFFER`.
    """

    def __init__(self, split: datasets.IterableDataset, source: str, seed: int):
        self.source = source
        self.column_names = split.column_names or list(next(iter(split), {}))
        self._rows = split.reshard().shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER, max_buffer_input_shards=1)

    def __iter__(self) -> Iterator[dict]:
        try:
            yield from tqdm(self._rows, desc=self.source, unit=" rows", leave=False)
        except Exception as error:
            hint = "run it again, or without --dataset_streaming"
            raise InputError(
                f"--dataset {self.source}: cannot be read ({one_line(error.__cause__ or error)}): {hint}"
            ) from None
