"""How a critic reacts to a choice, against plain loops and for a known critic; the variance that a fit saves."""

import random

import numpy as np
import pytest
import reference_macro as ref
import torch

from marlhf_lab.credit.critic_response import (
    critic_response,
    taken_away,
    true_credit,
    variance_saved,
)
from marlhf_lab.credit.gradient_signal import difference_of_signals, token_advantages
from marlhf_lite.training.rollout import Rollout

H = (0.5, 0.2, 0.1, 0.05)  # what a critic says 1, 2, … tokens after a choice


@pytest.mark.parametrize("seed", range(4))  # odd ones: responses in turns
def test_the_response_is_that_of_loops(seed):
    data, lags = ref.Batch(seed), 4
    values, slope = data.old_values.nan_to_num(), data.logprobs.nan_to_num()
    pairs = [([0.0, 0.0]) for _ in range(lags)]
    credit = [0.0, 0.0]
    for row, turns in enumerate(data.turns):
        vs, ds = (x[row][data.mask[row]].double().tolist() for x in (values, slope))
        start = 0
        for length in turns:
            for t in range(start, start + length):
                credit[0] += (float(data.scores[row]) - vs[t]) * ds[t]
                credit[1] += ds[t] ** 2
                for k in range(lags):
                    if t + 1 + k < start + length:
                        pairs[k][0] += (vs[t + 1 + k] - vs[t]) * ds[t]
                        pairs[k][1] += ds[t] ** 2
            start += length
    # Turns stand apart in [B, T]: neighbouring columns of a turn are neighbouring tokens.
    found = critic_response(values, slope, data.mask, lags, n=50)
    assert [h.mean for h in found] == pytest.approx([top / bottom for top, bottom in pairs])
    assert true_credit(values, slope, data.mask, data.scores, n=50).mean == pytest.approx(
        credit[0] / credit[1]
    )


def test_pooling_takes_away_what_the_critic_answers():
    """A critic with a known response to each choice: h is found, and L − M of a token is what `taken_away` says."""
    rng, T, B, n = np.random.default_rng(0), 20, 4000, 5
    choices = rng.normal(size=(B, T))
    values = np.zeros((B, T))
    for t in range(T):
        for k, h in enumerate(H):
            if t + 1 + k < T:
                values[:, t + 1 + k] += h * choices[:, t]
    values, choices = torch.tensor(values), torch.tensor(choices)
    mask = torch.ones(B, T, dtype=torch.bool)
    found = critic_response(values, choices, mask, len(H), n=200)
    for h, interval in zip(H, found, strict=True):
        assert interval.low < h < interval.high and interval.high - interval.low < 0.03
    texts, tokens = [""] * B, mask.long()
    rollout = Rollout(
        texts, texts, tokens, tokens, mask, torch.ones(B).bool(), scores=torch.zeros(B)
    )
    # At lambda 1 the return of a token is the score, so only the baseline is left.
    pooled, own = (token_advantages(rollout, values.float(), size, 1.0) for size in (n, 1))
    lost = ((own - pooled).double() * choices).mean(0) / (choices**2).mean(0)
    assert lost.reshape(-1, n).mean(0).tolist() == pytest.approx(taken_away(H, n), abs=0.02)
    # a steady critic
    assert taken_away([0.4] * 4, 5) == pytest.approx([0.4 * (4 - i) / 5 for i in range(5)])


def test_saved_variance_and_signals_are_those_of_loops():
    rng = random.Random(0)
    lengths = [3, 7, 1, 5]
    a, f = ([[rng.gauss(0.3, 1) for _ in range(n)] for n in lengths] for _ in range(2))
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    wide = [ref.padded(x, 7).masked_fill(~mask, 9.0) for x in (a, f)]
    variances = [np.var(np.concatenate(x)) for x in (a, f)]
    assert variance_saved(*wide, mask, n=50).mean == pytest.approx(variances[0] / variances[1])
    noise, held = np.random.default_rng(1), 0
    for _ in range(100):  # the difference is known: 0.5 − 0.2
        ours, shared = noise.normal(size=(2, 100))
        difference = difference_of_signals(
            0.5 + ours, 0.2 + 0.6 * ours + 0.8 * shared, resamples=200
        )
        held += difference.low <= 0.3 <= difference.high
    assert 88 <= held <= 99
