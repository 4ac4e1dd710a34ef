"""PastMean and Fitted of examples/objectives.py, against float64 loops, and what macro actions are without a critic."""

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference_macro as ref
import torch
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lab.credit.gradient_signal import token_advantages
from marlhf_lite.config.options import PPOTrainerConfig
from marlhf_lite.macro import MacroActions
from marlhf_lite.training.experience import Batch
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.rollout import Rollout

PAST = 5


@pytest.fixture(scope="module")
def ours():
    """Their module."""
    return SimpleNamespace(
        **runpy.run_path(str(Path(__file__).parents[2] / "examples" / "objectives.py"))
    )


def estimate(kind, rewards, values, mask, **options):
    """Advantages and returns [B, S] from rewards and values of the S tokens that are valid by `mask` [B, T]."""
    steps, width = MacroActions.from_starts(mask, mask).single_tokens, rewards.shape[1]
    wide = (torch.nn.functional.pad(x, (0, mask.shape[1] - width)) for x in (rewards, values))
    found = kind(PPOTrainerConfig(n="1", **options)).estimate(*wide, Batch(None, steps, steps))
    return [x[:, :width] for x in found]


def past_mean(values, rewards, turns, gamma):
    """Loops: each earlier value of the turn, less the rewards since then, discounted back to the token."""
    means, start = [], 0
    for length in turns:
        for t in range(start, start + length):
            told = []
            for back in range(min(PAST, t - start + 1)):
                left = values[t - back]
                for reward in rewards[t - back : t]:
                    left = (left - reward) / gamma
                told.append(left)
            means.append(sum(told) / len(told))
        start += length
    return means


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(4))  # odd ones: responses in turns
def test_both_are_those_of_loops(ours, seed, gamma):
    data = ref.Batch(seed)
    single = [[1] * n for n in data.counts]
    rewards, values = data.steps(single).nan_to_num(), data.steps(single).nan_to_num()
    pairs = [ref.valid(x, single) for x in (rewards, values)]
    options = {"gamma": gamma, "lam": 0.8}
    past, fitted = (
        estimate(kind, rewards, values, data.mask, **options)
        for kind in (ours.PastMean, ours.Fitted)
    )
    returns, columns = [], []
    for rs, vs, turns in zip(*pairs, data.turns, strict=True):
        _, q = ref.gae(rs, vs, gamma, 0.8)
        returns.append(np.array(q))
        columns.append(
            np.array([[1.0] * len(vs), vs, past_mean(vs, rs, turns, gamma)]).T.reshape(-1, 3)
        )
    for row, (q, x) in enumerate(zip(returns, columns, strict=True)):
        others = [i for i in range(data.B) if i != row]
        best = np.linalg.lstsq(
            *(np.concatenate([parts[i] for i in others]) for parts in (columns, returns)),
            rcond=None,
        )
        valid = slice(0, len(q))
        assert past[0][row, valid].tolist() == pytest.approx((q - x[:, 2]).tolist(), abs=1e-4)
        assert fitted[0][row, valid].tolist() == pytest.approx((q - x @ best[0]).tolist(), abs=1e-4)
        assert (
            fitted[1][row, valid].tolist()
            == past[1][row, valid].tolist()
            == pytest.approx(q.tolist(), abs=1e-4)
        )


def test_a_fit_without_others_or_without_differences(ours):
    """One response has no others to be fitted on; values that are all equal leave the mean of the others' returns."""
    mask = torch.ones(1, 4, dtype=torch.bool)
    rewards = torch.tensor([[0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 5.0]])
    alone, _ = estimate(ours.Fitted, rewards[:1], torch.zeros(1, 4), mask, lam=1.0)
    assert alone.tolist() == [[2.0] * 4]
    for value in (0.0, 0.3):
        both, _ = estimate(
            ours.Fitted, rewards, torch.full((2, 4), value), mask.expand(2, 4), lam=1.0
        )
        assert both.tolist() == [
            pytest.approx([-3.0] * 4, abs=1e-5),
            pytest.approx([3.0] * 4, abs=1e-5),
        ]


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.integers(1, 5))
def test_the_expected_gradient_stays(ours, seed, lam, turn):
    """Six tokens of two kinds, all 64 answers, in turns of so many: any critic, any reward of each token."""
    rng = np.random.default_rng(seed)
    prefixes = [p for n in range(7) for p in itertools.product((0, 1), repeat=n)]
    chance, value, reward = (dict(zip(prefixes, rng.normal(size=len(prefixes)))) for _ in range(3))
    chance = {p: 1 / (1 + np.exp(-x)) for p, x in chance.items()}  # that a 1 follows
    answers = list(itertools.product((0, 1), repeat=6))
    values, rewards = (torch.zeros(64, 6) for _ in range(2))
    weights, slopes = np.ones(64), np.zeros((64, 6))
    for row, answer in enumerate(answers):
        for t, token in enumerate(answer):
            values[row, t], rewards[row, t] = value[answer[:t]], reward[answer[: t + 1]]
            p = chance[answer[:t]]
            weights[row] *= p if token else 1 - p
            slopes[row, t] = token - p  # of log π, by the token's logit
    gaps = [i for i in range(6 + 6 // turn) if (i + 1) % (turn + 1)][:6]
    mask = torch.zeros(64, gaps[-1] + 1, dtype=torch.bool)
    mask[:, gaps] = True
    found = {}
    for kind in (Objective, ours.PastMean):
        advantages = estimate(kind, rewards, values, mask, lam=lam)[0].double().numpy()
        found[kind] = {
            (t, p): sum(
                weights[i] * advantages[i, t] * slopes[i, t]
                for i in range(64)
                if answers[i][:t] == p
            )
            for t in range(6)
            for p in itertools.product((0, 1), repeat=t)
        }
    ppo, past = found.values()
    assert past == pytest.approx(ppo, abs=2e-5)


# -- what macro actions are with a constant critic ---------------------------------------------------------------------


@pytest.fixture(params=["equal lengths", "ragged", "turns"])
def responses(request):
    """Scored responses without a prompt, and without text: nothing reads it."""
    masks = {
        "equal lengths": torch.ones(6, 33).bool(),
        "ragged": ref.Batch(0).mask,
        "turns": ref.Batch(1).mask,
    }
    mask = masks[request.param]
    scores = torch.randn(len(mask), generator=torch.Generator().manual_seed(2))
    texts, tokens = [""] * len(mask), torch.zeros(mask.shape, dtype=torch.long)
    return Rollout(
        texts,
        texts,
        tokens,
        mask.long(),
        mask,
        torch.ones(len(mask), dtype=torch.bool),
        scores=scores,
    )


@pytest.mark.parametrize(("n", "lam"), [(5, 0.95), (3, 0.8), (20, 0.95), (5, 1.0), (5, 0.0)])
def test_without_a_critic_macro_actions_are_sae(responses, n, lam):
    """A constant critic, no KL in the reward: the action's value, its start's, and SAE give the same."""
    values = torch.full(responses.mask.shape, 0.3)
    pooled = token_advantages(responses, values, n, lam)
    assert pooled.abs().max() > 0.1
    for same in ({"sigma": "start"}, {"objective": "sae"}):
        assert torch.allclose(
            token_advantages(responses, values, n, lam, **same), pooled, rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize(("n", "lam"), [(5, 0.95), (3, 0.8), (20, 0.95)])
@pytest.mark.parametrize("T", [60, 64, 65, 66])
def test_without_a_critic_they_are_a_longer_lambda(n, lam, T):
    """λ^((i + 1 − q) / n) times PPO's with λ^(1/n): i is the place in the action, q the length of the last action."""
    mask, one = torch.ones(1, T, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
    rollout = Rollout([""], [""], mask.long(), mask.long(), mask, one, scores=torch.tensor([1.7]))
    values = torch.full((1, T), 0.3)
    macro = token_advantages(rollout, values, n, lam)[0].tolist()
    longer = token_advantages(rollout, values, 1, lam ** (1 / n))[0].tolist()
    q = (T - 1) % n + 1
    expected = [lam ** ((t % n + 1 - q) / n) * advantage for t, advantage in enumerate(longer)]
    assert macro == pytest.approx(expected, rel=1e-4)
