"""One update: losses and gradients against float64 loops over single responses, splits, several steps, safeguards."""

import copy
import math
import statistics
from itertools import chain, pairwise

import pytest
import reference_macro as ref
import torch
from conftest import nudge
from plain_update import (
    BETA,
    NAMES,
    TIGHT,
    cut,
    far,
    learner,
    numbers,
    options,
    plain_grads,
    plain_losses,
    plain_pass,
    record,
    restore,
    trainables,
    update,
)

from marlhf_lite.config.options import MacroConfig
from marlhf_lite.macro import FixedNGram, RandomizedNGram
from marlhf_lite.training.objective import Objective
from marlhf_lite.utils.errors import InputError

CASES = [
    (1, {}, {}),
    (5, {}, {}),
    (math.inf, {}, {}),
    (3, {"ratio": "macro"}, {}),
    (math.inf, {"ratio": "macro", "value_target": "macro"}, {}),
    (3, {"value_target": "macro", "sigma": "position"}, {}),
    (5, {"value_target": "macro", "sigma": "unit"}, {"cliprange_value": 0.0}),
    (3, {"reward_pooling": "mean"}, {"score_clip": 2.5}),
    (
        5,
        {
            "reward_pooling": "mean",
            "sigma": "position_reversed",
            "ratio": "macro",
            "value_target": "macro",
        },
        {},
    ),
    (4, {"rho": 0.7}, {"gamma": 0.9, "lam": 0.5, "objective": "k3"}),
    (3, {"sigma": "start"}, {"objective": "vapo=0.4"}),
    (1, {}, {"objective": "vc_ppo", "lam": 0.7}),
    (3, {"ratio": "macro_mean"}, {"objective": "vc_ppo=0.5, released,vapo=0.4"}),
    (4, {"value_target": "macro", "ratio": "macro"}, {"objective": "released"}),
    (3, {}, {"temperature": 0.6, "logprobs_at_temperature": True}),
]


@pytest.mark.parametrize("n, how, ppo", CASES)
def test_one_update_is_the_equations(moved, batch, n, how, ppo):
    how, ppo = MacroConfig(**how), options(**ppo)
    row, steps = update(moved, batch, ppo, how, n=n)
    (grads, policy), (critic_grads, critic) = steps["policy"][0], steps["critic"][0]
    policy_loss, value_loss, *_ = plain_losses((policy, critic), batch, cut(batch, n), how, ppo)
    assert row["policy_loss"] == pytest.approx(policy_loss.item(), rel=TIGHT, abs=1e-6)
    assert row["value_loss"] == pytest.approx(value_loss.item(), rel=TIGHT)
    assert far(grads, plain_grads(policy_loss, policy)) < TIGHT
    assert far(critic_grads, plain_grads(value_loss, critic)) < TIGHT
    assert row["policy_grad_norm"] == pytest.approx(
        torch.cat([g.flatten() for g in grads]).norm().item(), rel=1e-5
    )


@pytest.mark.parametrize("objective", ["sae", "sae,vc_ppo=0.8", "vapo=0.9,sae"])
def test_lam_at_borders_over_tokens(moved, batch, objective):
    """SAE: every token has its own value and loss term, and λ stands at the last token of a macro action alone.

    So does the critic's own λ; and a λ by length counts macro actions, at whose borders it stands.
    """
    lam_of_ppo = {} if "vapo" in objective else {"lam": 0.6}
    ppo = options(**lam_of_ppo, objective=objective)
    row, steps = update(moved, batch, ppo)
    (grads, policy), (critic_grads, critic) = steps["policy"][0], steps["critic"][0]
    logprobs, values = (numbers(x) for x in plain_pass(policy, critic, batch))
    estimates = []
    for i, lengths in enumerate(cut(batch, 3)):
        theirs = batch.ref_logprobs[i][batch.mask[i]].double().tolist()
        rewards = [-BETA * (a - b) for a, b in zip(logprobs[i], theirs)]
        rewards[-1] += float(batch.scores[i])
        lam = max(1 - 1 / (0.9 * len(lengths)), 0.0) if "vapo" in objective else 0.6
        advantages, returns = ref.gae(rewards, values[i], 1.0, borders(lengths, lam))
        if "vc_ppo" in objective:
            _, returns = ref.gae(rewards, values[i], 1.0, borders(lengths, 0.8))
        estimates.append((advantages, returns))
    given = ((policy, critic), batch, cut(batch, 1), MacroConfig(), ppo)
    policy_loss, value_loss, *_ = plain_losses(*given, made=estimates)
    assert far(grads, plain_grads(policy_loss, policy)) < TIGHT
    assert far(critic_grads, plain_grads(value_loss, critic)) < TIGHT
    # the metrics are those of macro actions, not of single tokens
    lengths = [*chain(*cut(batch, 3))]
    assert row["macro_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert row["macro_actions"] == pytest.approx(len(lengths) / len(batch))


def borders(lengths, lam):
    """λ of each token: at the last one of each macro action, 1 elsewhere."""
    return [lam if j == n - 1 else 1.0 for n in lengths for j in range(n)]


def test_n_1_is_token_level_ppo(moved, batch):
    """A textbook PPO step that knows nothing of macro actions has the same gradients."""
    ppo = options()
    _, steps = update(moved, batch, ppo, n=1)
    (grads, policy), (critic_grads, critic) = steps["policy"][0], steps["critic"][0]
    logprobs, values = plain_pass(policy, critic, batch)
    policy_loss, value_loss, count = 0.0, 0.0, 0
    for i, (ours, guesses) in enumerate(zip(logprobs, values)):
        theirs = batch.ref_logprobs[i][batch.mask[i]].double()
        advantage, following, last = 0.0, 0.0, len(ours) - 1
        for t in reversed(range(len(ours))):
            r = -BETA * (ours[t].item() - theirs[t]) + (
                float(batch.scores[i]) if t == last else 0.0
            )
            guess = guesses[t].item()
            advantage = r + following - guess + 0.95 * advantage
            policy_loss = policy_loss - (ours[t] - ours[t].detach()).exp() * advantage
            value_loss = value_loss + 0.5 * (guesses[t] - (advantage + guess)) ** 2
            following, count = guess, count + 1
    assert far(grads, plain_grads(policy_loss / count, policy)) < TIGHT
    assert far(critic_grads, plain_grads(value_loss / count, critic)) < TIGHT


# -- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [MacroConfig(), MacroConfig(ratio="macro", value_target="macro")])
@pytest.mark.parametrize("ppo", [{}, {"num_ppo_epochs": 2}, {"whiten": True}])
def test_micro_batches_change_nothing(base, sft, rm, moved, batch, how, ppo):
    macro, start, results = (
        RandomizedNGram(seed=1)(batch.mask),
        copy.deepcopy(trainables(moved)),
        [],
    )
    for size in (1, 2, 4, 6):
        restore(moved, start)
        made = learner(moved, options(micro_batch_size=size, **ppo), how)
        steps = record(made)
        torch.manual_seed(0)
        row = made.learn(batch, macro)
        results.append(({name: steps[name][0][0] for name in NAMES}, trainables(moved), row))
    whole = results[-1]
    for grads, weights, row in results[:-1]:
        for name in NAMES:
            assert far(grads[name], whole[0][name]) < TIGHT
            moves = [[w - s for w, s in zip(x[name], start[name])] for x in (weights, whole[1])]
            # Adam's first step is a sign, which rounding may turn where a gradient is ~0
            assert far(*moves) < 2e-3
        assert row == pytest.approx(whole[2], rel=1e-4, abs=1e-5)


def test_an_objective_of_the_users_own_sees_all_responses(moved, batch):
    """Its rewards and estimates may read other responses, and are the same with any micro-batch."""

    class Baseline(Objective):
        def estimate(self, rewards, values, batch):
            return (rewards - batch.rollout.scores.mean()) * batch.steps.mask, rewards

    start, grads = copy.deepcopy(trainables(moved)), []
    for size in (2, 6):
        restore(moved, start)
        made = learner(moved, options(micro_batch_size=size), objective=Baseline)
        steps = record(made)
        made.learn(batch, FixedNGram(3)(batch.mask))
        grads.append(steps["policy"][0][0])
    assert len(batch) == 6 and far(*grads) < TIGHT


# -- several steps on one rollout -------------------------------------------------------------------------------------


def test_second_epoch_keeps_old_values_and_advantages(moved, batch):
    """At both steps the gradients are those of the clipped losses with old log-probabilities from before the first."""
    how, ppo = (
        MacroConfig(),
        options(num_ppo_epochs=2, policy_learning_rate=0.02, critic_learning_rate=0.02),
    )
    row, steps = update(moved, batch, ppo, how)
    old, estimates, parts = None, None, cut(batch, 3)
    for (grads, policy), (critic_grads, critic) in zip(
        steps["policy"], steps["critic"], strict=True
    ):
        losses = plain_losses((policy, critic), batch, parts, how, ppo, old, estimates)
        old, estimates = losses[2:]
        assert far(grads, plain_grads(losses[0], policy)) < 2 * TIGHT
        assert far(critic_grads, plain_grads(losses[1], critic)) < 2 * TIGHT
    assert len(steps["policy"]) == 2 and row["clip_fraction"] > 0


@pytest.mark.parametrize("num_mini_batches, epochs", [(2, 1), (3, 2), (4, 1), (6, 1), (9, 1)])
def test_minibatches_are_optimizer_steps_over_every_response(
    moved, batch, num_mini_batches, epochs
):
    made = learner(
        moved, options(num_mini_batches=num_mini_batches, num_ppo_epochs=epochs, micro_batch_size=6)
    )
    seen = []  # the responses of each pass: the one for old outputs, then the steps

    def keep(_, given):
        seen.append([tuple(ids[attended.bool()].tolist()) for ids, attended in zip(*given[:2])])

    made.models.policy.register_forward_pre_hook(keep)
    steps = record(made)
    made.learn(batch, FixedNGram(3)(batch.mask))
    (whole, *seen), count = seen, min(num_mini_batches, len(batch))
    assert len(steps["policy"]) == len(seen) == count * epochs and len(set(whole)) == len(batch)
    for epoch in range(epochs):
        assert sorted(chain(*seen[epoch * count : (epoch + 1) * count])) == sorted(whole)
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


def test_whitened_advantages(moved, batch):
    """Mean 0 and deviation 1 over the macro actions of the whole update, whatever the micro-batch."""
    how, ppo = MacroConfig(), options(whiten=True, micro_batch_size=2)
    row, steps = update(moved, batch, ppo, how)
    (grads, policy), (_, critic) = steps["policy"][0], steps["critic"][0]
    *_, estimates = plain_losses((policy, critic), batch, cut(batch, 3), how, ppo)
    flat = torch.tensor([x for gains, _ in estimates for x in gains], dtype=torch.float64)
    white = [
        ([(x - flat.mean()) / flat.std(correction=0) for x in gains], returns)
        for gains, returns in estimates
    ]
    loss, *_ = plain_losses((policy, critic), batch, cut(batch, 3), how, ppo, made=white)
    assert far(grads, plain_grads(loss, policy)) < TIGHT
    assert row["advantage_rms"] == pytest.approx(1.0, rel=1e-5)


# -- safeguards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 2])
def test_wrong_reference_is_found_at_the_first_update(roles, batch, epochs):
    nudge(roles.policy, 8, 0.2)
    with pytest.raises(InputError, match="does not start from the reference"):
        learner(roles, options(num_ppo_epochs=epochs), started=False).learn(
            batch, FixedNGram(3)(batch.mask)
        )


@pytest.mark.parametrize("name", NAMES)
def test_dead_optimizer_is_found_at_the_first_update(roles, batch, name):
    made = learner(roles, options(), started=False)
    setattr(made.config, f"{name}_learning_rate", 0.0)
    with pytest.raises(InputError, match=f"moved no weight of the {name}"):
        made.learn(batch, FixedNGram(3)(batch.mask))


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_against_loops(moved, batch):
    # scores are recorded as they were given
    how, ppo = MacroConfig(reward_pooling="mean"), options(score_clip=1.0)
    row, steps = update(moved, batch, ppo, how)
    models, parts = (steps["policy"][0][1], steps["critic"][0][1]), cut(batch, 3)
    with torch.no_grad():
        _, _, (logprobs, values), estimates = plain_losses(models, batch, parts, how, ppo)
    theirs = [batch.ref_logprobs[i][batch.mask[i]].double().tolist() for i in range(len(batch))]
    logs = [[a - b for a, b in zip(x, y)] for x, y in zip(logprobs, theirs)]
    gaps = [[r - v for r, n, v in spread] for spread in map(expand, estimates, parts, values)]
    returns = [[r for r, _, _ in spread] for spread in map(expand, estimates, parts, values)]

    def flat(rows):
        return torch.tensor([*chain(*rows)], dtype=torch.float64)

    tokens, steps_ = sum(map(sum, parts)), sum(map(len, parts))
    expected = {
        "kl_k1": sum(map(sum, logs)) / 6,
        "kl_k3": sum(math.exp(-x) - 1 + x for row in logs for x in row) / 6,
        "score_mean": batch.scores.mean().item(),
        "score_std": batch.scores.std(correction=0).item(),
        "response_length": tokens / 6,
        "eos_rate": batch.ended.float().mean().item(),
        "macro_actions": steps_ / 6,
        "macro_length": tokens / steps_,
        "effective_kl_coef": BETA / (tokens / steps_),
        "explained_variance": 1
        - (flat(gaps).var(correction=0) / flat(returns).var(correction=0)).item(),
        "advantage_norm": sum(math.sqrt(sum(x * x for x in a)) for a, _ in estimates) / 6,
        "q_norm": sum(math.sqrt(sum(x * x for x in q)) for _, q in estimates) / 6,
        "advantage_rms": math.sqrt(sum(x * x for a, _ in estimates for x in a) / steps_),
        "q_rms": math.sqrt(sum(x * x for _, q in estimates for x in q) / steps_),
    }
    # the critic learns what is trained on
    expected |= critic_by_loops(values, batch.scores.clamp(-1.0, 1.0).tolist())
    assert {k: row[k] for k in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def critic_by_loops(values, scores):
    """What the critic knows of the final score, as `critic_metrics` has it."""
    pairs = [(4 * t // len(row), s, v) for row, s in zip(values, scores) for t, v in enumerate(row)]
    explained = {}
    for name, quarters in [("", range(4)), *((f"_q{q + 1}", [q]) for q in range(4))]:
        some = [(s, s - v) for quarter, s, v in pairs if quarter in quarters]
        varies = statistics.pvariance([s for s, _ in some])
        explained[f"score_explained_variance{name}"] = (
            1 - statistics.pvariance([e for _, e in some]) / varies
        )
    jumps = [(b - a) ** 2 for row in values for a, b in pairwise(row)]
    change = [row[-1] - row[0] for row in values]
    seen = statistics.covariance(change, scores) / statistics.variance(scores)
    return explained | {"value_noise": statistics.mean(jumps) ** 0.5, "credit_seen": seen}


def expand(estimate, lengths, values):
    """(return, macro length, value) of every token."""
    spread = [(r, n) for r, n in zip(estimate[1], lengths) for _ in range(n)]
    return [(r, n, v) for (r, n), v in zip(spread, values)]
