"""Generalised advantage estimation over steps, which are tokens or macro actions (§2, Appendix E)."""

from collections.abc import Callable

import torch
from torch import Tensor

from marlhf_lite.macro._checks import clean


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float | Tensor = 0.95
) -> tuple[Tensor, Tensor]:
    """Â_τ = δ_τ + γ λ_τ Â_{τ+1} with δ_τ = R_τ + γ·V_{τ+1} − V_τ, and the returns Q̂_τ = Â_τ + V_τ.

    With one λ for all steps this is Â_τ = Σ_k (γλ)^k δ_{τ+k}.

    The value after the last step is 0. γ and λ count per step: per macro action if the steps are macro actions. Over
    tokens, a mask may have holes: the step after a token is then the next valid token, and holes have no effect.

    Args:
        rewards, values: [B,S] floating.
        mask: [B,S] bool, True on valid steps (``macro.mask``, or tokens).
        gamma: from 0 to 1.
        lam: from 0 to 1; or a tensor with the λ of each step [B,S], or of each response [B,1].

    Returns:
        (advantages, returns), each [B,S] float32, 0 on padding.
    """
    rewards = clean("rewards", rewards, mask)
    values = clean("values", values, mask)
    lam = torch.as_tensor(lam, dtype=values.dtype, device=values.device)
    discounts = gamma * lam.expand_as(values)
    advantages = torch.zeros_like(values)
    # From the last step to the first: Â and V of the step that follows, 0 after the last one.
    advantage = values.new_zeros(len(values))
    following = values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * following - values[:, step]
        valid = mask[:, step]  # a hole passes on the sum of what follows it
        advantage = torch.where(valid, delta + discounts[:, step] * advantage, advantage)
        following = torch.where(valid, values[:, step], following)
        advantages[:, step] = advantage.masked_fill(~valid, 0.0)
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Shift and scale the valid elements to mean 0 and (population) standard deviation 1.

    If all valid elements are equal up to rounding, or if there is only one, the result is 0.

    Args:
        x: [B,S] floating.
        mask: [B,S] bool, True on valid elements.
        reduce: sums a tensor over all processes, to whiten by the statistics of the whole update; None: only this one.

    Returns:
        [B,S] float32, 0 on padding.
    """
    x = clean("x", x, mask)

    def sum_over_processes(*sums: Tensor) -> Tensor:
        stacked = torch.stack(sums)
        return reduce(stacked) if reduce else stacked

    # 1. The mean.
    count, total = sum_over_processes(mask.sum().float(), x.sum())
    count = count.clamp(min=1.0)
    mean = total / count
    centred = (x - mean).masked_fill(~mask, 0.0)

    # 2. The variance. The residual is what rounding left of the mean. A variance within rounding of the elements' size
    # counts as 0.
    residual, squares = sum_over_processes(centred.sum(), centred.square().sum()) / count
    variance = (squares - residual**2).clamp(min=0.0)
    is_flat = variance <= 1e-12 * (mean**2 + squares)

    # 3. Scale.
    scaled = (centred - residual) * torch.where(is_flat, 1.0, variance).rsqrt()
    return scaled.masked_fill(is_flat | ~mask, 0.0)
