"""Agreement of raters (paper: Figures 4 and 17, Table 1): Cohen's κ, pairs that a comparison needs, and two figures.

A verdict on a pair is `first`, `second` or `tie`, as judges give it; anything else (malformed, skipped, None) is
left out and counted.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pandas as pd
import seaborn
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from scipy import stats

from marlhf_lite.evaluation.statistics import (
    LEVEL,
    WORTH,
    Interval,
    WinRate,
    finite,
    percentile_interval,
    wilson,
)
from marlhf_lite.plotting.styles import OUTCOMES
from marlhf_lite.plotting.training import STYLE, caption, legend, signed, subplots
from marlhf_lite.utils.errors import InputError

RESAMPLES = 2000  # of the bootstrap of κ
POWER = 0.8  # the chance to detect a difference that is there
_Z_LEVEL, _Z_POWER = (float(stats.norm.ppf(p)) for p in ((1 + LEVEL) / 2, POWER))


class Agreement(NamedTuple):
    """How often two raters give the same verdicts on the same pairs."""

    agreement: Interval  # share of pairs
    # Cohen's κ: 1 is full agreement, 0 what chance gives; NaN if chance alone gives 1
    kappa: Interval
    pairs: int
    left_out: int  # pairs that only one of them judged


def verdicts_of_scores(
    first: Sequence[float], second: Sequence[float], margin: float = 0.0
) -> list[str]:
    """Verdicts of a scorer: the higher score wins; scores at most `margin` apart are a tie (paper, section 4.2)."""
    first = finite("first", first)
    second = finite("second", second, count=len(first))
    tie = np.abs(first - second) <= margin
    return np.select([tie, first > second], ["tie", "first"], "second").tolist()


def agree(one: Mapping[str, str | None], other: Mapping[str, str | None]) -> Agreement:
    """Percent agreement (Wilson interval) and Cohen's κ (bootstrap interval over pairs) of two raters.

    `one` and `other` map pair ids to verdicts; a tie agrees only with a tie. Pairs that only one of them judged are
    left out. Raises `InputError` without a common pair.
    """
    names, (verdicts, judged) = list(WORTH), _both_judged([(one, other)])
    counts = (
        pd.crosstab(judged["one"], judged["other"])
        .reindex(index=names, columns=names, fill_value=0)
        .to_numpy()
    )
    value, n = float(kappa(counts)), len(judged)
    drawn = (
        np.random.default_rng(0)
        .multinomial(n, counts.ravel() / n, RESAMPLES)
        .reshape(-1, *counts.shape)
    )
    interval = percentile_interval(value, kappa(drawn))
    return Agreement(wilson(int(counts.trace()), n), interval, n, len(verdicts) - n)


def agree_in_groups(
    couples: Iterable[tuple[Mapping, Mapping]], groups: Mapping[Hashable, Hashable]
) -> Agreement:
    """Agreement and κ of several couples of raters, pooled, if pairs of a group are not independent observations.

    `couples`: (one, other) as for `agree`; `groups`: pair id to its group, such as the prompt that several pairs share.
    Both intervals are bootstrap intervals over groups. κ is Cohen's for one couple, and Fleiss' for all ordered couples
    of the same raters. Raises `InputError` without a pair that both of a couple judged.
    """
    names, (verdicts, judged) = list(WORTH), _both_judged(couples)
    cells = pd.crosstab(judged.index.map(groups), [judged["one"], judged["other"]])
    counts = cells.reindex(columns=list(product(names, names)), fill_value=0).to_numpy()
    draws = (
        np.random.default_rng(0).multinomial(
            len(counts), np.full(len(counts), 1 / len(counts)), RESAMPLES
        )
        @ counts
    )
    tables = np.vstack([counts.sum(0), draws]).reshape(-1, len(names), len(names))
    shares, kappas = np.trace(tables, axis1=1, axis2=2) / tables.sum((1, 2)), kappa(tables)
    intervals = [percentile_interval(values[0], values[1:]) for values in (shares, kappas)]
    pairs = judged.index.nunique()
    return Agreement(*intervals, pairs, verdicts.index.nunique() - pairs)


def _both_judged(couples: Iterable[tuple[Mapping, Mapping]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the verdicts `one` and `other` of all couples, and those on pairs that both raters judged."""
    both = [
        pd.DataFrame({"one": pd.Series(a, dtype=object), "other": pd.Series(b, dtype=object)})
        for a, b in couples
    ]
    verdicts = pd.concat(both)
    judged = verdicts[verdicts.isin(list(WORTH)).all(axis=1)]
    if not len(judged):
        raise InputError(
            f"agreement: no pair of {len(verdicts)} that both raters judged: judge the same pairs"
        )
    return verdicts, judged


def kappa(counts: np.ndarray) -> np.ndarray:
    """Cohen's κ of tables of counts [..., K, K]: one rater's verdict by the other's.

    κ = (p_o − p_e) / (1 − p_e): agreement beyond what both would reach by chance. NaN if p_e is 1.
    """
    p = counts / counts.sum((-2, -1), keepdims=True)
    observed = np.trace(p, axis1=-2, axis2=-1)
    chance = (p.sum(-1) * p.sum(-2)).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(1 - chance > 1e-12, (observed - chance) / (1 - chance), np.nan)


def as_row(agreement: Agreement) -> dict:
    """The agreement as a row of a table, with intervals as dicts of mean, low, high and level."""
    return agreement._asdict() | {
        "agreement": agreement.agreement._asdict(),
        "kappa": agreement.kappa._asdict(),
    }


def agreement_table(
    raters: Mapping[str, Mapping[str, str | None]],
    groups: Mapping[Hashable, Hashable] | None = None,
) -> list[dict]:
    """`agree` for every two raters (Table 1): dicts with a, b, agreement, kappa (intervals), pairs, left_out.

    `raters`: name to verdicts by pair id, on the same pairs; `groups`: as for `agree_in_groups`, if pairs have them.
    """
    rows = []
    for a, b in combinations(raters, 2):
        couple = raters[a], raters[b]
        agreement = agree(*couple) if groups is None else agree_in_groups([couple], groups)
        rows.append({"a": a, "b": b} | as_row(agreement))
    return rows


def pairs_for_win_rate(rate: float) -> int:
    """Number of pairs that show that a win rate differs from one half, at the 5 % level with a power of 80 %.

    Normal approximation, without ties; `rate` is a share from 0 to 1 other than one half.
    """
    spread = _Z_LEVEL / 2 + _Z_POWER * math.sqrt(rate * (1 - rate))
    return math.ceil((spread / (rate - 0.5)) ** 2)


def pairs_for_difference(difference: float, std: float) -> int:
    """Number of prompts that show that a mean paired difference is not 0; `std` is that of the differences."""
    return math.ceil(((_Z_LEVEL + _Z_POWER) * std / difference) ** 2)


@plt.rc_context(STYLE)
def agreement_map(table: Sequence[Mapping]) -> Axes:
    """Draw the agreement of every two raters, with Cohen's κ, from rows of `agreement_table` (paper: Table 1)."""
    names = list(dict.fromkeys(name for row in table for name in (row["a"], row["b"])))
    shares = pd.DataFrame(np.nan, names[1:], names[:-1])
    texts = pd.DataFrame("", names[1:], names[:-1])
    for row in table:
        share, kappa = row["agreement"], row["kappa"]["mean"]
        words = "κ undefined" if np.isnan(kappa) else f"κ {signed(kappa)}"
        shares.loc[row["b"], row["a"]] = share["mean"]
        texts.loc[row["b"], row["a"]] = (
            f"{share['mean']:.0%}\n[{share['low']:.0%}, {share['high']:.0%}]\n{words}"
        )
    pairs = [row["pairs"] for row in table]
    ax = subplots((1, 1), 0.16 * len(names))[0, 0]
    bar = {"label": "agreement", "format": PercentFormatter(1)}
    look = {
        "vmin": 0,
        "vmax": 1,
        "cmap": "cividis",
        "linewidths": 0.5,
        "annot_kws": {"size": "medium"},
    }
    seaborn.heatmap(shares, annot=texts, fmt="", cbar_kws=bar, ax=ax, **look)
    ax.grid(False)
    ax.set(xlabel="rater", ylabel="rater")
    count = " to ".join(map(str, sorted({min(pairs), max(pairs)})))
    caption(ax.figure, f"Share of {count} pairs with the same verdict [interval], and Cohen's κ.")
    return ax


@plt.rc_context(STYLE)
def win_rates(rates: Mapping[str, WinRate]) -> Axes:
    """Draw wins, ties and losses as stacked bars, with the win rate and its interval (paper: Figures 4, 17).

    `rates`: name of a bar -> its `statistics.win_rate`.
    """
    counts = pd.DataFrame(
        {name: {key: getattr(rate, key) for key in OUTCOMES} for name, rate in rates.items()}
    ).T
    ax = subplots((1, 1), 0.1 * len(rates) + 0.24)[0, 0]
    counts.div(counts.sum(axis=1), axis=0).plot.barh(
        stacked=True, width=0.66, color=OUTCOMES, legend=False, ax=ax
    )
    for bars, key in zip(ax.containers, OUTCOMES, strict=True):
        text = "black" if key == "tie" else "white"
        ax.bar_label(
            bars, fmt=lambda x: f"{x:.0%}" if x >= 0.06 else "", label_type="center", color=text
        )
    names = [
        f"{n}\n{r.rate.mean:.0%} [{r.rate.low:.0%}, {r.rate.high:.0%}]" for n, r in rates.items()
    ]
    ax.set_yticks(range(len(rates)), names, parse_math=False)
    # shows between the bars
    ax.axvline(0.5, color="black", linewidth=0.8, linestyle="--", zorder=0)
    ax.set(xlim=(0, 1), xlabel="share of pairs", ylabel="win rate [interval]")
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    legend(ax)
    caption(ax.figure, "Win rate: ties count half; in brackets its 95 % interval.")
    return ax
