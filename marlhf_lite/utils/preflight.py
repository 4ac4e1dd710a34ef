"""Preflight: find every problem of a run before it starts, and report all of them at once.

A check is in the file of its feature. Its parameters name what it needs to know (`options`, `inputs`, `task`, `model`,
…), and it raises `InputError`. A check is skipped if a fact that it needs could not be made.
"""

import inspect
from collections.abc import Callable

from marlhf_lite.utils.errors import InputError, raise_all

CHECKS: list[Callable] = []


def check(function: Callable) -> Callable:
    """Register a check; `Preflight` runs it once all of its parameters are known."""
    CHECKS.append(function)
    return function


class Preflight:
    """The facts that are known about a run before it starts, and its `errors`, one per problem.

    Each option is also a fact, by its name.
    """

    def __init__(self, **facts: object):
        self.facts, self.errors, self._done = vars(facts["options"]) | facts, [], set()

    def learn(self, **makers: Callable) -> None:
        """Make facts by functions of earlier facts; an `InputError` becomes a problem instead of a fact."""
        for name, make in makers.items():
            self._call(make, name)

    def check(self) -> None:
        """Run the checks that have become possible, each once. Raises `InputError` with a line for each problem."""
        for function in CHECKS:
            if function not in self._done:
                self._call(function)
        raise_all(self.errors)

    def _call(self, function: Callable, name: str = "") -> None:
        parameters = inspect.signature(function).parameters
        if any(need not in self.facts and p.default is p.empty for need, p in parameters.items()):
            return
        self._done.add(function)
        try:
            made = function(**{need: self.facts[need] for need in parameters if need in self.facts})
        except InputError as error:
            self.errors += [error] if str(error) not in map(str, self.errors) else []
        else:
            self.facts |= {name: made} if name else {}
