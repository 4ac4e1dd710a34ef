"""How far the training of a policy has come: `updates.json` beside its weights, and in the folder of its stage.

The weights are written when a stage stops. If the stage is made longer later and killed, they are still those of the
earlier stop: so readers compare both files.
"""

from pathlib import Path

from marlhf_lite.utils.jsonl import read_json, write_json

UPDATES = "updates.json"
DONE = "done.json"  # the last file that PPO, DPO, RLOO and GRPO write: the options that make a stage longer


def write_update_of_weights(policy: Path, update: int) -> None:
    """Note beside a policy's weights after which update they were saved."""
    write_json(policy / UPDATES, {"update": update})


def write_updates_of_stage(stage: Path, total: int) -> None:
    """Note how many updates the policies of this stage are to get."""
    write_json(stage / UPDATES, {"of": total})


def note_if_unfinished(policy: Path) -> str:
    """Return a note if the stage that trained this policy has not come to its end; "" if it has, or nobody knows."""
    stage = policy.parent
    beside_weights = policy / UPDATES
    of_stage = stage / UPDATES
    is_known = beside_weights.is_file() and of_stage.is_file()
    if not is_known or (stage / DONE).is_file():
        return ""
    update = read_json(beside_weights)["update"]
    total = read_json(of_stage)["of"]
    return f"{policy}: update {update} of {total}, not finished"
