"""The reward model: where scores are read, both losses against loops, and learning from pairs."""

import math

import datasets
import pytest
import torch

from marlhf_lite.config.options import DataConfig, RewardModelConfig
from marlhf_lite.models.loading import new_reward_model
from marlhf_lite.tasks.tokenization import encode_prompts, encode_responses
from marlhf_lite.training import reward_model as module
from marlhf_lite.training.reward_model import (
    bradley_terry,
    bradley_terry_all,
    train_reward_model,
)

DATA = DataConfig(max_response_length=12)
GOOD, BAD = ["yes", "yes yes", "yes I do", "I say yes"], ["no", "no no", "I do no", "no I say"]


@pytest.fixture(scope="module")
def rows():
    """Whoever says yes is preferred."""
    sides = [(p, c, r) for p in ("a", "Why?", "one two") for c in GOOD for r in BAD]
    return datasets.Dataset.from_dict(dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*sides)))))


def neg_log_sigmoid(x):
    return math.log1p(math.exp(-x))


# -- the pieces -------------------------------------------------------------------------------------------------------


def test_bradley_terry_against_a_loop():
    chosen, rejected = torch.tensor([0.3, -2.0, 5.0]), torch.tensor([0.1, 1.0, 5.0])
    expected = sum(neg_log_sigmoid(a - b) for a, b in zip(chosen.tolist(), rejected.tolist())) / 3
    assert bradley_terry(chosen, rejected).item() == pytest.approx(expected, rel=1e-6)
    assert bradley_terry(torch.tensor([1e4]), torch.tensor([-1e4])).item() == 0.0
    assert bradley_terry(torch.tensor([-1e4]), torch.tensor([1e4])).item() == pytest.approx(2e4)


def loop_all(chosen, rejected, chosen_ids, rejected_ids):
    """Each pair: -log sigmoid at every place from the first that differs to the end of the longer, then the mean."""
    pairs = []
    for c, r, i, j in zip(chosen, rejected, chosen_ids, rejected_ids):
        longest = max(len(i), len(j))
        start = next((t for t in range(longest) if i[t : t + 1] != j[t : t + 1]), longest)
        terms = [neg_log_sigmoid(c[min(t, len(i) - 1)] - r[min(t, len(j) - 1)]) for t in range(start, longest)]
        pairs.append(sum(terms) / len(terms) if terms else 0.0)
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("fill", [0, 7])
def test_bradley_terry_all_against_loops(fill):
    """Also with a pad token that is an ordinary last token (7), where only the masks tell the rows apart."""
    chosen = [[1, 2, 3, 7], [1, 2, 7], [5, 6, 7], [5, 6], [1, 2, 3, 4, 7]]
    rejected = [[1, 2, 4, 5, 7], [1, 2, 7, 7], [5, 6, 7], [8], [1, 9, 3, 4, 7]]
    width, generator = 6, torch.Generator().manual_seed(0)
    scores = torch.randn(2, len(chosen), width, generator=generator).double()
    ids = torch.full((2, len(chosen), width), fill)
    masks = torch.zeros(2, len(chosen), width, dtype=torch.bool)
    for side, rows in enumerate((chosen, rejected)):
        for k, row in enumerate(rows):
            ids[side, k, : len(row)] = torch.tensor(row)
            masks[side, k, : len(row)] = True
    loss = bradley_terry_all(*scores, *ids, masks=masks)
    assert loss.item() == pytest.approx(loop_all(*scores.tolist(), chosen, rejected), rel=1e-9)


# -- what the trainer trains on ---------------------------------------------------------------------------------------


def caught(monkeypatch, model, tokenizer, rows, tmp_path, **options):
    """The trainer that `train_reward_model` would run."""
    trainers = []
    monkeypatch.setattr(module, "run_trainer", lambda trainer, *_: trainers.append(trainer))
    train_reward_model(model, tokenizer, rows, RewardModelConfig(**options), DATA, tmp_path)
    return trainers[0]


@pytest.mark.parametrize("loss", ["last", "all"])
@pytest.mark.parametrize("pads", ["own", "eos"])
def test_loss_is_that_of_each_pair_alone(base, sft, tokenizer, pad_is_eos, rows, tmp_path, monkeypatch, loss, pads):
    """Token ids, EOS, padding and score place: against passes over single sequences."""
    tokenizer = pad_is_eos if pads == "eos" else tokenizer
    model = new_reward_model(base, sft)
    trainer = caught(monkeypatch, model, tokenizer, rows.select(range(9)), tmp_path, rm_loss=loss, rm_batch_size=9)
    pairs, scores = {"chosen": [], "rejected": []}, {"chosen": [], "rejected": []}
    model.eval()
    for side in pairs:
        prompts = encode_prompts(tokenizer, rows["prompt"][:9])
        pairs[side] = [p + r for p, r in zip(prompts, encode_responses(tokenizer, rows[side][:9], 12))]
        for ids in pairs[side]:
            assert ids[-1] == tokenizer.eos_token_id
            with torch.no_grad():
                hidden = model.get_base_model().model(input_ids=torch.tensor([ids]))[0]
                scores[side].append(model.get_base_model().score(hidden)[0, :, 0].tolist())
    if loss == "all":
        expected = loop_all(scores["chosen"], scores["rejected"], pairs["chosen"], pairs["rejected"])
    else:
        gaps = [c[-1] - r[-1] for c, r in zip(scores["chosen"], scores["rejected"])]
        expected = sum(map(neg_log_sigmoid, gaps)) / 9
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.compute_loss(model, batch).item() == pytest.approx(expected, rel=1e-5)
    value, outputs = trainer.compute_loss(model, batch, return_outputs=True)
    assert value.item() == pytest.approx(expected, rel=1e-5) and len(outputs["chosen"]) == 9
