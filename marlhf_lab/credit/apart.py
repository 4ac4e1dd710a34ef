"""Signals along an estimated direction, measured so that chance cannot look like a mechanism.

The direction that raises the score, the critic and the evaluation each get separate answers. If two of them shared
answers, then the direction would raise, and the critic would value, words that went with high scores in these answers
by chance; estimators would differ even if scores had no relation to the text. A placebo measures the same on the same
answers with permuted scores. Many random splits are taken, because one split holds one direction and one critic fixed.

Shapes: R splits, N answers, E answers of the evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from marlhf_lab.credit.credit import RESAMPLES
from marlhf_lab.credit.gradient_signal import signal_to_noise
from marlhf_lite.evaluation.statistics import LEVEL, Interval


@dataclass(frozen=True)
class ApartSplit:
    """The answers of three parts, as numbers from 0; no answer is in two parts."""

    direction: np.ndarray
    critic: np.ndarray
    evaluation: np.ndarray


def split_apart(answers: int, seed: int) -> ApartSplit:
    """Divide answers 0 … `answers` − 1 at random into three parts of equal size; up to two answers are left over."""
    # The 0 beside the seed, and the 1 in `placebo_scores`, make two independent streams of random numbers.
    order = np.random.default_rng([seed, 0]).permutation(answers)
    size = answers // 3
    return ApartSplit(
        direction=order[:size],
        critic=order[size : 2 * size],
        evaluation=order[2 * size : 3 * size],
    )


def placebo_scores(scores: Sequence[float], seed: int) -> np.ndarray:
    """[N] the scores in a random order, so that no answer's text has anything to do with its score."""
    return np.random.default_rng([seed, 1]).permutation(np.asarray(scores))


@dataclass(frozen=True)
class SplitProjections:
    """What one split found: each evaluated answer's projection, with true and with permuted scores."""

    evaluation: np.ndarray  # [E] which answers are evaluated: their numbers, from 0
    score: dict[str, np.ndarray]  # estimator -> [E] projections
    # The same, if direction, critic and evaluation get permuted scores.
    placebo: dict[str, np.ndarray]


def difference_over_placebo(
    splits: Sequence[SplitProjections], ours: str, theirs: str, answers: int, draws: int = RESAMPLES
) -> Interval:
    """The signal of `ours` minus that of `theirs`, minus the same difference of the placebo: mean over splits.

    The variance is the sum of two parts. One is the variance of the mean over splits, which differ in direction,
    critic and permutation. The other is that of a bootstrap over answers, which draws the same answers for all splits
    and holds directions and critics fixed. The interval takes t with R − 1 degrees of freedom. In 300 simulated studies
    without any relation between text and score (144 answers, 8 splits, a ridge critic) 5.7 % of such intervals excluded
    0; a bootstrap over answers alone excluded 0 in 43 %.

    Args:
        splits: R of them, at least two.
        ours, theirs: names of estimators.
        answers: N, how many answers all parts of a split were taken from.
        draws: of the bootstrap over answers.
    """
    # 1. The difference in each split; and for each draw of the bootstrap, the sum over splits of the differences that
    # these answers give.
    difference_of_split = []
    total_of_draws = np.zeros(draws)
    # [draws, N] how often each draw has each answer
    times_drawn = np.random.default_rng(0).multinomial(
        answers, np.full(answers, 1 / answers), draws
    )
    for split in splits:
        difference = 0.0
        drawn = np.zeros(draws)
        times_evaluated = times_drawn[:, split.evaluation]
        # The difference with true scores, minus that with permuted ones.
        for sign, projections in ((1, split.score), (-1, split.placebo)):
            one = projections[ours]
            other = projections[theirs]
            difference += sign * (signal_to_noise(one) - signal_to_noise(other))
            drawn += sign * (weighted_signals(one, times_evaluated))
            drawn -= sign * (weighted_signals(other, times_evaluated))
        difference_of_split.append(difference)
        total_of_draws += drawn
    # 2. The two parts of the variance.
    count = len(difference_of_split)
    variance_of_splits = np.var(difference_of_split, ddof=1) / count
    # A draw with fewer than two of a split's answers is NaN, and is left out.
    variance_of_answers = np.nanvar(total_of_draws / count, ddof=1)
    # 3. The interval.
    factor = stats.t.ppf((1 + LEVEL) / 2, count - 1)
    half_width = factor * np.sqrt(variance_of_splits + variance_of_answers)
    mean = float(np.mean(difference_of_split))
    return Interval(mean, float(mean - half_width), float(mean + half_width))


def weighted_signals(projections: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[draws] `signal_to_noise` of each draw, in which answer i comes `weights[:, i]` times.

    projections: [E]; weights: [draws, E]. NaN for a draw with fewer than two answers.
    """
    count = weights.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):  # if a draw has fewer than two answers
        mean = weights @ projections / count
        square = weights @ np.square(projections) / count
        # The variance divides by count − 1, as that of `signal_to_noise` does.
        return mean / np.sqrt((square - mean**2) * count / (count - 1))


def verdict(interval: Interval, margin: float) -> str:
    """Say where an interval lies: inside ±`margin`, above it or below it; undecided if it contains one of its ends.

    The margin (> 0) is chosen before the study.
    """
    if -margin < interval.low and interval.high < margin:
        return "inside the margin"
    if interval.low > margin:
        return "above the margin"
    if interval.high < -margin:
        return "below the margin"
    return "undecided"
