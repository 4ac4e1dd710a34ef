"""The embedded tasks by name. `config.embedded` names the model of each."""

from collections.abc import Callable
from dataclasses import replace

from marlhf_lite.tasks.files import read_file
from marlhf_lite.tasks.splits import Task, check_part, make_task
from marlhf_lite.tasks.templates import WITHOUT_PAIRS
from marlhf_lite.tasks.tiny_guess.game import load_tiny_guess
from marlhf_lite.tasks.tiny_hh import gold as hh_gold
from marlhf_lite.tasks.tiny_steps import gold as steps_gold
from marlhf_lite.tasks.tiny_tldr import gold as tldr_gold
from marlhf_lite.tasks.tiny_umbrella.stories import load_tiny_umbrella
from marlhf_lite.tasks.tiny_webgpt import gold as webgpt_gold
from marlhf_lite.utils.shipped import shipped

# Name -> gold scores of (prompts, responses), for the tasks that are stored as `data/<name>.jsonl.gz`.
# Programs get their score from unit tests: see `extras.programs.rewards`.
STORED: dict[str, Callable[[list[str], list[str]], list[float]] | None] = {
    "tiny-tldr": tldr_gold.gold_scores,
    "tiny-steps": steps_gold.gold_scores,
    "tiny-code": None,
    "tiny-hh": hh_gold.gold_scores,
    "tiny-webgpt": webgpt_gold.gold_scores,
}
EMBEDDED = (*STORED, "tiny-umbrella", "tiny-guess")


def load_embedded(name: str, size: int | None, seed: int, part: str = "") -> Task:
    """Load the first `size` rows (None: all) of an embedded task and split them as the paper does, 10 % held out.

    A `demonstration`, if rows have one, replaces `chosen` in the SFT part: SFT teaches the form, slips and bugs
    included, and the reward teaches what is right. Programs have no `rejected` and so no part for a reward model.
    Raises `InputError` for an unknown `part`, and for too small a size.
    """
    if name == "tiny-umbrella":  # made when it is loaded: `part` chooses the stories' length
        return load_tiny_umbrella(size, seed, part)
    check_part(name, part)
    if name == "tiny-guess":
        return load_tiny_guess(size, seed)
    rows = read_file(shipped(f"{name}.jsonl.gz"))[:size]
    columns = [column for column in rows[0] if column != "demonstration"]
    fractions = (0.2, 0.4, 0.4) if "rejected" in columns else WITHOUT_PAIRS
    task = make_task(name, rows, seed, fractions=fractions, gold=STORED[name])
    if "demonstration" in rows[0]:
        task.splits["sft"] = (
            task.splits["sft"].remove_columns("chosen").rename_column("demonstration", "chosen")
        )
    return replace(task, splits=task.splits.select_columns(columns))
