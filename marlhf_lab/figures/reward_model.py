"""How far a reward model can be trusted: accuracy by margin, calibration, and the influence of length on its scores.

A margin is the score of the chosen response minus that of the rejected one. If it is above 0, the reward model ranks
the pair right. Each drawing goes into the given Axes, and returns them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import seaborn
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from scipy.special import expit as sigmoid

from marlhf_lite.evaluation.statistics import finite, wilson
from marlhf_lite.plotting.styles import SERIES
from marlhf_lite.plotting.training import STYLE, signed
from marlhf_lite.utils.errors import InputError

_DASHED = {"color": "0.5", "linestyle": "--", "linewidth": 1}


class Bin(NamedTuple):
    """Pairs in one bin: they are alike in the number by which `bin_pairs` sorts them."""

    gap: float  # mean of this number
    predicted: float  # mean of sigmoid(|margin|): the reward model's own certainty
    right: float  # share that the reward model ranks as the raters did; a margin of 0 counts half
    low: float  # Wilson interval of `right`
    high: float
    pairs: int


def bin_pairs(
    margins: Sequence[float], by: Sequence[float] | None = None, count: int = 5
) -> list[Bin]:
    """Sort pairs by `by`, from small to large, and divide them into `count` bins of equal size (to one pair).

    Args:
        margins: [N] finite numbers, N >= count.
        by: [N] the number to sort by; None: |margin|. Then `right` over `predicted` is the calibration curve.
        count: number of bins.
    """
    margins = finite("margins", margins)
    by = np.abs(margins) if by is None else finite("by", by, count=len(margins))
    bins = []
    for rows in np.array_split(np.argsort(by, kind="stable"), count):
        is_right = np.sign(margins[rows]) / 2 + 0.5  # 1 above 0, 0 below it, a half for a tie
        right = wilson(float(is_right.sum()), len(rows))
        certainty = sigmoid(np.abs(margins[rows]))
        bins.append(
            Bin(
                gap=float(by[rows].mean()),
                predicted=float(certainty.mean()),
                right=right.mean,
                low=right.low,
                high=right.high,
                pairs=len(rows),
            )
        )
    return bins


def correlation(
    x: Sequence[float], y: Sequence[float], given: Sequence[float] | None = None
) -> float:
    """Return Pearson's correlation of x and y [N], or, if `given` [N] is given, their partial correlation.

    For this each is fitted by a line in `given`, and the residuals are correlated. Raises `InputError` if the lengths
    differ, and if x or y does not vary (with `given`: if the line explains all of it).
    """
    columns = {"x": finite("x", x), "y": finite("y", y, count=len(x))}
    if given is None:
        fitted_to = np.ones((len(x), 1))  # a mean, which a correlation takes away anyway
    else:
        fitted_to = np.vander(finite("given", given, count=len(x)), 2)  # a line
    residuals = []
    for name, column in columns.items():
        coefficients = np.linalg.lstsq(fitted_to, column, rcond=None)[0]
        residual = column - fitted_to @ coefficients
        # Of a column that the fit explains wholly, only rounding errors are left.
        if np.linalg.norm(residual) <= 1e-9 * np.linalg.norm(column):
            condition = "" if given is None else " if `given` is the same"
            raise InputError(f"{name} does not vary{condition}")
        residuals.append(residual)
    return float(np.corrcoef(residuals[0], residuals[1])[0, 1])


@plt.rc_context(STYLE)
def reliability_diagram(margins: Sequence[float], ax: Axes, count: int = 5) -> Axes:
    """Draw the reward model's certainty, sigmoid(|margin|), against the share of pairs it ranks right.

    A calibrated model is on the diagonal. If it is above, it ranks more pairs right than it expects. Arguments and
    errors: see `bin_pairs`.
    """
    bins = bin_pairs(margins, count=count)
    ax.plot([0.5, 1], [0.5, 1], label="calibrated", **_DASHED)
    return _draw_bins(ax, bins, [b.predicted for b in bins], "predicted, sigmoid(|margin|)")


@plt.rc_context(STYLE)
def accuracy_by_gold(margins: Sequence[float], gap: Sequence[float], ax: Axes) -> Axes:
    """Draw the share of pairs ranked right against their |gap| in gold score, beside the sigmoid of this gap.

    If raters follow Bradley-Terry, no model can rank a larger share right than this sigmoid. Errors: see `bin_pairs`.
    """
    bins = bin_pairs(margins, np.abs(gap))
    gaps = [b.gap for b in bins]
    grid = np.linspace(0, max(gaps) * 1.1, 100)
    ax.plot(grid, sigmoid(grid), label="ceiling, sigmoid(|Δ|)", **_DASHED)
    return _draw_bins(ax, bins, gaps, "gap in gold, |Δ|")


@plt.rc_context(STYLE)
def score_against_length(
    scores: Sequence[float], lengths: Sequence[float], gold: Sequence[float], ax: Axes
) -> Axes:
    """Draw scores [N] over response lengths [N] in tokens, with their least-squares line.

    The title has their correlation, and their partial correlation if the gold scores `gold` [N] are held equal. Errors:
    see `correlation`.
    """
    of_all = signed(correlation(lengths, scores))
    at_equal_gold = signed(correlation(lengths, scores, given=gold))
    seaborn.regplot(
        x=np.asarray(lengths),
        y=np.asarray(scores),
        ci=None,
        scatter_kws={"s": 6, "alpha": 0.35, "linewidths": 0, "color": SERIES[0]},
        line_kws={"color": SERIES[3], "linewidth": 1.4},
        ax=ax,
    )
    ax.set(xlabel="response length (tokens)", ylabel="reward model score")
    ax.set_title(f"correlation {of_all}, at equal gold {at_equal_gold}", fontsize="medium")
    ax.grid(alpha=0.3, linewidth=0.5)
    return ax


def _draw_bins(ax: Axes, bins: list[Bin], x: list[float], label: str) -> Axes:
    """Draw the share of each bin's pairs that is ranked right, with its interval, at the bin's place in `x`.

    `label` is that of the x axis.
    """
    shares = [b.right for b in bins]
    below = [b.right - b.low for b in bins]
    above = [b.high - b.right for b in bins]
    ax.errorbar(
        x,
        shares,
        [below, above],
        fmt="o-",
        color=SERIES[0],
        markersize=4,
        linewidth=1.2,
        capsize=2,
        label="measured",
    )
    ax.legend()
    ax.set(xlabel=label, ylabel="share ranked right")
    ax.grid(alpha=0.3, linewidth=0.5)
    return ax


def checks_of_margins(margins: Sequence[float], gap: Sequence[float]) -> Axes:
    """Draw accuracy by the gap in gold (left) and the calibration curve (right), side by side."""
    _, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.3), sharey=True)
    accuracy_by_gold(margins, gap, ax=left)
    reliability_diagram(margins, ax=right)
    right.set_ylabel("")
    return left


def scores_by_length_and_gold(
    score: Sequence[float], length: Sequence[float], gold: Sequence[float]
) -> Axes:
    """Draw a dot for each answer [N]: its score by its length (left) and by its gold score (right)."""
    _, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.3), sharey=True)
    score_against_length(score, length, gold, ax=left)
    right.plot(gold, score, ".", markersize=3, alpha=0.35)
    right.set_xlabel("gold score")
    right.set_title(f"correlation {correlation(score, gold):.2f}", fontsize="medium")
    return left


def changes_by_edit(names: Sequence[str], score: Sequence[float], gold: Sequence[float]) -> Axes:
    """Draw what each edit of a text changes in the reward model's score (left) and in gold (right).

    names: [N] of the edits; score, gold: [N] their changes.
    """
    _, axes = plt.subplots(1, 2, figsize=(7.2, 2.8), sharex=True, sharey=True)
    panels = (("reward model score", score, "C0"), ("gold score", gold, "C1"))
    for ax, (kind, numbers, colour) in zip(axes, panels, strict=True):
        ax.barh(list(names), numbers, color=colour)
        ax.axvline(0, color="0.3", linewidth=0.8)
        ax.set(xlabel=f"change in {kind}")
    axes[0].set_ylabel("what was done")
    axes[0].invert_yaxis()
    return axes[0]
