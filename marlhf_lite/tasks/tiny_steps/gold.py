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
        lines = [f"Start {self.start}"]
        for letter, (sign, number) in zip(LETTERS, self.operations, strict=False):
            lines.append(f"{letter}{sign}{number}")
        return "\n".join([*lines, "Steps\n"])

    @property
    def results(self) -> list[int]:
        """The right result of every step."""
        return list(itertools.accumulate(self.operations, apply, initial=self.start))[1:]


def apply(value: int, operation: tuple[str, int]) -> int:
    """Apply one operation, modulo 100."""
    sign, number = operation
    results = {"+": value + number, "-": value - number, "*": value * number}
    return results[sign] % MODULUS


def read_prompt(prompt: str) -> Problem | None:
    """Return the problem of a prompt; None for any other text."""
    first_line, *lines = prompt.split("\n")
    start = _START.fullmatch(first_line)
    if start is None:
        return None
    operations = []
    for line in lines[:-2]:  # the last two are `Steps` and an empty one
        operation = _OPERATION.fullmatch(line)
        if operation is None:
            return None
        _, sign, number = operation.groups()
        operations.append((sign, int(number)))
    problem = Problem(int(start[1]), tuple(operations))
    # Compared as a whole, so that the letters are in order and the end is right.
    is_of_this_form = bool(operations) and problem.prompt == prompt
    return problem if is_of_this_form else None


def gold_scores(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the gold score of each response: 1 if its last line is the right answer, else 0."""
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        problem = read_prompt(prompt)
        last_line = response.rstrip().rpartition("\n")[2]
        is_right = problem is not None and last_line == f"Answer {problem.results[-1]}"
        scores.append(float(is_right))
    return scores
