"""Every stage on a device that refuses tensors of the CPU (tests/second_device.py): a wrong place fails as on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import timeless
from torch.utils import backend_registration

from marlhf_lite.cli import main

SIZES = "--size 50 --batch_size 4 --updates 1 --max_prompt_length 200 --max_response_length 10"
RULES = {
    "randomized": "--num_mini_batches 2 --whiten --objective sae",
    "whole": "--micro_batch_size 0 --rollouts 2 --ratio macro --value_target macro",
    "perplexity": "--perplexity_rule macro --critic_warmup 1 --updates 2 --critic_init sft",
    "sentence": "--objective released,k3 --logprobs_at_temperature",
    "sentence_shuffled": "--num_ppo_epochs 2 --micro_batch_size 3 --generation_batch_size 3",
    "parsing": "--parser python --sigma position --reward_pooling mean",
    "value_change": "--n 3 --objective vapo --gradient_checkpointing",
    "listed": "--lengths 1,3",
    "cutpoints": "--n 3 --eval_every 1 --test_prompts 4",
}


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make a device in Python",
)
def test_every_stage_runs_on_another_device(tiny, tmp_path):
    """SFT, reward model, PPO by every rule, resume, the baselines, evaluation, both ways of fine-tuning."""
    run = f"run {SIZES} --model {tiny.model} --sft_batch_size 8 --rm_batch_size 8 --eval_prompts 4"
    made = f"--sft {tmp_path}/run --rm {tmp_path}/run"
    ppo = f"ppo {made} {SIZES} --checkpoint_every 1"
    group = f"{made} {SIZES} --checkpoint_every 1 --num_generations 2"
    two = f"SFT2={tmp_path}/run/sft,MA-PPO={tmp_path}/run"
    commands = [
        f"{run} --eval_samples 2 --output_dir {tmp_path}/run",
        *(
            f"{ppo} --termination {rule} {more} --output_dir {tmp_path}/{rule}"
            for rule, more in RULES.items()
        ),
        f"ppo --resume {tmp_path}/randomized --updates 2",
        f"run --dataset tiny-guess {SIZES} --objective sae --eval_prompts 4 --max_turns 2 --output_dir {tmp_path}/turn",
        f"rloo {group} --output_dir {tmp_path}/rloo",
        f"rloo --resume {tmp_path}/rloo --updates 2",
        f"grpo {group} --reward gold --output_dir {tmp_path}/grpo",
        f"dpo {made} --size 50 --dpo_batch_size 8 --eval_every 2 --test_prompts 4 --output_dir {tmp_path}/dpo",
        f"evaluate {made} --policies {two} --eval_prompts 4 --eval_temperatures 0,0.7 --output_dir {tmp_path}/answers",
        f"generate --policy {tmp_path}/rloo --prompt Why?",
        f"export --policy {tmp_path}/rloo --output_dir {tmp_path}/exported",
        f"{run} --finetune full --output_dir {tmp_path}/full",
        f"planted {ppo} --output_dir {tmp_path}/planted",
    ]
    script = Path(__file__).with_name("second_device.py")
    # The limit is for a run that hangs; a whole one takes a minute or two.
    done = subprocess.run(
        [sys.executable, script, *commands], capture_output=True, text=True, timeout=900
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ok: ")]
    assert done.returncode == 0 and len(lines) == len(commands), (
        f"{lines[-1:]}\n{done.stdout[-999:]}{done.stderr[-2999:]}"
    )
    # On the CPU the same numbers come out.
    assert not main(
        f"{ppo} --termination sentence {RULES['sentence']} --output_dir {tmp_path}/cpu".split()
    )
    there, here = (
        json.loads((tmp_path / at / "ppo" / "metrics.jsonl").read_text())
        for at in ("sentence", "cpu")
    )
    assert timeless([there]) == [
        pytest.approx(row, rel=1e-3, abs=1e-5, nan_ok=True) for row in timeless([here])
    ]
