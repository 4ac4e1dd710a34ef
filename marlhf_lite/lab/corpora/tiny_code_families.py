"""What a problem of tiny-code is made of: families of functions over lists, texts and numbers, and their parts.

A family is a specification, ways to write the program, and the function itself in Python, which gives the expected
outputs. So no program is run to make a problem. A bug is a part that differs from the one that the specification names.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """One part of a specification: its words, its code, and what it means."""

    words: str
    code: str
    value: Any


def constant(value: int | str) -> Part:
    """A number, a letter or a word."""
    return Part(repr(value), repr(value), value)


# Conditions on x and changes of x: name -> (words, code, function of k and x)
TESTS: dict[str, tuple[str, str, Callable]] = {
    "above": ("above {k}", "x > {k}", lambda k, x: x > k),
    "below": ("below {k}", "x < {k}", lambda k, x: x < k),
    "from": ("of at least {k}", "x >= {k}", lambda k, x: x >= k),
    "to": ("of at most {k}", "x <= {k}", lambda k, x: x <= k),
    "other": ("other than {k}", "x != {k}", lambda k, x: x != k),
    "even": ("that are even", "x % 2 == 0", lambda k, x: x % 2 == 0),
    "odd": ("that are odd", "x % 2 == 1", lambda k, x: x % 2 == 1),
    "third": ("divisible by 3", "x % 3 == 0", lambda k, x: x % 3 == 0),
}
CHANGES: dict[str, tuple[str, str, Callable]] = {
    "plus": ("plus {k}", "x + {k}", lambda k, x: x + k),
    "minus": ("minus {k}", "x - {k}", lambda k, x: x - k),
    "from": ("taken from {k}", "{k} - x", lambda k, x: k - x),
    "times": ("times {k}", "x * {k}", lambda k, x: x * k),
    "square": ("squared", "x * x", lambda k, x: x * x),
    "double": ("doubled", "x * 2", lambda k, x: x * 2),
    "rest": ("modulo {k}", "x % {k}", lambda k, x: x % k),
}
KEYS: dict[str, tuple[str, str, Callable]] = {
    "last digit": ("last digit", "x % 10", lambda k, x: x % 10),
    "distance": ("distance from {k}", "abs(x - {k})", lambda k, x: abs(x - k)),
    "negative": ("value, the largest first", "-x", lambda k, x: -x),
    "rest": ("rest modulo {k}", "x % {k}", lambda k, x: x % k),
}
LETTERS = "abcdeorst"
WORDS = "tea bread rope note star road seed boat cart dates stone bead toast roast trade".split()


def _of(table: dict, name: str, k: int) -> Part:
    words, code, function = table[name]
    return Part(words.format(k=k), code.format(k=k), lambda x: function(k, x))


def draw(rng: random.Random, kind: str) -> tuple[Part, Part]:
    """A part of this kind, and one that differs from it in its code as a slip would; p, m, q, k or c."""
    if kind == "c":
        letter, other = rng.sample(LETTERS, 2)
        return constant(letter), constant(other)
    k = rng.randint(2, 6)
    near = k + (rng.choice((-1, 1)) if k > 2 else 1)  # never 1, by which a loop could divide for ever
    if kind == "k":
        return constant(k), constant(near)
    table = {"p": TESTS, "m": CHANGES, "q": KEYS}[kind]
    name = rng.choice(list(table))
    if "{k}" in table[name][1] and rng.random() < 0.4:
        return _of(table, name, k), _of(table, name, near)
    other = rng.choice([other for other in table if other != name])
    return _of(table, name, k), _of(table, other, k)


# Families


@dataclass(frozen=True)
class Family:
    """A kind of problem.

    `kinds` are the parts that are drawn, `styles` the ways to write the body (lines without the indentation of the
    function), `slips` bodies that are wrong in another way than by a part, each with what it computes.
    """

    argument: str  # xs: a list of numbers, s: a text, n: a number
    kinds: str
    words: str
    styles: tuple[str, ...]
    value: Callable
    slips: tuple[tuple[str, Callable], ...] = ()


def fold(words: str, start: str, step: str, short: str, value: Callable, kinds: str = "") -> Family:
    """A family that goes through a list with one variable."""
    loop = f"out = {start}\nfor x in xs:\n    {step}\nreturn out"
    return Family("xs", kinds, words, (loop, short), value)


def _first(xs: list[int], p: Callable) -> int:
    return next((i for i, x in enumerate(xs) if p(x)), -1)


def _running(xs: list[int]) -> list[int]:
    return [sum(xs[: i + 1]) for i in range(len(xs))]


def _halvings(n: int, k: int) -> int:
    count = 0
    while n >= k:
        n, count = n // k, count + 1
    return count


LISTS = (
    Family(
        "xs",
        "m",
        "each number {m}",
        ("return [{m} for x in xs]", "out = []\nfor x in xs:\n    out.append({m})\nreturn out"),
        lambda xs, m: [m(x) for x in xs],
    ),
    Family(
        "xs",
        "p",
        "the numbers {p}",
        ("return [x for x in xs if {p}]", "out = []\nfor x in xs:\n    if {p}:\n        out.append(x)\nreturn out"),
        lambda xs, p: [x for x in xs if p(x)],
    ),
    Family(
        "xs",
        "pm",
        "the numbers {p}, each {m}",
        (
            "return [{m} for x in xs if {p}]",
            "out = []\nfor x in xs:\n    if {p}:\n        out.append({m})\nreturn out",
        ),
        lambda xs, p, m: [m(x) for x in xs if p(x)],
        (("return [{m} for x in xs]", lambda xs, p, m: [m(x) for x in xs]),),
    ),
    fold("the sum of the numbers", "0", "out += x", "return sum(xs)", sum),
    fold(
        "the sum of the numbers {p}",
        "0",
        "if {p}:\n        out += x",
        "return sum([x for x in xs if {p}])",
        lambda xs, p: sum(x for x in xs if p(x)),
        "p",
    ),
    fold(
        "the sum of the numbers, each {m}",
        "0",
        "out += {m}",
        "return sum([{m} for x in xs])",
        lambda xs, m: sum(map(m, xs)),
        "m",
    ),
    fold(
        "how many of the numbers are ones {p}",
        "0",
        "if {p}:\n        out += 1",
        "return len([x for x in xs if {p}])",
        lambda xs, p: sum(map(bool, map(p, xs))),
        "p",
    ),
    fold(
        "the largest number, or {k} if all are below it",
        "{k}",
        "out = max(out, x)",
        "return max([{k}] + xs)",
        lambda xs, k: max([k, *xs]),
        "k",
    ),
    Family("xs", "k", "the first {k} numbers", ("return xs[:{k}]",), lambda xs, k: xs[:k]),
    Family(
        "xs",
        "k",
        "the last {k} numbers",
        ("return xs[-{k}:]",),
        lambda xs, k: xs[-k:],
        (("return xs[{k}:]", lambda xs, k: xs[k:]),),
    ),
    Family(
        "xs",
        "k",
        "the numbers without the first {k}",
        ("return xs[{k}:]",),
        lambda xs, k: xs[k:],
        (("return xs[:{k}]", lambda xs, k: xs[:k]),),
    ),
    Family(
        "xs",
        "",
        "every second number, from the first on",
        ("return xs[::2]",),
        lambda xs: xs[::2],
        (("return xs[1::2]", lambda xs: xs[1::2]),),
    ),
    Family(
        "xs",
        "m",
        "the numbers from last to first, each {m}",
        ("return [{m} for x in xs[::-1]]", "out = []\nfor x in xs:\n    out = [{m}] + out\nreturn out"),
        lambda xs, m: [m(x) for x in xs[::-1]],
    ),
    Family(
        "xs",
        "q",
        "the numbers sorted by {q}",
        ("return sorted(xs, key=lambda x: {q})",),
        lambda xs, q: sorted(xs, key=q),
        (("return sorted(xs)", lambda xs, q: sorted(xs)),),
    ),
    Family(
        "xs",
        "p",
        "the index of the first number {p}, or -1",
        ("for i in range(len(xs)):\n    x = xs[i]\n    if {p}:\n        return i\nreturn -1",),
        _first,
        (
            (
                "for i in range(len(xs)):\n    x = xs[i]\n    if {p}:\n        return x\nreturn -1",
                lambda xs, p: next((x for x in xs if p(x)), -1),
            ),
        ),
    ),
    Family(
        "xs",
        "",
        "the sums of the numbers up to each of them",
        ("out = []\ntotal = 0\nfor x in xs:\n    total += x\n    out.append(total)\nreturn out",),
        _running,
        (("out = []\ntotal = 0\nfor x in xs:\n    out.append(total)\n    total += x\nreturn out",
          lambda xs: [total - x for total, x in zip(_running(xs), xs, strict=True)]),),
    ),
)  # fmt: skip
TEXTS = (
    Family(
        "s",
        "c",
        "how often {c} is in s",
        ("return s.count({c})", "out = 0\nfor x in s:\n    if x == {c}:\n        out += 1\nreturn out"),
        lambda s, c: s.count(c),
    ),
    Family(
        "s",
        "c",
        "s without the letter {c}",
        ('return s.replace({c}, "")', 'out = ""\nfor x in s:\n    if x != {c}:\n        out += x\nreturn out'),
        lambda s, c: s.replace(c, ""),
    ),
    Family(
        "s",
        "cd",
        "s with {d} in place of {c}",
        ("return s.replace({c}, {d})",),
        lambda s, c, d: s.replace(c, d),
        (("return s.replace({d}, {c})", lambda s, c, d: s.replace(d, c)),),
    ),
    Family(
        "s",
        "k",
        "the first {k} letters of each word",
        ("return [x[:{k}] for x in s.split()]",
         "out = []\nfor x in s.split():\n    out.append(x[:{k}])\nreturn out"),
        lambda s, k: [x[:k] for x in s.split()],
    ),
    Family(
        "s",
        "k",
        "the words of more than {k} letters",
        ("return [x for x in s.split() if len(x) > {k}]",),
        lambda s, k: [x for x in s.split() if len(x) > k],
        (("return [x for x in s.split() if len(x) >= {k}]", lambda s, k: [x for x in s.split() if len(x) >= k]),),
    ),
    Family(
        "s",
        "",
        "the words in the reverse order",
        ('return " ".join(s.split()[::-1])',),
        lambda s: " ".join(s.split()[::-1]),
        (("return s[::-1]", lambda s: s[::-1]),),
    ),
    Family(
        "s",
        "k",
        "the letters of s from number {k} on, in capitals",
        ("return s[{k} - 1:].upper()",),
        lambda s, k: s[k - 1 :].upper(),
        (("return s[{k}:].upper()", lambda s, k: s[k:].upper()),),
    ),
)  # fmt: skip
NUMBERS = (
    Family(
        "n",
        "k",
        "the sum of the numbers from 1 to n, without those divisible by {k}",
        ("out = 0\nfor x in range(1, n + 1):\n    if x % {k} != 0:\n        out += x\nreturn out",
         "return sum([x for x in range(1, n + 1) if x % {k} != 0])"),
        lambda n, k: sum(x for x in range(1, n + 1) if x % k),
        (("return sum([x for x in range(1, n) if x % {k} != 0])",
          lambda n, k: sum(x for x in range(1, n) if x % k)),),
    ),
    Family(
        "n",
        "m",
        "the sum of the numbers from 1 to n, each {m}",
        ("out = 0\nfor x in range(1, n + 1):\n    out += {m}\nreturn out",
         "return sum([{m} for x in range(1, n + 1)])"),
        lambda n, m: sum(m(x) for x in range(1, n + 1)),
        (("return sum([{m} for x in range(n)])", lambda n, m: sum(m(x) for x in range(n))),),
    ),
    Family(
        "n",
        "",
        "the product of the numbers from 1 to n",
        ("out = 1\nfor x in range(1, n + 1):\n    out *= x\nreturn out",),
        math.factorial,
        (("out = 0\nfor x in range(1, n + 1):\n    out *= x\nreturn out", lambda n: 0),
         ("out = 1\nfor x in range(1, n):\n    out *= x\nreturn out", lambda n: math.factorial(max(n - 1, 0)))),
    ),
    Family(
        "n",
        "k",
        "the multiples of {k} from 1 to n",
        ("return [x for x in range(1, n + 1) if x % {k} == 0]",
         "out = []\nx = {k}\nwhile x <= n:\n    out.append(x)\n    x += {k}\nreturn out"),
        lambda n, k: list(range(k, n + 1, k)),
        (("return [x for x in range(1, n) if x % {k} == 0]", lambda n, k: list(range(k, n, k))),),
    ),
    Family(
        "n",
        "k",
        "how often n can be divided by {k}, rounded down, while it is at least {k}",
        ("out = 0\nwhile n >= {k}:\n    n = n // {k}\n    out += 1\nreturn out",),
        _halvings,
        (("out = 1\nwhile n >= {k}:\n    n = n // {k}\n    out += 1\nreturn out", lambda n, k: _halvings(n, k) + 1),),
    ),
    Family(
        "n",
        "k",
        "the sum of the digits of n, times {k}",
        ("return sum([int(x) for x in str(n)]) * {k}",
         "out = 0\nfor x in str(n):\n    out += int(x)\nreturn out * {k}"),
        lambda n, k: sum(map(int, str(n))) * k,
    ),
)  # fmt: skip
FAMILIES = (*LISTS, *TEXTS, *NUMBERS)


def draw_argument(rng: random.Random, argument: str) -> Any:
    """An input for a function with this argument."""
    if argument == "xs":
        return [rng.randint(-3, 12) for _ in range(rng.randint(1, 6))]
    if argument == "s":
        return " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    return rng.randint(1, 12)
