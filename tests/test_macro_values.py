"""Values and rewards of macro actions."""

import math

import pytest
import reference_macro as ref
import torch

from marlhf_lite.macro import MacroActions, Whole, kl_rewards, macro_rewards, macro_values

NAN = math.nan


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rho": 0.9},
        {"rho": 0.0},
        {"pooling": "mean"},
        {"pooling": "mean", "sigma": "unit"},
        {"pooling": "mean", "sigma": "position"},
        {"pooling": "mean", "sigma": "position_reversed"},
    ],
)
def test_rewards_match_loops(seed, options):
    batch = ref.Batch(seed)
    macro = MacroActions.from_lengths(batch.parts, batch.T)
    r = kl_rewards(batch.old_logprobs, batch.ref_logprobs, batch.mask, 0.05)
    scores = batch.scores.masked_fill(torch.tensor(batch.counts) == 0, NAN)  # the score of nothing is not used
    got = macro_rewards(r, scores, macro, **options)
    rows = zip(batch.rows(batch.old_logprobs), batch.rows(batch.ref_logprobs), batch.scores.double(), batch.parts)
    expected = [ref.rewards([-0.05 * (a - b) for a, b in zip(x, y)], s, n, **options) for x, y, s, n in rows]
    torch.testing.assert_close(got.double(), ref.padded(expected, got.shape[1]), rtol=1e-6, atol=1e-6)


def test_rewards_by_hand_and_argument_order():
    macro = MacroActions.from_lengths([[2, 3]])
    r, score = torch.tensor([[1.0, 2.0, 3.0, 4.0, 8.0]]), torch.tensor([100.0])
    assert macro_rewards(r, score, macro).tolist() == [[3.0, 115.0]]
    assert macro_rewards(r, score, macro, "sum", 0.5).tolist() == [[2.0, 107.0]]
    assert macro_rewards(r, score, macro, "mean").tolist() == [[1.5, 105.0]]
    assert macro_rewards(r, score, macro, "mean", 1.0, "unit").tolist() == [[2.0, 108.0]]
    assert macro_rewards(r, score, Whole()(torch.ones(1, 5).bool())).tolist() == [[118.0]]


def test_kl_rewards():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    new, old = torch.full((2, 3), NAN), torch.full((2, 3), math.inf)
    new[0, :2], old[0, :2] = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_rewards(new, old, mask, 0.1).tolist() == [pytest.approx([-0.05, 0.1, 0.0]), [0.0, 0.0, 0.0]]
    assert (kl_rewards(new, old, mask, 0) == 0).all()
    assert kl_rewards(new.bfloat16(), old.double(), mask, 0.1).dtype == torch.float32


def test_padding_garbage_reaches_no_gradient():
    batch = ref.Batch(2)
    macro = MacroActions.from_lengths(batch.parts, batch.T)
    values = batch.values.clone().requires_grad_()
    logprobs = batch.logprobs.clone().requires_grad_()
    r = kl_rewards(logprobs, batch.ref_logprobs, batch.mask, 0.1)
    loss = macro_values(values, macro, "position").sum() + macro_rewards(r, batch.scores, macro, rho=0.5).sum()
    loss.backward()
    assert loss.isfinite()
    for leaf in (values, logprobs):
        assert leaf.grad.isfinite().all() and (leaf.grad[~batch.mask] == 0).all() and (leaf.grad[batch.mask] != 0).any()
