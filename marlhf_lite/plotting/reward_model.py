"""How far a reward model can be trusted: accuracy by margin, calibration, and what length has to do with its scores.

A margin is the score of the response that the raters chose minus that of the one they rejected, so a pair is ranked
right where it is above 0. Each drawing returns its Axes; one that makes its own figure puts a caption below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.evaluation.agreement import wilson
from marlhf_lite.evaluation.statistics import finite
from marlhf_lite.plotting.training import STYLE, WIDTH, caption
from marlhf_lite.utils.errors import InputError

POINTS = "About {} pairs to a point, with 95 % Wilson intervals."


class Bin(NamedTuple):
    """Pairs that are alike in what they were binned by."""

    gap: float  # mean of that
    predicted: float  # mean of sigmoid(|margin|): how sure the reward model says it is
    right: float  # share ranked as the raters did; ties count half
    low: float  # Wilson interval of `right`
    high: float
    pairs: int


def bin_pairs(margins: Sequence[float], by: Sequence[float] | None = None, count: int = 5) -> list[Bin]:
    """Pairs in `count` bins of equal size (to one pair), from small to large `by`.

    Args:
        margins: [N] finite numbers, N >= count.
        by: [N], what to bin by; None is |margin|, which makes `predicted` against `right` the calibration curve.
        count: bins, at least 1.

    Raises `InputError` for other input.
    """
    margins = finite("margins", margins)
    by = np.abs(margins) if by is None else _same_length("by", by, margins, "margins")
    if not 1 <= count <= len(margins):
        raise InputError(f"count {count}: give 1 to {len(margins)}, the number of pairs")
    return [_bin(margins[rows], by[rows]) for rows in np.array_split(np.argsort(by, kind="stable"), count)]


def _bin(margins: np.ndarray, by: np.ndarray) -> Bin:
    right = wilson(float((np.sign(margins) / 2 + 0.5).sum()), len(margins))
    predicted = float(sigmoid(np.abs(margins)).mean())
    return Bin(float(by.mean()), predicted, right.mean, right.low, right.high, len(margins))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0, -np.asarray(x, dtype=np.float64)))


def correlation(x: Sequence[float], y: Sequence[float], given: Sequence[float] | None = None) -> float:
    """Pearson's correlation of x and y [N]; with `given` [N], of what a straight line in `given` leaves of each.

    Raises `InputError` for different lengths, fewer than 3 values, or one that is left without any variation.
    """
    x = finite("x", x)
    columns = [x, _same_length("y", y, x, "x")]
    if len(x) < 3:
        raise InputError(f"{len(x)} values: give at least 3")
    if given is not None:
        line = np.column_stack([np.ones(len(x)), _same_length("given", given, x, "x")])
        columns = [column - line @ np.linalg.lstsq(line, column, rcond=None)[0] for column in columns]
    a, b = (column - column.mean() for column in columns)
    for name, part, whole in (("x", a, x), ("y", b, np.asarray(y))):
        if np.linalg.norm(part) <= 1e-9 * np.linalg.norm(whole):
            raise InputError(f"{name} does not vary{'' if given is None else ' where `given` is the same'}")
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@plt.rc_context(STYLE)
def reliability_diagram(margins: Sequence[float], count: int = 5, ax: Axes | None = None) -> Axes:
    """How sure the reward model is, sigmoid(|margin|), against the share of pairs it ranks right.

    On the diagonal it is as sure as it should be; above it, it could be surer. `margins` and errors: see `bin_pairs`.
    """
    bins = bin_pairs(margins, count=count)
    ax, own = _axes(ax)
    ax.plot([0.5, 1], [0.5, 1], color="0.5", linestyle="--", linewidth=1, label="calibrated")
    _draw(ax, [b.predicted for b in bins], bins)
    ax.set(xlabel="predicted, σ(|margin|)", ylabel="share ranked right", xlim=(0.48, 1.0))
    return _finish(ax, own, POINTS.format(bins[0].pairs))


@plt.rc_context(STYLE)
def accuracy_against(
    margins: Sequence[float],
    by: Sequence[float] | None = None,
    count: int = 5,
    ax: Axes | None = None,
    label: str = "|margin| of the pair",
    curve: str = "σ(|margin|)",
) -> Axes:
    """The share of pairs ranked right against their |margin|, or against `by`, beside the sigmoid of that.

    By the raters' own gap in gold score the sigmoid is the most that any model can reach (where raters follow
    Bradley-Terry); by |margin| it is what the model claims. `margins`, `by` and errors: see `bin_pairs`.
    """
    bins = bin_pairs(margins, by, count)
    ax, own = _axes(ax)
    grid = np.linspace(0, max(b.gap for b in bins) * 1.1, 100)
    ax.plot(grid, sigmoid(grid), color="0.5", linestyle="--", linewidth=1, label=curve)
    _draw(ax, [b.gap for b in bins], bins)
    ax.set(xlabel=label, ylabel="share ranked right")
    return _finish(ax, own, POINTS.format(bins[0].pairs))


@plt.rc_context(STYLE)
def score_against_length(
    scores: Sequence[float],
    lengths: Sequence[float],
    given: Sequence[float] | None = None,
    ax: Axes | None = None,
    label: str = "reward model score",
    quality: str = "gold",
) -> Axes:
    """Scores [N] over response lengths [N] in tokens, with their least-squares line and, as title, their correlation.

    With `given` [N], such as gold scores, the title also has the correlation that is left at equal `given`, which
    `quality` names. Raises `InputError` as `correlation` does.
    """
    title = f"correlation {correlation(lengths, scores):.2f}"
    if given is not None:
        title += f", at equal {quality} {correlation(lengths, scores, given):.2f}"
    scores, lengths = np.asarray(scores, dtype=float), np.asarray(lengths, dtype=float)
    ax, own = _axes(ax)
    ax.plot(lengths, scores, ".", markersize=2.5, alpha=0.35, color="C0", gid="responses")
    ends = np.array([lengths.min(), lengths.max()])
    ax.plot(ends, np.polyval(np.polyfit(lengths, scores, 1), ends), color="C3", linewidth=1.4, gid="line")
    ax.set(xlabel="response length (tokens)", ylabel=label)
    ax.set_title(title.replace("-", "−"), fontsize="medium")
    return _finish(ax, own, "A dot a response; the line is the least-squares fit.")


def _same_length(name: str, values: Sequence[float], other: np.ndarray, others: str) -> np.ndarray:
    values = finite(name, values)
    if len(values) != len(other):
        raise InputError(f"{name} has {len(values)} values and {others} {len(other)}: give as many of both")
    return values


def _axes(ax: Axes | None) -> tuple[Axes, bool]:
    """The Axes to draw on, and whether the figure is our own."""
    return (plt.subplots(figsize=(WIDTH, 0.72 * WIDTH), layout="constrained")[1], True) if ax is None else (ax, False)


def _draw(ax: Axes, x: list[float], bins: list[Bin]) -> None:
    right = np.array([b.right for b in bins])
    bars = np.array([[b.right - b.low, b.high - b.right] for b in bins]).T
    ax.errorbar(x, right, bars, fmt="o-", color="C0", markersize=4, linewidth=1.2, capsize=2, label="measured")
    ax.legend()


def _finish(ax: Axes, own: bool, text: str) -> Axes:
    ax.grid(alpha=0.3, linewidth=0.5)
    if own:
        caption(ax.figure, text)
    return ax
