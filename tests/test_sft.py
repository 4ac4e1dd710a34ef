"""Supervised fine-tuning: which tokens the loss is on, that EOS is learnt, what is saved."""

import math
from functools import partial

import datasets
import pytest
import torch

from marlhf_lite.config.options import DataConfig, RewardModelConfig, SFTStageConfig
from marlhf_lite.models.loading import load_policy, load_tokenizer, new_policy, new_reward_model
from marlhf_lite.tasks.tokenization import encode_prompts, encode_responses
from marlhf_lite.training import sft as module
from marlhf_lite.training.reward_model import train_reward_model
from marlhf_lite.training.rollout import Sampling, generate
from marlhf_lite.training.sft import train_sft
from marlhf_lite.utils.errors import InputError

DATA = DataConfig(max_prompt_length=20, max_response_length=8)
PROMPTS, ANSWERS = ["a", "Why? I wonder", "one two"], ["yes", "because so it is, as we know", "three"]


@pytest.fixture(scope="module")
def rows():
    return datasets.Dataset.from_dict({"prompt": PROMPTS, "chosen": ANSWERS})


def caught(monkeypatch, model, tokenizer, rows, tmp_path, **options):
    """The trainer that `train_sft` would run."""
    trainers = []
    monkeypatch.setattr(module, "run_trainer", lambda trainer, *_: trainers.append(trainer))
    train_sft(model, tokenizer, rows, SFTStageConfig(**options), DATA, tmp_path)
    return trainers[0]


def sides(tokenizer):
    return list(zip(encode_prompts(tokenizer, PROMPTS), encode_responses(tokenizer, ANSWERS, 8)))


@pytest.mark.parametrize("pads", ["own", "eos"])
def test_labels_are_the_response_tokens_alone(base, tiny, tokenizer, pad_is_eos, rows, tmp_path, monkeypatch, pads):
    tokenizer = pad_is_eos if pads == "eos" else tokenizer
    trainer = caught(monkeypatch, new_policy(base, tiny), tokenizer, rows, tmp_path, sft_batch_size=3)
    batch = next(iter(trainer.get_train_dataloader()))
    seen = []
    for ids, attended, labels in zip(batch["input_ids"], batch["attention_mask"].bool(), batch["labels"]):
        assert (labels[~attended] == -100).all()
        seen.append((ids[attended].tolist(), labels[attended].tolist()))
    expected = [(p + r, [-100] * len(p) + r) for p, r in sides(tokenizer)]
    assert sorted(seen) == sorted(expected)
    assert sum(labels[-1] == tokenizer.eos_token_id for _, labels in seen) == 2  # the long answer is cut, without EOS


def test_loss_is_the_mean_over_response_tokens(base, tiny, tokenizer, rows, tmp_path):
    """The first step's loss, against passes over single sequences in float64."""
    model, terms = new_policy(base, tiny), []
    with torch.no_grad():
        for prompt, response in sides(tokenizer):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double()
            log_p = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            terms += (-log_p.gather(1, torch.tensor(response)[:, None])).flatten().tolist()
    options = SFTStageConfig(sft_epochs=1, sft_batch_size=3)
    log = train_sft(model, tokenizer, rows, options, DATA, tmp_path)
    assert len(log) == 1 and log[0]["loss"] == pytest.approx(sum(terms) / len(terms), rel=1e-3)


def test_learns_the_answer_and_to_stop(base, tiny, tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"prompt": PROMPTS, "chosen": ["ok"] * 3})
    model = new_policy(base, tiny)
    options = SFTStageConfig(sft_epochs=40, sft_batch_size=3, sft_learning_rate=3e-2)
    log = train_sft(model, tokenizer, rows, options, DATA, tmp_path / "sft")
    assert len(log) == 40 and log[-1]["loss"] < 0.1 * log[0]["loss"]
    loaded = load_policy(base, tmp_path / "sft", trainable=False)
    rollout = generate(loaded, load_tokenizer(tiny.model), PROMPTS, Sampling(8, temperature=0))
    assert rollout.ended.all() and rollout.responses == ["ok"] * 3
    with torch.no_grad():
        ids = torch.tensor([encode_prompts(tokenizer, PROMPTS)[1]])
        assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "sft").iterdir()
    }


@pytest.mark.parametrize("stage", ["SFT", "reward model"])
def test_a_loss_that_is_not_finite_ends_the_stage_in_a_line(base, tiny, tokenizer, rows, tmp_path, stage, capsys):
    """At the second step, after which the weights would be no numbers; nothing is saved."""
    if stage == "SFT":
        model, options = new_policy(base, tiny), SFTStageConfig(sft_epochs=3, sft_batch_size=3)
        train = partial(train_sft, model, tokenizer, rows, options, DATA, tmp_path / "out")
    else:
        new_policy(base, tiny).save_pretrained(tmp_path / "sft")
        model, options = new_reward_model(base, tmp_path / "sft"), RewardModelConfig(rm_epochs=3, rm_batch_size=3)
        pairs = rows.add_column("rejected", ["no", "never", "four"])
        train = partial(train_reward_model, model, tokenizer, pairs, options, DATA, tmp_path / "out")
    passes = []
    first = next(p for p in model.parameters() if p.requires_grad)
    first.register_hook(lambda g: (passes.append(1), g * (math.nan if len(passes) > 1 else 1.0))[1])
    with pytest.raises(InputError, match=f"{stage}: loss or gradient of update 2 is not finite: start again with"):
        train()
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert capsys.readouterr().err.endswith("\n")  # the bar is closed, so that the message has a line of its own
