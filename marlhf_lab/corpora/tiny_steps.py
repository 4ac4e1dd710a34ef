"""The embedded task `tiny-steps`: arithmetic in 4, 8 or 16 steps, written out one a line, with an exact reward.

An early slip makes all later steps wrong, and the first wrong step is known (`verify`). Writers slip as people do: they
forget the carry of an addition, the borrow of a subtraction, or the carry of a doubling, at their own rates.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from marlhf_lite.tasks.tiny_steps.gold import LETTERS, MODULUS, NUMBER, Problem, apply, read_prompt

STEPS = (4, 8, 16)
SIGNS = "++--*"  # with equal chance; `*` doubles
CARRY_SLIPS = {"+": 0.08, "-": 0.2, "*": 0.5}  # chance to forget a carry or borrow, if there is one
OTHER_SLIP = 0.01  # chance to be one too high or too low, elsewhere
_LINE = re.compile(rf"([a-p])([+*-])([1-9]):{NUMBER}>{NUMBER}")
_ANSWER = re.compile(rf"Answer {NUMBER}")


def make_problem(rng: random.Random, steps: int | None = None) -> Problem:
    """One random problem, of 4, 8 or 16 steps if `steps` is not given."""
    signs = rng.choices(SIGNS, k=steps or rng.choice(STEPS))
    operations = tuple((sign, 2 if sign == "*" else rng.randint(1, 9)) for sign in signs)
    return Problem(rng.randrange(MODULUS), operations)


def carries(value: int, operation: tuple[str, int]) -> bool:
    """Whether an operation carries into the tens, or borrows from them."""
    sign, k = operation
    ones = value % 10
    if sign == "-":
        return ones < k
    if sign == "+":
        return ones + k > 9
    return ones * k > 9


def slip(rng: random.Random, value: int, operation: tuple[str, int]) -> int:
    """The wrong result of a writer who slips at this step: by 10 if there is a carry to forget, by 1 elsewhere."""
    if carries(value, operation):
        error = 10 if operation[0] == "-" else -10
    else:
        error = rng.choice((1, -1))
    return (apply(value, operation) + error) % MODULUS


def write(problem: Problem, results: list[int]) -> str:
    """The response with these results, one a step; each step starts from the result before it."""
    lines = []
    value = problem.start
    # There are letters for 16 steps; a problem may have fewer.
    for letter, (sign, k), result in zip(LETTERS, problem.operations, results, strict=False):
        lines.append(f"{letter}{sign}{k}:{value}>{result}")
        value = result
    return "\n".join([*lines, f"Answer {value}"])


def demonstrate(rng: random.Random, problem: Problem) -> str:
    """A response as people write it, with slips of all kinds."""

    def slips_here(number: int, value: int, operation: tuple[str, int]) -> bool:
        chance = CARRY_SLIPS[operation[0]] if carries(value, operation) else OTHER_SLIP
        return rng.random() < chance

    return _respond(rng, problem, slips_here)


def one_slip(rng: random.Random, problem: Problem, at: int) -> str:
    """A response with a slip only at step `at`; its answer is wrong, because no later step can undo the slip."""
    return _respond(rng, problem, lambda number, value, operation: number == at)


def _respond(
    rng: random.Random, problem: Problem, slips_here: Callable[[int, int, tuple[str, int]], bool]
) -> str:
    """A response with a slip at each step for which `slips_here(number of the step, value, operation)` is true."""
    results = []
    value = problem.start
    for number, operation in enumerate(problem.operations):
        if slips_here(number, value, operation):
            value = slip(rng, value, operation)
        else:
            value = apply(value, operation)
        results.append(value)
    return write(problem, results)


def make_row(rng: random.Random) -> dict[str, str]:
    """A problem with a demonstration, and a preference: the right response to one with a slip at a random step."""
    problem = make_problem(rng)
    return {
        "prompt": problem.prompt,
        "chosen": write(problem, problem.results),
        "rejected": one_slip(rng, problem, rng.randrange(len(problem.operations))),
        "demonstration": demonstrate(rng, problem),
    }


# The first wrong step


@dataclass(frozen=True)
class Fault:
    """The first wrong line of a response.

    `line` counts from 0 and `start`, `end` are its characters in the response, end excluded. `reason` is `form` (not of
    the form of a step, or of the answer), `operation` (another one is due), `begin` (not the result of the line
    before), `result` (wrong arithmetic), `answer` (not the last result), `missing` (the response ends before; the line
    is empty), or `more` (text after the answer).
    """

    line: int
    start: int
    end: int
    reason: str


def verify(prompt: str, response: str) -> Fault | None:
    """Find the first wrong line of a response; None if every step and the answer are right.

    A step is judged by what comes before it in the response: if it continues correctly from a wrong result, only the
    earlier slip is wrong. White space at the end is ignored. With a prompt of another task every line is wrong.
    """
    problem = read_prompt(prompt)
    if problem is None:  # of another task: the answer is due at once, and is never right
        operations = []
        value = -1
    else:
        operations = list(problem.operations)
        value = problem.start
    text = response.rstrip()
    lines = text.split("\n") if text else []
    place = 0  # the first character of the line
    for number, line in enumerate(lines):
        reason, value = _check_line(line, number, operations, value)
        if reason:
            return Fault(number, place, place + len(line), reason)
        place += len(line) + 1
    lines_due = len(operations) + 1  # the last one is the answer
    if len(lines) < lines_due:
        return Fault(len(lines), len(text), len(text), "missing")
    return None


def _check_line(
    line: str, number: int, operations: list[tuple[str, int]], value: int
) -> tuple[str, int]:
    """Return the `reason` of a `Fault` in a line, or "", and the value after the line.

    `number` counts lines from 0; `value` is the one before this line. A right line gives the result of its step.
    """
    if number > len(operations):
        return "more", value
    if number == len(operations):
        answer = _ANSWER.fullmatch(line)
        if answer is None:
            return "form", value
        return ("" if int(answer[1]) == value else "answer"), value
    step = _LINE.fullmatch(line)
    if step is None:
        return "form", value
    letter, sign, k, begin, result = step.groups()
    if letter != LETTERS[number] or (sign, int(k)) != operations[number]:
        return "operation", value
    if int(begin) != value:
        return "begin", value
    is_right = int(result) == apply(value, operations[number])
    return ("" if is_right else "result"), int(result)
