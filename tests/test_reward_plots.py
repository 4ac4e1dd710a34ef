"""Measures and drawings of a reward model: against closed forms and plain loops."""

import math

import numpy as np
import pytest
from conftest import fails
from matplotlib import pyplot as plt

from marlhf_lite.evaluation.statistics import wilson
from marlhf_lite.lab.figures.reward_model import (
    accuracy_against,
    bin_pairs,
    correlation,
    reliability_diagram,
    score_against_length,
)

MARGINS = np.random.default_rng(0).normal(0.5, 1.2, 83)


pytestmark = pytest.mark.usefixtures("figures_apart")


# -- measures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [None, np.random.default_rng(1).uniform(0, 5, 83)])
def test_bins_against_a_loop(by):
    gaps = [abs(m) for m in MARGINS] if by is None else list(by)
    ordered = sorted(zip(gaps, MARGINS))
    sizes, start = [21, 21, 21, 20], 0
    for found, size in zip(bin_pairs(MARGINS, by, count=4), sizes, strict=True):
        rows = ordered[start : start + size]
        start += size
        right = sum(m > 0 for _, m in rows)
        assert found.pairs == size and found.right == pytest.approx(right / size)
        assert found.gap == pytest.approx(sum(g for g, _ in rows) / size)
        assert found.predicted == pytest.approx(sum(1 / (1 + math.exp(-abs(m))) for _, m in rows) / size)
        assert (found.low, found.high) == wilson(right, size)[1:3]


def test_correlation_against_closed_forms():
    x, y, z = np.random.default_rng(2).normal(size=(3, 50)) + np.random.default_rng(3).normal(size=50)
    r = np.corrcoef([x, y, z])
    assert correlation(x, y) == pytest.approx(r[0, 1])
    partial = (r[0, 1] - r[0, 2] * r[1, 2]) / math.sqrt((1 - r[0, 2] ** 2) * (1 - r[1, 2] ** 2))
    assert correlation(x, y, given=z) == pytest.approx(partial)
    assert correlation(x, 3 - 2 * x) == pytest.approx(-1)
    for wrong in ([x, y[:9]], [x, 0 * x + 5.0], [x, y, x]):
        fails(lambda: correlation(*wrong), "y" if len(wrong) == 2 else "x")  # noqa: B023


# -- drawings ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ax():
    return plt.subplots()[1]


def points(ax):
    (container,) = ax.containers
    return container.lines[0].get_xydata().T


def test_reliability_points_and_intervals_are_the_bins(ax):
    bins = bin_pairs(MARGINS, count=6)
    reliability_diagram(MARGINS, ax, count=6)
    np.testing.assert_allclose(points(ax), [[b.predicted for b in bins], [b.right for b in bins]])
    segments = [sorted(segment[:, 1]) for segment in ax.containers[0].lines[2][0].get_segments()]
    np.testing.assert_allclose(segments, [(b.low, b.high) for b in bins])
    diagonal = ax.lines[0].get_xydata()
    assert (diagonal[:, 0] == diagonal[:, 1]).all()


def test_accuracy_is_beside_the_sigmoid_of_what_it_is_binned_by(ax):
    by = np.linspace(0, 4, 83)
    bins = bin_pairs(MARGINS, by, 3)
    accuracy_against(MARGINS, by, ax, count=3, label="gap", curve="most")
    np.testing.assert_allclose(points(ax), [[b.gap for b in bins], [b.right for b in bins]])
    x, y = ax.lines[0].get_data()
    np.testing.assert_allclose(y, 1 / (1 + np.exp(-x)))
    assert x[0] == 0 and x[-1] > bins[-1].gap
    assert ax.get_xlabel() == "gap" and "most" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_length_has_every_response_the_line_and_both_correlations(ax):
    generator = np.random.default_rng(7)
    lengths, gold = generator.integers(10, 90, 60), generator.normal(size=60)
    scores = 0.02 * lengths + gold
    score_against_length(scores, lengths, ax, given=gold)
    (dots,), (line,) = ax.collections, ax.lines
    np.testing.assert_allclose(dots.get_offsets(), np.stack([lengths, scores], 1))
    slope, start = np.polyfit(lengths, scores, 1)
    np.testing.assert_allclose(line.get_ydata(), start + slope * line.get_xdata())
    assert ax.get_title() == f"correlation {correlation(lengths, scores):.2f}, at equal gold 1.00"
