"""Value and reward of a macro action, from those of its tokens (§3.2.2, Appendix D.1, Appendix E)."""

import torch
from torch import Tensor

from marlhf_lite.macro._checks import check_choice, clean
from marlhf_lite.macro.actions import MacroActions
from marlhf_lite.utils.errors import InputError

POOLINGS = ("sum", "mean")
ESTIMATORS = ("k1", "k3")


def macro_values(values: Tensor, macro: MacroActions, sigma: str = "equal") -> Tensor:
    """V(ω_τ) = Σ_i σ_i V(s_{t_τ+i}), Σσ = 1 (Appendix D.1).

    Args:
        values: [B,T] floating, the critic's V(s_t).
        macro: the segmentation.
        sigma: "equal", "unit", "start", "position" or "position_reversed"; see `MacroActions.pool`.

    Returns:
        [B,S] float32, 0 on padding. Differentiable.
    """
    return macro.pool(values, sigma)


def macro_rewards(
    token_rewards: Tensor,
    scores: Tensor,
    macro: MacroActions,
    pooling: str = "sum",
    rho: float = 1.0,
    sigma: str = "equal",
) -> Tensor:
    """R_τ: the KL rewards inside a macro action, pooled, plus the score on the last one (§3.2.2, Appendix E).

    The score is added once and unaveraged, whatever the pooling; the score of a response without tokens is not used.
    With a score for each turn, each is added to the last macro action of its turn.

    Args:
        token_rewards: [B,T] floating, the per-token rewards without the score; see `kl_rewards`.
        scores: [B] floating, the reward model's score of each response; or [B,K], a score for each of its turns,
            right-padded.
        macro: the segmentation.
        pooling: "sum" Σ_i ρ^i r_{t_τ+i} (the paper); "mean" Σ_i σ_i r_{t_τ+i} (the released code, which shrinks the
            KL coefficient by about the mean length of a macro action).
        rho: the discount ρ inside a macro action, 0 to 1; "sum" only.
        sigma: the weights of "mean"; see `MacroActions.pool`.

    Returns:
        [B,S] float32, 0 on padding.
    """
    check_choice("pooling", pooling, POOLINGS)
    rewards = clean("token_rewards", token_rewards, macro.token_mask)
    if pooling == "mean":
        pooled = macro.pool(rewards, sigma)
    else:
        pooled = macro.sum(rewards if rho == 1.0 else rewards * rho**macro._offset)
    if scores.dim() == 2:
        return pooled + _turn_scores(scores, macro)
    counts = macro.mask.sum(1)
    scores = clean("scores", scores, counts > 0)
    steps = torch.arange(pooled.shape[1], device=pooled.device)
    is_last_step = steps == (counts - 1)[:, None]
    return pooled + is_last_step * scores[:, None]


def _turn_scores(scores: Tensor, macro: MacroActions) -> Tensor:
    """[B,S]: the scores [B,K] of turns, each on the macro action that holds the last token of its turn."""
    turns = macro.turns
    if len(scores) != len(turns.ids) or scores.shape[1] < turns.width:
        expected = f"{len(turns.ids)} responses with a score for each of up to {turns.width} turns"
        raise InputError(f"scores: expected {expected}, got shape {tuple(scores.shape)}")
    score_of_each_token = turns.broadcast(scores[:, : turns.width])  # that of its turn
    is_last_of_turn = turns.weights("unit")  # 1 at the last token, else 0
    return macro.sum(score_of_each_token * is_last_of_turn)


def kl_per_token(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str = "k1"
) -> Tensor:
    """An estimate of KL(π || π_ref) for each token: with d = log π − log π_ref, k1 is d, k3 is exp(−d) − 1 + d.

    k1 is unbiased for samples at temperature 1 without top-k, and can be negative; k3 is at least 0. Both are
    differentiable.

    Args:
        logprobs, ref_logprobs: [B,T] floating, natural logarithms.
        mask: [B,T] bool, True on valid tokens.
        estimator: "k1" or "k3".

    Returns:
        [B,T] float32, nats, 0 on padding.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    gap = clean("logprobs", logprobs, mask) - clean("ref_logprobs", ref_logprobs, mask)
    return gap if estimator == "k1" else torch.expm1(-gap) + gap


def kl_rewards(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float, estimator: str = "k1"
) -> Tensor:
    """r_t = −β·(log π_old(a_t) − log π_ref(a_t)), the KL penalty of each token under the sampling policy (§2).

    ``beta`` is the KL coefficient β; estimator "k1" is the paper's. Shapes are those of `kl_per_token`.
    """
    return -beta * kl_per_token(logprobs, ref_logprobs, mask, estimator)
