"""Read the rows of a table, and account for each line of the file."""

import csv
import io
import re
from collections import Counter
from dataclasses import dataclass, field

from marlhf_lite.tasks.json_rows import split_lines
from marlhf_lite.utils.errors import InputError

SEPARATORS = ",;\t|"
# Spreadsheets write the separator into a first line, such as `sep=;`.
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[ \t]*(?:\r\n|\n|\r)')


@dataclass
class Table:
    """The rows of a table, and what its lines are: `header`, `blank`, `inside quotes` (the later lines of a row)."""

    rows: list[dict] = field(default_factory=list)
    lines: Counter = field(default_factory=Counter)
    first_of_several: str = ""  # the place of the first row with more than one line


def rows_of_table(text: str) -> Table:
    """Return the rows of a table with a header; cells stay text, white space around the names of columns is stripped.

    Raises `InputError` for a row whose number of fields differs from the header's, for the header in the middle, for
    rows that an open quote seems to have joined, and if a line is neither read nor counted.
    """
    csv.field_size_limit(2**31 - 1)  # a prompt may be longer than the module's 131,072 characters
    table = Table()
    all_lines = split_lines(text)
    separator = ""
    if named := SEPARATOR_LINE.match(text):
        separator = named[1]
        text = text[named.end() :]
        table.lines["separator"] = 1
    first_line = (split_lines(text) or [""])[0]
    separator = separator or max(SEPARATORS, key=first_line.count)
    # If a space follows every separator of the header, the space belongs to the separator.
    is_spaced = first_line.count(separator) == first_line.count(f"{separator} ") > 0
    reader = csv.reader(
        io.StringIO(text, newline=""), strict=True, delimiter=separator, skipinitialspace=is_spaced
    )
    header: list[str] | None = None
    several: list[tuple[int, int, int]] = []  # row, its first and its last line
    shift = table.lines["separator"]
    try:
        before = 0
        for fields in reader:
            first, last = before + 1 + shift, reader.line_num + shift
            before = reader.line_num
            if not fields:
                table.lines["blank"] += last - first + 1
            elif header is None:
                header = _checked_header(fields)
                table.lines["header"] = last - first + 1
            else:
                _check_row(fields, header, len(table.rows) + 1, last)
                table.rows.append(dict(zip(header, fields, strict=True)))
                if last > first:
                    several.append((len(table.rows), first, last))
                    table.lines["inside quotes"] += last - first
    except csv.Error as error:
        hint = (
            f"put fields with {separator!r}, quotes or line breaks in double quotes, "
            "and double the quotes in them"
        )
        raise InputError(f"row {len(table.rows) + 1}: {error}: {hint}") from None
    if several:
        row, first, last = several[0]
        table.first_of_several = f"row {row}, lines {first} to {last}"
        _check_joined_rows(all_lines, several, separator, len(header or ()))
    _check_sum(table, len(all_lines))
    return table


def _checked_header(fields: list[str]) -> list[str]:
    header = [name.strip() for name in fields]
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise InputError(
            f"more than one column is named {', '.join(twice)}: rename or delete the others"
        )
    return header


def _check_row(fields: list[str], header: list[str], row: int, line: int) -> None:
    if len(fields) != len(header):
        raise csv.Error("its number of fields differs from the header's")
    if sorted(cell.strip(" \ufeff") for cell in fields) == sorted(header):
        raise InputError(
            f"row {row}: the header again, in line {line}, as in files that were joined: delete the line"
        )


def _check_joined_rows(
    lines: list[str], several: list[tuple[int, int, int]], separator: str, columns: int
) -> None:
    """Raise `InputError` if most rows of several lines look like whole rows that a lone quote joined.

    Then each of their lines has as many fields as the header, and separators without a space, unlike commas in prose.
    """
    joined = []
    for row, first, last in several:
        own_lines = lines[first - 1 : last]
        looks_whole = all(
            line.count(separator) == columns - 1 and f"{separator} " not in line
            for line in own_lines
        )
        if looks_whole and columns > 1:
            joined.append((row, first, last))
    if 2 * len(joined) > len(several):
        row, first, last = joined[0]
        fault = (
            f"row {row}: lines {first} to {last} are one row, because a quote opens in line {first}"
        )
        fix = "double the quote, or write JSON lines if the line break belongs to the text"
        raise InputError(f"{fault}, and each is a whole row without it: {fix}")


def _check_sum(table: Table, lines: int) -> None:
    counted = len(table.rows) + sum(table.lines.values())
    if counted != lines:
        raise InputError(
            f"{lines} lines, of which {counted} were counted: the first rows are read wrongly: write JSON lines"
        )
