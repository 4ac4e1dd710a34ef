"""How sure a mean is, and how soon a curve gets somewhere. Pure numpy: no model, no file."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from marlhf_lite.utils.errors import InputError

CHUNK = 2**20  # numbers drawn at a time, 8 MB: bounds the memory whatever the number of resamples


class Interval(NamedTuple):
    """A mean with its confidence interval at `level`, all in the unit of the values."""

    mean: float
    low: float
    high: float
    level: float


class Curves(NamedTuple):
    """One method's runs, a table each: updates in the first column, sorted, then the metrics."""

    raw: list[np.ndarray]  # a [U,1+M] for each run: the updates in which every metric has a value
    smoothed: list[np.ndarray]  # the same updates, the metrics averaged over the last few
    mean: np.ndarray  # [U,1+M], of the smoothed runs at the updates that all of them have
    std: np.ndarray  # [U,M], of the runs there (N−1); 0 for a single one


def bootstrap_mean(values: Sequence[float], level: float = 0.95, n: int = 10_000, seed: int = 0) -> Interval:
    """The mean of `values` with its percentile bootstrap interval.

    Draws `n` times as many values as there are, with replacement, and takes the mean of each draw; the interval runs
    from the (1−level)/2 to the (1+level)/2 quantile of these means. It says how far the mean would move with other
    prompts, not with other training seeds. Few values (under about 20) make it too narrow; one value gives width 0.

    Args:
        values: [N] finite numbers, one for each prompt, N ≥ 1.
        level: the confidence, between 0 and 1.
        n: resamples, at least 1. More make the ends steadier; they do not narrow the interval.
        seed: the same seed gives the same interval.

    Raises:
        InputError: no values, a value that is missing or not finite, or an option out of range.
    """
    values = finite("values", values)
    if not 0 < level < 1:
        raise InputError(f"level {level!r}: give a confidence between 0 and 1, such as 0.95")
    if n < 1:
        raise InputError(f"n {n!r}: give at least 1 resample, better 1000 or more")
    mean = values.mean()
    # Resampling the deviations keeps the digits of a small spread around a large mean.
    low, high = mean + np.quantile(_resampled_means(values - mean, n, seed), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(mean), float(low), float(high), level)


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], level: float = 0.95, n: int = 10_000, seed: int = 0
) -> Interval:
    """The mean of a − b with its interval, where `a[i]` and `b[i]` are two methods' scores on the same prompt.

    Prompts are resampled, not scores: what makes a prompt easy for both methods cancels, so the interval is narrower
    than one from two separate samples. An interval that leaves out 0 is a difference at this level.

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
    """The mean of each value and the `window` − 1 before it; at the start, of those there are.

    Args:
        values: [U] numbers; None and NaN are left out of the mean.
        window: at least 1.

    Returns:
        [U] float64, NaN where the window holds no value.

    Raises:
        InputError: not a list of numbers, or window below 1.
    """
    if window < 1:
        raise InputError(f"window {window!r}: give at least 1")
    values = _numbers("values", values)
    if not len(values):
        return values
    padded = np.concatenate([np.full(window - 1, np.nan), values])
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)
    there = ~np.isnan(windows)
    count = there.sum(1)
    return np.where(count > 0, np.where(there, windows, 0).sum(1) / np.maximum(count, 1), np.nan)


def updates_to_reach(values: Sequence[float | None], target: float, window: int = 5) -> int | None:
    """The first update, counted from 1, at which the curve has reached `target`; None where it never does.

    Reached means: the mean of the last `window` updates is at least `target`. Only whole windows count, so one lucky
    first update is no arrival and the smallest answer is `window`; a curve shorter than that is one window. The ratio
    of two methods' answers for the weaker one's `final_score` is the paper's "times faster" (§4.2).

    Args:
        values: [U] one number for each update, in order; None and NaN are left out of the mean.
        target: in the unit of the values.
        window: updates averaged, at least 1.

    Raises:
        InputError: no values, not numbers, or window below 1.
    """
    values = _some(values)
    first = min(window, len(values)) - 1
    reached = np.flatnonzero(trailing_mean(values, window)[first:] >= target)
    return int(reached[0]) + first + 1 if len(reached) else None


def final_score(values: Sequence[float | None], window: int = 5) -> float:
    """The mean of the last `window` values (of all, where there are fewer); None and NaN are left out.

    Raises:
        InputError: no values, none among the last `window`, not numbers, or window below 1.
    """
    score = float(trailing_mean(_some(values), window)[-1])
    if np.isnan(score):
        raise InputError(f"values: none of the last {window} is a number, so there is no final score")
    return score


def seed_curves(
    runs: Sequence[Sequence[Mapping]], metrics: Sequence[str], smooth: int = 5, name: str = "runs"
) -> Curves:
    """The runs of one method, one for each seed, as curves over updates with their mean and spread.

    Args:
        runs: for each seed its rows, with `update` and the metrics; a row in which one is null or missing is skipped,
            and of rows with the same update the last one counts, as after a resume.
        metrics: names in the rows.
        smooth: each run is first averaged over its last `smooth` updates with values; 1 for none.
        name: what messages call the runs.

    Raises:
        InputError: no runs or rows, a metric that no row has, or runs without an update in common.
    """
    if not len(runs) or isinstance(runs[0], Mapping):
        raise InputError(f"{name}: give a list of runs, each a list of rows; for a single run [rows]")
    raw = [_table(name, rows, metrics) for rows in runs]
    smoothed = [np.column_stack([t[:, 0], *(trailing_mean(column, smooth) for column in t[:, 1:].T)]) for t in raw]
    shared = functools.reduce(np.intersect1d, [table[:, 0] for table in raw])
    if not len(shared):
        raise InputError(f"{name}: its runs have no update in common; give runs logged at the same updates")
    stack = np.stack([table[np.isin(table[:, 0], shared)] for table in smoothed])
    std = stack[:, :, 1:].std(0, ddof=1) if len(runs) > 1 else np.zeros((len(shared), len(metrics)))
    return Curves(raw, smoothed, stack.mean(0), std)


def _table(name: str, rows: Sequence[Mapping], metrics: Sequence[str]) -> np.ndarray:
    """[U,1+M]: update and metrics, sorted, of the rows in which every metric has a value."""
    present = dict.fromkeys(key for row in rows for key in row)
    for metric in ("update", *metrics):
        if metric not in present:
            raise InputError(f"{name}: no {metric!r} in its rows; there are: {', '.join(present) or 'none'}")
    by_update = {row.get("update"): [row.get(metric) for metric in metrics] for row in rows}
    try:
        table = np.array([[update, *by_update[update]] for update in sorted(by_update)], dtype=float)
    except (TypeError, ValueError):
        raise InputError(f"{name}: update must be a number in every row, {', '.join(metrics)} or null") from None
    table = table[np.isfinite(table).all(1)]
    if not len(table):
        raise InputError(f"{name}: {' and '.join(metrics)} have no value together in any update")
    return table


def finite(name: str, values: Sequence[float]) -> np.ndarray:
    """`values` [N] as float64; InputError, calling them `name`, if there are none or one is missing or not finite."""
    array = _numbers(name, values)
    if not len(array):
        raise InputError(f"{name}: no values, give at least one")
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise InputError(f"{name}[{bad[0]}] is {array[bad[0]]}: leave out prompts without a finite score")
    return array


def _resampled_means(values: np.ndarray, n: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    rows = max(1, CHUNK // len(values))
    means = np.empty(n)
    for start in range(0, n, rows):
        block = means[start : start + rows]
        block[:] = values[generator.integers(0, len(values), (len(block), len(values)))].mean(1)
    return means


def _numbers(name: str, values: Sequence[float | None]) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected a list of numbers") from None
    if array.ndim != 1:
        raise InputError(f"{name}: expected a list of numbers, got shape {array.shape}")
    return array


def _some(values: Sequence[float | None]) -> np.ndarray:
    array = _numbers("values", values)
    if not len(array):
        raise InputError("values: no values, give at least one")
    return array
