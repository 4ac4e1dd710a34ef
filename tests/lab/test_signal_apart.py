"""Parts that share no answers, a placebo, and an interval over answers and splits (`marlhf_lab.credit.apart`)."""

import numpy as np
import pytest
from scipy import stats

from marlhf_lab.credit.apart import (
    SplitProjections,
    difference_over_placebo,
    placebo_scores,
    split_apart,
    verdict,
    weighted_signals,
)
from marlhf_lite.evaluation.statistics import Interval

WORDS, TOKENS, ACTION, LAM = 20, 20, 5, 0.95


def test_the_three_parts_share_no_answer():
    split = split_apart(98, seed=7)
    parts = [split.direction, split.critic, split.evaluation]
    assert [len(part) for part in parts] == [32, 32, 32]
    assert len(set(np.concatenate(parts))) == 96
    again, other = split_apart(98, seed=7), split_apart(98, seed=8)
    assert list(again.direction) == list(split.direction) != list(other.direction)


def test_the_placebo_has_the_same_scores_in_another_order():
    scores = np.arange(50.0)
    permuted = placebo_scores(scores, seed=7)
    assert sorted(permuted) == list(scores) and list(permuted) != list(scores)
    assert abs(np.corrcoef(scores, permuted)[0, 1]) < 0.5


def test_a_weighted_signal_is_that_of_repeated_answers():
    projections, weights = np.array([1.0, 4.0, -2.0, 0.5]), np.array([[2, 0, 1, 3]])
    repeated = np.repeat(projections, weights[0])
    by_hand = repeated.mean() / repeated.std(ddof=1)
    assert weighted_signals(projections, weights) == pytest.approx([by_hand])


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.04, 0.04, "inside the margin"),
        (0.06, 0.2, "above the margin"),
        (-0.2, -0.06, "below the margin"),
        (-0.04, 0.06, "undecided"),
        (0.02, 0.2, "undecided"),
    ],
)
def test_a_verdict_needs_the_whole_interval(low, high, said):
    assert verdict(Interval((low + high) / 2, low, high), 0.05) == said


def projections_of_study(words, scores, split) -> dict[str, np.ndarray]:
    """S and M of a policy that draws words at random: a ridge critic that counts words, all in plain numpy."""
    one_hot = np.eye(WORDS)[words]
    gradients = one_hot - 1 / WORDS
    centred = scores[split.direction] - scores[split.direction].mean()
    direction = (centred[:, None] * gradients[split.direction].sum(1)).sum(0)
    read = one_hot.cumsum(1) - one_hot  # words before each token
    inputs = read[split.critic].reshape(-1, WORDS)
    targets = np.repeat(scores[split.critic], TOKENS)
    ridge = 0.01 * len(inputs) * np.eye(WORDS)
    weights = np.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ (targets - targets.mean()))
    values = read[split.evaluation] @ weights + targets.mean()
    actions = values.reshape(len(values), -1, ACTION)
    slope = gradients[split.evaluation] @ direction
    found = {}
    for name, baseline in {"S": actions[:, :, 0], "M": actions.mean(2)}.items():
        following = np.concatenate([baseline[:, 1:], scores[split.evaluation][:, None]], axis=1)
        deltas = following - baseline
        advantages = np.zeros_like(deltas)
        after = 0.0
        for k in reversed(range(deltas.shape[1])):
            after = deltas[:, k] + LAM * after
            advantages[:, k] = after
        found[name] = (np.repeat(advantages, ACTION, axis=1) * slope).sum(1)
    return found


def difference_in_study(rng, answers: int, effect: float) -> Interval:
    """A study of a policy whose score is noise, plus `effect` for each time the first word of an action is word 0."""
    words = rng.integers(WORDS, size=(answers, TOKENS))
    scores = rng.standard_normal(answers) + effect * (words[:, ::ACTION] == 0).sum(1)
    splits = []
    for _ in range(8):
        seed = int(rng.integers(2**31))
        split = split_apart(answers, seed)
        permuted = placebo_scores(scores, seed)
        arms = [projections_of_study(words, s, split) for s in (scores, permuted)]
        splits.append(SplitProjections(split.evaluation, *arms))
    return difference_over_placebo(splits, "S", "M", answers, draws=200)


def test_studies_without_any_relation_between_text_and_score_find_nothing():
    rng = np.random.default_rng(0)
    intervals = [difference_in_study(rng, answers=96, effect=0.0) for _ in range(60)]
    misses = sum(not interval.low <= 0 <= interval.high for interval in intervals)
    # 5 % are expected to exclude 0; more than this many of 60 happen once in a thousand times
    assert misses <= stats.binom.ppf(0.999, 60, 0.05)


def test_a_true_effect_is_found():
    # The critic learns that word 0 is good. The averaged value takes this from the word itself.
    interval = difference_in_study(np.random.default_rng(1), answers=600, effect=2.0)
    assert interval.low > 0


def test_the_interval_counts_answers_and_splits():
    rng = np.random.default_rng(2)

    def splits(spread):
        made = []
        for _ in range(8):
            rows = rng.permutation(300)[:100]
            ours = rng.standard_normal(100) + spread * rng.standard_normal()
            arm = {"S": ours, "M": rng.standard_normal(100)}
            null = {name: rng.standard_normal(100) for name in arm}
            made.append(SplitProjections(rows, arm, null))
        return made

    narrow, wide = (difference_over_placebo(splits(x), "S", "M", 300, 500) for x in (0.0, 1.0))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    one = splits(0.0)[0]
    same = difference_over_placebo([one] * 8, "S", "M", 300, 2000)
    # equal splits leave the answers' part: four signals of 100 answers, each with a variance of 1/100
    assert (same.high - same.low) / 2 == pytest.approx(stats.t.ppf(0.975, 7) * 0.2, rel=0.25)
