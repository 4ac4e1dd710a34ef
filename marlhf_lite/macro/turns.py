"""The turns of a batch as separate rows, so that a termination rule segments each like a response."""

from typing import Any

import torch
from torch import Tensor

from marlhf_lite.macro.actions import MacroActions


def turns_as_rows(mask: Tensor, context: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Give each turn of a batch a separate row: return the mask of these rows, and the context of a rule for them.

    If ``mask`` [B,T] bool has N turns, the longest of W tokens, the new mask is [N,W], padded on the right. Each tensor
    [B,T] of the context is rearranged in the same way, and everything else in it stays. If there are no holes, the mask
    itself and its context are returned.
    """
    # Padding is on the right only, so a valid token after one that is not valid comes after a hole.
    has_holes = (mask[:, 1:] & ~mask[:, :-1]).any()
    if not has_holes:
        return mask, context
    turns = MacroActions.from_starts(torch.zeros_like(mask), mask)
    lengths = turns.lengths[turns.mask][:, None]
    rows = torch.arange(int(lengths.max()), device=mask.device) < lengths

    # Both masks are True on the same tokens in the same order, so values move from one to the other in this order.
    context_of_rows = {}
    for name, x in context.items():
        is_by_token = isinstance(x, Tensor) and x.shape == mask.shape
        if is_by_token:
            x = x.new_zeros(rows.shape).masked_scatter(rows, x[mask])
        context_of_rows[name] = x
    return rows, context_of_rows


def from_rows(macro: MacroActions, mask: Tensor) -> MacroActions:
    """The macro actions of the responses of ``mask`` [B,T], from those of their turns as rows."""
    starts = torch.zeros_like(mask)
    starts[mask] = (macro._offset == 0)[macro.token_mask]
    return MacroActions.from_starts(starts, mask)
