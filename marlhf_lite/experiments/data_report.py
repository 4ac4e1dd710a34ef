"""What a run would read: a few rows as tokens, counts, lengths and notes, for `marlhf data`."""

from collections.abc import Iterator

import numpy as np

from marlhf_lite.config.commands import DataCommand
from marlhf_lite.experiments.data import (
    ANSWER_COLUMNS,
    describe_files,
    describe_rows,
    fit_lengths,
    read_task,
    token_ids,
)
from marlhf_lite.models.tokenizers import load_tokenizer
from marlhf_lite.tasks.answers import encode_answers
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.sources import Found
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.templates import COLUMNS
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.utils.quiet import silence_libraries

# The answers that the stages of a whole run read, by part of the data.
COLUMNS_OF_ANSWERS = {"sft": ("chosen",), "rm": ("chosen", "rejected")}
QUANTILES = {"shortest": 0.0, "median": 0.5, "95 %": 0.95, "longest": 1.0}


def data_report(options: DataCommand, found: Found | None = None, task: Task | None = None) -> str:
    """Return the report as text: counts of rows, files, lengths, notes, and the first rows as tokens.

    `found` are the rows, if they have been found already, and `task` are the data, if they have been loaded.
    """
    silence_libraries()
    tokenizer = load_tokenizer(options.model)
    task, notes = read_task(options, tokenizer, found=found, task=task)
    lengths = _quantiles_of_lengths(task, tokenizer)  # before anything is cut or dropped
    task, notes_on_lengths = fit_lengths(task, tokenizer, options, COLUMNS_OF_ANSWERS)
    parts, dropped = describe_rows(task)
    lines = [
        f"{task.name}: {task.counts['read']} rows, read as {_name_of_shape(task)}",
        f"parts: {parts}",
        f"dropped: {dropped}",
        *describe_files(task),
    ]
    for column, quantiles in lengths.items():
        lines.append(f"{column} in tokens: {quantiles}")
    for note in (*notes, *notes_on_lengths):
        lines.append(f"note: {note}")
    return "\n".join([*lines, *_first_rows(task, tokenizer, options)])


def _name_of_shape(task: Task) -> str:
    """Return what the rows are read as; data of the paper and of the library have no shape by name."""
    if task.shape:
        return task.shape
    if task.name in EMBEDDED:
        return "embedded data"
    return "rows of TL;DR, WebGPT or APPS"


def _quantiles_of_lengths(task: Task, tokenizer) -> dict[str, str]:
    """Return, by column, the quantiles of the lengths of its texts in tokens, as words, over all parts of the data."""
    texts = {}
    for column in COLUMNS:
        lengths: list[int] = []
        for rows in task.splits.values():
            if column not in rows.column_names or not len(rows):
                continue
            if column == "prompt":
                ids_of_rows = encode_prompts(tokenizer, rows["prompt"])
            else:
                ids_of_rows = token_ids(tokenizer, rows, column)
            lengths += map(len, ids_of_rows)
        if lengths:
            words = [f"{name} {np.quantile(lengths, q):.0f}" for name, q in QUANTILES.items()]
            texts[column] = ", ".join(words)
    return texts


def _first_rows(task: Task, tokenizer, options: DataCommand) -> Iterator[str]:
    """Yield the lines of the first `--rows` rows, part after part, as the tokens that a stage reads."""
    shown = 0
    for part, rows in task.splits.items():
        count = min(options.rows - shown, len(rows))
        for row in rows.select(range(count)):
            shown += 1
            yield f"\nrow {shown} ({part})"
            (ids,) = encode_prompts(tokenizer, [row["prompt"]])
            yield _line_of_tokens("prompt", ids, tokenizer)
            for column in ANSWER_COLUMNS:
                if column in row:
                    yield from _lines_of_answer(row, column, tokenizer, options.max_response_length)


def _lines_of_answer(row: dict, column: str, tokenizer, limit: int) -> Iterator[str]:
    """Yield a line with the tokens of an answer, and one with its end token, or that it has none because it is cut."""
    _, (ids,) = encode_answers(tokenizer, [row["prompt"]], [row[column]], limit)
    if ids[-1:] == [tokenizer.eos_token_id]:  # a slice: there may be no token
        yield _line_of_tokens(column, ids[:-1], tokenizer)
        yield _line_of_tokens("end", ids[-1:], tokenizer)
    else:
        yield _line_of_tokens(column, ids, tokenizer)
        yield f"end: none, cut to {limit} tokens"


def _line_of_tokens(name: str, ids: list[int], tokenizer) -> str:
    """Return a line with the texts of these tokens between bars; a line break, for example, is written as in Python."""
    texts = []
    for token in ids:
        text_in_quotes = repr(tokenizer.decode([token]))
        texts.append(text_in_quotes[1:-1])
    return f"{name} ({len(ids)}): |{'|'.join(texts)}|"
