"""One colour, one meaning: the fixed table of what every method, rule and outcome looks like in every figure.

Colours differ for colour-blind readers wherever two methods stand in one figure; line and marker say the same in grey
print. A colour of the table means nothing else anywhere; quantities that are no method take those of `SERIES`.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import yaml


class Style(NamedTuple):
    """What a method looks like: a colour, a line (solid, or matplotlib's dashes) and a marker."""

    colour: str
    line: str | tuple = "-"
    marker: str = "o"


_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_LINES = {"solid": "-"} | {name: (0, tuple(points)) for name, points in _FILE["dashes"].items()}
METHODS = {name: Style(colour, _LINES[line], marker) for name, (colour, line, marker) in _FILE["methods"].items()}
_VARIANTS = [(_LINES[line], marker) for line, marker in _FILE["variants"]]
SAME, OUTCOMES, PROGRAMS, LABELS = (_FILE[name] for name in ("same", "outcomes", "programs", "labels"))
SERIES, SPANS, PALE_SPANS = (tuple(_FILE[name]) for name in ("series", "spans", "pale_spans"))
TABLE = {*SERIES, *OUTCOMES.values(), *PROGRAMS.values(), *SPANS, *PALE_SPANS, *(s.colour for s in METHODS.values())}


def method_styles(names: Collection[str], marker: bool = False) -> dict[str, dict]:
    """Return colour and line style of each method, and where asked its marker: the same ones in every figure.

    Several variants of one method keep its colour and differ in line and marker, in the order of `names`. A name that
    the table does not have takes one of `SERIES`, in alphabetical order.
    """
    entries = {name: _entry(name) for name in names}
    unknown = sorted(name for name, entry in entries.items() if entry is None)
    looks, seen = {}, []
    for name, entry in entries.items():
        style = METHODS[entry] if entry else Style(SERIES[unknown.index(name) % len(SERIES)])
        variants = [style[1:], *(look for look in _VARIANTS if look[0] != style.line)]
        variant = seen.count(style.colour) % len(variants)
        line, shape = variants[variant]
        looks[name] = {"color": style.colour, "linestyle": line} | ({"marker": shape} if marker else {})
        seen.append(style.colour)
    return looks


def _entry(name: str) -> str | None:
    """The method of the table that `name` speaks of, or None."""
    for key in (*SAME, *METHODS):
        if re.search(rf"(?<![\w-]){re.escape(key)}" + (r"s?(?!\w)" if key[-1].isalnum() else ""), name):
            return SAME.get(key, key)
    return None
