"""Describe a segmentation, and measure how far two of them agree."""

import torch
from torch import Tensor

from marlhf_lite.macro.actions import MacroActions
from marlhf_lite.utils.errors import InputError


def describe(macro: MacroActions) -> dict:
    """Return the lengths of the macro actions of a batch, as plain numbers that JSON takes.

    Keys:
        responses, tokens, macro_actions: counts.
        macro_actions_per_response: their mean; empty responses count as 0.
        mean_length: tokens per macro action.
        single_share: share of macro actions that are a single token.
        histogram: {length: macro actions of that length}, by length.

    Without macro actions all means and shares are 0.
    """
    lengths, counts = macro.lengths[macro.mask].unique(return_counts=True)
    histogram = dict(zip(lengths.tolist(), counts.tolist(), strict=True))
    responses = len(macro.ids)
    tokens = int(macro.token_mask.sum())
    macro_actions = int(macro.mask.sum())
    return {
        "responses": responses,
        "tokens": tokens,
        "macro_actions": macro_actions,
        "macro_actions_per_response": macro_actions / max(responses, 1),
        "mean_length": tokens / max(macro_actions, 1),
        "single_share": histogram.get(1, 0) / max(macro_actions, 1),
        "histogram": histogram,
    }


def boundary_f1(a: MacroActions, b: MacroActions) -> float:
    """Agreement of two segmentations of the same responses: F1 over inner boundaries, pooled over all responses.

    An inner boundary is between two neighbouring tokens of a turn; those at holes are in every segmentation and do not
    count. The agreement is symmetric: 1 if both have the same inner boundaries (or none), 0 if they share none.
    Raises InputError if the two do not cover the same tokens.
    """
    if not torch.equal(a.token_mask, b.token_mask):
        raise InputError(
            "b: it covers other tokens than a: give two segmentations of the same responses"
        )
    bounds_of_a = _inner_boundaries(a)
    bounds_of_b = _inner_boundaries(b)
    shared = int((bounds_of_a & bounds_of_b).sum())
    total = int(bounds_of_a.sum() + bounds_of_b.sum())
    return 2 * shared / total if total else 1.0


def _inner_boundaries(macro: MacroActions) -> Tensor:
    """[B,T−1] bool: True if a macro action ends at this token and the next one begins right after it.

    Ids rise by 1 there. They also rise by 1 or more after padding and holes, whose id is −1: these do not count.
    """
    rises = macro.ids.diff(dim=1) == 1
    return rises & macro.token_mask[:, :-1]
