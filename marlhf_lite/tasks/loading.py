"""Load the data of a task: an embedded corpus, local files, a folder, or a data set on the hub."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import datasets

from marlhf_lite.tasks.chats import Chat
from marlhf_lite.tasks.embedded import EMBEDDED, load_embedded
from marlhf_lite.tasks.messages import MESSAGE, PASSED_ON, THOUGHTS
from marlhf_lite.tasks.prompts import RowColumns
from marlhf_lite.tasks.shapes import ONLY_TEXTS, columns_of, to_preferences
from marlhf_lite.tasks.sources import (
    FIRST,
    Found,
    find_rows,
    form_of_rows,
    has_chats,
    name_of_test,
    place_in_files,
    refuse_where,
)
from marlhf_lite.tasks.splits import Task, check_part, draw, make_task
from marlhf_lite.tasks.templates import Form
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.utils.errors import InputError


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
    found: Found | None = None,
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
        found: the rows of `dataset`, if they have been found already (`sources.find_rows`).
        where: `dataset_config`, `data_dir`, the `split` to train on, your names of `columns` (`shapes.rename`).

    `Task.counts` has `read`, `kept`, the reasons of `to_preferences`, the size of each part, and the reasons for rows
    that were kept but not used: `beyond_size`, `prompt_in_test` and `not_of_part`. Raises `InputError` for every fault.
    """
    # 1. Embedded data are rows of a task already.
    for_texts = "text" if chat and chat.choice == "text" else ""
    if dataset in EMBEDDED:
        refuse_where(where | {"chat_template": for_texts}, f"{dataset} is embedded and")
        for one in asked:
            one.choose(())  # rows of embedded data have no other columns
        return load_embedded(dataset, size, seed, part)

    # 2. Find the rows, their form, and what writes their prompts.
    found = found or find_rows(dataset, **where)
    form = form_of_rows(dataset, found.rows, where)
    if not form.name:
        refuse_where({"chat_template": for_texts}, f"{dataset}, whose prompts have a fixed form,")
    is_written = bool(chat and form.name) and (bool(for_texts) or has_chats(found.rows, form))
    check_part(dataset, part, form.parts)
    form = _with_columns(form, found.rows, asked)
    unused = _unused(found.rows, form, is_written)
    thoughts = 0 if is_written else _count_thoughts(found.rows, form)

    # 3. Convert them to the columns of a task.
    if is_written:
        writer: str | Chat = chat
    elif chat and form.name:
        writer = ONLY_TEXTS
    else:
        writer = template
    read = partial(_convert, form=form, template=writer, bad_rows=bad_rows)
    rows, counts = read(
        found.rows, dataset, form.convert, place_of=partial(place_in_files, found.files)
    )
    test = None
    if found.test is not None:
        test, counts_of_test = read(
            found.test,
            name_of_test(dataset, found),
            form.convert_test or form.convert,
            place_of=partial(place_in_files, found.test_files),
        )
        counts = counts + counts_of_test

    # 4. Count the test rows: a separate test set gives as many as would be held out without it.
    held_out = None if size is None else max(round(size * form.test_fraction), 1)
    if test is not None and size is not None:
        test = draw(test, held_out, seed)
    if size is not None:
        rows = draw(rows, max(size - len(test or ()), 0), seed)

    # 5. Split them. `--part` takes rows that `convert` drops as the test part.
    task = make_task(
        dataset,
        rows,
        seed,
        counts=counts,
        test=test,
        fractions=form.fractions,
        test_fraction=form.test_fraction,
    )
    if part:
        source = found.rows if found.test is None else found.test
        of_part, _ = read(source, f"{dataset} ({part})", form.parts[part])
        task = _with_test_part(task, part, draw(of_part, held_out, seed))
    return replace(
        task,
        shape=form.name,
        chats=is_written,
        said=chat.said if is_written else {},
        unused=unused,
        unused_splits=found.left_out_splits,
        thoughts_dropped=thoughts,
        files=(*found.files, *found.test_files),
        left_out_files=found.left_out_files,
    )


def _with_test_part(task: Task, part: str, rows: Sequence[dict]) -> Task:
    """Return the task with these rows, which were dropped under the name of their part, as its test part."""
    counts = dict(task.counts)
    counts["not_of_part"] = counts["test"]
    counts["test"] = len(rows)
    left = counts.pop(part, 0) - len(rows)
    if left > 0:
        counts[part] = left
    splits = datasets.DatasetDict({**task.splits, "test": datasets.Dataset.from_list(rows)})
    return replace(task, splits=splits, counts=counts)


def _with_columns(form: Form, rows: Iterable[dict], asked: Sequence[RowColumns]) -> Form:
    """Return the form with the columns of the rows that are asked for. Raises `InputError` if one is missing."""
    chosen: dict[str, None] = {}  # in the order of the functions, each once
    for one in asked:
        names = one.choose(columns_of(rows), read=(*form.columns, *form.optional))
        chosen.update(dict.fromkeys(names))
    if not chosen:
        return form
    needed = tuple(name for name in chosen if any(name in one.needed for one in asked))
    return replace(form, row=tuple(chosen), needed=needed)


def _convert(
    rows,
    source: str,
    convert: Callable,
    *,
    form: Form,
    template: str | Chat,
    bad_rows: str,
    place_of: Callable[[int], str] = "row {}".format,
):
    """Convert rows; of a data set it reads only the columns of the form: WebGPT's others take gigabytes."""
    if isinstance(rows, datasets.Dataset) and set(form.columns) <= set(rows.column_names):
        used = {*form.columns, *form.optional, *(form.row or ())}
        read = [column for column in rows.column_names if column in used]
        rows = rows.select_columns(read).to_list()
    form = replace(form, convert=partial(convert, template=template))
    return to_preferences(rows, source, bad_rows, form, place_of)


def _unused(rows: Iterable[dict], form: Form, is_written: bool) -> tuple[str, ...]:
    """Return the columns, and the keys of messages, that nothing reads; `system` without a chat template is one."""
    if not form.name:
        return ()
    used = {*form.columns, *form.optional, *(form.row or ())}
    if not is_written:
        used -= {"system"}
    names = [str(name) for name in columns_of(rows) if name not in used and str(name).strip()]
    read = {*MESSAGE, *(PASSED_ON if is_written else ())}
    keys: set[str] = set()
    for turn in _first_messages(rows, form):
        keys.update(
            key for key, value in turn.items() if key not in read and value not in (None, [])
        )
    return (*names, *(f"{key} of messages" for key in sorted(keys)))


def _count_thoughts(rows: Iterable[dict], form: Form) -> int:
    """Return how many rows have a thought beside a message's content, which only a chat template would write."""
    if not form.name or not isinstance(rows, list):
        return 0
    count = 0
    for row in rows:
        turns = _messages_in(row, form)
        count += any(turn.get(key) for turn in turns for key in THOUGHTS)
    return count


def _first_messages(rows: Iterable[dict], form: Form) -> list[dict]:
    turns = []
    for row in islice(rows, FIRST):
        turns.extend(_messages_in(row, form))
    return turns


def _messages_in(row: Mapping, form: Form) -> list[dict]:
    turns = []
    for column in form.columns:
        cell = row.get(column)
        if isinstance(cell, list):
            turns.extend(turn for turn in cell if isinstance(turn, dict))
    return turns


def drop_long_prompts(
    split: datasets.Dataset, tokenizer, max_tokens: int
) -> tuple[datasets.Dataset, int]:
    """Drop prompts of more than `max_tokens` tokens, special tokens included; return the rest and the number dropped.

    Raises `InputError` if no row is left.
    """
    lengths = []
    for part in split.iter(1000):
        lengths.extend(len(ids) for ids in encode_prompts(tokenizer, part["prompt"]))
    kept = [row for row, length in enumerate(lengths) if length <= max_tokens]
    if len(split) and not kept:
        raise InputError(
            f"--max_prompt_length {max_tokens}: all {len(split)} prompts are longer: raise it or cut them"
        )
    dropped = len(split) - len(kept)
    return (split.select(kept) if dropped else split), dropped
