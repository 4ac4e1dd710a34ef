"""Read the rows of a table, and account for each line of the file."""

import csv
import io
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from marlhf_lite.tasks.json_rows import split_lines
from marlhf_lite.utils.errors import InputError

SEPARATORS = ",;\t|"
# Spreadsheets write the separator into a first line, such as `sep=;`.
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[ \t]*(?:\r\n|\n|\r)', re.IGNORECASE)


class LinesOfRow(NamedTuple):
    """The number of a row with several lines, and those of its first and last line, all from 1."""

    row: int
    first: int
    last: int


@dataclass
class Table:
    """The rows of a table, and what its other lines are.

    `other_lines` counts lines by their kind: `separator`, `header`, `blank` (nothing, or separators without cells), and
    `inside quotes`, the lines of a row after its first one.
    """

    rows: list[dict] = field(default_factory=list)
    other_lines: Counter = field(default_factory=Counter)
    first_of_several: str = ""  # the place of the first row with more than one line


def rows_of_table(text: str) -> Table:
    """Return the rows of a table with a header; cells stay text, white space around the names of columns is stripped.

    Raises `InputError` for a row whose number of fields differs from the header's, for a row that is the header again,
    for rows that an open quote seems to have joined, and if a line is neither read nor counted.
    """
    csv.field_size_limit(2**31 - 1)  # a prompt may be longer than the module's 131,072 characters
    table = Table()
    lines_of_file = split_lines(text)

    # 1. The separator: what a line such as `sep=;` before the header names, else what the header has most often.
    named_separator = SEPARATOR_LINE.match(text)
    if named_separator:
        text = text[named_separator.end() :]
        table.other_lines["separator"] = 1
    header_line = split_lines(text)[0] if text else ""
    if named_separator:
        separator = named_separator[1]
        if separator not in header_line and any(mark in header_line for mark in SEPARATORS):
            raise InputError(
                f"line 1 names the separator {separator!r}, which the header lacks: delete the line"
            )
    else:
        separator = max(SEPARATORS, key=header_line.count)
    # If a space follows every separator of the header, the space belongs to the separator.
    separators_with_space = header_line.count(f"{separator} ")
    is_spaced = 0 < separators_with_space == header_line.count(separator)
    reader = csv.reader(
        io.StringIO(text, newline=""), strict=True, delimiter=separator, skipinitialspace=is_spaced
    )

    # 2. The rows, and the kinds of all lines. The reader has not seen the line that names the separator.
    header: list[str] = []
    rows_of_several_lines: list[LinesOfRow] = []
    lines_before_reader = table.other_lines["separator"]
    last_line = lines_before_reader  # the last line that has been read
    try:
        for fields in reader:
            first_line = last_line + 1
            last_line = lines_before_reader + reader.line_num  # number of lines read so far
            # Spreadsheets write their empty rows as separators without cells.
            is_blank = not any(cell.strip() for cell in fields)
            if is_blank:
                table.other_lines["blank"] += last_line - first_line + 1
            elif not header:
                header = _checked_header(fields)
                table.other_lines["header"] = last_line - first_line + 1
            else:
                row = len(table.rows) + 1
                _check_row(fields, header, LinesOfRow(row, first_line, last_line))
                table.rows.append(dict(zip(header, fields, strict=True)))
                if last_line > first_line:
                    rows_of_several_lines.append(LinesOfRow(row, first_line, last_line))
                    table.other_lines["inside quotes"] += last_line - first_line
    except csv.Error as error:  # of the reader, or of `_check_row`
        hint = (
            f"put fields with {separator!r}, quotes or line breaks in double quotes, "
            "and double the quotes in them; delete a line that is no row"
        )
        raise InputError(f"row {len(table.rows) + 1}: {error}: {hint}") from None

    # 3. Is every line accounted for, and were no rows joined?
    if rows_of_several_lines:
        place = rows_of_several_lines[0]
        table.first_of_several = f"row {place.row}, lines {place.first} to {place.last}"
        joined = _joined_rows(lines_of_file, rows_of_several_lines, separator, len(header))
        # Prose of most rows may look like this by chance in a few.
        if 2 * len(joined) > len(rows_of_several_lines):
            row, first, last = joined[0]
            fault = f"row {row}: lines {first} to {last} are one row, because a quote opens in line {first}"
            fix = "delete the quote, or write JSON lines if the line break belongs to the text"
            raise InputError(f"{fault}, and each is a whole row without it: {fix}")
        if joined:
            row, first, last = joined[0]
            table.first_of_several += f"; row {row}, lines {first} to {last}, may be several rows"
    _check_all_lines_are_counted(table, len(lines_of_file))
    return table


def _checked_header(fields: list[str]) -> list[str]:
    """Return the names of the columns without white space around them.

    Raises `InputError` for a name that is there twice, and for two columns without a name. One may have none: pandas
    writes its row numbers like that.
    """
    header = [name.strip() for name in fields]
    unnamed = header.count("")
    if unnamed > 1:
        raise InputError(f"{unnamed} columns of the header have no name: name or delete them")
    check_no_name_is_twice(header)
    return header


def check_no_name_is_twice(names: list[str]) -> None:
    """Raise `InputError` if two columns have one name."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(
            f"more than one column is named {', '.join(twice)}: rename or delete the others"
        )


def _check_row(fields: list[str], header: list[str], place: LinesOfRow) -> None:
    """Raise `InputError` for a row that is the header again.

    Raises `csv.Error` for another number of fields than the header has: its cause is like those that the reader finds,
    and so is its fix.
    """
    row, first, last = place
    if len(fields) != len(header):
        what = f"line {last} differs"
        if last > first:
            what = f"lines {first} to {last}, one row because a quote opens in line {first}, differ"
        numbers = f"({len(fields)}, not {len(header)})"
        raise csv.Error(f"{what} from the header in the number of fields {numbers}")
    # A file that was joined to another may begin with a mark, and write its names in other letters.
    cells = [cell.strip(" \ufeff").casefold() for cell in fields]
    if sorted(cells) == sorted(name.casefold() for name in header):
        raise InputError(
            f"row {row}: the header again, in line {last}, as in files that were joined: delete the line"
        )


def _joined_rows(
    lines_of_file: list[str],
    rows_of_several_lines: list[LinesOfRow],
    separator: str,
    columns: int,
) -> list[LinesOfRow]:
    """Return the rows of several lines that look like whole rows which a lone quote joined.

    In such a row, each line has as many fields as the header, and no space after its separators, while prose has one
    after commas. If a row without quotes has such spaces, too, only the fields are counted: the spaces tell nothing.
    """
    if columns < 2:  # every line would look like a whole row
        return []
    prose_separator = f"{separator} "  # becomes empty if it tells nothing in this file
    for line in lines_of_file[1:]:
        if '"' not in line and line.count(separator) == columns - 1 and prose_separator in line:
            prose_separator = ""
            break
    joined = []
    for place in rows_of_several_lines:
        looks_joined = True
        for line in lines_of_file[place.first - 1 : place.last]:
            is_prose = prose_separator != "" and prose_separator in line
            if line.count(separator) != columns - 1 or is_prose:
                looks_joined = False
        if looks_joined:
            joined.append(place)
    return joined


def _check_all_lines_are_counted(table: Table, lines: int) -> None:
    """Raise `InputError` if the reader has not seen every line of the file, or has seen one twice."""
    counted = len(table.rows) + sum(table.other_lines.values())
    if counted != lines:
        raise InputError(
            f"{lines} lines, of which {counted} were counted: the first rows are read wrongly: write JSON lines"
        )
