"""The embedded task `tiny-code`: a specification of one line with two examples, a program, and five hidden tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from marlhf_lite.lab.corpora.tiny_code_families import FAMILIES, Family, Part, draw, draw_argument

HIDDEN, EXAMPLES = 5, 2
BUGS = 0.4  # share of the programs with a bug, where people wrote them
FAILS = object()  # the output of a program that gives none
NAME = "f"


@dataclass(frozen=True)
class Problem:
    """A specification with its hidden tests, and what a bug may change in its programs."""

    family: Family
    parts: dict[str, Part]
    others: dict[str, Part]  # by the same names: what a slip puts in their place
    arguments: list[Any]  # of the examples, then of the hidden tests

    def output(self, argument: Any) -> Any:
        """The value that is asked for."""
        return _value(self.family.value, self.parts)(argument)

    @property
    def prompt(self) -> str:
        """One line, as in `f(xs): each number plus 2. f([1, 5]) is [3, 7]. f([4]) is [6].`"""
        words = self.family.words.format(**{name: part.words for name, part in self.parts.items()})
        cases = [f" {NAME}({x!r}) is {self.output(x)!r}." for x in self.arguments[:EXAMPLES]]
        return f"{NAME}({self.family.argument}): {words}.{''.join(cases)}"

    @property
    def hidden(self) -> list[Any]:
        """The arguments of the hidden tests, [HIDDEN]."""
        return self.arguments[EXAMPLES:]

    @property
    def tests(self) -> str:
        """The hidden tests in APPS's form; `exact`: a list around a value is not the value."""
        outputs = [self.output(x) for x in self.hidden]
        return json.dumps({"fn_name": NAME, "inputs": [[x] for x in self.hidden], "outputs": outputs, "exact": True})


def make_problem(rng: random.Random) -> Problem:
    """A random problem, whose hidden tests are apart from its examples and have several outputs."""
    family = rng.choice(FAMILIES)
    parts, others = {}, {}
    for kind in family.kinds:  # d: a second letter
        parts[kind], others[kind] = draw(rng, "c" if kind == "d" else kind)
    while True:
        arguments = [draw_argument(rng, family.argument) for _ in range(EXAMPLES + HIDDEN)]
        problem = Problem(family, parts, others, arguments)
        different = len({repr(x) for x in arguments}) == len(arguments)
        if different and len({repr(problem.output(x)) for x in problem.hidden}) >= 2:
            return problem
        if rng.random() < 0.05:  # parts that give the same value for nearly everything, such as a letter for itself
            return make_problem(rng)


def _value(function: Callable, parts: dict[str, Part]) -> Callable:
    values = {name: part.value for name, part in parts.items()}
    return lambda argument: function(argument, **values)


def _program(family: Family, body: str, parts: dict[str, Part]) -> str:
    """The response: a line break, as after every prompt, and the function."""
    lines = body.format(**{name: part.code for name, part in parts.items()}).split("\n")
    return "\n".join([f"\ndef {NAME}({family.argument}):", *(f"    {line}" for line in lines)])


def write(rng: random.Random, problem: Problem) -> str:
    """A right program, in one of the family's styles."""
    return _program(problem.family, rng.choice(problem.family.styles), problem.parts)


def write_with_bug(rng: random.Random, problem: Problem) -> str:
    """A program that fails at least one hidden test, because of one slip."""
    expected = [problem.output(x) for x in problem.hidden]
    for _ in range(50):
        program, function = _slip(rng, problem)
        if [function(x) for x in problem.hidden] != expected:
            return program
    return _broken(rng, write(rng, problem))  # no slip of the others shows in these tests


def _slip(rng: random.Random, problem: Problem) -> tuple[str, Callable]:
    """A program with a slip that may not show, and what it computes."""
    family, kinds = problem.family, problem.family.kinds
    luck = rng.random()
    if luck < 0.1:
        return _broken(rng, write(rng, problem)), lambda argument: FAILS
    program = write(rng, problem)
    if luck < 0.2 and program.count("return ") == 1:
        return program.replace("return ", ""), lambda argument: None
    if family.slips and (not kinds or rng.random() < 0.4):
        body, function = rng.choice(family.slips)
        return _program(family, body, problem.parts), _value(function, problem.parts)
    if not kinds:
        return _broken(rng, write(rng, problem)), lambda argument: FAILS
    name = rng.choice(kinds)
    parts = problem.parts | {name: problem.others[name]}
    return _program(family, rng.choice(family.styles), parts), _value(family.value, parts)


def _broken(rng: random.Random, program: str) -> str:
    """The program with a mark or a name gone wrong: it does not compile, or stops at run time."""
    if rng.random() < 0.5 and program.count("return ") == 1:
        head, _, value = program.partition("return ")
        return f"{head}return ({value}, y)"
    return program.replace("):\n", ")\n", 1) if rng.random() < 0.5 else program.replace("(", "", 1)


def document(rng: random.Random) -> tuple[str, str, str]:
    """A prompt, a program as people write it, with a bug in 40 %, and the hidden tests."""
    problem = make_problem(rng)
    writer = write_with_bug if rng.random() < BUGS else write
    return problem.prompt, writer(rng, problem), problem.tests


def make_row(rng: random.Random) -> dict[str, str]:
    """A problem with a right program and a demonstration."""
    problem = make_problem(rng)
    right = write(rng, problem)
    written = write_with_bug(rng, problem) if rng.random() < BUGS else right
    texts = {"prompt": problem.prompt, "chosen": right, "demonstration": written, "tests": problem.tests}
    return texts | {"difficulty": {"xs": "lists", "s": "texts", "n": "numbers"}[problem.family.argument]}
