"""Load the data of a task: an embedded corpus, local files, a folder, or a data set on the hub."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import datasets

from marlhf_lite.tasks.chats import Chat
from marlhf_lite.tasks.embedded import EMBEDDED, load_embedded
from marlhf_lite.tasks.messages import FUNCTION_CALL, MESSAGE, PASSED_ON, THOUGHTS
from marlhf_lite.tasks.prompts import RowColumns
from marlhf_lite.tasks.shapes import ONLY_TEXTS, columns_of, to_preferences
from marlhf_lite.tasks.sources import (
    ENOUGH_ROWS,
    Found,
    find_rows,
    form_of_rows,
    most_rows_have_messages,
    name_of_test,
    place_in_files,
    refuse_options,
)
from marlhf_lite.tasks.splits import Task, check_part_is_known, draw, make_task
from marlhf_lite.tasks.templates import Form
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.utils.errors import InputError

# Options that `load_task` takes by these names.
OPTIONS_OF_ROWS = (
    "size",
    "bad_rows",
    "template",
    "part",
    "dataset_config",
    "data_dir",
    "split",
    "columns",
)


def options_of_rows(options: object) -> dict:
    """Return the options of a command that `load_task` takes by their names."""
    return {name: getattr(options, name) for name in OPTIONS_OF_ROWS}


def load_task(
    dataset: str,
    *,
    size: int | None = None,
    seed: int = 1234,
    bad_rows: str = "error",
    template: str = "paper",
    part: str = "",
    chat: Chat | None = None,
    row_columns: Sequence[RowColumns] = (),
    found: Found | None = None,
    **where: str,
) -> Task:
    """Load, check and split the data of a task (paper, Appendix B.1 and B.2).

    Args:
        dataset: an embedded corpus, a local file (one of `SUFFIXES`), a pattern of files, an address, a folder that
            `datasets` knows, or a name on the hub, with the columns of `shapes.SHAPES` or `paper_datasets`. Without a
            split called test, validation or valid, 10 % of the rows are held out, and 5 % for WebGPT.
        size: the number of rows in all, drawn by `seed` from the good ones (of embedded data the first); None: all.
        bad_rows: error or drop, see `to_preferences`.
        template: paper or released, how the prompts of TL;DR and WebGPT are written (`templates`).
        part: rows of another kind that become the whole test part, such as TL;DR's news articles, `cnn_dm`.
        chat: the chat template that writes rows of messages (`chats.chat_writer`); None writes them as transcripts. If
            its `choice` is text, it writes rows of text as well, each prompt as a message of the user.
        row_columns: what each of the user's functions takes of a row; it goes along with the prompt (`Prompt`).
        found: the rows of `dataset`, if they have been found already (`sources.find_rows`).
        where: `dataset_config`, `data_dir`, the `split` to train on, your names of `columns` (`shapes.rename`).

    `Task.counts` has `read`, `kept`, the reasons of `to_preferences`, the size of each part, and the reasons for rows
    that were kept but not used: `beyond_size`, `prompt_in_test` and `not_of_part`. Raises `InputError` for every fault.
    """
    # 1. Embedded data are rows of a task already: nothing else says where they are, or writes their prompts.
    writes_texts = chat is not None and chat.choice == "text"
    template_option = {"chat_template": "text"} if writes_texts else {}
    if dataset in EMBEDDED:
        refuse_options(where | template_option, f"{dataset} is embedded and")
        for columns_of_function in row_columns:
            columns_of_function.choose(())  # embedded rows have no others: raises if one is needed
        return load_embedded(dataset, size, seed, part)

    # 2. Find the rows, their form, and what writes their prompts.
    found = found or find_rows(dataset, **where)
    form = form_of_rows(dataset, found.rows, where)
    if form.has_fixed_prompts:
        refuse_options(template_option, f"{dataset}, whose prompts have a fixed form,")
    check_part_is_known(dataset, part, form.parts)
    writer: str | Chat = template
    if chat is not None and not form.has_fixed_prompts:
        has_rows_to_write = writes_texts or most_rows_have_messages(found.rows, form)
        # If most rows are text, the template writes none, and the few rows of messages are bad ones.
        writer = chat if has_rows_to_write else ONLY_TEXTS
    is_written_by_chat = writer is chat
    form = _with_columns(form, found.rows, row_columns)

    # 3. Convert them to the columns of a task.
    convert = partial(_convert, form=form, template=writer, bad_rows=bad_rows)
    rows, counts = convert(
        found.rows, dataset, form.convert, place_of=partial(place_in_files, found.files)
    )
    test = None
    if found.test is not None:
        test, counts_of_test = convert(
            found.test,
            name_of_test(dataset, found),
            form.convert_test or form.convert,  # only APPS has the former
            place_of=partial(place_in_files, found.test_files),
        )
        counts = counts + counts_of_test

    # 4. Draw `size` rows in all. If there is a separate test set, as many of them are drawn from it as would be held
    #    out without it.
    test_size = None
    if size is not None:
        test_size = max(round(size * form.test_fraction), 1)
        training_size = size
        if test is not None:
            test = draw(test, test_size, seed)
            training_size = max(size - len(test), 0)
        rows = draw(rows, training_size, seed)

    # 5. Split them. With `--part`, rows that `form.convert` drops become the test part.
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
        rows_with_part = found.rows if found.test is None else found.test
        of_part, _ = convert(rows_with_part, f"{dataset} ({part})", form.parts[part])
        task = _with_test_part(task, part, draw(of_part, test_size, seed))

    # 6. What else a report says of the rows.
    if is_written_by_chat:
        task = replace(task, chats=True, source_of_prompt=chat.source_of_prompt)
    else:
        task = replace(task, thoughts_dropped=_count_rows_with_thoughts(found.rows, form))
    return replace(
        task,
        shape=form.name,
        unused=_unused_names(found.rows, form, is_written_by_chat),
        unused_splits=found.left_out_splits,
        files=(*found.files, *found.test_files),
        left_out_files=found.left_out_files,
    )


def _with_test_part(task: Task, part: str, rows: Sequence[dict]) -> Task:
    """Return the task with these rows as its test part, instead of its own test rows, and with counts that say so.

    `part` is the name of these rows. The task's conversion has dropped all rows of this kind and counted them by this
    name.
    """
    counts = dict(task.counts)
    counts["not_of_part"] = counts["test"]  # the task's own test rows are not used
    counts["test"] = len(rows)
    dropped = counts.pop(part, 0)
    still_dropped = dropped - len(rows)  # rows of this kind that were not drawn
    if still_dropped > 0:
        counts[part] = still_dropped
    splits = datasets.DatasetDict({**task.splits, "test": datasets.Dataset.from_list(rows)})
    return replace(task, splits=splits, counts=counts)


def _with_columns(form: Form, rows: Iterable[dict], row_columns: Sequence[RowColumns]) -> Form:
    """Return the form with the columns that the user's functions take.

    Raises `InputError` if one that a function needs is missing in all rows.
    """
    chosen: dict[str, None] = {}  # in the order of the functions, each once
    needed: set[str] = set()
    read_by_form = (*form.columns, *form.optional)
    for columns_of_function in row_columns:
        names = columns_of_function.choose(columns_of(rows), already_read=read_by_form)
        chosen.update(dict.fromkeys(names))
        needed.update(columns_of_function.needed)
    return replace(
        form,
        columns_for_functions=tuple(chosen),
        needed_by_functions=tuple(name for name in chosen if name in needed),
    )


def _convert(
    rows,
    source: str,
    convert: Callable,
    *,
    form: Form,
    template: str | Chat,
    bad_rows: str,
    place_of: Callable[[int], str] = "row {}".format,
) -> tuple[list[dict], Counter]:
    """Return what `to_preferences` makes of these rows, with `convert` instead of the form's own conversion.

    Of a data set of `datasets`, only the columns that are used come into the memory: WebGPT's others take gigabytes. If
    columns are missing, all others stay, so that the error can name them.
    """
    if isinstance(rows, datasets.Dataset) and set(form.columns) <= set(rows.column_names):
        used = _used_columns(form)
        rows = rows.select_columns([name for name in rows.column_names if name in used]).to_list()
    form = replace(form, convert=partial(convert, template=template))
    return to_preferences(rows, source, bad_rows, form=form, place_of=place_of)


def _used_columns(form: Form) -> set[str]:
    """Return the columns that the form reads, and those that go along with the prompt for the user's functions."""
    return {*form.columns, *form.optional, *form.columns_for_functions}


def _unused_names(rows: Iterable[dict], form: Form, is_written_by_chat: bool) -> tuple[str, ...]:
    """Return the columns and the keys of messages that nothing reads, for a note to the user.

    Without a chat template, the column `system`, thoughts and tool calls are among them, because nothing else writes
    them. The paper's data sets are known to have columns that nobody needs, so their names are not returned.
    """
    if form.has_fixed_prompts:
        return ()
    used = _used_columns(form)
    read_keys = {*MESSAGE}
    if is_written_by_chat:
        read_keys.update((*PASSED_ON, FUNCTION_CALL))
    else:
        used.discard("system")
    columns = []
    for column in columns_of(rows):
        has_name = str(column).strip() != ""  # pandas writes its row numbers under an empty name
        if column not in used and has_name:
            columns.append(str(column))
    unread_keys: set[str] = set()
    for row in islice(rows, ENOUGH_ROWS):
        for message in _messages_in(row, form):
            for key, value in message.items():
                is_empty = value is None or value == []  # as Parquet fills up keys of other rows
                if key not in read_keys and not is_empty:
                    unread_keys.add(key)
    return (*columns, *(f"{key} of messages" for key in sorted(unread_keys)))


def _count_rows_with_thoughts(rows: Iterable[dict], form: Form) -> int:
    """Return how many rows have a thought in a separate key, beside a message's content.

    A note needs this count if messages are written as transcripts, because only a chat template writes such a thought
    into the text. The count is 0 for the paper's data sets, which have no messages (`has_fixed_prompts`), and for data
    of `datasets` (no list), which are not searched because they may be larger than the memory.
    """
    if form.has_fixed_prompts or not isinstance(rows, list):
        return 0
    count = 0
    for row in rows:
        has_thought = False
        for message in _messages_in(row, form):
            if any(message.get(key) for key in THOUGHTS):
                has_thought = True
        count += has_thought
    return count


def _messages_in(row: Mapping, form: Form) -> list[dict]:
    """Return the messages in all columns of a row that the form reads; a text is not a message."""
    turns = []
    for column in form.columns:
        cell = row.get(column)
        if isinstance(cell, list):
            turns.extend(turn for turn in cell if isinstance(turn, dict))
    return turns


def drop_long_prompts(
    split: datasets.Dataset, tokenizer, max_tokens: int
) -> tuple[datasets.Dataset, int]:
    """Return the rows whose prompts have at most `max_tokens` tokens, special tokens included, and how many have more.

    Raises `InputError` if no row is left.
    """
    kept = []
    row = 0
    for part in split.iter(batch_size=1000):
        for ids in encode_prompts(tokenizer, part["prompt"]):
            if len(ids) <= max_tokens:
                kept.append(row)
            row += 1
    if len(split) and not kept:
        raise InputError(
            f"--max_prompt_length {max_tokens}: all {len(split)} prompts are longer: raise it or cut them"
        )
    dropped = len(split) - len(kept)
    if dropped:
        split = split.select(kept)
    return split, dropped
