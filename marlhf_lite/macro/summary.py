"""Describe a segmentation, and measure how far two of them agree."""

import torch

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
    responses, tokens, steps = len(macro.ids), int(macro.token_mask.sum()), int(macro.mask.sum())
    return {
        "responses": responses,
        "tokens": tokens,
        "macro_actions": steps,
        "macro_actions_per_response": steps / max(responses, 1),
        "mean_length": tokens / max(steps, 1),
        "single_share": histogram.get(1, 0) / max(steps, 1),
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
    # ids fall to -1 where padding or a hole begins
    inner = [(m.ids.diff(dim=1) == 1) & m.token_mask[:, :-1] for m in (a, b)]
    both, total = int((inner[0] & inner[1]).sum()), int(inner[0].sum() + inner[1].sum())
    return 2 * both / total if total else 1.0
