"""The two losses of MA-PPO (§3.2.2, Algorithm 1, Appendix E). Each returns (loss, stats).

Both sum over terms (tokens or macro actions) and divide by a count, or average over each response first. Pass the
count of the whole update as ``normalizer`` and the gradients do not depend on how it is split into micro-batches or
over processes.
Stats are detached 0-d float32 tensors: means over this batch's own ``count`` terms.
No function waits for a GPU: NaN in an input gives a NaN loss, which the caller can check once per update.
"""

import torch
from torch import Tensor

from marlhf_lite.macro._checks import check_choice, clean
from marlhf_lite.macro.actions import MacroActions

RATIOS = ("token", "macro", "macro_mean")
TARGETS = ("token", "macro")
MEANS = ("token", "response")
MAX_LOG_RATIO = 20.0
"""Clamp of log-ratios against overflow; exp(20) is far outside any clip range."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    macro: MacroActions,
    clip: float | None = 0.2,
    ratio: str = "token",
    normalizer: float | Tensor | None = None,
    mean: str = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """−min(ratio·Â_τ, clip(ratio, 1−ε, 1+ε)·Â_τ), averaged. Gradients flow only to ``logprobs``.

    Args:
        logprobs, old_logprobs: [B,T] floating, natural logarithms, under the policy and the one that sampled.
        advantages: [B,S] floating, Â_τ.
        macro: the segmentation.
        clip: ε; None is off.
        ratio: "token": each token's own ratio against its macro action's advantage, mean over tokens (Appendix E).
            "macro": the ratio of joint probabilities exp Σ_{t∈ω}(log π − log π_old), one term for each macro action,
            mean over macro actions (the objective of §3.2.2). "macro_mean": the same with the mean log-ratio of its
            tokens instead of the sum, so that a long macro action is not clipped sooner than a short one (GSPO's
            form, arXiv 2507.18071).
        normalizer, mean: see `average`.

    Returns:
        The loss (0-d float32; 0 with zero gradients when no token is valid), and stats. They are clip_fraction (share
        of terms that took the clipped value), approx_kl (mean of ratio − 1 − log ratio) and count.
    """
    check_choice("ratio", ratio, RATIOS)
    valid = macro.token_mask
    log_ratio = (
        clean("logprobs", logprobs, valid) - clean("old_logprobs", old_logprobs, valid).detach()
    )
    advantages = clean("advantages", advantages, macro.mask).detach()
    if ratio == "token":
        advantages = macro._spread(advantages)
    else:
        log_ratio = macro.sum(log_ratio)
        valid = macro.mask
    if ratio == "macro_mean":
        log_ratio = log_ratio / macro.lengths.clamp(min=1)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # beyond it there is no gradient
    ratios = log_ratio.exp()
    # Padding has advantage 0, so its terms and their gradients are 0.
    unclipped = -advantages * ratios
    clipped = unclipped if clip is None else -advantages * ratios.clamp(1.0 - clip, 1.0 + clip)
    loss, count = average(torch.maximum(unclipped, clipped), valid, normalizer, mean)
    share = count.clamp(min=1.0)
    # Padding has log-ratio 0 and adds nothing. expm1 keeps the digits that exp − 1 loses near 0.
    approx_kl = (log_ratio.expm1() - log_ratio).detach().sum() / share
    return loss, {
        "clip_fraction": (clipped > unclipped).sum() / share,
        "approx_kl": approx_kl,
        "count": count,
    }


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    macro: MacroActions,
    clip: float | None = 0.2,
    target: str = "token",
    sigma: str = "equal",
    normalizer: float | Tensor | None = None,
    mean: str = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """½·max((V − Q̂_τ)², (V_clipped − Q̂_τ)²), averaged. Gradients flow only to ``values``.

    V_clipped is V kept within ±clip of the old value.

    Args:
        values, old_values: [B,T] floating, V(s_t) now and when the responses were sampled.
        returns: [B,S] floating, Q̂_τ.
        macro: the segmentation.
        clip: the range; None is off.
        target: "token": each V(s_t) regresses to its macro action's return, mean over tokens (Appendix E).
            "macro": V(s_τ, ω_τ), pooled by ``sigma``, regresses to it, mean over macro actions (Algorithm 1).
        sigma: the weights of target "macro"; see `MacroActions.pool`. Not used by "token".
        normalizer, mean: see `average`.

    Returns:
        The loss and stats as in `policy_loss`, without approx_kl.
    """
    check_choice("target", target, TARGETS)
    valid = macro.token_mask
    values = clean("values", values, valid)
    old_values = clean("old_values", old_values, valid).detach()
    returns = clean("returns", returns, macro.mask).detach()
    if target == "token":
        returns = macro._spread(returns)
    else:
        values = macro.pool(values, sigma)
        old_values = macro.pool(old_values, sigma)
        valid = macro.mask
    # Padding has value, old value and return 0, so its terms and their gradients are 0.
    unclipped = clipped = (values - returns).square()
    change = values - old_values
    if clip is not None:
        # Within the range V_clipped is V itself: the sum could differ from it by rounding.
        kept = torch.where(change.abs() <= clip, values, old_values + change.clamp(-clip, clip))
        clipped = (kept - returns).square()
    loss, count = average(0.5 * torch.maximum(unclipped, clipped), valid, normalizer, mean)
    return loss, {
        "clip_fraction": (clipped > unclipped).sum() / count.clamp(min=1.0),
        "count": count,
    }


def average(
    terms: Tensor, valid: Tensor, normalizer: float | Tensor | None = None, mean: str = "token"
) -> tuple[Tensor, Tensor]:
    """The mean of a loss's terms, and the number of terms. Differentiable.

    Args:
        terms: [B,S], 0 on padding.
        valid: [B,S] bool, True on terms.
        normalizer: the number to divide the sum by; None: the terms here, with mean "response" the responses.
        mean: "token": each term counts the same. "response": the mean over each response's own terms comes first, so
            each response counts the same however long it is (the released code, which has one response per device).
    """
    check_choice("mean", mean, MEANS)
    count = valid.sum().float()
    if mean == "response":
        terms = terms / valid.sum(1, keepdim=True).clamp(min=1)
    if normalizer is None:
        normalizer = count if mean == "token" else valid.any(1).sum().float()
    normalizer = torch.as_tensor(normalizer, device=terms.device)
    divisor = torch.where(normalizer > 0, normalizer, 1.0)  # not 0 / 0 if no process has a term
    return terms.sum() / divisor, count
