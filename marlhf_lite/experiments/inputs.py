"""The models and the data file that a command names: found and checked before anything heavy is imported."""

import glob
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from marlhf_lite.config.commands import StageCommand
from marlhf_lite.config.parser import named_folders
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.utils.errors import InputError

FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".gz", ".bz2", ".xz")


@dataclass(frozen=True)
class Inputs:
    """Folders of models that earlier stages made."""

    sft: Path | None = None
    rm: Path | None = None
    policies: dict[str, Path] = field(default_factory=dict)

    @property
    def folders(self) -> list[Path]:
        return [folder for folder in (self.sft, self.rm, *self.policies.values()) if folder]


def find_inputs(options: StageCommand) -> Inputs:
    """Find what --sft, --rm and --policies name. Raises `InputError` where one is missing that the command needs."""
    values, stages = asdict(options), options.stages
    if values.get("from_checkpoint") and not values["resume"]:
        hint = "add --resume with the run's folder, or leave it out"
        raise InputError(f"--from_checkpoint {values['from_checkpoint']}: only a run that goes on has one: {hint}")
    if values["dataset"] == "tiny-guess" and options.trains_policy and not options.methods:
        hint = "its environment answers in turns: train it with marlhf ppo or run"
        raise InputError(f"--dataset {values['dataset']}: {hint}")
    if len(options.methods) > 1 and options.token_level:
        raise InputError("--n 1: both runs would be PPO: give --n 2 or more, or marlhf run --n 1 for PPO alone")
    needed = {"sft": "sft" in values and "sft" not in stages, "rm": options.reward == "rm" and "rm" not in stages}
    folders = {name: resolve_adapter_dir(name, values[name]) for name in needed if values.get(name) or needed[name]}
    if values.get("best_of") and "rm" not in (*folders, *stages):
        raise InputError(f"--best_of {values['best_of']}: the reward model chooses the best answer: give --rm")
    check_dataset(values["dataset"])
    return Inputs(**folders, policies=_policies(values.get("policies", "")))


def check_dataset(dataset: str) -> None:
    """Raise `InputError` where `--dataset` looks like a path, or a pattern of paths, and nothing is there."""
    place = os.path.expanduser(dataset)
    looks_local = (dataset.startswith(("/", ".", "~")) or dataset.endswith(FILES)) and "://" not in dataset
    if looks_local and not os.path.exists(place) and not glob.glob(place, recursive=True):
        raise InputError(f"--dataset {dataset}: no such file: check the path (relative paths start at {os.getcwd()})")


def _policies(words: str) -> dict[str, Path]:
    policies: dict[str, Path] = {}
    for name, folder in named_folders(words):
        place = resolve_adapter_dir("policies", folder)
        name = name or place.parent.name
        if name in policies or name == "SFT":
            raise InputError(f"--policies: a second one is called {name}: give each a name, as name=folder")
        policies[name] = place
    return policies
