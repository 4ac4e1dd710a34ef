"""Rules by lists of lengths: in order, in a random order, or another rule's lengths in a random order (§3.2.1)."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marlhf_lite.macro._checks import check_int
from marlhf_lite.macro.actions import MacroActions
from marlhf_lite.macro.termination import TerminationRule, as_rule, check_segmentation
from marlhf_lite.utils.errors import InputError


@dataclass(frozen=True)
class RandomizedNGram(TerminationRule):
    """Lengths from a list, each ``repeats`` times, shuffled anew for each response (§3.2.1, Appendix E).

    Tokens left over when the list is used up form one last macro action. The released code uses (1, 2, 3, 5, 10).

    The shuffles depend on ``seed``, on the context values ``step`` (pass the update's number to get new lengths at
    every update) and ``process`` (which of several processes draws, from 0), and on the number of responses.
    """

    lengths: tuple[int, ...] = (2, 3, 5, 10)
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        # `object.__setattr__` is the only way to set a field of a frozen dataclass.
        object.__setattr__(self, "lengths", tuple(self.lengths))
        _check_lengths(self.lengths)

    def segment(
        self, mask: Tensor, *, step: int = 0, process: int = 0, **context: Any
    ) -> MacroActions:
        lengths = torch.tensor(self.lengths * self.repeats, device=mask.device)
        of_each_response = lengths.expand(len(mask), -1)
        ends = _shuffle(of_each_response, self.seed, step, process).cumsum(1)
        return _cut_after(ends, mask)


@dataclass(frozen=True)
class Listed(TerminationRule):
    """Lengths in the order of a list, the last one repeated: (1, 11, 8) cuts after tokens 1, 12, 20, 28, …"""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_lengths(self.lengths)

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        # As many copies of the last length as the longest response could need; ends beyond it are ignored.
        last_one_repeated = self.lengths[-1:] * mask.shape[1]
        lengths = torch.tensor(self.lengths + last_one_repeated, device=mask.device)
        ends = lengths.cumsum(0).expand(len(mask), -1)
        return _cut_after(ends, mask)


@dataclass(frozen=True)
class Shuffled(TerminationRule):
    """The lengths of another rule in a random order within each response: a control that moves only the boundaries.

    The number of macro actions and their lengths stay; the order depends on ``seed``, ``step``, ``process``
    and the row, as in `RandomizedNGram`.
    """

    rule: Any  #: a rule, or a function, which becomes one
    seed: int = 0

    def __post_init__(self) -> None:
        rule = as_rule(self.rule)
        object.__setattr__(self, "rule", rule)
        object.__setattr__(self, "needs_outputs", rule.needs_outputs)

    def check(self) -> None:
        self.rule.check()

    def metrics(self) -> dict[str, float]:
        return self.rule.metrics()

    def segment(
        self, mask: Tensor, *, step: int = 0, process: int = 0, **context: Any
    ) -> MacroActions:
        macro = check_segmentation(self.rule(mask, step=step, process=process, **context), mask)
        ends = _shuffle(macro.lengths, self.seed, step, process).cumsum(1)
        return _cut_after(ends, mask)


def _check_lengths(lengths: tuple[int, ...]) -> None:
    if not lengths:
        raise InputError("lengths: expected at least one length")
    for place, n in enumerate(lengths):
        check_int(f"lengths[{place}]", n, least=1)


def _shuffle(lengths: Tensor, seed: int, step: int, process: int) -> Tensor:
    """[B,K]: each row of lengths [B,K] in its own random order, which follows from the other arguments; zeros last."""
    name = f"{seed} {step}"
    if process:  # the first process (0) draws what a run of one process draws
        name += f" {process}"
    generator = torch.Generator().manual_seed(random.Random(name).getrandbits(63))
    # A random key below 1 for each entry, and a larger one for zeros, which pad a row: sorted, they give the order.
    keys = torch.rand(lengths.shape, generator=generator).to(lengths.device)
    keys = keys.masked_fill(lengths == 0, 2.0)
    return lengths.gather(1, keys.argsort(dim=1, stable=True))


def _cut_after(ends: Tensor, mask: Tensor) -> MacroActions:
    """Macro actions that end after as many tokens as ``ends`` [B,K] says; ends beyond the width are ignored."""
    T = mask.shape[1]
    # After an end the next one begins. Column T is spare: ends at the width and beyond go there, and are cut off.
    starts = torch.zeros(len(mask), T + 1, dtype=torch.bool, device=mask.device)
    starts.scatter_(1, ends.clamp(max=T), True)
    return MacroActions.from_starts(starts[:, :T], mask)
