"""One update of PPO on a pretrained model, by phase, with 16, 8, 4 and 2 responses a pass.

The sizes are taken in turns on the same rollout, so that a busy moment of the machine meets all of them. What a size
changes is time and memory: losses and gradients are the same but for rounding. Processor time of one thread.

    python benchmarks/real_update.py --model FOLDER --data PAIRS.jsonl.gz

Writes JSON, round by round; at last a profile of each phase, which tells what its time goes to.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cells import RESULTS, Cells
from synthetic import make_trainer

from marlhf_lite.config.options import ModelConfig, PPOTrainerConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks.loading import drop_long_prompts, load_task
from marlhf_lite.training.ppo import PPOTrainer

SIZES = (16, 8, 4, 2)
PROMPTS = 16
LONGEST = 64
RESPONSE = 64
BEST = 8  # responses a pass in the profile: the fastest of SIZES when this was written
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def one_round(trainer: PPOTrainer, prompts: list[str]) -> dict:
    """Processor seconds of each phase of an update; scoring and training once with each of `SIZES` responses a pass."""
    torch.manual_seed(0)  # the same responses in every round
    rollout, spent = timed(trainer.generate_rollout, prompts)
    seconds = {"generation": spent}
    for size in SIZES:
        trainer.state.micro_batch.now = trainer.reward.micro_batch_size = size
        scored, seconds[f"scoring {size}"] = timed(trainer.score, rollout)
        batch = trainer.objective.batch(scored, trainer.segment(scored))
        _, seconds[f"training {size}"] = timed(
            trainer.forward_backward, batch, trainer.loss_normalizers(batch)
        )
        trainer.optimizer.zero_grad()  # no step: every size meets the same weights
    return seconds


def profile_of(trainer: PPOTrainer, prompts: list[str]) -> dict:
    """For each phase: shares of its time by operation, the ten largest, and the rate of its matrix products.

    The rate is in units of that of one product of two matrices of 2,048 rows and columns.
    """
    trainer.state.micro_batch.now = trainer.reward.micro_batch_size = BEST
    square = torch.randn(2048, 2048)
    _, operations_of_a_large_product = profiled(torch.mm, square, square)
    rate_of_a_large_product = rate_of_products(operations_of_a_large_product)
    phases = {}
    rollout, phases["generation"] = profiled(trainer.generate_rollout, prompts)
    scored, phases["scoring"] = profiled(trainer.score, rollout)
    batch = trainer.objective.batch(scored, trainer.segment(scored))
    _, phases["training"] = profiled(
        trainer.forward_backward, batch, trainer.loss_normalizers(batch)
    )
    found = {}
    for phase, operations in phases.items():
        rate = rate_of_products(operations) / rate_of_a_large_product
        found[phase] = shares(operations) | {"rate": rate}
    return found


def profiled(run: Callable, *args) -> tuple:
    """What `run` returns, and the profile of the operations inside it.

    For each kind of operation there is the time in it alone, and the number of floating-point operations.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True
    ) as profiler:
        result = run(*args)
    return result, profiler.key_averages()


def shares(operations) -> dict:
    """The share of all time in matrix products, and the shares of the ten largest operations, largest first."""
    total = sum(op.self_cpu_time_total for op in operations)
    largest = sorted(operations, key=lambda op: -op.self_cpu_time_total)[:10]
    products = sum(op.self_cpu_time_total for op in operations if op.key in PRODUCTS)
    return {
        "products": products / total,
        "largest": {op.key: op.self_cpu_time_total / total for op in largest},
    }


def rate_of_products(operations) -> float:
    """How many floating-point operations the matrix products do in a microsecond."""
    products = [op for op in operations if op.key in PRODUCTS]
    flops = sum(op.flops for op in products)
    microseconds = sum(op.self_cpu_time_total for op in products)
    return flops / microseconds


def timed(run: Callable, *args) -> tuple:
    """What `run` returns, and its processor seconds."""
    begin = time.process_time()
    return run(*args), time.process_time() - begin


def summary(rounds: list[dict]) -> dict:
    """Medians over the rounds, and the median ratio of an update's time to that with 16 responses a pass."""

    def of_an_update(row: dict, size: int) -> float:
        return row["generation"] + row[f"scoring {size}"] + row[f"training {size}"]

    largest = SIZES[0]
    ratios = {}
    for size in SIZES:
        by_round = [of_an_update(row, size) / of_an_update(row, largest) for row in rounds]
        ratios[size] = statistics.median(by_round)
    medians = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    return {"median": medians, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub name"
    )
    parser.add_argument("--data", type=Path, required=True, help="file of preference pairs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_real_update.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = load_task(str(args.data)).splits["ppo"]
    short, _ = drop_long_prompts(rows, load_tokenizer(args.model), LONGEST)
    prompts = short["prompt"][:PROMPTS]
    sizes = {"batch_size": PROMPTS, "micro_batch_size": PROMPTS, "max_response_length": RESPONSE}
    ppo = PPOTrainerConfig(**sizes, checkpoint_every=0)
    trainer = make_trainer(ModelConfig(model=args.model), prompts, FixedNGram(5), ppo)
    cells = Cells(args.out, args)
    rounds = [cells.measure(f"round {i}", one_round, trainer, prompts) for i in range(args.rounds)]
    profile = cells.measure("profile", profile_of, trainer, prompts)
    cells.finish(**summary(rounds))
    print(summary(rounds), profile)


if __name__ == "__main__":
    main()
