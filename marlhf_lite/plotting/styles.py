"""One colour, one meaning: the fixed table of what every method, rule and outcome looks like in every figure.

Colours differ for colour-blind readers wherever two methods stand in one figure; line and marker say the same in grey
print. A colour of the table means nothing else anywhere; quantities that are no method take those of `SERIES`.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

DASH, DOT, DASH_DOT, LONG = (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (7, 1.5))
SHORT, TWO_DOTS, LONG_DOT = (0, (2, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 1.5, 1, 1.5))


class Style(NamedTuple):
    """What a method looks like: a colour, a line (solid, or matplotlib's dashes) and a marker."""

    colour: str
    line: str | tuple = "-"
    marker: str = "o"


# What stands first in this table and in a method's name decides: "MA-PPO parsing" is parsing.
METHODS = {
    "SFT": Style("#7f7f7f", DOT, "P"),
    "best-of-": Style("#222222", (0, (1, 2)), "*"),
    # where macro actions end
    "randomized": Style("#b8a6c6", DASH, "v"),
    "perplexity": Style("#7f1fdf", DASH_DOT, "^"),
    "parsing": Style("#117733", LONG, "s"),
    "sentences shuffled": Style("#868604", DOT, "X"),
    "sentence": Style("#5e2903", SHORT, "D"),
    "lines": Style("#6885f6", LONG_DOT, "D"),
    "cutpoints": Style("#00ce88", TWO_DOTS, "<"),
    # how many tokens they have; n = 1 is PPO, n = 5 is MA-PPO
    "n=2": Style("#8e4c57", SHORT, "<"),
    "n=3": Style("#382c0c", TWO_DOTS, "v"),
    "n=8": Style("#9ea4ff", LONG, "X"),
    "n=10": Style("#f58d7c", SHORT, "^"),
    "n=15": Style("#7d0563", DASH_DOT, "h"),
    "n=20": Style("#8bb6c4", LONG_DOT, ">"),
    "n=inf": Style("#de8f05", DASH_DOT, "D"),
    # values, ratios and KL prices of macro actions
    "sigma unit": Style("#586280", DASH, "v"),
    "sigma position": Style("#9163d5", TWO_DOTS, "<"),
    "sigma reversed": Style("#cca39b", DOT, "D"),
    "ratio macro": Style("#a0a27e", DASH, "v"),
    "value macro": Style("#5658ab", DASH_DOT, "^"),
    # the ladder of estimators: E0 is PPO, E4 is MA-PPO; E1 is λ^(1/n), E5 averages the KL price
    "E1": Style("#56b4e9", (0, (6, 1.5)), "v"),
    "E2": Style("#461943", SHORT, "<"),
    "E3": Style("#af2938", DASH_DOT, "^"),
    "E5": Style("#0f3805", TWO_DOTS, "X"),
    "lam=1": Style("#92be62", LONG, "h"),
    "VC": Style("#2f1fdf", LONG_DOT, ">"),
    # baselines
    "RLOO": Style("#029e73", TWO_DOTS, "D"),
    "GRPO": Style("#ca9161", SHORT, "p"),
    "DPO": Style("#cc78bc", (0, (5, 1, 2, 1)), "X"),
    "MA-PPO": Style("#d55e00", "-", "s"),
    "PPO": Style("#0173b2", DASH, "o"),
}
SAME = {  # other names of the same thing
    "whole": "n=inf",
    "sigma equal": "MA-PPO",
    "sigma start": "E3",
    "sigma position_reversed": "sigma reversed",
    "pooling mean": "E5",
    "MA-PPO mean": "E5",
    "lam^": "E1",  # λ^(1/n), whatever n
    "MC": "lam=1",
    "n=5": "MA-PPO",
    "E4": "MA-PPO",
    "n=1": "PPO",
    "E0": "PPO",
}
_VARIANTS = ((DASH, "o"), (DOT, "s"), (LONG_DOT, "^"), (SHORT, "D"), (TWO_DOTS, "v"), ("-", "X"))
SERIES = ("#332288", "#44aa99", "#b8860b", "#cc6677", "#882255")  # quantities, in the order of matplotlib's C0 to C4
OUTCOMES = {"win": "#4d9221", "tie": "#d5d5d5", "lose": "#c51b7d"}
PROGRAMS = {  # what became of a program
    "passed all tests": "#ceaa3e",
    "failed a test": "#4c5b3d",
    "runtime error": "#002f58",
    "compile error": "#00c3db",
}
SPANS = ("#01665e", "#8c510a")  # neighbouring macro actions take turns
PALE_SPANS = ("#c7eae5", "#f6e8c3")  # the same under black text
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
