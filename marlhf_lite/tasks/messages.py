"""Messages of rows, in the forms that people store them, and how they are written without a chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from marlhf_lite.tasks import templates
from marlhf_lite.tasks.templates import ASSISTANT, HUMAN, BadRow

Turns = list[dict]  # messages with `role` and `content`, and what `PASSED_ON` names
MESSAGE = ("role", "content", "from", "value")  # the keys that are read of every message
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
PASSED_ON = (*THOUGHTS, "tool_calls", "tool_call_id", "name")  # keys that a chat template may write
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES_OF_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
}
_MARKS = {"user": HUMAN, "assistant": ASSISTANT}


def messages_of(value, column: str) -> Turns:
    """Return the messages of a cell: a list of them, one message, or `datasets`' columns of roles and contents.

    `from` and `value` are read as `role` and `content`, and parts of text are joined. Raises `BadRow`.
    """
    if isinstance(value, dict):
        value = _rows_of_columns(value) or [value]
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise BadRow("bad_chat", f"{column!r} is neither text nor a list of messages")
    return [_message(turn, column) for turn in value]


def _rows_of_columns(value: Mapping) -> list[dict] | None:
    """Return the messages of `{"role": [...], "content": [...]}`, as `datasets` stores a sequence of them."""
    columns = {name: cell for name, cell in value.items() if cell is not None}
    is_sequence = columns and all(isinstance(cell, list) for cell in columns.values())
    has_roles = isinstance(columns.get("role", columns.get("from")), list)
    if not is_sequence or not has_roles or len({len(cell) for cell in columns.values()}) > 1:
        return None
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _message(turn: Mapping, column: str) -> dict:
    role = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    if content is None and turn.get("tool_calls"):
        content = ""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        if other := [part for part in content if not isinstance(part.get("text"), str)]:
            raise BadRow(
                "bad_chat",
                f"{column!r} has a part of type {other[0].get('type')!r}: only text is read",
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadRow("bad_chat", f"{column!r} has a message without a role and a text")
    name = role.strip().lower()
    message = {"role": _OTHER_NAMES_OF_ROLES.get(name, name), "content": content}
    for key in PASSED_ON:
        if turn.get(key):
            message[key] = turn[key]
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], column)
    return message


def _tool_calls(calls, column: str) -> list[dict]:
    """Return tool calls as templates take them: arguments as an object, and without the empty fields of Parquet."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow("bad_chat", f"{column!r} has tool calls that are not a list of objects")
    read = []
    for call in calls:
        call = _without_empty_fields(call)
        function = call.get("function")
        place = function if isinstance(function, dict) else call
        if isinstance(place.get("arguments"), str):
            with suppress(ValueError):  # a template writes other text as it is
                place["arguments"] = json.loads(place["arguments"])
        read.append(call)
    return read


def _without_empty_fields(value):
    if isinstance(value, dict):
        return {
            name: _without_empty_fields(item) for name, item in value.items() if item is not None
        }
    if isinstance(value, list):
        return [_without_empty_fields(item) for item in value]
    return value


def names_of_tool_calls(turn: Mapping) -> list[str]:
    """Return the names of the functions that a message calls."""
    calls = turn.get("tool_calls", [])
    names = [
        call["function"].get("name") if isinstance(call.get("function"), dict) else call.get("name")
        for call in calls
    ]
    return [name for name in names if isinstance(name, str)]


def thought_of(turn: Mapping) -> str:
    """Return the thought of a message, which the data keep beside its content; empty if there is none."""
    thoughts = [turn[key] for key in THOUGHTS if isinstance(turn.get(key), str)]
    return thoughts[0] if thoughts else ""


def check_roles(turns: Sequence[Mapping], template: str | None) -> None:
    """Raise `BadRow` for a role that neither the usual chats nor this chat template have.

    A template that puts any role between its marks would write one that the model has never seen. The row is counted
    by the role's name.
    """
    for turn in turns:
        role = turn["role"]
        is_quoted = template is not None and re.search(rf"['\"]{re.escape(role)}['\"]", template)
        if role not in KNOWN_ROLES and not is_quoted:
            fix = f"rename it to one of {', '.join(KNOWN_ROLES)}"
            reason = "role_" + (re.sub(r"\W+", "_", role) or "empty")
            raise BadRow(
                reason,
                f"a message of the role {role!r}, which the chat template does not have: {fix}",
            )


def turns_of_text(prompt: str) -> Turns:
    """Return the turns of a transcript that ends before the assistant's turn; other text is one turn of the user."""
    templates.check_text(prompt, "prompt")
    if not re.match(r"\s*Human:.*\nAssistant:\s*$", prompt, re.S):
        return [{"role": "user", "content": prompt}]
    pieces = re.split(r"(?:^|\n)(Human|Assistant):", prompt.strip().removesuffix("Assistant:"))[1:]
    turns = []
    for name, text in zip(pieces[::2], pieces[1::2], strict=True):
        role = "user" if name == "Human" else "assistant"
        turns.append({"role": role, "content": text.strip()})
    return turns


def write_transcript(prompt: Turns, answers: Sequence[Turns]) -> tuple[str, list[str]]:
    """Return a prompt and its answers as `Human:` and `Assistant:` transcripts. Raises `BadRow` for other roles."""
    for turns in (prompt, *answers):
        check_roles(turns, template=None)
        has_other_roles = any(turn["role"] not in _MARKS for turn in turns)
        if has_other_roles or prompt[0]["role"] != "user":
            fault = (
                "the messages do not begin with a user's, or have roles besides user and assistant"
            )
            raise BadRow(
                "bad_chat", f"{fault}, which a chat template writes (--chat_template FILE)"
            )
        if any(turn.get("tool_calls") for turn in turns):
            raise BadRow(
                "bad_chat", "tool calls, which a chat template writes (--chat_template FILE)"
            )
    written = [_transcript(turns)[len(ASSISTANT) :].rstrip() for turns in answers]
    return _transcript(prompt) + ASSISTANT, written


def _transcript(turns: Turns) -> str:
    """Write messages as an HH transcript; code of the assistant keeps its indentation."""
    text = ""
    for turn in turns:
        content = turn["content"].rstrip()
        is_code = turn["role"] == "assistant" and content[:1].isspace()
        text += _MARKS[turn["role"]] + (content if is_code else f" {content.strip()}")
    return text
