"""One job of a study, in a process of its own: the adapters that runs start from, or a run and its result file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

from marlhf_lite.cli import start as start_quietly
from marlhf_lite.evaluation.best_of_n import pick_best
from marlhf_lite.evaluation.checkpoints import evaluate_checkpoints
from marlhf_lite.evaluation.responses import sample_means
from marlhf_lite.experiments import pipeline
from marlhf_lite.experiments.baselines import dpo_stage, grpo_stage, rloo_stage
from marlhf_lite.experiments.study import run_options
from marlhf_lite.experiments.study_pool import leave_with_parent
from marlhf_lite.experiments.workspace import RunContext, open_context
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import CONFIG, RunFolder, environment

try:
    import fcntl
except ImportError:  # Windows: there, two studies must not run at once in the same folders
    fcntl = None

CURVE = (
    "update rm_score_mean gold_mean kl_k1 kl_k3 response_length eos_rate advantage_norm advantage_rms q_norm q_rms "
    "explained_variance macro_length accuracy generated_tokens seconds"
).split()
FINAL = ("rm_score", "gold", "kl", "tokens", "ended")
TRAIN: dict[str, Callable[[RunContext, Path, Path], Path]] = {
    "ppo": lambda work, sft, rm: pipeline.ppo_stage(work, sft, rm, work.options.macro, "ppo"),
    "rloo": lambda work, sft, rm: rloo_stage(work, sft, pipeline.make_reward(work, rm)),
    "grpo": lambda work, sft, rm: grpo_stage(work, sft, pipeline.make_reward(work, rm)),
    "dpo": lambda work, sft, rm: dpo_stage(work, sft, pipeline.make_reward(work, rm)),
    "sft": lambda work, sft, rm: sft,
    "best_of_n": lambda work, sft, rm: sft,
}


def main(argv: Sequence[str]) -> int:
    """Do the job that the first argument describes, as JSON."""
    spec = json.loads(argv[0])
    leave_with_parent()
    start_quietly()
    try:
        (make_run if "result" in spec else make_start)(spec)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process works in `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _options(spec: dict, folder: Path) -> SimpleNamespace:
    """The run's options; it goes on where an earlier process was stopped."""
    options = run_options(spec["command"], spec["words"])
    options.run.output_dir = str(folder)
    if (folder / CONFIG).is_file():
        options.run.resume = str(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return options


def make_start(spec: dict) -> None:
    """SFT and reward model of a seed, in the folder `start`."""
    folder = Path(spec["start"])
    with _alone(folder):
        work = open_context(_options(spec, folder))
        pipeline.rm_stage(work, pipeline.sft_stage(work))


def make_run(spec: dict) -> None:
    """Train, answer the held-out prompts, and write the result file."""
    start, folder, about = Path(spec["start"]), Path(spec["folder"]), spec["about"]
    with _alone(folder):
        work = open_context(_options(spec, folder))
        sft, rm = start / "sft", start / "rm"
        prompts = _held_out(work, about["options"]["first_prompt"])
        policy = TRAIN[spec["command"]](work, sft, rm)
        curve = [] if policy == sft else _curve(RunFolder.open(policy.parent))
        begin = time.perf_counter()
        rows = _answers(work, policy, sft, rm, prompts, about)
        spent = time.perf_counter() - begin
        result = about | {"environment": environment(), "start": _start_facts(start), "curve": curve}
        result |= {"final": _final(rows, prompts, spec["command"]), "samples": _samples(rows, spec["command"])}
        result |= {"seconds_evaluation": spent, "seconds_total": sum(row["seconds"] for row in curve) + spent}
        write_json(Path(spec["result"]), _short(result))


def _held_out(work: RunContext, first: int) -> list[str]:
    there, count = work.task.splits["test"]["prompt"], work.options.eval.eval_prompts
    if len(there) < first + count:
        raise InputError(f"--eval_prompts {count}: from number {first} there are {max(len(there) - first, 0)}: fewer")
    return list(there[first : first + count])


def _answers(work: RunContext, policy: Path, sft: Path, rm: Path, prompts: list[str], about: dict) -> list[dict]:
    """All methods of a seed answer with the same noise, which makes comparisons by prompt tighter."""
    return evaluate_checkpoints(
        {about["method"]: policy},
        pipeline.make_scorers(work, sft, rm),
        work.tokenizer,
        prompts,
        work.path / "responses",
        work.sampling,
        samples=about["options"]["samples"],
        seed=about["seed"],
        model=work.options.model.model,
    )


def _curve(run: RunFolder) -> list[dict]:
    """The metrics of each update. A method that samples nothing while it learns has its scores from tests."""
    tests = {row["update"]: row["rm_score_mean"] for row in run.tests()}
    golds = {row["update"]: row.get("gold_mean") for row in run.tests()}
    rows = [{name: row[name] for name in CURVE if name in row} for row in run.metrics()]
    for row in rows:
        if "rm_score_mean" not in row:
            row |= {"rm_score_mean": tests.get(row["update"]), "gold_mean": golds.get(row["update"])}
    return rows


def _chosen(rows: list[dict], command: str) -> list[dict]:
    """One row a prompt: the best of N by the reward model, else the mean over its samples."""
    if command != "best_of_n":
        return sample_means(rows)
    samples = 1 + max(row["sample"] for row in rows)
    best = pick_best(rows, samples)
    return [
        {name: v for name, v in row.items() if name != "kl"} for row in best
    ]  # the KL of SFT's own is no KL of these


def _final(rows: list[dict], prompts: list[str], command: str) -> dict:
    """Columns over the prompts, in their order, and what tells these prompts from others."""
    chosen = _chosen(rows, command)
    mark = hashlib.sha256("\0".join(prompts).encode("utf-8", "backslashreplace")).hexdigest()[:12]
    columns = {name: [float(row[name]) for row in chosen] for name in FINAL if name in chosen[0]}
    return {"prompts": mark, "generated_tokens": sum(row["tokens"] for row in rows)} | columns


def _samples(rows: list[dict], command: str, count: int = 3) -> list[dict]:
    names = ("prompt", "response", "rm_score", "gold", "tokens", "ended")
    shown = _chosen(rows, command) if command == "best_of_n" else [row for row in rows if row["sample"] == 0]
    return [{name: row[name] for name in names if name in row} for row in shown[:count]]


def _start_facts(start: Path) -> dict:
    accuracy = json.loads((start / "rm" / "accuracy.json").read_text(encoding="utf-8"))
    log = json.loads((start / "sft" / "log.json").read_text(encoding="utf-8"))
    return {"name": start.name, "rm_accuracy": accuracy["accuracy"], "rm_pairs": accuracy["pairs"]} | {
        "sft_loss": float(log[-1]["loss"])
    }


def _short(value):
    """Numbers to five digits: the files are kept in git."""
    if isinstance(value, dict):
        return {k: v if k == "options" else _short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
