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
SAMPLES = 4  # responses; a few more if their number is not a multiple of it


class RunLogger:
    """Records updates and held-out tests. Every process keeps `history`; only the main process writes.

    `trackers` is an accelerator that logs to TensorBoard or Weights & Biases; None if a trainer of TRL does that.
    """

    def __init__(
        self, run: "RunFolder | None", name: str = "ppo", trackers: Accelerator | None = None
    ):
        self.run, self.name, self.trackers = run, name, trackers
        self.history: list[dict] = []

    def log_update(self, row: dict) -> None:
        """Record an update's metrics."""
        self.history.append(row)
        self._write("metrics", [row])
        if self.trackers:
            self.trackers.log(
                {name: x for name, x in row.items() if name != "update"}, step=row["update"]
            )

    def log_samples(self, update: int, rollout: Rollout, macro_actions: MacroActions) -> None:
        """Record these responses every `SAMPLE_EVERY` updates."""
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
        """Read the records of this many updates from the folder of a resumed run."""
        # The checkpoint has cut the logs back to its own update.
        self.history = self.run.metrics()
        if len(self.history) != updates:
            raise InputError(
                f"{self.run.path}: metrics of {len(self.history)} updates, not {updates}: start again"
            )


def sample_rows(update: int, rollout: Rollout, spans: Sequence[Sequence]) -> list[dict]:
    """Return a row for samples.jsonl of each response, with its score and macro actions (token spans)."""
    columns = {
        "prompt": rollout.prompts,
        "response": rollout.responses,
        "score": rollout.scores.tolist(),
        "tokens": rollout.lengths.tolist(),
        "ended": rollout.ended.tolist(),
        "spans": spans,
    } | ({} if rollout.turns is None else {"turns": rollout.turns})
    return [
        {"update": update} | dict(zip(columns, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def held_out_line(name: str, update: int, scores: dict[str, float]) -> str:
    """Write the scores of a held-out test as one line for the terminal; its KL is k3, which is at least 0."""
    parts = []
    for key, label in (("score", "score"), ("gold", "gold score")):
        if f"{key}_mean" in scores:
            sft, wins = scores[f"{key}_sft"], scores[f"{key}_win_rate"]
            parts.append(
                f"{label} {scores[f'{key}_mean']:.2f} (SFT {sft:.2f}, win rate {wins:.0%})"
            )
    return f"{name}: update {update}, held-out prompts: " + ", ".join(
        [*parts, f"KL {scores['kl_k3']:.2f}"]
    )
