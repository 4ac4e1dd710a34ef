"""float16: gradients of TRL's trainers are those of float32, and what they log and clip is as without a scale."""

from dataclasses import replace

import datasets
import pytest
import torch
from small_runs import PROMPTS
from torch import nn
from transformers import Trainer, TrainerCallback

from marlhf_lite.config.commands import DPOCommand, RLOOCommand
from marlhf_lite.config.options import LengthConfig, RewardModelConfig, SFTStageConfig
from marlhf_lite.extras.baselines.dpo import dpo_trainer
from marlhf_lite.extras.baselines.rloo_grpo import SampledReward, group_trainer
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.loading import load_base, load_policy, new_reward_model
from marlhf_lite.training import reward_model as rm_module
from marlhf_lite.training import sft as sft_module
from marlhf_lite.training import trl_trainers
from marlhf_lite.training.optimizer import HALF_LOSS_SCALE, loss_scale
from marlhf_lite.training.trl_trainers import EvenPairs

ROWS = datasets.Dataset.from_list(
    [{"prompt": x, "chosen": f"{x} it is", "rejected": "no, never"} for x in PROMPTS]
)
ALL, LENGTHS = len(ROWS), LengthConfig(max_response_length=8)


def gradients(model):
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def adapter_gradient(model):
    """As one vector, without a score head's, which has not gone through the base."""
    return torch.cat(
        [gradient.flatten() for name, gradient in gradients(model).items() if "lora_" in name]
    )


class Watch(TrainerCallback):
    """Keeps the gradients of a step, as the optimizer gets them, and its row of the log."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.adapter, self.norm = (
            adapter_gradient(model),
            nn.utils.get_total_norm([*gradients(model).values()]),
        )

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.row = logs if "loss" in logs else self.row


def watched(trainer, **_):
    trainer.add_callback(seen := Watch())
    trainer.train()
    return seen


def train(stage, base, sft, tokenizer, folder):
    if stage == "sft":
        config = SFTStageConfig(sft_epochs=1, sft_batch_size=ALL)
        return sft_module.train_sft(
            load_policy(base, sft), tokenizer, ROWS, config, LENGTHS, folder
        )
    if stage == "rm":
        config = RewardModelConfig(rm_epochs=1, rm_batch_size=ALL)
        return rm_module.train_reward_model(
            new_reward_model(base, sft), tokenizer, ROWS, config, LENGTHS, folder
        )
    command = DPOCommand(dpo_epochs=1, dpo_batch_size=ALL, max_response_length=8)
    return watched(dpo_trainer(load_policy(base, sft), tokenizer, ROWS, command, folder))


@pytest.mark.parametrize(
    ("stage", "many"),
    [("sft", 1), ("sft", 10**5), ("rm", 1), ("rm", 10**6), ("dpo", 1), ("dpo", 10**5)],
)
def test_a_step_in_float16_is_that_of_float32(
    tiny, sft, tokenizer, tmp_path, monkeypatch, stage, many
):
    """Large gradients, which are clipped; and rows among `many` times as many, whose gradients float16 has not."""
    count = Trainer.get_batch_samples  # what losses are divided by: tokens in SFT, pairs elsewhere

    def counted(trainer, *args):
        passes, tokens = count(trainer, *args)
        return passes, tokens and tokens * many

    def weighed(trainer, *args):
        passes, tokens = super(EvenPairs, trainer).get_batch_samples(*args)
        trainer.pairs_a_pass = ALL * many
        return passes, tokens

    monkeypatch.setattr(Trainer, "get_batch_samples", counted)
    monkeypatch.setattr(EvenPairs, "get_batch_samples", weighed)
    monkeypatch.setattr(trl_trainers, "run_trainer", watched)
    bases = [load_base(replace(tiny, dtype=dtype)) for dtype in ("float16", "float32")]
    ours, theirs = (train(stage, base, sft, tokenizer, tmp_path) for base in bases)
    assert torch.cosine_similarity(ours.adapter, theirs.adapter, dim=0) > 0.99
    for name in ("loss", "grad_norm"):
        assert ours.row[name] == pytest.approx(theirs.row[name], rel=0.02)
    assert float(ours.norm) == pytest.approx(min(theirs.row["grad_norm"], 1.0), rel=0.02)


def test_rloo_in_float16_has_the_gradient_of_float32(tiny, sft, tokenizer, tmp_path):
    """Scores that differ little make gradients that float16 has not; the reference is the equation in float32."""
    half, rollouts = load_policy(load_base(replace(tiny, dtype="float16")), sft), []
    few = {"batch_size": 6, "num_generations": 2, "max_response_length": 6, "checkpoint_every": 0}
    command = RLOOCommand(updates=1, kl_coef=0.0, temperature=1.0, **few)

    def reward(rollout):
        rollouts.append(rollout)
        return 1e-6 * torch.arange(6.0)

    scored = SampledReward(reward, half, tokenizer, command)
    seen = watched(group_trainer(half, tokenizer, PROMPTS, scored, command, tmp_path))
    policy, rollout = PolicyModel(load_policy(load_base(tiny), sft)), rollouts[0]
    logprobs = (
        policy(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[0] * rollout.mask
    )
    # score less that of the other response to the prompt
    advantages = 1e-6 * torch.tensor([-1.0, 1.0] * 3)
    (-(advantages * logprobs.sum(1)).mean()).backward()
    expected = adapter_gradient(policy)
    assert torch.cosine_similarity(seen.adapter, expected, dim=0) > 0.99
    assert float(seen.norm / expected.norm()) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "compute", "scale"),
    [
        (torch.float32, None, 1.0),
        (torch.bfloat16, torch.bfloat16, 1.0),
        (torch.float16, None, HALF_LOSS_SCALE),
        (torch.float32, torch.float16, HALF_LOSS_SCALE),
    ],
)
def test_what_computes_in_float16_has_a_scale(dtype, compute, scale):
    """Weights do, and layers of 4 bits by their `compute_dtype`, as bitsandbytes calls it, beside float32 weights."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    model[1].compute_dtype = compute
    assert loss_scale(model) == scale
