"""Load the data of a task: an embedded corpus, local files, a folder, or a data set on the hub."""

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import datasets
from datasets.packaged_modules.csv.csv import CsvConfig
from datasets.packaged_modules.json.json import JsonConfig

from marlhf_lite.tasks.chats import Chat
from marlhf_lite.tasks.embedded import EMBEDDED, load_embedded
from marlhf_lite.tasks.files import SUFFIXES, read_file
from marlhf_lite.tasks.paper_datasets import HUB, form_of
from marlhf_lite.tasks.prompts import RowColumns
from marlhf_lite.tasks.shapes import ONLY_TEXTS, columns_of, rename, to_preferences
from marlhf_lite.tasks.splits import Task, check_part, draw, make_task
from marlhf_lite.tasks.templates import Form
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.utils.errors import InputError, did_you_mean, one_line

MESSAGE = ("role", "content", "from", "value")  # the keys of a message that are read
FIRST = 1000  # rows that show what the others are like
CHOICES = (
    f"give an embedded corpus ({', '.join(EMBEDDED)}), a local file or folder (such as ./pairs.jsonl), "
    "or a name on the hub (owner/name; needs the network), with --dataset_config if it has several configurations"
)


def load_task(
    dataset: str,
    *,
    size: int | None = None,
    seed: int = 1234,
    bad_rows: str = "error",
    template: str = "paper",
    part: str = "",
    chat: Chat | None = None,
    asked: Sequence[RowColumns] = (),
    **where: str,
) -> Task:
    """Load, check and split the data of a task (paper, Appendix B.1 and B.2).

    Args:
        dataset: an embedded corpus, a local file (one of `SUFFIXES`), a pattern of files, an address, a folder that
            `datasets` knows, or a name on the hub, with the columns of `shapes.SHAPES` or `paper_datasets`. Without a
            split called test, validation or valid, 10 % of the rows are held out, and 5 % for WebGPT.
        size: the number of rows in all, drawn by `seed` from the good ones (of embedded data the first); None: all.
        bad_rows, template: see `to_preferences`, and the prompts of TL;DR and WebGPT in `templates`.
        part: rows of another kind that become the whole test part, such as TL;DR's news articles, `cnn_dm`.
        chat: the chat template that writes rows of messages (`chats.chat_writer`); None writes them as transcripts.
        asked: functions that take columns of the row; see `Prompt`.
        where: `dataset_config`, `data_dir`, the `split` to train on, your names of `columns` (`shapes.rename`).

    `Task.counts` has `read`, `kept`, the reasons of `to_preferences`, the size of each part, and two reasons for rows
    that were kept but not used: `beyond_size` and `prompt_in_test`. Raises `InputError` for every fault.
    """
    for_texts = "text" if chat and chat.choice == "text" else ""
    if dataset in EMBEDDED:
        _refuse(where | {"chat_template": for_texts}, f"{dataset} is embedded and")
        for one in asked:
            one.choose(())  # rows of embedded data have no other columns
        return load_embedded(dataset, size, seed, part)
    # 1. Find the rows, their form, and what writes their prompts.
    rows, test, splits = find_rows(dataset, **where)
    has_own = dataset in HUB and not any(where.values())  # else the user says where the rows are
    form = HUB[dataset][0] if has_own else form_of(columns_of(rows), where.get("columns", ""))
    if not form.name:
        _refuse({"chat_template": for_texts}, f"{dataset}, whose prompts have a fixed form,")
    chats = bool(chat and form.name) and (bool(for_texts) or _has_chats(rows, form))
    check_part(dataset, part, form.parts)
    form = _with_columns(form, rows, asked)
    # 2. Count the test rows: a separate test set gives as many as would be held out without it.
    held_out = None if size is None else max(round(size * form.test_fraction), 1)
    # 3. Convert them to the columns of a task.
    template = chat if chats else ONLY_TEXTS if chat and form.name else template
    read = partial(_convert, form=form, template=template, bad_rows=bad_rows)
    others, unused = rows if test is None else test, _unused(rows, form, chats)
    rows, counts = read(rows, dataset, form.convert)
    if test is not None:
        test, test_counts = read(test, f"{dataset} (test)", form.convert_test or form.convert)
        test, counts = (test if size is None else draw(test, held_out, seed)), counts + test_counts
    # 4. Split them. `--part` takes rows that `convert` drops as the test part.
    rows = rows if size is None else draw(rows, max(size - len(test or ()), 0), seed)
    shares = {"fractions": form.fractions, "test_fraction": form.test_fraction}
    task = make_task(dataset, rows, seed, counts=counts, test=test, **shares)
    if part:
        of_part = draw(read(others, f"{dataset} ({part})", form.parts[part])[0], held_out, seed)
        task.splits["test"], task.counts["test"] = datasets.Dataset.from_list(of_part), len(of_part)
        task.counts.pop(part, None)
    told = {
        "chats": chats,
        "said": chat.said if chats else {},
        "unused": unused,
        "unused_splits": tuple(splits),
    }
    return replace(task, shape=form.name, **told)


def _with_columns(form: Form, rows: Iterable[dict], asked: Sequence[RowColumns]) -> Form:
    """Return the form with the columns of the rows that are asked for. Raises `InputError` if one is missing."""
    chosen = [one.choose(columns_of(rows), read=(*form.columns, *form.optional)) for one in asked]
    if not any(chosen):
        return form
    row = tuple(dict.fromkeys(chain(*chosen)))
    return replace(
        form,
        row=row,
        needed=tuple(name for name in row if any(name in one.needed for one in asked)),
    )


def _refuse(where: Mapping[str, str], what: str) -> None:
    for name, value in where.items():
        if value:
            raise InputError(f"--{name} {value}: {what} has none: leave it out")


def _convert(rows, source: str, convert: Callable, *, form: Form, template, bad_rows: str):
    """Convert rows; of a data set it reads only the columns of the form: WebGPT's others take gigabytes."""
    if isinstance(rows, datasets.Dataset) and set(form.columns) <= set(rows.column_names):
        used = {*form.columns, *form.optional, *(form.row or ())}
        rows = rows.select_columns(
            [column for column in rows.column_names if column in used]
        ).to_list()
    return to_preferences(
        rows, source, bad_rows, replace(form, convert=partial(convert, template=template))
    )


def _unused(rows: Iterable[dict], form: Form, chats: bool) -> tuple[str, ...]:
    """Return the columns, and the keys of messages, that nothing reads; `system` without a chat template is one."""
    if not form.name:
        return ()
    used = {*form.columns, *form.optional, *(form.row or ())} - ({"system"} if not chats else set())
    names = [str(name) for name in columns_of(rows) if name not in used and str(name).strip()]
    cells = (row.get(column) for row in islice(rows, FIRST) for column in form.columns)
    turns = (
        turn for cell in cells if isinstance(cell, list) for turn in cell if isinstance(turn, dict)
    )
    keys = {
        key
        for turn in turns
        for key, value in turn.items()
        if key not in MESSAGE and value not in (None, [])
    }
    return (*names, *(f"{key} of messages" for key in sorted(keys)))


def _has_chats(rows: Iterable[dict], form: Form) -> bool:
    """Return whether most rows have messages: one odd row does not decide for all."""
    first = list(islice(rows, FIRST))
    chats = sum(
        any(isinstance(row.get(column), list | dict) for column in form.columns) for row in first
    )
    return 2 * chats > len(first)


def drop_long_prompts(
    split: datasets.Dataset, tokenizer, max_tokens: int
) -> tuple[datasets.Dataset, int]:
    """Drop prompts of more than `max_tokens` tokens, special tokens included; return the rest and the number dropped.

    Raises `InputError` if no row is left.
    """
    ids = (row for part in split.iter(1000) for row in encode_prompts(tokenizer, part["prompt"]))
    kept = [i for i, row in enumerate(ids) if len(row) <= max_tokens]
    if len(split) and not kept:
        raise InputError(
            f"--max_prompt_length {max_tokens}: all {len(split)} prompts are longer: raise it or cut them"
        )
    dropped = len(split) - len(kept)
    return (split.select(kept) if dropped else split), dropped


# Where the rows are


def find_rows(
    dataset: str, columns: str = "", **where: str
) -> tuple[Iterable[dict], Iterable[dict] | None, list[str]]:
    """Return the rows of `dataset`, those of its test set or None, and the names of splits that were not asked for."""
    path = Path(os.path.expanduser(dataset))
    load = partial(_load, dataset, columns, **where)
    # os.path takes a name of any length; Path's own methods may raise
    if dataset and os.path.isdir(path):
        return load(_load_folder, str(path))
    is_address = "://" in dataset
    looks_local = dataset.startswith(("/", ".", "~")) or dataset.lower().endswith(SUFFIXES)
    if dataset and (is_address or looks_local or os.path.exists(path)):
        _refuse(
            {name: value for name, value in where.items() if value != "train"},
            f"{dataset} is a file and",
        )
        files = (
            [path]
            if os.path.exists(path)
            else sorted(glob.glob(str(path), recursive=True)) or [path]
        )
        return (
            rename([*chain(*map(read_file, [dataset] if is_address else files))], columns),
            None,
            [],
        )
    if dataset.count("/") != 1 or not all(dataset.split("/")):
        raise InputError(
            f"--dataset {dataset}: unknown: {did_you_mean(dataset, [*EMBEDDED, *HUB])}{CHOICES}"
        )
    return load(datasets.load_dataset, dataset, **(HUB[dataset][1] if dataset in HUB else {}))


def _load(
    dataset: str,
    names: str,
    load: Callable,
    name: str,
    *,
    split: str = "",
    dataset_config: str = "",
    data_dir: str = "",
    **arguments,
):
    """Return what `find_rows` does; of a split such as train_prefs the test part is test_prefs."""
    is_folder, train = os.path.isdir(name), split or "train"
    shown = f"--dataset {dataset}{' (a folder)' * is_folder}"
    arguments |= {
        key: value for key, value in (("name", dataset_config), ("data_dir", data_dir)) if value
    }
    try:
        loaded = load(name, **arguments)
    except InputError:
        raise
    except Exception as error:
        cause = one_line(error.__cause__ or error)  # datasets wraps the cause in a general error
        fix = (
            "give one file of it, or name a configuration by --dataset_config"
            if is_folder
            else CHOICES
        )
        raise InputError(f"{shown}: cannot be loaded ({cause}): {fix}") from None
    loaded = {"train": loaded} if isinstance(loaded, datasets.Dataset) else loaded
    if train not in loaded:
        fix = "name one by --split, or name one of them train"
        raise InputError(f"{shown}: no split named {train}, found {', '.join(loaded)}: {fix}")
    tests = [train.replace("train", word) for word in ("test", "validation", "valid")]
    test = next((part for part in tests if part in loaded and part != train), None)
    others = [] if split else [part for part in loaded if part not in (train, test)]
    return *(rename(loaded[part], names) if part else None for part in (train, test)), others


def _load_folder(path: str, **arguments) -> Mapping | datasets.Dataset:
    """Load a folder of files, or what `save_to_disk` wrote.

    Files of text are read like a single one: an error names the line, and cells of CSV stay text, also if they say NA
    or 007.
    """
    if any(
        os.path.exists(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json")
    ):
        return datasets.load_from_disk(path, **arguments)
    config = datasets.load_dataset_builder(path, **arguments).config
    if not isinstance(config, CsvConfig | JsonConfig):
        return datasets.load_dataset(path, **arguments)
    return {split: [*chain(*map(read_file, files))] for split, files in config.data_files.items()}
