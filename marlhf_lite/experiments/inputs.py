"""Find and check the models and the data file that a command names before anything heavy is imported."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from marlhf_lite.config.commands import StageCommand
from marlhf_lite.config.parser import named_folders
from marlhf_lite.config.support import is_listed, launched, refuse
from marlhf_lite.models.adapters import form_of_weights, resolve_adapter_dir
from marlhf_lite.tasks.places import matching_files
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.preflight import Preflight

if TYPE_CHECKING:
    from marlhf_lite.tasks.splits import Task

FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".gz", ".bz2", ".xz")


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
    """Find what --dataset, --sft, --rm and --policies name. Raises `InputError` with one line per missing input."""
    preflight = Preflight()
    needs_sft = hasattr(options, "sft") and "sft" not in options.stages
    needs_rm = options.reward == "rm" and "rm" not in options.stages
    sft = preflight.attempt(_find_model, "sft", getattr(options, "sft", ""), needs_sft)
    rm = preflight.attempt(_find_model, "rm", getattr(options, "rm", ""), needs_rm)
    policies = preflight.attempt(_policies, getattr(options, "policies", ""))
    preflight.attempt(check_dataset, options.dataset)
    if preflight.problems:  # report them with what can be found without these inputs
        check_options(options, preflight)
        preflight.stop_if_any_problem()
    return Inputs(sft, rm, policies)


def check_options(options: StageCommand, preflight: Preflight) -> None:
    """Check what needs the options alone, and no library that takes long to import."""
    preflight.attempt(check_methods, options)
    if hasattr(options, "num_generations"):
        preflight.attempt(check_groups, options.num_generations, options.batch_size)


def check_methods(options: StageCommand) -> None:
    """Raise `InputError` if the methods that a command compares are the same."""
    if len(options.methods) > 1 and options.token_level:
        raise InputError(
            "--n 1: both runs would be PPO: give --n 2 or more, or marlhf run --n 1 for PPO alone"
        )


def check_groups(num_generations: int, batch_size: int, processes: int = 0) -> None:
    """Raise `InputError` if an update of RLOO or GRPO cannot be made of complete groups."""
    processes = processes or int(os.environ.get("WORLD_SIZE", "1"))
    if batch_size % num_generations:
        what = f"--batch_size {batch_size} does not divide into complete groups"
        raise InputError(
            f"--num_generations {num_generations}: {what}: give a multiple of {num_generations}"
        )
    if batch_size % processes:
        raise InputError(
            f"--batch_size {batch_size}: {processes} processes cannot share it: give a multiple of that"
        )


def check_support(options: StageCommand, inputs: Inputs) -> None:
    """Raise `InputError` if the support matrix lacks the combination of options."""
    for stage in options.stages or ("evaluate",) * options.answers:
        refuse(_cell(options, inputs, stage), sft=inputs.sft)


def check_data_support(options: StageCommand, inputs: Inputs, task: "Task") -> None:
    """Raise `InputError` if a stage cannot learn from data of this form."""
    for stage in options.stages:
        is_made = getattr(inputs, stage, None) is not None
        starts_as_base = stage == "sft" and (len(options.stages) > 1 or not options.sft_epochs)
        if not (is_made or starts_as_base):
            cell = _cell(options, inputs, stage)
            if is_listed(cell):  # else `check_support` refuses it
                refuse(
                    cell | {"data": _form(options, stage, task)},
                    sft=inputs.sft,
                    data=options.dataset,
                )


def _cell(options: StageCommand, inputs: Inputs, stage: str) -> dict[str, str]:
    """Return the cell of the support matrix for a stage with these options."""
    scaled = getattr(options, "logprobs_at_temperature", False) and options.temperature != 1
    cell = {
        "environment": _yes_or_no(options.environment),
        "4 bits": _yes_or_no(options.load_in_4bit),
        "scaled": _yes_or_no(scaled),
        "stage": stage,
        "reward": {"rm": "rm", "environment": "turns"}.get(options.reward, "code"),
    }
    if inputs.sft:
        cell["sft"] = form_of_weights(inputs.sft)
    cell["finetune"] = options.finetune
    cell["sampler"] = "generate" if options.sampler == "generate" else "own"
    cell["launch"] = launched()
    return cell


def _yes_or_no(value: object) -> str:
    return "yes" if value else "no"


def _form(options: StageCommand, stage: str, task: "Task") -> str:
    """Return the form of the data that a stage reads."""
    if options.dataset == "tiny-guess" and stage not in ("sft", "rm"):
        return "turns"
    if len(task.splits["rm"]):
        return "pairs"
    if len(task.splits["sft"]):
        return "answers"
    return "prompts"


def check_dataset(dataset: str) -> None:
    """Raise `InputError` if `--dataset` looks like a path, or a pattern of paths, and nothing is there."""
    looks_local = (
        dataset.startswith(("/", ".", "~")) or dataset.endswith(FILES)
    ) and "://" not in dataset
    if looks_local and not matching_files(dataset):
        raise InputError(
            f"--dataset {dataset}: no such file: check the path (relative paths start at {os.getcwd()})"
        )


def _find_model(option: str, folder: str, is_needed: bool) -> Path | None:
    """The folder of a model that the option names; None if it names none, and none is needed."""
    if not folder and not is_needed:
        return None
    return resolve_adapter_dir(option, folder)


def _policies(words: str) -> dict[str, Path]:
    policies: dict[str, Path] = {}
    for name, folder in named_folders(words):
        place = resolve_adapter_dir("policies", folder)
        name = name or place.parent.name
        if name in policies or name == "SFT":
            fix = "give each a name, as name=folder"
            raise InputError(f"--policies: a second one is called {name}: {fix}")
        policies[name] = place
    return policies
