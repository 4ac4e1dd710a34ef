"""λ of generalised advantage estimation in other methods, for each token or each response."""

import torch
from torch import Tensor

from marlhf_lite.macro.actions import MacroActions


def border_lam(macro: MacroActions, lam: float | Tensor) -> Tensor:
    """λ of each token if credit fades only between macro actions: λ at the last token of each, 1 at all others.

    This is segmental advantage estimation, SAE (arXiv 2601.07320): GAE over tokens with this λ counts macro
    actions, yet each token keeps its own value as baseline.

    Args:
        macro: the segmentation.
        lam: λ at the last token of a macro action, from 0 to 1; or one for each response [B,1].

    Returns:
        [B,T] float32; 1 on padding and holes.
    """
    is_last = macro.weights("unit") > 0  # the last token of a macro action
    return torch.where(is_last, lam, 1.0)


def adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """λ = 1 − 1 / (α·steps) of each response, at least 0: the longer a response, the slower its credit fades.

    This is VAPO's length-adaptive GAE (arXiv 2504.05118, with α = 0.05 for long chains of thought).

    Args:
        mask: [B,S] bool, True on valid steps.
        alpha: α, above 0.

    Returns:
        [B,1] float32.
    """
    steps = mask.sum(1, keepdim=True).clamp(min=1)  # a response without steps needs no λ
    return (1.0 - 1.0 / (alpha * steps)).clamp(min=0.0)
