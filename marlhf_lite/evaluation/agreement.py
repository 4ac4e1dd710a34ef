"""Win rates and the agreement of raters, with their intervals (paper: Figures 4 and 17, Table 1).

A verdict on a pair is `first`, `second` or `tie`, as judges give it; anything else (malformed, skipped, None) is no
verdict: it is left out and counted.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from marlhf_lite.evaluation.statistics import LEVEL, Interval, finite, percentile_interval
from marlhf_lite.utils.errors import InputError

RESAMPLES = 2000  # of the bootstrap of κ
POWER = 0.8  # the chance to detect a difference that is there
_Z_LEVEL, _Z_POWER = (float(stats.norm.ppf(p)) for p in ((1 + LEVEL) / 2, POWER))
WORTH = {"second": 0.0, "tie": 0.5, "first": 1.0}  # of a verdict, for the first


class WinRate(NamedTuple):
    """How often the first of two wins, as an interval, and the counts it is made of."""

    rate: Interval
    win: int
    tie: int
    lose: int
    left_out: int  # pairs without a verdict


class Agreement(NamedTuple):
    """How far two raters give the same verdicts on the same pairs."""

    agreement: Interval  # share of pairs
    kappa: Interval  # Cohen's κ: 1 is full agreement, 0 what chance gives; NaN where chance alone gives 1
    pairs: int
    left_out: int  # pairs that only one of them judged


def wilson(wins: float, n: int) -> Interval:
    """The share `wins` / `n` with Wilson's 95 % score interval, which stays in [0, 1] and has a width at 0 and 1 too.

    `wins` may hold halves, one for each tie (`scipy.stats` takes whole numbers alone); the interval is then a little
    wider than it need be, as ties vary less. Raises `InputError` unless 0 ≤ wins ≤ n and n ≥ 1.
    """
    if n < 1 or not 0 <= wins <= n:
        raise InputError(f"{wins} wins of {n} pairs: give at least one pair, and no more wins than pairs")
    z, share = _Z_LEVEL, wins / n
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    # At 0 and 1 an end is the share itself, whatever the rounding.
    return Interval(share, max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0))


def win_rate(winners: Sequence[str | None]) -> WinRate:
    """Share of pairs that `first` wins, a tie counted as half a win; `InputError` where there is no verdict."""
    count = Counter(winner for winner in winners if winner in WORTH)
    if not count:
        raise InputError(f"win rate: no verdict among {len(winners)} pairs: judge more")
    rate = wilson(count["first"] + count["tie"] / 2, count.total())
    return WinRate(rate, count["first"], count["tie"], count["second"], len(winners) - count.total())


def verdicts_of_scores(first: Sequence[float], second: Sequence[float], margin: float = 0.0) -> list[str]:
    """Verdicts of a scorer: the higher score wins; scores at most `margin` apart are a tie (paper, section 4.2)."""
    first = finite("first", first)
    second = finite("second", second, count=len(first))
    tie = np.abs(first - second) <= margin
    return np.select([tie, first > second], ["tie", "first"], "second").tolist()


def agree(one: Mapping[str, str | None], other: Mapping[str, str | None]) -> Agreement:
    """Percent agreement (Wilson interval) and Cohen's κ (bootstrap interval over pairs) of two raters.

    `one` and `other` map pair ids to verdicts; a tie agrees with a tie alone. Pairs that only one of them judged are
    left out. Raises `InputError` for no common pair.
    """
    verdicts = pd.DataFrame({"one": pd.Series(one, dtype=object), "other": pd.Series(other, dtype=object)})
    judged = verdicts[verdicts.isin(list(WORTH)).all(axis=1)]
    if not len(judged):
        what = f"no pair of {len(verdicts)} that both raters judged"
        raise InputError(f"agreement: {what}: give verdicts on the same pairs")
    names = list(WORTH)
    counts = pd.crosstab(judged["one"], judged["other"]).reindex(index=names, columns=names, fill_value=0).to_numpy()
    value, n = float(kappa(counts)), len(judged)
    drawn = np.random.default_rng(0).multinomial(n, counts.ravel() / n, RESAMPLES).reshape(-1, *counts.shape)
    interval = percentile_interval(value, kappa(drawn))
    return Agreement(wilson(int(counts.trace()), n), interval, n, len(verdicts) - n)


def kappa(counts: np.ndarray) -> np.ndarray:
    """Cohen's κ of tables of counts [..., K, K]: one rater's verdict by the other's.

    κ = (p_o − p_e) / (1 − p_e): agreement beyond what both would reach by chance. NaN where p_e is 1.
    """
    p = counts / counts.sum((-2, -1), keepdims=True)
    observed = np.trace(p, axis1=-2, axis2=-1)
    chance = (p.sum(-1) * p.sum(-2)).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(1 - chance > 1e-12, (observed - chance) / (1 - chance), np.nan)


def agreement_table(raters: Mapping[str, Mapping[str, str | None]]) -> list[dict]:
    """`agree` for every two raters (Table 1): dicts with a, b, agreement, kappa (intervals), pairs, left_out.

    `raters`: name to verdicts by pair id, on the same pairs.
    """
    found = {(a, b): agree(raters[a], raters[b])._asdict() for a, b in combinations(raters, 2)}
    intervals = ("agreement", "kappa")
    return [{"a": a, "b": b, **x, **{name: x[name]._asdict() for name in intervals}} for (a, b), x in found.items()]


def pairs_for_win_rate(rate: float) -> int:
    """Number of pairs with which a win rate is told from one half, at the 5 % level with a power of 80 %.

    Normal approximation, without ties; `rate` is a share from 0 to 1 that is not one half.
    """
    spread = _Z_LEVEL / 2 + _Z_POWER * math.sqrt(rate * (1 - rate))
    return math.ceil((spread / (rate - 0.5)) ** 2)


def pairs_for_difference(difference: float, std: float) -> int:
    """Number of prompts with which a mean paired difference is told from 0; `std` of the differences, in their unit."""
    return math.ceil(((_Z_LEVEL + _Z_POWER) * std / difference) ** 2)
