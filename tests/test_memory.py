"""The memory estimate against measured peaks and closed forms."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import GemmaConfig

from marlhf_lite.cli import main
from marlhf_lite.config.options import DataConfig, ModelConfig, PPOConfig
from marlhf_lite.models.memory import estimate_memory, memory_table
from marlhf_lite.utils.errors import InputError

PROMPT, LENGTH, ROWS = 96, 160, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config and no weights: about 40 M parameters."""
    place = tmp_path_factory.mktemp("config")
    config = GemmaConfig(
        vocab_size=16_000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    config.save_pretrained(place)
    return str(place)


def options(folder, model=None, **ppo):
    return SimpleNamespace(
        model=ModelConfig(**{"model": folder} | (model or {})),
        data=DataConfig(max_prompt_length=PROMPT, max_response_length=LENGTH),
        ppo=PPOConfig(**{"batch_size": ROWS, "micro_batch_size": ROWS} | ppo),
    )


CASES = {
    "lora": {},
    "checkpointed": {"gradient_checkpointing": True},
    "full": {"finetune": "full"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")
def test_training_peak_is_within_15_percent_of_a_measured_one(folder, tmp_path, case):
    given = options(folder, CASES[case])
    job = {"model": vars(given.model), "rows": ROWS, "prompt": PROMPT, "length": LENGTH}
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = Path(__file__).parent / "peak_memory.py"
    # Large blocks go back to the system when freed, so that the peak is what lived and not what malloc kept.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, script, tmp_path / "job.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)["training"]
    guess = estimate_memory(given, gpu=False)
    assert guess.weights + guess.adapters + guess.optimizer + guess.training == pytest.approx(measured, rel=0.15)


def test_parts_by_hand(folder):
    """LoRA: one base; four adapters; two trained. Full: four models, and two of them with moments."""
    config = GemmaConfig.from_pretrained(folder)
    d, inner, q, kv = config.hidden_size, config.intermediate_size, 8 * 64, 2 * 64
    layers = [(d, q), (d, kv), (d, kv), (q, d), (d, inner), (d, inner), (inner, d)]
    weights = config.vocab_size * d + 8 * (sum(a * b for a, b in layers) + 2 * d) + d
    adapter = 8 * sum(16 * (a + b) for a, b in layers)
    lora = estimate_memory(options(folder), gpu=False)
    assert lora.weights == 4 * weights
    trained = 2 * adapter + d  # policy, and critic with its head
    assert lora.optimizer == 2 * 4 * trained
    full = estimate_memory(options(folder, {"finetune": "full"}), gpu=False)
    assert full.weights == 4 * (4 * weights + 2 * d) and full.adapters == 0
    assert full.optimizer == 2 * 4 * (2 * weights + d)
    four = estimate_memory(options(folder, {"load_in_4bit": True, "dtype": "bfloat16"}), gpu=False)
    assert 2 * config.vocab_size * d < four.weights < 0.65 * 2 * weights


def test_more_work_needs_more_memory(folder):
    small = estimate_memory(options(folder), gpu=False)
    assert estimate_memory(options(folder, micro_batch_size=4), gpu=False).training < 0.7 * small.training
    assert estimate_memory(options(folder, generation_batch_size=2), gpu=False).generation < 0.5 * small.generation
    checkpointed = estimate_memory(options(folder, {"gradient_checkpointing": True}), gpu=False)
    assert checkpointed.training < 0.5 * small.training
    keys_and_values = ROWS * (PROMPT + LENGTH) * 8 * 2 * 2 * 64 * 4
    assert small.generation > keys_and_values
    assert estimate_memory(options(folder)).peak > small.peak


def test_table_says_whether_it_fits(folder):
    memory = estimate_memory(options(folder), gpu=False)
    assert "fits a card of 80 GiB" in memory_table(memory, 80)
    assert "does not fit a card of 0.1 GiB: " in memory_table(memory, 0.1)
    assert "card" not in memory_table(memory)
    assert "--generation_batch_size" in memory_table(replace(memory, generation=99 * 2**30), 16)


def test_no_config_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no config"):
        estimate_memory(options(str(tmp_path)))


def test_the_command_reads_presets_and_needs_no_weights(folder, capsys):
    assert main(["memory", "--preset", "lora-24gb", "--model", folder, "--gpu", "24"]) == 0
    said = capsys.readouterr().out
    assert "peak" in said and "card of 24 GiB" in said
