"""How the time of an update grows with response length, batch and vocabulary; with the exponents of fitted powers.

One thing grows at a time, on random Gemmas of the embedded model's size, responses all of full length. Every point is
measured in several rounds, each a new trainer, so that a slow minute of the machine does not fall on one point alone.
Exponents are slopes of least squares in log-log: over all points, and over the last three, where constant costs count
less. Prints a Markdown table, writes JSON and draws the picture from it. Interrupted, it goes on where it was.

    python benchmarks/scaling.py
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from cells import RESULTS, Cells
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from synthetic import SHAPES, check_lengths, make_prompts, make_trainer, options, write_model
from tqdm import tqdm

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.plotting.training import STYLE, WIDTH, caption, save
from marlhf_lite.utils.tables import markdown

FIGURE = Path(__file__).parents[1] / "figures" / "benchmarks" / "scaling.png"
# What grows -> its label, its values, and what stays.
AXES = {
    "response": (
        "response length (tokens)",
        [32, 64, 128, 256, 512],
        {"batch": 16, "vocabulary": 512},
    ),
    "batch": ("responses in an update", [8, 16, 32, 64, 128], {"response": 64, "vocabulary": 512}),
    "vocabulary": (
        "tokens in the vocabulary",
        [2**11, 2**13, 2**15, 2**17, 2**18],
        {"batch": 8, "response": 32},
    ),
}
# Phase -> its metric.
PHASES = {
    "update": "seconds",
    "generation": "seconds_generation",
    "scoring": "seconds_scoring",
    "training": "seconds_training",
}


def measure(args: argparse.Namespace, point: dict[str, int]) -> dict[str, list[float]]:
    """Seconds of each phase of every timed update at one point, and CPU seconds of the whole update.

    A point says the response length, the batch and the vocabulary.
    """
    # With the names that `options` reads from a benchmark's arguments.
    at = SimpleNamespace(**point, micro_batch=args.micro_batch, seed=args.seed)
    shape = replace(SHAPES["2M"], vocabulary=at.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, args.seed)
        prompts = make_prompts(shape, at.batch, args.prompt, args.seed)
        model = ModelConfig(model=folder)
        trainer = make_trainer(model, prompts, FixedNGram(5), options(at))
    trainer.update(prompts)  # warms up
    rows = []
    for _ in range(args.updates):
        start = time.process_time()
        rows.append(trainer.update(prompts) | {"cpu_seconds": time.process_time() - start})
    check_lengths(rows, at.response)
    names = [*PHASES.values(), "cpu_seconds"]
    return {name: [row[name] for row in rows] for name in names}


def points(axis: str) -> list[dict[str, int]]:
    """Every point of an axis: a value of what grows, with the sizes that stay."""
    _, values, fixed = AXES[axis]
    return [fixed | {axis: value} for value in values]


def exponent(x: list[float], y: list[float]) -> float:
    """The power p of y = c x^p, fitted by least squares to the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def summarise(cells: dict, args: argparse.Namespace) -> dict[str, dict]:
    """For each axis: its values, and by phase the median seconds at each value, and two exponents.

    The first exponent is fitted to all values, the second to the last three. "update, CPU" is the update in CPU time.
    """
    found = {}
    for axis, (_, values, _) in AXES.items():
        record = {"values": values, "seconds": {}, "exponents": {}}
        for phase, name in (PHASES | {"update, CPU": "cpu_seconds"}).items():
            seconds = []
            for value in values:
                of_all_rounds = []
                for turn in range(args.rounds):
                    of_all_rounds += cells[cell(axis, value, turn)][name]
                seconds.append(statistics.median(of_all_rounds))
            record["seconds"][phase] = seconds
            record["exponents"][phase] = [
                exponent(values, seconds),
                exponent(values[-3:], seconds[-3:]),
            ]
        found[axis] = record
    return found


def cell(axis: str, value: int, turn: int) -> str:
    """The name of a measurement in the record; `turn` is the number of its round."""
    return f"{axis}={value}/{turn}"


def table(found: dict[str, dict]) -> str:
    """Seconds from the first to the last value, and exponents over all values and over the last three."""
    rows = []
    for axis, record in found.items():
        label, values, _ = AXES[axis]
        for phase, seconds in record["seconds"].items():
            powers = [f"{p:.2f}" for p in record["exponents"][phase]]
            what_grows = f"{label}, {values[0]} to {values[-1]}"
            from_to = f"{seconds[0]:.2f} to {seconds[-1]:.2f}"
            rows.append([what_grows, phase, from_to, *powers])
    return markdown(["what grows", "phase", "seconds", "exponent", "last three"], rows)


def draw(found: dict[str, dict], path: Path) -> None:
    """A panel for each axis, both scales logarithmic."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, 3, figsize=(2 * WIDTH, 0.75 * WIDTH), layout="constrained", sharey=True
        )
        for ax, (axis, record) in zip(axes, found.items()):
            panel(ax, axis, record)
        axes[0].set_ylabel("seconds per update")
        held_fixed = []
        for name in found:
            _, _, fixed = AXES[name]
            sizes = ", ".join(f"{what} {value}" for what, value in fixed.items())
            held_fixed.append(f"{name}: {sizes}")
        legends = "Legends: exponent over all points, and over the last three."
        caption(figure, f"{legends} Held fixed, by panel: {'; '.join(held_fixed)}.")
        save(figure, path)


def panel(ax: Axes, axis: str, record: dict) -> None:
    """Draw the seconds of each phase over the values of one axis of `AXES`."""
    for phase, style in zip(PHASES, ("o-", "s--", "^-.", "d:")):
        whole, last = record["exponents"][phase]
        label = f"{phase}: {whole:.2f}, {last:.2f}"
        ax.plot(record["values"], record["seconds"][phase], style, ms=3, label=label)
    ax.set(yscale="log", xlabel=AXES[axis][0])
    ax.set_xscale("log", base=2)
    ax.legend(fontsize=6.5)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="trainers at each point")
    parser.add_argument(
        "--updates", type=int, default=2, help="timed with each trainer, after one to warm up"
    )
    parser.add_argument(
        "--micro_batch", type=int, default=8, help="responses in a forward and backward pass"
    )
    parser.add_argument("--prompt", type=int, default=32, help="tokens in every prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_scaling.json")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    return parser.parse_args()


def main() -> None:
    """Measure every point, then fit, print and draw."""
    args = parse()
    torch.set_num_threads(args.threads)
    cells = Cells(args.out, args)
    work = []
    for turn in range(args.rounds):
        for axis in AXES:
            for point in points(axis):
                work.append((axis, point, turn))
    for axis, point, turn in tqdm(work, desc="points", disable=None):
        cells.measure(cell(axis, point[axis], turn), measure, args, point)
    found = summarise(cells.cells, args)
    cells.finish(axes=found)
    draw(found, args.figure)
    print(table(found))


if __name__ == "__main__":
    main()
