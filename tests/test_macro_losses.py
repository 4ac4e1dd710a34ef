"""Policy and value loss: against loops, with garbage on padding, without tokens, at extremes."""

import math

import pytest
import reference_macro as ref
import torch

from marlhf_lite.macro import FixedNGram, MacroActions, policy_loss, value_loss

NAN = math.nan
TIGHT = {"rtol": 1e-6, "atol": 1e-6}


def run(loss, x, *rest, **options):
    """Loss, gradient with respect to the first argument, stats; no other argument gets a gradient."""
    x, *others = (y.clone().requires_grad_() for y in (x, *rest) if isinstance(y, torch.Tensor))
    value, stats = loss(x, *others, *rest[len(others) :], **options)
    value.backward()
    assert all(y.grad is None for y in others)
    assert value.dim() == 0 and value.dtype == torch.float32 and x.grad.isfinite().all()
    for stat in stats.values():
        assert (
            stat.dim() == 0
            and not stat.requires_grad
            and stat.isfinite()
            and stat.dtype == torch.float32
        )
    return value.detach(), x.grad, stats


def setup(seed, **options):
    batch = ref.Batch(seed, **options)
    return batch, MacroActions.from_starts(ref.starts(batch.parts, batch.mask), batch.mask)


# -- against the equations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clip", [0.2, 0.05, None])
@pytest.mark.parametrize("ratio", ["token", "macro", "macro_mean"])
@pytest.mark.parametrize("mean", ["token", "response"])
def test_policy_loss_matches_loops(seed, clip, ratio, mean):
    """Means over all terms, or over responses first, where empty ones do not count."""
    batch, macro = setup(seed)
    advantages, how = batch.steps(), {"clip": clip, "ratio": ratio, "mean": mean}
    loss, grad, stats = run(
        policy_loss, batch.logprobs, batch.old_logprobs, advantages, macro, **how
    )
    leaf, new = batch.leaves(batch.logprobs)
    rows = list(
        zip(new, batch.rows(batch.old_logprobs), ref.valid(advantages, batch.parts), batch.parts)
    )
    terms = [ref.policy_terms(*row, clip, ratio) for row in rows]
    expected = ref.mean(terms, mean)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), **TIGHT)
    torch.testing.assert_close(grad.double(), leaf.grad, **TIGHT)
    assert (grad[batch.mask] != 0).sum() > 10 and (grad[~batch.mask] == 0).all()

    free = [t.detach() for row in rows for t in ref.policy_terms(*row, None, ratio)]
    kept = [t.detach() for row in terms for t in row]
    logs = [
        a - b
        for n, o in zip(batch.rows(batch.logprobs), batch.rows(batch.old_logprobs))
        for a, b in zip(n, o)
    ]
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
@pytest.mark.parametrize("mean", ["token", "response"])
def test_value_loss_matches_loops(seed, clip, target, sigma, mean):
    batch, macro = setup(seed)
    returns, how = batch.steps(), {"clip": clip, "target": target, "sigma": sigma, "mean": mean}
    loss, grad, stats = run(value_loss, batch.values, batch.old_values, returns, macro, **how)
    leaf, new = batch.leaves(batch.values)
    rows = list(
        zip(new, batch.rows(batch.old_values), ref.valid(returns, batch.parts), batch.parts)
    )
    terms = [ref.value_terms(*row, clip, target, sigma) for row in rows]
    expected = ref.mean(terms, mean)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), **TIGHT)
    torch.testing.assert_close(grad.double(), leaf.grad, **TIGHT)
    assert (grad[batch.mask] != 0).sum() > 10 and (grad[~batch.mask] == 0).all()

    free = [t for row in rows for t in ref.value_terms(*row, None, target, sigma)]
    kept = [t for row in terms for t in row]
    share = sum(bool(k > f + 1e-12) for k, f in zip(kept, free)) / len(free)
    assert stats["count"] == len(kept)
    assert stats["clip_fraction"].item() == pytest.approx(share, abs=1e-6)
    assert (share > 0) == (clip is not None)


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
        yield run(
            value_loss, values, old_values, filled(goals, macro.mask, value), macro, target=level
        )

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
    # clipped at 1 + ε
    assert loss.item() == pytest.approx(-1.2 * (3 / 4 if ratio == "token" else 2 / 3), abs=1e-6)
    loss, grad, _ = run(
        policy_loss, new, old, torch.tensor([[-1.0, -1.0, -1.0]]), macro, ratio=ratio
    )
    assert torch.equal(grad, torch.zeros(1, 4))


@pytest.mark.parametrize("level", ["token", "macro"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_gives_the_float32_result(dtype, level):
    batch, macro = setup(8)
    gains = batch.steps().to(dtype)
    new, old = batch.logprobs.to(dtype), batch.old_logprobs.to(dtype)
    values, old_values = batch.values.to(dtype), batch.old_values.to(dtype)
    for loss, x, y, option in (
        (policy_loss, new, old, "ratio"),
        (value_loss, values, old_values, "target"),
    ):
        got, grad, _ = run(loss, x, y, gains, macro, **{option: level})
        expected, expected_grad, _ = run(
            loss, x.float(), y.float(), gains.float(), macro, **{option: level}
        )
        assert torch.equal(got, expected) and grad.dtype == dtype
        assert torch.equal(grad, expected_grad.to(dtype))
