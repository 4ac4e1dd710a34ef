"""The examples, and what README and guide print, run as they stand; the single file makes the trainer's updates."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import nudge
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from marlhf_lab.corpora import make_rows
from marlhf_lite.config.options import ModelConfig, PPOTrainerConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.loading import EMBEDDED_MODEL, build_models, load_base, model_path
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Sampling, generate

SCRIPT = Path(__file__).parents[1] / "examples" / "ma_ppo_single_file.py"
LENGTH = 48  # some responses of the embedded model are shorter, others are cut


@pytest.fixture(scope="module")
def single_file():
    spec = importlib.util.spec_from_file_location("ma_ppo_single_file", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An SFT model and a reward model, all weights of each."""
    sft, rm = (tmp_path_factory.mktemp(name) for name in ("sft", "rm"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_pretrained(model_path(EMBEDDED_MODEL)).save_pretrained(sft)
    reward_model = AutoModelForSequenceClassification.from_pretrained(sft, num_labels=1)
    nudge(reward_model, seed=1, size=0.01).save_pretrained(rm)
    return sft, rm


# ratios and values are clipped from 2 passes on
@pytest.mark.parametrize(("n", "epochs"), [(1, 1), (5, 1), (5, 3)])
def test_two_updates_are_those_of_the_trainer(
    single_file, folders, pad_is_eos, monkeypatch, n, epochs
):
    monkeypatch.setattr(single_file, "EPOCHS", epochs)
    monkeypatch.setattr(single_file, "MAX_RESPONSE", LENGTH)
    monkeypatch.setattr(single_file, "MAX_GRAD_NORM", 0.1)  # less than the norms are
    sft, rm = folders
    prompts = [pair["prompt"] for pair in make_rows("tiny-tldr", 12, seed=0)]
    rates = (single_file.POLICY_RATE, single_file.CRITIC_RATE)
    config = PPOTrainerConfig(
        max_response_length=LENGTH,
        num_ppo_epochs=epochs,
        micro_batch_size=4,
        warmup_updates=0,
        max_grad_norm=0.1,
        policy_learning_rate=rates[0],
        critic_learning_rate=rates[1],
    )
    theirs = build_models(load_base(ModelConfig(finetune="full")), sft, rm)
    trainer = PPOTrainer(
        theirs, pad_is_eos, prompts, ModelReward(theirs.reward), FixedNGram(n), config
    )
    policy, reference = (AutoModelForCausalLM.from_pretrained(sft) for _ in range(2))
    critic, reward_model = (
        AutoModelForSequenceClassification.from_pretrained(rm) for _ in range(2)
    )
    optimizer = single_file.make_optimizer(*zip((policy, critic), rates, strict=True))

    for seed in range(2):
        batch = prompts[6 * seed :][:6]
        torch.manual_seed(seed)
        rollout = generate(theirs.policy.model, pad_is_eos, batch, Sampling(LENGTH))
        torch.manual_seed(seed)
        responses = single_file.sample(policy, pad_is_eos, batch)
        lengths = rollout.mask.sum(1)
        assert lengths.min() < lengths.max() == LENGTH  # some end by themselves, some are cut
        for ours, given in zip(
            responses, (rollout.tokens, rollout.attention_mask, rollout.mask), strict=True
        ):
            assert torch.equal(ours, given)

        ours = single_file.update(policy, critic, reference, reward_model, optimizer, responses, n)
        scored = trainer.score(rollout)
        row = trainer.learn(scored, trainer.segment(scored))
        assert ours["score"] == pytest.approx(scored.scores.mean().item(), abs=1e-4)
        # the trainer's losses are means over passes, the file's are those of the last one
        if epochs == 1:
            assert ours["policy_loss"] == pytest.approx(row["policy_loss"], abs=1e-4)
            assert ours["value_loss"] == pytest.approx(row["value_loss"], abs=1e-4)

    for ours, given, start in (
        (policy, theirs.policy, reference),
        (critic, theirs.critic, reward_model),
    ):
        ours, given, start = (
            torch.cat([p.flatten() for p in model.parameters()]) for model in (ours, given, start)
        )
        assert (ours - given).norm() < 0.01 * (given - start).norm()


def test_the_script_runs_by_itself():
    words = ["--n", "3", "--updates", "2", "--batch_size", "2", "--rows", "2", "2", "2"]
    command = [sys.executable, str(SCRIPT), *words]
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    for name in ("SFT", "PPO", "MA-PPO"):
        assert [words[2] for words in lines if len(words) == 4 and words[0] == name] == ["±"]


# -- README, guide and the other example ------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/guide.md", "docs/scaling.md", "docs/teaching.md", "docs/exam_answers.md"],
)
def test_printed_code_runs(page, base, sft, rm, tokenizer, texts):
    # What the guide says is there already; and fewer updates.
    names = {
        "base": base,
        "sft_folder": sft,
        "rm_folder": rm,
        "tokenizer": tokenizer,
        "prompts": texts.prompts,
    }
    text = (
        (ROOT / page)
        .read_text(encoding="utf-8")
        .replace("updates=20, batch_size=32", "updates=1, batch_size=4")
    )
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks
    for block in blocks:
        exec(block, names)


def test_the_example_trains_saves_and_draws(tmp_path):
    words = f"--updates 2 --batch_size 4 --size 60 --output_dir {tmp_path}".split()
    command = [sys.executable, str(ROOT / "examples" / "ma_ppo.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(tmp_path / "reward.png")]
    for folder in ("sft", "rm", "policy", "critic"):
        assert (tmp_path / folder / "adapter_model.safetensors").is_file()
