"""Load the data of a command, fit them to the lengths, and tell what a user should know about them before training."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

import datasets

from marlhf_lite.config.commands import DataCommand, StageCommand
from marlhf_lite.config.options import DataConfig
from marlhf_lite.config.parser import same_data
from marlhf_lite.experiments.manifest import rows_digests
from marlhf_lite.tasks.answers import encode_answers
from marlhf_lite.tasks.chats import Chat, chat_writer, expect_chats
from marlhf_lite.tasks.loading import drop_long_prompts, load_task, options_of_rows
from marlhf_lite.tasks.prompts import ROW, RowColumns
from marlhf_lite.tasks.round_trip import note_on_lost_texts
from marlhf_lite.tasks.shapes import repeats_prompt
from marlhf_lite.tasks.sources import Found
from marlhf_lite.tasks.splits import TRAIN_PARTS, Task
from marlhf_lite.tasks.templates import COLUMNS
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import read_json
from marlhf_lite.utils.run_folder import RunFolder

ANSWER_COLUMNS = COLUMNS[1:]  # chosen and rejected
FEW_CUT = 0.05  # the share of answers that a longer limit, which is offered, would still cut
NO_LIMIT = 10**9
MOST_FILES = 8  # files that a report names; of more it gives the sum
# What programs write in place of a text that is missing: pandas, Python, JSON, databases.
WORDS_FOR_NOTHING = {"nan", "NaN", "<NA>", "None", "null", "NULL"}
# What templates write: <|im_start|>, DeepSeek's <｜User｜>, Gemma's <end_of_turn>, Llama's and Mistral's [/INST].
MARKS = r"<\|\w+\|>|<｜[^<>｜]+｜>|<(?:start|end)_of_turn>|\[/INST\]"


def read_task(
    options: StageCommand | DataCommand,
    tokenizer,
    runs: Sequence[RunFolder] = (),
    row_columns: Sequence[RowColumns] = (),
    date: str = "",
    found: Found | None = None,
    task: Task | None = None,
) -> tuple[Task, list[str]]:
    """Return the data of a command as a `Task`, and notes on how they are read.

    Args:
        runs: the runs that the command's models come from. If none of them has read this file, the file is for this
            stage alone, which then takes all training rows.
        row_columns: what the user's functions take of a row.
        date: the date that a chat template sees as today.
        found: the rows, if they have been found already.
        task: the data, if they have been loaded already because no chat template writes their prompts.

    If a chat template writes the prompts, the tokenizer is set up for chats. Rows with unit tests get what runs them,
    if the command may judge programs.
    """
    chat = chat_writer(tokenizer, options.chat_template, date)
    if task is None:
        source = options_of_rows(options)
        task = load_task(options.dataset, **source, chat=chat, row_columns=row_columns, found=found)
    # The digests are taken before rows move between parts, so that all stages store the same ones of the same file.
    task = replace(task, digests=rows_digests(task))
    if task.chats:
        expect_chats(tokenizer)
    part_with_all_rows = _part_that_takes_all_rows(options, runs, task)
    if part_with_all_rows:
        task = for_one_stage(task, part_with_all_rows)
    has_unit_tests = any("tests" in rows.column_names for rows in task.splits.values())
    if options.runs_programs and has_unit_tests:
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
    """Return the name of the part that takes all rows of the file, if this stage has the file for itself; else "".

    SFT has a file for itself if it has prompts and answers only: pairs are for later stages, too, so they are split.
    Any other stage has one if it comes after runs that have read other data.
    """
    if options.own_part == "sft":
        columns = {*task.splits["test"].column_names} - {ROW}  # ROW is what custom code takes
        return "sft" if columns == {"prompt", "chosen"} else ""
    if not runs:
        return ""
    if any(same_data(run.config, asdict(options)) for run in runs):
        return ""
    return options.own_part


def for_one_stage(task: Task, part: str) -> Task:
    """Return the task with all training rows in the part `part`; the other training parts are then empty.

    If `part` is a training part, the held-out rows stay as they are. If it is `test`, all rows are held out. The task
    is returned unchanged if its rows lack the column that the stage of this part needs.
    """
    # PPO and tests need no answers, only prompts.
    needed_column = {"sft": "chosen", "rm": "rejected"}.get(part, "prompt")
    parts_to_join = TRAIN_PARTS
    if part not in TRAIN_PARTS:  # it is `test`
        parts_to_join = ("test", *TRAIN_PARTS)
    # A part without rows may lack the columns that the others have.
    parts_with_rows = [task.splits[name] for name in parts_to_join if len(task.splits[name])]
    if any(needed_column not in rows.column_names for rows in parts_with_rows):
        return task
    splits = dict(task.splits)
    for name in parts_to_join:  # empty all of them, then put their rows into one
        splits[name] = task.splits[name].select([])
    splits[part] = datasets.concatenate_datasets(parts_with_rows)
    counts = task.counts | {name: len(rows) for name, rows in splits.items()}
    return replace(task, splits=datasets.DatasetDict(splits), counts=counts)


def describe_rows(task: Task) -> tuple[str, str]:
    """Return in words how many rows each part has, and how many were dropped for which reason.

    Raises `InputError` if they do not add up to the rows that were read.
    """
    parts = ", ".join(f"{part} {len(rows)}" for part, rows in task.splits.items())
    # `counts` also holds how many rows were read and kept, and how many each part has: the other names are reasons.
    dropped = {}
    for name, count in task.counts.items():
        if count and name not in ("read", "kept", *task.splits):
            dropped[name] = count
    used = sum(len(rows) for rows in task.splits.values())
    if used + sum(dropped.values()) != task.counts["read"]:
        raise InputError(
            f"{task.name}: {task.counts['read']} rows were read, but {used} are in parts and "
            f"{sum(dropped.values())} were dropped: please report this file"
        )
    reasons = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in dropped.items())
    return parts, reasons or "none"


def describe_files(task: Task) -> list[str]:
    """Return lines about the files of the task: one for each file, with what was read of it.

    If there are more than `MOST_FILES` files, the first ones have a line each, and one more line has the sum over all
    files. If files were left out, the last line names them.
    """
    lines = [str(file) for file in task.files]
    if len(lines) > MOST_FILES:
        rows = sum(file.rows for file in task.files)
        lines = [*lines[:MOST_FILES], f"all {len(task.files)} files: {rows} rows"]
    if task.left_out_files:
        line = f"files left out: {', '.join(task.left_out_files[:MOST_FILES])}"
        unnamed = len(task.left_out_files) - MOST_FILES
        if unnamed > 0:
            line += f" and {unnamed} more"
        lines.append(line)
    return lines


# Lengths


def fit_lengths(
    task: Task,
    tokenizer,
    options: DataConfig,
    columns_of_answers: Mapping[str, Sequence[str]],
    needs_pairs: bool = True,
) -> tuple[Task, list[str]]:
    """Drop and count prompts that are too long, and pairs that `--max_response_length` makes equal.

    Returns the task with the rows that are left, and notes: how many answers are cut, and that no pair is left if that
    is so.

    Args:
        columns_of_answers: the columns that the command's stages read, by part of the data: only these are looked at.
        needs_pairs: whether a stage can learn from nothing but pairs. Then `InputError` is raised if no pair is left.
    """
    # 1. Prompts.
    kept = {}
    long_prompts = 0
    for part, rows in task.splits.items():
        kept[part], dropped = drop_long_prompts(rows, tokenizer, options.max_prompt_length)
        long_prompts += dropped
    counts = {"long_prompts": long_prompts}

    # 2. Answers: their lengths before they are cut, and the pairs that still differ when both answers are cut. Here
    # nothing is cut: stages cut answers when they read them.
    limit = options.max_response_length
    lengths: list[int] = []
    notes = []
    for part, columns in columns_of_answers.items():
        answers = {}
        for column in columns:
            if column in kept[part].column_names:
                answers[column] = token_ids(tokenizer, kept[part], column)
                lengths += map(len, answers[column])
        if "rejected" not in answers or not len(kept[part]):  # there are no pairs
            continue
        different = _rows_that_differ(answers["chosen"], answers["rejected"], limit)
        counts["equal_after_cut"] = len(kept[part]) - len(different)
        kept[part] = kept[part].select(different)
        if not different:
            fault = f"--max_response_length {limit}: it makes all pairs of {task.name} equal"
            if needs_pairs:
                fix = f"raise it, to {_length_that_cuts_few(lengths)} to cut few"
                raise InputError(f"{fault}: {fix}")
            effect = "no reward model is trained, and the critic starts from the SFT model"
            notes.append(f"{fault}: {effect}")

    counts |= {part: len(rows) for part, rows in kept.items()}
    task = replace(task, splits=datasets.DatasetDict(kept), counts=task.counts | counts)
    return task, [*notes, *_notes_on_lengths(lengths, limit)]


def token_ids(tokenizer, rows: datasets.Dataset, column: str) -> list[list[int]]:
    """Return the token ids of all answers of a column, uncut and with EOS."""
    if not len(rows):  # a part without rows may lack the columns
        return []
    _, ids = encode_answers(tokenizer, rows["prompt"], rows[column], NO_LIMIT)
    return ids


def different_pairs(rows: datasets.Dataset, tokenizer, limit: int) -> datasets.Dataset:
    """Return the pairs that differ in their first `limit` tokens.

    If none do, return all pairs: nothing can be measured on no pairs.
    """
    chosen = token_ids(tokenizer, rows, "chosen")
    rejected = token_ids(tokenizer, rows, "rejected")
    different = _rows_that_differ(chosen, rejected, limit)
    return rows.select(different) if different else rows


def _rows_that_differ(
    chosen: Sequence[list[int]], rejected: Sequence[list[int]], limit: int
) -> list[int]:
    """Return the numbers of the rows whose two answers, as token ids, differ in their first `limit` tokens."""
    numbers = []
    for number, (ids_of_chosen, ids_of_rejected) in enumerate(zip(chosen, rejected, strict=True)):
        if ids_of_chosen[:limit] != ids_of_rejected[:limit]:
            numbers.append(number)
    return numbers


def _notes_on_lengths(lengths: Sequence[int], limit: int) -> Iterator[str]:
    """Yield a note if `limit` cuts answers of these lengths; it offers a longer limit if more than a few are cut."""
    cut = sum(length > limit for length in lengths)
    if not cut:
        return
    note = f"{cut} of {len(lengths)} answers are cut to {limit} tokens, and end without EOS"
    if cut > FEW_CUT * len(lengths):
        longer = f"--max_response_length {_length_that_cuts_few(lengths)}"
        note += f": {longer} would cut {FEW_CUT:.0%}"
    yield note


def _length_that_cuts_few(lengths: Sequence[int]) -> int:
    """Return the smallest of these lengths that, as a limit, cuts at most `FEW_CUT` of them."""
    kept = math.ceil((1 - FEW_CUT) * len(lengths))
    return sorted(lengths)[kept - 1]


# Notes: data that can be used, but may differ from what the user meant


def _notes(task: Task, tokenizer, model: str) -> Iterator[str]:
    """Yield notes on what the rows hold; `model` is the value of `--model`, whose tokenizer this is."""
    # 1. What is not read.
    if task.unused:
        yield f"columns not used: {', '.join(task.unused)}"
    if task.unused_splits:
        yield f"splits not used: {', '.join(task.unused_splits)}"
    if task.thoughts_dropped:
        fix = "a chat template that has reasoning_content writes them"
        yield f"thoughts dropped in {task.thoughts_dropped} rows: {fix}"

    # 2. Texts that may be a mistake in any data.
    rows = _texts_of_rows(task)
    contradicting = _contradicting_pairs(rows)
    if contradicting:
        first = " ".join(contradicting[0].split())[:40]
        fix = "leave out one of each if that is not meant"
        yield f"{len(contradicting)} pairs say the opposite of another one, first of {first!r}: {fix}"

    prompts = texts_of_column(task, "prompt")
    answers = []
    for column in ANSWER_COLUMNS:
        answers += texts_of_column(task, column)
    texts = [*prompts, *answers]
    missing_texts = [text for text in texts if text.strip() in WORDS_FOR_NOTHING]
    if missing_texts:
        first = repr(missing_texts[0].strip())
        fix = "leave such rows out if one is missing"
        count = f"{len(missing_texts)} of {len(texts)} texts"
        yield f"{count} are {first} or the like, as programs write a missing text: {fix}"
    marks = _marks(texts, tokenizer, task.chats)
    if marks:
        fix = "if a chat template wrote them, give the rows as messages, and --model's template writes them"
        yield f"{len(marks)} of {len(texts)} texts hold marks such as {marks[0]}, which are read as characters: {fix}"
    yield from note_on_lost_texts(tokenizer, prompts, answers)

    # 3. What stands between prompt and answer. A chat template writes that by itself, so nothing is checked then.
    if task.chats:
        return
    repeats = sum(repeats_prompt(*texts) for texts in rows)
    if repeats:
        yield f"in {repeats} of {len(rows)} rows answers begin with their prompt: if they should not, cut it off"
    if rows and all(_run_together(prompt, answers[0]) for prompt, *answers in rows):
        fix = "if words would run together, begin each answer with a space or a line break"
        yield f"nothing between prompt and answer in all {len(rows)} rows: {fix}"
    # `shape` is empty for data of the paper and of this library: their prompts are texts by design.
    if not marks and tokenizer.chat_template and task.shape:
        fix = "--chat_template text makes each prompt a user's message"
        yield f"{model} has a chat template, and texts are not put into it: {fix}"


def _texts_of_rows(task: Task) -> list[tuple[str, ...]]:
    """Return the texts of all rows that have an answer: (prompt, chosen), or of a pair (prompt, chosen, rejected)."""
    found = []
    for rows in task.splits.values():
        if "chosen" in rows.column_names:
            columns = [rows[name] for name in COLUMNS if name in rows.column_names]
            found.extend(zip(*columns, strict=True))
    return found


def _contradicting_pairs(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the prompts of the pairs whose two answers another pair has the other way round."""
    pairs = []
    for row in rows:
        if len(row) == len(COLUMNS):  # others have no rejected answer
            pairs.append(tuple(text.strip() for text in row))
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
    if not takes_prompts:
        return
    each_run_once = {run.path: run for run in runs}
    for path, run in each_run_once.items():
        counts = path / "data.json"
        if not counts.exists() or not same_data(run.config, asdict(options)):
            continue
        # A stage that has a file for itself takes all training rows, and leaves none to PPO. A run that has not counted
        # PPO's rows is taken for one that left some.
        if read_json(counts).get("ppo", 1) == 0:
            yield f"{path} has trained on all rows of {options.dataset}: PPO's prompts are among them"


def _notes_on_chats(chat: Chat) -> Iterator[str]:
    """Yield notes on texts of the data that the chat template has not written."""
    if chat.thoughts_left_out:
        fix = "give a template that has reasoning_content, or write the thought into the content"
        yield f"thoughts dropped in {chat.thoughts_left_out} answers: the chat template does not write them: {fix}"
    if chat.left_out:
        yield f"in {chat.left_out} rows the chat template leaves out text of the prompt, such as the system's"
    if chat.restored:
        first = repr(" ".join(chat.restored[0].split())[:40])
        kept = f"they are kept as the data have them, first {first}"
        yield f"in {len(chat.restored)} answers the chat template leaves out text, such as a thought: {kept}"


def texts_of_column(task: Task, column: str) -> list[str]:
    """Return the texts of a column, over all parts that have it."""
    texts = []
    for rows in task.splits.values():
        if column in rows.column_names:
            texts += rows[column]
    return texts


def _marks(texts: Iterable[str], tokenizer, is_written_by_template: bool) -> list[str]:
    """Return a list with the first mark of each text that has marks.

    A mark is what some chat template writes (`MARKS`), or the name of a special token. If the tokenizer's own template
    has written the texts, the tokenizer's tokens are meant to be there, so they are no marks.
    """
    added = tokenizer.added_tokens_decoder.values()
    names_of_special_tokens = [re.escape(token.content) for token in added if token.special]
    pattern = re.compile("|".join([MARKS, *names_of_special_tokens]))
    meant_tokens: set[str] = set()
    if is_written_by_template:
        meant_tokens = {token.content for token in added}
    first_marks = []
    for text in texts:
        marks = [mark for mark in pattern.findall(text) if mark not in meant_tokens]
        if marks:
            first_marks.append(marks[0].strip())
    return first_marks
