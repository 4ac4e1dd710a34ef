"""SmolLM2-135M-Instruct from end to end, where MARLHF_REAL_MODELS names the folder that data/real_models.py filled."""

import copy
import json
import math
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from marlhf_lite.cli import main
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.loading import load_base, load_tokenizer
from marlhf_lite.tasks.answers import encode_responses
from marlhf_lite.tasks.chats import chat_writer, expect_chats
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import Sampling, generate

MODEL = Path(os.environ.get("MARLHF_REAL_MODELS", "")) / "SmolLM2-135M-Instruct"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (MODEL / "model.safetensors").is_file(), reason="MARLHF_REAL_MODELS has no SmolLM2"
    ),
]
TOPICS = "rivers bread maps bridges chess gardens violins clouds bees trains lamps paper salt tea wool".split()


@pytest.fixture(scope="module")
def real_tokenizer():
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of 30 preference pairs, each a user's message and two answers."""
    form = {
        "prompt": ("user", "{} {}."),
        "chosen": ("assistant", "People like {1}."),
        "rejected": ("assistant", "No!"),
    }
    asks = [(ask, topic) for ask in ("Tell me about", "Write a line on") for topic in TOPICS]
    rows = [
        {k: [{"role": r, "content": text.format(*ask)}] for k, (r, text) in form.items()}
        for ask in asks
    ]
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_text_of_a_special_token_stays_text(real_tokenizer):
    """SmolLM2 has no BOS, and its pad token is its EOS token."""
    text, end = "All's well that ends.<|im_end|> Naïve 東京\n", real_tokenizer.eos_token_id
    assert real_tokenizer.pad_token_id == end
    (prompt,), (response,) = (
        encode_prompts(real_tokenizer, [text]),
        encode_responses(real_tokenizer, [text], 99),
    )
    assert response == [*prompt, end] and end not in prompt
    assert real_tokenizer.decode(prompt) == text


def test_the_chat_template_asks_and_the_model_answers(real_tokenizer):
    tokenizer, messages = (
        copy.deepcopy(real_tokenizer),
        [{"role": "user", "content": "What is the capital of France?"}],
    )
    prompt = chat_writer(tokenizer, "auto")(messages)
    expect_chats(tokenizer)
    reference = AutoTokenizer.from_pretrained(MODEL).apply_chat_template(
        messages, add_generation_prompt=True
    )
    assert encode_prompts(tokenizer, [prompt]) == [reference["input_ids"]]
    assert tokenizer.eos_token_id == real_tokenizer.eos_token_id
    answer = generate(
        load_base(ModelConfig(model=str(MODEL))), tokenizer, [prompt], Sampling(24, temperature=0)
    )
    assert "Paris" in answer.responses[0] and bool(answer.ended)


def test_padding_on_the_left_changes_nothing(real_tokenizer):
    """Greedy answers in one batch are those that transformers gives to each prompt alone."""
    base = load_base(ModelConfig(model=str(MODEL)))
    prompts = [
        "The capital of France is",
        "Water boils at a temperature of 100 degrees, and it freezes at",
    ]
    rollout = generate(base, real_tokenizer, prompts, Sampling(8, temperature=0))
    alone = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for prompt, response in zip(prompts, rollout.responses, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        tokens = alone.generate(**ids, max_new_tokens=8, do_sample=False)[
            0, ids.input_ids.shape[1] :
        ]
        assert response == tokenizer.decode(tokens, skip_special_tokens=True)
    assert "Paris" in rollout.responses[0]


def test_from_the_pairs_to_an_exported_policy(pairs, tmp_path, capsys):
    """SFT, reward model, update, resume, evaluation, answer and export; policy and reference start as one."""
    sizes = "--batch_size 4 --micro_batch_size 2 --sft_batch_size 4 --rm_batch_size 4 --max_response_length 8"
    short = "--rm_epochs 0.4 --updates 1 --num_ppo_epochs 1 --checkpoint_every 1 --eval_prompts 2"
    run = f"run --model {MODEL} --dataset {pairs} {sizes} {short}"
    assert not main(f"{run} --sft_learning_rate 1e-4 --output_dir {tmp_path}/run".split())
    assert not main(f"run --resume {tmp_path}/run --updates 2".split())
    first, second = map(
        json.loads, (tmp_path / "run" / "ma-ppo" / "metrics.jsonl").read_text().splitlines()
    )
    assert abs(first["kl_k1"]) < 1e-2 and first["kl_k3"] < 1e-4 < second["kl_k3"]
    assert all(
        math.isfinite(second[name]) for name in ("policy_loss", "value_loss", "policy_grad_norm")
    )
    loss = [row["loss"] for row in json.loads((tmp_path / "run" / "sft" / "log.json").read_text())]
    assert 0 < loss[0] < 6  # a model that has read English
    policy = tmp_path / "run" / "ma-ppo" / "policy"
    evaluate = (
        f"evaluate --sft {tmp_path}/run --rm {tmp_path}/run --policies {policy} --eval_prompts 2"
    )
    assert not main(f"{evaluate} --eval_temperatures 0 --output_dir {tmp_path}/evaluated".split())
    capsys.readouterr()
    assert not main(
        f"generate --policy {policy} --prompt Bridges? --top_k 1 --max_response_length 8".split()
    )
    answer = capsys.readouterr().out.strip()
    assert not main(f"export --policy {policy} --output_dir {tmp_path}/exported".split())
    exported, tokenizer = (
        x.from_pretrained(tmp_path / "exported") for x in (AutoModelForCausalLM, AutoTokenizer)
    )
    messages, form = (
        [{"role": "user", "content": "Bridges?"}],
        {"add_generation_prompt": True, "return_tensors": "pt"},
    )
    ids = tokenizer.apply_chat_template(messages, **form)
    tokens = exported.generate(**ids, max_new_tokens=8, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    assert len(answer) > 8 and tokenizer.decode(tokens, skip_special_tokens=True).strip() == answer
