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
DIFFICULTIES = {
    "xs": "lists",
    "s": "texts",
    "n": "numbers",
}  # a function's argument -> its kind of problem
LETTERS = "abcdeorst"
WORDS = "tea bread rope note star road seed boat cart dates stone bead toast roast trade".split()


@dataclass(frozen=True)
class Part:
    """One part of a specification: its words and its code."""

    words: str
    code: str

    def of(self, k: int | str) -> "Part":
        """The part with this value in its open place; one without an open place stays as it is."""
        return Part(self.words.format(k=k), self.code.format(k=k))


CONSTANT = Part("{k}", "{k}")


@dataclass(frozen=True)
class Family:
    """A kind of problem, as `tiny_code.yaml` explains."""

    argument: str
    words: str
    styles: list[str]
    parts: str = ""
    slips: tuple[str, ...] = ()


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PARTS: dict[str, list[Part]] = {
    kind: [Part(*item) for item in of.items()] for kind, of in _TABLE["parts"].items()
}
FAMILIES = [Family(**family) for family in _TABLE["families"]]


@dataclass(frozen=True)
class Problem:
    """A specification with its hidden tests, and what a bug may change in its programs."""

    family: Family
    parts: dict[str, Part]
    others: dict[str, Part]  # by the same names: the parts that a slip uses instead
    arguments: list[Any]  # of the examples, then of the hidden tests

    @cached_property
    def outputs(self) -> list[Any]:
        """The values that are asked for, one an argument."""
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
        """The hidden tests in APPS's form; `exact`: a list around a value is not the value."""
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
    """A random problem; its hidden tests differ from its examples and have several outputs."""
    family = rng.choice(FAMILIES)
    parts = {}
    others = {}
    for kind in family.parts:
        parts[kind], others[kind] = draw(rng, kind)
    while True:
        arguments = [draw_argument(rng, family.argument) for _ in range(EXAMPLES + HIDDEN)]
        problem = Problem(family, parts, others, arguments)
        # As texts, because a list cannot be in a set.
        different_arguments = {repr(argument) for argument in arguments}
        if len(different_arguments) == len(arguments):
            different_outputs = {repr(output) for output in problem.outputs[EXAMPLES:]}
            if len(different_outputs) >= 2:
                return problem
        if rng.random() < 0.05:  # some parts give nearly always the same value
            return make_problem(rng)


def draw(rng: random.Random, kind: str) -> tuple[Part, Part]:
    """A part of this kind, and one that differs from it in its code as a slip would.

    `kind` is one of `Family.parts`: c and d are letters of a text, k is a number, others are lists in `tiny_code.yaml`.
    """
    if kind in ("c", "d"):
        letter, other = rng.sample(LETTERS, 2)
        return CONSTANT.of(repr(letter)), CONSTANT.of(repr(other))
    k = rng.randint(2, 6)
    if k > 2:
        near = k + rng.choice((-1, 1))
    else:
        near = k + 1  # never 1: a loop could divide by it for ever
    if kind == "k":
        return CONSTANT.of(k), CONSTANT.of(near)
    part = rng.choice(PARTS[kind])
    if "{k}" in part.code and rng.random() < 0.4:
        return part.of(k), part.of(near)
    other_parts = [other for other in PARTS[kind] if other != part]
    return part.of(k), rng.choice(other_parts).of(k)


def draw_argument(rng: random.Random, argument: str) -> Any:
    """An input for a function with this argument."""
    if argument == "xs":
        return [rng.randint(-3, 12) for _ in range(rng.randint(1, 6))]
    if argument == "s":
        return " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    return rng.randint(1, 12)


def _program(family: Family, body: str, parts: dict[str, Part]) -> str:
    """The response: a line break, as after every prompt, and the function."""
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
    return _broken(rng, write(rng, problem))  # these tests reveal none of the other slips


def _slip(rng: random.Random, problem: Problem) -> str:
    """A program with a slip that the tests may not reveal."""
    family = problem.family
    luck = rng.random()
    if luck < 0.1:
        return _broken(rng, write(rng, problem))
    program = write(rng, problem)
    if luck < 0.2 and program.count("return ") == 1:
        return program.replace("return ", "")
    # A family has slips of its own, parts that may be mistaken, or both; one with neither gets a broken program.
    if family.slips and (not family.parts or rng.random() < 0.4):
        return _program(family, rng.choice(family.slips), problem.parts)
    if not family.parts:
        return _broken(rng, write(rng, problem))
    name = rng.choice(family.parts)
    style = rng.choice(family.styles)
    return _program(family, style, problem.parts | {name: problem.others[name]})


def _broken(rng: random.Random, program: str) -> str:
    """The program with a wrong mark or name: it does not compile, or stops at run time."""
    if rng.random() < 0.5 and program.count("return ") == 1:
        head, _, value = program.partition("return ")
        return f"{head}return ({value}, y)"  # no program has a y
    if rng.random() < 0.5:
        return program.replace("):\n", ")\n", 1)  # a function without its colon
    return program.replace("(", "", 1)  # a bracket that is closed and not opened


def document(rng: random.Random) -> tuple[str, str, str]:
    """A prompt, a program as people write it, with a bug in 40 %, and the hidden tests."""
    problem = make_problem(rng)
    writer = write_with_bug if rng.random() < BUGS else write
    return problem.prompt, writer(rng, problem), problem.tests


def make_row(rng: random.Random) -> dict[str, str]:
    """A problem with a right program and a demonstration, which has a bug in 40 % of the rows."""
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
