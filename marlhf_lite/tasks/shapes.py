"""The shapes of rows that users of TRL, LLaMA-Factory and OpenRLHF have, and how they become rows of a task.

`SHAPES` is tried in order: the first one whose columns are all there is taken, and the run says which it took.
"""

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from trl.data_utils import maybe_convert_to_chatml

from marlhf_lite.tasks.chats import Chat
from marlhf_lite.tasks.templates import (
    ASSISTANT,
    COLUMNS,
    HUMAN,
    BadRow,
    Form,
    check_prompt,
    check_text,
    checked_pair,
    split_transcripts,
)
from marlhf_lite.utils.errors import InputError

INSTRUCTIONS = ("instruction", "question", "query")  # names of prompts that may have an `input` below them (Alpaca)
PROMPT_NAMES = ("prompt", *INSTRUCTIONS, "input")
ANSWER_NAMES = ("completion", "response", "output", "answer")
LABELS = ("label", "kto_tag")  # whether an answer is one to learn, in the data of KTO
FALSE = ("false", "0", "0.0")
TARGETS = (*COLUMNS, "completion", "messages", "system")  # what `--columns` may name
_MARKS = {"user": HUMAN, "assistant": ASSISTANT}
_ROLES = {"human": "user", "prompter": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
# Names of answers of which one is better: without chosen and rejected, nobody can tell which.
_NEAR = re.compile(
    r"chosen|reject|prefer|winner|loser|(response|answer|completion|output)s?_?([abjk\d]|good|bad)$", re.I
)
_REST = 1000  # rows that are tried before all of them are taken for faulty
TEXTS_ALONE = "texts alone"  # the template of rows where most are texts, and the others would need a chat template
Turns = list[dict[str, str]]


# Rows of a shape


def _pair(row: Mapping, template: str | Chat = "paper") -> dict[str, str]:
    """Convert a pair of texts or chats."""
    prompt, answers = _texts(row, COLUMNS[1:], template)
    pair = checked_pair(prompt, *answers)
    return pair | dict(zip(COLUMNS[1:], answers, strict=True)) if isinstance(template, Chat) else pair


def _whole_pair(row: Mapping, template: str | Chat = "paper") -> dict[str, str]:
    """Convert a pair of whole transcripts or chats, which begin with their prompt."""
    if isinstance(row["chosen"], list | dict) or isinstance(row["rejected"], list | dict):
        return _pair(row, template)
    for column in COLUMNS[1:]:
        check_text(row[column], column)
    texts = split_transcripts(row["chosen"], row["rejected"])
    return _pair({**row, **dict(zip(COLUMNS, texts, strict=True))}, template)


def _answered(row: Mapping, template: str | Chat = "paper") -> dict[str, str]:
    """Convert a prompt and its answer, or messages, whose last one is the answer."""
    if bad := next((name for name in LABELS if str(row.get(name)).strip().lower() in FALSE), ""):
        raise BadRow("labelled_false", f"{bad!r} is {row[bad]}: the answer is one to avoid")
    prompt, (answer,) = _texts(row, ("completion",), template)
    check_prompt(prompt)
    if not answer.strip():
        raise BadRow("empty_response", "the answer is empty")
    return {"prompt": prompt, "chosen": answer}


def _question(row: Mapping, template: str | Chat = "paper") -> dict[str, str]:
    """Convert a prompt alone, a text or messages."""
    check_prompt(prompt := _texts(row, (), template)[0])
    return {"prompt": prompt}


def _texts(row: Mapping, sides: Sequence[str], template: str | Chat) -> tuple[str, list[str]]:
    """Return the prompt and the answers of a row, of texts as they stand, of messages as they are written."""
    choice = template.choice if isinstance(template, Chat) else "none"
    has_chats = any(isinstance(row.get(column), list | dict) for column in ("prompt", *sides))
    if has_chats and template == TEXTS_ALONE:
        raise BadRow("bad_chat", "messages, where most rows are text")
    if not has_chats and choice != "text":
        if choice not in ("none", "templated"):
            raise BadRow("bad_chat", "text, and no list of messages as in most rows")
        if "prompt" not in row:
            check_text(row[sides[0]], sides[0])
            raise BadRow("bad_chat", f"{sides[0]!r} is not a list of messages")
        for column in ("prompt", *sides):
            check_text(row.get(column), column)
        prompt, answers = row["prompt"], [row[side] for side in sides]
        return template.read(prompt, answers) if choice != "none" else (prompt, [text.rstrip() for text in answers])
    system = row.get("system") if choice != "none" else None  # transcripts have no place for it
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    chats = [chat if chat[:1] and chat[0]["role"] == "system" else first + chat for chat in _chats(row, sides)]
    for side, chat in zip(sides, chats, strict=False):
        if chat[-1]["role"] != "assistant":
            raise BadRow("bad_chat", f"{side!r} does not end with a message of the assistant")
    start = len(chats[0]) - len(sides) if len(sides) < 2 else _shared(*chats)
    return _write(template, chats[0][:start], [chat[start:] for chat in chats if sides])


# Messages


def _chats(row: Mapping, sides: Sequence[str]) -> list[Turns]:
    """Return the messages of each answer behind those of the prompt; of a prompt alone its own."""
    prompt = row.get("prompt")
    before = _of_text(prompt) if isinstance(prompt, str) else [] if prompt is None else _messages(prompt, "prompt")
    return [_behind(before, row[side], side, isinstance(prompt, str)) for side in sides] or [before]


def _behind(before: Turns, answer, side: str, is_text: bool) -> Turns:
    if isinstance(answer, str):
        check_text(answer, side)
        return [*before, {"role": "assistant", "content": re.sub(r"^ (?=\S)", "", answer)}]
    turns = _messages(answer, side)
    if not turns:
        raise BadRow("bad_chat", f"{side!r} has no messages")
    if turns[: len(before)] == before or (is_text and _holds(turns, before[0]["content"])):
        return turns
    if turns[0]["role"] in ("system", "user"):
        raise BadRow("bad_chat", f"{side!r} begins with a message of the {turns[0]['role']}, but not with 'prompt'")
    return before + turns


def _holds(turns: Turns, prompt: str) -> bool:
    """Return whether a message of the user and a prompt hold one another: one of them may have more around it."""
    texts = [turn["content"].strip() for turn in turns if turn["role"] == "user"]
    return any(text and (text in prompt or prompt.strip() in text) for text in texts)


def _messages(value, column: str) -> Turns:
    """Return messages with `role` and `content`, of `from` and `value` too; parts of text are joined."""
    value = value.get("messages", [value]) if isinstance(value, dict) else value
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise BadRow("bad_chat", f"{column!r} is not a list of messages")
    turns = maybe_convert_to_chatml({"messages": [dict(turn) for turn in value]})["messages"]
    return [_message(turn.get("role"), turn.get("content"), column) for turn in turns]


def _message(role, content, column: str) -> dict[str, str]:
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        if other := [part for part in content if not isinstance(part.get("text"), str)]:
            raise BadRow("bad_chat", f"{column!r} has a part of type {other[0].get('type')!r}: only text is read")
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadRow("bad_chat", f"{column!r} has a message without a role and a text")
    return {"role": _ROLES.get(role, role), "content": content}


def _of_text(prompt: str) -> Turns:
    """Return the turns of a transcript that waits for the assistant, or one turn of the user."""
    check_text(prompt, "prompt")
    if not re.match(r"\s*Human:.*\nAssistant:\s*$", prompt, re.S):
        return [{"role": "user", "content": prompt}]
    pieces = re.split(r"(?:^|\n)(Human|Assistant):", prompt.strip().removesuffix("Assistant:"))[1:]
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return [{"role": "user" if name == "Human" else "assistant", "content": text.strip()} for name, text in turns]


def _shared(chosen: Turns, rejected: Turns) -> int:
    """Return how many messages two chats share, up to one that the assistant answers in both."""
    most = min(len(chosen), len(rejected)) - 1
    shared = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    while shared > 0 and not chosen[shared]["role"] == rejected[shared]["role"] == "assistant":
        shared -= 1
    if shared <= 0:
        raise BadRow("no_shared_turn", "'chosen' and 'rejected' share no message before an answer of the assistant")
    return shared


def _write(template: str | Chat, prompt: Turns, answers: Sequence[Turns]) -> tuple[str, list[str]]:
    """Return a prompt and its answers as the chat template writes them, or without one as a transcript."""
    if not prompt or not prompt[-1]["content"].strip():
        raise BadRow("empty_prompt", "the last message before the answer is empty")
    if prompt[-1]["role"] == "assistant":
        raise BadRow("bad_chat", "the last message before the answer is the assistant's, and the answer is, too")
    if any(not turns[-1]["content"].strip() for turns in answers):
        raise BadRow("empty_response", "an answer is empty")
    if isinstance(template, Chat):
        return template.write(prompt, answers)
    if prompt[0]["role"] != "user" or any(turn["role"] not in _MARKS for turns in (prompt, *answers) for turn in turns):
        fault = "the messages do not begin with a user's, or are of others than a user and an assistant"
        raise BadRow("bad_chat", f"{fault}, and no chat template writes them")
    return _transcript(prompt) + ASSISTANT, [_transcript(turns)[len(ASSISTANT) :].rstrip() for turns in answers]


def _transcript(turns: Turns) -> str:
    """Write messages as an HH transcript; the indentation of the assistant's code stays."""
    texts = [(_MARKS[turn["role"]], turn["content"].rstrip(), turn["role"] == "assistant") for turn in turns]
    return "".join(
        mark + (text if is_code and text[:1].isspace() else f" {text.strip()}") for mark, text, is_code in texts
    )


# The table


def _shape(name: str, kind: Form, **columns: str) -> Form:
    """Return the form of rows whose columns have other names than those of `kind`."""

    def convert(row: Mapping, template: str | Chat = "paper") -> dict[str, str]:
        named = {new: row[old] for new, old in columns.items()}
        texts = [named.get("prompt"), *(row.get(column) for column in more)]
        if all(isinstance(text, str) and text.strip() for text in texts):
            named["prompt"] = "\n".join(texts)
        try:
            return kind.convert({column: row.get(column) for column in kind.optional} | named, template)
        except BadRow as bad:  # which names a column of `kind`
            text = re.sub(r"'(\w+)'", lambda name: repr(columns.get(name[1], name[1])), str(bad))
            raise BadRow(bad.reason, text) from None

    more = ("input",) if columns.get("prompt") in INSTRUCTIONS else ()
    return replace(kind, name=name, columns=tuple(columns.values()), convert=convert, optional=kind.optional + more)


PAIRS = Form(COLUMNS, _pair, name="pairs", optional=("system",))
TRANSCRIPTS = replace(PAIRS, columns=COLUMNS[1:], convert=_whole_pair, name="pairs of whole transcripts")
# Answers for SFT alone: a later stage of the same file has its prompts.
ANSWERS = replace(
    PAIRS, columns=("prompt", "completion"), convert=_answered, known=("empty_response", "labelled_false"),
    fractions=(0.2, 0.0, 0.8), optional=("system", *LABELS),
)  # fmt: skip
PROMPTS = replace(PAIRS, columns=COLUMNS[:1], convert=_question, fractions=(0.0, 0.0, 1.0), name="prompts alone")
_SIDED = {"chosen": "chosen", "rejected": "rejected"}
SHAPES = (
    _shape("LLaMA-Factory's pairs", PAIRS, prompt="conversations", **_SIDED),
    _shape("OpenAI's pairs", PAIRS, prompt="input", chosen="preferred_output", rejected="non_preferred_output"),
    PAIRS,
    *(_shape(f"pairs, with {name} as the prompt", PAIRS, prompt=name, **_SIDED) for name in PROMPT_NAMES[1:]),
    TRANSCRIPTS,
    _shape("messages, for SFT", ANSWERS, completion="messages"),
    _shape("ShareGPT's conversations, for SFT", ANSWERS, completion="conversations"),
    *(
        _shape(f"{prompt} and {answer}, for SFT", ANSWERS, prompt=prompt, completion=answer)
        for prompt in PROMPT_NAMES
        for answer in ANSWER_NAMES
    ),
    PROMPTS,
)


def shape_of(columns: Collection[str], are_named: bool = False) -> Form:
    """Return the first shape whose columns are all there; `PAIRS` where none is.

    It is `PAIRS`, too, where other columns are near its names, unless the user has named the columns.
    """
    form = next((form for form in SHAPES if set(form.columns) <= set(columns)), PAIRS)
    near = any(_NEAR.search(str(column)) for column in columns)
    return PAIRS if near and not are_named and form is not SHAPES[1] and "rejected" not in form.columns else form


def rename(rows, columns: str):
    """Return rows, or a data set, with the columns that `--columns` names, as `prompt=question,chosen=good`.

    A column that had the new name is left out. Raises `InputError` for a name that is not there.
    """
    items = [item.strip().partition("=")[::2] for item in columns.split(",") if item.strip()]
    for words in zip(*items, strict=True):
        if twice := [name for name in words if words.count(name) > 1]:
            raise InputError(f"--columns {columns}: {twice[0]} stands twice: give each column one name")
    names, present = {old: new for new, old in items}, columns_of(rows)
    for new, old in items:
        if new not in TARGETS or not old:
            raise InputError(f"--columns {new}={old}: give NEW=OLD, where NEW is one of {', '.join(TARGETS)}")
        if old not in present:
            near = difflib.get_close_matches(old, present, n=1) or present
            raise InputError(f"--columns {new}={old}: there is no column {old}: did you mean {' or '.join(near)}?")
    replaced = set(names.values()) & set(present) - names.keys()
    if isinstance(rows, list):
        return [{names.get(name, name): row[name] for name in row if name not in replaced} for row in rows]
    return rows.remove_columns(list(replaced)).rename_columns(names)


# Rows to the columns of a task


def to_preferences(
    rows: Iterable[dict], source: str, bad_rows: str = "error", form: Form | None = None, limit: int | None = None
) -> tuple[list[dict], Counter]:
    """Convert rows to `(rows of a task, counts)`; with `limit`, read only until there are that many.

    Without `form`, the rows' columns choose the shape (see `SHAPES`). Pairs become `{"prompt", "chosen", "rejected"}`
    dicts of strings, answers for SFT `{"prompt", "chosen"}`, prompts alone `{"prompt"}`. White space at the end of a
    response is stripped, since the end-of-sequence token follows it; all else is kept.

    Rows with a fault that the form knows, such as a blank response, are dropped and counted by reason. Other bad rows
    raise `InputError` that names `source` and the row; with `bad_rows="drop"` they are dropped and counted:
    `missing_column`, `not_text`, `bad_chat`, `no_shared_turn`, `empty_prompt`, `equal_pair`. `counts` also has `read`
    and `kept`. Columns that all rows lack, answers that repeat their prompts, and no row left, are always an
    `InputError`.
    """
    form = form or shape_of(columns_of(rows))
    _check_columns(rows, source, form)
    kept, counts, fault = [], Counter(read=0), ""
    for number, row in enumerate(rows, start=1):
        counts["read"] += 1
        try:
            if missing := [column for column in form.columns if column not in row]:
                raise BadRow("missing_column", f"no {missing[0]!r}")
            kept.append(form.convert(row))
        except BadRow as bad:
            counts[bad.reason] += 1
            if bad_rows == "error" and bad.reason not in form.known:
                fault = fault or f"row {number}: {bad}: correct or delete the row"
        if len(kept) == limit or (fault and (kept or number > _REST)):
            break
    if fault:
        raise InputError(f"{source}: {fault}{', or drop such rows with --bad_rows drop' if kept else ''}")
    if not kept:
        dropped = ", ".join(f"{reason} {n}" for reason, n in counts.items() if reason != "read") or "no rows"
        raise InputError(f"{source}: no row can be used ({dropped}): give at least one whole row")
    _check_repeats(kept, source)
    counts["kept"] = len(kept)
    return kept, counts


def _check_columns(rows: Iterable[dict], source: str, form: Form) -> None:
    """Raise `InputError` where a column is missing in all rows; it says what to rename where names are near."""
    present = columns_of(rows)
    if not rows or set(form.columns) <= set(present):
        return
    names = " ".join(", ".join(map(str, present)).split()) or "none"  # a damaged file's names may hold line breaks
    expected, fix = ", ".join(form.columns), "rename or add the missing columns"
    if form.columns == COLUMNS:
        expected += " (or chosen, rejected with whole transcripts; or prompt and completion, or messages, for SFT)"
        fix += ", or name yours, as by --columns prompt=NAME,chosen=NAME,rejected=NAME (SFT: completion=NAME)"
        near = {side: [name for name in present if side[:6] in name.lower()] for side in COLUMNS[1:]}
        names_of = {side: columns[0] for side, columns in near.items() if columns not in ([], [side])}
        if names_of and all(len(columns) == 1 for columns in near.values()):
            options = ",".join(f"{side}={name}" for side, name in names_of.items())
            fix = f"rename {', '.join(names_of.values())} to {', '.join(names_of)}, or give --columns {options}"
    raise InputError(f"{source}: columns found: {names}; expected: {expected}: {fix}")


def _check_repeats(rows: Sequence[Mapping], source: str) -> None:
    """Raise `InputError` where most answers begin with their prompt: they are whole transcripts."""
    texts = [(row["prompt"].strip(), row["chosen"].lstrip()) for row in rows if "chosen" in row]
    count = sum(answer.startswith(prompt) or answer.startswith(HUMAN.strip()) for prompt, answer in texts)
    if 2 * count > len(texts):
        fix = "cut the prompts off the answers, or leave the column prompt out where both are whole transcripts"
        raise InputError(f"{source}: {count} of {len(texts)} answers begin with their prompt: {fix}")


def columns_of(rows: Iterable[dict]) -> list[str]:
    """Return the columns that any of `rows` has."""
    if (known := getattr(rows, "column_names", None)) is not None:
        return known
    first = rows if isinstance(rows, list) else islice(rows, 1)
    return list(dict.fromkeys(column for row in first for column in row))
