"""The true reward of a response to a `tiny-steps` prompt, and the first step in it that is wrong.

A prompt gives a number and operations with letters; all results are modulo 100. A response works them out, one a line,
each with the number that the operation takes and the one that it gives:

    Start 47        a+5:47>52
    a+5             b-3:52>49
    b-3             c*2:49>98
    c*2             Answer 98
    Steps

gold = 1 if the last line is `Answer` and the right number, else 0

The reward depends on the answer alone. Two slips can cancel each other, so a response with a wrong step may have reward
1; a response with right steps and the right answer always has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MODULUS = 100
LETTERS = "abcdefghijklmnop"
_NUMBER = r"(0|[1-9]\d?)"
_START = re.compile(rf"Start {_NUMBER}")
_OPERATION = re.compile(r"([a-p])([+*-])([1-9])")
_LINE = re.compile(rf"([a-p])([+*-])([1-9]):{_NUMBER}>{_NUMBER}")
_ANSWER = re.compile(rf"Answer {_NUMBER}")


@dataclass(frozen=True)
class Problem:
    """A number and the operations on it, such as ("+", 5)."""

    start: int
    operations: tuple[tuple[str, int], ...]

    @property
    def prompt(self) -> str:
        listed = [f"{letter}{sign}{k}" for letter, (sign, k) in zip(LETTERS, self.operations, strict=False)]
        return "\n".join([f"Start {self.start}", *listed, "Steps\n"])

    @property
    def results(self) -> list[int]:
        """The right result of every step."""
        values = [self.start]
        for operation in self.operations:
            values.append(apply(values[-1], operation))
        return values[1:]


@dataclass(frozen=True)
class Fault:
    """The first wrong line of a response.

    `line` counts from 0 and `start`, `end` are its characters in the response, end excluded. `reason` is `form` (not of
    the form of a step, or of the answer), `operation` (not the one that is due), `begin` (not the result of the line
    before), `result` (wrong arithmetic), `answer` (not the last result), `missing` (the response ends before; the line
    is empty), or `more` (text behind the answer).
    """

    line: int
    start: int
    end: int
    reason: str


def apply(value: int, operation: tuple[str, int]) -> int:
    """Apply one operation, modulo 100."""
    sign, k = operation
    return {"+": value + k, "-": value - k, "*": value * k}[sign] % MODULUS


def read_prompt(prompt: str) -> Problem | None:
    """Read a problem off its prompt; None where the text is no prompt of this task."""
    first, *rest = prompt.split("\n")
    start, found = _START.fullmatch(first), [_OPERATION.fullmatch(line) for line in rest[:-2]]
    if start is None or rest[-2:] != ["Steps", ""] or not found or not all(found):
        return None
    problem = Problem(int(start[1]), tuple((m[2], int(m[3])) for m in found if m))
    return problem if problem.prompt == prompt else None


def verify(prompt: str, response: str) -> Fault | None:
    """Find the first wrong line of a response; None where every step and the answer are right.

    A step is wrong by what stands before it in the response: where it goes on rightly from a wrong result, the slip
    before it is the fault. White space at the end is not counted. All is wrong for a prompt of another task.
    """
    problem, text, place = read_prompt(prompt), response.rstrip(), 0
    due, value = (list(problem.operations), problem.start) if problem else ([], -1)
    lines = text.split("\n") if text else []
    for number, line in enumerate(lines):
        reason, value = _check_line(line, number, due, value)
        if reason:
            return Fault(number, place, place + len(line), reason)
        place += len(line) + 1
    return Fault(len(lines), len(text), len(text), "missing") if len(lines) <= len(due) else None


def _check_line(line: str, number: int, due: list[tuple[str, int]], value: int) -> tuple[str, int]:
    """Return what is wrong with a line, or nothing, and the result that stands in it."""
    if number > len(due):
        return "more", value
    if number == len(due):
        answer = _ANSWER.fullmatch(line)
        return ("form" if answer is None else "answer" if int(answer[1]) != value else ""), value
    step = _LINE.fullmatch(line)
    if step is None:
        return "form", value
    if step[1] != LETTERS[number] or (step[2], int(step[3])) != due[number]:
        return "operation", value
    if int(step[4]) != value:
        return "begin", value
    return ("" if int(step[5]) == apply(value, due[number]) else "result"), int(step[5])


def gold_scores(prompts: list[str], responses: list[str]) -> list[float]:
    """Gold score of each response: 1 where its last line is the right answer, else 0."""
    return [float(_is_right(prompt, response)) for prompt, response in zip(prompts, responses, strict=True)]


def _is_right(prompt: str, response: str) -> bool:
    problem, answer = read_prompt(prompt), _ANSWER.fullmatch(response.rstrip().rpartition("\n")[2])
    return problem is not None and answer is not None and int(answer[1]) == [problem.start, *problem.results][-1]
