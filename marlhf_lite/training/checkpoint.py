"""Checkpoints of a PPO run: everything it needs to continue bit by bit as if it had never stopped.

A checkpoint holds the trainable weights, Adam's state, the scale of the loss in float16, the random states of every
process, the trainer's counters (the number of updates done is the position in the data), and the length of each log.
It is one file, `update-000020.pt`. If FSDP2 shards the weights, it is a folder into which each process writes its part.
Either gets its name when it is complete, so a kill leaves all of it or nothing.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from marlhf_lite.models.actor_critic import ActorCritic, PPOModels
from marlhf_lite.models.shards import read_metadata, read_shards, write_shards
from marlhf_lite.training.distributed import is_sharded, whole_weights
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.progress import write_update_of_weights
from marlhf_lite.utils.random_states import random_states, set_random_states
from marlhf_lite.utils.seals import DELETE_IT, atomic_folder, broken, seal

if TYPE_CHECKING:
    from marlhf_lite.utils.run_folder import RunFolder

STATE = "state.pt"  # in a folder of shards: everything but the tensors of weights and optimizer
ADAM = ("step", "exp_avg", "exp_avg_sq")  # the state that torch's AdamW keeps for a parameter


class Checkpoints:
    """Saves and loads checkpoints in the `checkpoints` folder of a run; the last `keep` of them stay."""

    def __init__(self, run: "RunFolder", keep: int, accelerator: Accelerator):
        self.run = run
        self.folder = run.path / "checkpoints"
        self.keep = keep
        self.accelerator = accelerator

    def path(self, update: int) -> Path:
        """The checkpoint after this many updates: a folder of shards if there is one, else a file."""
        folder = self.folder / f"update-{update:06d}"
        return folder if folder.is_dir() else folder.with_suffix(".pt")

    def updates(self) -> list[int]:
        """The updates that have a checkpoint, in order; damaged ones too."""
        return updates_with_checkpoint(self.folder)

    def save(self, actor_critic: nn.Module, optimizer, counters: dict, keep_also: int = 0) -> None:
        """Write the checkpoint after `counters["updates_done"]` updates, then delete the oldest ones.

        The last `self.keep` checkpoints stay, and also that of update `keep_also`. An error, such as that of a full
        disk, leaves the earlier checkpoints and no part of this one.
        """
        # 1. What is stored beside the tensors.
        scaler = self.accelerator.scaler
        sharded = is_sharded(actor_critic)
        state = {
            "scaler": scaler.state_dict() if scaler else {},
            "random": gather_object([random_states()]),  # of each process, by its number
            "counters": counters,
            "logs": self.run.position(),  # the size of each log: a run that resumes cuts the logs back to it
        }

        # 2. Its path, and a temporary one that no reader looks for, under which it is written until it is complete.
        place = self.folder / f"update-{counters['updates_done']:06d}"
        final = place if sharded else place.with_suffix(".pt")
        temporary = self.folder / f".{final.name}"
        tensors = local_tensors(actor_critic, optimizer)
        if self.accelerator.is_main_process:
            self.folder.mkdir(exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
        self.accelerator.wait_for_everyone()

        # 3. If the weights are sharded, each process writes its part. The main process writes everything else.
        try:
            if sharded:
                write_shards(tensors, temporary)
            if self.accelerator.is_main_process:
                if sharded:
                    torch.save(state, temporary / STATE)
                    # Commands that read the policy from a checkpoint need its config.
                    policy = cast(ActorCritic, actor_critic).policy
                    policy.model.config.save_pretrained(temporary)
                else:
                    copies = {name: x.to("cpu", copy=True) for name, x in tensors.items()}
                    torch.save(state | {"tensors": copies}, temporary)
                seal(temporary)
                if final.is_dir():  # it is not replaced in one step, as a file is
                    _remove(final)
                os.replace(temporary, final)
                for old_update in self.updates()[: -self.keep]:
                    if old_update != keep_also:
                        _remove(self.path(old_update))
        except BaseException:  # also an interrupt, which is not an `Exception`
            if self.accelerator.is_main_process:
                _remove(temporary)
            raise
        self.accelerator.wait_for_everyone()

    def update_to_resume(self, at: int | None, total_updates: int) -> int:
        """The update whose checkpoint a run continues from; see the function `update_to_resume`."""
        return update_to_resume(self.folder, at, total_updates=total_updates)

    def load(self, actor_critic: nn.Module, optimizer, update: int) -> dict:
        """Load the checkpoint of this update into models, optimizer, random generators and logs; return its counters.

        Later checkpoints are deleted. Raises `InputError` if it is damaged or does not fit (another model, number of
        processes, or shorter logs); then nothing was changed on the disk.
        """
        path = self.path(update)
        processes = self.accelerator.num_processes
        # 1. Weights and Adam's state.
        state = self._load_tensors(path, actor_critic, optimizer)
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])

        # 2. The run on the disk: delete what later updates wrote, and the hidden files that killed saves left.
        if self.accelerator.is_main_process:
            later = [self.path(number) for number in self.updates() if number > update]
            unfinished = self.folder.glob(".update-*")
            rewind_run(self.run, [*later, *unfinished], state["logs"])

        # 3. Random generators.
        processes_at_save = len(state["random"])
        if processes_at_save == processes:
            set_random_states(state["random"][self.accelerator.process_index])
        else:  # shards: `_load_tensors` has refused a single file that another number of processes made
            made = f"made by {processes_at_save} processes, not {processes}"
            self.accelerator.print(f"{path}: {made}: responses will be others")
        self.accelerator.wait_for_everyone()
        return state["counters"]

    def load_weights(self, actor_critic: nn.Module, optimizer, update: int) -> None:
        """Load the weights of this update's checkpoint, and Adam's state; the run on the disk stays as it is.

        Raises `InputError` if the checkpoint is damaged.
        """
        self._load_tensors(self.path(update), actor_critic, optimizer)

    def _load_tensors(self, path: Path, actor_critic: nn.Module, optimizer) -> dict:
        """Load weights and Adam's state; return all that the checkpoint holds. Raises `InputError`; see `load`."""
        processes = self.accelerator.num_processes
        has_shards = path.is_dir()
        try:
            state = self._read(path, actor_critic)
            if has_shards:  # any number of processes reads them, each its part
                # These are the tensors of models and optimizer themselves, so filling them loads the checkpoint.
                tensors = local_tensors(actor_critic, optimizer, wanted=state["tensors"])
                read_shards(tensors, path, no_dist=processes == 1)
        except InputError as error:
            raise InputError(f"{path}: {error}: {DELETE_IT}") from None
        if not has_shards:  # each process reads the whole file
            check_processes(path, len(state["random"]), processes)
            tensors = local_tensors(actor_critic, optimizer, wanted=state["tensors"])
            for name, tensor in tensors.items():
                tensor.copy_(state["tensors"][name])
        return state

    def _read(self, path: Path, actor_critic: nn.Module) -> dict:
        """Read a checkpoint and return what it holds by name, with its tensors under "tensors".

        A folder of shards is not read whole: its "tensors" are only the shapes, and `read_shards` reads them later.
        Raises `InputError` with the reason if it is damaged, or of another model.
        """
        damaged_file = broken(path)
        if damaged_file:
            raise InputError(f"it is damaged ({damaged_file})")
        is_folder = path.is_dir()
        file = path / STATE if is_folder else path
        # With `weights_only` a file that somebody else wrote cannot run code here.
        try:
            state = torch.load(file, weights_only=True, map_location="cpu")
        except UnpicklingError:
            raise InputError(f"it holds more than numbers ({file.name})") from None
        if is_folder:
            shards = read_metadata(path).state_dict_metadata
            state["tensors"] = {
                name: shard.size
                for name, shard in shards.items()
                if isinstance(shard, TensorStorageMetadata)  # `read_metadata` refuses others
            }

        shapes_here = {}
        for name, parameter in _trainable(actor_critic).items():
            shapes_here[f"weights.{name}"] = tuple(parameter.shape)
        shapes_there = {}
        for name, tensor_or_shape in state["tensors"].items():
            if name.startswith("weights."):
                shape = tensor_or_shape if is_folder else tensor_or_shape.shape
                shapes_there[name] = tuple(shape)
        if shapes_here != shapes_there:
            raise InputError("its weights are those of another model or other adapters")
        self.run.check_logs(state["logs"])
        return state


def updates_with_checkpoint(folder: Path) -> list[int]:
    """The updates that have a checkpoint in a stage's folder `checkpoints`, in order; damaged ones too."""
    # PPO writes update-000020.pt or a folder update-000020, the trainers of transformers checkpoint-20.
    written = [*folder.glob("update-*"), *folder.glob("checkpoint-*")]
    # A set, because an update may have both a file and a folder.
    numbers = {path.stem.rpartition("-")[2] for path in written}
    return sorted(int(number) for number in numbers if number.isdigit())


def update_to_resume(folder: Path, at: int | None, total_updates: int | None) -> int:
    """The update whose checkpoint in `folder` a run continues from: the last one, or `at` (`--at`).

    Raises `InputError` if there is no such checkpoint, or if it is of a later update than `total_updates`; None sets no
    limit.
    """
    updates = updates_with_checkpoint(folder)
    if not updates:
        raise InputError(f"{folder}: there is no checkpoint: train without resuming")
    if at is not None and at not in updates:
        fix = f"choose from {', '.join(map(str, updates))}, or keep more by --save_total_limit"
        raise InputError(f"--at {at}: {folder} has no checkpoint of that update: {fix}")
    update = updates[-1] if at is None else at
    if total_updates is not None and update > total_updates:
        fix = f"give --updates {update} or more, or go back by --at to an earlier checkpoint"
        raise InputError(f"--updates {total_updates}: the run has made {update} already: {fix}")
    return update


def rewind_run(run: "RunFolder", newer: Iterable[Path], logs: Mapping[str, int]) -> None:
    """Take a run on the disk back to a checkpoint: delete the `newer` ones, and cut the logs back to the sizes `logs`.

    `logs` are the sizes in bytes that the checkpoint holds. Raises `InputError` if a log is shorter than that; then
    nothing was changed.
    """
    run.check_logs(logs)
    _remove(*newer)
    run.truncate_logs(logs)


def _remove(*paths: Path) -> None:
    """Delete these files and folders, if they exist.

    A folder first gets a hidden name. So if the process is killed before all files in it are deleted, no reader takes
    what is left for a checkpoint.
    """
    for path in paths:
        if path.is_dir():
            hidden = path.with_name(f".{path.name.lstrip('.')}.old")
            os.replace(path, hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink(missing_ok=True)


def _trainable(actor_critic: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name; one that two layers share (tied weights) appears once, under its first name."""
    named = actor_critic.named_parameters()
    # Data-parallel wrappers put "module." before the names.
    return {name.removeprefix("module."): p for name, p in named if p.requires_grad}


def local_tensors(
    actor_critic: nn.Module, optimizer, wanted: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """This process's part of the weights (`weights.NAME`) and of Adam's state (`exp_avg.NAME` and others), by name.

    To load a checkpoint, give its names as `wanted`. Adam's state is then first replaced by empty tensors, one for each
    state that the checkpoint has, which the caller fills.
    """
    tensors = {}
    state_of_adam = optimizer.optimizer.state  # accelerate has wrapped the optimizer in another one
    for name, parameter in _trainable(actor_critic).items():
        tensors[f"weights.{name}"] = parameter.detach()
        if wanted is not None:
            state_of_adam.pop(parameter, None)
            kinds = [kind for kind in ADAM if f"{kind}.{name}" in wanted]
            if kinds:  # none if the parameter had made no step when the checkpoint was written
                state_of_adam[parameter] = {kind: _empty(kind, parameter) for kind in kinds}
        for kind, tensor in state_of_adam.get(parameter, {}).items():
            tensors[f"{kind}.{name}"] = tensor
    return tensors


def _empty(kind: str, parameter: Tensor) -> Tensor:
    """A tensor as Adam makes it for this parameter: a count of steps, or a moment of each weight."""
    if kind == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def check_processes(checkpoint: Path, made: int, processes: int) -> None:
    """Raise `InputError` if another number of processes made a checkpoint: each has its own random states."""
    if made != processes:
        makers = "1 process" if made == 1 else f"{made} processes"
        fix = f"launch it with --num_processes {made}"
        raise InputError(f"{checkpoint}: made by {makers}, not {processes}: {fix}")


def save_models(
    folder: Path,
    models: PPOModels,
    actor_critic: nn.Module,
    tokenizer,
    accelerator: Accelerator,
    update: int,
) -> None:
    """Save policy and critic as adapter folders (or full models) with the tokenizer, as the other commands take them.

    `update` is the update after which they have these weights. Each folder replaces an older one when it is complete.
    """
    for role in ("policy", "critic"):
        model = getattr(models, role).model
        # All processes gather the weights that they share, and only the main process writes.
        weights = {"state_dict": whole_weights(model)} if is_sharded(actor_critic) else {}
        if accelerator.is_main_process:
            with atomic_folder(folder / role) as temporary:
                model.save_pretrained(temporary, **weights)
                if role == "policy":
                    tokenizer.save_pretrained(temporary)
                    write_update_of_weights(temporary, update)
