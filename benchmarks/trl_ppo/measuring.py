"""What ours.py and theirs.py share, without torch: their arguments, memory as the system sees it, and the record."""

import argparse
import json
import platform
import resource
import sys
import time
from pathlib import Path

TURN = "an update ended"


def arguments(description: str) -> argparse.Namespace:
    """The arguments of ours.py and theirs.py. Some are read by one of them only; its name begins their help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with weights and tokenizer"
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, help="JSON list of texts, all of the same length"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--finetune", choices=("lora", "full"), default="lora")
    parser.add_argument("--updates", type=int, default=3, help="the first is warm-up and not timed")
    parser.add_argument("--batch", type=int, default=32, help="responses in an update")
    parser.add_argument(
        "--micro_batch", type=int, default=16, help="responses in a forward and backward pass"
    )
    parser.add_argument(
        "--scored_rows", type=int, help="theirs: responses in a pass that only scores; all of them"
    )
    parser.add_argument("--epochs", type=int, default=1, help="passes over each rollout")
    parser.add_argument("--response", type=int, default=64, help="tokens in every response")
    parser.add_argument(
        "--n", type=int, default=1, help="ours: tokens in a macro action; 1 is token PPO"
    )
    parser.add_argument(
        "--turns", action="store_true", help="wait for a line on stdin before every update but one"
    )
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="theirs")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="theirs"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def peak_mib() -> float:
    """The most memory that this process has held so far (resident set), MiB."""
    status = Path("/proc/self/status")
    # On Linux the system's own account, which unlike getrusage does not start from what the parent process held.
    if status.exists():
        line = next(
            line
            for line in status.read_text(encoding="utf-8").splitlines()
            if line.startswith("VmHWM")
        )
        return int(line.split()[1]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class Stamps:
    """How long each update took: from the end of the update before it to its own end, with all that happens in between.

    With `turns`, a line goes to stdout after each update, and the next update waits for a line on stdin, so that two
    processes that take turns meet the same load of the machine. The time of waiting is not counted.
    """

    def __init__(self, turns: bool):
        self.turns = turns
        self.start = None
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def mark(self) -> None:
        """Note that an update ended just now. The time of the first, which warms up, is not kept."""
        if self.start is not None:
            self.seconds.append(time.perf_counter() - self.start[0])
            self.cpu_seconds.append(time.process_time() - self.start[1])
        if self.turns:
            print(TURN, flush=True)
            sys.stdin.readline()
        self.start = time.perf_counter(), time.process_time()


def write(args: argparse.Namespace, stamps: Stamps, imported: float, **more) -> None:
    """Write the record to `--out`: timings, memory, and `more`, what a side says of itself.

    `imported` is the peak of memory before any model was loaded, in MiB.
    """
    seconds = stamps.seconds
    cpu_seconds = stamps.cpu_seconds
    if len(seconds) != args.updates - 1 or not seconds:  # the first update is not timed
        raise RuntimeError(f"--updates {args.updates}: {len(seconds)} were timed: give at least 2")
    record = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mib": peak_mib(),
        "imported_mib": imported,
        "python": platform.python_version(),
    }
    args.out.write_text(json.dumps(record | more), encoding="utf-8")
