"""Win rates and the agreement of raters, with how sure they are (paper: Figures 4 and 17, Table 1).

A verdict on a pair is `first`, `second` or `tie`, as judges give it; anything else (malformed, skipped, None) is no
verdict: it is left out and counted. Pure numpy: no model, no file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from marlhf_lite.evaluation.statistics import Interval, bootstrap_mean, finite
from marlhf_lite.utils.errors import InputError

WORTH = {"second": 0.0, "tie": 0.5, "first": 1.0}  # of a verdict, for the first; in this order in tables of counts
Ties = Literal["half", "exclude", "category"]


class WinRate(NamedTuple):
    """How often the first of two wins, as an interval, and the counts it is made of."""

    rate: Interval
    win: int
    tie: int
    lose: int
    left_out: int  # pairs without a verdict


class Agreement(NamedTuple):
    """How far two raters say the same of the same pairs."""

    agreement: Interval  # share of pairs
    kappa: Interval  # Cohen's κ: 1 is full agreement, 0 what chance gives; NaN where chance alone gives 1
    pairs: int
    left_out: int  # pairs that only one of them judged, or left out as ties


def wilson(wins: float, n: int, level: float = 0.95) -> Interval:
    """The share `wins` / `n` with Wilson's score interval, which stays in [0, 1] and has a width at 0 and 1 too.

    `wins` may hold halves, one for each tie; the interval is then a little wider than it need be, as ties vary less.

    Raises `InputError` unless 0 ≤ wins ≤ n, n ≥ 1, and `level` is between 0 and 1.
    """
    z = _quantile(level)
    if n < 1 or not 0 <= wins <= n:
        raise InputError(f"{wins} wins of {n} pairs: give at least one pair, and no more wins than pairs")
    share = wins / n
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    # At 0 and 1 an end is the share itself, whatever the rounding.
    return Interval(share, max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0), level)


def win_rate(
    winners: Sequence[str | None],
    ties: Literal["half", "exclude"] = "half",
    level: float = 0.95,
    method: Literal["wilson", "bootstrap"] = "wilson",
) -> WinRate:
    """How often `first` wins: the share of pairs, a tie counted as half a win or left out of the share.

    Raises `InputError` where no verdict is left, and for an unknown `ties` or `method`.
    """
    _one_of("ties", ties, ("half", "exclude"))
    _one_of("method", method, ("wilson", "bootstrap"))
    count = Counter(winner for winner in winners if winner in WORTH)
    worth = [WORTH[name] for name in count.elements() if ties == "half" or name != "tie"]
    if not worth:
        raise InputError(f"win rate: no verdict among {len(winners)} pairs{' but ties' * bool(count)}: judge more")
    rate = wilson(sum(worth), len(worth), level) if method == "wilson" else bootstrap_mean(worth, level)
    return WinRate(rate, count["first"], count["tie"], count["second"], len(winners) - count.total())


def verdicts_of_scores(first: Sequence[float], second: Sequence[float], margin: float = 0.0) -> list[str]:
    """Verdicts of a scorer: the higher score wins; scores at most `margin` apart are a tie (paper, section 4.2)."""
    first, second = finite("first", first), finite("second", second)
    if len(first) != len(second):
        raise InputError(f"first has {len(first)} scores and second {len(second)}: give one of each for every pair")
    names = np.array(list(WORTH))
    return names[np.where(np.abs(first - second) <= margin, 1, np.where(first > second, 2, 0))].tolist()


def agree(
    one: Mapping[str, str | None],
    other: Mapping[str, str | None],
    ties: Ties = "category",
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Agreement:
    """Percent agreement (Wilson interval) and Cohen's κ (bootstrap interval over pairs) of two raters.

    Args:
        one, other: pair id to verdict. Pairs that only one of them judged are left out.
        ties: "category": a tie agrees with a tie alone. "exclude": pairs that either calls a tie are left out. "half":
            a tie agrees by half with a win or a loss, in κ too (linear weights).
        level, resamples, seed: see `bootstrap_mean`.

    Raises:
        InputError: no pair in common, or an unknown `ties`.
    """
    _one_of("ties", ties, ("half", "exclude", "category"))
    names = [name for name in WORTH if ties != "exclude" or name != "tie"]
    counts = np.array([[sum(one[pair] == a and other.get(pair) == b for pair in one) for b in names] for a in names])
    pairs, everyone = int(counts.sum()), len(one.keys() | other.keys())
    if not pairs:
        raise InputError(f"agreement: no pair of {everyone} that both raters judged: give verdicts on the same pairs")
    worth = np.array([WORTH[name] for name in names])
    weights = 1 - np.abs(worth[:, None] - worth) if ties == "half" else np.eye(len(names))
    return Agreement(
        wilson(float((weights * counts).sum()), pairs, level),
        _kappa_interval(counts, weights, level, resamples, seed),
        pairs,
        everyone - pairs,
    )


def kappa(counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Cohen's κ of tables of counts [..., K, K] (one rater's verdict by the other's); `weights` [K, K] of agreement.

    κ = (p_o − p_e) / (1 − p_e): agreement beyond what both would reach by chance. NaN where p_e is 1.
    """
    p = counts / counts.sum((-2, -1), keepdims=True)
    seen = (weights * p).sum((-2, -1))
    chance = (weights * p.sum(-1, keepdims=True) * p.sum(-2, keepdims=True)).sum((-2, -1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(1 - chance > 1e-12, (seen - chance) / (1 - chance), np.nan)


def _kappa_interval(counts: np.ndarray, weights: np.ndarray, level: float, resamples: int, seed: int) -> Interval:
    """Resampling pairs is drawing tables of counts; draws in which κ has no meaning are left out."""
    value, n = float(kappa(counts, weights)), int(counts.sum())
    drawn = np.random.default_rng(seed).multinomial(n, counts.ravel() / n, resamples).reshape(-1, *counts.shape)
    drawn = kappa(drawn, weights)
    drawn = drawn[~np.isnan(drawn)]
    if math.isnan(value) or not len(drawn):
        return Interval(value, math.nan, math.nan, level)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), level)


def agreement_table(raters: Mapping[str, Mapping[str, str | None]], ties: Ties = "category", **how) -> list[dict]:
    """`agree` for every two raters (Table 1): dicts with a, b, agreement, kappa (intervals), pairs, left_out.

    `raters`: name to verdicts by pair id, on the same pairs; `how`: level, resamples and seed of `agree`.
    """
    if len(raters) < 2:
        raise InputError(f"agreement: {len(raters)} rater: give at least two")
    found = []
    for a, b in combinations(raters, 2):
        result = agree(raters[a], raters[b], ties, **how)
        intervals = {"agreement": result.agreement._asdict(), "kappa": result.kappa._asdict()}
        found.append({"a": a, "b": b, **intervals, "pairs": result.pairs, "left_out": result.left_out})
    return found


def agreement_text(table: Sequence[Mapping]) -> str:
    """The table as Markdown in the form of Table 1: agreement in per cent with its interval, and κ."""
    names = list(dict.fromkeys(name for row in table for name in (row["a"], row["b"])))
    cells = {(row["b"], row["a"]): _cell(row) for row in table}
    lines = [["", *names], ["---"] * (len(names) + 1)]
    lines += [[b, *("100%" if a == b else cells.get((b, a), "-") for a in names)] for b in names]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Mapping) -> str:
    share, kappa = row["agreement"], row["kappa"]["mean"]
    words = "undefined" if math.isnan(kappa) else f"{kappa:.2f}"
    return f"{share['mean']:.0%} [{share['low']:.0%}, {share['high']:.0%}], κ {words}, {row['pairs']} pairs"


def pairs_for_win_rate(rate: float, power: float = 0.8, level: float = 0.95, ties: float = 0.0) -> int:
    """How many pairs a win rate needs to be told from one half, with this power, at this two-sided level.

    `rate` counts ties as half, `ties` is their share: they take no side, so fewer pairs do. Normal approximation.

    Raises `InputError` for a rate of one half, and for shares that cannot be.
    """
    high = max(rate, 1 - rate)
    if not 0.5 < high <= 1 - ties / 2 or not 0 <= ties < 1:
        raise InputError(f"rate {rate} with {ties} ties: give a rate that such ties allow and that is not one half")
    under_null, under_rate = (1 - ties) / 4, max(high - ties / 4 - high**2, 0.0)
    sides = _quantile(level) * math.sqrt(under_null) + _power(power) * math.sqrt(under_rate)
    return math.ceil((sides / (high - 0.5)) ** 2)


def pairs_for_difference(difference: float, std: float, power: float = 0.8, level: float = 0.95) -> int:
    """How many prompts a mean paired difference needs to be told from 0; `std` of the differences, in their unit."""
    if not difference or std <= 0:
        raise InputError(f"difference {difference}, std {std}: give a difference that is not 0 and a std above 0")
    return math.ceil(((_quantile(level) + _power(power)) * std / difference) ** 2)


def _quantile(level: float) -> float:
    if not 0 < level < 1:
        raise InputError(f"level {level!r}: give a confidence between 0 and 1, such as 0.95")
    return NormalDist().inv_cdf((1 + level) / 2)


def _power(power: float) -> float:
    if not 0 < power < 1:
        raise InputError(f"power {power!r}: give a chance between 0 and 1, such as 0.8")
    return NormalDist().inv_cdf(power)


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(f"{name} {value!r}: choose from {', '.join(known)}")
