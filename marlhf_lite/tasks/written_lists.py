"""Texts that are messages, or lists, which a program wrote as text, as `DataFrame.to_csv` writes lists."""

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from marlhf_lite.utils.errors import InputError

ROLES = "system|developer|user|assistant|human|gpt|tool|function|model|bot|ai|prompter|observation|function_call"
# Messages that do not parse, such as those of NumPy, which writes no commas between them.
_LIKE_MESSAGES = re.compile(
    rf"\s*(array\()?\[?\s*\{{.*['\"](role|from)['\"]\s*:\s*['\"]({ROLES})['\"].*\}}", re.S | re.I
)
BYTES = "bytes"
LONGEST = 1_000_000  # characters of a text that is parsed


def refuse_written_lists(rows: Sequence[Mapping], columns: Iterable[str], source: str) -> None:
    """Raise `InputError` if all rows of a column have a message, a list of messages or texts, or bytes, as text.

    Other JSON may be an answer, because models are trained to write JSON. So may lists if only some rows have them.
    Empty cells do not count.
    """
    for column in columns:
        kinds = set()
        has_plain_cell = False
        for row in rows:
            cell = row.get(column)
            if cell is None or cell == "":
                continue
            kind = written_kind(cell) if isinstance(cell, str) else ""
            if not kind:  # nearly always the case in the first row, so few cells are parsed
                has_plain_cell = True
                break
            kinds.add(kind)
        if kinds and not has_plain_cell:
            what = min(kinds)  # of several kinds, one for the message
            fix = (
                "store lists, in JSON lines or Parquet: in pandas parse the column by .map(json.loads), "
                "or .map(ast.literal_eval) if it has single quotes"
            )
            if what == BYTES:
                fix = "in pandas decode the column by .map(ast.literal_eval).str.decode('utf-8')"
            raise InputError(
                f"{source}: row 1: {column!r} is {what} as text, as in every row: {fix}"
            )


def written_kind(text: str) -> str:
    """Return what a text is if it was written from a list or a message; empty for every other text.

    It is `a message`, `a list of messages`, `a list of texts` or `BYTES`.
    """
    stripped = text.strip()
    # The starts of a list, an object, a tuple, a text in quotes, an array of NumPy, and bytes.
    may_be_written = stripped.startswith(("[", "{", "(", '"', "array", "b'", 'b"'))
    if not may_be_written or len(stripped) > LONGEST:
        return ""
    value = _value_of(stripped)
    if isinstance(value, bytes):
        return BYTES
    if isinstance(value, str):  # a message or a list that was written as text twice
        inner = value.strip()
        value = _value_of(inner) if inner.startswith(("[", "{")) else None
    if _is_message(value):
        return "a message"
    if isinstance(value, list | tuple) and value:
        if all(_is_message(item) or _is_part(item) for item in value):
            return "a list of messages"
        if all(isinstance(item, str) for item in value):
            return "a list of texts"
    if value is None and _LIKE_MESSAGES.match(stripped):  # as NumPy writes them, without commas
        return "a list of messages"
    return ""


def _value_of(text: str):
    """Return the value of JSON, or of a list, dict, tuple or bytes as Python prints them; None for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    # Nothing else that Python prints can be a message, a list or bytes.
    if not text.startswith(("[", "{", "(", "b'", 'b"')):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _is_message(value) -> bool:
    """Return whether a value is a message: it has one of the usual roles, and a content or a call of a tool."""
    if not isinstance(value, dict):
        return False
    role = value.get("role", value.get("from"))
    if not isinstance(role, str) or not re.fullmatch(ROLES, role.strip(), re.I):
        return False
    return any(key in value for key in ("content", "value", "tool_calls"))


def _is_part(value) -> bool:
    """Return whether a value is a part of a message, such as `{"type": "text", "text": "Hi"}`."""
    return isinstance(value, dict) and value.get("type") == "text" and "text" in value
