"""Preflight: find every problem of a run before it starts, and report all of them at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from marlhf_lite.utils.errors import InputError, raise_all


class PartIsMissing(Exception):
    """A step needs a part of the run that an earlier step could not make, and whose problem is on the list."""


class ProblemList:
    """The problems that the steps of a preflight meet; each step is a block of `collect`."""

    def __init__(self):
        self.problems: list[InputError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Put an `InputError` of the block on the list, so that the next step finds the next problem.

        A block that needs a missing part ends without a problem: the user is told what is wrong, not what follows from
        it. If two steps meet the same problem, it is on the list once.
        """
        try:
            yield
        except PartIsMissing:
            return
        except InputError as problem:
            if str(problem) not in [str(earlier) for earlier in self.problems]:
                self.problems.append(problem)

    def stop_if_any_problem(self) -> None:
        """Raise `InputError` with a line for each problem, if there are any."""
        raise_all(self.problems)
