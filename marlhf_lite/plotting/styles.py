"""One colour, one meaning: the fixed look of every method, rule and outcome in all figures.

Colour-blind readers can tell the colours of methods in one figure apart; line and marker say the same in grey print. A
colour of the table has no other meaning anywhere; other quantities take the colours of `SERIES`.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import yaml


class Style(NamedTuple):
    """The look of a method: a colour, a line (solid, or matplotlib's dashes) and a marker."""

    colour: str
    line: str | tuple = "-"
    marker: str = "o"


_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_LINES = {"solid": "-"} | {name: (0, tuple(points)) for name, points in _FILE["dashes"].items()}
METHODS = {
    name: Style(colour, _LINES[line], marker)
    for name, (colour, line, marker) in _FILE["methods"].items()
}
_VARIANTS = [(_LINES[line], marker) for line, marker in _FILE["variants"]]
SAME = _FILE["same"]  # another word for a method -> its name in the table
OUTCOMES = _FILE["outcomes"]
PROGRAMS = _FILE["programs"]
LABELS = _FILE["labels"]
MATPLOTLIB = _FILE["matplotlib"]
SERIES = tuple(_FILE["series"])
SPANS = tuple(_FILE["spans"])
PALE_SPANS = tuple(_FILE["pale_spans"])
TABLE = {
    *SERIES,
    *OUTCOMES.values(),
    *PROGRAMS.values(),
    *SPANS,
    *PALE_SPANS,
    *(s.colour for s in METHODS.values()),
}


def method_styles(names: Collection[str], marker: bool = False) -> dict[str, dict]:
    """Return each name's colour and line style, and with `marker` its marker, as arguments of matplotlib.

    A method of the table `METHODS` looks the same in every figure. If several names belong to one method, as "PPO 0.05"
    and "PPO 0.2" do, all have its colour; in the order of `names`, the first has its line and marker, and the others
    have different ones. Names that belong to no method take colours of `SERIES`, in alphabetical order.
    """
    methods = {
        name: _method_in(name) for name in names
    }  # None for a name that belongs to no method
    unknown = sorted(name for name, method in methods.items() if method is None)
    looks = {}
    colours_so_far = []
    for name, method in methods.items():
        if method is None:
            style = Style(SERIES[unknown.index(name) % len(SERIES)])
        else:
            style = METHODS[method]
        # The lines and markers that the names of this colour get, one name after the other: the method's own first.
        variants = [(style.line, style.marker)]
        for other_line, other_marker in _VARIANTS:
            if other_line != style.line:
                variants.append((other_line, other_marker))
        names_with_this_colour = colours_so_far.count(style.colour)
        colours_so_far.append(style.colour)
        line, marker_shape = variants[names_with_this_colour % len(variants)]
        looks[name] = {"color": style.colour, "linestyle": line}
        if marker:
            looks[name]["marker"] = marker_shape
    return looks


def _method_in(name: str) -> str | None:
    """Return the first method of the table that `name` contains, or None if it contains none.

    The name of a method may stand beside other words ("PPO 0.05" is a variant of PPO), but not as a part of a longer
    name: "PPO-0.9" and "PPO_b" are other methods, with a colour of their own.
    """
    for key in (*SAME, *METHODS):  # `SAME` has other words for methods of the table
        # No letter, digit or hyphen may stand before the key. After it there may be an s, but then the word must end.
        # A key that ends with a mark, such as "best-of-", may have anything after it.
        begin = r"(?<![\w-])"
        end = r"s?(?!\w|[-_]\w)" if key[-1].isalnum() else ""
        if re.search(begin + re.escape(key) + end, name):
            return SAME.get(key, key)
    return None
