"""The embedded task `tiny-code`: a specification of one line with two examples, a program, and five hidden tests.

`tiny_code.yaml` has the families of problems. A bug is a slip of the family, or a part that differs from the one that
the specification names. Programs are run to find their outputs: all are short and made from that file.
"""

import json
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

HIDDEN = 5  # tests that the prompt does not show
EXAMPLES = 2
BUGS = 0.4  # share of programs with a bug among those that people wrote
NAME = "f"
# a function's argument -> the kind of its problem
DIFFICULTIES = {
    "xs": "lists",
    "s": "texts",
    "n": "numbers",
}
LETTERS = "abcdeorst"
WORDS = "tea bread rope note star road seed boat cart dates stone bead toast roast trade".split()


@dataclass(frozen=True)
class Part:
    """One part of a specification: its words and its code. Both may have one open place, `{k}`."""

    words: str
    code: str

    def of(self, k: int | str) -> "Part":
        """The part with this value in its open place; a part without an open place stays as it is."""
        return Part(self.words.format(k=k), self.code.format(k=k))


CONSTANT = Part("{k}", "{k}")


@dataclass(frozen=True)
class Family:
    """A kind of problem: templates of its specification and programs, with open places for its parts."""

    argument: str  # of the function: xs, s or n
    words: str  # the specification
    styles: list[str]  # right bodies of the function
    parts: str = ""  # the kinds of its parts, one letter each: "pm" is a condition and a change
    slips: tuple[str, ...] = ()  # wrong bodies


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PARTS: dict[str, list[Part]] = {
    kind: [Part(*item) for item in of.items()] for kind, of in _TABLE["parts"].items()
}
FAMILIES = [Family(**family) for family in _TABLE["families"]]


@dataclass(frozen=True)
class Problem:
    """A specification with its hidden tests, and what a bug may change in its programs."""

    family: Family
    parts: dict[str, Part]  # kind -> the part that the specification names
    others: dict[str, Part]  # kind -> the part that a slip uses instead
    arguments: list[Any]  # of the examples, then of the hidden tests

    @cached_property
    def outputs(self) -> list[Any]:
        """The right value for each argument, from a right program."""
        return run(_program(self.family, self.family.styles[0], self.parts), self.arguments)

    @property
    def prompt(self) -> str:
        """One line, as in `f(xs): each number plus 2. f([1, 5]) is [3, 7]. f([4]) is [6].`"""
        words = self.family.words.format(**{name: part.words for name, part in self.parts.items()})
        sentences = [f"{NAME}({self.family.argument}): {words}."]
        for argument, output in zip(self.arguments[:EXAMPLES], self.outputs, strict=False):
            sentences.append(f"{NAME}({argument!r}) is {output!r}.")
        return " ".join(sentences)

    @property
    def tests(self) -> str:
        """The hidden tests as JSON, in the form of the data set APPS.

        `exact` makes a list around a value differ from the value.
        """
        return json.dumps(
            {
                "fn_name": NAME,
                "inputs": [[argument] for argument in self.arguments[EXAMPLES:]],
                "outputs": self.outputs[EXAMPLES:],
                "exact": True,
            }
        )


def run(program: str, arguments: list[Any]) -> list[Any] | None:
    """What the program gives for each argument; None if it does not compile or stops with an error."""
    scope: dict[str, Any] = {}
    try:
        exec(program, scope)
        return [scope[NAME](argument) for argument in arguments]
    except Exception:
        return None


def make_problem(rng: random.Random) -> Problem:
    """Make a random problem. No argument comes twice, and its hidden tests do not all have the same output."""
    family = rng.choice(FAMILIES)
    parts = {}
    others = {}
    for kind in family.parts:
        parts[kind], others[kind] = draw(rng, kind)
    while True:
        arguments = [draw_argument(rng, family.argument) for _ in range(EXAMPLES + HIDDEN)]
        problem = Problem(family, parts, others, arguments)
        # Arguments and outputs are compared as texts, because a list cannot be in a set.
        different_arguments = {repr(argument) for argument in arguments}
        if len(different_arguments) == len(arguments):
            different_outputs = {repr(output) for output in problem.outputs[EXAMPLES:]}
            if len(different_outputs) >= 2:
                return problem
        # With some parts nearly all arguments give the same output. So after 20 attempts on average draw other parts.
        if rng.random() < 0.05:
            return make_problem(rng)


def draw(rng: random.Random, kind: str) -> tuple[Part, Part]:
    """Draw a part of this kind, and another one, whose code a programmer might write by mistake.

    `kind` is a letter of `Family.parts`: c and d are letters of a text, k is a number, and other kinds are lists of
    parts in `tiny_code.yaml`.
    """
    if kind in ("c", "d"):
        letter, other = rng.sample(LETTERS, 2)
        return CONSTANT.of(repr(letter)), CONSTANT.of(repr(other))
    k = rng.randint(2, 6)
    if k > 2:
        mistaken_k = k + rng.choice((-1, 1))
    else:
        mistaken_k = k + 1  # never 1: a loop could divide by it for ever
    if kind == "k":
        return CONSTANT.of(k), CONSTANT.of(mistaken_k)
    part = rng.choice(PARTS[kind])
    # The slip is another number in the same part, or another part with the same number.
    if "{k}" in part.code and rng.random() < 0.4:
        return part.of(k), part.of(mistaken_k)
    other_parts = [other for other in PARTS[kind] if other != part]
    return part.of(k), rng.choice(other_parts).of(k)


def draw_argument(rng: random.Random, argument: str) -> Any:
    """Draw an input for a function whose argument has this name: a list (xs), a text (s) or a number (n)."""
    if argument == "xs":
        return [rng.randint(-3, 12) for _ in range(rng.randint(1, 6))]
    if argument == "s":
        return " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    return rng.randint(1, 12)


def _program(family: Family, body: str, parts: dict[str, Part]) -> str:
    """The response with this body: a line break, because a prompt ends without one, and the function.

    The parts fill the open places of `body`.
    """
    code = body.format(**{name: part.code for name, part in parts.items()})
    lines = [f"\ndef {NAME}({family.argument}):"]
    for line in code.split("\n"):
        lines.append(f"    {line}")
    return "\n".join(lines)


def write(rng: random.Random, problem: Problem) -> str:
    """A right program, in one of the family's styles."""
    return _program(problem.family, rng.choice(problem.family.styles), problem.parts)


def write_with_bug(rng: random.Random, problem: Problem) -> str:
    """A program that fails at least one hidden test, because of one slip."""
    for _ in range(50):
        program = _slip(rng, problem)
        if run(program, problem.arguments[EXAMPLES:]) != problem.outputs[EXAMPLES:]:
            return program
    # None of 50 slips made a hidden test fail. A broken program fails them all.
    return _broken(rng, write(rng, problem))


def _slip(rng: random.Random, problem: Problem) -> str:
    """A program with a slip, which may still give the right outputs for all tests."""
    family = problem.family
    luck = rng.random()
    # 1. One in ten is broken, and one in ten gives no value, because its `return` is missing.
    if luck < 0.1:
        return _broken(rng, write(rng, problem))
    program = write(rng, problem)
    if luck < 0.2 and program.count("return ") == 1:
        return program.replace("return ", "")
    # 2. The others have a wrong body of the family, or a wrong part in a right body. If the family has neither slips
    # nor parts, the program is broken.
    if family.slips and (not family.parts or rng.random() < 0.4):
        return _program(family, rng.choice(family.slips), problem.parts)
    if not family.parts:
        return _broken(rng, write(rng, problem))
    name = rng.choice(family.parts)
    style = rng.choice(family.styles)
    return _program(family, style, problem.parts | {name: problem.others[name]})


def _broken(rng: random.Random, program: str) -> str:
    """The program with a wrong mark or name, so that it does not compile or stops with an error when it runs."""
    if rng.random() < 0.5 and program.count("return ") == 1:
        head, _, value = program.partition("return ")
        return f"{head}return ({value}, y)"  # no program has a y
    if rng.random() < 0.5:
        return program.replace("):\n", ")\n", 1)  # the function's head without its colon
    return program.replace("(", "", 1)  # a bracket that is closed and was not opened


def document(rng: random.Random) -> tuple[str, str, str]:
    """Make a prompt, a program as people write it, and the hidden tests. In 40 % of the cases the program has a bug."""
    problem = make_problem(rng)
    writer = write_with_bug if rng.random() < BUGS else write
    return problem.prompt, writer(rng, problem), problem.tests


def make_row(rng: random.Random) -> dict[str, str]:
    """Make a row: a problem, a right program ("chosen") and a demonstration, which has a bug in 40 % of the rows."""
    problem = make_problem(rng)
    right = write(rng, problem)
    demonstration = right
    if rng.random() < BUGS:
        demonstration = write_with_bug(rng, problem)
    return {
        "prompt": problem.prompt,
        "chosen": right,
        "demonstration": demonstration,
        "tests": problem.tests,
        "difficulty": DIFFICULTIES[problem.family.argument],
    }
