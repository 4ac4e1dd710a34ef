"""Weights of tokens that another policy than the trained one has sampled."""

import math

from torch import Tensor

from marlhf_lite.macro._checks import check_choice, clean
from marlhf_lite.macro.actions import MacroActions

LEVELS = ("token", "macro")


def sampler_weights(
    old_logprobs: Tensor, sampled_logprobs: Tensor, macro: MacroActions, level: str = "token", most: float = 3.0
) -> Tensor:
    """min(π_old / μ, C) of each token [B,T], if μ sampled instead of π_old: truncated importance sampling.

    A server that samples in another number format, or with older weights, is another policy μ; this factor of the
    policy's loss corrects for it, and C bounds its variance (as in TRL, OpenRLHF and verl). With equal
    log-probabilities all are 1. No gradient flows.

    Args:
        old_logprobs, sampled_logprobs: [B,T] floating, natural logarithms, under the trainer's policy and the sampler.
        macro: the segmentation.
        level: "token": the ratio of each token. "macro": of the joint probabilities of its macro action.
        most: C, at least 1.
    """
    check_choice("level", level, LEVELS)
    valid = macro.token_mask
    log_ratio = (
        clean("old_logprobs", old_logprobs, valid) - clean("sampled_logprobs", sampled_logprobs, valid)
    ).detach()
    if level == "macro":
        log_ratio = macro.broadcast(macro.sum(log_ratio))
    return log_ratio.clamp(max=math.log(most)).exp().masked_fill(~valid, 0.0)
