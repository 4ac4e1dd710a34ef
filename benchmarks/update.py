"""One update, taken apart: what its phases cost, how many passes it makes, and what macro actions add.

    profile   Time by phase: generation, scoring, training, macro operations (segmentation with its parser, rewards,
              advantages, losses), logging. Beside it the rate of a phase's matrix products (attention's left out) as a
              share of what one large matrix product reaches here: a phase near it can only get faster by making fewer.
    passes    Forward and backward passes over the batch, by role, counted by hooks in the models while training and
              scoring; sampling left out.
    a/b       MA-PPO (n=5) against token PPO (n=1): two trainers on the same prompts and seeds, in turn (ABBA), with
              responses of equal length. The ratio of times, as a geometric mean over pairs with a 95 % interval.

Random Gemmas of the embedded model's size and of 30M parameters; the parsing rule runs on the embedded model with its
own task. Prints Markdown tables and writes JSON.

    python benchmarks/update.py --pairs 40
"""

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from cells import RESULTS, Cells
from passes import CASES, count_passes, passes_table
from synthetic import (
    SHAPES,
    check_lengths,
    make_trainer,
    options,
    shaped_trainer,
    size_arguments,
    write_models,
)
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from marlhf_lab.corpora.tiny_tldr import make_post
from marlhf_lite.config.options import MacroConfig, ModelConfig
from marlhf_lite.evaluation.statistics import bootstrap_mean
from marlhf_lite.experiments.named_rules import make_rule
from marlhf_lite.models.loading import EMBEDDED_MODEL
from marlhf_lite.training import ppo as ppo_module
from marlhf_lite.training.metrics import Clock
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.utils.run_folder import RunFolder
from marlhf_lite.utils.tables import markdown

PHASES = ("generation", "scoring", "training", "macro operations", "logging", "rest")


# -- profile ----------------------------------------------------------------------------------------------------------


class FlopClock(Clock):
    """A trainer's clock that also counts the floating-point operations of each phase's matrix products."""

    def __init__(self, counter: FlopCounterMode):
        super().__init__()
        self.counter = counter
        self.flops = Counter()

    @contextmanager
    def phase(self, name: str):
        before = self.counter.get_total_flops()
        with super().phase(name):
            yield
        self.flops[name] += self.counter.get_total_flops() - before


def profile(args: argparse.Namespace, folder: Path, setting: str) -> dict:
    """Median seconds and GFLOP of each phase of an update; `setting` is the name of a shape, or "parsing"."""
    with tempfile.TemporaryDirectory() as place:
        run = RunFolder.create(Path(place, "run"), {})
        trainer, prompts = profiled_trainer(args, folder, setting, run)
        logged = timed_log(trainer)
        trainer.update(prompts)  # warms up
        rows = [phases(trainer.update(prompts), logged) for _ in range(args.updates)]
        seconds = {phase: statistics.median(row[phase] for row in rows) for phase in PHASES}
        gflop = {phase: count / 1e9 for phase, count in flops(trainer, prompts).items()}
        return {"seconds": seconds, "gflop": gflop}


def profiled_trainer(args: argparse.Namespace, folder: Path, setting: str, run: RunFolder):
    """A trainer and its prompts: on a random Gemma, or with the parsing rule on the embedded model and its task."""
    if setting in SHAPES:
        return shaped_trainer(args, folder, setting, 5, options(args), run=run)
    rng = random.Random(args.seed)
    prompts = [make_post(rng).prompt for _ in range(args.batch)]
    rule = make_rule(MacroConfig(termination="parsing"))
    model = ModelConfig(model=EMBEDDED_MODEL)
    return make_trainer(model, prompts, rule, options(args), run=run), prompts


def timed_log(trainer: PPOTrainer) -> list[float]:
    """A list to which every later call of the trainer's logger adds its seconds."""
    log = trainer.logger.log_update
    spent = []

    def timed(*given) -> None:
        start = time.perf_counter()
        log(*given)
        spent.append(time.perf_counter() - start)

    trainer.logger.log_update = timed
    return spent


def phases(row: dict, logged: list[float]) -> dict[str, float]:
    """An update's seconds by phase, from its metrics `row` and the list of `timed_log`.

    "rest" is what the metrics' own phases leave of the update. Logging is not part of it, because records are written
    after the update's time is taken.
    """
    taken = {name: row[f"seconds_{name}"] for name in ("generation", "scoring", "training")}
    taken |= {"macro operations": row["seconds_macro"]}
    return taken | {"rest": row["seconds"] - sum(taken.values()), "logging": logged[-1]}


def flops(trainer: PPOTrainer, prompts: list[str]) -> dict[str, float]:
    """The floating-point operations of one more update, by the trainer's own names of phases."""
    with FlopCounterMode(display=False) as counter:
        clock = FlopClock(counter)
        # The trainer makes a new clock in each update: let it get this one.
        with mock.patch.object(ppo_module, "Clock", lambda: clock):
            trainer.update(prompts)
    return dict(clock.flops)


def peak_gflops(size: int = 1024, repeats: int = 20) -> float:
    """GFLOP/s of the fastest of `repeats` products of two matrices of `size` rows and columns."""
    a = torch.randn(size, size)
    b = torch.randn(size, size)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds) / 1e9


def profile_table(found: dict[str, dict], peak: float) -> str:
    head = ["phase"]
    lines = {phase: [phase] for phase in (*PHASES, "update")}
    for setting, record in found.items():
        head += [f"{setting}: ms", "share", "of peak"]
        total = sum(record["seconds"].values())
        seconds = record["seconds"] | {"update": total}
        gflop = record["gflop"] | {"update": sum(record["gflop"].values())}
        for phase, spent in seconds.items():
            work = gflop.get(phase, 0.0)
            rate = f"{work / spent / peak:.0%}" if work else ""  # GFLOP, s and GFLOP/s
            lines[phase] += [f"{1e3 * spent:.1f}", f"{spent / total:.1%}", rate]
    return markdown(head, list(lines.values()))


# -- A/B --------------------------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, folder: Path) -> dict:
    """Seconds of every update with n = 1 and with n = 5, by the clock and of CPU time, and the ratios."""
    sides = {n: shaped_trainer(args, folder, "2M", int(n), options(args)) for n in ("1", "5")}
    spent = {"wall": {"1": [], "5": []}, "cpu": {"1": [], "5": []}}
    for i in tqdm(range(args.pairs + 1), desc="A/B", disable=None):
        in_turn = ("1", "5") if i % 2 else ("5", "1")  # ABBA
        for n in in_turn:
            trainer, prompts = sides[n]
            torch.manual_seed(i)
            wall = time.perf_counter()
            cpu = time.process_time()
            row = trainer.update(prompts)
            spent["wall"][n].append(time.perf_counter() - wall)
            spent["cpu"][n].append(time.process_time() - cpu)
            check_lengths([row], args.response)
    seconds = {}
    ratios = {}
    for clock, both in spent.items():
        # the first warms up
        seconds[clock] = {n: times[1:] for n, times in both.items()}
        ratios[clock] = ratio(seconds[clock]["5"], seconds[clock]["1"])
    return {"seconds": seconds, "ratio": ratios}


def ratio(over: list[float], under: list[float]) -> dict[str, float]:
    """Geometric mean of the pairs' ratios `over` / `under`, with its bootstrap interval, and their median."""
    logs = [math.log(a / b) for a, b in zip(over, under)]
    found = bootstrap_mean(logs)
    return {
        "mean": math.exp(found.mean),
        "low": math.exp(found.low),
        "high": math.exp(found.high),
        "median": math.exp(statistics.median(logs)),
    }


def compare_table(found: dict) -> str:
    rows = []
    for clock, ratios in found["ratio"].items():
        row = [clock]
        for n in ("5", "1"):
            row.append(f"{statistics.median(found['seconds'][clock][n]):.3f}")
        row.append(f"{ratios['mean']:.3f}× ({ratios['low']:.3f} to {ratios['high']:.3f})")
        row.append(f"{ratios['median']:.3f}×")
        rows.append(row)
    return markdown(["seconds per update", "n=5", "n=1", "n=5 / n=1", "median"], rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--settings", nargs="+", default=["2M", "30M", "parsing"], help="what to profile"
    )
    parser.add_argument("--updates", type=int, default=5, help="profiled in each setting")
    parser.add_argument(
        "--pairs", type=int, default=40, help="updates of each side in the A/B comparison"
    )
    size_arguments(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_update.json")
    return parser.parse_args()


def main() -> None:
    """The three parts, each printed when it is done."""
    args = parse()
    torch.set_num_threads(args.threads)
    cells = Cells(args.out, args)
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        write_models(folder, args.seed)
        found = {}
        for setting in args.settings:
            found[setting] = cells.measure(f"profile/{setting}", profile, args, folder, setting)
        peak = cells.measure("peak", lambda: {"gflops": peak_gflops()})["gflops"]
        print(f"one large matrix product: {peak:.0f} GFLOP/s\n\n{profile_table(found, peak)}\n")
        passes = {}
        for case in CASES:
            passes[case] = cells.measure(f"passes/{case}", count_passes, args, folder, case)
        print(f"{passes_table(passes)}\n")
        print(compare_table(cells.measure("a/b", compare, args, folder)))
    cells.finish()


if __name__ == "__main__":
    main()
