"""What changes while a run trains, besides weights, optimizer and random generators."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class BatchSize:
    """Rows that go through a model together: what the options ask for, and what memory has left of it."""

    asked: int  # 0: as many as fit, or all
    now: int

    def continue_from(self, asked: int, now: int) -> None:
        """Take the size `now` that a checkpoint holds, if the options still ask for what they `asked` then.

        If they ask for another size, that one stays.
        """
        if asked == self.asked:
            self.now = now


@dataclass
class RunState:
    """How far a run is, and what it has learned about its memory; each checkpoint holds it.

    The number of updates is also the position in the data: batches, seeds and schedules follow from it.
    """

    micro_batch: BatchSize  # responses that go through the models together
    generation_batch: BatchSize  # responses that are sampled together
    gradient_checkpointing: bool | Literal["auto"]  # "auto" until a dry run has decided
    updates_done: int = 0
    generated_tokens: int = 0
    nonfinite_in_row: int = 0  # updates that were skipped, one after another
    # Of `--keep_best`: the update with the best held-out number, 0 if there is none yet; and that number.
    best_update: int = 0
    best_number: float | None = None
    tests_without_better: int = 0  # held-out tests since that update

    def counters(self) -> dict[str, int | float | bool | str | None]:
        """The state by the names that checkpoints give it."""
        return {
            "updates_done": self.updates_done,
            "generated_tokens": self.generated_tokens,
            "nonfinite_in_row": self.nonfinite_in_row,
            "best_update": self.best_update,
            "best_number": self.best_number,
            "tests_without_better": self.tests_without_better,
            "gradient_checkpointing": self.gradient_checkpointing,
            "micro_batch_size": self.micro_batch.now,
            "generation_batch_size": self.generation_batch.now,
            "asked_micro_batch_size": self.micro_batch.asked,
            "asked_generation_batch_size": self.generation_batch.asked,
        }

    def restore(self, counters: dict) -> None:
        """Continue from the `counters` of a checkpoint."""
        self.updates_done = counters["updates_done"]
        self.generated_tokens = counters["generated_tokens"]
        self.nonfinite_in_row = counters["nonfinite_in_row"]
        # Checkpoints that were written before the library had `--keep_best` have none of these three.
        self.best_update = counters.get("best_update", 0)
        self.best_number = counters.get("best_number")
        self.tests_without_better = counters.get("tests_without_better", 0)
        self.gradient_checkpointing = counters["gradient_checkpointing"]
        self.micro_batch.continue_from(
            asked=counters["asked_micro_batch_size"], now=counters["micro_batch_size"]
        )
        self.generation_batch.continue_from(
            asked=counters["asked_generation_batch_size"], now=counters["generation_batch_size"]
        )
