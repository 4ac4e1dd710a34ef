"""Policy and value loss: against loops, against token PPO and the bandit, under splits, with garbage on padding."""

import math

import pytest
import reference_macro as ref
import torch

from marlhf_lite.macro import (
    FixedNGram,
    MacroActions,
    gae,
    kl_rewards,
    macro_rewards,
    macro_values,
    policy_loss,
    value_loss,
)

NAN = math.nan
BETA = 0.05
TIGHT = {"rtol": 1e-6, "atol": 1e-6}


def run(loss, x, *rest, **options):
    """Loss, gradient with respect to the first argument, stats."""
    x = x.clone().requires_grad_()
    value, stats = loss(x, *rest, **options)
    value.backward()
    assert value.dim() == 0 and value.dtype == torch.float32 and x.grad.isfinite().all()
    for stat in stats.values():
        assert stat.dim() == 0 and not stat.requires_grad and stat.isfinite() and stat.dtype == torch.float32
    return value.detach(), x.grad, stats


def experience(batch, macro, **options):
    """Advantages and returns of a batch, as in Algorithm 1."""
    rewards = macro_rewards(kl_rewards(batch.old_logprobs, batch.ref_logprobs, batch.mask, BETA), batch.scores, macro)
    return gae(rewards, macro_values(batch.old_values, macro), macro.mask, **options)


def both(batch, advantages, returns, macro, **options):
    """`run` of both losses."""
    policy = run(policy_loss, batch.logprobs, batch.old_logprobs, advantages, macro, **options)
    return policy, run(value_loss, batch.values, batch.old_values, returns, macro, **options)


def setup(seed, **options):
    batch = ref.Batch(seed, **options)
    return batch, MacroActions.from_lengths(batch.parts, batch.T)


# -- against the equations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clip", [0.2, 0.05, None])
@pytest.mark.parametrize("ratio", ["token", "macro", "macro_mean"])
def test_policy_loss_matches_loops(seed, clip, ratio):
    batch, macro = setup(seed)
    advantages = batch.steps()
    loss, grad, stats = run(policy_loss, batch.logprobs, batch.old_logprobs, advantages, macro, clip, ratio)
    leaf, new = batch.leaves(batch.logprobs)
    rows = list(zip(new, batch.rows(batch.old_logprobs), ref.valid(advantages, batch.parts), batch.parts))
    terms = [ref.policy_terms(*row, clip, ratio) for row in rows]
    ref.mean(terms).backward()
    torch.testing.assert_close(loss.double(), ref.mean(terms).detach(), **TIGHT)
    torch.testing.assert_close(grad.double(), leaf.grad, **TIGHT)
    assert (grad[batch.mask] != 0).sum() > 10 and (grad[~batch.mask] == 0).all()

    free = [t.detach() for row in rows for t in ref.policy_terms(*row, None, ratio)]
    kept = [t.detach() for row in terms for t in row]
    logs = [a - b for n, o in zip(batch.rows(batch.logprobs), batch.rows(batch.old_logprobs)) for a, b in zip(n, o)]
    if ratio != "token":
        parts = [p for n in batch.parts for p in n]
        logs = [sum(p) / (len(p) if ratio == "macro_mean" else 1) for p in ref.split(logs, parts)]
    ratios = [math.exp(x) for x in logs]
    share = sum(bool(k > f + 1e-12) for k, f in zip(kept, free)) / len(free)
    assert stats["count"] == len(logs) == len(kept)
    assert stats["clip_fraction"].item() == pytest.approx(share, abs=1e-6)
    assert (share > 0) == (clip is not None)
    kl = sum(r - 1 - x for r, x in zip(ratios, logs)) / len(logs)
    assert stats["approx_kl"].item() == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clip", [0.2, None])
@pytest.mark.parametrize("target, sigma", [("token", "equal"), *(("macro", s) for s in ref.SIGMAS)])
def test_value_loss_matches_loops(seed, clip, target, sigma):
    batch, macro = setup(seed)
    returns = batch.steps()
    loss, grad, stats = run(value_loss, batch.values, batch.old_values, returns, macro, clip, target, sigma)
    leaf, new = batch.leaves(batch.values)
    rows = list(zip(new, batch.rows(batch.old_values), ref.valid(returns, batch.parts), batch.parts))
    terms = [ref.value_terms(*row, clip, target, sigma) for row in rows]
    ref.mean(terms).backward()
    torch.testing.assert_close(loss.double(), ref.mean(terms).detach(), **TIGHT)
    torch.testing.assert_close(grad.double(), leaf.grad, **TIGHT)
    assert (grad[batch.mask] != 0).sum() > 10 and (grad[~batch.mask] == 0).all()

    free = [t for row in rows for t in ref.value_terms(*row, None, target, sigma)]
    kept = [t for row in terms for t in row]
    share = sum(bool(k > f + 1e-12) for k, f in zip(kept, free)) / len(free)
    assert stats["count"] == len(kept)
    assert stats["clip_fraction"].item() == pytest.approx(share, abs=1e-6)
    assert (share > 0) == (clip is not None)


# -- the two ends: token PPO and the bandit ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"gamma": 0.99, "lam": 0.9}, {"lam": 1.0}, {"lam": 0.0}])
def test_n_1_is_token_ppo(seed, options):
    batch = ref.Batch(seed)
    macro = FixedNGram(1)(batch.mask)
    expected = ref.token_ppo(batch, BETA, **options)
    values = macro_values(batch.old_values, macro)
    width = values.shape[1]
    torch.testing.assert_close(values.double(), ref.padded(batch.rows(batch.old_values), width), **TIGHT)
    advantages, returns = experience(batch, macro, **options)
    torch.testing.assert_close(advantages.double(), ref.padded(expected[0], width), **TIGHT)
    torch.testing.assert_close(returns.double(), ref.padded(expected[1], width), **TIGHT)
    for level in ("token", "macro"):
        loss, grad, _ = run(policy_loss, batch.logprobs, batch.old_logprobs, advantages, macro, ratio=level)
        torch.testing.assert_close(loss.double(), expected[2], **TIGHT)
        torch.testing.assert_close(grad.double(), expected[4], **TIGHT)
        loss, grad, _ = run(value_loss, batch.values, batch.old_values, returns, macro, target=level)
        torch.testing.assert_close(loss.double(), expected[3], **TIGHT)
        torch.testing.assert_close(grad.double(), expected[5], **TIGHT)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ratio", ["token", "macro"])
def test_n_infinite_is_the_bandit(seed, ratio):
    batch = ref.Batch(seed, noise=0.1)
    macro = FixedNGram(math.inf)(batch.mask)
    advantages, returns = experience(batch, macro)
    policy, value, policy_grad, value_grad = ref.bandit(batch, BETA, sequence_ratio=ratio == "macro")
    loss, grad, _ = run(policy_loss, batch.logprobs, batch.old_logprobs, advantages, macro, ratio=ratio)
    torch.testing.assert_close(loss.double(), policy, **TIGHT)
    torch.testing.assert_close(grad.double(), policy_grad, **TIGHT)
    assert (grad != 0).any()
    loss, grad, _ = run(value_loss, batch.values, batch.old_values, returns, macro)
    torch.testing.assert_close(loss.double(), value, **TIGHT)
    torch.testing.assert_close(grad.double(), value_grad, **TIGHT)


# -- splits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, math.inf])
def test_the_whole_chain_on_singles_equals_the_batch(n):
    """Segmentation, values, rewards, GAE and losses, one response at a time and cut to its own length."""
    batch = ref.Batch(6)
    macro = FixedNGram(n)(batch.mask)
    advantages, returns = experience(batch, macro)
    full = both(batch, advantages, returns, macro)
    total, sums, grads = macro.token_mask.sum(), [0.0, 0.0], [[], []]
    for i, count in enumerate(batch.counts):
        one = ref.Batch(6)
        for name in ("mask", "logprobs", "old_logprobs", "ref_logprobs", "values", "old_values"):
            setattr(one, name, getattr(one, name)[i : i + 1, :count])
        one.scores = one.scores[i : i + 1]
        alone = FixedNGram(n)(one.mask)
        gains, goals = experience(one, alone)
        steps = alone.mask.shape[1]
        torch.testing.assert_close(gains, advantages[i : i + 1, :steps], rtol=1e-6, atol=1e-6)
        for k, (value, grad, _) in enumerate(both(one, gains, goals, alone, normalizer=total)):
            sums[k] += value
            grads[k].append(torch.nn.functional.pad(grad, (0, batch.T - count)))
    for k in range(2):
        torch.testing.assert_close(sums[k], full[k][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.cat(grads[k]), full[k][1], rtol=1e-6, atol=1e-6)


# -- padding, empty batches, extremes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("level", ["token", "macro"])
def test_garbage_on_padding_changes_no_bit(garbage, level):
    batch, macro = setup(7)
    gains, goals = batch.steps(), batch.steps()

    def filled(x, mask, value):
        return x.masked_fill(~mask, value)

    def both(value):
        tokens = (batch.logprobs, batch.old_logprobs, batch.values, batch.old_values)
        new, old, values, old_values = (filled(x, batch.mask, value) for x in tokens)
        yield run(policy_loss, new, old, filled(gains, macro.mask, value), macro, ratio=level)
        yield run(value_loss, values, old_values, filled(goals, macro.mask, value), macro, target=level)

    for dirty, tidy in zip(both(garbage), both(0.0)):
        assert torch.equal(dirty[0], tidy[0]) and torch.equal(dirty[1], tidy[1])
        assert all(torch.equal(dirty[2][k], tidy[2][k]) for k in tidy[2])


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (3, 4)])
@pytest.mark.parametrize("level", ["token", "macro"])
@pytest.mark.parametrize("normalizer", [None, 0, 10.0])
def test_no_valid_token_is_loss_0_with_zero_gradients(shape, level, normalizer):
    macro = FixedNGram(2)(torch.zeros(shape, dtype=torch.bool))
    x, y = torch.full(shape, NAN), torch.full((shape[0], 0), NAN)
    for loss, option in ((policy_loss, "ratio"), (value_loss, "target")):
        value, grad, stats = run(loss, x, x, y, macro, **{option: level}, normalizer=normalizer)
        assert value == 0 and torch.equal(grad, torch.zeros(shape))
        assert all(stat == 0 for stat in stats.values())


@pytest.mark.parametrize("ratio", ["token", "macro"])
def test_far_log_ratios_do_not_overflow(ratio):
    macro = MacroActions.from_lengths([[1, 1, 2]])
    new = torch.tensor([[0.0, -900.0, 0.0, 0.0]])
    old = torch.tensor([[-900.0, 0.0, -500.0, -500.0]])
    loss, _, _ = run(policy_loss, new, old, torch.tensor([[1.0, 1.0, 1.0]]), macro, ratio=ratio)
    assert loss.item() == pytest.approx(-1.2 * (3 / 4 if ratio == "token" else 2 / 3), abs=1e-6)  # clipped at 1 + ε
    loss, grad, _ = run(policy_loss, new, old, torch.tensor([[-1.0, -1.0, -1.0]]), macro, ratio=ratio)
    assert torch.equal(grad, torch.zeros(1, 4))


def test_clipping_by_hand():
    macro = MacroActions.from_lengths([[1], [1], [1], [1]])
    new, old = torch.tensor([[1.5], [1.5], [0.5], [0.5]]).log(), torch.zeros(4, 1)
    gains = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    loss, grad, stats = run(policy_loss, new, old, gains, macro)
    # a gain is taken up to 1.2 and not beyond; a move against the advantage is never clipped
    assert loss.item() == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    assert grad.flatten().tolist() == pytest.approx([0.0, 1.5 / 4, -0.5 / 4, 0.0])
    assert stats["clip_fraction"] == 0.5
    values, goals = torch.tensor([[1.0], [1.0], [0.1], [-1.0]]), torch.tensor([[2.0], [0.0], [2.0], [-2.0]])
    loss, grad, stats = run(value_loss, values, torch.zeros(4, 1), goals, macro)
    assert loss.item() == pytest.approx((1.8**2 + 1 + 1.9**2 + 1.8**2) / 8)
    assert grad.flatten().tolist() == pytest.approx([0.0, 1 / 4, -1.9 / 4, 0.0])
    assert stats["clip_fraction"] == 0.5


@pytest.mark.parametrize("level", ["token", "macro"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_gives_the_float32_result(dtype, level):
    batch, macro = setup(8)
    gains = batch.steps().to(dtype)
    new, old = batch.logprobs.to(dtype), batch.old_logprobs.to(dtype)
    values, old_values = batch.values.to(dtype), batch.old_values.to(dtype)
    for loss, x, y, option in ((policy_loss, new, old, "ratio"), (value_loss, values, old_values, "target")):
        got, grad, _ = run(loss, x, y, gains, macro, **{option: level})
        expected, expected_grad, _ = run(loss, x.float(), y.float(), gains.float(), macro, **{option: level})
        assert torch.equal(got, expected) and grad.dtype == dtype
        assert torch.equal(grad, expected_grad.to(dtype))


def test_gradients_flow_to_the_first_argument_alone():
    batch, macro = setup(9)
    for loss, new, old in ((policy_loss, "logprobs", "old_logprobs"), (value_loss, "values", "old_values")):
        inputs = [getattr(batch, new), getattr(batch, old), batch.steps()]
        inputs = [x.clone().requires_grad_() for x in inputs]
        loss(*inputs, macro)[0].backward()
        assert inputs[0].grad.abs().sum() > 0 and inputs[1].grad is None and inputs[2].grad is None


@pytest.mark.parametrize("level", ["token", "macro"])
def test_means_over_responses_first(level):
    """Each response counts the same, however long it is; empty ones do not count."""
    batch, macro = setup(5)
    x = batch.steps()
    parts = zip(batch.rows(batch.logprobs), batch.rows(batch.old_logprobs), ref.valid(x, batch.parts), batch.parts)
    expected = ref.mean([ref.policy_terms(*row, 0.2, level) for row in parts], "response")
    loss, _, stats = run(policy_loss, batch.logprobs, batch.old_logprobs, x, macro, 0.2, level, mean="response")
    torch.testing.assert_close(loss.double(), expected, **TIGHT)
    assert stats["count"] == (macro.token_mask if level == "token" else macro.mask).sum()
    parts = zip(batch.rows(batch.values), batch.rows(batch.old_values), ref.valid(x, batch.parts), batch.parts)
    expected = ref.mean([ref.value_terms(*row, 0.2, level) for row in parts], "response")
    loss, *_ = run(value_loss, batch.values, batch.old_values, x, macro, 0.2, level, mean="response")
    assert loss.item() == pytest.approx(expected, rel=1e-6)
