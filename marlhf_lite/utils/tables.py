"""Markdown tables."""

import math
from collections.abc import Callable, Mapping, Sequence

from marlhf_lite.utils.printable import printable


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of these cells."""
    under_heads = ["---"] * len(heads)
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, under_heads, *rows)]
    return printable("\n".join(lines))


def table(
    rows: Sequence[Mapping], columns: Mapping[str, str], cell: Callable[[Mapping, str], str]
) -> str:
    """Return a Markdown table with one line per row; `cell(row, name)` writes a cell.

    `columns` are names in the rows and their headings; names that no row has are left out.
    """
    names = [name for name in columns if any(name in row for row in rows)]
    heads = [columns[name] for name in names]
    lines = []
    for row in rows:
        lines.append([cell(row, name) for name in names])
    return markdown(heads, lines)


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number as text; −0 after rounding becomes 0, and None and NaN become "-".

    `form` is a format such as ".2f", or "+.1f" with a sign.
    """
    if value is None or math.isnan(value):
        return "-"
    sign = "+" if form.startswith("+") else ""
    return format(value, f"{sign}z{form.removeprefix('+')}")  # z: no −0


def interval(value: Mapping, form: str = ".2f", beside: float = 0) -> str:
    """Return mean [low, high] as text, with more digits than `form` if they are needed to show width and sides.

    The digits show that the interval has a width, and on which side of `beside` each end is: 0 for a difference and 1
    for a ratio. If the interval has no width or is undefined (None or NaN), the text is the mean alone.
    """
    mean = value["mean"]
    low = value["low"]
    high = value["high"]
    if low is None or not low < high:
        return number(mean, form)
    # The smallest distance that must not be rounded away: from an end to `beside`, or a quarter of the width.
    distances = [abs(low - beside), abs(high - beside), (high - low) / 4]
    smallest = min(distance for distance in distances if distance)
    if form.endswith("%"):
        smallest *= 100
    # Rounding to d digits moves a number by at most 10^−d / 2.
    digits_needed = math.ceil(-math.log10(2 * smallest))
    # A form is a sign ("" or "+"), a point, the number of digits and a letter: "+.2f".
    sign, _, digits_and_letter = form.partition(".")
    digits = max(int(digits_and_letter[:-1]), digits_needed)
    letter = digits_and_letter[-1]
    form = f"{sign}.{digits}{letter}"
    return f"{number(mean, form)} [{number(low, form)}, {number(high, form)}]"
