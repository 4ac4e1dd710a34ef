"""What could make an update faster or smaller, each lever beside the plain update: is it worth its code?

    compile   `torch.compile` of policy, critic, reference and reward model (forward and backward), against none: two
              trainers on the same prompts and seeds, in turn (ABBA), by processor time; and what compiling costs.
    padding   The share of positions in a pass that are padding, which rows without padding would save at most: of
              prompts and answers of the embedded data, sorted by the answers' length as the trainer sorts them.
    step      The share of an update's processor time that the optimizer's step takes (one fused AdamW holds policy and
              critic already), and clipping.
    memory    With full fine-tuning and 30M weights, what weights, gradients and moments take, and the peak of the
              process before and in the optimizer's step: freeing gradients within the step helps where the second is
              the larger one.

Random Gemmas of the embedded model's size. Prints Markdown tables and writes JSON.

    python benchmarks/levers.py --pairs 12
"""

import argparse
import gzip
import itertools
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from cells import RESULTS, Cells
from synthetic import SHAPES, check_lengths, options, shaped_trainer, size_arguments, write_models
from update import ratio

from marlhf_lite.models.loading import EMBEDDED_MODEL, load_tokenizer
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import markdown

SIDES, WAYS = ("plain", "compiled"), ("lora", "full")
FILES = ("tiny-tldr", "tiny-hh", "tiny-webgpt", "tiny-steps")


def compiled(args: argparse.Namespace, folder: Path) -> dict:
    """Processor seconds of updates with and without compiled models; the first updates, which compile, apart."""
    sides = {side: shaped_trainer(args, folder, args.shape, 5, options(args)) for side in SIDES}
    trainer, _ = sides["compiled"]
    for model in (trainer.models.reference, trainer.models.reward, trainer.actor_critic):
        model.compile(dynamic=True)
    spent, losses = {side: [] for side in SIDES}, {side: [] for side in SIDES}
    for i in range(args.pairs + 2):
        for side in SIDES if i % 2 else SIDES[::-1]:
            trainer, prompts = sides[side]
            torch.manual_seed(i)
            start = time.process_time()
            row = trainer.update(prompts)
            spent[side].append(time.process_time() - start)
            losses[side].append(row["value_loss"])
            check_lengths([row], args.response)
    first = [{side: spent[side][i] for side in SIDES} for i in range(2)]
    kept = {side: spent[side][2:] for side in SIDES}
    return {"seconds": kept, "first": first, "ratio": ratio(kept["compiled"], kept["plain"]), "value_loss": losses}


def padding(args: argparse.Namespace) -> dict:
    """The mean share of positions that are padding, by the file of the lengths and by responses a pass."""
    found, rng = {}, random.Random(args.seed)
    for name, rows in {name: lengths(name) for name in FILES}.items():
        for micro in (4, 8, 16):
            shares = []
            for _ in range(50):
                batch = sorted(rng.sample(rows, args.batch))  # by response, as the trainer sorts them
                passes = [batch[i : i + micro] for i in range(0, args.batch, micro)]
                computed = sum(len(rows) * sum(map(max, zip(*rows, strict=True))) for rows in passes)
                shares.append(1 - sum(map(sum, batch)) / computed)
            found[f"{name}, {micro} a pass"] = statistics.mean(shares)
    return found


def lengths(name: str) -> list[tuple[int, int]]:
    """Tokens of response and prompt of each row of an embedded data set."""
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    with gzip.open(shipped(f"{name}.jsonl.gz"), "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:2000]
    texts = [[row[column] for row in rows] for column in ("chosen", "prompt")]
    counted = [[len(ids) for ids in tokenizer(column)["input_ids"]] for column in texts]
    return list(zip(*counted, strict=True))


def step(args: argparse.Namespace, folder: Path, way: str) -> dict:
    """Processor seconds of an update, of the optimizer's step and of clipping, medians."""
    trainer, prompts = shaped_trainer(args, folder, args.shape, 5, options(args), finetune=way)
    spent, updates = {"step": [], "clip": []}, []
    places = {"step": (trainer.optimizer.optimizer, "step"), "clip": (torch.nn.utils, "clip_grad_norm_")}
    with ExitStack() as patches:
        for name, (owner, method) in places.items():
            timed = timing(getattr(owner, method), spent[name])
            patches.enter_context(mock.patch.object(owner, method, timed))
        for _ in range(args.pairs):
            start = time.process_time()
            trainer.update(prompts)
            updates.append(time.process_time() - start)
    per_update = {name: sum(times) / args.pairs for name, times in spent.items()}
    return {"update": statistics.median(updates)} | per_update


def timing(work, seconds: list[float]):
    def timed(*args, **kwargs):
        start = time.process_time()
        result = work(*args, **kwargs)
        seconds.append(time.process_time() - start)
        return result

    return timed


def memory(args: argparse.Namespace, folder: Path) -> dict:
    """MiB of weights, gradients and moments with full fine-tuning, and the process's peaks before and in a step."""
    trainer, prompts = shaped_trainer(args, folder, "30M", 5, options(args), finetune="full")
    trainer.update(prompts)
    models = (getattr(trainer.models, role) for role in ("policy", "critic", "reference", "reward"))
    weights = sum(p.nbytes for model in models for p in model.parameters())
    trained = sum(p.nbytes for p in itertools.chain(*trainer.parameters.values()))
    inner, plain, peaks = trainer.optimizer.optimizer, trainer.optimizer.optimizer.step, {}

    def measured(*rest, **kwargs):
        peaks["peak before the step"] = highest_rss()
        result = plain(*rest, **kwargs)
        peaks["peak in the step"] = highest_rss()
        return result

    highest_rss()
    with mock.patch.object(inner, "step", measured):
        trainer.update(prompts)
    held = {"weights": weights, "moments": 2 * trained, "gradients": trained}
    return {name: size / 2**20 for name, size in (held | peaks).items()}


def highest_rss() -> int:
    """Bytes of the largest resident size since the last call (Linux)."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def tables(cells: dict) -> str:
    rows = []
    if made := cells.get("compile"):
        r = made["ratio"]
        first = " and ".join(f"{pair['compiled']:.0f}" for pair in made["first"])
        rows.append(
            ["compile", f"{r['mean']:.3f} ({r['low']:.3f} to {r['high']:.3f}) of plain; first updates {first} s"]
        )
    for name, share in cells["padding"].items():
        rows.append([f"padding: {name}", f"{share:.1%} of positions"])
    for way in WAYS:
        found = cells[f"step/{way}"]
        share = {name: found[name] / found["update"] for name in ("step", "clip")}
        rows.append([f"step: {way}", f"{share['step']:.1%} of an update, clipping {share['clip']:.1%}"])
    rows += [[f"memory: {name}", f"{size:.0f} MiB"] for name, size in cells["memory"].items()]
    return markdown(["lever", "measured"], rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="2M", choices=tuple(SHAPES))
    parser.add_argument("--pairs", type=int, default=12, help="updates of each side")
    parser.add_argument("--no_compile", action="store_true", help="leave out what takes longest")
    size_arguments(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_levers.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    cells = Cells(args.out, args)
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        write_models(folder, args.seed)
        cells.measure("padding", padding, args)
        for way in WAYS:
            cells.measure(f"step/{way}", step, args, folder, way)
        cells.measure("memory", memory, args, folder)
        if not args.no_compile:
            cells.measure("compile", compiled, args, folder)
        print(tables(cells.cells))
    cells.finish()


if __name__ == "__main__":
    main()
