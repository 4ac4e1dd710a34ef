"""Termination conditions ζ: where a macro action ends (§3.2.1).

A rule is a small frozen object, called as ``rule(mask, **context)``. It segments each turn as if it were a response of
its own, so a macro action never reaches over a hole. All rules take the same context, and each reads what it needs:
``token_ids`` [B,T], ``ref_logprobs`` [B,T], ``tokenizer``, ``step``, ``process``.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marlhf_lite.macro._checks import check_int, check_shape, first_true
from marlhf_lite.macro.actions import MacroActions
from marlhf_lite.macro.turns import from_rows, turns_as_rows
from marlhf_lite.utils.errors import InputError


class TerminationRule:
    """What segments a batch of responses. The rules here are subclasses; a function of the user's own needs no class::

        def at_full_stops(mask, *, token_ids, tokenizer, **context):
            stop = token_ids == tokenizer.convert_tokens_to_ids(".")
            after = torch.nn.functional.pad(stop[:, :-1], (1, 0))  # a macro action begins behind each full stop
            return MacroActions.from_starts(after, mask)

    A subclass has `segment`, and may do something in the other methods, which the trainer calls. Where an environment
    speaks between turns, both see each turn as a row of its own, so no rule has to know of holes.
    """

    needs_outputs = False  # whether the context has ``logprobs`` and ``values`` [B,T] too: one forward pass more

    def __call__(self, mask: Tensor, **context: Any) -> MacroActions:
        """mask: [B,T] bool, True on valid tokens, with holes or not. Context that a rule does not use is ignored."""
        rows, context = turns_as_rows(mask, context)
        macro = self.segment(rows, **context)
        return macro if rows is mask else from_rows(check_segmentation(macro, rows), mask)

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        """The macro actions of responses without holes, ``mask`` [B,T] bool right-padded, or of turns as such."""
        raise NotImplementedError

    def prepare(self, mask: Tensor, **context: Any) -> None:
        """Begin slow work on the CPU, before the models score; ``ref_logprobs`` is None yet."""

    def check(self) -> None:
        """Raise InputError where the first call shows that the rule does not work on these responses."""

    def metrics(self) -> dict[str, float]:
        """Return numbers about the last call, recorded with every update."""
        return {}


@dataclass(frozen=True)
class FunctionRule(TerminationRule):
    """A function as a rule."""

    function: Callable[..., MacroActions]

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        return self.function(mask, **context)


def as_rule(rule: TerminationRule | Callable[..., MacroActions]) -> TerminationRule:
    """The rule itself, or a function as one."""
    return rule if isinstance(rule, TerminationRule) else FunctionRule(rule)


@dataclass(frozen=True)
class FixedNGram(TerminationRule):
    """Every n tokens, the last macro action may be shorter (§3.2.1, the default rule; n=5 in the paper's runs).

    n=1 is token-level PPO; n=math.inf makes one macro action of each response, the contextual bandit (§3.2.3).
    """

    n: int | float = 5

    def __post_init__(self) -> None:
        if self.n != math.inf:  # one macro action of a response
            check_int("n", self.n, least=1)

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        place = torch.arange(mask.shape[1], device=mask.device)
        starts = place % self.n == 0 if self.n < mask.shape[1] else place == 0
        return MacroActions.from_starts(starts.expand_as(mask), mask)


@dataclass(frozen=True)
class Whole(FixedNGram):
    """One macro action for the whole response; where an environment speaks in between, one for each turn."""

    n: int | float = math.inf


@dataclass(frozen=True)
class Turn(Whole):
    """One macro action for each turn: the environment decides where it ends, by its answer."""


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
        object.__setattr__(self, "lengths", tuple(self.lengths))
        _check_lengths(self.lengths)
        check_int("repeats", self.repeats, least=1)
        check_int("seed", self.seed)

    def segment(self, mask: Tensor, *, step: int = 0, process: int = 0, **context: Any) -> MacroActions:
        bag = torch.tensor(self.lengths * self.repeats, device=mask.device).expand(len(mask), -1)
        ends = _shuffle(bag, self.seed, step, process).cumsum(1)
        return _cut_behind(ends, mask)


@dataclass(frozen=True)
class Listed(TerminationRule):
    """Lengths in the order of a list, the last one again and again: (1, 11, 8) cuts behind tokens 1, 12, 20, 28, ..."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_lengths(self.lengths)

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        ends = torch.tensor(self.lengths + self.lengths[-1:] * mask.shape[1], device=mask.device).cumsum(0)
        return _cut_behind(ends.expand(len(mask), -1), mask)


@dataclass(frozen=True)
class Shuffled(TerminationRule):
    """The lengths of another rule in a random order within each response: a control for where its boundaries lie.

    The number of macro actions and their lengths stay; the order depends on ``seed``, ``step``, ``process``
    and the row, as in `RandomizedNGram`.
    """

    rule: TerminationRule | Callable[..., MacroActions]
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", as_rule(self.rule))

    @property
    def needs_outputs(self) -> bool:
        return self.rule.needs_outputs

    def prepare(self, mask: Tensor, **context: Any) -> None:
        self.rule.prepare(mask, **context)

    def check(self) -> None:
        self.rule.check()

    def metrics(self) -> dict[str, float]:
        return self.rule.metrics()

    def segment(self, mask: Tensor, *, step: int = 0, process: int = 0, **context: Any) -> MacroActions:
        macro = check_segmentation(self.rule(mask, step=step, process=process, **context), mask)
        ends = _shuffle(macro.lengths, self.seed, step, process).cumsum(1)
        return _cut_behind(ends, mask)


def check_segmentation(macro: MacroActions, mask: Tensor) -> MacroActions:
    """``macro`` on the mask's device, if it segments ``mask`` [B,T]; what a trainer asks of a rule of the user's own.

    Raises:
        InputError: not `MacroActions`, no partition, or not of these tokens; it names the first bad response.
    """
    if not isinstance(macro, MacroActions):
        raise InputError(
            f"termination rule: returned {type(macro).__name__}, expected MacroActions: build them with from_starts, "
            "from_ids or from_lengths"
        )
    check_shape("termination rule: ids", macro.ids, mask)
    try:
        macro = MacroActions.from_ids(macro.ids.to(mask.device))
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


def _check_lengths(lengths: tuple[int, ...]) -> None:
    if not lengths:
        raise InputError("lengths: expected at least one length")
    for place, n in enumerate(lengths):
        check_int(f"lengths[{place}]", n, least=1)


def _shuffle(lengths: Tensor, seed: int, step: int, process: int) -> Tensor:
    """[B,K]: each row of lengths [B,K] in an order of its own, by sorting a random key per entry; zeros last."""
    name = f"{seed} {step} {process}" if process else f"{seed} {step}"  # the first process draws what one alone does
    generator = torch.Generator().manual_seed(random.Random(name).getrandbits(63))
    keys = torch.rand(lengths.shape, generator=generator).to(lengths.device)
    return lengths.gather(1, keys.masked_fill(lengths == 0, 2.0).argsort(dim=1, stable=True))


def _cut_behind(ends: Tensor, mask: Tensor) -> MacroActions:
    """Macro actions that end behind so many tokens, ``ends`` [B,K]; those behind the whole width do not count."""
    T = mask.shape[1]
    starts = torch.zeros(len(mask), T + 1, dtype=torch.bool, device=mask.device)
    return MacroActions.from_starts(starts.scatter_(1, ends.clamp(max=T), True)[:, :T], mask)
