"""Prompts without answers and a reward of one's own: PPO from the base model as it is."""

import json

import pytest
from safetensors.torch import load_file

from marlhf_lite.cli import main

REWARD = "def short(prompts, responses):\n    return [-len(r.split()) / 50 for r in responses]\n"


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_reward.py").write_text(REWARD)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Tell of {i} cats."}) + "\n" for i in range(40)))
    return path


def test_ppo_starts_from_the_base_model(prompts, capsys):
    sizes = "--batch_size 4 --updates 1 --max_response_length 6 --eval_prompts 2 --output_dir out"
    assert not main(f"run --dataset {prompts} --reward my_reward:short {sizes}".split())
    printed = capsys.readouterr().out
    assert "the policy starts as the base model is" in printed and "gold score" in printed
    rows = json.loads((prompts.parent / "out" / "data.json").read_text())
    assert (rows["sft"], rows["rm"], rows["ppo"], rows["test"]) == (0, 0, 36, 4)
    adapter = load_file("out/sft/adapter_model.safetensors")
    assert all(not weight.any() for name, weight in adapter.items() if "lora_B" in name)
    (row,) = map(json.loads, (prompts.parent / "out" / "ma-ppo" / "metrics.jsonl").read_text().splitlines())
    assert abs(row["kl_k1"]) < 1e-5 and row["rm_score_mean"] < 0


@pytest.mark.parametrize("words", ["run", "rm --sft out", "dpo --sft out"])
def test_what_learns_from_pairs_refuses_prompts(prompts, words, capsys):
    assert words == "run" or not main(f"sft --dataset {prompts} --output_dir out".split())
    capsys.readouterr()
    assert main(f"{words} --dataset {prompts} --output_dir more".split())
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "prompts.jsonl: it has no preference pairs" in line
