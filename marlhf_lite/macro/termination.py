"""Termination conditions ζ: where a macro action ends (§3.2.1).

A rule is a small frozen object, called as ``rule(mask, **context)``. It segments each turn as if it were a
separate response, so a macro action never reaches over a hole. All rules take the same context, and each reads what it
needs: ``token_ids`` [B,T], ``ref_logprobs`` [B,T], ``tokenizer``, ``step``, ``process``.
"""

import math
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
    """Segments a batch of responses. The rules here are subclasses; your own may also be a function::

        def at_full_stops(mask, *, token_ids, tokenizer, **context):
            stop = token_ids == tokenizer.convert_tokens_to_ids(".")
            after = torch.nn.functional.pad(stop[:, :-1], (1, 0))  # a macro action begins after each full stop
            return MacroActions.from_starts(after, mask)

    A subclass implements `segment`, and may implement the other methods, which the trainer also calls. If an
    environment speaks between turns, each row that a rule gets is one turn, without holes.
    """

    #: Whether the context also has ``logprobs``, ``entropy`` (in nats) and ``values`` [B,T] of the policy that sampled
    #: and of the critic: one more forward pass.
    needs_outputs = False

    def __call__(self, mask: Tensor, **context: Any) -> MacroActions:
        """Segment ``mask`` [B,T] bool, True on valid tokens, with or without holes. Other context is ignored."""
        rows, context = turns_as_rows(mask, context)
        macro = self.segment(rows, **context)
        if rows is mask:  # there are no holes: a row is a response
            return macro
        return from_rows(check_segmentation(macro, rows), mask)

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        """Return macro actions for rows without holes (responses or turns); ``mask`` [B,T] bool is right-padded."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise InputError if the first call shows that the rule does not work on these responses."""

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
    """Return the rule itself, or a function as a rule."""
    return rule if isinstance(rule, TerminationRule) else FunctionRule(rule)


@dataclass(frozen=True)
class FixedNGram(TerminationRule):
    """Cut after every n tokens; the last macro action may be shorter (§3.2.1, the default; n=5 in the paper's runs).

    n=1 is token-level PPO; n=math.inf makes one macro action of each response, the contextual bandit (§3.2.3).
    """

    n: int | float = 5

    def __post_init__(self) -> None:
        if self.n != math.inf:  # infinity makes one macro action of a response
            check_int("n", self.n, least=1)

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        place = torch.arange(mask.shape[1], device=mask.device)
        if self.n < mask.shape[1]:
            starts = place % self.n == 0
        else:  # also infinity, by which an integer cannot be divided
            starts = place == 0
        return MacroActions.from_starts(starts.expand_as(mask), mask)


@dataclass(frozen=True)
class Whole(FixedNGram):
    """One macro action for the whole response; if an environment speaks in between, one for each turn."""

    n: int | float = math.inf


@dataclass(frozen=True)
class Turn(Whole):
    """One macro action for each turn: the environment's answer ends it."""


def check_segmentation(macro: MacroActions, mask: Tensor) -> MacroActions:
    """Return ``macro`` on the mask's device if it segments ``mask`` [B,T]. The trainer checks what each rule returns.

    Raises:
        InputError: ``macro`` has another type, is not a partition into runs, or does not cover exactly the tokens of
            the mask; the message names the first bad response.
    """
    if not isinstance(macro, MacroActions):
        raise InputError(
            f"termination rule: returned {type(macro).__name__}, expected MacroActions: build them with from_starts, "
            "from_ids or from_lengths"
        )
    check_shape("termination rule: ids", macro.ids, mask)
    # Building it anew checks that it is a partition: a user's rule may have made or changed it without that check.
    try:
        macro = MacroActions.from_ids(macro.ids.to(mask.device))
    except InputError as error:
        raise InputError(f"termination rule: {error}") from None
    differs = macro.token_mask != mask
    if differs.any():
        row, _ = first_true(differs)
        covered = int(macro.token_mask[row].sum())
        tokens = int(mask[row].sum())
        raise InputError(
            "termination rule: it left response tokens out of macro actions, or put padding into one: "
            f"response {row} has {tokens} tokens, its macro actions cover {covered}"
        )
    return macro
