"""The turns of a batch as separate rows, so that a termination rule segments each like a response."""

from typing import Any

import torch
from torch import Tensor

from marlhf_lite.macro.actions import MacroActions


def turns_as_rows(mask: Tensor, context: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """N turns of ``mask`` [B,T] bool, the longest of W tokens, as a mask [N,W], and the context of a rule with [N,W]
    instead of every [B,T]. A mask without holes comes back unchanged, with its context.
    """
    if not (mask[:, 1:] & ~mask[:, :-1]).any():
        return mask, context
    turns = MacroActions.from_starts(torch.zeros_like(mask), mask)
    lengths = turns.lengths[turns.mask][:, None]
    rows = torch.arange(int(lengths.max()), device=mask.device) < lengths

    def move(x: Any) -> Any:  # tokens keep their order
        same = isinstance(x, Tensor) and x.shape == mask.shape
        return x.new_zeros(rows.shape).masked_scatter(rows, x[mask]) if same else x

    return rows, {name: move(x) for name, x in context.items()}


def from_rows(macro: MacroActions, mask: Tensor) -> MacroActions:
    """The macro actions of the responses of ``mask`` [B,T], from those of their turns as rows."""
    starts = torch.zeros_like(mask)
    starts[mask] = (macro._offset == 0)[macro.token_mask]
    return MacroActions.from_starts(starts, mask)
