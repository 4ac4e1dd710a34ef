"""The turns of a batch as rows of their own, so that a termination rule segments each like a response."""

from typing import Any

import torch
from torch import Tensor

from marlhf_lite.macro._checks import check_matrix
from marlhf_lite.macro.actions import MacroActions, turn_starts


def has_holes(mask: Tensor) -> bool:
    """Does a valid token of ``mask`` [B,T] bool stand behind one that is not?"""
    check_matrix("mask", mask, torch.bool)
    return bool((mask[:, 1:] & ~mask[:, :-1]).any())


class TurnRows:
    """N turns of a mask [B,T] as N rows of W tokens, from the left; W are the tokens of the longest turn."""

    def __init__(self, whole: Tensor):
        self.whole = whole
        row, first = turn_starts(whole).nonzero(as_tuple=True)
        last = turn_starts(whole.flip(1)).flip(1).nonzero(as_tuple=True)[1]  # in the same order
        width = int((last - first).max()) + 1
        column = first[:, None] + torch.arange(width, device=whole.device)
        self.mask = column <= last[:, None]  # [N,W]
        self._place = row[:, None].expand_as(column), column.clamp(max=whole.shape[1] - 1)

    def context(self, context: dict[str, Any]) -> dict[str, Any]:
        """The context of a rule, with [N,W] in place of every [B,T]."""
        shape = self.whole.shape
        return {k: x[self._place] if isinstance(x, Tensor) and x.shape == shape else x for k, x in context.items()}

    def join(self, macro: MacroActions) -> MacroActions:
        """The responses' macro actions, from those of the turns."""
        starts = torch.zeros_like(self.whole)
        row, column = (x[self.mask] for x in self._place)
        starts[row, column] = (macro._offset == 0)[self.mask]
        return MacroActions.from_starts(starts, self.whole)
