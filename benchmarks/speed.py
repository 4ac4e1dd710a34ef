"""What rows aligned left and the last layer at responses save on a CPU: updates and scoring beside the old way.

One trainer makes both sides' updates in turns (ABBA), on random Gemmas of the embedded model's size; every response has
its full length, prompts one length or several. The ratio is that of processor seconds, new over old: the median over
pairs with quartiles. `--trl` then compares with TRL (`trl_ppo/run.py`, cases of time only).

    python benchmarks/speed.py --trl  # within 8 minutes on an idle machine, once trl_ppo/run.py has installed its TRL
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from cells import RESULTS, Cells
from synthetic import (
    SHAPES,
    check_lengths,
    make_prompts,
    make_trainer,
    options,
    size_arguments,
    write_model,
)
from tqdm import tqdm

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.fast import last_layer
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.utils.tables import markdown

# name -> way of fine-tuning, epochs, and whether prompts have several lengths
CASES = {
    "LoRA, 1 epoch": ("lora", 1, False),
    "LoRA, 4 epochs": ("lora", 4, False),
    "full, 1 epoch": ("full", 1, False),
    "full, 4 epochs": ("full", 4, False),
    "LoRA, 1 epoch, prompts of 1 to 32 tokens": ("lora", 1, True),
}


def old_way():
    """Return a block in which rows are padded on the left and all layers run at all positions."""
    return mock.patch.object(last_layer, "has_plain_last_layer", lambda backbone: False)


def measure(args: argparse.Namespace, folder: Path, case: str) -> dict:
    """Quartiles of the ratio of processor seconds, new over old way: of an update, and of scoring alone."""
    finetune, epochs, has_prompts_of_several_lengths = CASES[case]
    prompts = make_prompts(SHAPES["2M"], args.batch, args.prompt, args.seed)
    if has_prompts_of_several_lengths:
        lengths = random.Random(args.seed).choices(range(1, args.prompt + 1), k=args.batch)
        cut = []
        for text, count in zip(prompts, lengths, strict=True):
            cut.append(" ".join(text.split()[:count]))  # a word is a token
        prompts = cut
    model = ModelConfig(model=str(folder), finetune=finetune)
    trainer = make_trainer(model, prompts, FixedNGram(5), options(args, num_ppo_epochs=epochs))
    scored = trainer.generate_rollout(prompts)
    works = {
        "update": lambda: update(trainer, prompts, args),
        "scoring": lambda: trainer.score(scored),
    }
    return {name: quartiles(work, args.pairs, f"{case}: {name}") for name, work in works.items()}


def update(trainer: PPOTrainer, prompts: list[str], args: argparse.Namespace) -> None:
    """Make an update. If a response has not its full length, a `RuntimeError` says so."""
    check_lengths([trainer.update(prompts)], args.response)


def quartiles(work: Callable[[], object], pairs: int, progress: str) -> list[float]:
    """Quartiles over pairs of the ratio of `work`'s processor seconds, new over old way. The first pair warms up.

    `progress` is the text of the progress bar.
    """
    spent = {"new": [], "old": []}
    for i in tqdm(range(pairs + 1), desc=progress, disable=None):
        # Each side goes first in every second pair: the order is ABBA.
        for side in ("new", "old") if i % 2 else ("old", "new"):
            torch.manual_seed(i)  # both sides of a pair draw the same
            way = old_way() if side == "old" else nullcontext()
            with way:
                start = time.process_time()
                work()
                spent[side].append(time.process_time() - start)
    ratios = [new / old for new, old in zip(spent["new"][1:], spent["old"][1:], strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive")


def main() -> int:
    """Measure each case and print the table; with `--trl` also compare with TRL, and return that program's status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="updates of each side, from 2 up")
    parser.add_argument("--cases", default="", help="only cases whose name contains this text")
    parser.add_argument("--trl", action="store_true", help="compare with TRL, too")
    size_arguments(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_speed.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cells = Cells(args.out, args)
    rows = []
    with tempfile.TemporaryDirectory() as top:
        folder = write_model(Path(top, "2M"), SHAPES["2M"], args.seed)
        for case in CASES:
            if args.cases not in case:
                continue
            found = cells.measure(case, measure, args, folder, case)
            row = [case]
            for low, median, high in found.values():
                row.append(f"{median:.2f} ({low:.2f} to {high:.2f})")
            rows.append(row)
    cells.finish()
    print(markdown(["new / old, CPU seconds", "an update", "scoring"], rows))
    if not args.trl:
        return 0
    program = Path(__file__).parent / "trl_ppo" / "run.py"
    return subprocess.run([sys.executable, program, "--cases", "epoch"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
