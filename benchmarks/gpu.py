"""What can only be seen on a GPU, row by row, in fifteen minutes and without a network: `make gpu`.

The model has Gemma-2B's exact architecture and random weights. What makes an update faster on a card ("levers") is
switched on one after the other in one process, so that the old way and the new one stand side by side:

    0  the card: its rates of a large copy and of a large product
    1  checks: each way gives the numbers of the plain one (`gpu_equal.py`); tests/test_on_card.py
    2  LoRA the old way, one update profiled
    3  LoRA with one lever more each time, the last one profiled
    4  full fine-tuning, the same
    5  generation alone: transformers' cache that grows, its static one, and ours, for 1 and 4 batches of rows; then
       LoRA with fused kernels, which cannot be taken back in a process
    6  the preset lora-t4-16gb with the memory of a T4
    7  TRL 1.12's PPOTrainer with LoRA (benchmarks/trl_ppo)
    8  8, 16 and 32 rows a pass; what --gradient_checkpointing auto decides; a 4-bit base

Each measurement is a line of JSON in `--log` as soon as it is made; a second call goes on after the last one. An error
costs the measurement, not what follows: the process that it may have broken is replaced. At the end all lines are
joined in `--out`, with `equal`: for each way whether its numbers are equal. The last table says which of them may
be defaults on this card; a lever of `--fast` becomes one by its record in `RECORDS_OF_A_GPU` (models/fast/switch.py).

    python benchmarks/gpu.py --rows 0-3,5,4          # one card of 80 GB
    python benchmarks/gpu.py --device cpu --tiny     # every row on a tiny model, to try this script
    python benchmarks/gpu.py --device cpu --rows 2 --batch 8 --micro 2 --updates 1 --warmup 0    # about 10 GiB

MFU counts what an update must compute: 2 operations a weight of the layers and real token for each forward pass and for
each product of a backward pass (2 with full fine-tuning, 1 with LoRA), and the head at the responses. What
checkpointing computes again is left out, and padding, and so is sampling, which has tokens and bytes a second.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from unittest import mock

import torch
import yaml
from gpu_equal import NEEDS_A_CARD, WAYS, defaults, equal_numbers, equal_tokens, verdicts
from gpu_updates import (
    GIB,
    LEVERS,
    Bench,
    OutOfTime,
    StaticCache,
    generation,
    make_prompts,
    read_log,
    recompute,
    save_base,
    updates,
    write_line,
)

from marlhf_lite.config.commands import MemoryCommand
from marlhf_lite.extras.memory.estimate import estimate_memory
from marlhf_lite.training.rollout import Sampling
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import environment
from marlhf_lite.utils.tables import markdown

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
T4_GIB = 14.7
BRIEF = (1, 2)  # updates that warm up, and that are measured


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and short responses, to try this script"
    )
    parser.add_argument(
        "--rows", default="0-3,5,4,6-8", help="rows of the table above, in this order"
    )
    sizes = {"warmup": 2, "updates": 3, "batch": 64, "micro": 8, "prompt": 256, "response": 128}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute activations with all levers, too"
    )
    parser.add_argument(
        "--profile", action="store_true", help="profile an update of every measurement"
    )
    parser.add_argument(
        "--peak_tflops", type=float, default=0.0, help="the card's dense 16-bit TFLOP/s, if unknown"
    )
    parser.add_argument(
        "--trl", default=str(HERE / "trl_ppo" / ".trl"), help="folder with TRL 1.12 alone (row 7)"
    )
    parser.add_argument("--commit", default="", help="of the code, if this is no checkout")
    parser.add_argument(
        "--seconds",
        type=float,
        default=840.0,
        help="time limit; what does not fit is left for later",
    )
    parser.add_argument(
        "--log",
        type=Path,
        default=ROOT / "build" / "gpu.jsonl",
        help="a line of JSON a measurement",
    )
    parser.add_argument(
        "--out", type=Path, help="all as one JSON; default data/results/gpu/CARD_levers.json"
    )
    # Given only to the processes that measure: their deadline, as `time.time()` counts.
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.tiny:
        args.warmup = 1
        args.updates = 1
        args.batch = 4
        args.micro = 2
        args.prompt = 16
        args.response = 8
    return args


# -- rows -------------------------------------------------------------------------------------------------------------


def row_0(bench: Bench) -> None:
    bench.measure("0 card", card)


def card(bench: Bench) -> dict:
    """Return what this device is, and its best rates of a large copy and a large product."""
    cuda = bench.device.type == "cuda"
    width = 512 if bench.args.tiny else 8192
    a = torch.randn(width, width, device=bench.device).bfloat16()
    b = torch.randn(width, width, device=bench.device).bfloat16()
    size = width * width
    if cuda:  # larger than any cache of the card
        size = 16 * size
    big = torch.empty(size, dtype=torch.bfloat16, device=bench.device)

    def best_seconds(work: Callable) -> float:
        spent = []
        for _ in range(5):
            start = bench.wait()
            work()
            spent.append(bench.wait() - start)
        return min(spent)

    versions = environment()
    if bench.args.commit:
        versions["git_commit"] = bench.args.commit
    device = {"name": "CPU", "threads": torch.get_num_threads()}
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        device = {
            "name": properties.name,
            "gib": properties.total_memory / GIB,
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return {
        "device": device,
        "environment": versions,
        "product_tflops": 2 * width**3 / best_seconds(lambda: a @ b) / 1e12,
        "copy_gb_per_second": 2 * big.nbytes / best_seconds(big.clone) / 1e9,  # read and written
    }


def row_1(bench: Bench) -> None:
    for way in WAYS:
        name = f"1 equal: {way}"
        if way in NEEDS_A_CARD and bench.args.device == "cpu":
            bench.measure(name, lambda bench: {"left_out": "on a GPU alone"})
        elif way == "fused" and importlib.util.find_spec("liger_kernel") is None:
            bench.measure(name, lambda bench: {"left_out": "needs liger-kernel"})
        elif way == "fused":  # these kernels replace classes of transformers, in the whole process
            bench.measure(name, equal_numbers, way, ends_process=True)
        elif way == "graph":  # it samples, so that there are tokens to compare
            bench.measure(name, equal_tokens)
        else:
            bench.measure(name, equal_numbers, way)
    bench.measure("1 tests", run_tests_on_card)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def run_tests_on_card(bench: Bench) -> dict:
    """Run the tests of kernels, autocast and checkpointing, which take the card if there is one."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["tests/test_on_card.py", "-k", "not gpu"]  # without the tests that start this script
    env = os.environ | {"PYTHONPATH": path_with(str(ROOT))}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    summary = lines[-1]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    check(done.returncode == 0, f"{summary} {failed}")
    return {"summary": summary}


def path_with(folder: str) -> str:
    """Return this process's PYTHONPATH with a folder before it, for the environment of another process."""
    return os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])


def row_2(bench: Bench) -> None:
    bench.measure("2 lora: before", updates, "lora", on=0, profiled=True)


def row_3(bench: Bench) -> None:
    measure_lever_by_lever(bench, "3", "lora")


def row_4(bench: Bench) -> None:
    bench.measure("4 full: before", updates, "full", on=0)
    measure_lever_by_lever(bench, "4", "full")
    measure_with_fused_kernels(bench, "4", "full")


def measure_lever_by_lever(bench: Bench, row: str, way: str) -> None:
    """Measure updates with the first lever, with the first two, and so on; all but the last measurement are brief."""
    for i, lever in enumerate(LEVERS, start=1):
        name = f"{row} {way}: + {lever.name}"
        last = i == len(LEVERS)
        if lever.cuda_alone and bench.args.device == "cpu":
            bench.measure(name, lambda bench: {"left_out": "on a GPU alone"})
        elif way in lever.ways:
            counts = None if last else BRIEF
            bench.measure(name, updates, way, on=i, profiled=last, counts=counts)


def measure_with_fused_kernels(bench: Bench, row: str, way: str) -> None:
    """Measure updates with all levers and with liger-kernel's norms, gated units and rotary embeddings."""
    name = f"{row} {way}: + fused kernels"
    if bench.args.device == "cpu" or importlib.util.find_spec("liger_kernel") is None:
        bench.measure(name, lambda bench: {"left_out": "needs a GPU and liger-kernel"})
    else:
        bench.measure(name, updates, way, profiled=True, fused=True, ends_process=True)


def row_5(bench: Bench) -> None:
    for rows in (bench.args.batch, 4 * bench.args.batch):
        name = f"5 generation, {rows} rows"
        bench.measure(f"{name}: cache that grows", generation, Sampling, rows, graph=False)
        bench.measure(f"{name}: static cache", generation, StaticCache, rows, graph=False)
        if bench.args.device == "cuda":
            bench.measure(f"{name}: ours", generation, Sampling, rows, graph=True)
    measure_with_fused_kernels(bench, "3", "lora")


def row_6(bench: Bench) -> None:
    bench.measure("6 lora-t4-16gb", t4)


def t4(bench: Bench) -> dict:
    """Measure updates as the preset lora-t4-16gb makes them, in no more memory than a T4 has.

    Model, lengths and rows a pass are the preset's. The batch has only as many responses as the preset samples at once,
    `generation_batch_size`.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return {"left_out": "bitsandbytes is not installed: pip install -e '.[gpu]'"}
    file = ROOT / "marlhf_lite" / "config" / "presets" / "lora-t4-16gb.yaml"
    preset = yaml.safe_load(file.read_text(encoding="utf-8"))
    cuda = bench.device.type == "cuda"
    sizes = {
        "max_response_length": preset["max_response_length"],
        "generation_batch_size": preset["generation_batch_size"],
        "prompt": preset["max_prompt_length"],
    }
    batch = preset["generation_batch_size"]
    micro = preset["micro_batch_size"]
    if bench.args.tiny:
        sizes = {"max_response_length": bench.args.response}
        batch = bench.args.batch
    if cuda:  # on a larger card, allow as much as a T4 has
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(min(T4_GIB / total, 1.0))
    model = {"dtype": preset["dtype"], "four_bits": True, "batch_size": batch, **sizes}
    with mock.patch.object(torch.cuda, "is_bf16_supported", lambda **_: False):  # a T4 has none
        trainer = bench.trainer("lora", **model)
    recompute(trainer, on=preset["gradient_checkpointing"] is True)
    # The same arguments, so that these updates are made by the trainer above.
    found = updates(bench, "lora", rows=micro, counts=(0, 3), **model)
    # What `marlhf memory` says of the preset; it has some of the preset's options.
    names = {field.name for field in fields(MemoryCommand)} & preset.keys()
    of_estimate = {name: preset[name] for name in names}
    estimate = estimate_memory(MemoryCommand(**of_estimate, gpu=T4_GIB))
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    bench.unload()
    check(found["finite"], "a loss or a gradient is not finite")
    return found | {
        "limit_gib": T4_GIB if cuda else None,
        "estimated_peak_gib": estimate.peak / GIB,
    }


def row_7(bench: Bench) -> None:
    bench.measure("7 TRL's PPOTrainer, lora", measure_trl)


def measure_trl(bench: Bench) -> dict:
    """Measure TRL's updates, of the same model and sizes, by benchmarks/trl_ppo/theirs.py in another process."""
    args = bench.args
    if not Path(args.trl, "trl").is_dir():
        return {
            "left_out": f"no trl in {args.trl}: pip install --no-deps --target {args.trl} trl==1.12.0"
        }
    bench.unload()  # the other process needs the card's memory
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = make_prompts(bench.tokenizer, args.batch, args.prompt)
        (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
        options = {
            "model": save_base(folder / "model", args.tiny, torch.bfloat16),
            "prompts": folder / "prompts.json",
            "out": folder / "found.json",
            "batch": args.batch,
            "micro_batch": args.micro,
            "response": args.response,
            "updates": args.updates + 1,  # the first warms up
            "device": args.device,
            "dtype": "bfloat16",
        }
        bench.unload()  # what `save_base` has left on the card
        env = os.environ | {
            "PYTHONPATH": path_with(args.trl),
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        words = [sys.executable, str(HERE / "trl_ppo" / "theirs.py")]
        words += [f"--{name}={value}" for name, value in options.items()]
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        check(done.returncode == 0, done.stderr[-800:])
        found = json.loads(options["out"].read_text(encoding="utf-8"))
    return found | {"seconds_per_update": statistics.median(found["seconds"])}


def row_8(bench: Bench) -> None:
    for factor in (1, 2, 4):
        rows = factor * bench.args.micro
        bench.measure(f"8 lora: {rows} rows a pass", updates, "lora", rows=rows, counts=BRIEF)
    bench.measure("8 lora: auto", find_what_auto_decides)
    if importlib.util.find_spec("bitsandbytes") is None:
        bench.measure("8 lora, 4 bits", lambda bench: {"left_out": "bitsandbytes is not installed"})
    else:
        bench.measure("8 lora, 4 bits", updates, "lora", four_bits=True, counts=BRIEF)


def find_what_auto_decides(bench: Bench) -> dict:
    """Return what --gradient_checkpointing auto and --micro_batch_size 0 find by dry runs."""
    trainer = bench.trainer("lora")
    trainer.state.gradient_checkpointing = "auto"
    trainer.state.micro_batch.now = 0
    rows = trainer.fit_micro_batch_size()
    found = {"rows_a_pass": rows, "checkpointing": trainer.state.gradient_checkpointing}
    recompute(trainer, on=bench.args.checkpointing)  # as before, for later measurements
    return found


ROWS = (row_0, row_1, row_2, row_3, row_4, row_5, row_6, row_7, row_8)


# -- processes and files ----------------------------------------------------------------------------------------------


def wanted_rows(text: str) -> list[int]:
    """Return the numbers of rows that `--rows` names, such as 0-3,5."""
    rows = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        rows += range(int(first), int(last) + 1)
    return rows


def measure_rows(args: argparse.Namespace) -> int:
    """Measure the wanted rows in this process, and return its status: 0 if all are there, 2 if no time is left.

    An error, or a measurement that no other may follow in the same process, ends this process with another status.
    """
    bench = Bench(args)
    try:
        for row in wanted_rows(args.rows):
            ROWS[row](bench)
    except OutOfTime:
        print("no time is left: call again to go on", flush=True)
        return 2
    return 0


def join(args: argparse.Namespace) -> int:
    """Write all measurements as one file, print them, and return how many failed."""
    lines = [line for line in read_log(args.log) if "begun" not in line]  # results and errors
    found = {line.pop("name"): line for line in lines}
    device = found.get("0 card", {}).get("device", {"name": "unknown"})
    name = re.sub(r"\W+", "_", device["name"]).strip("_").lower()
    out = args.out or ROOT / "data" / "results" / "gpu" / f"{name}_levers.json"
    # Where files are and how long it may take changes no number.
    left_out = ("out", "log", "child", "trl", "commit", "seconds")
    options = {name: value for name, value in vars(args).items() if name not in left_out}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"arguments": options, "equal": verdicts(found), "measured": found})
    print(summary(found))
    print(f"\nDefaults that this record allows:\n\n{defaults(found)}\n")
    print(f"written to {out}")
    return sum("error" in line for line in lines)


def summary(found: dict[str, dict]) -> str:
    heads = ["measured", "s an update", "generation", "scoring", "training", "MFU", "peak, GiB"]
    lines = []
    for name, line in found.items():
        phases = line.get("seconds_by_phase")
        if phases:  # updates
            spent = [line["seconds_per_update"]]
            spent += [phases[phase] for phase in ("generation", "scoring", "training")]
            seconds = [f"{x:.2f}" for x in spent]
            mfu = f"{line['mfu']:.1%}" if line["mfu"] else "-"
            lines.append([name, *seconds, mfu, f"{line['peak_gib']:.1f}"])
        else:
            text = line.get("error") or line.get("left_out") or ""
            spent = line.get("seconds_per_update", line.get("seconds"))
            shown = "" if spent is None else f"{spent:.2f}"
            lines.append([name, text[:80], shown, "", "", "", ""])
    return markdown(heads, lines)


def main(argv: list[str] | None = None) -> int:
    """Start processes that measure until all is done or time is up; 0 if all was measured and nothing failed."""
    args = arguments(argv)
    if args.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if args.child is not None:
        return measure_rows(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("make gpu: no CUDA device here, so there is nothing to measure")
        return 1
    args.log.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + args.seconds
    status = 1
    options = sys.argv[1:] if argv is None else argv
    child = [sys.executable, __file__, *options, "--child", str(deadline)]
    # Start one process after the other, until one has measured all that is left (0) or finds no time for more (2).
    while status not in (0, 2) and time.time() < deadline:
        before = len(read_log(args.log))
        # A child looks at the clock only between two measurements, so a child that hangs is ended from here. A last
        # measurement that began in time may be up to 30 seconds late.
        seconds_allowed = deadline - time.time() + 30
        words = ["timeout", "--kill-after=10", str(seconds_allowed), *child]
        status = subprocess.run(words).returncode
        lines = read_log(args.log)
        if len(lines) == before:
            break  # the child does not even start, and neither would the next one
        if "begun" in lines[-1]:  # the child was killed, and could not write why
            error = f"the process ended with status {status}"
            write_line(args.log, {"name": lines[-1]["name"], "error": error})
    return int(join(args) > 0 or status != 0)


if __name__ == "__main__":
    sys.exit(main())
