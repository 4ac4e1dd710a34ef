"""SFT and reward model: which tokens the losses are on, what is learnt and saved, faults, and where memory ends."""

import math
from functools import partial
from types import SimpleNamespace

import datasets
import pytest
import torch
from accelerate.state import GradientState
from conftest import fails
from safetensors.torch import load_file

from marlhf_lite.config.options import DataConfig, RewardModelConfig, SFTStageConfig, TrainerConfig
from marlhf_lite.models.loading import load_policy, load_tokenizer, new_policy, new_reward_model
from marlhf_lite.tasks.answers import encode_responses
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.tasks.training_rows import sft_dataset
from marlhf_lite.training import reward_model as rm_module
from marlhf_lite.training import sft as sft_module
from marlhf_lite.training import trl_trainers
from marlhf_lite.training.rollout import Sampling, generate

DATA = DataConfig(max_prompt_length=20, max_response_length=8)
PROMPTS, ANSWERS = (
    ["a", "Why? I wonder", "one two"],
    ["yes", "because so it is, as we know", "three"],
)
# Pairs that part early, late, at the end of one of them, or not at all.
CHOSEN, REJECTED = ["yes", "yes I do", "I say yes"], ["no", "yes I do no", "yes"]


@pytest.fixture
def start(base, tiny, sft):
    """A function that makes the model with which a stage begins."""
    return lambda stage: new_policy(base, tiny) if stage == "sft" else new_reward_model(base, sft)


@pytest.fixture
def train():
    """A function that trains a stage, sft or rm, on rows, with these options of it."""

    def run(stage, model, tokenizer, rows, folder, **options):
        kind, function = {
            "sft": (SFTStageConfig, sft_module.train_sft),
            "rm": (RewardModelConfig, rm_module.train_reward_model),
        }[stage]
        named = {
            name if name == "rm_loss" else f"{stage}_{name}": value
            for name, value in options.items()
        }
        return function(model, tokenizer, rows, kind(**named), DATA, folder)

    return run


@pytest.fixture
def caught(train, monkeypatch, tmp_path):
    """A function that makes the trainer that a stage would run."""

    def make(stage, *given, **options):
        trainers = []
        monkeypatch.setattr(
            trl_trainers, "run_trainer", lambda trainer, **_: trainers.append(trainer)
        )
        train(stage, *given, tmp_path, **options)
        return trainers[0]

    return make


def sides(tokenizer):
    return list(zip(encode_prompts(tokenizer, PROMPTS), encode_responses(tokenizer, ANSWERS, 8)))


@pytest.fixture(scope="module")
def rows():
    return datasets.Dataset.from_dict({"prompt": PROMPTS, "chosen": ANSWERS})


# -- SFT --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pads", ["own", "eos"])
def test_labels_are_the_response_tokens_alone(start, tokenizer, pad_is_eos, rows, caught, pads):
    tokenizer = pad_is_eos if pads == "eos" else tokenizer
    trainer = caught("sft", start("sft"), tokenizer, rows, batch_size=3)
    batch = next(iter(trainer.get_train_dataloader()))
    seen = []
    for ids, attended, labels in zip(
        batch["input_ids"], batch["attention_mask"].bool(), batch["labels"]
    ):
        assert (labels[~attended] == -100).all()
        seen.append((ids[attended].tolist(), labels[attended].tolist()))
    expected = [(p + r, [-100] * len(p) + r) for p, r in sides(tokenizer)]
    assert sorted(seen) == sorted(expected)
    # the long answer is cut, without EOS
    assert sum(labels[-1] == tokenizer.eos_token_id for _, labels in seen) == 2


def test_dialogues_are_read_whole(start, tokenizer, caught):
    """Their turns have the limit of a response each, so together they may be longer than prompt and response."""
    turns = [" yes", " no", " one two three", " Why?"] * 6
    rows = datasets.Dataset.from_list([{"prompt": "a", "chosen": " yes", "dialogue": turns}])
    trainer = caught("sft", start("sft"), tokenizer, rows)
    (batch,) = trainer.get_train_dataloader()
    (row,) = sft_dataset(tokenizer, rows, DATA.max_response_length)
    assert batch["input_ids"][0].tolist() == row["input_ids"]
    assert len(row["input_ids"]) > DATA.max_prompt_length + DATA.max_response_length


def test_loss_is_the_mean_over_response_tokens(start, tokenizer, rows, train, tmp_path):
    """The first step's loss, against passes over single sequences in float64."""
    model, terms = start("sft"), []
    with torch.no_grad():
        for prompt, response in sides(tokenizer):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double()
            log_p = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            terms += (-log_p.gather(1, torch.tensor(response)[:, None])).flatten().tolist()
    log = train("sft", model, tokenizer, rows, tmp_path, epochs=1, batch_size=3)
    assert len(log) == 1 and log[0]["loss"] == pytest.approx(sum(terms) / len(terms), rel=1e-3)


def test_learns_the_answer_and_to_stop(start, base, tiny, tokenizer, train, tmp_path):
    rows = datasets.Dataset.from_dict({"prompt": PROMPTS, "chosen": ["ok"] * 3})
    model, folder = start("sft"), tmp_path / "sft"
    log = train("sft", model, tokenizer, rows, folder, epochs=40, batch_size=3, learning_rate=3e-2)
    assert len(log) == 40 and log[-1]["loss"] < 0.1 * log[0]["loss"]
    loaded = load_policy(base, folder, trainable=False)
    rollout = generate(loaded, load_tokenizer(tiny.model), PROMPTS, Sampling(8, temperature=0))
    assert rollout.ended.all() and rollout.responses == ["ok"] * 3
    with torch.no_grad():
        ids = torch.tensor([encode_prompts(tokenizer, PROMPTS)[1]])
        assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    saved = {file.name for file in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= saved


# -- reward model -----------------------------------------------------------------------------------------------------


def neg_log_sigmoid(x):
    return math.log1p(math.exp(-x))


def pair_loss(chosen, rejected, i, j):
    """-log sigmoid at every place from the first that differs to the end of the longer; `i` and `j` are token ids."""
    longest = max(len(i), len(j))
    start = next((t for t in range(longest) if i[t : t + 1] != j[t : t + 1]), longest)
    terms = [
        neg_log_sigmoid(chosen[min(t, len(i) - 1)] - rejected[min(t, len(j) - 1)])
        for t in range(start, longest)
    ]
    return sum(terms) / len(terms) if terms else 0.0


@pytest.mark.parametrize("fill", [0, 7])
def test_loss_over_all_tokens_against_loops(fill):
    """Also with a pad token that is an ordinary last token (7), where only the masks tell the rows apart."""
    pairs = [
        ([1, 2, 3, 7], [1, 2, 4, 5, 7]),
        ([1, 2, 7], [1, 2, 7, 7]),
        ([5, 6, 7], [5, 6, 7]),
        ([5, 6], [8]),
    ]
    scores = torch.randn(2, len(pairs), 6, generator=torch.Generator().manual_seed(0)).double()
    ids, masks = (
        torch.full((2, len(pairs), 6), fill),
        torch.zeros(2, len(pairs), 6, dtype=torch.bool),
    )
    for k, pair in enumerate(pairs):
        for side, row in enumerate(pair):
            ids[side, k, : len(row)], masks[side, k, : len(row)] = torch.tensor(row), True
    expected = sum(
        pair_loss(*both.tolist(), *pair) for both, pair in zip(scores.unbind(1), pairs)
    ) / len(pairs)
    assert rm_module.bradley_terry_all(*scores, *ids, masks=masks).item() == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("loss", ["last", "all"])
@pytest.mark.parametrize("pads", ["own", "eos"])
def test_loss_is_that_of_each_pair_alone(start, tokenizer, pad_is_eos, caught, loss, pads):
    """Token ids, EOS, padding and score place: against passes over single sequences."""
    tokenizer = pad_is_eos if pads == "eos" else tokenizer
    both = [(c, r) for c in CHOSEN for r in REJECTED]
    columns = {
        "prompt": PROMPTS * 3,
        "chosen": [c for c, _ in both],
        "rejected": [r for _, r in both],
    }
    model = start("rm")
    trainer = caught(
        "rm", model, tokenizer, datasets.Dataset.from_dict(columns), rm_loss=loss, batch_size=9
    )
    ids, scores = {}, {"chosen": [], "rejected": []}
    model.eval()
    for side in scores:
        answers = encode_responses(tokenizer, columns[side], 8)
        ids[side] = [p + r for p, r in zip(encode_prompts(tokenizer, columns["prompt"]), answers)]
        for row in ids[side]:
            assert row[-1] == tokenizer.eos_token_id
            with torch.no_grad():
                hidden = model.get_base_model().model(input_ids=torch.tensor([row]))[0]
                scores[side].append(model.get_base_model().score(hidden)[0, :, 0].tolist())
    if loss == "all":
        terms = map(pair_loss, scores["chosen"], scores["rejected"], ids["chosen"], ids["rejected"])
    else:
        terms = (
            neg_log_sigmoid(c[-1] - r[-1]) for c, r in zip(scores["chosen"], scores["rejected"])
        )
    expected = pytest.approx(sum(terms) / 9, rel=1e-5)
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.compute_loss(model, batch).item() == expected
    value, outputs = trainer.compute_loss(model, batch, return_outputs=True)
    assert value.item() == expected and len(outputs["chosen"]) == 9


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_a_loss_that_is_not_finite_ends_the_stage_in_a_line(
    start, tokenizer, rows, train, tmp_path, stage, capsys
):
    """At the second step, after which the weights would be no numbers; nothing is saved."""
    model, rows, passes = start(stage), rows.add_column("rejected", ["no", "never", "four"]), []
    first = next(p for p in model.parameters() if p.requires_grad)
    first.register_hook(lambda g: (passes.append(1), g * (math.nan if len(passes) > 1 else 1.0))[1])
    trains = partial(train, stage, model, tokenizer, rows, tmp_path / "out", epochs=3, batch_size=3)
    fails(trains, "loss or gradient of update 2 is not finite: start again with")
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
    # the bar is closed, so that the message has a line of its own
    assert capsys.readouterr().err.endswith("\n")


@pytest.fixture
def with_little_memory(start, tokenizer, train, tmp_path):
    """Two epochs of two steps, of 6 rows and of 5; passes of more than `fits` rows fail from the second one on."""

    def run(stage, fits):
        torch.manual_seed(0)
        model, sequences, tried = start(stage), 1 if stage == "sft" else 2, []

        def allocate(_, args):
            tried.append(len(args[0]) // sequences)
            if len(tried) > 1 and tried[-1] > fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        hook, folder = (
            model.get_input_embeddings().register_forward_pre_hook(allocate),
            tmp_path / f"{stage}-{fits}",
        )
        texts = {"prompt": "Say {}", "chosen": "yes {}", "rejected": "no {}"}
        rows = [
            {name: text.format("so " * (i % 4)) for name, text in texts.items()} for i in range(11)
        ]
        try:
            options = {"batch_size": 6, "epochs": 2.0, "learning_rate": 1e-2}
            log = train(
                stage, model, tokenizer, datasets.Dataset.from_list(rows), folder, **options
            )
        finally:
            hook.remove()
        return log, load_file(folder / "adapter_model.safetensors"), tried

    return run


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_half_the_rows_a_pass_learn_the_same(with_little_memory, stage):
    """SFT and reward model start again with half the rows a pass where memory ends."""
    log, weights, tried = with_little_memory(stage, 99)
    assert tried == [6, 5, 6, 5]
    for fits in (3, 1):
        again, others, tried = with_little_memory(stage, fits)
        assert max(tried[-4:]) <= fits and tried[:2] == [6, 5] and len(again) == len(log) == 4
        # means over pairs, not over passes
        for name in ("loss", *(["accuracy", "margin"] if stage == "rm" else [])):
            assert [row[name] for row in again] == pytest.approx(
                [row[name] for row in log], rel=1e-4, abs=1e-5
            )
        assert others.keys() == weights.keys()
        moved = max(float((value - others[name]).abs().max()) for name, value in weights.items())
        # rounding, which Adam makes larger where a gradient is near 0; a step is 1e-2
        assert moved < 1e-3


@pytest.mark.parametrize(
    ("batch", "asked", "split"), [(32, 4, (4, 8)), (6, 4, (3, 2)), (7, 4, (1, 7)), (32, 0, (32, 1))]
)
def test_a_pass_takes_the_most_rows_that_divide_a_step(batch, asked, split, tmp_path):
    """Within what is asked for, 0 for no limit."""
    passes = TrainerConfig(per_device_train_batch_size=asked)
    found = trl_trainers.stage_arguments(
        tmp_path, 0, SFTStageConfig(sft_batch_size=batch), passes, "sft"
    )
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == split


def test_a_step_that_processes_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr(trl_trainers, "PartialState", lambda: SimpleNamespace(num_processes=4))
    trl_trainers.check_batches(SFTStageConfig(sft_batch_size=24))
    fails(
        lambda: trl_trainers.check_batches(SFTStageConfig(sft_batch_size=6)),
        "--sft_batch_size 6: 4 processes",
    )


def test_one_row_that_does_not_fit_is_one_line(with_little_memory):
    fails(lambda: with_little_memory("sft", 0), "--per_device_train_batch_size 1: shorten")
    # else the optimizer of the next trainer in this process would take no step
    assert GradientState().sync_gradients
