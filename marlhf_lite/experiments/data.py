"""Load the data of a command, fit them to the lengths, and tell what a user should know about them before training."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

import datasets
from transformers import PreTrainedModel

from marlhf_lite.config.commands import DataCommand, StageCommand
from marlhf_lite.config.options import DataConfig
from marlhf_lite.config.parser import same_data
from marlhf_lite.experiments.manifest import rows_digests
from marlhf_lite.models.checks import check_length, check_vocabulary
from marlhf_lite.models.positions import position_limit
from marlhf_lite.tasks.answers import encode_answers, encode_continuation
from marlhf_lite.tasks.chats import Chat, chat_writer, expect_chats
from marlhf_lite.tasks.loading import drop_long_prompts, load_task
from marlhf_lite.tasks.prompts import ROW, RowColumns
from marlhf_lite.tasks.round_trip import note_on_lost_texts
from marlhf_lite.tasks.shapes import repeats_prompt
from marlhf_lite.tasks.sources import Found
from marlhf_lite.tasks.splits import TRAIN_PARTS, Task
from marlhf_lite.tasks.templates import COLUMNS
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import Sampler, longest_response
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import read_json
from marlhf_lite.utils.run_folder import RunFolder

LOADED = ("size", "bad_rows", "template", "part", "dataset_config", "data_dir", "split", "columns")
FEW_CUT = 0.05  # the share of answers that a longer limit, which is offered, would still cut
NO_LIMIT = 10**9
MOST_FILES = 8  # files that a report names; of more it gives the sum
# What templates write: <|im_start|>, DeepSeek's <｜User｜>, Gemma's <end_of_turn>, Llama's and Mistral's [/INST].
MARKS = r"<\|\w+\|>|<｜[^<>｜]+｜>|<(?:start|end)_of_turn>|\[/INST\]"


def read_task(
    options: StageCommand | DataCommand,
    tokenizer,
    runs: Sequence[RunFolder] = (),
    row_columns: Sequence[RowColumns] = (),
    date: str = "",
    found: Found | None = None,
) -> tuple[Task, list[str]]:
    """Return the data, with unit tests if they may judge programs, and notes on how the data are read.

    The tokenizer is set up for chats. If none of `runs` (the runs of the stage's models) has read this file, it is the
    stage's own, and the stage takes all its training rows. `row_columns` are what the user's functions take of a row,
    `date` is the date that a chat template sees as today, and `found` are the rows, if they have been found already.
    """
    chat = chat_writer(tokenizer, options.chat_template, date)
    source = {name: getattr(options, name) for name in LOADED}
    task = load_task(options.dataset, **source, chat=chat, row_columns=row_columns, found=found)
    task = replace(task, digests=rows_digests(task))
    if task.chats:
        expect_chats(tokenizer)
    part_with_all_rows = _part_that_takes_all_rows(options, runs, task)
    if part_with_all_rows:
        task = for_one_stage(task, part_with_all_rows)
    if options.runs_programs and any("tests" in rows.column_names for rows in task.splits.values()):
        from marlhf_lite.extras.programs.rewards import with_tests

        task = with_tests(task, options, options.bad_rows)
    notes = [
        *_notes(task, tokenizer, options.model),
        *_notes_on_known_prompts(options, runs),
    ]
    if task.chats:
        notes += _notes_on_chats(chat)
    return task, notes


def _part_that_takes_all_rows(
    options: StageCommand | DataCommand, runs: Sequence[RunFolder], task: Task
) -> str:
    """Return the part of a stage that has a file of its own, and so takes all its rows; else an empty name."""
    if options.own_part == "sft":  # a file of pairs is for later stages too
        return "sft" if {*task.splits["test"].column_names} - {ROW} == {"prompt", "chosen"} else ""
    is_new = runs and not any(same_data(run.config, asdict(options)) for run in runs)
    return options.own_part if is_new else ""


def for_one_stage(task: Task, part: str) -> Task:
    """Return the task with the rows of all training parts in this one; for `test` all rows are held out.

    The task stays unchanged if rows lack what the part needs.
    """
    needed = {"sft": "chosen", "rm": "rejected"}.get(part, "prompt")
    parts = TRAIN_PARTS if part in TRAIN_PARTS else ("test", *TRAIN_PARTS)
    rows = [task.splits[name] for name in parts if len(task.splits[name])]
    if any(needed not in split.column_names for split in rows):
        return task
    empty = {name: task.splits[name].select([]) for name in parts}
    splits = datasets.DatasetDict(
        {**task.splits, **empty, part: datasets.concatenate_datasets(rows)}
    )
    return replace(
        task,
        splits=splits,
        counts=task.counts | {name: len(split) for name, split in splits.items()},
    )


def describe_rows(task: Task) -> tuple[str, str]:
    """Return in words how many rows each part has, and how many were dropped for which reason.

    Raises `InputError` if they do not add up to the rows that were read.
    """
    parts = ", ".join(f"{part} {len(rows)}" for part, rows in task.splits.items())
    dropped = {}
    for why, count in task.counts.items():
        if count and why not in ("read", "kept", *task.splits):
            dropped[why] = count
    used = sum(len(rows) for rows in task.splits.values())
    if used + sum(dropped.values()) != task.counts["read"]:
        raise InputError(
            f"{task.name}: {task.counts['read']} rows were read, but {used} are in parts and "
            f"{sum(dropped.values())} were dropped: please report this file"
        )
    reasons = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in dropped.items())
    return parts, reasons or "none"


def describe_files(task: Task) -> list[str]:
    """Return what lies in the files of a task, a line each: what was read of it, and which files were left out."""
    lines = [str(file) for file in task.files]
    if len(lines) > MOST_FILES:
        rows = sum(file.rows for file in task.files)
        lines = [*lines[:MOST_FILES], f"all {len(task.files)} files: {rows} rows"]
    if task.left_out_files:
        names = ", ".join(task.left_out_files[:MOST_FILES])
        more = len(task.left_out_files) - MOST_FILES
        lines.append(f"files left out: {names}" + (f" and {more} more" if more > 0 else ""))
    return lines


# Lengths


def check_texts(
    options: StageCommand, base: PreTrainedModel, tokenizer, task: Task, sampler: Sampler
) -> None:
    """Raise `InputError` if the base has too few positions or embeddings for the texts of the task."""
    limit, response = (
        position_limit(base),
        longest_response(sampler, tokenizer, options.max_response_length),
    )
    is_long = limit and options.max_prompt_length + response > limit
    if is_long or len(tokenizer) > base.get_input_embeddings().weight.shape[0]:
        prompts = [prompt for rows in task.splits.values() for prompt in set(rows["prompt"])]
        ids = encode_prompts(tokenizer, prompts)
        check_length(base, options.model, max(map(len, ids), default=0), response)
        columns = (
            rows[name]
            for rows in task.splits.values()
            for name in COLUMNS[1:]
            if name in rows.column_names
        )
        answers = encode_continuation(tokenizer, [*{text for column in columns for text in column}])
        check_vocabulary(
            base, options.model, tokenizer, {token for row in (*ids, *answers) for token in row}
        )


def fit_lengths(
    task: Task,
    tokenizer,
    options: DataConfig,
    sides: Mapping[str, Sequence[str]],
    needs_pairs: bool = True,
) -> tuple[Task, list[str]]:
    """Drop and count prompts that are too long, and pairs that `--max_response_length` makes equal.

    `sides` are the columns of answers that the command reads, by part; notes tell how many answers are cut. If no pair
    is left, a note tells it, or `InputError` is raised for a command that `needs_pairs`.
    """
    kept, dropped = {}, 0
    for part, rows in task.splits.items():
        kept[part], count = drop_long_prompts(rows, tokenizer, options.max_prompt_length)
        dropped += count
    counts, limit, lengths, notes = {"long_prompts": dropped}, options.max_response_length, [], []
    for part, columns in sides.items():
        answers = {
            side: token_ids(tokenizer, kept[part], side)
            for side in columns
            if side in kept[part].column_names
        }
        lengths += [len(ids) for rows in answers.values() for ids in rows]
        if "rejected" in answers and len(kept[part]):
            different = _different_rows(answers.values(), limit)
            counts["equal_after_cut"] = len(kept[part]) - len(different)
            kept[part] = kept[part].select(different)
            if not different:
                fault = f"--max_response_length {limit}: it makes all pairs of {task.name} equal"
                if needs_pairs:
                    raise InputError(
                        f"{fault}: raise it, to {_length_that_cuts_few(lengths)} to cut few"
                    )
                notes = [
                    f"{fault}: no reward model is trained, and the critic starts from the SFT model"
                ]
    counts |= {part: len(rows) for part, rows in kept.items()}
    task = replace(task, splits=datasets.DatasetDict(kept), counts=task.counts | counts)
    return task, [*notes, *_notes_on_lengths(lengths, limit)]


def token_ids(tokenizer, rows: datasets.Dataset, side: str) -> list[list[int]]:
    """Return the token ids of all answers of a column, uncut and with EOS."""
    return encode_answers(tokenizer, rows["prompt"], rows[side], NO_LIMIT)[1] if len(rows) else []


def different_pairs(rows: datasets.Dataset, tokenizer, limit: int) -> datasets.Dataset:
    """Return the pairs that differ in their first `limit` tokens; all pairs if none do."""
    different = _different_rows(
        [token_ids(tokenizer, rows, side) for side in ("chosen", "rejected")], limit
    )
    return rows.select(different) if different else rows


def _different_rows(answers: Iterable[list[list[int]]], limit: int) -> list[int]:
    """Return the numbers of the rows whose two answers, columns of token ids, differ in their first `limit` tokens."""
    pairs = enumerate(zip(*answers, strict=True))
    return [row for row, (chosen, rejected) in pairs if chosen[:limit] != rejected[:limit]]


def _notes_on_lengths(lengths: Sequence[int], limit: int) -> Iterator[str]:
    if cut := sum(length > limit for length in lengths):
        longer = f": --max_response_length {_length_that_cuts_few(lengths)} would cut {FEW_CUT:.0%}"
        more = longer if cut > FEW_CUT * len(lengths) else ""
        yield f"{cut} of {len(lengths)} answers are cut to {limit} tokens, and end without EOS{more}"


def _length_that_cuts_few(lengths: Sequence[int]) -> int:
    return sorted(lengths)[math.ceil((1 - FEW_CUT) * len(lengths)) - 1]


# Notes: data that can be used, but may differ from what the user meant


def _notes(task: Task, tokenizer, model: str) -> Iterator[str]:
    if task.unused:
        yield f"columns not used: {', '.join(task.unused)}"
    if task.unused_splits:
        yield f"splits not used: {', '.join(task.unused_splits)}"
    if task.thoughts_dropped:
        fix = "a chat template that has reasoning_content writes them"
        yield f"thoughts dropped in {task.thoughts_dropped} rows: {fix}"
    rows = _texts_of_rows(task)
    if contradicting := _contradicting_pairs(rows):
        first = " ".join(contradicting[0].split())[:40]
        fix = "leave out one of each if that is not meant"
        yield f"{len(contradicting)} pairs say the opposite of another one, first of {first!r}: {fix}"

    texts = [text for column in COLUMNS for text in _column(task, column)]
    marks = _marks(texts, tokenizer, task.chats)
    if marks:
        fix = "if a chat template wrote them, give the rows as messages, and --model's template writes them"
        yield f"{len(marks)} of {len(texts)} texts hold marks such as {marks[0]}, which are read as characters: {fix}"
    answers = [text for column in COLUMNS[1:] for text in _column(task, column)]
    yield from note_on_lost_texts(tokenizer, _column(task, "prompt"), answers)
    if task.chats:  # the template writes what stands between prompt and answer
        return

    repeats = sum(repeats_prompt(*texts) for texts in rows)
    if repeats:
        yield f"in {repeats} of {len(rows)} rows answers begin with their prompt: if they should not, cut it off"
    if rows and all(_run_together(prompt, answers[0]) for prompt, *answers in rows):
        fix = "if words would run together, begin each answer with a space or a line break"
        yield f"nothing between prompt and answer in all {len(rows)} rows: {fix}"
    if not marks and tokenizer.chat_template and task.shape:
        fix = "--chat_template text makes each prompt a user's message"
        yield f"{model} has a chat template, and texts are not put into it: {fix}"


def _texts_of_rows(task: Task) -> list[tuple[str, ...]]:
    """Return prompt, chosen and, in pairs, rejected of all rows that have an answer."""
    found = []
    for rows in task.splits.values():
        if "chosen" in rows.column_names:
            columns = [rows[name] for name in COLUMNS if name in rows.column_names]
            found.extend(zip(*columns, strict=True))
    return found


def _contradicting_pairs(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the prompts of the pairs whose two answers another pair has the other way round."""
    pairs = [tuple(text.strip() for text in row) for row in rows if len(row) == len(COLUMNS)]
    known = set(pairs)
    return [prompt for prompt, chosen, rejected in pairs if (prompt, rejected, chosen) in known]


def _run_together(prompt: str, answer: str) -> bool:
    """Return whether a word of the prompt and one of the answer meet without white space."""
    return not prompt[-1:].isspace() and not answer[:1].isspace()


def _notes_on_known_prompts(
    options: StageCommand | DataCommand, runs: Sequence[RunFolder]
) -> Iterator[str]:
    """Yield a note if an earlier stage has trained on every row of the file that PPO takes its prompts from."""
    takes_prompts = options.own_part == "ppo"
    for run in {run.path: run for run in runs}.values() if takes_prompts else ():
        counts = run.path / "data.json"
        # A stage that has a separate file takes all training rows, and leaves none to PPO.
        left_none = counts.exists() and not read_json(counts).get("ppo", 1)
        if left_none and same_data(run.config, asdict(options)):
            yield f"{run.path} has trained on all rows of {options.dataset}: PPO's prompts are among them"


def _notes_on_chats(chat: Chat) -> Iterator[str]:
    if chat.thoughts_left_out:
        fix = "give a template that has reasoning_content, or write the thought into the content"
        yield f"thoughts dropped in {chat.thoughts_left_out} answers: the chat template does not write them: {fix}"
    if chat.left_out:
        yield f"in {chat.left_out} rows the chat template leaves out text of the prompt, such as the system's"
    if chat.restored:
        first = repr(" ".join(chat.restored[0].split())[:40])
        kept = f"they are kept as the data have them, first {first}"
        yield f"in {len(chat.restored)} answers the chat template leaves out text, such as a thought: {kept}"


def _column(task: Task, column: str) -> list[str]:
    parts = [part for part in task.splits.values() if column in part.column_names]
    return [text for part in parts for text in part[column]]


def _marks(texts: Iterable[str], tokenizer, are_tokens: bool) -> list[str]:
    """Return the first mark of a chat template in each text that has one; the tokenizer's own may be tokens."""
    added = tokenizer.added_tokens_decoder.values()
    pattern = re.compile(
        "|".join([MARKS, *(re.escape(token.content) for token in added if token.special)])
    )
    tokens = {token.content for token in added} if are_tokens else set()
    found = ([mark for mark in pattern.findall(text) if mark not in tokens] for text in texts)
    return [marks[0].strip() for marks in found if marks]
