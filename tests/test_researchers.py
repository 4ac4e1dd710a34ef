"""What researchers bring: an adapter, a reward model, options of another trainer. The lines of the guide run."""

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from small_tokenizers import small_tokenizer
from transformers import GPT2Config, GPT2ForSequenceClassification

from marlhf_lite import macro
from marlhf_lite.cli import main
from marlhf_lite.config.commands import PPOCommand
from marlhf_lite.training.environments import Dialogues
from marlhf_lite.training.rollout import Sampling

ROOT = Path(__file__).resolve().parents[1]
Word = runpy.run_path(str(ROOT / "examples" / "my_environment.py"))["Word"]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL = "--max_response_length 6 --batch_size 4 --micro_batch_size 4 --updates 1".split()


def commands(section):
    """The `marlhf` lines of a section of the guide, as words."""
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^##+ {re.escape(section)}\n(.*?)(?=^##+ |\Z)", guide, re.M | re.S)
    blocks = "".join(re.findall(r"^```\n(.*?)^```", text, re.M | re.S)).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in blocks.splitlines()]


def save_classifier(folder, labels):
    """A small classifier that has another tokenizer than the policy."""
    tokenizer = small_tokenizer("byte_level")
    torch.manual_seed(0)
    special = {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")
    }
    sizes = {"n_positions": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
    config = GPT2Config(vocab_size=len(tokenizer), num_labels=labels, **sizes, **special)
    if labels == 2:
        config.id2label, config.label2id = (
            {0: "NEGATIVE", 1: "POSITIVE"},
            {"NEGATIVE": 0, "POSITIVE": 1},
        )
    model = GPT2ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture
def folder(tiny, sft, tmp_path, monkeypatch):
    """The current folder with what the guide names: an adapter, a reward model, prompts."""
    shutil.copytree(sft, tmp_path / "my-lora")
    rows = (json.dumps({"prompt": f"Is {i} even?"}) + "\n" for i in range(20))
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def run(words, tiny, *more):
    """Run a line of the guide with the small model, the words `more` and small sizes, which win."""
    assert words[0] == "marlhf"
    assert main([*(tiny.model if word == MODEL else word for word in words[1:]), *more]) == 0


def rows_of(path):
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_reward_model_and_an_adapter_train_and_evaluate(folder, tiny):
    save_classifier(folder / "my-classifier", labels=1)
    train, evaluate, export, _ = commands("I have a reward model and a LoRA")
    run(train, tiny, *SMALL)
    run(evaluate, tiny, "--eval_prompts", "2", *SMALL[:2])
    run(export, tiny)
    judged = [row["rm_score"] for row in rows_of(folder / "runs" / "e" / "samples.jsonl")]
    assert len(judged) >= 4 and len(set(judged)) > 1  # of SFT and MA-PPO
    assert (folder / "my-model" / "config.json").is_file()


def test_options_of_the_other_trainer_run(folder, tiny):
    """And mean what the table says: one token a macro action, temperature in the log-probabilities, whitening."""
    save_classifier(folder / "my-classifier", labels=1)
    (train,) = commands("From TRL's PPOTrainer")
    run(train, tiny, *SMALL)
    (row,) = rows_of(folder / "runs" / "ppo" / "ppo" / "metrics.jsonl")
    assert row["macro_length"] == 1 and row["advantage_rms"] == pytest.approx(1.0, abs=0.05)


def test_every_option_in_the_table_exists():
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^## From TRL's PPOTrainer\n(.*?)(?=^## )", guide, re.M | re.S)
    named = {
        name
        for row in re.findall(r"^\|[^|]*\|(.*)\|$", text, re.M)
        for name in re.findall(r"`--(\w+)", row)
    }
    assert len(named) > 15 and named <= set(PPOCommand.__dataclass_fields__)


def test_what_the_environment_said_is_in_holes_of_the_mask(roles, tokenizer):
    """By the guide's function; a dialogue's tokens are its turns and these."""
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(def said_by_environment.*?)```", guide, re.S)
    exec(code, names := {})
    prompts = [f'Name letters of "{word}":' for word in ("thunderstorm", "workbench")]
    torch.manual_seed(0)
    rollout = Dialogues(Word(), max_turns=2)(roles.policy.model, tokenizer, prompts, Sampling(3))
    said = names["said_by_environment"](rollout)
    for row, turns in enumerate(rollout.turns):
        first, second = turns[0]["span"], turns[1]["span"]
        heard = tokenizer.decode(rollout.response_ids[row][said[row]], skip_special_tokens=True)
        assert said[row].nonzero().flatten().tolist() == [*range(first[1], second[0])]
        assert heard.strip() == turns[0]["observation"].strip()


def test_a_classifier_of_the_hub_is_a_reward(folder, tiny, monkeypatch):
    model, tokenizer = save_classifier(folder / "classifier", labels=2)
    shutil.copy(ROOT / "examples" / "hf_reward_model.py", folder)
    monkeypatch.setenv("CLASSIFIER", str(folder / "classifier"))
    monkeypatch.delitem(sys.modules, "hf_reward_model", raising=False)
    *_, train = commands("I have a reward model and a LoRA")
    run(train, tiny, *SMALL)
    for row in rows_of(folder / "runs" / "positive" / "ppo" / "samples.jsonl"):
        ids = tokenizer(row["response"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert row["score"] == pytest.approx(model(ids).logits[0, 1].item(), abs=1e-4)


def test_the_api_page_names_all_that_the_macro_package_offers():
    page = (ROOT / "book" / "api.rst").read_text(encoding="utf-8")
    named = re.findall(r"auto(?:class|function):: (\S+)", page)
    shown = [resolve_name(name if "." in name else f"marlhf_lite.macro:{name}") for name in named]
    assert all(thing.__doc__ for thing in shown)
    own = [
        name
        for name, x in vars(macro).items()
        if getattr(x, "__module__", "").startswith("marlhf_lite.macro.")
    ]
    assert set(own) <= set(named)
