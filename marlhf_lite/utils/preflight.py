"""Preflight: find every problem of a run before it starts, and report all of them at once."""

from collections.abc import Callable
from typing import Any, TypeVar

from marlhf_lite.utils.errors import InputError, raise_all

Result = TypeVar("Result")
MISSING: Any = object()  # in place of what could not be made


class Preflight:
    """Makes and checks what a run needs, step by step, and goes on after a problem to find the next one."""

    def __init__(self):
        self.problems: list[InputError] = []

    def attempt(self, function: Callable[..., Result], *args: object) -> Result:
        """Return `function(*args)`; an `InputError` becomes a problem, and the result `MISSING`.

        A function that needs something that is missing is not called, and its result is missing, too.
        """
        if any(argument is MISSING for argument in args):
            return MISSING
        try:
            return function(*args)
        except InputError as error:
            self._add(error)
            return MISSING

    def stop_if_any_problem(self) -> None:
        """Raise `InputError` with a line for each problem, if there are any."""
        raise_all(self.problems)

    def _add(self, problem: InputError) -> None:
        known = [str(earlier) for earlier in self.problems]
        if str(problem) not in known:  # two steps may meet the same one
            self.problems.append(problem)
