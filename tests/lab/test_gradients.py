"""Gradients of estimators: against autograd by hand, the true gradient by enumeration, and closed forms; a moment."""

import copy
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import PROMPTS as TEXTS
from conftest import fails
from small_runs import batches, build
from test_credit import END, LIMIT, WORTH, Letters, policy, reward
from torch import nn

from marlhf_lab.credit.diagnosis import LADDER, Sizes, main, measure, read_options
from marlhf_lab.credit.gradients import (
    REFERENCE,
    Estimator,
    compare_gradients,
    leave_one_out,
    policy_gradients,
    preset_estimator,
    sample_replicates,
    total_returns,
)
from marlhf_lab.studies.results import rounded
from marlhf_lite.config.options import PPOTrainerConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import PolicyModel, PPOModels, position_ids
from marlhf_lite.training.ppo import PPOTrainer

__all__ = ["policy"]  # the fixture


class Guess(nn.Module):
    """A critic whose values follow from token ids alone."""

    def __init__(self):
        super().__init__()
        self.of_token = nn.Parameter(torch.tensor([0.0, 0.0, 0.4, -0.8, 0.3]))

    def forward(self, tokens, attention_mask, length=None):
        return self.of_token[tokens]


PROMPTS = ["c", "cd", "ede", "d", "ec", "dd"]


@pytest.fixture
def trainer(policy):
    """PPO of all weights of the small policy, at temperature 1, without KL."""
    models = PPOModels(PolicyModel(copy.deepcopy(policy.model)), policy, None, Guess())
    sampling = {"max_response_length": LIMIT, "temperature": 1.0, "top_k": 0}
    config = PPOTrainerConfig(batch_size=6, kl_coef=0.0, lam=1.0, n="1", **sampling)
    return PPOTrainer(models, Letters(), PROMPTS, reward, FixedNGram(1), config)


def estimator(trainer, n=1, **changes):
    return Estimator(replace(trainer.config, n=str(n), **changes), FixedNGram(n))


def true_gradient(trainer):
    """Of the mean score over the prompts, by enumeration of all responses."""
    model, total = trainer.models.policy.model, 0.0
    for prompt, length in itertools.product(PROMPTS, range(1, LIMIT + 1)):
        for row in itertools.product(range(5), repeat=length):
            if END in row[:-1] or (length < LIMIT and row[-1] != END):
                continue
            ids = torch.tensor([Letters()([prompt])["input_ids"][0] + list(row)])
            logits = model(ids, position_ids=position_ids(torch.ones_like(ids))).logits[
                0, -length - 1 : -1
            ]
            p = logits.log_softmax(-1)[range(length), list(row)].sum().exp()
            total = total + p * sum(WORTH[place, token].item() for place, token in enumerate(row))
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(total, trainer.parameters["policy"])]
    )


def test_the_reference_and_lambda_1_point_along_the_true_gradient(trainer):
    torch.manual_seed(0)
    rollout = sample_replicates(trainer, PROMPTS, 120)
    own = {"MC": estimator(trainer), "short": estimator(trainer, lam=0.0)}
    gradients = policy_gradients(trainer, rollout, 120, own, progress="")
    truth = -true_gradient(trainer).expand(120, -1)  # of a loss
    for name in ("MC", REFERENCE):
        found = torch.nn.functional.cosine_similarity(gradients[name].mean(0), truth[0], dim=0)
        assert found > 0.95, name
    found = compare_gradients(gradients["MC"], gradients[REFERENCE])
    assert found.direction.low < 1 < found.direction.high + 0.02
    assert found.batch.high < found.direction.mean and found.noise.mean > 0
    assert compare_gradients(gradients["short"], gradients[REFERENCE]).direction.mean < 0.8


def test_gradients_are_those_of_the_loss(moved, tokenizer):
    trainer = build(moved, tokenizer, kl_coef=0.3, micro_batch_size=2, batch_size=4)
    torch.manual_seed(0)
    rollout = sample_replicates(trainer, trainer.prompts[:4], 4)
    own = {"n=2": Estimator(replace(trainer.config, n="2", reward_pooling="mean"), FixedNGram(2))}
    gradients = policy_gradients(trainer, rollout, 4, own, progress="")
    # The mean of all replicates is the gradient of one loss over all responses.
    objective, outputs = own["n=2"].objective, trainer.compute_outputs(rollout)
    batch = objective.batch(rollout, FixedNGram(2)(rollout.mask))
    old = objective.advantages(batch, outputs)
    loss, _ = objective.losses(batch, outputs, old, objective.counts(batch))
    parameters = trainer.parameters["policy"]
    whole = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]
    )
    assert (
        torch.allclose(gradients["n=2"].mean(0), whole, atol=1e-6, rtol=1e-4)
        and whole.norm() > 1e-3
    )
    # RLOO by hand: the log-probabilities of a response times what it earns more than the others to its prompt.
    kl = (outputs.logprobs.detach() - rollout.ref_logprobs).masked_fill(~rollout.mask, 0).sum(1)
    earned = (rollout.scores - 0.3 * kl).reshape(4, 4)
    assert torch.allclose(earned.flatten(), total_returns(trainer, rollout), atol=1e-5)
    paid_by_turn = replace(
        rollout, turn_rewards=torch.stack([rollout.scores / 4, rollout.scores * 3 / 4], 1)
    )
    assert torch.allclose(earned.flatten(), total_returns(trainer, paid_by_turn), atol=1e-5)
    others = torch.stack([earned[[j for j in range(4) if j != k]].mean(0) for k in range(4)])
    assert torch.allclose(leave_one_out(earned), earned - others, atol=1e-6)
    loss = -(outputs.logprobs.sum(1) * (earned - others).flatten()).sum() / rollout.mask.sum()
    whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    assert torch.allclose(gradients[REFERENCE].mean(0), whole, atol=1e-6, rtol=1e-4)


def test_presets_of_the_ladder(trainer):
    own = {
        name: preset_estimator(name, trainer.config)
        for name in ("E0", "E1", "E2", "E3", "E4", "E5", "MC", "VC")
    }
    assert [own[name].config.lam for name in ("E0", "E1", "MC")] == [0.95, 0.98979, 1.0]
    assert own["E4"].rule == FixedNGram(5) and own["E3"].config.sigma == "start"
    assert all(one.config.temperature == 1 for one in own.values()), (
        "what the preset does not name stays"
    )
    torch.manual_seed(0)
    gradients = policy_gradients(
        trainer, sample_replicates(trainer, PROMPTS, 4), 4, own, progress=""
    )
    # Responses here have at most 3 tokens: borders after 5 never come, so these are Monte-Carlo returns.
    assert torch.allclose(gradients["E2"], gradients["MC"], atol=1e-6)
    assert not torch.allclose(gradients["E0"], gradients["MC"], atol=1e-3)
    # Without KL its pooling is no difference.
    assert torch.equal(gradients["E4"], gradients["E5"])
    fails(lambda: preset_estimator("E9", trainer.config), "estimator E9: unknown preset")


def made_up(k=40, width=300, noise=1.0, angle=0.0, seed=0):
    """Replicates around two directions of unit length, `angle` apart."""
    generator, axes = torch.Generator().manual_seed(seed), torch.eye(width)
    other = np.cos(angle) * axes[0] + np.sin(angle) * axes[1]
    return [
        x + noise / width**0.5 * torch.randn(k, width, generator=generator)
        for x in (axes[0], other)
    ]


@pytest.mark.parametrize("angle", [0.0, 0.6, 1.5])
def test_cosines_of_noisy_gradients_have_no_bias(angle):
    found = [compare_gradients(*made_up(noise=3.0, angle=angle, seed=seed)) for seed in range(20)]
    directions = np.array([x.direction.mean for x in found])
    assert directions.mean() == pytest.approx(np.cos(angle), abs=0.04)
    assert np.mean([x.direction.low <= np.cos(angle) <= x.direction.high for x in found]) >= 0.7
    assert np.mean([x.kept.mean for x in found]) == pytest.approx(np.cos(angle), abs=0.04)
    assert np.mean([x.noise.mean for x in found]) == pytest.approx(9, rel=0.1)
    assert np.mean([x.batch.mean for x in found]) == pytest.approx(
        np.cos(angle) / 10**0.5, abs=0.02
    )


def test_comparison_of_a_gradient_with_itself_order_scale_and_batch():
    one, other = made_up(noise=2.0, angle=0.5)
    assert compare_gradients(one, one).direction[:3] == pytest.approx((1, 1, 1))
    found, order = compare_gradients(one, other), torch.randperm(40)
    again = compare_gradients(7 * one[order], 0.1 * other[order])
    same = [
        [getattr(x, name).mean for name in ("direction", "batch", "noise")] for x in (found, again)
    ]
    assert same[0] == pytest.approx(same[1], rel=1e-4)
    assert again.kept.mean == pytest.approx(70 * found.kept.mean, rel=1e-4)
    assert compare_gradients(0.3 * one, one).kept[:3] == pytest.approx((0.3, 0.3, 0.3))
    half = compare_gradients(one, other, batch_share=0.5)
    assert (
        half.noise.mean == pytest.approx(2 * found.noise.mean) and half.direction == found.direction
    )
    assert half.batch.mean < found.batch.mean


# -- a moment of a run measured ---------------------------------------------------------------------------------------


SMALL = Sizes(prompts=4, continuations=4, alternatives=2, ranked=3, replicates=4)


def test_a_moment_holds_what_a_lesson_reads_and_disturbs_nothing(moved, tokenizer):
    trainer = build(moved, tokenizer, length=8, top_k=0, kl_coef=0.1)
    weights = [
        p.detach().clone() for p in (*trainer.parameters["policy"], *trainer.parameters["critic"])
    ]
    before = torch.random.get_rng_state()
    found = json.loads(json.dumps(rounded(measure(trainer, TEXTS[:4], SMALL))))
    assert torch.equal(before, torch.random.get_rng_state())
    now = (*trainer.parameters["policy"], *trainer.parameters["critic"])
    assert all(torch.equal(x, y) and y.grad is None for x, y in zip(weights, now, strict=True))
    assert set(found["gradients"]) == {*LADDER, "RLOO"} and len(found["explained"]) == 4
    assert set(found["gradients"]["E0"]) == {"kept", "direction", "batch", "noise"}
    assert (
        len(found["cuts"]) == len(found["explainable"]) == 3
        and found["ranking"]["alternatives"] == 2
    )
    again = measure(trainer, TEXTS[:4], SMALL)
    assert json.loads(json.dumps(rounded(again))) == found
    # in the middle of a run, where the policy may differ from the reference
    trainer.state.updates_done = 1
    trainer.update(next(batches(trainer)))
    assert measure(trainer, TEXTS[:4], SMALL)["credit_seen"] != again["credit_seen"]


def test_options_are_those_of_the_study_main(capsys):
    options = read_options(["--seed", "3", "--kl_coef", "0.1"])
    assert (options.updates, options.critic_learning_rate, options.kl_coef) == (30, 0.003, 0.1)
    assert options.seed == 3
    assert main(["--sft", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("diagnosis: --sft nowhere: no adapter there") and error.count("\n") == 1
