"""Generalised advantage estimation over steps, be they tokens or macro actions (§2, Appendix E), and its λ."""

from collections.abc import Callable

import torch
from torch import Tensor

from marlhf_lite.macro._checks import clean
from marlhf_lite.macro.actions import MacroActions


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float | Tensor = 0.95
) -> tuple[Tensor, Tensor]:
    """Â_τ = δ_τ + γ λ_τ Â_{τ+1} with δ_τ = R_τ + γ·V_{τ+1} − V_τ, and the returns Q̂_τ = Â_τ + V_τ.

    With one λ for all steps this is Â_τ = Σ_k (γλ)^k δ_{τ+k}.

    The value after the last step is 0. γ and λ count per step: per macro action if the steps are macro actions. Over
    tokens, a mask may have holes: a step then follows the next valid token, and what lies between counts nothing.

    Args:
        rewards, values: [B,S] floating.
        mask: [B,S] bool, True on valid steps (``macro.mask``, or tokens).
        gamma: from 0 to 1.
        lam: from 0 to 1; or a tensor with the λ of each step [B,S], or of each response [B,1].

    Returns:
        (advantages, returns), each [B,S] float32, 0 on padding.
    """
    rewards, values = clean("rewards", rewards, mask), clean("values", values, mask)
    discounts = gamma * torch.as_tensor(lam, dtype=values.dtype, device=values.device).expand_as(values)
    advantages = torch.zeros_like(values)
    advantage = following = values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * following - values[:, step]
        valid = mask[:, step]  # a hole passes on what stands behind it
        advantage = torch.where(valid, delta + discounts[:, step] * advantage, advantage)
        following = torch.where(valid, values[:, step], following)
        advantages[:, step] = advantage.masked_fill(~valid, 0.0)
    return advantages, advantages + values


def border_lam(macro: MacroActions, lam: float | Tensor) -> Tensor:
    """λ of each token where credit fades at borders alone: λ at the last token of a macro action, 1 at all others.

    This is segment-level advantage estimation, SAE (arXiv 2601.07320): GAE over tokens with this λ counts macro
    actions, yet each token keeps its own value as baseline.

    Args:
        macro: the segmentation.
        lam: λ at a border, from 0 to 1; or one for each response [B,1].

    Returns:
        [B,T] float32; 1 on padding and holes.
    """
    return torch.where(macro.weights("unit") > 0, lam, 1.0)


def adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """λ = 1 − 1 / (α·steps) of each response, at least 0: the longer a response, the slower its credit fades.

    This is VAPO's length-adaptive GAE (arXiv 2504.05118, with α = 0.05 for long chains of thought).

    Args:
        mask: [B,S] bool, True on valid steps.
        alpha: α, above 0.

    Returns:
        [B,1] float32.
    """
    return (1.0 - 1.0 / (alpha * mask.sum(1, keepdim=True).clamp(min=1))).clamp(min=0.0)


def whiten(x: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Shift and scale the valid elements to mean 0 and (population) standard deviation 1.

    Where all valid elements are equal up to rounding, or there is only one, the result is 0.

    Args:
        x: [B,S] floating.
        mask: [B,S] bool, True on valid elements.
        reduce: sums a tensor over all processes, to whiten by the statistics of the whole update; None: this one only.

    Returns:
        [B,S] float32, 0 on padding.
    """
    x = clean("x", x, mask)
    reduce = reduce or (lambda t: t)
    count, total = reduce(torch.stack([mask.sum().float(), x.sum()]))
    count = count.clamp(min=1.0)
    mean = total / count
    centred = (x - mean).masked_fill(~mask, 0.0)
    residual, squares = reduce(torch.stack([centred.sum(), centred.square().sum()])) / count
    # The residual is what rounding left of the mean. A variance within rounding of the elements' size counts as 0.
    variance = (squares - residual**2).clamp(min=0.0)
    flat = variance <= 1e-12 * (mean**2 + squares)
    scaled = (centred - residual) * torch.where(flat, 1.0, variance).rsqrt()
    return scaled.masked_fill(flat | ~mask, 0.0)
