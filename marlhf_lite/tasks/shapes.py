"""The shapes of rows that users of TRL, LLaMA-Factory and OpenRLHF have, and how they become rows of a task.

The first of `SHAPES` whose columns are all present is taken, and the run says which.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product

from trl.data_utils import extract_prompt, maybe_convert_to_chatml

from marlhf_lite.tasks import templates
from marlhf_lite.tasks.chats import Chat
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
from marlhf_lite.utils.errors import InputError, did_you_mean

# names of prompts that may have an `input` below them (Alpaca)
INSTRUCTIONS = ("instruction", "question", "query")
PROMPT_NAMES = ("prompt", *INSTRUCTIONS, "input", "context_messages")
ANSWER_NAMES = ("completion", "response", "output", "answer")
LABELS = ("label", "kto_tag")  # in the data of KTO: whether to learn an answer
TARGETS = (*COLUMNS, "completion", "messages", "system")  # what `--columns` may name
_MARKS = {"user": HUMAN, "assistant": ASSISTANT}
_ROLES = {
    "human": "user",
    "prompter": "user",
    **dict.fromkeys(("gpt", "model", "bot", "ai"), "assistant"),
}
# Names of answers of which one is better: without chosen and rejected, the names do not tell which.
_NEAR = re.compile(
    r"(?i)chosen|reject|prefer|winner|loser|better|worse|(response|answer|completion|output|ref)s?_?([abjk\d]|good|bad)$"
)
# the template of data with mostly texts, whose other rows would need a chat template
ONLY_TEXTS = "only texts"
Turns = list[dict[str, str]]


# Rows of a shape


def _row(
    row: Mapping, template: str | Chat = "paper", sides: Sequence[str] = COLUMNS[1:]
) -> dict[str, str]:
    """Convert a prompt and its answers: texts stay unchanged, the template writes messages."""
    choice = template.choice if isinstance(template, Chat) else "none"
    has_chats = any(isinstance(row.get(column), list | dict) for column in ("prompt", *sides))
    if has_chats and template == ONLY_TEXTS:
        raise BadRow("bad_chat", "messages, but most rows are text")
    row = row if has_chats else _texts(row, sides)
    if has_chats or choice == "text":
        prompt, answers = _written(row, sides, template)
        if choice == "text" and not has_chats:
            template.said[prompt] = row["prompt"]
    elif choice == "none":
        prompt, answers = row["prompt"], [row[side].rstrip() for side in sides]
    else:
        raise BadRow("bad_chat", "text, but most rows are lists of messages")
    return templates.checked_row(prompt, **dict(zip(COLUMNS[1:], answers, strict=False)))


def _texts(row: Mapping, sides: Sequence[str]) -> Mapping:
    """Return the row with a prompt: its own, or the start that two whole transcripts share."""
    for column in (*COLUMNS[: "prompt" in row], *sides):
        templates.check_text(row[column], column)
    if "prompt" in row:
        return row
    if len(sides) < 2:
        raise BadRow("bad_chat", f"{sides[0]!r} is not a list of messages")
    texts = dict(
        zip(COLUMNS, templates.split_transcripts(*(row[side] for side in sides)), strict=True)
    )
    if human := next(
        (side for side in sides if texts[side].rfind(HUMAN) > texts[side].rfind(ASSISTANT)), ""
    ):
        raise BadRow("human_last", f"{human!r} ends with a turn of the human")
    return {**row, **texts}


def _answered(row: Mapping, template: str | Chat = "paper") -> dict[str, str]:
    """Convert a prompt and its answer, or messages that end with the answer."""
    for name in LABELS:
        if (label := str(row.get(name, True)).strip().lower()) == "false":
            raise BadRow("labelled_false", f"{name!r} is false: an answer to avoid")
        if label != "true":
            raise BadRow(
                "bad_label",
                f"{name!r} is {row[name]!r}, not true or false: rename a column of classes",
            )
    return _row(row, template, ("completion",))


# Messages


def _written(row: Mapping, sides: Sequence[str], template: str | Chat) -> tuple[str, list[str]]:
    """Return the prompt and the answers of messages, after the column system if a chat template writes them."""
    prompt, system = row.get("prompt"), row.get("system") if isinstance(template, Chat) else None
    before = (
        _of_text(prompt)
        if isinstance(prompt, str)
        else []
        if prompt is None
        else _messages(prompt, "prompt")
    )
    chats = [_with_answer(before, row[side], side, isinstance(prompt, str)) for side in sides] or [
        before
    ]
    if isinstance(system, str) and system.strip():
        first = [{"role": "system", "content": system}]
        chats = [
            chat if chat[:1] and chat[0]["role"] == "system" else first + chat for chat in chats
        ]
    start = len(chats[0]) - len(sides) if len(sides) < 2 else _shared(*chats)
    return _write(template, chats[0][:start], [chat[start:] for chat in chats if sides])


def _with_answer(before: Turns, answer, side: str, is_text: bool) -> Turns:
    """Return the turns of a prompt and its answer; the answer may repeat the prompt."""
    if isinstance(answer, str):
        templates.check_text(answer, side)
        return [*before, {"role": "assistant", "content": re.sub(r"^ (?=\S)", "", answer)}]
    turns = _messages(answer, side)
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


def _messages(value, column: str) -> Turns:
    """Return messages with `role` and `content`, also from `from` and `value`; parts of text are joined."""
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise BadRow("bad_chat", f"{column!r} is neither text nor a list of messages")
    turns = maybe_convert_to_chatml({"messages": [dict(turn) for turn in value]})["messages"]
    return [_message(turn.get("role"), turn.get("content"), column) for turn in turns]


def _message(role, content, column: str) -> dict[str, str]:
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        if other := [part for part in content if not isinstance(part.get("text"), str)]:
            raise BadRow(
                "bad_chat",
                f"{column!r} has a part of type {other[0].get('type')!r}: only text is read",
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadRow("bad_chat", f"{column!r} has a message without a role and a text")
    return {"role": _ROLES.get(role.strip().lower(), role.strip().lower()), "content": content}


def _of_text(prompt: str) -> Turns:
    """Return the turns of a transcript that ends before the assistant's turn; other text is one turn of the user."""
    templates.check_text(prompt, "prompt")
    if not re.match(r"\s*Human:.*\nAssistant:\s*$", prompt, re.S):
        return [{"role": "user", "content": prompt}]
    pieces = re.split(r"(?:^|\n)(Human|Assistant):", prompt.strip().removesuffix("Assistant:"))[1:]
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return [
        {"role": "user" if name == "Human" else "assistant", "content": text.strip()}
        for name, text in turns
    ]


def write_turns(said: str | Turns, template: str | Chat) -> str:
    """Return messages, or a text as the user's, as a prompt of this template."""
    return _write(template, _of_text(said) if isinstance(said, str) else said, [])[0]


def _shared(chosen: Turns, rejected: Turns) -> int:
    """Return how many messages two chats share before the assistant answers in both."""
    shared = len(extract_prompt({"chosen": chosen, "rejected": rejected})["prompt"])
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
    if any(not turns[-1]["content"].strip() for turns in answers):
        raise BadRow("empty_response", "an answer is empty")
    if isinstance(template, Chat):
        return template.write(prompt, answers)
    if prompt[0]["role"] != "user" or any(
        turn["role"] not in _MARKS for turns in (prompt, *answers) for turn in turns
    ):
        fault = "the messages do not begin with a user's, or have roles besides user and assistant"
        raise BadRow("bad_chat", f"{fault}, which a chat template writes (--chat_template FILE)")
    return _transcript(prompt) + ASSISTANT, [
        _transcript(turns)[len(ASSISTANT) :].rstrip() for turns in answers
    ]


def _transcript(turns: Turns) -> str:
    """Write messages as an HH transcript; code of the assistant keeps its indentation."""
    texts = [
        (_MARKS[turn["role"]], turn["content"].rstrip(), turn["role"] == "assistant")
        for turn in turns
    ]
    return "".join(
        mark + (text if is_code and text[:1].isspace() else f" {text.strip()}")
        for mark, text, is_code in texts
    )


# The table


def _shape(name: str, form: Form, **names: str) -> Form:
    """Return the form of rows whose columns have these names, else those of `form`."""
    below = ("input",) if names.get("prompt") in INSTRUCTIONS else ()
    columns, optional = (
        tuple(names.get(column, column) for column in form.columns),
        form.optional + below,
    )
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
SHAPES = (
    _shape("LLaMA-Factory's pairs", PAIRS, prompt="conversations"),
    PAIRS,
    *(_shape(f"pairs, with {name} as the prompt", PAIRS, prompt=name) for name in PROMPT_NAMES[1:]),
    TRANSCRIPTS,
    _shape("messages, for SFT", MESSAGES, completion="messages"),
    _shape("ShareGPT's conversations, for SFT", MESSAGES, completion="conversations"),
    *(
        _shape(f"{prompt} and {answer}, for SFT", ANSWERS, prompt=prompt, completion=answer)
        for prompt, answer in product(PROMPT_NAMES, ANSWER_NAMES)
    ),
    PROMPTS,
)


def shape_of(columns: Collection[str], names: str = "") -> Form:
    """Return the first shape whose columns are all present and include those of `--columns`; else `PAIRS`.

    It is also `PAIRS` if other columns have names like those of pairs, unless the user has named the columns.
    """
    named = {new for new, _ in _names(names)}
    known = (form for form in SHAPES if named <= {*form.columns, *form.optional})
    form = next((form for form in known if set(form.columns) <= set(columns)), PAIRS)
    near = any(_NEAR.search(str(column)) for column in columns)
    return PAIRS if near and not named and not form.fractions[1] else form


def _names(columns: str) -> list[list[str]]:
    """Return the new and the old name of each column in `--columns`."""
    return [
        [name.strip() for name in item.partition("=")[::2]]
        for item in columns.split(",")
        if item.strip()
    ]


def rename(rows, columns: str):
    """Return rows, or a data set, with the columns that `--columns` names, as `prompt=question,chosen=good`.

    A column that had the new name is left out. Raises `InputError` for a missing name.
    """
    items = _names(columns)
    names, present = {old: new for new, old in items}, columns_of(rows)
    if len(items) > min(len(names), len(set(names.values()))):
        raise InputError(f"--columns {columns}: a name occurs twice: give each column one name")
    for new, old in items:
        if new not in TARGETS or not old:
            raise InputError(
                f"--columns {new}={old}: give NEW=OLD with NEW one of {', '.join(TARGETS)}"
            )
        if old not in present:
            fix = f"{did_you_mean(old, present)}there are {', '.join(present)}"
            raise InputError(f"--columns {new}={old}: there is no column {old}: {fix}")
    replaced = set(names.values()) & set(present) - names.keys()
    if isinstance(rows, list):
        return [
            {names.get(name, name): row[name] for name in row if name not in replaced}
            for row in rows
        ]
    return rows.remove_columns(list(replaced)).rename_columns(names)


# Rows to the columns of a task


def to_preferences(
    rows: Iterable[dict], source: str, bad_rows: str = "error", form: Form | None = None
) -> tuple[list[dict], Counter]:
    """Convert rows to `(rows of a task, counts)`.

    Without `form`, the rows' columns choose the shape (see `SHAPES`). Pairs become `{"prompt", "chosen", "rejected"}`
    dicts of strings, answers for SFT `{"prompt", "chosen"}`, only prompts `{"prompt"}`. White space at the end of a
    response is stripped, since the end-of-sequence token follows it; the rest stays unchanged.

    Rows with a fault of `DROPPED` are dropped and counted by reason. Any other bad row raises `InputError` that names
    `source` and the row; with `bad_rows="drop"` it is dropped and counted, too: `missing_column`, `not_text`,
    `bad_chat`, `no_shared_turn`, `empty_prompt`. `counts` also has `read` and `kept`. A column that all rows lack,
    answers that repeat their prompts, or no row left always raise `InputError`.
    """
    form = form or shape_of(columns_of(rows))
    _check_columns(rows, source, form)
    kept, counts = [], Counter(read=0)
    for number, row in enumerate(rows, start=1):
        counts["read"] += 1
        try:
            missing = [column for column in form.columns if column not in row]
            if missing := missing or [column for column in form.needed if row.get(column) is None]:
                raise BadRow("missing_column", f"no {missing[0]!r}")
            kept.append(form.convert(_named(row, form)) | _carried(row, form))
        except BadRow as bad:
            counts[bad.reason] += 1
            if bad_rows == "error" and bad.reason not in DROPPED:
                text = re.sub(
                    r"'(\w+)'", lambda name: repr(form.names.get(name[1], name[1])), str(bad)
                )
                fix = "correct or delete the row, or drop such rows with --bad_rows drop"
                raise InputError(f"{source}: row {number}: {text}: {fix}") from None
    if not kept:
        dropped = (
            ", ".join(f"{reason} {n}" for reason, n in counts.items() if reason != "read")
            or "no rows"
        )
        raise InputError(f"{source}: no row can be used ({dropped}): give at least one whole row")
    _check_repeats(kept, source)
    counts["kept"] = len(kept)
    return kept, counts


def _named(row: Mapping, form: Form) -> Mapping:
    """Return the columns that the form reads, by the names of the task; the input of an instruction goes below it."""
    row = {name: row[name] for name in (*form.columns, *form.optional) if name in row}
    row |= {new: row[old] for new, old in form.names.items()}
    texts = [
        row.get("prompt"),
        row.get("input") if form.names.get("prompt") in INSTRUCTIONS else "",
    ]
    return (
        row | {"prompt": "\n".join(texts)}
        if all(isinstance(x, str) and x.strip() for x in texts)
        else row
    )


def _carried(row: Mapping, form: Form) -> dict[str, str]:
    """Return the columns that go along with the prompt, as JSON; a value that JSON lacks, such as a date, as text."""
    return (
        {}
        if form.row is None
        else {ROW: json.dumps({name: row.get(name) for name in form.row}, default=str)}
    )


def _check_columns(rows: Iterable[dict], source: str, form: Form) -> None:
    """Raise `InputError` if a column is missing in all rows."""
    present = columns_of(rows)
    if not rows or set(form.columns) <= set(present):
        return
    # a damaged file's names may have line breaks
    names = " ".join(", ".join(map(str, present)).split()) or "none"
    expected, fix = ", ".join(form.columns), "rename or add the missing columns"
    if form.columns == COLUMNS:
        expected += " (or chosen, rejected with whole transcripts; or prompt and completion, or messages, for SFT)"
        fix += ", or name yours, as by --columns prompt=NAME,chosen=NAME,rejected=NAME (SFT: completion=NAME)"
        if not re.search("(?i)chosen|reject", names) and any(
            _NEAR.search(str(name)) for name in present
        ):
            fix = "write the better answer of each row into chosen, and the other into rejected"
    raise InputError(f"{source}: columns found: {names}; expected: {expected}: {fix}")


def _check_repeats(rows: Sequence[Mapping], source: str) -> None:
    """Raise `InputError` if the answers of most rows begin with their prompt: they are whole transcripts."""
    repeats = [
        repeats_prompt(*(row[name] for name in COLUMNS if name in row))
        for row in rows
        if "chosen" in row
    ]
    if 2 * sum(repeats) > len(repeats):
        fix = "cut the prompts off the answers, or leave the column prompt out if both are whole transcripts"
        raise InputError(
            f"{source}: in {sum(repeats)} of {len(repeats)} rows answers begin with their prompt: {fix}"
        )


def repeats_prompt(prompt: str, *answers: str) -> bool:
    """Return whether an answer begins with the prompt, or like a transcript."""
    return any(answer.lstrip().startswith((prompt.strip(), HUMAN.strip())) for answer in answers)


def columns_of(rows: Iterable[dict]) -> list[str]:
    """Return the columns that any of the rows has; of a stream, those of the first."""
    if (known := getattr(rows, "column_names", None)) is not None:
        return known
    first = rows if isinstance(rows, list) else islice(rows, 1)
    return list(dict.fromkeys(column for row in first for column in row))
