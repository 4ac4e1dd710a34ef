"""Read the rows of JSON and JSON lines; keys that stand twice, and values that are nested too deep, are refused."""

import json
import re

from marlhf_lite.tasks.no_data import (
    refuse_lists_of_lists,
    refuse_object_that_is_no_row,
    refuse_other_lists,
    refuse_rows_under_a_name,
)
from marlhf_lite.utils.errors import InputError

DEEPEST = 100  # levels of lists and objects in a row; what writes rows later goes down them one call a level
TOO_DEEP = f"values nested more than {DEEPEST} deep: flatten or leave them out"


def rows_of_lines(text: str) -> tuple[list, int]:
    """Return the values of JSON lines, and how many lines are blank. Raises `InputError` that names the line."""
    rows = []
    blank = 0
    # JSON has no line breaks inside a value, so each of "\n", "\r\n" and "\r" ends a line.
    for number, line in enumerate(split_lines(text), start=1):
        line = line.strip().lstrip("\ufeff")  # files that were joined may have marks between them
        if not line:
            blank += 1
            continue
        try:
            rows.append(_parse(line))
        except InputError as error:
            raise InputError(f"line {number}: {error}") from None
        except (ValueError, RecursionError) as error:
            fix = _fix_of_line(line)
            raise InputError(f"line {number}: not JSON ({error}): {fix}") from None
    # A single object on one line may be a whole table by its columns, or a server's message.
    if len(rows) == 1:
        refuse_object_that_is_no_row(rows[0])
    return rows, blank


def _fix_of_line(line: str) -> str:
    """Return what to do about a line that is not JSON.

    The line may have an object that is followed by a comma, or by another object.
    """
    try:
        _, end = json.JSONDecoder().raw_decode(line)
    except (ValueError, RecursionError):
        return "correct or delete the line"
    after = line[end:].strip()
    if after == ",":
        return "delete the commas at the ends of the lines"
    if after.startswith("{"):
        return (
            "write one object a line, or name the file .json, in which they may follow one another"
        )
    return "correct or delete the line"


def rows_of_value(text: str) -> list:
    """Return the rows of a JSON file: it has a list of rows, `{"data": [...]}`, or rows one after another.

    Raises `InputError` for several lists, for rows that are lists of cells, and for an object that is probably not a
    row, such as a table by its columns. Whether each row is an object, and no number for example, is checked by
    `files.read_and_account`.
    """
    values = _values_in(text)
    if len(values) > 1 and all(isinstance(value, list) for value in values):
        fix = "give the files by a pattern such as 'part-*.json'"
        raise InputError(f"several lists, as of joined files: {fix}")
    # Several values are rows. Only a single value may be a whole table, which the checks below refuse.
    if len(values) > 1:
        return values
    value = values[0]
    if isinstance(value, list):
        refuse_lists_of_lists(value)
        return value
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        refuse_other_lists(value)
        return value["data"]
    # A single object is a row, unless it is a table by its columns, an error that a server sent, or holds the rows.
    refuse_object_that_is_no_row(value)
    refuse_rows_under_a_name(value)
    return [value]


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, without the empty one after a last line break."""
    lines = re.split(r"\r\n|\n|\r", text)
    if lines and not lines[-1]:
        lines.pop()
    return lines


def _values_in(text: str) -> list:
    """Return the JSON values of a text, which is one value, or several one after another."""
    decoder = json.JSONDecoder(object_pairs_hook=_object_without_repeats)
    values = []
    position = _after_space(text, 0)
    while position < len(text) or not values:  # an empty file is read once, for its error
        try:
            value, position = decoder.raw_decode(text, position)
        except InputError:  # also a ValueError: a key is there twice, and the message says so
            raise
        except RecursionError:
            raise InputError(TOO_DEEP) from None
        except ValueError as error:
            raise InputError(
                f"cannot be read ({type(error).__name__}: {error}): check that it is whole, and its name and path"
            ) from None
        values.append(value)
        position = _after_space(text, position)
    # The parser can take more levels than what writes the rows later.
    for value in values:
        _refuse_deep(value)
    return values


def _after_space(text: str, position: int) -> int:
    """Return the position after white space and byte order marks, which files that were joined may have inside."""
    return re.compile(r"[\s\ufeff]*").match(text, position).end()


def _parse(line: str):
    """Return the JSON value of a line."""
    value = json.loads(line, object_pairs_hook=_object_without_repeats)
    # Only a line with that many brackets can be so deep. Walking down the values of every line would take time.
    may_be_deep = line.count("[") + line.count("{") > DEEPEST
    if may_be_deep:
        _refuse_deep(value)
    return value


def _object_without_repeats(pairs: list[tuple]) -> dict:
    """Return a JSON object from its (name, value) pairs. Raises `InputError` if a name is there twice.

    Python's parser would take the last of the values without a word.
    """
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    start = json.dumps(made, ensure_ascii=False, default=str)[:60]
    raise InputError(
        f'an object has "{twice[0]}" twice ({start} ...): rename or delete one of them'
    )


def _refuse_deep(value) -> None:
    """Raise `InputError` for a value with more levels than `DEEPEST`.

    It goes down in a loop, because a function that calls itself would end in a `RecursionError`.
    """
    level = [value]  # all values at this depth that may hold others
    depth = -1  # the row itself is at 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise InputError(TOO_DEEP)
        below = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = [item for item in below if isinstance(item, dict | list)]
