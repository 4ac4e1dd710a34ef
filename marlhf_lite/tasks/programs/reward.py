"""The reward of a program (paper, Appendix B.5)."""

from marlhf_lite.tasks.programs.tests import Outcome


def program_reward(outcome: Outcome, strict: bool = False) -> float:
    """Return −0.3 + 1.3 · passed / tests for a program that ran, −0.6 for a runtime error, −1 for a compile error.

    A program that ran out of time, or that the executor does not support, counts as one with a runtime error. With
    `strict` a share of the tests counts as none: 1 where all of them passed, else −0.3.
    """
    if outcome.status == "compile_error":
        return -1.0
    if outcome.status != "ran":
        return -0.6
    return -0.3 + 1.3 * (float(all(outcome.passed)) if strict else outcome.share)
