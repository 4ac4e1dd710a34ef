"""Records of a run: in memory, in its folder, in the terminal, and in trackers (TensorBoard, Weights & Biases)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accelerate import Accelerator, PartialState
from tqdm.auto import tqdm

from marlhf_lite.macro import MacroActions
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError

if TYPE_CHECKING:
    from marlhf_lite.utils.run_folder import RunFolder

SAMPLE_EVERY = 10  # updates between samples in samples.jsonl
SAMPLES = 4  # responses, or a few more where they are not a multiple of it


class RunLogger:
    """Records updates and held-out tests. Every process keeps `history`; the main process alone writes.

    `trackers` is an accelerator that logs to TensorBoard or Weights & Biases; None where a trainer of TRL does.
    """

    def __init__(self, run: "RunFolder | None", name: str = "ppo", trackers: Accelerator | None = None):
        self.run, self.name, self.trackers = run, name, trackers
        self.history: list[dict] = []

    def log_update(self, row: dict) -> None:
        """Record an update's metrics."""
        self.history.append(row)
        self._write("metrics", [row])
        if self.trackers:
            self.trackers.log({name: x for name, x in row.items() if name != "update"}, step=row["update"])

    def log_samples(self, update: int, rollout: Rollout, macro_actions: MacroActions) -> None:
        """Now and then record these responses."""
        if update == 1 or update % SAMPLE_EVERY == 0:
            self._write("samples", sample_rows(update, rollout, macro_actions.spans()))

    def log_held_out(self, update: int, scores: dict[str, float]) -> None:
        """Record the scores of a held-out test, and print them."""
        self.write_line(held_out_line(self.name, update, scores))
        self._write("tests", [{"update": update} | scores])
        if self.trackers:
            self.trackers.log({f"test/{name}": x for name, x in scores.items()}, step=update)

    def write_line(self, text: str) -> None:
        """Print a line above the progress bar, once over all processes."""
        if PartialState().is_main_process:
            tqdm.write(text)

    def _write(self, name: str, rows: list[dict]) -> None:
        if self.run is not None and PartialState().is_main_process:
            self.run.log(name, rows)

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
    } | ({} if rollout.turns is None else {"turns": rollout.turns})
    return [{"update": update} | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def held_out_line(name: str, update: int, scores: dict[str, float]) -> str:
    """The scores of a held-out test as one line for the terminal, with the estimate of KL that is never below 0."""
    parts = []
    for key, label in (("score", "score"), ("gold", "gold score")):
        if f"{key}_mean" in scores:
            sft, wins = scores[f"{key}_sft"], scores[f"{key}_win_rate"]
            parts.append(f"{label} {scores[f'{key}_mean']:.2f} (SFT {sft:.2f}, win rate {wins:.0%})")
    return f"{name}: update {update}, held-out prompts: " + ", ".join([*parts, f"KL {scores['kl_k3']:.2f}"])
