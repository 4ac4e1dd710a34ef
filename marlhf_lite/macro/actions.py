"""Macro actions: a partition of every response into runs of consecutive tokens (§3.1, §3.2).

Shapes throughout this package: ``B`` responses, ``T`` response tokens, ``S`` macro actions, both right-padded.

A mask [B,T] is True on valid tokens, those that the policy sampled. It may have holes: if an environment speaks
between the policy's turns, its tokens are False like padding, and no macro action reaches over them. A turn is a run
of valid tokens without a hole; a response without holes is one turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from marlhf_lite.macro._checks import (
    check_choice,
    check_int,
    check_matrix,
    check_shape,
    clean,
    first_true,
)
from marlhf_lite.utils.errors import InputError

SIGMAS = ("equal", "unit", "start", "position", "position_reversed")


@dataclass(frozen=True, eq=False, repr=False)
class MacroActions:
    """The segmentation of a batch, a different one for each response.

    Every valid token is in exactly one macro action; padding and holes are outside. Macro actions have at least one
    token, are in order, and end before a hole.

    Build one with `from_lengths`, `from_ids` or `from_starts`, which raise InputError (a ValueError) and name the first
    bad response, or with a termination rule. `check_segmentation` checks one that was built directly from ids.
    """

    #: [B,T] int64, the macro action of each token, counted from 0 in each response; -1 on padding and holes
    ids: Tensor
    width: int = -1  #: S of the [B,S] tensors; -1 takes the number that these ids need

    def __post_init__(self) -> None:
        if self.width < 0:
            needed = int(self.ids.max()) + 1 if self.ids.numel() else 0
            object.__setattr__(self, "width", needed)  # the only way in a frozen dataclass

    def __repr__(self) -> str:
        tokens = int(self.token_mask.sum())
        macro_actions = int(self.mask.sum())
        sizes = f"responses={len(self.ids)}, tokens={tokens}, macro_actions={macro_actions}"
        return f"MacroActions({sizes})"

    # -- constructors ---------------------------------------------------------------------------------------------

    @classmethod
    def from_starts(cls, starts: Tensor, mask: Tensor) -> "MacroActions":
        """From a flag per token: does a macro action begin here?

        Args:
            starts: [B,T] bool. The first token of a turn always begins one; flags on padding and holes are ignored.
            mask: [B,T] bool, True on valid tokens.
        """
        check_matrix("mask", mask, torch.bool)
        check_shape("starts", starts, mask)
        begins = (starts & mask) | turn_starts(mask)
        return cls((begins.cumsum(1) - 1).masked_fill(~mask, -1))

    @classmethod
    def from_ids(cls, ids: Tensor) -> "MacroActions":
        """From ``ids`` [B,T] int64: each token's macro action, 0, 1, 2, … in each response, -1 on padding and holes."""
        check_matrix("ids", ids, torch.int64)
        valid = ids >= 0
        # The macro action of the last valid token before this one (−1 at the start of a response).
        before = torch.nn.functional.pad(ids, (1, 0), value=-1)[:, :-1].cummax(1).values
        step = ids - before
        # A token must belong to the macro action of the token before it (step 0) or begin the next one (step 1). The
        # first token of a turn must begin one, because no macro action reaches over a hole. The only id below 0 is −1.
        goes_elsewhere = valid & ((step < 0) | (step > 1))
        begins_none_after_hole = turn_starts(valid) & (step != 1)
        is_faulty = goes_elsewhere | begins_none_after_hole | (ids < -1)
        if is_faulty.any():
            row, token = first_true(is_faulty)
            raise InputError(
                f"ids: response {row}, token {token} has {ids[row, token]}: count macro actions from 0 in each "
                "response, without a gap, begin a new one after a hole, and give padding and holes -1"
            )
        return cls(ids)

    @classmethod
    def from_lengths(cls, lengths: Sequence[Sequence[int]], T: int | None = None) -> "MacroActions":
        """From lists of lengths in tokens, one list per response ([] for an empty response).

        Args:
            lengths: e.g. ``[[2, 3], [4], []]``.
            T: width of the padded batch, in tokens; None takes the longest response.
        """
        # For each response the macro action of each of its tokens: lengths [2, 3] give 0 0 1 1 1.
        rows: list[list[int]] = []
        for row, lengths_of_response in enumerate(lengths):
            ids: list[int] = []
            for step, n in enumerate(lengths_of_response):
                check_int(f"lengths: response {row}, macro action {step}", n, least=1)
                ids += [step] * n
            rows.append(ids)
        if T is None:
            T = max(map(len, rows), default=0)
        for row, ids in enumerate(rows):
            if len(ids) > T:
                raise InputError(f"lengths: response {row} has {len(ids)} tokens, T is {T}")
        padded = [ids + [-1] * (T - len(ids)) for ids in rows]
        # `reshape` gives a batch without responses or tokens its two dimensions.
        return cls(torch.tensor(padded, dtype=torch.int64).reshape(len(rows), T))

    # -- views ----------------------------------------------------------------------------------------------------

    @cached_property
    def token_mask(self) -> Tensor:
        """[B,T] bool, True on valid tokens."""
        return self.ids >= 0

    @cached_property
    def lengths(self) -> Tensor:
        """[B,S] int64, tokens in each macro action; 0 on padding."""
        counts = self.ids.new_zeros(len(self.ids), self.width + 1)
        return counts.scatter_add_(1, self._slot, torch.ones_like(self.ids))[:, :-1]

    @cached_property
    def mask(self) -> Tensor:
        """[B,S] bool, True on macro actions."""
        return self.lengths > 0

    @cached_property
    def _slot(self) -> Tensor:
        """[B,T] the ids, but S on padding and holes: the index of a spare column after those of all macro actions."""
        return self.ids.masked_fill(~self.token_mask, self.width)

    @cached_property
    def _offset(self) -> Tensor:
        """[B,T] int64: i, the place of the token in its macro action, from 0; 0 on padding."""
        # Places count the valid tokens of a response. That of an action's first token is the length of all before it.
        first = self.lengths.cumsum(1) - self.lengths
        place = self.token_mask.cumsum(1) - 1 - self._spread(first)
        return place.masked_fill(~self.token_mask, 0)

    def spans(self) -> list[list[tuple[int, int]]]:
        """For each response the (start, end) token positions of its macro actions, end excluded."""
        # The first token of each macro action is the smallest position among its tokens. `_slot` is the number of each
        # token's macro action; padding has a spare number, whose column is cut off. Numbers that a response does not
        # use keep 0.
        place = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        first = place.new_zeros(len(self.ids), self.width + 1)
        first = first.scatter_reduce(1, self._slot, place, "amin", include_self=False)[:, :-1]
        rows = torch.stack([first, first + self.lengths], dim=2).tolist()
        spans = []
        for row in rows:
            spans.append(
                [(start, end) for start, end in row if end > start]
            )  # an unused number has no tokens
        return spans

    def select(self, rows: Tensor | slice | Sequence[int]) -> "MacroActions":
        """Select some of the responses. T and S stay, so that the same index selects from [B,S] tensors."""
        return MacroActions(self.ids[rows], self.width)

    def to(self, device: torch.device | str) -> "MacroActions":
        """The same on another device."""
        return MacroActions(self.ids.to(device), self.width)

    @cached_property
    def single_tokens(self) -> "MacroActions":
        """The segmentation of the same responses in which every token is a macro action, as in token-level PPO."""
        ids = (self.token_mask.cumsum(1) - 1).masked_fill(~self.token_mask, -1)
        return MacroActions(ids, self.ids.shape[1])

    @cached_property
    def turns(self) -> "MacroActions":
        """The segmentation of the same responses in which every turn is a macro action."""
        return MacroActions.from_starts(torch.zeros_like(self.token_mask), self.token_mask)

    def split_last_token(self) -> "MacroActions":
        """The same, with the last token of each response always as a separate macro action (the released code)."""
        begins = self._offset == 0
        place = self.token_mask.cumsum(1)  # among valid tokens, from 1
        is_last = place == place[:, -1:]  # also padding after it, which `from_starts` ignores
        return MacroActions.from_starts(begins | is_last, self.token_mask)

    # -- tokens to macro actions and back ----------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """Sum over each macro action: x [B,T] floating → [B,S] float32, 0 on padding. Differentiable."""
        x = clean("x", x, self.token_mask)
        return x.new_zeros(len(x), self.width + 1).scatter_add(1, self._slot, x)[:, :-1]

    def pool(self, x: Tensor, sigma: str = "equal") -> Tensor:
        """Σ_i σ_i x_i over each macro action (Appendix D.1): x [B,T] floating → [B,S] float32. Differentiable.

        Args:
            sigma: weights of the n tokens of a macro action, i = 0 … n − 1. "equal" 1/n; "unit" only the last token;
                "start" only the first token, so that the value does not depend on the macro action's own tokens;
                "position" 1/((n−i)·H), the last token weighs most; "position_reversed" 1/((i+1)·H), the first weighs
                most (the released code). H makes their sum 1.
        """
        if sigma == "equal":
            return self.sum(x) / self.lengths.clamp(min=1)
        return self.sum(clean("x", x, self.token_mask) * self.weights(sigma))

    def weights(self, sigma: str = "equal") -> Tensor:
        """[B,T] float32: the σ_i of every token (see `pool`); they sum to 1 in each macro action, 0 on padding."""
        check_choice("sigma", sigma, SIGMAS)
        # n − i counts the tokens from this one to the end of its macro action; on padding it is 0.
        left = self._spread(self.lengths) - self._offset
        raw = {
            "equal": torch.ones_like(left),
            "unit": left == 1,
            "start": self._offset == 0,
            "position": 1.0 / left,  # infinite on padding, which is set to 0 below
            "position_reversed": 1.0 / (self._offset + 1),
        }[sigma]
        raw = raw.float().masked_fill(~self.token_mask, 0.0)
        sums = self._spread(self.sum(raw)).masked_fill(~self.token_mask, 1.0)  # no 0 / 0 on padding
        return raw / sums

    def broadcast(self, y: Tensor) -> Tensor:
        """Each token gets its macro action's value: y [B,S] → [B,T], 0 on padding. Differentiable.

        Floating tensors come back as float32, integer and bool ones in their own dtype.
        """
        if y.is_floating_point():
            return self._spread(clean("y", y, self.mask))
        check_shape("y", y, self.mask)
        return self._spread(y)

    def _spread(self, y: Tensor) -> Tensor:
        """[B,T]: each token's entry of y [B,S], 0 on padding, which reads the spare column."""
        return torch.nn.functional.pad(y, (0, 1)).gather(1, self._slot)


def turn_starts(mask: Tensor) -> Tensor:
    """[B,T] bool: the first token of each turn of ``mask`` [B,T] bool."""
    return mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
