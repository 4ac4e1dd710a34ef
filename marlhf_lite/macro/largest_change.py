"""ζ learned from the models: a macro action begins where the critic's value, or the policy's certainty, jumps."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from marlhf_lite.macro._checks import check_choice, clean
from marlhf_lite.macro.actions import MacroActions
from marlhf_lite.macro.termination import FixedNGram, TerminationRule
from marlhf_lite.utils.errors import InputError

SIGNALS = ("values", "logprobs")


@dataclass(frozen=True)
class LargestChange(TerminationRule):
    """⌈length / n⌉ macro actions per response, as many as `FixedNGram(n)` makes, which begin where a signal jumps most.

    It reads the context value that `of` names, [B,T] of the policy that sampled; the trainer makes both with one more
    forward pass (`needs_outputs`).

    Args:
        of: "values": a macro action begins after the token that changes the critic's V(s_t) most; credit then falls on
            the macro action that holds this token. "logprobs": a macro action begins at the tokens that the policy was
            least sure of, its choices: the cutpoints of SPO (arXiv 2505.23564).
        n: mean tokens per macro action; math.inf makes one of the whole response.

    Raises:
        InputError: the context value is missing.
    """

    of: str = "values"
    n: int | float = 5
    needs_outputs = True  # of every such rule; not a field

    def __post_init__(self) -> None:
        check_choice("of", self.of, SIGNALS)
        FixedNGram(self.n)  # checks n

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        signal = context.get(self.of)
        if signal is None:
            raise InputError(
                f"{self.of}: termination by the largest change needs {self.of} [B,T]: pass them"
            )
        signal = clean(self.of, signal.detach(), mask)
        if self.of == "values":
            change = signal.diff(dim=1, prepend=signal[:, :1]).abs()
        else:  # the least sure token has the lowest log-probability
            change = -signal
        # The first token always begins a macro action, padding never.
        change = change.masked_fill(~mask, -math.inf)
        change[:, :1] = math.inf

        # The `wanted` tokens of the largest change begin one. `order` has the tokens from the largest change to the
        # smallest; sorting it again gives each token its rank, from 0.
        wanted = (mask.sum(1, keepdim=True) / self.n).ceil()
        order = change.argsort(dim=1, descending=True, stable=True)
        rank = order.argsort(dim=1)
        return MacroActions.from_starts(rank < wanted, mask)
