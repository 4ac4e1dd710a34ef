"""Which options go together: rules in support.yaml refuse a combination before anything is loaded."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from marlhf_lite.utils.errors import InputError


class Rule(NamedTuple):
    """A combination that does not work, such as a stage with a sampler; `message` says what to change.

    An axis is a question about a run, such as its stage. `when` and `against` map axes to values: a run is such a
    combination if on every axis of both it has one of the values there.
    """

    when: dict[str, list[str]]
    against: dict[str, list[str]]
    message: str

    def refuses(self, cell: Mapping[str, str]) -> bool:
        """Return whether a run is such a combination. `cell` has its value on each axis.

        If `cell` lacks one of the axes, the run is not such a combination.
        """
        refused = self.when | self.against
        return all(cell.get(axis) in values for axis, values in refused.items())


def _split_values(axes: Mapping[str, str]) -> dict[str, list[str]]:
    return {axis: values.split() for axis, values in axes.items()}


_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
NAMES: dict[str, dict[str, str]] = _FILE["names"]  # axis -> value -> how a message calls it
# name in the messages -> a sentence that several of them have
ADVICE: dict[str, str] = _FILE["advice"]
RULES = [
    Rule(_split_values(rule["when"]), _split_values(rule["against"]), rule["message"])
    for rule in _FILE["rules"]
]


def goes_together(cell: Mapping[str, str]) -> bool:
    """Return whether no rule refuses a run with these values of axes, such as {"stage": "ppo", "sampler": "own"}."""
    return not any(rule.refuses(cell) for rule in RULES)


def refuse_what_does_not_go_together(cell: Mapping[str, str], **shown: object) -> None:
    """Raise `InputError` with the message of the first rule that refuses a run with these values of axes.

    Args:
        cell: axis -> value. Axes that the command does not have are left out.
        shown: what names in messages show: `data`, the value of --dataset, and `sft`, that of --sft.
    """
    for rule in RULES:
        if rule.refuses(cell):
            # The texts that replace the names in braces in the message.
            words = {"stage": cell["stage"]}
            for axis, name_of_value in NAMES.items():
                if cell.get(axis) in name_of_value:  # messages can show this value
                    words[axis] = name_of_value[cell[axis]].format(**shown)
            for name, advice in ADVICE.items():
                words[name] = advice.format(sft=shown.get("sft"))
            raise InputError(rule.message.format(**words))


def how_processes_were_launched() -> str:
    """Return how `accelerate launch` started this process: one, ddp, fsdp2 or deepspeed."""
    flags = {"fsdp2": "ACCELERATE_USE_FSDP", "deepspeed": "ACCELERATE_USE_DEEPSPEED"}
    for kind, flag in flags.items():
        if os.environ.get(flag, "").lower() in ("1", "true", "yes"):
            return kind
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return "ddp"
    return "one"
