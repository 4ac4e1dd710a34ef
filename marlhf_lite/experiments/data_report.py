"""What a run would read: a few rows as tokens, counts, lengths and notes, for `marlhf data`."""

import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from marlhf_lite.config.commands import DataCommand
from marlhf_lite.experiments.context import start_processes
from marlhf_lite.experiments.data import fit_lengths, read_task, token_ids
from marlhf_lite.models.loading import load_tokenizer, model_path
from marlhf_lite.tasks.answers import encode_answers
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.utils.printable import printable

COLOURS = {"prompt": "\x1b[44;97m", "answer": "\x1b[42;30m", "end": "\x1b[41;97m"}
PLAIN = "\x1b[0m"
SIDES = {"sft": ("chosen",), "rm": ("chosen", "rejected")}
QUANTILES = {"shortest": 0.0, "median": 0.5, "95 %": 0.95, "longest": 1.0}


def data_report(options: DataCommand) -> str:
    """Return rows, counts, lengths and notes as text, in colours where the output is a terminal that has them."""
    start_processes()
    model_path(options.model)
    tokenizer = load_tokenizer(options.model)
    task, notes = read_task(options, tokenizer)
    lengths = dict(_lengths(task, tokenizer))
    task, more = fit_lengths(task, tokenizer, options, SIDES)
    reasons = {why: n for why, n in task.counts.items() if n and why not in ("read", "kept", *task.splits)}
    shape = task.shape or ("embedded data" if task.name in EMBEDDED else "rows of TL;DR, WebGPT, APPS or HumanEval")
    lines = [
        f"{task.name}: {task.counts['read']} rows, read as {shape}",
        "parts: " + ", ".join(f"{part} {len(rows)}" for part, rows in task.splits.items()),
        "dropped: " + (", ".join(f"{n} {why.replace('_', ' ')}" for why, n in reasons.items()) or "none"),
        *(f"{column} in tokens: {text}" for column, text in lengths.items()),
        *(f"note: {note}" for note in (*notes, *more)),
    ]
    # The text of tokens is escaped already, and may have colours.
    return "\n".join([*map(printable, lines), *_rows(task, tokenizer, options)])


def _lengths(task: Task, tokenizer) -> Iterator[tuple[str, str]]:
    """The lengths of prompts and answers in tokens, over all parts that have them."""
    for column in ("prompt", "chosen", "rejected"):
        parts = [rows for rows in task.splits.values() if column in rows.column_names and len(rows)]
        ids = [_ids(tokenizer, rows, column) for rows in parts]
        lengths = [len(row) for rows in ids for row in rows]
        if lengths:
            yield column, ", ".join(f"{name} {np.quantile(lengths, q):.0f}" for name, q in QUANTILES.items())


def _ids(tokenizer, rows, column: str) -> list[list[int]]:
    return encode_prompts(tokenizer, rows["prompt"]) if column == "prompt" else token_ids(tokenizer, rows, column)


def _rows(task: Task, tokenizer, options: DataCommand) -> Iterator[str]:
    """The first rows of the training parts, as the tokens that a stage reads."""
    shown = 0
    for part, rows in task.splits.items():
        for row in rows.select(range(min(options.rows - shown, len(rows)))):
            shown += 1
            yield f"\nrow {shown} ({part})"
            for side in ("chosen", "rejected") if "rejected" in row else ("chosen",) if "chosen" in row else ("",):
                yield from _tokens(row, side, tokenizer, options.max_response_length)


def _tokens(row: dict, side: str, tokenizer, limit: int) -> Iterator[str]:
    """The tokens of a prompt, or of an answer with its end: a line each, or in colours."""
    if not side or side == "chosen":
        yield _line("prompt", encode_prompts(tokenizer, [row["prompt"]])[0], tokenizer)
    if side:
        _, (ids,) = encode_answers(tokenizer, [row["prompt"]], [row[side]], limit)
        ends = ids[-1:] == [tokenizer.eos_token_id]
        yield _line("answer", ids[:-1] if ends else ids, tokenizer, side)
        yield _line("end", ids[-1:], tokenizer) if ends else f"end: none, cut to {limit} tokens"


def _line(kind: str, ids: list[int], tokenizer, name: str = "") -> str:
    pieces = _pieces(ids, tokenizer)
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        pieces = [f"{COLOURS[kind]}{piece}{PLAIN}" for piece in pieces]
    return f"{name or kind} ({len(ids)}): |{'|'.join(pieces)}|"


def _pieces(ids: Sequence[int], tokenizer) -> list[str]:
    """Return the text of each token; tokens that are single bytes of a character, at most four, stand together."""
    pieces, start = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end])
        if not text.endswith("\ufffd") or end - start == 4 or end == len(ids):
            pieces.append(repr(text)[1:-1])
            start = end
    return pieces
