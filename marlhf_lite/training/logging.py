"""Where a run's numbers go: memory, the run's folder, trackers, and the terminal."""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator
from tqdm.auto import tqdm

from marlhf_lite.config.options import LoggingConfig
from marlhf_lite.macro import MacroActions
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder

SAMPLE_EVERY = 10  # updates between samples


class RunLogger:
    """Records of updates and tests. The main process alone writes; every one keeps `history`."""

    def __init__(self, run: RunFolder | None, options: LoggingConfig, accelerator: Accelerator):
        self.run, self.options, self.accelerator = run, options, accelerator
        self.history: list[dict] = []

    def log(self, row: dict, rollout: Rollout, macro: MacroActions) -> None:
        """An update's metrics, and some of its responses where it is time."""
        self.history.append(row)
        if not self.accelerator.is_main_process:
            return
        if self.accelerator.trackers:
            self.accelerator.log({k: v for k, v in row.items() if k != "update"}, step=row["update"])
        if self.run is not None:
            self._write(self.run.log_metrics, row)
        if row["update"] == 1 or row["update"] % SAMPLE_EVERY == 0:
            rows = samples(row["update"], rollout, macro)
            if self.run is not None:
                self._write(self.run.log_samples, rows)
            if self.options.num_completions_to_print:
                tqdm.write(completions_table(rows[: self.options.num_completions_to_print]))

    def log_test(self, update: int, scores: dict[str, float]) -> None:
        """A test's scores."""
        if self.accelerator.is_main_process:
            if self.run is not None:
                self._write(self.run.log_tests, {"update": update} | scores)
            if self.accelerator.trackers:
                self.accelerator.log({f"test/{k}": v for k, v in scores.items()}, step=update)

    def _write(self, log: Callable, rows: dict | list[dict]) -> None:
        try:
            log(rows)
        except OSError as error:
            raise InputError(f"{self.run.path}: not recorded ({error}): free some disk space, then --resume") from error

    def reload(self, updates: int) -> None:
        """Take up the records of so many updates that a checkpoint left in the run's folder."""
        self.history = self.run.metrics()
        if len(self.history) != updates:
            raise InputError(f"{self.run.path}: metrics of {len(self.history)} updates, not {updates}: start again")


def samples(update: int, rollout: Rollout, macro: MacroActions, count: int = 4) -> list[dict]:
    """Some responses as they were, with their macro actions as token spans."""
    spans = macro.spans()
    return [
        {
            "update": update,
            "prompt": rollout.prompts[i],
            "response": rollout.responses[i],
            "score": rollout.scores[i].item(),
            "tokens": int(rollout.lengths[i]),
            "ended": bool(rollout.ended[i]),
            "spans": spans[i],
        }
        for i in range(0, len(rollout), max(len(rollout) // count, 1))  # rows are sorted by length: short and long
    ]


def completions_table(rows: list[dict], width: int = 100) -> str:
    """Responses with their scores, a line each, under the end of their prompt."""
    lines = [f"-- update {rows[0]['update']}: score, tokens, response"] if rows else []
    for row in rows:
        prompt, response = (" ".join(row[name].split()) for name in ("prompt", "response"))
        mark = "" if row["ended"] else " [cut]"
        lines += [f"   ...{prompt[-width:]}", f"{row['score']:6.2f} {row['tokens']:4d}  {response[:width]}{mark}"]
    return "\n".join(lines)
