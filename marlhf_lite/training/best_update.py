"""The update with the best held-out number, and when to stop without a better one, as transformers has them.

`--keep_best NAME` is `load_best_model_at_end` with `metric_for_best_model`, and `--patience` is that of
`EarlyStoppingCallback`: more is better, but for a name that ends in "loss"; only a strictly better number counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from marlhf_lite.training.run_state import RunState
from marlhf_lite.utils.errors import InputError


@dataclass(kw_only=True)
class BestUpdate:
    """Compares the held-out tests of a run; the `state`, which checkpoints hold, remembers the best one."""

    score_name: str  # of the held-out number to compare; "" if nobody asked for the best update
    patience: int  # tests in a row without a better number, at which a run stops; 0: it never does
    state: RunState

    def remember_if_best(self, scores: Mapping[str, float]) -> bool:
        """Remember the present update if its held-out test is the best so far; return whether it is.

        `scores` are the test's numbers by name. Raises `InputError` if `score_name` is not among these names.
        """
        if not self.score_name:  # nobody asked for the best update
            return False
        if self.score_name not in scores:
            fix = f"choose from {', '.join(scores)}"
            raise InputError(f"--keep_best {self.score_name}: the tests have no such number: {fix}")
        found = scores[self.score_name]
        if self._is_better(found):
            self.state.best_update = self.state.updates_done
            self.state.best_number = found
            self.state.tests_without_better = 0
            return True
        self.state.tests_without_better += 1
        return False

    def forget(self) -> None:
        """Forget which update was the best, because its checkpoint does not exist any more."""
        self.state.best_update = 0
        self.state.best_number = None

    def is_out_of_patience(self) -> bool:
        """Whether the run stops, because `patience` tests in a row have found nothing better; never if that is 0."""
        return 0 < self.patience <= self.state.tests_without_better

    def _is_better(self, found: float) -> bool:
        best = self.state.best_number
        if best is None:  # the first test is the best so far, unless it has found NaN
            return not math.isnan(found)
        if self.score_name.endswith("loss"):
            return found < best
        return found > best
