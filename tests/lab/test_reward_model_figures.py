"""Figures of a reward model: their measures against loops and closed forms, and the numbers that they show."""

import math

import numpy as np
import pytest
from conftest import fails
from matplotlib import pyplot as plt

from marlhf_lab.figures.reward_model import bin_pairs, correlation, reliability_diagram
from marlhf_lite.evaluation.statistics import wilson

MARGINS = np.random.default_rng(0).normal(0.5, 1.2, 83)


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
        assert found.predicted == pytest.approx(
            sum(1 / (1 + math.exp(-abs(m))) for _, m in rows) / size
        )
        assert (found.low, found.high) == wilson(right, size)[1:3]


def test_correlation_against_closed_forms():
    x, y, z = np.random.default_rng(2).normal(size=(3, 50)) + np.random.default_rng(3).normal(
        size=50
    )
    r = np.corrcoef([x, y, z])
    assert correlation(x, y) == pytest.approx(r[0, 1])
    partial = (r[0, 1] - r[0, 2] * r[1, 2]) / math.sqrt((1 - r[0, 2] ** 2) * (1 - r[1, 2] ** 2))
    assert correlation(x, y, given=z) == pytest.approx(partial)
    assert correlation(x, 3 - 2 * x) == pytest.approx(-1)
    for wrong in ([x, y[:9]], [x, 0 * x + 5.0], [x, y, x]):
        fails(lambda: correlation(*wrong), "y" if len(wrong) == 2 else "x")  # noqa: B023


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
