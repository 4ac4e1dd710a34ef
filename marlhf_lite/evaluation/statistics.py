"""Means with confidence intervals, and learning curves. Needs no model and no file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from marlhf_lite.utils.errors import InputError

CHUNK = 2**20  # numbers drawn at a time (8 MB): bounds the memory, whatever the number of resamples


class Interval(NamedTuple):
    """A mean with its confidence interval at `level`, all in the unit of the values."""

    mean: float
    low: float
    high: float
    level: float


class Curves(NamedTuple):
    """The runs of one method, a table each: updates in the first column, sorted, then the metrics."""

    raw: list[np.ndarray]  # a [U,1+M] for each run: the updates in which every metric has a value
    smoothed: list[np.ndarray]  # the same updates, the metrics averaged over the last few
    mean: np.ndarray  # [U,1+M] mean of the smoothed runs, at the updates that all runs have
    std: np.ndarray  # [U,M] standard deviation of the runs there (N−1); 0 for a single run


def bootstrap_mean(values: Sequence[float], level: float = 0.95, n: int = 10_000, seed: int = 0) -> Interval:
    """Mean of `values` with its percentile bootstrap interval (`scipy.stats.bootstrap`).

    The interval says how far the mean would move with other prompts, not with other training seeds. It is too narrow
    for few values (under about 20), and has width 0 for one value.

    Args:
        values: [N] finite numbers, one for each prompt, N ≥ 1.
        level: the confidence, between 0 and 1.
        n: resamples, at least 1. More make the ends steadier; they do not narrow the interval.
        seed: the same seed gives the same interval.

    Raises:
        InputError: no values, a value that is missing or not finite, or an option out of range.
    """
    values = finite("values", values)
    check_level(level)
    if n < 1:
        raise InputError(f"n {n!r}: give at least 1 resample, better 1000 or more")
    mean = values.mean()
    if len(values) == 1:
        return Interval(float(mean), float(mean), float(mean), level)
    batch = max(1, CHUNK // len(values))
    # Resampling the deviations keeps the digits of a small spread around a large mean.
    low, high = stats.bootstrap(
        (values - mean,), np.mean, n_resamples=n, batch=batch, confidence_level=level, method="percentile", rng=seed
    ).confidence_interval
    return Interval(float(mean), float(mean + low), float(mean + high), level)


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], level: float = 0.95, n: int = 10_000, seed: int = 0
) -> Interval:
    """Mean of a − b with its interval, where `a[i]` and `b[i]` are the scores of two methods on the same prompt.

    Resampling prompts instead of scores cancels what makes a prompt easy for both methods, so the interval is narrower
    than that of two separate samples. An interval without 0 is a difference at this level.

    Args:
        a, b: [N] finite numbers, in the same order of prompts.
        level, n, seed: see `bootstrap_mean`.

    Raises:
        InputError: different lengths, or as `bootstrap_mean`.
    """
    a, b = finite("a", a), finite("b", b)
    if len(a) != len(b):
        raise InputError(f"a has {len(a)} values and b {len(b)}: give one value of each for every prompt")
    return bootstrap_mean(a - b, level, n, seed)


def trailing_mean(values: Sequence[float | None], window: int = 5) -> np.ndarray:
    """[U] mean of each value and the `window` − 1 before it; at the start, of those there are.

    None and NaN are left out of the mean; NaN where the window holds no value. Raises `InputError` for something that
    is not a list of numbers, and for a window below 1.
    """
    if window < 1:
        raise InputError(f"window {window!r}: give at least 1")
    return pd.Series(_numbers("values", values)).rolling(window, min_periods=1).mean().to_numpy()


def updates_to_reach(values: Sequence[float | None], target: float, window: int = 5) -> int | None:
    """First update, counted from 1, at which the mean of the last `window` updates is at least `target`, or None.

    Only whole windows count, so that one lucky first update does not; a curve shorter than that is one window. For
    `target` the weaker method's `final_score`, the ratio of two methods' updates is the paper's "times faster" (§4.2).
    `values` [U] hold one number for each update, in order; None and NaN are left out of the mean.

    Raises `InputError` for no values, and as `trailing_mean`.
    """
    means = trailing_mean(_some(values), window)
    first = min(window, len(means)) - 1
    reached = np.flatnonzero(means[first:] >= target)
    return int(reached[0]) + first + 1 if len(reached) else None


def final_score(values: Sequence[float | None], window: int = 5) -> float:
    """Mean of the last `window` values (of all, where there are fewer); None and NaN are left out.

    Raises `InputError` for no values, for none among the last `window`, and as `trailing_mean`.
    """
    score = float(trailing_mean(_some(values), window)[-1])
    if np.isnan(score):
        raise InputError(f"values: none of the last {window} is a number, so there is no final score")
    return score


def seed_curves(
    runs: Sequence[Sequence[Mapping]], metrics: Sequence[str], smooth: int = 5, name: str = "runs"
) -> Curves:
    """Runs of one method, one for each seed, as curves over updates with their mean and spread.

    Args:
        runs: for each seed its rows, with `update` and the metrics; a row in which one is null or missing is skipped,
            and of rows with the same update the last one counts, as after a resume.
        metrics: names in the rows.
        smooth: each run is first averaged over its last `smooth` updates with values; 1 for none.
        name: of the runs, in messages.

    Raises:
        InputError: no runs or rows, a metric that no row has, or runs without an update in common.
    """
    if not len(runs) or isinstance(runs[0], Mapping):
        raise InputError(f"{name}: give a list of runs, each a list of rows; for a single run [rows]")
    raw = [_metrics_by_update(name, rows, list(metrics)) for rows in runs]
    smoothed = [run.apply(trailing_mean, window=smooth) for run in raw]
    shared = functools.reduce(pd.Index.intersection, [run.index for run in raw])
    if not len(shared):
        raise InputError(f"{name}: its runs have no update in common; give runs logged at the same updates")
    by_update = pd.concat([run.loc[shared] for run in smoothed]).groupby(level=0)
    mean, std = by_update.mean(), by_update.std().fillna(0.0)
    raw, smoothed, (mean,) = ([run.reset_index().to_numpy() for run in some] for some in (raw, smoothed, [mean]))
    return Curves(raw, smoothed, mean, std.to_numpy())


def _metrics_by_update(name: str, rows: Sequence[Mapping], metrics: list[str]) -> pd.DataFrame:
    """[U,M] metrics, indexed by update, sorted, of the rows in which every metric has a value."""
    table = pd.DataFrame(list(rows), dtype=object)
    for metric in ("update", *metrics):
        if metric not in table:
            raise InputError(f"{name}: no {metric!r} in its rows; there are: {', '.join(table) or 'none'}")
    try:
        table = table[["update", *metrics]].astype(float)
    except (TypeError, ValueError):
        table = pd.DataFrame({"update": [np.nan]})
    if table["update"].isna().any():
        raise InputError(f"{name}: update must be a number in every row, {', '.join(metrics)} or null")
    table = table.drop_duplicates("update", keep="last").set_index("update").sort_index()
    table = table[np.isfinite(table).all(axis=1)]
    if not len(table):
        raise InputError(f"{name}: {' and '.join(metrics)} have no value together in any update")
    return table


def finite(name: str, values: Sequence[float]) -> np.ndarray:
    """`values` [N] as float64; InputError, calling them `name`, if there are none or one is missing or not finite."""
    array = _some(values, name)
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise InputError(f"{name}[{bad[0]}] is {array[bad[0]]}: leave out prompts without a finite score")
    return array


def check_level(level: float) -> None:
    """Raises `InputError` for a confidence that is not between 0 and 1."""
    if not 0 < level < 1:
        raise InputError(f"level {level!r}: give a confidence between 0 and 1, such as 0.95")


def _some(values: Sequence[float | None], name: str = "values") -> np.ndarray:
    array = _numbers(name, values)
    if not len(array):
        raise InputError(f"{name}: no values, give at least one")
    return array


def _numbers(name: str, values: Sequence[float | None]) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected a list of numbers") from None
    if array.ndim != 1:
        raise InputError(f"{name}: expected a list of numbers, got shape {array.shape}")
    return array
