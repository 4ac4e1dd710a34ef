"""What a run would read: a few rows as tokens, counts, lengths and notes, for `marlhf data`."""

from collections.abc import Iterator

import numpy as np

from marlhf_lite.config.commands import DataCommand
from marlhf_lite.experiments.context import start_processes
from marlhf_lite.experiments.data import (
    describe_files,
    describe_rows,
    fit_lengths,
    read_task,
    token_ids,
)
from marlhf_lite.models.loading import load_tokenizer, model_path
from marlhf_lite.tasks.answers import encode_answers
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.sources import Found
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tokenization import encode_prompts

SIDES = {"sft": ("chosen",), "rm": ("chosen", "rejected")}
QUANTILES = {"shortest": 0.0, "median": 0.5, "95 %": 0.95, "longest": 1.0}


def data_report(options: DataCommand, found: Found | None = None) -> str:
    """Return rows, counts, lengths and notes as text; `found` are the rows, if they have been found already."""
    start_processes()
    model_path(options.model)
    tokenizer = load_tokenizer(options.model)
    task, notes = read_task(options, tokenizer, found=found)
    lengths = dict(_lengths(task, tokenizer))
    task, notes_on_lengths = fit_lengths(task, tokenizer, options, SIDES)
    shape = task.shape or (
        "embedded data" if task.name in EMBEDDED else "rows of TL;DR, WebGPT or APPS"
    )
    parts, dropped = describe_rows(task)
    lines = [
        f"{task.name}: {task.counts['read']} rows, read as {shape}",
        f"parts: {parts}",
        f"dropped: {dropped}",
        *describe_files(task),
        *(f"{column} in tokens: {text}" for column, text in lengths.items()),
        *(f"note: {note}" for note in (*notes, *notes_on_lengths)),
    ]
    return "\n".join([*lines, *_rows(task, tokenizer, options)])


def _lengths(task: Task, tokenizer) -> Iterator[tuple[str, str]]:
    """Yield the lengths of prompts and answers in tokens, over all parts that have them."""
    for column in ("prompt", "chosen", "rejected"):
        parts = [rows for rows in task.splits.values() if column in rows.column_names and len(rows)]
        if column == "prompt":
            ids = [encode_prompts(tokenizer, rows["prompt"]) for rows in parts]
        else:
            ids = [token_ids(tokenizer, rows, column) for rows in parts]
        lengths = [len(row) for rows in ids for row in rows]
        if lengths:
            yield (
                column,
                ", ".join(f"{name} {np.quantile(lengths, q):.0f}" for name, q in QUANTILES.items()),
            )


def _rows(task: Task, tokenizer, options: DataCommand) -> Iterator[str]:
    """Yield the first rows of the training parts, as the tokens that a stage reads."""
    shown = 0
    for part, rows in task.splits.items():
        for row in rows.select(range(min(options.rows - shown, len(rows)))):
            shown += 1
            yield f"\nrow {shown} ({part})"
            yield _line("prompt", encode_prompts(tokenizer, [row["prompt"]])[0], tokenizer)
            for side in [side for side in SIDES["rm"] if side in row]:
                yield from _answer(row, side, tokenizer, options.max_response_length)


def _answer(row: dict, side: str, tokenizer, limit: int) -> Iterator[str]:
    """Yield the tokens of an answer and of its end."""
    _, (ids,) = encode_answers(tokenizer, [row["prompt"]], [row[side]], limit)
    ends = ids[-1:] == [tokenizer.eos_token_id]
    yield _line(side, ids[:-1] if ends else ids, tokenizer)
    yield _line("end", ids[-1:], tokenizer) if ends else f"end: none, cut to {limit} tokens"


def _line(name: str, ids: list[int], tokenizer) -> str:
    return f"{name} ({len(ids)}): |{'|'.join(repr(tokenizer.decode([i]))[1:-1] for i in ids)}|"
