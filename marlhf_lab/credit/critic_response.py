"""How a critic reacts to a choice, token by token afterwards, and what pooling subtracts.

Let d_t be the slope of log π(a_t | s_t) along a direction of the policy; its mean given s_t is 0. The response is
h_k = E[(V(s_{t+1+k}) − V(s_t)) d_t] / E[d_t²]: how far a choice along the direction moves the critic k + 1 tokens
later. In the same unit E[(score − V(s_t)) d_t] / E[d_t²] is the credit that the choice has earned. If the baseline is
the mean of V over a macro action of n tokens, it also contains how the critic responds to the token at position i over
the rest of the action, and subtracts that from the token's advantage: Σ_{k ≤ n−2−i} h_k / n.

Shapes: B responses, T response tokens, K lags.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from marlhf_lab.credit.credit import RESAMPLES, Sums, bootstrap
from marlhf_lite.evaluation.statistics import Interval
from marlhf_lite.macro import MacroActions


def critic_response(
    values: Tensor, slope: Tensor, mask: Tensor, lags: int, n: int = RESAMPLES
) -> list[Interval]:
    """h_k for k = 0 … lags − 1: how far a choice of slope 1 moves the critic k + 1 tokens later.

    The formula is h_k = E[(V(s_{t+1+k}) − V(s_t)) d_t] / E[d_t²]. The mean for h_k is over the tokens after which their
    turn has k + 1 more.

    Args:
        values: [B, T] V before each token.
        slope: [B, T] d_t of each token.
        mask: [B, T] bool, True at the policy's tokens.
        lags: K, how many h_k.
        n: resamples.

    Returns:
        K intervals of a bootstrap over responses; NaN if no turn is that long.
    """
    # [B, T] the number of each token's turn, −1 outside of all turns. Turns follow from the mask alone, so any macro
    # actions will do: here each token is one.
    turns = _array(MacroActions.from_starts(mask, mask).turns.ids)
    v = _array(values)
    d = _array(slope)
    found = []
    for lag in range(1, lags + 1):  # lag is k + 1
        in_one_turn = (turns[:, lag:] == turns[:, :-lag]) & (turns[:, lag:] >= 0)
        change = v[:, lag:] - v[:, :-lag]
        choice = d[:, : d.shape[1] - lag]
        # A product with False is 0, and adds nothing to the sums.
        found.append(_slope(change * in_one_turn, choice * in_one_turn, n))
    return found


def true_credit(
    values: Tensor, slope: Tensor, mask: Tensor, scores: Tensor, n: int = RESAMPLES
) -> Interval:
    """The credit that a choice has earned, in the unit of `critic_response`.

    values, slope, mask: [B, T] as for `critic_response`; scores: [B], of whole responses.
    """
    valid = _array(mask)
    earned = _array(scores)[:, None] - _array(values)
    return _slope(earned * valid, _array(slope) * valid, n)


def taken_away(response: Sequence[float], n: int) -> list[float]:
    """What the mean of V over n tokens subtracts at each position i of a macro action: Σ_{k ≤ n−2−i} h_k / n, [n].

    response: h_0, h_1, …, at least n − 1 of them.
    """
    return [sum(response[: n - 1 - place]) / n for place in range(n)]


def variance_saved(
    advantages: Tensor, fitted: Tensor, mask: Tensor, n: int = RESAMPLES
) -> Interval:
    """Var(Q̂ − V) / Var(Q̂ − fitted) over tokens: how many times as noisy the critic's baseline is as a fitted one.

    advantages, fitted: [B, T] the advantages of the same returns Q̂ with the critic's baseline, and with the fitted one
        (see `examples/objectives.py`).
    mask: [B, T] bool, True at the policy's tokens.
    """
    valid = _array(mask)
    of_critic = _array(advantages)
    of_fitted = _array(fitted)
    sums = {
        "count": valid.sum(1),
        "critic": (of_critic * valid).sum(1),
        "critic_squared": (of_critic**2 * valid).sum(1),
        "fitted": (of_fitted * valid).sum(1),
        "fitted_squared": (of_fitted**2 * valid).sum(1),
    }

    def ratio(total: Sums) -> np.ndarray:
        def variance(name: str) -> np.ndarray:
            mean = total[name] / total["count"]
            return total[f"{name}_squared"] / total["count"] - mean**2

        return variance("critic") / variance("fitted")

    return bootstrap(sums, ratio, n)


def _slope(y: np.ndarray, d: np.ndarray, n: int) -> Interval:
    """Σ y d / Σ d² over [B, T], the slope of y on d, with a bootstrap over rows; NaN if all d are 0."""

    def slope(total: Sums) -> np.ndarray:
        return total["y·d"] / np.where(total["d²"] > 0, total["d²"], np.nan)

    return bootstrap({"y·d": (y * d).sum(1), "d²": (d**2).sum(1)}, slope, n)


def _array(x: Tensor) -> np.ndarray:
    return x.cpu().double().numpy()
