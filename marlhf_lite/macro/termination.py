"""Termination conditions ζ: where a macro action ends (§3.2.1).

A rule is a small frozen object, called as ``rule(mask, **context)``. All rules take the same context, and each reads
only what it needs: ``token_ids`` [B,T], ``ref_logprobs`` [B,T], ``tokenizer``, ``step``.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from marlhf_lite.macro._checks import check_int, check_mask, check_tensor, first_true
from marlhf_lite.macro.actions import MacroActions, check_partition, starts_at
from marlhf_lite.utils.errors import InputError


@runtime_checkable
class TerminationRule(Protocol):
    """Anything that segments a batch of responses: one of the rules here, or a function of the user's own.

    A function needs no class::

        def at_full_stops(mask, *, token_ids, tokenizer, **context):
            stop = token_ids == tokenizer.convert_tokens_to_ids(".")
            after = torch.nn.functional.pad(stop[:, :-1], (1, 0))  # a macro action begins behind each full stop
            return MacroActions.from_starts(after, mask)

    A rule may also have two methods that the trainer calls if they are there: ``prepare(mask, **context)`` before the
    models score (``ref_logprobs`` is not there yet), to begin slow work on the CPU meanwhile; and ``metrics()``, a dict
    of numbers about the last call, recorded with every update.
    """

    def __call__(self, mask: Tensor, **context: Any) -> MacroActions:
        """mask: [B,T] bool, True on valid tokens, right-padded. Context that a rule does not use is ignored."""
        ...


@dataclass(frozen=True)
class FixedNGram:
    """Every n tokens, the last macro action may be shorter (§3.2.1, the default rule; n=5 in the paper's runs).

    n=1 is token-level PPO; n=math.inf makes one macro action of each response, the contextual bandit (§3.2.3).
    """

    n: int | float = 5

    def __post_init__(self) -> None:
        if self.n != math.inf:
            try:
                check_int("n", self.n, least=1)
            except InputError as error:
                raise InputError(f"{error}; math.inf makes one macro action of a response") from None

    def __call__(self, mask: Tensor, **context: Any) -> MacroActions:
        check_mask(mask)
        place = torch.arange(mask.shape[1], device=mask.device)
        starts = place % self.n == 0 if self.n < mask.shape[1] else place == 0
        return MacroActions.from_starts(starts.expand_as(mask), mask)


@dataclass(frozen=True)
class Whole:
    """One macro action for the whole response, the same as ``FixedNGram(math.inf)``."""

    def __call__(self, mask: Tensor, **context: Any) -> MacroActions:
        return FixedNGram(math.inf)(mask)


@dataclass(frozen=True)
class RandomizedNGram:
    """Lengths from a list, each ``repeats`` times, shuffled anew for each response (§3.2.1, Appendix E).

    Tokens left over when the list is used up form one last macro action. The released code uses (1, 2, 3, 5, 10).

    The shuffle of a response depends on ``seed``, on its row in the batch, and on the context value ``step``: pass the
    update's number to get new lengths at every update.
    """

    lengths: tuple[int, ...] = (2, 3, 5, 10)
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.lengths:
            raise InputError("lengths: expected at least one length")
        for place, n in enumerate(self.lengths):
            check_int(f"lengths[{place}]", n, least=1)
        check_int("repeats", self.repeats, least=1)
        check_int("seed", self.seed)

    def __call__(self, mask: Tensor, *, step: int = 0, **context: Any) -> MacroActions:
        check_mask(mask)
        check_int("step", step)
        bag = torch.tensor(self.lengths * self.repeats, device=mask.device).expand(len(mask), -1)
        ends = _shuffle(bag, self.seed, step).cumsum(1)
        return MacroActions.from_starts(starts_at(ends, mask.shape[1]), mask)


@dataclass(frozen=True)
class Listed:
    """Lengths in the order of a list, the last one again and again: (1, 11, 8) cuts behind tokens 1, 12, 20, 28, ..."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths:
            raise InputError("lengths: expected at least one length")
        for place, n in enumerate(self.lengths):
            check_int(f"lengths[{place}]", n, least=1)

    def __call__(self, mask: Tensor, **context: Any) -> MacroActions:
        check_mask(mask)
        ends = torch.tensor(self.lengths + self.lengths[-1:] * mask.shape[1], device=mask.device).cumsum(0)
        return MacroActions.from_starts(starts_at(ends.expand(len(mask), -1), mask.shape[1]), mask)


@dataclass(frozen=True)
class Shuffled:
    """The lengths of another rule in a random order within each response: a control for where its boundaries lie.

    The number of macro actions and their lengths stay; the order depends on ``seed``, ``step`` and the row, as
    in `RandomizedNGram`.
    """

    rule: TerminationRule
    seed: int = 0

    def __call__(self, mask: Tensor, *, step: int = 0, **context: Any) -> MacroActions:
        lengths = self.rule(mask, step=step, **context).lengths
        ends = _shuffle(lengths, self.seed, step).cumsum(1)
        return MacroActions.from_starts(starts_at(ends, mask.shape[1]), mask)


def check_segmentation(macro: MacroActions, mask: Tensor) -> MacroActions:
    """``macro`` itself, if it is a segmentation of ``mask`` [B,T]; what a trainer asks of a rule of the user's own.

    Raises:
        InputError: not `MacroActions`, no partition (a macro action without tokens, lengths that do not fit), or not
            of these tokens; it names the first bad response.
    """
    if not isinstance(macro, MacroActions):
        raise InputError(
            f"termination rule: returned {type(macro).__name__}, expected MacroActions: build them with from_starts, "
            "from_ids or from_lengths"
        )
    check_tensor("termination rule: ids", macro.ids, tuple(mask.shape), mask)
    try:
        check_partition(macro)
    except InputError as error:
        raise InputError(f"termination rule: {error}") from None
    if (differ := macro.token_mask != mask).any():
        row = first_true(differ)[0]
        counts = [int(m[row].sum()) for m in (macro.token_mask, mask)]
        raise InputError(
            "termination rule: it left response tokens out of macro actions, or put padding into one: "
            f"response {row} has {counts[1]} tokens, its macro actions cover {counts[0]}"
        )
    return macro


def _shuffle(lengths: Tensor, seed: int, step: int) -> Tensor:
    """[B,K]: each row of lengths [B,K] in an order of its own, by sorting a pseudo-random key per entry; zeros last."""
    rows, places = (torch.arange(n, device=lengths.device) for n in lengths.shape)
    seed, step = rows.new_tensor([_signed(seed), _signed(step)])
    keys = _hash(_hash(_hash(_hash(torch.zeros_like(seed), seed), step), rows)[:, None], places)
    keys = keys.masked_fill(lengths == 0, torch.iinfo(torch.int64).max)
    return lengths.gather(1, keys.argsort(dim=1, stable=True))


def _signed(number: int) -> int:
    """The low 64 bits of any integer, read as int64."""
    return (int(number) + 2**63) % 2**64 - 2**63


def _hash(state: Tensor, value: Tensor) -> Tensor:
    """One step of a counter-based generator (the splitmix64 finaliser) on int64 with wrap-around.

    Unlike torch.Generator it needs no loop over responses and gives the same numbers on every device.
    """
    x = state + (value + 1) * _signed(0x9E3779B97F4A7C15)
    # >> keeps the sign of an int64; the & makes it the shift of an unsigned number.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))
