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
from marlhf_lite.plotting.training import (
    STYLE,
    caption,
    legend,
    make_words_on_cells_readable,
    percent,
    signed,
    subplots,
)
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
    verdicts = list(WORTH)  # first, second, tie
    every_pair, judged = _both_judged([(one, other)])
    # [3, 3]: how often each verdict of `one` meets each verdict of `other`
    table = pd.crosstab(judged["one"], judged["other"])
    counts = table.reindex(index=verdicts, columns=verdicts, fill_value=0).to_numpy()
    pairs = len(judged)
    # κ depends only on these nine counts. To draw pairs with replacement is to draw new counts.
    drawn = np.random.default_rng(0).multinomial(pairs, counts.ravel() / pairs, RESAMPLES)
    kappas = kappa(drawn.reshape(-1, *counts.shape))
    return Agreement(
        agreement=wilson(int(counts.trace()), pairs),
        kappa=percentile_interval(float(kappa(counts)), kappas),
        pairs=pairs,
        left_out=len(every_pair) - pairs,
    )


def agree_in_groups(
    couples: Iterable[tuple[Mapping, Mapping]], groups: Mapping[Hashable, Hashable]
) -> Agreement:
    """Agreement and κ of several couples of raters together, if pairs of a group are not independent observations.

    Pairs of the same prompt, for example, belong to one group. Both intervals are bootstrap intervals over groups. If
    there is one couple, κ is Cohen's; if the couples are all ordered couples of the same raters, it is Fleiss'.

    Args:
        couples: (one, other) as for `agree`.
        groups: pair id to its group.

    Raises:
        InputError: there is no pair that both raters of a couple judged.
    """
    verdicts = list(WORTH)  # first, second, tie
    every_pair, judged = _both_judged(couples)
    # [groups, 9]: how often each group has each of the 3 x 3 combinations of verdicts
    cells = pd.crosstab(judged.index.map(groups), [judged["one"], judged["other"]])
    counts = cells.reindex(columns=list(product(verdicts, verdicts)), fill_value=0).to_numpy()
    equal_chances = np.full(len(counts), 1 / len(counts))
    times_drawn = np.random.default_rng(0).multinomial(len(counts), equal_chances, RESAMPLES)
    # The first table is what was observed, the others are the draws.
    tables = np.vstack([counts.sum(0), times_drawn @ counts])
    tables = tables.reshape(-1, len(verdicts), len(verdicts))
    shares = np.trace(tables, axis1=1, axis2=2) / tables.sum((1, 2))
    kappas = kappa(tables)
    pairs = judged.index.nunique()
    return Agreement(
        agreement=percentile_interval(shares[0], shares[1:]),
        kappa=percentile_interval(kappas[0], kappas[1:]),
        pairs=pairs,
        left_out=every_pair.index.nunique() - pairs,
    )


def _both_judged(couples: Iterable[tuple[Mapping, Mapping]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two tables of verdicts, with columns `one` and `other`: all rows, and those in which both raters judged.

    A row is a pair that a couple saw, so a pair that several couples saw has several rows. The index has the ids of
    pairs. Raises `InputError` if both raters judged in no row.
    """
    of_couples = []
    for one, other in couples:
        # The two columns are aligned by pair id. If only one rater has a pair, the other's verdict is NaN.
        columns = {"one": pd.Series(one, dtype=object), "other": pd.Series(other, dtype=object)}
        of_couples.append(pd.DataFrame(columns))
    verdicts = pd.concat(of_couples)
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
    observed = np.trace(p, axis1=-2, axis2=-1)  # p_o
    chance = (p.sum(-1) * p.sum(-2)).sum(-1)  # p_e
    with np.errstate(invalid="ignore", divide="ignore"):
        # If both raters give all pairs the same verdict, `chance` is 1, up to rounding.
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
        if groups is None:
            agreement = agree(raters[a], raters[b])
        else:
            agreement = agree_in_groups([(raters[a], raters[b])], groups)
        rows.append({"a": a, "b": b} | as_row(agreement))
    return rows


def pairs_for_win_rate(rate: float) -> int:
    """How many pairs are needed to show that a win rate differs from one half, at the 5 % level with a power of 80 %.

    By the normal approximation, without ties. `rate` is a share from 0 to 1 other than one half.
    """
    # The standard deviation of a pair's outcome: 1/2 if the true rate is one half, √(rate (1 − rate)) if it is `rate`.
    spread = _Z_LEVEL / 2 + _Z_POWER * math.sqrt(rate * (1 - rate))
    return math.ceil((spread / (rate - 0.5)) ** 2)


def pairs_for_difference(difference: float, std: float) -> int:
    """How many prompts are needed to show that a mean paired difference is not 0.

    As for `pairs_for_win_rate`, the level is 5 % and the power 80 %.

    difference: the true mean; std: the standard deviation of the prompts' differences.
    """
    return math.ceil(((_Z_LEVEL + _Z_POWER) * std / difference) ** 2)


@plt.rc_context(STYLE)
def agreement_map(table: Sequence[Mapping]) -> Axes:
    """Draw the agreement of every two raters, with Cohen's κ, from rows of `agreement_table` (paper: Table 1)."""
    # 1. The lower triangle of a matrix, without the diagonal: a row for each b, a column for each a.
    in_order: dict[str, None] = {}  # every rater once
    for row in table:
        in_order |= {row["a"]: None, row["b"]: None}
    raters = list(in_order)
    shares = pd.DataFrame(np.nan, raters[1:], raters[:-1])
    texts = pd.DataFrame("", raters[1:], raters[:-1])
    for row in table:
        share = row["agreement"]
        mean_kappa = row["kappa"]["mean"]
        words = "κ undefined" if np.isnan(mean_kappa) else f"κ {signed(mean_kappa)}"
        shares.loc[row["b"], row["a"]] = share["mean"]
        texts.loc[row["b"], row["a"]] = (
            f"{percent(share['mean'])}\n[{percent(share['low'])}, {percent(share['high'])}]\n{words}"
        )
    # 2. The picture.
    ax = subplots((1, 1), 0.16 * len(raters))[0, 0]
    seaborn.heatmap(
        shares,
        annot=texts,
        fmt="",
        cbar_kws={"label": "agreement", "format": PercentFormatter(1, symbol=" %")},
        ax=ax,
        vmin=0,
        vmax=1,
        cmap="cividis",
        linewidths=0.5,
        annot_kws={"size": "medium"},
    )
    make_words_on_cells_readable(ax)
    ax.grid(False)
    ax.set(xlabel="rater", ylabel="rater")
    # 3. A caption with the number of pairs that two raters share; if it differs, the smallest and the largest.
    pairs = [row["pairs"] for row in table]
    count = " to ".join(str(number) for number in sorted({min(pairs), max(pairs)}))
    caption(ax.figure, f"Share of {count} pairs with the same verdict [interval], and Cohen's κ.")
    return ax


@plt.rc_context(STYLE)
def win_rates(rates: Mapping[str, WinRate]) -> Axes:
    """Draw wins, ties and losses as stacked bars, with the win rate and its interval (paper: Figures 4, 17).

    `rates`: name of a bar -> its `statistics.win_rate`.
    """
    # 1. The bars: a row for each name, a column for each outcome, in shares of the row's pairs.
    counts = {}
    for name, rate in rates.items():
        counts[name] = {outcome: getattr(rate, outcome) for outcome in OUTCOMES}
    counts = pd.DataFrame(counts).T
    shares = counts.div(counts.sum(axis=1), axis=0)
    ax = subplots((1, 1), 0.1 * len(rates) + 0.24)[0, 0]
    shares.plot.barh(stacked=True, width=0.66, color=OUTCOMES, legend=False, ax=ax)

    # 2. Each part of a bar that is wide enough for words shows its share.
    def words(share: float) -> str:
        return percent(share) if share >= 0.06 else ""

    for bars, outcome in zip(ax.containers, OUTCOMES, strict=True):
        colour = "black" if outcome == "tie" else "white"
        ax.bar_label(bars, fmt=words, label_type="center", color=colour)
    # 3. Names and win rates on the left, and a line at one half.
    labels = []
    for name, rate in rates.items():
        found = rate.rate
        interval = f"[{percent(found.low)}, {percent(found.high)}]"
        labels.append(f"{name}\n{percent(found.mean)} {interval}")
    ax.set_yticks(range(len(rates)), labels, parse_math=False)
    # zorder 0 puts the line behind the bars, so that it shows only between them.
    ax.axvline(0.5, color="black", linewidth=0.8, linestyle="--", zorder=0)
    ax.set(xlim=(0, 1), xlabel="share of pairs", ylabel="win rate [interval]")
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    legend(ax)
    caption(ax.figure, "Win rate: ties count half; in brackets its 95 % interval.")
    return ax
