"""Pad rows of token ids to tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad(rows: Sequence[Sequence[int]], value: int, left: bool) -> tuple[Tensor, Tensor]:
    """Return `(ids [B, L], mask [B, L])` of int64, padded with `value` on the left or the right; L is the longest row.

    The mask is 1 on tokens and 0 on padding. It comes from the lengths, because a token may have the id `value` itself.
    """
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    ones = [torch.ones_like(row) for row in ids]
    side = "left" if left else "right"
    padded_ids = pad_sequence(ids, batch_first=True, padding_value=value, padding_side=side)
    mask = pad_sequence(ones, batch_first=True, padding_value=0, padding_side=side)
    return padded_ids, mask
