"""Markdown tables."""

import math
from collections.abc import Callable, Mapping, Sequence

from marlhf_lite.utils.printable import printable


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of these cells."""
    return printable(
        "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *rows])
    )


def table(
    rows: Sequence[Mapping], columns: Mapping[str, str], cell: Callable[[Mapping, str], str]
) -> str:
    """Return a Markdown table with one line per row; `cell(row, name)` writes a cell.

    `columns` are names in the rows and their headings; names that no row has are left out.
    """
    names = [name for name in columns if any(name in row for row in rows)]
    return markdown(
        [columns[name] for name in names], [[cell(row, name) for name in names] for row in rows]
    )


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number as text; −0 after rounding becomes 0, and None and NaN become "-".

    `form` is a format such as ".2f", or "+.1f" with a sign.
    """
    if value is None or math.isnan(value):
        return "-"
    sign = "+" if form.startswith("+") else ""
    return format(value, f"{sign}z{form.removeprefix('+')}")


def interval(value: Mapping, form: str = ".2f", beside: float = 0) -> str:
    """Return mean [low, high] as text, with more digits than `form` if the ends need them to show width and side.

    `beside` is the value whose side matters: 0 for a difference and 1 for a ratio. Equal values, a single value and
    undefined ones (NaN) get the mean without an interval.
    """
    mean, low, high = (value[name] for name in ("mean", "low", "high"))
    if low is None or not low < high:
        return number(mean, form)
    gaps = (low - beside, high - beside, (high - low) / 4)
    least = min(abs(gap) for gap in gaps if gap) * (100 if form.endswith("%") else 1)
    sign, digits = form[: form.index(".")], int(form[form.index(".") + 1 : -1])
    form = f"{sign}.{max(digits, math.ceil(-math.log10(2 * least)))}{form[-1]}"
    return f"{number(mean, form)} [{number(low, form)}, {number(high, form)}]"
