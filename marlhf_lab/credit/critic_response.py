"""How a critic reacts to a choice, token by token afterwards, and what pooling subtracts.

Let d_t be the slope of log π(a_t | s_t) along a direction of the policy; its mean given s_t is 0. The response is
h_k = E[(V(s_{t+1+k}) − V(s_t)) d_t] / E[d_t²]: how far a choice along it moves the critic k + 1 tokens later.
In the same unit E[(score − V(s_t)) d_t] / E[d_t²] is the credit that the choice has earned. The mean of V over a macro
action of n tokens subtracts from the token at its position i how the critic responds over the rest of the action:
Σ_{k ≤ n−2−i} h_k / n.

Shapes: B responses, T response tokens, K lags.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from marlhf_lab.credit.credit import RESAMPLES, bootstrap
from marlhf_lite.evaluation.statistics import Interval
from marlhf_lite.macro import MacroActions


def critic_response(
    values: Tensor, slope: Tensor, mask: Tensor, lags: int, n: int = RESAMPLES
) -> list[Interval]:
    """h_k for k = 0 … lags − 1, each over the tokens that have k + 1 more after them in their turn.

    values, slope: [B, T]; mask: [B, T]. Intervals are of a bootstrap over responses; NaN if no turn is that long.
    """
    turns = MacroActions.from_starts(mask, mask).turns.ids
    v, d, turns = (x.cpu().double().numpy() for x in (values, slope, turns))
    found = []
    for lag in range(1, lags + 1):
        same = (turns[:, lag:] == turns[:, :-lag]) & (turns[:, lag:] >= 0)
        change, before = v[:, lag:] - v[:, :-lag], d[:, : d.shape[1] - lag]
        found.append(_slope(change * same, before * same, n))
    return found


def true_credit(
    values: Tensor, slope: Tensor, mask: Tensor, scores: Tensor, n: int = RESAMPLES
) -> Interval:
    """The credit of a choice, in the unit of `critic_response`; scores: [B], of whole responses."""
    m, v, d = (x.cpu().double().numpy() for x in (mask, values, slope))
    return _slope((scores.cpu().double().numpy()[:, None] - v) * m, d * m, n)


def taken_away(response: Sequence[float], n: int) -> list[float]:
    """What the mean of V over n tokens subtracts at each position of a macro action, from h_0 … h_{n−2}."""
    return [sum(response[: n - 1 - place]) / n for place in range(n)]


def variance_saved(
    advantages: Tensor, fitted: Tensor, mask: Tensor, n: int = RESAMPLES
) -> Interval:
    """Var(Q̂ − V) / Var(Q̂ − fitted) over tokens: how many times as noisy the critic's baseline is as a fitted one.

    advantages, fitted: [B, T] of the same returns Q̂ with both baselines, see `examples/objectives.py`; mask: [B, T].
    """
    m, a, f = (x.cpu().double().numpy() for x in (mask, advantages, fitted))
    sums = np.stack([(x * m).sum(1) for x in (np.ones_like(a), a, a**2, f, f**2)], axis=1)

    def ratio(total: np.ndarray) -> np.ndarray:
        count, a, a2, f, f2 = np.moveaxis(total, -1, 0)
        return (a2 / count - (a / count) ** 2) / (f2 / count - (f / count) ** 2)

    return bootstrap(sums, ratio, n)


def _slope(y: np.ndarray, d: np.ndarray, n: int) -> Interval:
    """Σ y d / Σ d² over [B, T], with a bootstrap over rows."""
    sums = np.stack([(y * d).sum(1), (d**2).sum(1)], axis=1)
    return bootstrap(
        sums, lambda total: total[..., 0] / np.where(total[..., 1] > 0, total[..., 1], np.nan), n
    )
