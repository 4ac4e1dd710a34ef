"""The closed formula of kept credit against generalised advantage estimation in plain float64 loops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lite.lab.credit.signal_kept import break_even, signal_kept


def advantage(index, length, n, lam, seen, sigma):
    """The advantage of the macro action that holds the token `index`, which earns 1; a loop over macro actions."""
    values = [seen if t > index else 0.0 for t in range(length)]  # V(s_t), before the token t
    n = min(n, length)
    runs = [range(a, min(a + n, length)) for a in range(0, length, n)]
    weights = {"equal": lambda run: [1 / len(run)] * len(run), "start": lambda run: [1.0] + [0.0] * (len(run) - 1)}
    pooled = [sum(w * values[t] for w, t in zip(weights[sigma](run), run)) for run in runs] + [0.0]
    following, found = 0.0, None
    for k in reversed(range(len(runs))):
        delta = float(k == len(runs) - 1) + pooled[k + 1] - pooled[k]
        following = delta + lam * following
        if index in runs[k]:
            found = following
    return found


def segment_borders(index, length, n, lam, seen):
    """Token steps with λ only at the last token of a segment, 1 inside (arXiv 2601.07320)."""
    values = [seen if t > index else 0.0 for t in range(length)] + [0.0]
    following = 0.0
    for t in reversed(range(index, length)):
        delta = float(t == length - 1) + values[t + 1] - values[t]
        following = delta + (lam if t % n == n - 1 else 1.0) * following
    return following


CASES = st.integers(1, 60).flatmap(lambda length: st.tuples(st.integers(0, length - 1), st.just(length)))


@given(CASES, st.integers(1, 70), st.floats(0, 1), st.floats(0, 1))
def test_kept_signal_is_the_advantage(place, n, lam, seen):
    for sigma in ("equal", "start"):
        expected = advantage(*place, n, lam, seen, sigma)
        assert signal_kept(*place, n, lam, seen, sigma) == pytest.approx(expected, abs=1e-9)
    assert signal_kept(*place, n, lam, seen, "start") == pytest.approx(segment_borders(*place, n, lam, seen), abs=1e-9)


@given(CASES, st.integers(2, 20))
def test_macro_actions_and_tokens_keep_the_same_at_break_even(place, n):
    share = break_even(*place, n, 0.95)
    if share < 1:
        assert signal_kept(*place, n, 0.95, share) == pytest.approx(signal_kept(*place, 1, 0.95, share))
        assert signal_kept(*place, n, 0.95, 1.0) < signal_kept(*place, 1, 0.95, 1.0)
    else:
        assert signal_kept(*place, n, 0.95, 1.0) == pytest.approx(1.0)
