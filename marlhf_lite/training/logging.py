"""Records of a run: in memory, in its folder, in the terminal, and in trackers (TensorBoard, Weights & Biases)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import Accelerator
from tqdm.auto import tqdm

from marlhf_lite.macro import MacroActions
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder

SAMPLE_EVERY = 10  # updates between samples in samples.jsonl
SAMPLES = 4  # responses, or a few more where they are not a multiple of it
TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}  # name -> package


class RunLogger:
    """Records updates and held-out tests. Every process keeps `history`; the main process alone writes."""

    def __init__(self, run: RunFolder | None, accelerator: Accelerator, name: str = "ppo"):
        self.run, self.accelerator, self.name = run, accelerator, name
        self.history: list[dict] = []

    def log_update(self, row: dict, rollout: Rollout, macro_actions: MacroActions) -> None:
        """Record an update's metrics, and now and then some of its responses."""
        self.history.append(row)
        if not self.accelerator.is_main_process:
            return
        if self.accelerator.trackers:
            self.accelerator.log({k: v for k, v in row.items() if k != "update"}, step=row["update"])
        if self.run is not None:
            self._write(self.run.log_metrics, row)
        if row["update"] == 1 or row["update"] % SAMPLE_EVERY == 0:
            # Responses are sorted by length: short and long ones.
            some = slice(None, None, max(len(rollout) // SAMPLES, 1))
            samples = sample_rows(row["update"], rollout.select(some), macro_actions.spans()[some])
            if self.run is not None:
                self._write(self.run.log_samples, samples)

    def log_held_out(self, update: int, scores: dict[str, float]) -> None:
        """Record the scores of a held-out test, and print them."""
        self.write_line(held_out_line(self.name, update, scores))
        if self.accelerator.is_main_process:
            if self.run is not None:
                self._write(self.run.log_tests, {"update": update} | scores)
            if self.accelerator.trackers:
                self.accelerator.log({f"test/{k}": v for k, v in scores.items()}, step=update)

    def write_line(self, text: str) -> None:
        """Print a line above the progress bar, once over all processes."""
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def _write(self, log: Callable, rows: dict | list[dict]) -> None:
        try:
            log(rows)
        except OSError as error:
            raise InputError(f"{self.run.path}: not recorded ({error}): free some disk space, then --resume") from error

    def reload(self, updates: int) -> None:
        """Take up the records of so many updates from the run's folder, when the run is resumed."""
        # The checkpoint has cut the logs back to its own update.
        self.history = self.run.metrics()
        if len(self.history) != updates:
            raise InputError(f"{self.run.path}: metrics of {len(self.history)} updates, not {updates}: start again")


def sample_rows(update: int, rollout: Rollout, spans: Sequence[Sequence]) -> list[dict]:
    """Responses with their scores and macro actions (token spans), a row each for samples.jsonl."""
    columns = {
        "prompt": rollout.prompts,
        "response": rollout.responses,
        "score": rollout.scores.tolist(),
        "tokens": rollout.lengths.tolist(),
        "ended": rollout.ended.tolist(),
        "spans": spans,
    }
    return [{"update": update} | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def held_out_line(name: str, update: int, scores: dict[str, float]) -> str:
    """The scores of a held-out test as one line for the terminal."""
    parts = []
    for key, label in (("rm_score", "RM score"), ("gold", "gold score")):
        if f"{key}_mean" in scores:
            sft, wins = scores[f"{key}_sft"], scores[f"{key}_win_rate"]
            parts.append(f"{label} {scores[f'{key}_mean']:.2f} (SFT {sft:.2f}, win rate {wins:.0%})")
    return f"{name}: update {update}, held-out prompts: " + ", ".join([*parts, f"KL {scores['kl']:.2f}"])


# -- trackers ---------------------------------------------------------------------------------------------------------


def tracker_names(report_to: str) -> list[str]:
    """The trackers that `--report_to` names. Raises `InputError` for an unknown one or one whose package is missing."""
    names = [word.strip() for word in report_to.split(",") if word.strip()]
    for word in names:
        if word not in TRACKERS:
            raise InputError(f"--report_to {word}: unknown: choose from {', '.join(TRACKERS)}")
        if importlib.util.find_spec(TRACKERS[word]) is None:
            raise InputError(f"--report_to {word}: the package is missing: pip install {TRACKERS[word]}")
    return names


def make_accelerator(report_to: str, folder: Path, name: str, config: dict) -> Accelerator:
    """An accelerator that logs to the trackers of `--report_to` under `folder`; a plain one without any.

    Raises `InputError` for an unknown tracker or one whose package is missing.
    """
    names = tracker_names(report_to)
    if not names:
        return Accelerator()
    accelerator = Accelerator(log_with=names, project_dir=str(folder / "trackers"))
    # Trackers take flat values only.
    simple = {k: v for k, v in config.items() if isinstance(v, int | float | str | bool)}
    wandb = {"wandb": {"dir": str(folder)}} if "wandb" in names else {}
    accelerator.init_trackers(name, config=simple, init_kwargs=wandb)
    return accelerator
