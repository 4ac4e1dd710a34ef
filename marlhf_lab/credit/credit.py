"""How much of each token's credit a critic predicts, measured against values by Monte Carlo (`monte_carlo`).

Shapes: B responses, T response tokens, C cuts of a response, K continuations of a state. Every result is an interval of
a bootstrap over responses; NaN if noise hides the variance in the denominator: sample more continuations.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from marlhf_lab.credit.monte_carlo import halves
from marlhf_lite.evaluation.statistics import Interval, percentile_interval
from marlhf_lite.training.critic_metrics import quarters
from marlhf_lite.training.rollout import Rollout

RESAMPLES = 2000  # of bootstraps over responses
# (tokens [B, L], attention mask [B, L]) -> values [B, L]
Critic = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def token_values(critic: Critic, rollout: Rollout) -> Tensor:
    """The critic's V(s_t) before each response token: [B, T], 0 on padding."""
    values = []
    for rows in torch.arange(len(rollout)).split(64):
        part = rollout.select(rows).trim()
        at_states = part.before_tokens(critic(part.tokens, part.attention_mask))
        values.append(rollout.widen(at_states.masked_fill(~part.mask, 0.0)))
    return torch.cat(values)


def credit_seen(values: Tensor, scores: Tensor, n: int = RESAMPLES) -> Interval:
    """The share s = Cov(V_t − V_0, V*_t − V*_0) / Var(V*_t − V*_0) of what happened since the first cut.

    With s = 1 the critic predicts all of it, with s = 0 none (a blind critic); noise of V does not change s. The
    variance comes from the product of two halves of the continuations, so it is free of their noise. The first cut may
    also be a later token: with (t, t+1), s is the share of a single token's credit.

    Args:
        values: [B, C] the critic's V at the cuts, C >= 2.
        scores: [B, C, K] scores of continuations, see `state_scores`.
        n: resamples.
    """
    change, a, b = (x[:, 1:] - x[:, :1] for x in (_array(values), *halves(scores)))
    truth = (a + b) / 2
    columns = (np.ones_like(change), change, truth, a, b, change * truth, a * b)

    def share(sums: np.ndarray) -> np.ndarray:
        n, x, y, a, b, xy, ab = np.moveaxis(sums, -1, 0)
        return _ratio(_covariance(n, x, y, xy), _covariance(n, a, b, ab))

    return bootstrap(_per_row(columns), share, n)


def explained_by_quarter(
    values: Tensor, scores: Tensor, mask: Tensor, n: int = RESAMPLES
) -> list[Interval]:
    """1 − Var(score − V_t) / Var(score) over the tokens of each quarter of the responses: four intervals.

    values: [B, T]; scores: [B] of the same responses; mask: [B, T].
    """
    score = _array(scores)[:, None] * np.ones(mask.shape)
    error, place = score - _array(values), quarters(mask).cpu().numpy()
    columns = np.stack([np.ones_like(error), error, error**2, score, score**2])

    def explained(sums: np.ndarray) -> np.ndarray:
        n, error, error2, score, score2 = np.moveaxis(sums, -1, 0)
        variance = _covariance(n, score, score, score2)
        # scores that differ only by rounding
        variance = np.where(variance > 1e-12 * score2 / n, variance, 0.0)
        return 1 - _ratio(_covariance(n, error, error, error2), variance)

    return [bootstrap(_per_row(columns * (place == quarter)), explained, n) for quarter in range(4)]


def explainable(scores: Tensor) -> list[Interval]:
    """Var(V*) / Var(score) at each cut: the explained variance of a critic that knows V*, the highest possible.

    scores: [B, C, K]; C intervals. The rest of the scores' variance is decided after the cut.
    """
    (a, b), y = halves(scores), _array(scores)
    columns = np.stack([np.ones_like(a), a, b, a * b, y.mean(-1), (y**2).mean(-1)], axis=-1)

    def share(sums: np.ndarray) -> np.ndarray:
        n, a, b, ab, y, y2 = np.moveaxis(sums, -1, 0)
        return _ratio(_covariance(n, a, b, ab), _covariance(n, y, y, y2))

    return [bootstrap(columns[:, cut], share) for cut in range(a.shape[1])]


def token_noise(values: Tensor, scores: Tensor, n: int = RESAMPLES) -> tuple[Interval, Interval]:
    """ν: the root of half the mean squared step from a token to the next, of V and of V*, in the unit of the scores.

    Errors of a critic that are independent from token to token have standard deviation ν, if V* hardly moves. V* moves
    by what a token earns, and the second ν measures this.

    Args:
        values: [B, 2·P] the critic's V at P pairs of neighbouring cuts, as those of `even_cuts` after the first.
        scores: [B, 2·P, K] scores of continuations there.
        n: resamples.
    """
    steps = (
        np.diff(x.reshape(len(x), -1, 2), axis=2)[..., 0] for x in (_array(values), *halves(scores))
    )
    critic, a, b = steps

    def half_root(sums: np.ndarray) -> np.ndarray:
        return np.sqrt(np.clip(sums[..., 1] / sums[..., 0] / 2, 0.0, None))

    return tuple(
        bootstrap(_per_row((np.ones_like(x), x)), half_root, n) for x in (critic**2, a * b)
    )


def bootstrap(
    sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], n: int = RESAMPLES
) -> Interval:
    """A statistic of summed columns, with the percentile interval of a bootstrap over rows.

    sums: [P, M] what each of P prompts or responses adds to M columns; statistic: [..., M] -> [...].
    """
    weights = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), n)
    return percentile_interval(statistic(sums.sum(0)), statistic(weights @ sums))


def _per_row(columns: Sequence[np.ndarray]) -> np.ndarray:
    """[B, M] sums over the tokens of a response, from M columns [B, T]."""
    return np.stack([column.sum(1) for column in columns], axis=-1)


def _covariance(n: np.ndarray, x: np.ndarray, y: np.ndarray, xy: np.ndarray) -> np.ndarray:
    """From sums over `n` items of x, y and x·y."""
    n = np.where(n > 0, n, np.nan)
    return xy / n - x * y / n**2


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return part / np.where(whole > 0, whole, np.nan)


def _array(x: Tensor) -> np.ndarray:
    return x.cpu().double().numpy()
