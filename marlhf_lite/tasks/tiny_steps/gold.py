"""The true reward of a response to a `tiny-steps` prompt.

A prompt gives a number and operations with letters; all results are modulo 100. A response works them out, one per
line, each with the number before the operation and the one after it:

    Start 47        a+5:47>52
    a+5             b-3:52>49
    b-3             c*2:49>98
    c*2             Answer 98
    Steps

gold = 1 if the last line is `Answer` and the right number, else 0

The reward depends only on the answer. Two slips can cancel each other, so a response with a wrong step may have reward
1; a response with right steps and the right answer always has it.
"""

import itertools
import re
from dataclasses import dataclass

MODULUS = 100
LETTERS = "abcdefghijklmnop"
NUMBER = r"(0|[1-9]\d?)"
_START = re.compile(rf"Start {NUMBER}")
_OPERATION = re.compile(r"([a-p])([+*-])([1-9])")


@dataclass(frozen=True)
class Problem:
    """A number and the operations on it, such as ("+", 5)."""

    start: int
    operations: tuple[tuple[str, int], ...]

    @property
    def prompt(self) -> str:
        listed = [
            f"{letter}{sign}{k}"
            for letter, (sign, k) in zip(LETTERS, self.operations, strict=False)
        ]
        return "\n".join([f"Start {self.start}", *listed, "Steps\n"])

    @property
    def results(self) -> list[int]:
        """The right result of every step."""
        return list(itertools.accumulate(self.operations, apply, initial=self.start))[1:]


def apply(value: int, operation: tuple[str, int]) -> int:
    """Apply one operation, modulo 100."""
    sign, k = operation
    return {"+": value + k, "-": value - k, "*": value * k}[sign] % MODULUS


def read_prompt(prompt: str) -> Problem | None:
    """Return the problem of a prompt; None for any other text."""
    first, *rest = prompt.split("\n")
    start, operations = _START.fullmatch(first), [_OPERATION.fullmatch(line) for line in rest[:-2]]
    if start is None or rest[-2:] != ["Steps", ""] or not operations or not all(operations):
        return None
    problem = Problem(int(start[1]), tuple((m[2], int(m[3])) for m in operations if m))
    return problem if problem.prompt == prompt else None


def gold_scores(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the gold score of each response: 1 if its last line is the right answer, else 0."""
    problems, ends = (
        map(read_prompt, prompts),
        [response.rstrip().rpartition("\n")[2] for response in responses],
    )
    return [
        float(bool(p) and end == f"Answer {p.results[-1]}")
        for p, end in zip(problems, ends, strict=True)
    ]
