"""PPO of marlhf_lite against TRL 1.12's experimental PPOTrainer, side by side: processor time and peak memory.

Each side runs in a process of its own, on the same random Gemmas, prompts, batch, micro-batch, lengths, epochs,
temperature, sampling and number of threads; every response has its full length. Token PPO: ours is n=1. The two
processes of a comparison of time take turns, update by update, so that both meet the same load of the machine.

    LoRA     ours: policy and critic train adapters. Theirs: the policy does; the critic trains in full, since the
             trainer has no option for it.
    full     all weights of policy and critic train, on both sides.
    MA-PPO   ours with macro actions of 5 tokens against ours token by token.

A ratio of time is that of processor seconds, which other programs on the machine change less than the clock's: the
median over pairs of updates, with quartiles. Memory is the process's largest resident set, libraries included; with
full fine-tuning ours has glibc's allocator give memory back early (benchmarks/README.md). Ends with status 1 if a
ratio, in the two digits of the table, falls short of its limit.

    python benchmarks/trl_ppo/run.py

The first run installs that TRL in a folder beside this file; all else is the same on both sides. Interrupted, the
benchmark goes on where it was.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from measuring import TURN
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))
from cells import RESULTS, Cells
from synthetic import SHAPES, make_prompts, size_arguments, write_model

from marlhf_lite.utils.tables import markdown

HERE = Path(__file__).parent
TRL = "trl==1.12.0"
THEIRS = HERE / ".trl"  # that version, without what it needs: the environment has it
# With this, glibc maps every tensor from 1 MiB on by itself, and so gives its memory back as soon as it is freed.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


@dataclass(frozen=True)
class Case:
    """One comparison: `other` against marlhf_lite's token PPO, and the ratio that is wanted."""

    name: str
    shape: str
    finetune: str
    limit: float = 0  # 0: only measured
    epochs: int = 1
    updates: int = 7  # the first warms up
    other: str = "theirs"  # or "macro": ours with n=5
    memory: bool = False  # compare peak memory, not processor time
    env: dict = field(default_factory=dict)  # more environment variables of our process
    flags: dict = field(default_factory=dict)  # more options of both processes

    def ratio(self, ours: dict, other: dict) -> list[float]:
        """Quartiles of the ratio that the case compares.

        Of memory, it is ours over the other side's, a single number. Of time, it is the other side's over ours: our
        speed-up over TRL, or what MA-PPO, as the other side, costs over PPO.
        """
        if self.memory:
            return [ours["peak_mib"] / other["peak_mib"]] * 3  # all quartiles of one number
        pairs = [b / a for a, b in zip(ours["cpu_seconds"], other["cpu_seconds"], strict=True)]
        return statistics.quantiles(pairs, n=4, method="inclusive")

    def reached(self, ratio: float) -> bool:
        """Whether a ratio keeps the limit: a speed-up may not be lower, a cost or a share of memory not higher."""
        ratio = round(ratio, 2)  # as the table shows it
        less_is_better = self.memory or self.other == "macro"
        return ratio <= self.limit if less_is_better else ratio >= self.limit


CASES = [
    Case("LoRA, 1 epoch", "2M", "lora", 1.5),
    Case("LoRA, 4 epochs", "2M", "lora", 1.25, epochs=4, updates=9),
    Case("full, 1 epoch", "2M", "full", 1.25),
    Case("full, 4 epochs", "2M", "full", 1.05, epochs=4, updates=9),
    Case("MA-PPO / PPO", "2M", "lora", 1.02, updates=16, other="macro"),
    Case("memory, LoRA", "30M", "lora", 0.56, updates=2, memory=True),
    Case("memory, full", "30M", "full", 0.58, updates=2, memory=True, env=GIVES_BACK),
]


def install_their_trl() -> None:
    """Install the TRL that has a PPO trainer in a folder beside this file, unless it is there."""
    if (THEIRS / "trl").is_dir():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    if subprocess.run([*pip, "--target", THEIRS, TRL], check=False).returncode:
        raise SystemExit(
            f"{TRL} could not be installed in {THEIRS}: see above, fix it and start again"
        )


class Side:
    """A process of ours.py or theirs.py that does one update whenever it is its turn."""

    def __init__(self, case: Case, side: str, args: argparse.Namespace, models: Path, folder: str):
        self.out = Path(folder, f"{side}.json")
        self.errors = Path(folder, f"{side}.err")
        model = models / case.shape
        options = {
            "model": model,
            "prompts": model / "prompts.json",
            "out": self.out,
            "finetune": case.finetune,
            "epochs": case.epochs,
            "updates": case.updates,
            "n": 5 if side == "macro" else 1,
        }
        for name in ("batch", "micro_batch", "response", "seed", "threads"):
            options[name] = getattr(args, name)
        options |= case.flags
        words = [f"--{name}={value}" for name, value in options.items()]
        if not case.memory:  # memory does not depend on who runs when, so nobody waits
            words.append("--turns")
        env = os.environ | {
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(args.threads),
        }
        if side == "theirs":
            script = HERE / "theirs.py"
            env["PYTHONPATH"] = str(THEIRS)
        else:
            script = HERE / "ours.py"
            env |= case.env
        self.process = subprocess.Popen(
            [sys.executable, script, *words],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w", encoding="utf-8"),
            text=True,
        )

    def wait(self) -> None:
        """Wait until the process says that its update has ended."""
        for line in self.process.stdout:
            if line.strip() == TURN:
                return
        # Without that line the process has ended too early.
        raise SystemExit(f"a side failed:\n{self.errors.read_text(encoding='utf-8')[-2000:]}")

    def go(self) -> None:
        """Let the process begin its next update, or end after its last one."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def record(self) -> dict:
        """Wait for the end of the process, and return what it measured."""
        if self.process.wait():
            raise SystemExit(f"a side failed:\n{self.errors.read_text(encoding='utf-8')[-2000:]}")
        return json.loads(self.out.read_text(encoding="utf-8"))


def measure(case: Case, args: argparse.Namespace, models: Path) -> dict[str, dict]:
    """Run both sides of a case and return their records.

    If time is compared, they take turns in the order ABBA; if memory is, both run at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        try:
            for name in ("ours", case.other):
                sides.append(Side(case, name, args, models, folder))
            if not case.memory:
                take_turns(sides, case.updates)
            ours, other = sides
            return {"ours": ours.record(), "other": other.record()}
        finally:
            for side in sides:
                side.process.kill()


def take_turns(sides: list[Side], updates: int) -> None:
    """Let both sides make their updates in turns, and end."""
    for side in sides:  # each makes its first update, which warms up, without being told
        side.wait()
    for turn in range(updates - 1):
        in_turn = sides if turn % 2 else sides[::-1]
        for side in in_turn:
            side.go()
            side.wait()
    for side in sides:  # each waits once more, after its last update
        side.go()


def summarise(case: Case, ours: dict, other: dict) -> dict:
    """The row of the table for a case, from the records of both sides."""
    low, ratio, high = case.ratio(ours, other)
    seconds = {
        "ours": statistics.median(ours["cpu_seconds"]),
        "other": statistics.median(other["cpu_seconds"]),
    }
    return {
        "case": case.name,
        "cpu_seconds_per_update": seconds,
        "peak_mib": {"ours": ours["peak_mib"], "other": other["peak_mib"]},
        "ratio": ratio,
        "low": low,
        "high": high,
        "limit": case.limit,
        "reached": case.reached(ratio),
    }


def table(rows: list[dict]) -> str:
    """The table in Markdown; seconds and memory are those of ours / those of the other side."""
    lines = []
    for row in rows:
        seconds = row["cpu_seconds_per_update"]
        peaks = row["peak_mib"]
        both_seconds = f"{seconds['ours']:.2f} / {seconds['other']:.2f}"
        both_peaks = f"{peaks['ours']:.0f} / {peaks['other']:.0f}"
        ratio = f"{row['ratio']:.2f}× ({row['low']:.2f} to {row['high']:.2f})"
        limit = f"{row['limit']:.2f}×"
        reached = "yes" if row["reached"] else "NO"
        lines.append([row["case"], both_seconds, both_peaks, ratio, limit, reached])
    return markdown(
        ["case", "CPU s/update", "peak MiB", "ratio (quartiles)", "limit", "reached"], lines
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="only cases whose name contains this text")
    size_arguments(parser)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"benchmark_trl_ppo_{date.today()}.json"
    )
    args = parser.parse_args()
    if args.batch % args.micro_batch:
        parser.error(f"--batch {args.batch}: give a multiple of --micro_batch {args.micro_batch}")
    return args


def main() -> int:
    """Measure every case and print the table; return 1 if a limit is not kept, else 0."""
    args = parse()
    cases = [case for case in CASES if args.cases in case.name]
    if any(case.other == "theirs" for case in cases):
        install_their_trl()
    cells = Cells(args.out, args)
    with tempfile.TemporaryDirectory() as top:
        for shape in {case.shape for case in cases}:
            folder = write_model(Path(top, shape), SHAPES[shape], args.seed)
            prompts = make_prompts(SHAPES[shape], 4 * args.batch, args.prompt, args.seed)
            (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
        for case in tqdm(cases, desc="cases", disable=None):
            cells.measure(case.name, measure, case, args, Path(top))
    rows = [summarise(case, **cells.cells[case.name]) for case in cases]
    cells.finish(rows=rows)
    print(table(rows))
    all_are_reached = all(row["reached"] for row in rows)
    return 0 if all_are_reached else 1


if __name__ == "__main__":
    sys.exit(main())
