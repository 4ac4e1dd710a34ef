"""Check the graded homework or the assignment (docs/homework.md): `python -m marlhf_lab.homework answers.py`.

The library computes the right results from new numbers each time, so a copied number earns nothing.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from marlhf_lab import build_it
from marlhf_lite.macro import FixedNGram, gae, macro_rewards, macro_values, policy_loss

POINTS = {"spans": 3, "rewards": 3, "values": 2, "advantages": 5, "to_tokens": 2, "loss": 5}


def one_case(draw: torch.Generator) -> dict[str, tuple[list, torch.Tensor]]:
    """Return the arguments and the right result of each of the student's functions, for one response of 1 to 12 tokens.

    The right result of one function is an argument of the next ones, as in an update.
    """
    # 1. New numbers: a response, its KL rewards by token, its values and score, and the log-probabilities of two
    #    policies, which may be any numbers: only their difference counts.
    length = int(torch.randint(1, 13, (), generator=draw))
    n = int(torch.randint(1, 13, (), generator=draw))
    penalties, values, old, moves = torch.randn(4, 1, length, generator=draw)
    score, lam = torch.rand(2, generator=draw)
    new = old + 0.3 * moves
    # 2. The library's results, with a first dimension for the one response.
    macro = FixedNGram(n)(torch.ones(1, length, dtype=torch.bool))
    (spans,) = macro.spans()
    rewards = macro_rewards(penalties, score[None], macro)
    pooled = macro_values(values, macro)
    advantages, _ = gae(rewards, pooled, macro.mask, lam=lam.item())
    of_tokens = macro.broadcast(advantages)
    loss, _ = policy_loss(new, old, advantages, macro, clip=0.2)
    # 3. Arguments as plain lists and numbers, as the homework has them.
    return {
        "spans": ([length, n], torch.tensor(spans)),
        "rewards": ([penalties[0].tolist(), score.item(), spans], rewards[0]),
        "values": ([values[0].tolist(), spans], pooled[0]),
        "advantages": ([rewards[0].tolist(), pooled[0].tolist(), lam.item()], advantages[0]),
        "to_tokens": ([advantages[0].tolist(), spans], of_tokens[0]),
        "loss": ([new[0].tolist(), old[0].tolist(), of_tokens[0].tolist(), 0.2], loss),
    }


def fault(answers: Any, name: str, given: list, right: torch.Tensor) -> str:
    """Return what is wrong with the result of one function, or an empty text.

    An error in the student's code counts as a wrong result.

    answers: has the student's functions as attributes; name: that of the function; given: its arguments; right: the
    right result.
    """
    try:
        found = getattr(answers, name)(*given)
        as_tensor = torch.as_tensor(found, dtype=torch.float64)
    except Exception as error:
        return f"{name}{tuple(given)} ends with {type(error).__name__}: {error}"
    if as_tensor.shape == right.shape and torch.allclose(as_tensor, right.double(), atol=1e-4):
        return ""
    return f"{name}{tuple(given)} is {right.tolist()}, not {found}"


def grade(answers: Any, cases: int = 20) -> dict[str, str]:
    """Return the first error of each function, or an empty text; `answers` has the functions as attributes."""
    draw = torch.Generator()
    draw.seed()  # a random seed, so that each call draws other numbers
    faults = dict.fromkeys(POINTS, "")
    for _ in range(cases):
        for name, (given, right) in one_case(draw).items():
            if not faults[name]:
                faults[name] = fault(answers, name, given, right)
    return faults


def main(path: Path) -> None:
    """Run a file of answers and print its points; a file with an `update` is the assignment."""
    spec = importlib.util.spec_from_file_location("answers", path)
    answers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answers)
    # The module that grades: `build_it` for the assignment, this module itself for the homework. Both have `grade` and
    # `POINTS`.
    grader = build_it if hasattr(answers, "update") else sys.modules[__name__]
    faults = grader.grade(answers)
    total = 0
    for name, points in grader.POINTS.items():
        earned = 0 if faults[name] else points
        total += earned
        print(f"{name:13} {earned} of {points}  {faults[name]}".rstrip())
    print(f"{'sum':13} {total} of {sum(grader.POINTS.values())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, help="file with your functions")
    parser.add_argument(
        "--start", action="store_true", help="write this file: the assignment without its functions"
    )
    args = parser.parse_args()
    if args.start:
        if not build_it.WHOLE.is_file():
            parser.error(
                "--start: the single file is not in an installed package: use a copy of the repository"
            )
        if args.answers.exists():
            parser.error(f"{args.answers}: there is a file already: choose another name")
        whole = build_it.WHOLE.read_text(encoding="utf-8")
        args.answers.write_text(build_it.starter(whole), encoding="utf-8")
    elif not args.answers.is_file():
        parser.error(f"{args.answers}: no such file")
    else:
        main(args.answers)
