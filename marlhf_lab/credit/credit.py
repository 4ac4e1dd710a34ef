"""How much of each token's credit a critic predicts, measured against values by Monte Carlo (`monte_carlo`).

Shapes: B responses, T response tokens, C cuts of a response, K continuations of a state. Every result is an interval of
a bootstrap over responses; NaN if noise hides the variance in the denominator: sample more continuations.
"""

from collections.abc import Callable, Mapping

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
# name -> [P] a quantity of each prompt or response, or the sum of this quantity over all of them
Sums = Mapping[str, np.ndarray]


@torch.no_grad()
def token_values(critic: Critic, rollout: Rollout) -> Tensor:
    """The critic's V(s_t) before each response token: [B, T], 0 on padding."""
    values = []
    for rows in torch.arange(len(rollout)).split(64):
        part = rollout.select(rows).trim()  # to the longest of these responses
        at_states = part.before_tokens(critic(part.tokens, part.attention_mask))
        values.append(rollout.widen(at_states.masked_fill(~part.mask, 0.0)))
    return torch.cat(values)


def credit_seen(values: Tensor, scores: Tensor, n: int = RESAMPLES) -> Interval:
    """The share s = Cov(V_t − V_0, V*_t − V*_0) / Var(V*_t − V*_0) of what happened since the first cut.

    If s = 1, the critic predicts all of it; if s = 0, none (a blind critic). Noise of V does not change s. The variance
    comes from the product of two halves of the continuations, so it is free of their noise. The first cut need not be
    the start of the response: with the cuts (t, t+1), s is the share of a single token's credit.

    Args:
        values: [B, C] the critic's V at the cuts, C >= 2.
        scores: [B, C, K] scores of continuations, see `state_scores`.
        n: resamples.
    """
    first_half, second_half = halves(scores)
    change = _since_first_cut(_array(values))
    a = _since_first_cut(first_half)
    b = _since_first_cut(second_half)
    truth = (a + b) / 2
    sums = _sums_per_response(
        count=np.ones_like(change),
        change=change,
        truth=truth,
        a=a,
        b=b,
        change_truth=change * truth,
        ab=a * b,
    )

    def share(total: Sums) -> np.ndarray:
        count = total["count"]
        seen = _covariance(count, total["change"], total["truth"], total["change_truth"])
        # The covariance of the two halves is Var(V*_t − V*_0), because their noise is independent.
        return _ratio(seen, _covariance(count, total["a"], total["b"], total["ab"]))

    return bootstrap(sums, share, n)


def explained_by_quarter(
    values: Tensor, scores: Tensor, mask: Tensor, n: int = RESAMPLES
) -> list[Interval]:
    """1 − Var(score − V_t) / Var(score) over the tokens of each quarter of the responses: four intervals.

    A quarter's interval is NaN if the scores at its tokens do not vary. See `critic_metrics.quarters` for the quarters.

    Args:
        values: [B, T] the critic's V before each token.
        scores: [B] of the same responses.
        mask: [B, T] bool, True at the tokens of a response.
        n: resamples.
    """
    score = _array(scores)[:, None] * np.ones(mask.shape)
    error = score - _array(values)
    quarter_of_token = quarters(mask).cpu().numpy()  # [B, T] 0 to 3, −1 on padding

    def explained(total: Sums) -> np.ndarray:
        count = total["count"]
        variance = _covariance(count, total["score"], total["score"], total["squared_score"])
        # Scores that differ only by rounding do not vary.
        variance = np.where(variance > 1e-12 * total["squared_score"] / count, variance, 0.0)
        unexplained = _covariance(count, total["error"], total["error"], total["squared_error"])
        return 1 - _ratio(unexplained, variance)

    columns = {
        "count": np.ones_like(error),
        "error": error,
        "squared_error": error**2,
        "score": score,
        "squared_score": score**2,
    }
    intervals = []
    for quarter in range(4):
        inside = quarter_of_token == quarter
        sums = _sums_per_response(**{name: column * inside for name, column in columns.items()})
        intervals.append(bootstrap(sums, explained, n))
    return intervals


def explainable(scores: Tensor) -> list[Interval]:
    """Var(V*) / Var(score) at each cut: the explained variance of a critic that knows V*, the highest that is possible.

    What is left of the scores' variance is decided after the cut, so no value at the cut can predict it.

    Args:
        scores: [B, C, K] scores of continuations, see `state_scores`.

    Returns:
        C intervals, one for each cut.
    """

    def share(total: Sums) -> np.ndarray:
        count = total["count"]
        # The covariance of two independent estimates of V* is the variance of V* without their noise.
        of_values = _covariance(count, total["a"], total["b"], total["ab"])
        return _ratio(
            of_values, _covariance(count, total["score"], total["score"], total["squared_score"])
        )

    first_half, second_half = halves(scores)
    every_score = _array(scores)
    intervals = []
    for cut in range(every_score.shape[1]):
        a = first_half[:, cut]
        b = second_half[:, cut]
        score = every_score[:, cut]  # [B, K]
        sums = {
            "count": np.ones_like(a),
            "a": a,
            "b": b,
            "ab": a * b,
            # means over the continuations, because `count` has each response once
            "score": score.mean(-1),
            "squared_score": (score**2).mean(-1),
        }
        intervals.append(bootstrap(sums, share))
    return intervals


def token_noise(values: Tensor, scores: Tensor, n: int = RESAMPLES) -> tuple[Interval, Interval]:
    """ν of V and ν of V*: the root of half the mean squared step from a token to the next, in the unit of the scores.

    If V* hardly moves, and a critic's errors at neighbouring tokens are independent, ν of V is the standard deviation
    of these errors. V* moves by what a token earns; ν of V* says how far.

    Args:
        values: [B, 2·P] the critic's V at P pairs of neighbouring cuts, as those of `even_cuts` after the first.
        scores: [B, 2·P, K] scores of continuations there.
        n: resamples.
    """
    first_half, second_half = halves(scores)
    step = _steps_in_pairs(_array(values))
    squared_step_of_critic = step**2
    # The product of two independent halves is free of the noise of the continuations; a square would not be.
    squared_step_of_truth = _steps_in_pairs(first_half) * _steps_in_pairs(second_half)

    def root_of_half_the_mean(total: Sums) -> np.ndarray:
        # Noise may bring the product of the halves below 0.
        return np.sqrt(np.clip(total["square"] / total["count"] / 2, 0.0, None))

    def interval_of(square: np.ndarray) -> Interval:
        sums = _sums_per_response(count=np.ones_like(square), square=square)
        return bootstrap(sums, root_of_half_the_mean, n)

    return interval_of(squared_step_of_critic), interval_of(squared_step_of_truth)


def bootstrap(sums: Sums, statistic: Callable[[Sums], np.ndarray], n: int = RESAMPLES) -> Interval:
    """A statistic of sums over prompts or responses, with the percentile interval of a bootstrap over these.

    Args:
        sums: name to what each of P prompts or responses adds to the sum of this name, [P].
        statistic: takes a dict of the sums by name, each a single number or, for several draws, [draws]; returns the
            statistic in the same shape.
        n: draws.
    """
    columns = np.stack(list(sums.values()), axis=-1)  # [P, names]
    count = len(columns)
    # [n, P] how often each draw has each prompt or response
    times_drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), n)

    def of_totals(totals: np.ndarray) -> np.ndarray:
        """The statistic of sums [names], or of those of each draw [n, names]."""
        return statistic({name: totals[..., place] for place, name in enumerate(sums)})

    return percentile_interval(of_totals(columns.sum(0)), of_totals(times_drawn @ columns))


def _since_first_cut(at_cuts: np.ndarray) -> np.ndarray:
    """[B, C − 1] how far the values [B, C] at later cuts are from that at the first cut."""
    return at_cuts[:, 1:] - at_cuts[:, :1]


def _steps_in_pairs(at_cuts: np.ndarray) -> np.ndarray:
    """[B, P] the second minus the first value of each pair of neighbouring cuts [B, 2·P]."""
    pairs = at_cuts.reshape(len(at_cuts), -1, 2)
    return pairs[..., 1] - pairs[..., 0]


def _sums_per_response(**columns: np.ndarray) -> dict[str, np.ndarray]:
    """name -> [B] sums over the tokens or cuts of each response, from columns [B, T]."""
    return {name: column.sum(1) for name, column in columns.items()}


def _covariance(n: np.ndarray, x: np.ndarray, y: np.ndarray, xy: np.ndarray) -> np.ndarray:
    """The covariance of x and y over `n` items, from the sums of x, of y and of x·y; NaN if `n` is 0."""
    n = np.where(n > 0, n, np.nan)
    return xy / n - x * y / n**2


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """`part` over `whole`; NaN if `whole` is not above 0, because noise hides it or nothing varies."""
    return part / np.where(whole > 0, whole, np.nan)


def _array(x: Tensor) -> np.ndarray:
    return x.cpu().double().numpy()
