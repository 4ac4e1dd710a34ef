"""Messages of rows, in the forms that people store them, and how they are written without a chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from marlhf_lite.tasks import templates
from marlhf_lite.tasks.templates import ASSISTANT, HUMAN, BadRow

Turns = list[dict]  # messages with `role` and `content`, and what `PASSED_ON` names
MESSAGE = ("role", "content", "from", "value")  # the keys that are read of every message
FUNCTION_CALL = "function_call"  # the former key of a message's only call, now in `tool_calls`
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
    """Return the messages of a cell: it has a list of them, one message, or `datasets`' columns of roles and contents.

    `from` and `value` are read as `role` and `content`, and parts of text are joined. Raises `BadRow`, which names the
    `column`, for other cells.
    """
    if isinstance(value, dict):
        value = _rows_of_columns(value) or [value]
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise BadRow("bad_chat", f"{column!r} is neither text nor a list of messages")
    return [_message(turn, column) for turn in value]


def _rows_of_columns(value: Mapping) -> list[dict] | None:
    """Return the messages of `{"role": [...], "content": [...]}`, as `datasets` stores a sequence of messages.

    None for another dict, such as one message.
    """
    columns = {name: cell for name, cell in value.items() if cell is not None}
    if not isinstance(columns.get("role", columns.get("from")), list):
        return None
    if not all(isinstance(cell, list) for cell in columns.values()):
        return None
    lengths = {len(cell) for cell in columns.values()}
    if len(lengths) > 1:
        return None
    messages = []
    for cells in zip(*columns.values(), strict=True):
        messages.append(dict(zip(columns, cells, strict=True)))
    return messages


def _message(turn: Mapping, column: str) -> dict:
    """Return a message by the usual names of its keys and roles, with the keys that a chat template may write.

    Raises `BadRow` for one without a role or a text, and for pictures and sound.
    """
    role = turn.get("role")
    if role is None:  # Parquet fills up the keys of other rows with None
        role = turn.get("from")
    content = turn.get("content")
    if content is None:
        content = turn.get("value")
    calls = turn.get("tool_calls")
    if not calls and turn.get(FUNCTION_CALL):
        calls = [{"type": "function", "function": turn[FUNCTION_CALL]}]
    if content is None and calls:  # a message may be nothing but a call
        content = ""
    has_parts = isinstance(content, list) and len(content) > 0
    if has_parts and all(isinstance(part, dict) for part in content):
        for part in content:
            if not isinstance(part.get("text"), str):
                fault = f"{column!r} has a part of type {part.get('type')!r}"
                raise BadRow("bad_chat", f"{fault}: only text is read")
        content = "".join(part["text"] for part in content)
    if role is None or content is None:
        names = ", ".join(map(str, turn)) or "none"
        fix = f"name them role and content (its keys: {names})"
        raise BadRow("bad_chat", f"{column!r} has a message without a role and a text: {fix}")
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadRow("bad_chat", f"{column!r} has a role or content that is not text: write a text")
    name = role.strip().lower()
    message = {"role": _OTHER_NAMES_OF_ROLES.get(name, name), "content": content}
    for key in PASSED_ON:
        if turn.get(key):
            message[key] = turn[key]
    if calls:
        message["tool_calls"] = _tool_calls(calls, column)
    return message


def _tool_calls(calls, column: str) -> list[dict]:
    """Return tool calls as templates take them: arguments as an object, and without the empty fields of Parquet.

    A call is `{"name": ..., "arguments": ...}`, or `{"function": {"name": ..., "arguments": ...}}`. Raises `BadRow` if
    it is not an object of this kind.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow("bad_chat", f"{column!r} has tool calls that are not a list of objects")
    read = []
    for call in calls:
        call = _without_empty_fields(call)  # a copy, whose arguments may be changed
        name_and_arguments = call.get("function", call)
        if not isinstance(name_and_arguments, dict):
            raise BadRow("bad_chat", f"{column!r} has a call of a function that is not an object")
        arguments = name_and_arguments.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):  # text that is not JSON stays as it is
                name_and_arguments["arguments"] = json.loads(arguments)
        read.append(call)
    return read


def _without_empty_fields(value):
    """Return a value without fields that are None, with which Parquet fills up the objects of a column."""
    if isinstance(value, dict):
        kept = {}
        for name, item in value.items():
            if item is not None:
                kept[name] = _without_empty_fields(item)
        return kept
    if isinstance(value, list):
        return [_without_empty_fields(item) for item in value]
    return value


def names_of_tool_calls(turn: Mapping) -> list[str]:
    """Return the names of the functions that a message calls."""
    names = []
    for call in turn.get("tool_calls", []):
        # OpenAI's form has the name under `function`, others have it beside the arguments.
        function = call.get("function")
        described = function if isinstance(function, dict) else call
        name = described.get("name")
        if isinstance(name, str):
            names.append(name)
    return names


def unwritten_tool_call(name: str) -> BadRow:
    """Return the fault of a row that calls a tool of this name, which its chat template does not write."""
    fix = "give a template that writes tool calls, or write them into the content"
    return BadRow(
        "tool_calls", f"a call of the tool {name!r}, which the chat template leaves out: {fix}"
    )


def with_calls_of(turn: Mapping, name: str) -> dict:
    """Return the message with `name` as the name of the function in each of its calls, if it has any."""
    calls = []
    for call in turn.get("tool_calls", []):
        if isinstance(call.get("function"), dict):
            calls.append({**call, "function": {**call["function"], "name": name}})
        else:
            calls.append({**call, "name": name})
    return {**turn, "tool_calls": calls} if calls else dict(turn)


def thought_of(turn: Mapping) -> str:
    """Return the thought of a message, which the data keep beside its content; empty if there is none."""
    thoughts = [turn[key] for key in THOUGHTS if isinstance(turn.get(key), str)]
    return thoughts[0] if thoughts else ""


def check_roles(turns: Sequence[Mapping], template: str | None) -> None:
    """Raise `BadRow` for a role that neither the usual chats nor this chat template have.

    Without this check, a template that puts any role between its marks would write one that the model has never seen.
    The row is counted by the role's name. `template` is the text of the chat template; None if there is none. A
    template that has a role compares with its name, so the name stands in quotes in the text.
    """
    for turn in turns:
        role = turn["role"]
        is_in_template = False
        if template is not None:
            is_in_template = re.search(rf"['\"]{re.escape(role)}['\"]", template) is not None
        if role not in KNOWN_ROLES and not is_in_template:
            fix = f"rename it to one of {', '.join(KNOWN_ROLES)}"
            word = re.sub(r"\W+", "_", role) or "empty"
            raise BadRow(
                f"role_{word}",
                f"a message of the role {role!r}, which the chat template does not have: {fix}",
            )


def turns_of_text(prompt: str) -> Turns:
    """Return the turns of a transcript that ends before the assistant's turn; other text is one turn of the user.

    Raises `BadRow` for a prompt that is not text.
    """
    templates.check_text(prompt, "prompt")
    is_transcript = re.match(r"\s*Human:.*\nAssistant:\s*$", prompt, re.S)
    if not is_transcript:
        return [{"role": "user", "content": prompt}]
    without_end = prompt.strip().removesuffix("Assistant:")
    # What is before the first name (nothing), then a name and a text by turns.
    _, *names_and_texts = re.split(r"(?:^|\n)(Human|Assistant):", without_end)
    turns = []
    for name, text in zip(names_and_texts[::2], names_and_texts[1::2], strict=True):
        role = "user" if name == "Human" else "assistant"
        turns.append({"role": role, "content": text.strip()})
    return turns


def write_transcript(prompt: Turns, answers: Sequence[Turns]) -> tuple[str, list[str]]:
    """Return a prompt and its answers as `Human:` and `Assistant:` transcripts.

    Raises `BadRow` for what only a chat template can write: other roles, a prompt that does not begin with a message of
    the user, and tool calls.
    """
    for turns in (prompt, *answers):
        check_roles(turns, template=None)
        # The prompt's first message, also if `turns` are an answer, which begins with the assistant's.
        begins_with_user = prompt[0]["role"] == "user"
        has_other_roles = any(turn["role"] not in _MARKS for turn in turns)
        if has_other_roles or not begins_with_user:
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
    # `Assistant:`, with which the first turn of an answer begins, is written at the end of the prompt.
    written = [_transcript(turns).removeprefix(ASSISTANT).rstrip() for turns in answers]
    return _transcript(prompt) + ASSISTANT, written


def _transcript(turns: Turns) -> str:
    """Return messages as a transcript in the form of HH-RLHF, with a space after each mark.

    An answer that begins with white space is probably code: its indentation takes the place of the space.
    """
    text = ""
    for turn in turns:
        content = turn["content"].rstrip()
        is_code = turn["role"] == "assistant" and content[:1].isspace()
        if not is_code:
            content = f" {content.strip()}"
        text += _MARKS[turn["role"]] + content
    return text
