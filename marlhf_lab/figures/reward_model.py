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


class Bin(NamedTuple):
    """Pairs in one bin: they are alike in the number by which they were sorted."""

    gap: float  # mean of this number
    predicted: float  # mean of sigmoid(|margin|): the reward model's own certainty
    right: float  # share ranked as the raters did; ties count half
    low: float  # Wilson interval of `right`
    high: float
    pairs: int


def bin_pairs(
    margins: Sequence[float], by: Sequence[float] | None = None, count: int = 5
) -> list[Bin]:
    """Put pairs in `count` bins of equal size (to one pair), from small to large `by`.

    Args:
        margins: [N] finite numbers, N >= count.
        by: [N], what to bin by; None is |margin|, which makes `predicted` against `right` the calibration curve.
        count: number of bins.
    """
    margins = finite("margins", margins)
    by = np.abs(margins) if by is None else finite("by", by, count=len(margins))
    bins = []
    for rows in np.array_split(np.argsort(by, kind="stable"), count):
        right = wilson(float((np.sign(margins[rows]) / 2 + 0.5).sum()), len(rows))
        predicted = float(sigmoid(np.abs(margins[rows])).mean())
        bins.append(
            Bin(float(by[rows].mean()), predicted, right.mean, right.low, right.high, len(rows))
        )
    return bins


def correlation(
    x: Sequence[float], y: Sequence[float], given: Sequence[float] | None = None
) -> float:
    """Return Pearson's correlation of x and y [N]; with `given` [N], that of their residuals on a line in `given`.

    Raises `InputError` for different lengths, and if x or y does not vary.
    """
    columns = {"x": finite("x", x), "y": finite("y", y, count=len(x))}
    line = (
        np.ones((len(x), 1))
        if given is None
        else np.vander(finite("given", given, count=len(x)), 2)
    )
    residuals = {
        name: z - line @ np.linalg.lstsq(line, z, rcond=None)[0] for name, z in columns.items()
    }
    for name, residual in residuals.items():
        if np.linalg.norm(residual) <= 1e-9 * np.linalg.norm(columns[name]):
            raise InputError(
                f"{name} does not vary{'' if given is None else ' if `given` is the same'}"
            )
    return float(np.corrcoef(*residuals.values())[0, 1])


@plt.rc_context(STYLE)
def reliability_diagram(margins: Sequence[float], ax: Axes, count: int = 5) -> Axes:
    """Draw the reward model's certainty, sigmoid(|margin|), against the share of pairs it ranks right.

    A calibrated model is on the diagonal; above it, the model could be surer. Arguments and errors: see `bin_pairs`.
    """
    bins = bin_pairs(margins, count=count)
    return _draw_bins(
        ax,
        bins,
        [b.predicted for b in bins],
        [0.5, 1],
        [0.5, 1],
        "calibrated",
        "predicted, sigmoid(|margin|)",
    )


@plt.rc_context(STYLE)
def accuracy_by_gold(margins: Sequence[float], gap: Sequence[float], ax: Axes) -> Axes:
    """Draw the share of pairs ranked right against their |gap| in gold score, beside the sigmoid of this gap.

    The sigmoid is the most that any model can reach if raters follow Bradley-Terry. Errors: see `bin_pairs`.
    """
    bins = bin_pairs(margins, np.abs(gap))
    grid = np.linspace(0, max(b.gap for b in bins) * 1.1, 100)
    x, label = [b.gap for b in bins], "gap in gold, |Δ|"
    return _draw_bins(ax, bins, x, grid, sigmoid(grid), "ceiling, sigmoid(|Δ|)", label)


@plt.rc_context(STYLE)
def score_against_length(
    scores: Sequence[float], lengths: Sequence[float], gold: Sequence[float], ax: Axes
) -> Axes:
    """Draw scores [N] over response lengths [N] in tokens, with their least-squares line.

    The title has their correlation, and that at equal gold score [N]. Errors: see `correlation`.
    """
    of_all, at_equal_gold = (signed(correlation(lengths, scores, given)) for given in (None, gold))
    dots, line = (
        {"s": 6, "alpha": 0.35, "linewidths": 0, "color": SERIES[0]},
        {"color": SERIES[3], "linewidth": 1.4},
    )
    seaborn.regplot(
        x=np.asarray(lengths), y=np.asarray(scores), ci=None, scatter_kws=dots, line_kws=line, ax=ax
    )
    ax.set(xlabel="response length (tokens)", ylabel="reward model score")
    ax.set_title(f"correlation {of_all}, at equal gold {at_equal_gold}", fontsize="medium")
    ax.grid(alpha=0.3, linewidth=0.5)
    return ax


def _draw_bins(
    ax: Axes,
    bins: list[Bin],
    x: list[float],
    curve_x: Sequence,
    curve_y: Sequence,
    curve: str,
    label: str,
) -> Axes:
    """Draw the bins' shares at `x` with their intervals, beside a dashed curve."""
    ax.plot(curve_x, curve_y, color="0.5", linestyle="--", linewidth=1, label=curve)
    bars = np.array([[b.right - b.low, b.high - b.right] for b in bins]).T
    shares = [b.right for b in bins]
    ax.errorbar(
        x,
        shares,
        bars,
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
    left, right = plt.subplots(1, 2, figsize=(7.2, 3.3), sharey=True)[1]
    accuracy_by_gold(margins, gap, ax=left)
    reliability_diagram(margins, ax=right)
    right.set_ylabel("")
    return left


def scores_by_length_and_gold(
    score: Sequence[float], length: Sequence[float], gold: Sequence[float]
) -> Axes:
    """Draw a dot for each answer [N]: its score by its length (left) and by its gold score (right)."""
    left, right = plt.subplots(1, 2, figsize=(7.2, 3.3), sharey=True)[1]
    score_against_length(score, length, gold, ax=left)
    right.plot(gold, score, ".", markersize=3, alpha=0.35)
    right.set_xlabel("gold score")
    right.set_title(f"correlation {correlation(score, gold):.2f}", fontsize="medium")
    return left


def changes_by_edit(names: Sequence[str], score: Sequence[float], gold: Sequence[float]) -> Axes:
    """Draw what each edit of a text changes in the reward model's score (left) and in gold (right)."""
    axes = plt.subplots(1, 2, figsize=(7.2, 2.8), sharex=True, sharey=True)[1]
    for place, (ax, kind, numbers) in enumerate(
        zip(axes, ("reward model score", "gold score"), (score, gold), strict=True)
    ):
        ax.barh(list(names), numbers, color=f"C{place}")
        ax.axvline(0, color="0.3", linewidth=0.8)
        ax.set(xlabel=f"change in {kind}")
    axes[0].set_ylabel("what was done")
    axes[0].invert_yaxis()
    return axes[0]
