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
LONGEST = 1_000_000  # characters of a text that is parsed


def refuse_written_lists(rows: Sequence[Mapping], columns: Iterable[str], source: str) -> None:
    """Raise `InputError` if a column of texts has a message, or a list of messages or texts, in every row.

    Models are trained to write JSON, so other JSON is text, and so are lists in some rows only.
    """
    for column in columns:
        kinds = set()
        for row in rows:
            cell = row.get(column)
            if cell is None or cell == "":
                continue
            kinds.add(written_kind(cell) if isinstance(cell, str) else "")
            if "" in kinds:  # the first row that is text, as nearly always
                break
        if kinds and "" not in kinds:
            what = sorted(kinds)[0]
            fix = (
                "store lists, in JSON lines or Parquet: in pandas parse the column by .map(json.loads), "
                "or .map(ast.literal_eval) if it has single quotes"
            )
            raise InputError(
                f"{source}: row 1: {column!r} is {what} as text, as in every row: {fix}"
            )


def written_kind(text: str) -> str:
    """Return what a text is if it was written from a list or a message; empty for every other text."""
    stripped = text.strip()
    if stripped[:1] not in ("[", "{", "(", '"', "a") or len(stripped) > LONGEST:
        return ""
    value = _parsed(stripped)
    if isinstance(value, str):  # written twice
        value = _parsed(value.strip()) if value.strip()[:1] in ("[", "{") else None
    if _is_message(value):
        return "a message"
    if isinstance(value, list | tuple) and value:
        if all(_is_message(item) or _is_part(item) for item in value):
            return "a list of messages"
        if all(isinstance(item, str) for item in value):
            return "a list of texts"
    if value is None and _LIKE_MESSAGES.match(stripped):
        return "a list of messages"
    return ""


def _parsed(text: str):
    """Return the value of JSON, or of what Python prints; None for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if text[:1] not in ("[", "{", "("):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _is_message(value) -> bool:
    if not isinstance(value, dict):
        return False
    role = value.get("role", value.get("from"))
    return (
        isinstance(role, str)
        and re.fullmatch(ROLES, role.strip(), re.I) is not None
        and bool({"content", "value", "tool_calls"} & set(value))
    )


def _is_part(value) -> bool:
    """Return whether a value is a part of a message, such as `{"type": "text", "text": "Hi"}`."""
    return isinstance(value, dict) and value.get("type") == "text" and "text" in value
