"""Means with confidence intervals, and how many updates a curve needs to a target."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from marlhf_lite.utils.errors import InputError

LEVEL = 0.95  # the confidence of all intervals
ENOUGH = 20  # prompts from which a bootstrap interval covers nearly as often as it says
_Z = float(stats.norm.ppf((1 + LEVEL) / 2))
WORTH = {"second": 0.0, "tie": 0.5, "first": 1.0}  # of a verdict, for the first
CHUNK = 2**20  # numbers drawn at a time (8 MB): bounds the memory, whatever the number of resamples


class Interval(NamedTuple):
    """A mean with its confidence interval at `level`, all in the unit of the values."""

    mean: float
    low: float
    high: float
    level: float = LEVEL


class WinRate(NamedTuple):
    """How often the first of two wins, as an interval, and the counts behind it."""

    rate: Interval
    win: int
    tie: int
    lose: int
    left_out: int  # pairs without a verdict


def bootstrap_mean(values: Sequence[float], n: int = 10_000) -> Interval:
    """Return the mean of `values` [N] with the 95 % percentile bootstrap interval of `n` resamples.

    The interval says how far the mean would move with other prompts, not with other training seeds. It is too narrow
    for fewer than about 20 values, and has width 0 for one value. Raises `InputError` if there are no values, or one is
    missing or not finite.
    """
    values = finite("values", values)
    mean = values.mean()
    if len(values) == 1:
        return Interval(float(mean), float(mean), float(mean))
    batch = max(1, CHUNK // len(values))  # resamples that are in memory at a time
    # Resampling the deviations keeps the digits of a small spread around a large mean.
    low, high = stats.bootstrap(
        (values - mean,),
        np.mean,
        n_resamples=n,
        batch=batch,
        confidence_level=LEVEL,
        method="percentile",
        rng=0,  # the same values always have the same interval
    ).confidence_interval
    return Interval(float(mean), float(mean + low), float(mean + high))


def wilson(wins: float, n: int) -> Interval:
    """Return the share `wins` / `n` with Wilson's 95 % score interval, which is in [0, 1] and has a width at 0 and 1.

    `wins` may have halves, one for each tie (`scipy.stats` takes only whole numbers); the interval is then a little too
    wide, as ties vary less. 0 ≤ wins ≤ n and n ≥ 1.
    """
    z = _Z
    share = wins / n
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    # If the share is 0 or 1, one end of the interval is the share itself, and rounding must not move it.
    low = max(min(middle - half, share), 0.0)
    high = min(max(middle + half, share), 1.0)
    return Interval(share, low, high)


def win_rate(winners: Sequence[str | None]) -> WinRate:
    """Return the share of pairs that `first` wins, a tie as half a win, over the pairs that have a verdict.

    A verdict is one of WORTH; None, or any other word, is none. Raises `InputError` if no pair has a verdict.
    """
    count = Counter(winner for winner in winners if winner in WORTH)
    if not count:
        raise InputError(f"win rate: no verdict among {len(winners)} pairs: judge more")
    with_verdict = count.total()
    return WinRate(
        rate=wilson(count["first"] + count["tie"] / 2, with_verdict),
        win=count["first"],
        tie=count["tie"],
        lose=count["second"],
        left_out=len(winners) - with_verdict,
    )


def percentile_interval(value: float, draws: np.ndarray) -> Interval:
    """Return `value` with the percentile interval of its bootstrap `draws`; draws that are not finite are left out."""
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return Interval(float(value), math.nan, math.nan)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(value), float(low), float(high))


def paired_bootstrap(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the mean of a − b with its interval; `a[i]` and `b[i]` [N] are two methods' scores for the same prompt.

    Resampling prompts cancels what makes a prompt easy for both methods, so the interval is narrower than that of two
    separate samples. An interval that excludes 0 is a difference at this level. Raises `InputError` for different
    lengths, or as `bootstrap_mean`.
    """
    a = finite("a", a)
    return bootstrap_mean(a - finite("b", b, count=len(a)))


def few_prompts(count: int) -> str:
    """Return a note to put below intervals over this many prompts; empty if they are enough."""
    if count >= ENOUGH:
        return ""
    fix = "give at least that many, such as by --eval_prompts 128"
    return f"\nnote: {count} prompts: intervals over fewer than {ENOUGH} are too narrow: {fix}"


def trailing_mean(values: Sequence[float | None], window: int = 5) -> np.ndarray:
    """Return [U] means of each value and up to `window` − 1 before it, without None and NaN; NaN if none is left."""
    return pd.Series(values, dtype=float).rolling(window, min_periods=1).mean().to_numpy()


def updates_to_reach(values: Sequence[float | None], target: float, window: int = 5) -> int | None:
    """Return the first update, counted from 1, at which the mean of the last `window` updates is at least `target`.

    None if there is no such update. Only whole windows count, so that one lucky first update is not enough; a curve
    shorter than `window` is one window. If `target` is the weaker method's `final_score`, the ratio of two methods'
    updates is the paper's "times faster" (§4.2). `values` [U] have one number per update; None and NaN are left out of
    the mean.
    """
    means = trailing_mean(values, window)
    first = min(window, len(means)) - 1  # the end of the first whole window, counted from 0
    reached = np.flatnonzero(means[first:] >= target)
    return int(reached[0]) + first + 1 if len(reached) else None  # + 1: updates are counted from 1


def final_score(values: Sequence[float | None], window: int = 5) -> float:
    """Return the mean of the last `window` values, without None and NaN. Raises `InputError` if none is left."""
    means = trailing_mean(values, window)
    if not len(means) or np.isnan(means[-1]):
        raise InputError(
            f"values: none of the last {window} is a number, so there is no final score"
        )
    return float(means[-1])


def finite(name: str, values: Sequence[float], count: int | None = None) -> np.ndarray:
    """Return `values` as float64 [N].

    Raises `InputError`, which calls the values `name`, unless all are finite and there are `count` of them. Without
    `count` there must be at least one.
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name}: {list(values)!r:.60}: give numbers") from None
    if array.ndim != 1 or not array.size or count not in (None, array.size):
        raise InputError(
            f"{name}: shape {array.shape}: give a list of {count or 'numbers, at least one'}"
        )
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InputError(
            f"{name}[{place}] is {array[place]}: leave out prompts without a finite score"
        )
    return array
