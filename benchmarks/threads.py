"""Seconds of an update on an idle machine and beside one busy process, with the threads that are chosen at the start.

Updates of MA-PPO (n=5) on a random Gemma of the embedded model's size, in turn with and without the other process; the
least of each counts, since other programs can only slow an update down. Prints a Markdown table and writes JSON. Run it
without OMP_NUM_THREADS, on a machine that does nothing else.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from cells import RESULTS, Cells
from synthetic import SHAPES, options, shaped_trainer, write_model

from marlhf_lite.utils.tables import markdown
from marlhf_lite.utils.threads import choose_threads

SETTINGS = ("idle", "beside a busy process")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds of every update, by setting. The first update of each turn of a setting is left out."""
    torch.set_num_threads(choose_threads())
    trainer, prompts = shaped_trainer(args, folder, "2M", 5, options(args))
    trainer.update(prompts)  # warms up
    seconds: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for _ in range(args.rounds):
        for setting in SETTINGS:
            busy = (
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
                if setting != "idle"
                else None
            )
            try:
                for i in range(args.updates + 1):
                    start = time.perf_counter()
                    trainer.update(prompts)
                    spent = time.perf_counter() - start
                    if i > 0:  # the other process starts or ends during the first
                        seconds[setting].append(spent)
            finally:
                if busy:
                    busy.kill()
                    busy.wait()
    return seconds


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (
        ("rounds", 3),
        ("updates", 4),
        ("batch", 32),
        ("micro_batch", 16),
        ("prompt", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--response", type=int, default=64, help="tokens in every response")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_threads.json")
    args = parser.parse_args()
    cells = Cells(args.out, args)
    with tempfile.TemporaryDirectory() as top:
        write_model(Path(top, "2M"), SHAPES["2M"], args.seed)
        least = {k: min(v) for k, v in cells.measure("seconds", measure, args, Path(top)).items()}
    rows = [[name, f"{least[name]:.2f}", f"{least[name] / least['idle']:.2f}"] for name in SETTINGS]
    print(markdown(["an update", "seconds", "ratio"], rows))
    cells.finish()


if __name__ == "__main__":
    main()
