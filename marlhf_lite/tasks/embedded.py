"""The embedded tasks by name. `config.embedded` names the model of each."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from marlhf_lite.tasks.files import read_file
from marlhf_lite.tasks.templates import WITHOUT_PAIRS
from marlhf_lite.utils.shipped import shipped

if TYPE_CHECKING:
    from marlhf_lite.tasks.splits import Task

# Name -> the module with the gold scores of (prompts, responses), for the tasks that are stored as
# `data/<name>.jsonl.gz`. It is imported when the task is loaded: NLTK, for example, takes a second that other data do
# not need. Programs get their score from unit tests: see `extras.programs.rewards`.
STORED: dict[str, str | None] = {
    "tiny-tldr": "marlhf_lite.tasks.tiny_tldr.gold",
    "tiny-steps": "marlhf_lite.tasks.tiny_steps.gold",
    "tiny-code": None,
    "tiny-hh": "marlhf_lite.tasks.tiny_hh.gold",
    "tiny-webgpt": "marlhf_lite.tasks.tiny_webgpt.gold",
}
EMBEDDED = (*STORED, "tiny-umbrella", "tiny-guess")


def gold_scores_of(name: str) -> Callable[[list[str], list[str]], list[float]] | None:
    """Return the function of a stored task that gives the gold scores of (prompts, responses); None for programs."""
    module = STORED[name]
    if module is None:
        return None
    return importlib.import_module(module).gold_scores


def load_embedded(name: str, size: int | None, seed: int, part: str = "") -> "Task":
    """Load the first `size` rows (None: all) of an embedded task and split them as the paper does, 10 % held out.

    If rows have a `demonstration`, it replaces `chosen` in the SFT part: SFT teaches the form, slips and bugs included,
    and the reward teaches what is right. Programs have no `rejected` and so no part for a reward model. Raises
    `InputError` for an unknown `part`, and for too small a size.
    """
    # Here, because it imports `datasets`, which takes long.
    from marlhf_lite.tasks.splits import check_part_is_known, make_task

    if name == "tiny-umbrella":  # made when it is loaded: `part` chooses the stories' length
        from marlhf_lite.tasks.tiny_umbrella.stories import load_tiny_umbrella

        return load_tiny_umbrella(size, seed, part)
    check_part_is_known(name, part)
    if name == "tiny-guess":
        from marlhf_lite.tasks.tiny_guess.game import load_tiny_guess

        return load_tiny_guess(size, seed)
    rows = read_file(shipped(f"{name}.jsonl.gz"))[:size]
    has_pairs = "rejected" in rows[0]
    fractions = (0.2, 0.4, 0.4) if has_pairs else WITHOUT_PAIRS
    task = make_task(name, rows, seed, fractions=fractions, gold=gold_scores_of(name))
    splits = task.splits
    if "demonstration" in rows[0]:
        without_chosen = splits["sft"].remove_columns("chosen")
        splits["sft"] = without_chosen.rename_column("demonstration", "chosen")
    columns = [column for column in rows[0] if column != "demonstration"]
    return replace(task, splits=splits.select_columns(columns))
