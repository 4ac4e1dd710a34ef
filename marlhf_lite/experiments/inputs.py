"""Find and check the models and the data file that a command names before anything heavy is imported."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from marlhf_lite.config.commands import StageCommand, environment_of, reward_of, sampler_of
from marlhf_lite.config.options import GroupConfig
from marlhf_lite.config.parser import named_folders
from marlhf_lite.config.support import (
    goes_together,
    how_processes_were_launched,
    refuse_what_does_not_go_together,
)
from marlhf_lite.models.adapters import form_of_weights, resolve_adapter_dir
from marlhf_lite.tasks.places import matching_files
from marlhf_lite.utils.errors import InputError, check_address
from marlhf_lite.utils.preflight import ProblemList

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
    needs_sft = hasattr(options, "sft") and "sft" not in options.stages
    needs_rm = reward_of(options) == "rm" and "rm" not in options.stages
    sft = None
    rm = None
    policies = {}
    problems = ProblemList()
    with problems.collect():
        sft = _find_model("sft", getattr(options, "sft", ""), needs_sft)
    with problems.collect():
        rm = _find_model("rm", getattr(options, "rm", ""), needs_rm)
    with problems.collect():
        policies = _find_policies(getattr(options, "policies", ""))
    with problems.collect():
        check_dataset(options.dataset)
    if problems.problems:
        # The run ends here, before the checks of `open_context`. Two of these checks need only the options, so they are
        # made now, and their problems are shown at the same time.
        with problems.collect():
            check_methods_differ(options)
        with problems.collect():
            check_groups_are_whole(options)
        problems.stop_if_any_problem()
    return Inputs(sft, rm, policies)


def check_methods_differ(options: StageCommand) -> None:
    """Raise `InputError` if the methods that a command compares are the same."""
    if len(options.methods) > 1 and options.token_level:
        raise InputError(
            "--n 1: both runs would be PPO: give --n 2 or more, or marlhf run --n 1 for PPO alone"
        )


def check_groups_are_whole(options: StageCommand) -> None:
    """Raise `InputError` if an update of RLOO or GRPO cannot be made of complete groups; others have no groups."""
    if isinstance(options, GroupConfig):
        check_groups(options.num_generations, options.batch_size)


def check_groups(num_generations: int, batch_size: int, processes: int = 0) -> None:
    """Raise `InputError` for groups that do not fill a batch, or a batch that the processes cannot share.

    Args:
        num_generations: responses to each prompt.
        batch_size: responses per update, over all processes.
        processes: their number; 0 for those that `accelerate launch` has started.
    """
    processes = processes or int(os.environ.get("WORLD_SIZE", "1"))
    if batch_size % num_generations:
        what = f"--batch_size {batch_size} does not divide into complete groups"
        raise InputError(
            f"--num_generations {num_generations}: {what}: give a multiple of {num_generations}"
        )
    if batch_size % processes:
        what = f"{processes} processes cannot share it"
        raise InputError(f"--batch_size {batch_size}: {what}: give a multiple of that")


def check_support(options: StageCommand, inputs: Inputs) -> None:
    """Raise `InputError` if the support matrix lacks the combination of options."""
    stages = options.stages
    if not stages and options.answers:
        stages = ("evaluate",)
    for stage in stages:
        cell = _cell_of_support_matrix(options, inputs, stage)
        refuse_what_does_not_go_together(cell, sft=inputs.sft)


def check_data_support(options: StageCommand, inputs: Inputs, task: "Task") -> None:
    """Raise `InputError` if a stage cannot learn from data of this form."""
    for stage in options.stages:
        is_given = getattr(inputs, stage, None) is not None  # as --sft: the stage does not run
        # Without answers to learn from, the SFT model of a whole run is the base model itself, as it is with 0 epochs.
        starts_as_base = stage == "sft" and (options.is_whole_run or not options.sft_epochs)
        if is_given or starts_as_base:
            continue
        cell = _cell_of_support_matrix(options, inputs, stage)
        if goes_together(cell):  # else `check_support` refuses it
            cell["data"] = _form_of_data(options, stage, task)
            refuse_what_does_not_go_together(cell, sft=inputs.sft, data=options.dataset)


def _cell_of_support_matrix(options: StageCommand, inputs: Inputs, stage: str) -> dict[str, str]:
    """Return what a stage with these options is on each axis of the support matrix, without its data."""
    # Log-probabilities at the sampling temperature differ from plain ones only if that is not 1.
    is_scaled = getattr(options, "logprobs_at_temperature", False) and options.temperature != 1
    kinds_of_reward = {"rm": "rm", "environment": "turns"}
    reward = kinds_of_reward.get(reward_of(options), "code")
    cell = {
        "stage": stage,
        "environment": _yes_or_no(environment_of(options)),
        "reward": reward,
        "4 bits": _yes_or_no(options.load_in_4bit),
        "scaled": _yes_or_no(is_scaled),
        "finetune": options.finetune,
        "sampler": "generate" if sampler_of(options) == "generate" else "own",
        "launch": how_processes_were_launched(),
    }
    if inputs.sft:
        cell["sft"] = form_of_weights(inputs.sft)
    return cell


def _yes_or_no(value: object) -> str:
    return "yes" if value else "no"


def _form_of_data(options: StageCommand, stage: str, task: "Task") -> str:
    """Return what the rows are to a stage: turns, pairs, answers or prompts alone."""
    if options.dataset == "tiny-guess" and stage not in ("sft", "rm"):  # these read whole games
        return "turns"
    if len(task.splits["rm"]):
        return "pairs"
    if len(task.splits["sft"]):
        return "answers"
    return "prompts"


def check_dataset(dataset: str) -> None:
    """Raise `InputError` if `--dataset` looks like a path, or a pattern of paths, and nothing is there.

    It is also raised for a broken address, such as one with an open bracket.
    """
    check_address("dataset", dataset)
    looks_like_path = dataset.startswith(("/", ".", "~")) or dataset.endswith(FILES)
    is_address = "://" in dataset
    if looks_like_path and not is_address and not matching_files(dataset):
        raise InputError(
            f"--dataset {dataset}: no such file: check the path (relative paths start at {os.getcwd()})"
        )


def _find_model(option: str, folder: str, is_needed: bool) -> Path | None:
    """Return the folder of a model that the option names; None if it names none, and none is needed."""
    if not folder and not is_needed:
        return None
    return resolve_adapter_dir(option, folder)


def _find_policies(words: str) -> dict[str, Path]:
    policies: dict[str, Path] = {}
    for name, folder in named_folders(words):
        place = resolve_adapter_dir("policies", folder)
        name = name or place.parent.name  # the stage: ma-ppo for runs/a/ma-ppo/policy
        if name in policies or name == "SFT":  # which is what an evaluation calls the SFT model
            fix = "give each a name, as name=folder"
            raise InputError(f"--policies: a second one is called {name}: {fix}")
        policies[name] = place
    return policies
