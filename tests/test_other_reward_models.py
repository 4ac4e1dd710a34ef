"""Reward models from elsewhere: scores by their own tokenizer are those that transformers gives for the texts."""

import copy
import dataclasses
import json

import datasets
import pytest
import torch
from small_tokenizers import small_tokenizer
from transformers import GPT2Config, GPT2ForSequenceClassification

from marlhf_lite.cli import main
from marlhf_lite.experiments.other_tokenizers import TextReader, reader_of
from marlhf_lite.models.actor_critic import ScalarHeadModel
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks.chats import chat_writer, expect_chats
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import from_texts
from marlhf_lite.utils.seals import seal

SIZES = "--max_response_length 6 --batch_size 4 --updates 1"


@pytest.fixture
def other(tiny, tmp_path):
    """Makes a folder with a small reward model that has another tokenizer."""

    def make(labels=1, words=None, with_tokenizer=True, own=True):
        tokenizer = small_tokenizer("byte_level") if own else load_tokenizer(tiny.model)
        torch.manual_seed(0)
        special = {
            f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id")
            for kind in ("pad", "bos", "eos")
        }
        sizes = {
            "n_positions": 256,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "initializer_range": 0.5,
        }
        config = GPT2Config(
            vocab_size=words or len(tokenizer), num_labels=labels, **sizes, **special
        )
        GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "rm")
        if with_tokenizer:
            tokenizer.save_pretrained(tmp_path / "rm")
        return tmp_path / "rm"

    return make


@pytest.fixture
def words(tiny, sft, tmp_path):
    """The words of a command that trains PPO or scores answers on a few prompts."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Is {i} even?"}) + "\n" for i in range(20))
    )
    return f"--model {tiny.model} --sft {sft} --dataset {tmp_path}/prompts.jsonl".split()


def by_hand(folder, texts):
    """The score of each text alone, by transformers."""
    model, tokenizer = (
        GPT2ForSequenceClassification.from_pretrained(folder).eval(),
        load_tokenizer(str(folder)),
    )
    with torch.no_grad():
        return [
            model(
                torch.tensor([tokenizer(text, split_special_tokens=False)["input_ids"]])
            ).logits.item()
            for text in texts
        ]


def test_texts_are_scored_by_the_own_tokenizer(other, words, tmp_path):
    """In training and evaluation."""
    folder, run, out = other(), tmp_path / "run", tmp_path / "e"
    command = [
        "ppo",
        *words,
        "--rm",
        str(folder),
        *SIZES.split(),
        "--critic_init",
        "sft",
        "--output_dir",
        str(run),
    ]
    assert main(command) == 0
    assert (
        main(
            [
                "evaluate",
                *words,
                "--rm",
                str(folder),
                "--eval_prompts",
                "2",
                *SIZES.split()[:2],
                "--output_dir",
                str(out),
            ]
        )
        == 0
    )
    trained = [
        json.loads(line) for line in (run / "ppo" / "samples.jsonl").read_text().splitlines()
    ]
    stored = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    for rows, score in ((trained, "score"), (stored, "rm_score")):
        texts = [row["prompt"] + row["response"] + "<eos>" * row["ended"] for row in rows]
        assert [row[score] for row in rows] == pytest.approx(by_hand(folder, texts), abs=1e-4)


def test_messages_are_written_by_the_own_template(tokenizer):
    own = load_tokenizer_with(copy.deepcopy(small_tokenizer("byte_level")))
    said = {"WRITTEN": [{"role": "user", "content": "Why?"}]}
    rollout = from_texts(tokenizer, ["WRITTEN"], [" So."], 99)
    read = TextReader(own, said)(rollout)
    assert (
        read.prompts == ["<bos>user: Why?<bos>assistant: "]
        and read.responses == [" So."]
        and bool(read.ended)
    )
    assert (
        read.tokens[0].tolist().count(own.bos_token_id) == 2
        and read.tokens[0, -1] == own.eos_token_id
    )
    own.chat_template = None
    assert TextReader(own, said).prompts(["WRITTEN", "plain"]) == [
        "\n\nHuman: Why?\n\nAssistant:",
        "plain",
    ]


def load_tokenizer_with(tokenizer):
    tokenizer.split_special_tokens = True
    tokenizer.chat_template = (
        "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize(
    ("model", "more", "reason"),
    [
        ({"labels": 2}, [], "2 numbers a text"),
        (
            {},
            [],
            "the critic cannot start from it (it has another tokenizer): add --critic_init sft",
        ),
        (
            {"own": False},
            [],
            "(it is a whole model, and --finetune lora trains adapters): add --critic_init sft",
        ),
        (
            {"words": 50, "with_tokenizer": False},
            ["--critic_init", "sft"],
            "save its own tokenizer there",
        ),
    ],
)
def test_what_cannot_score_is_refused_before_training(
    other, words, tmp_path, capsys, model, more, reason
):
    command = [
        "ppo",
        *words,
        "--rm",
        str(other(**model)),
        *SIZES.split(),
        *more,
        "--output_dir",
        str(tmp_path / "run"),
    ]
    assert main(command) == 2 and not (tmp_path / "run").exists()
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"error: --rm {tmp_path / 'rm'}: " in error and reason in error


def test_a_classifier_is_read_at_the_last_token_of_its_templates_text(tokenizer, tmp_path):
    """ChatML writes a line break after the end token; the same tokenizer and template as the policy's."""
    own = load_tokenizer_with(copy.deepcopy(small_tokenizer("byte_level")))
    own.chat_template = own.chat_template.replace("{% endfor %}", "{{ '\\n' }}{% endfor %}")
    torch.manual_seed(0)
    sizes = {"n_positions": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
    special = {"pad_token_id": own.pad_token_id, "eos_token_id": own.eos_token_id}
    config = GPT2Config(vocab_size=len(own), num_labels=1, **sizes, **special)
    classifier = GPT2ForSequenceClassification(config).eval()
    classifier.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    policys = load_tokenizer(str(tmp_path))
    write = chat_writer(policys, "auto")
    messages = [{"role": "user", "content": "Why?"}]
    prompt, (answer,) = write.write(messages, [[{"role": "assistant", "content": "So."}]])
    expect_chats(policys)
    rows = datasets.Dataset.from_dict({"prompt": [prompt]})
    task = Task("few", datasets.DatasetDict(dict.fromkeys(("ppo", "test"), rows)), None, {})
    task = dataclasses.replace(task, source_of_prompt=write.source_of_prompt, chats=True)
    rollout = from_texts(policys, [prompt, prompt], [answer, "no end here at all"], 9)
    read = reader_of(tmp_path, policys, task)
    with torch.no_grad():
        scores = ModelReward(ScalarHeadModel(classifier), read=read)(rollout)
        text = own.apply_chat_template(
            [*messages, {"role": "assistant", "content": answer.strip()}], tokenize=False
        )
        assert text.endswith("<eos>\n")
        ids = own(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
        assert scores[0].item() == pytest.approx(
            classifier(torch.tensor([ids])).logits.item(), abs=1e-5
        )
    assert not bool(read(rollout).ended[1])
    seal(tmp_path)  # trained here: it gives its score at the end token, as all stages do
    assert reader_of(tmp_path, policys, task) is None


def test_a_run_says_that_its_reward_model_has_another_tokenizer(other, words, tmp_path, capsys):
    command = ["ppo", *words, "--rm", str(other()), *SIZES.split(), "--critic_init", "sft"]
    assert not main([*command, "--output_dir", str(tmp_path / "run")])
    assert "it scores texts, by its own tokenizer" in capsys.readouterr().out
