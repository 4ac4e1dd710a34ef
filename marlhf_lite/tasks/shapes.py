"""The shapes of rows that users of TRL, LLaMA-Factory and OpenRLHF have, and how they become rows of a task.

The first of `SHAPES` whose columns are all present is taken, and the run says which.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from marlhf_lite.tasks import templates
from marlhf_lite.tasks.chats import Chat
from marlhf_lite.tasks.messages import Turns, messages_of, turns_of_text, write_transcript
from marlhf_lite.tasks.prompts import ROW
from marlhf_lite.tasks.templates import (
    ASSISTANT,
    COLUMNS,
    DROPPED,
    HUMAN,
    WITHOUT_PAIRS,
    BadRow,
    Form,
)
from marlhf_lite.tasks.written_lists import refuse_written_lists
from marlhf_lite.utils.errors import InputError, did_you_mean

# names of prompts that may have an `input` below them (Alpaca)
INSTRUCTIONS = ("instruction", "question", "query")
PROMPT_NAMES = ("prompt", *INSTRUCTIONS, "input", "context_messages")
ANSWER_NAMES = ("completion", "response", "output", "answer")
LABELS = ("label", "kto_tag")  # in the data of KTO: whether to learn an answer
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
TARGETS = (*COLUMNS, "completion", "messages", "system")  # what `--columns` may name
# Names of answers of which one is better: without chosen and rejected, the names do not tell which. A word of `_BETTER`
# counts only beside words that name an answer, so that `preferred_language` is a column like any other.
_BETTER = re.compile(
    r"(?i)(is|non|dis)?(chosen|rejected|(dis)?prefer(red|ence)?|winner|loser|better|worse)"
)
_OF_ANSWERS = re.compile(
    r"(?i)(response|answer|completion|output|text|message|conversation|reply|ref|id|non|is|the|human|[abjk]|\d+)s?"
)
_NUMBERED = re.compile(r"(?i)(response|answer|completion|output|ref)s?_?([abjk\d]|good|bad)$")
# the template of data with mostly texts, whose other rows would need a chat template
ONLY_TEXTS = "only texts"


# Rows of a shape


def _row(
    row: Mapping, template: str | Chat = "paper", sides: Sequence[str] = COLUMNS[1:]
) -> dict[str, str]:
    """Convert a prompt and its answers: texts stay unchanged, the template writes messages."""
    choice = template.choice if isinstance(template, Chat) else "none"
    has_chats = any(isinstance(row.get(column), list | dict) for column in ("prompt", *sides))
    if has_chats and template == ONLY_TEXTS:
        raise BadRow("bad_chat", "messages, but most rows are text")
    if not has_chats:
        row = _texts(row, sides)
    if has_chats or choice == "text":
        prompt, answers = _written(row, sides, template)
        if choice == "text" and not has_chats:
            template.said[prompt] = row["prompt"]
    elif choice == "none":
        prompt = row["prompt"]
        answers = [row[side].rstrip() for side in sides]
    else:
        raise BadRow("bad_chat", "text, but most rows are lists of messages")
    return templates.checked_row(prompt, **dict(zip(COLUMNS[1:], answers, strict=False)))


def _texts(row: Mapping, sides: Sequence[str]) -> Mapping:
    """Return the row with a prompt: its own, or the start that two whole transcripts share."""
    own_prompt = ("prompt",) if "prompt" in row else ()
    for column in (*own_prompt, *sides):
        templates.check_text(row[column], column)
    if own_prompt:
        return row
    if len(sides) < 2:
        raise BadRow("bad_chat", f"{sides[0]!r} is not a list of messages")
    prompt, chosen, rejected = templates.split_transcripts(row["chosen"], row["rejected"])
    answers = {"chosen": chosen, "rejected": rejected}
    for side, text in answers.items():
        if text.rfind(HUMAN) > text.rfind(ASSISTANT):
            raise BadRow("human_last", f"{side!r} ends with a turn of the human")
    return {**row, "prompt": prompt, **answers}


def _answered(row: Mapping, template: str | Chat = "paper") -> dict[str, str]:
    """Convert a prompt and its answer, or messages that end with the answer.

    Answers whose label is false (or 0) are not learned. A label that is neither true nor false is probably a class.
    """
    for name in LABELS:
        label = TRUTH.get(str(row.get(name, True)).strip().lower())
        if label is None:
            raise BadRow(
                "bad_label",
                f"{name!r} is {row[name]!r}, not true or false: rename a column of classes",
            )
        if not label:
            raise BadRow("labelled_false", f"{name!r} is false: an answer to avoid")
    return _row(row, template, ("completion",))


# Messages


def _written(row: Mapping, sides: Sequence[str], template: str | Chat) -> tuple[str, list[str]]:
    """Return the prompt and the answers of messages, after the column system if a chat template writes them."""
    prompt = row.get("prompt")
    is_text = isinstance(prompt, str)
    before: Turns = []
    if is_text:
        before = turns_of_text(prompt)
    elif prompt is not None:
        before = messages_of(prompt, "prompt")
    chats = [_with_answer(before, row[side], side, is_text) for side in sides]
    if not sides:
        chats = [before]
    system = row.get("system")
    if isinstance(template, Chat) and isinstance(system, str) and system.strip():
        chats = [_after_system(system, chat) for chat in chats]
    if len(sides) < 2:
        start = len(chats[0]) - len(sides)  # the last message is the answer
    else:
        start = _count_shared(*chats)
    answers = [chat[start:] for chat in chats] if sides else []
    return _write(template, chats[0][:start], answers)


def _after_system(system: str, chat: Turns) -> Turns:
    """Return the chat after the system's message, unless it has one itself."""
    if chat[:1] and chat[0]["role"] == "system":
        return chat
    return [{"role": "system", "content": system}, *chat]


def _with_answer(before: Turns, answer, side: str, is_text: bool) -> Turns:
    """Return the turns of a prompt and its answer; the answer may repeat the prompt."""
    if isinstance(answer, str):
        templates.check_text(answer, side)
        return [*before, {"role": "assistant", "content": re.sub(r"^ (?=\S)", "", answer)}]
    turns = messages_of(answer, side)
    if not turns or turns[-1]["role"] != "assistant":
        other = f", but of {turns[-1]['role']!r}" if turns else ""
        raise BadRow("bad_chat", f"{side!r} does not end with a message of the assistant{other}")
    asks = is_text and any(turn["role"] == "user" for turn in turns)
    if turns[: len(before)] == before or (asks and _words(before) in _words(turns[:-1])):
        return turns  # the messages may add to the text of the prompt
    if turns[0]["role"] in ("system", "user"):
        fault = f"{side!r} begins with a message of the {turns[0]['role']}, but not with 'prompt'"
        raise BadRow(
            "bad_chat", f"{fault}: put all of the prompt into the messages, or leave 'prompt' out"
        )
    return before + turns


def _words(turns: Turns) -> str:
    return " ".join(" ".join(turn["content"] for turn in turns).split())


def write_turns(said: str | Turns, template: str | Chat) -> str:
    """Return messages, or a text as the user's, as a prompt of this template."""
    turns = turns_of_text(said) if isinstance(said, str) else said
    return _write(template, turns, [])[0]


def _count_shared(chosen: Turns, rejected: Turns) -> int:
    """Return how many messages two chats share before the assistant answers in both."""
    shared = 0
    shorter = min(len(chosen), len(rejected))
    while shared < shorter - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    while shared > 0 and not chosen[shared]["role"] == rejected[shared]["role"] == "assistant":
        shared -= 1
    if shared <= 0:
        fix = "begin both with the same prompt, or name its column by --columns prompt=NAME"
        raise BadRow(
            "no_shared_turn", f"'chosen' and 'rejected' share no message before an answer: {fix}"
        )
    return shared


def _write(template: str | Chat, prompt: Turns, answers: Sequence[Turns]) -> tuple[str, list[str]]:
    """Return a prompt and its answers as the chat template writes them; without a template as a transcript."""
    if not prompt or not prompt[-1]["content"].strip():
        raise BadRow("empty_prompt", "the last message before the answer is empty")
    if prompt[-1]["role"] == "assistant":
        raise BadRow(
            "bad_chat", "the last message before the answer is the assistant's, like the answer"
        )
    for turns in answers:
        if not turns[-1]["content"].strip() and not turns[-1].get("tool_calls"):
            raise BadRow("empty_response", "an answer is empty")
    if isinstance(template, Chat):
        return template.write(prompt, answers)
    return write_transcript(prompt, answers)


# The table


def _shape(name: str, form: Form, **names: str) -> Form:
    """Return the form of rows whose columns have these names, else those of `form`."""
    optional = form.optional
    if names.get("prompt") in INSTRUCTIONS:
        optional += ("input",)
    columns = tuple(names.get(column, column) for column in form.columns)
    return replace(form, name=name, columns=columns, names=names, optional=optional)


PAIRS = Form(COLUMNS, _row, name="pairs", optional=("system",))
TRANSCRIPTS = replace(PAIRS, columns=COLUMNS[1:], name="pairs of whole transcripts")
# Answers only for SFT: a later stage with the same file has its prompts.
ANSWERS = replace(
    PAIRS,
    columns=("prompt", "completion"),
    convert=_answered,
    fractions=WITHOUT_PAIRS,
    optional=("system", *LABELS),
)
MESSAGES = replace(ANSWERS, columns=("completion",))
PROMPTS = replace(
    PAIRS,
    columns=COLUMNS[:1],
    convert=partial(_row, sides=()),
    fractions=(0.0, 0.0, 1.0),
    name="only prompts",
)


def _all_shapes() -> tuple[Form, ...]:
    shapes = [_shape("LLaMA-Factory's pairs", PAIRS, prompt="conversations"), PAIRS]
    for prompt in PROMPT_NAMES[1:]:
        shapes.append(_shape(f"pairs, with {prompt} as the prompt", PAIRS, prompt=prompt))
    shapes.append(TRANSCRIPTS)
    shapes.append(_shape("messages, for SFT", MESSAGES, completion="messages"))
    shapes.append(_shape("ShareGPT's conversations, for SFT", MESSAGES, completion="conversations"))
    for prompt in PROMPT_NAMES:
        for answer in ANSWER_NAMES:
            name = f"{prompt} and {answer}, for SFT"
            shapes.append(_shape(name, ANSWERS, prompt=prompt, completion=answer))
    shapes.append(PROMPTS)
    return tuple(shapes)


SHAPES = _all_shapes()


def shape_of(columns: Collection[str], names: str = "") -> Form:
    """Return the first shape whose columns are all present and include those of `--columns`; else `PAIRS`.

    If columns have names like those of two compared answers, `PAIRS` is returned as well, so that its missing columns
    are reported: else the better of the two answers would be ignored. Columns that the user has named are taken as
    they are.
    """
    named = {new for new, _ in _names(names)}
    known = (form for form in SHAPES if named <= {*form.columns, *form.optional})
    form = next((form for form in known if set(form.columns) <= set(columns)), PAIRS)
    has_pairs = form.fractions[1] > 0  # a share of the rows for the reward model
    if not has_pairs and not named and any(names_a_compared_answer(str(name)) for name in columns):
        return PAIRS
    return form


def names_a_compared_answer(column: str) -> bool:
    """Return whether a column is named like one of two answers, or like the choice between them.

    `better_response` and `response_a` are; `preferred_language` and `chosen_model` are not, because a word such as
    preferred counts only beside words that name an answer.
    """
    if _NUMBERED.search(column):
        return True
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", column)
    better = [word for word in words if _BETTER.fullmatch(word)]
    others = [word for word in words if word not in better]
    return bool(better) and all(_OF_ANSWERS.fullmatch(word) for word in others)


def _names(columns: str) -> list[list[str]]:
    """Return the new and the old name of each column in `--columns`."""
    pairs = []
    for item in columns.split(","):
        if item.strip():
            new, _, old = item.partition("=")
            pairs.append([new.strip(), old.strip()])
    return pairs


def rename(rows, columns: str):
    """Return rows, or a data set, with the columns that `--columns` names, as `prompt=question,chosen=good`.

    A column that had the new name is left out. Raises `InputError` for a missing name.
    """
    present = columns_of(rows)
    items = [(new, _present_name(old, present)) for new, old in _names(columns)]
    new_names = {old: new for new, old in items}
    if len(items) > min(len(new_names), len(set(new_names.values()))):
        raise InputError(f"--columns {columns}: a name occurs twice: give each column one name")
    for new, old in items:
        if new not in TARGETS or not old:
            raise InputError(
                f"--columns {new}={old}: give NEW=OLD with NEW one of {', '.join(TARGETS)}"
            )
        if old not in present:
            fix = f"{did_you_mean(old, present)}there are {shown_names(present)}"
            raise InputError(f"--columns {new}={old}: there is no column {old}: {fix}")
    replaced = set(new_names.values()) & set(present) - new_names.keys()
    if not isinstance(rows, list):
        return rows.remove_columns(list(replaced)).rename_columns(new_names)
    renamed = []
    for row in rows:
        renamed.append(
            {new_names.get(name, name): row[name] for name in row if name not in replaced}
        )
    return renamed


def _present_name(asked: str, present: Collection[str]) -> str:
    """Return the name of the column that is asked for, whose real name may have spaces around it."""
    if asked in present:
        return asked
    same = [name for name in present if isinstance(name, str) and name.strip() == asked]
    return same[0] if len(same) == 1 else asked


# Rows to the columns of a task


def to_preferences(
    rows: Iterable[dict],
    source: str,
    bad_rows: str = "error",
    form: Form | None = None,
    place_of: Callable[[int], str] = "row {}".format,
) -> tuple[list[dict], Counter]:
    """Convert rows to `(rows of a task, counts)`.

    Without `form`, the rows' columns choose the shape (see `SHAPES`). Pairs become `{"prompt", "chosen", "rejected"}`
    dicts of strings, answers for SFT `{"prompt", "chosen"}`, only prompts `{"prompt"}`. White space at the end of a
    response is stripped, since the end-of-sequence token follows it; the rest stays unchanged.

    Rows with a fault of `DROPPED` are dropped and counted by reason. Any other bad row raises `InputError` that names
    `source` and the row; with `bad_rows="drop"` it is dropped and counted, too: `missing_column`, `not_text`,
    `bad_chat`, `no_shared_turn`, `empty_prompt`. `counts` also has `read` and `kept`. A column that all rows lack,
    lists that all rows have as text, answers that repeat their prompts, or no row left always raise `InputError`.
    `place_of` names the place of a row by its number, for rows of several files.
    """
    form = form or shape_of(columns_of(rows))
    _check_columns(rows, source, form)
    if form.name and isinstance(rows, list):  # the paper's data, without a name, have JSON as text
        refuse_written_lists(rows, form.columns, source)
    kept = []
    counts = Counter(read=0)
    for number, row in enumerate(rows, start=1):
        counts["read"] += 1
        try:
            _check_cells(row, form)
            kept.append(form.convert(_named(row, form)) | _carried(row, form))
        except BadRow as bad:
            counts[bad.reason] += 1
            if bad_rows == "error" and bad.reason not in DROPPED:
                text = re.sub(
                    r"'(\w+)'", lambda name: repr(form.names.get(name[1], name[1])), str(bad)
                )
                fix = "correct or delete the row, or drop such rows with --bad_rows drop"
                raise InputError(f"{source}: {place_of(number)}: {text}: {fix}") from None
    if not kept:
        reasons = [f"{reason} {n}" for reason, n in counts.items() if reason != "read"]
        dropped = ", ".join(reasons) or "no rows"
        raise InputError(f"{source}: no row can be used ({dropped}): give at least one whole row")
    _check_repeats(kept, source)
    counts["kept"] = len(kept)
    return kept, counts


def _check_cells(row: Mapping, form: Form) -> None:
    """Raise `BadRow` if a row lacks a column of its form, or one that a function of the user needs."""
    for column in form.columns:
        if column not in row:
            raise BadRow("missing_column", f"no {column!r}")
    for column in form.needed:
        if row.get(column) is None:
            raise BadRow("missing_column", f"no {column!r}")


def _named(row: Mapping, form: Form) -> Mapping:
    """Return the columns that the form reads, by the names of the task; the input of an instruction goes below it."""
    named = {name: row[name] for name in (*form.columns, *form.optional) if name in row}
    for new, old in form.names.items():
        named[new] = row[old]
    if form.names.get("prompt") in INSTRUCTIONS:
        texts = [named.get("prompt"), named.get("input")]
        if all(isinstance(text, str) and text.strip() for text in texts):
            named["prompt"] = "\n".join(texts)
    return named


def _carried(row: Mapping, form: Form) -> dict[str, str]:
    """Return the columns that go along with the prompt, as JSON; a value that JSON lacks, such as a date, as text."""
    if form.row is None:
        return {}
    columns = {name: row.get(name) for name in form.row}
    return {ROW: json.dumps(columns, default=str)}


def _check_columns(rows: Iterable[dict], source: str, form: Form) -> None:
    """Raise `InputError` if a column is missing in all rows."""
    present = columns_of(rows)
    if not rows or set(form.columns) <= set(present):
        return
    # a damaged file's names may have line breaks
    names = " ".join(shown_names(present).split()) or "none"
    expected = ", ".join(form.columns)
    fix = "rename or add the missing columns"
    if form.columns == COLUMNS:
        expected += " (or chosen, rejected with whole transcripts; or prompt and completion, or messages, for SFT)"
        fix += ", or name yours, as by --columns prompt=NAME,chosen=NAME,rejected=NAME (SFT: completion=NAME)"
        is_compared = any(names_a_compared_answer(str(name)) for name in present)
        if is_compared and not re.search("(?i)chosen|reject", names):
            fix = "write the better answer of each row into chosen, and the other into rejected"
    if any(_has_space_around(name) for name in present):
        fix = (
            "names have spaces around them: strip them in pandas by rows.rename(columns=str.strip)"
        )
    raise InputError(f"{source}: columns found: {names}; expected: {expected}: {fix}")


def shown_names(columns: Iterable) -> str:
    """Return the names of columns in a line; those with spaces around them are in quotes, which show the spaces."""
    shown = []
    for name in columns:
        shown.append(repr(name) if _has_space_around(name) else str(name))
    return ", ".join(shown)


def _has_space_around(name) -> bool:
    return isinstance(name, str) and name != name.strip("\ufeff\u200b").strip()


def _check_repeats(rows: Sequence[Mapping], source: str) -> None:
    """Raise `InputError` if the answers of most rows begin with their prompt: they are whole transcripts."""
    answered = [row for row in rows if "chosen" in row]
    repeats = 0
    for row in answered:
        texts = [row[name] for name in COLUMNS if name in row]
        repeats += repeats_prompt(*texts)
    if 2 * repeats > len(answered):
        fix = "cut the prompts off the answers, or leave the column prompt out if both are whole transcripts"
        raise InputError(
            f"{source}: in {repeats} of {len(answered)} rows answers begin with their prompt: {fix}"
        )


def repeats_prompt(prompt: str, *answers: str) -> bool:
    """Return whether an answer begins with the prompt, or like a transcript."""
    return any(answer.lstrip().startswith((prompt.strip(), HUMAN.strip())) for answer in answers)


def columns_of(rows: Iterable[dict]) -> list[str]:
    """Return the columns that any of the rows has; of a stream, those of the first."""
    if (known := getattr(rows, "column_names", None)) is not None:
        return known
    first = rows if isinstance(rows, list) else islice(rows, 1)
    columns: dict[str, None] = {}
    for row in first:
        columns.update(dict.fromkeys(row))
    return list(columns)
