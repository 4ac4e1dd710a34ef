"""One update of PPO on a pretrained model, by phase, with 16, 8, 4 and 2 responses a pass.

The sizes are taken in turns on the same rollout, so that a busy moment of the machine meets all of them. What a size
changes is time and memory: losses and gradients are the same but for rounding. Processor time of one thread.

    python benchmarks/real_update.py --model FOLDER --data PAIRS.jsonl.gz

Writes JSON, round by round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cells import RESULTS, Cells
from synthetic import make_trainer

from marlhf_lite.config.options import ModelConfig, PPOConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks.loading import drop_long_prompts, load_task
from marlhf_lite.training.ppo import PPOTrainer

SIZES, PROMPTS, LONGEST, RESPONSE = (16, 8, 4, 2), 16, 64, 64


def one_round(trainer: PPOTrainer, prompts: list[str]) -> dict:
    """Processor seconds of each phase; scoring and training with each of the sizes."""
    torch.manual_seed(0)
    rollout, spent = timed(trainer.generate_rollout, prompts)
    seconds = {"generation": spent}
    for size in SIZES:
        trainer.micro_batch_size = trainer.reward.micro_batch_size = size
        scored, seconds[f"scoring {size}"] = timed(trainer.score, rollout)
        batch = trainer.objective.batch(scored, trainer.segment(scored))
        _, seconds[f"training {size}"] = timed(trainer.forward_backward, batch, trainer.loss_normalizers(batch))
        trainer.optimizer.zero_grad()
    return seconds


def timed(run: Callable, *args) -> tuple:
    """What `run` returns, and its processor seconds."""
    begin = time.process_time()
    return run(*args), time.process_time() - begin


def summary(rounds: list[dict]) -> dict:
    """Medians of the rounds, and the median ratio of an update's time to that of 16 responses a pass."""

    def update(row: dict, size: int) -> float:
        return row["generation"] + row[f"scoring {size}"] + row[f"training {size}"]

    ratios = {size: statistics.median(update(row, size) / update(row, SIZES[0]) for row in rounds) for size in SIZES}
    return {"median": {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub name")
    parser.add_argument("--data", type=Path, required=True, help="file of preference pairs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_real_update.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = load_task(str(args.data)).splits["ppo"]
    prompts = drop_long_prompts(rows, load_tokenizer(args.model), LONGEST)[0]["prompt"][:PROMPTS]
    ppo = PPOConfig(batch_size=PROMPTS, micro_batch_size=PROMPTS)
    trainer = make_trainer(ModelConfig(model=args.model), prompts, FixedNGram(5), ppo, RESPONSE)
    cells = Cells(args.out, args)
    rounds = [cells.measure(f"round {i}", one_round, trainer, prompts) for i in range(args.rounds)]
    cells.finish(**summary(rounds))
    print(summary(rounds))


if __name__ == "__main__":
    main()
