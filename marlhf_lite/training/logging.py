"""Records of a run: in memory, in its folder, in the terminal, and in trackers (TensorBoard, Weights & Biases)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from accelerate import Accelerator, PartialState
from tqdm.auto import tqdm

from marlhf_lite.macro import MacroActions
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.progress import write_updates_of_stage

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

    def log_number_of_updates(self, total: int) -> None:
        """Record how many updates the run is to make, so that readers of its models know whether it has ended."""
        if self.run is not None and PartialState().is_main_process:
            write_updates_of_stage(self.run.path, total)

    def log_update(self, row: dict) -> None:
        """Record an update's metrics."""
        self.history.append(row)
        self._write("metrics", [row])
        if self.trackers:
            self.trackers.log(
                {name: x for name, x in row.items() if name != "update"}, step=row["update"]
            )

    def log_samples(self, update: int, rollout: Rollout, macro_actions: MacroActions) -> None:
        """Record these responses, in the first update and every `SAMPLE_EVERY` updates."""
        if update == 1 or update % SAMPLE_EVERY == 0:
            self._write("samples", sample_rows(update, rollout, macro_actions.spans()))

    def log_held_out(self, update: int, scores: dict[str, float]) -> None:
        """Record the numbers of a held-out test, and print them; `history` has them as `test/NAME`."""
        self._add_test_to_history(update, scores)
        self.write_line(held_out_line(self.name, update, scores))
        self._write("tests", [{"update": update} | scores])
        if self.trackers:
            self.trackers.log({f"test/{name}": x for name, x in scores.items()}, step=update)

    def write_line(self, text: str) -> None:
        """Print a line above the progress bar, once over all processes."""
        if PartialState().is_main_process:
            tqdm.write(text)

    def _add_test_to_history(self, update: int, scores: Mapping[str, float]) -> None:
        """Add a held-out test to the row of its update; `scores` may be a row of tests.jsonl, with its `update`."""
        for row in self.history:
            if row["update"] == update:
                row |= {f"test/{name}": x for name, x in scores.items() if name != "update"}

    def _write(self, name: str, rows: list[dict]) -> None:
        if self.run is not None and PartialState().is_main_process:
            self.run.log(name, rows)

    def reload(self, updates: int) -> None:
        """Read the records of this many updates from the folder of a resumed run. Raises `InputError` if some lack."""
        assert self.run is not None  # a trainer without a folder has no checkpoint to resume from
        # The checkpoint that the run continues from has cut its logs back, so they end with the checkpoint's update.
        self.history = self.run.metrics()
        if len(self.history) != updates:
            raise InputError(
                f"{self.run.path}: metrics of {len(self.history)} updates, not {updates}: start again"
            )
        for test in self.run.tests():
            self._add_test_to_history(test["update"], test)


def sample_rows(update: int, rollout: Rollout, spans: Sequence[Sequence]) -> list[dict]:
    """Return a row for samples.jsonl of each response, with its score and macro actions (token spans)."""
    columns: dict[str, Sequence] = {
        "prompt": rollout.prompts,
        "response": rollout.responses,
        "score": rollout.scores.tolist(),
        "tokens": rollout.lengths.tolist(),
        "ended": rollout.ended.tolist(),
        "spans": spans,
    }
    if rollout.turns is not None:
        columns["turns"] = rollout.turns
    rows = []
    for number in range(len(rollout)):
        values = {name: column[number] for name, column in columns.items()}
        rows.append({"update": update, **values})
    return rows


def held_out_line(name: str, update: int, scores: Mapping[str, float]) -> str:
    """Write the numbers of a held-out test as one line for the terminal.

    The numbers of the library's own test (`HeldOutEvaluation`) are grouped: each score stands with that of SFT and the
    win rate, and of the KL estimates only k3 is written, which is at least 0. All other numbers, such as those of a
    user's test, follow with their names.
    """
    parts = []
    grouped: set[str] = set()  # names of numbers that are written in a group, or left out with it
    for key, label in (("score", "score"), ("gold", "gold score")):
        group = [f"{key}_mean", f"{key}_sft", f"{key}_win_rate"]
        if all(score_name in scores for score_name in group):
            mean, sft, wins = [scores[score_name] for score_name in group]
            parts.append(f"{label} {mean:.2f} (SFT {sft:.2f}, win rate {wins:.0%})")
            grouped.update(group)
    if "kl_k3" in scores:
        parts.append(f"KL {scores['kl_k3']:.2f}")
        # The other four are left out of the line; tests.jsonl has them.
        grouped.update(("kl", "kl_k1", "kl_k3", "tokens", "ended"))
    for score_name, value in scores.items():
        if score_name not in grouped:
            parts.append(f"{score_name} {value:.4g}")
    return f"{name}: update {update}, held-out prompts: " + ", ".join(parts)
