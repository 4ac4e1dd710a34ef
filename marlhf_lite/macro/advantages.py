"""Generalised advantage estimation over steps, be they tokens or macro actions (§2, Appendix E)."""

from collections.abc import Callable

import torch
from torch import Tensor

from marlhf_lite.macro._checks import check_matrix, check_unit, clean


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Â_τ = Σ_k (γλ)^k δ_{τ+k} with δ_τ = R_τ + γ·V_{τ+1} − V_τ, and the returns Q̂_τ = Â_τ + V_τ.

    The value after the last step is 0. γ and λ count per step: per macro action if the steps are macro actions.

    Args:
        rewards, values: [B,S] floating.
        mask: [B,S] bool, True on valid steps, right-padded (``macro.mask``).
        gamma, lam: from 0 to 1.

    Returns:
        (advantages, returns), each [B,S] float32, 0 on padding.

    Raises:
        InputError: wrong shape, dtype or range.
    """
    check_unit("gamma", gamma)
    check_unit("lam", lam)
    check_matrix("mask", mask, torch.bool)
    rewards, values = clean("rewards", rewards, mask), clean("values", values, mask)
    following = torch.nn.functional.pad(values[:, 1:], (0, min(1, values.shape[1])))
    advantages = discounted_sums(rewards + gamma * following - values, float(gamma) * float(lam))
    return advantages, advantages + values


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """y_t = Σ_{k>=0} discount^k · x_{t+k} along the last axis, for a discount from 0 to 1.

    Doubling: a sum over w steps plus discount^w times the next such sum is a sum over 2w steps. This takes log2(S)
    vector operations instead of a scan of S, never divides, and rounds as a tree of additions does.
    """
    width, weight = 1, discount
    while width < x.shape[-1] and weight > 0.0:
        x = torch.cat([x[..., :-width] + weight * x[..., width:], x[..., -width:]], dim=-1)
        width, weight = 2 * width, weight * weight
    return x


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
    check_matrix("mask", mask, torch.bool)
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
