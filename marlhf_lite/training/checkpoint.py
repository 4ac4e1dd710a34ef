"""Checkpoints of a PPO run: everything it needs to go on bit by bit as if it had never stopped.

A checkpoint is one file. It is written under another name and renamed when it is complete, so a kill leaves all of it
or nothing.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states

from marlhf_lite.models.actor_critic import PPOModels
from marlhf_lite.training.distributed import full_state_dict
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import written_as_a_whole
from marlhf_lite.utils.random_states import random_states, set_random_states

if TYPE_CHECKING:
    from marlhf_lite.utils.run_folder import RunFolder

# Full tensors on the CPU, whatever wraps the model; frozen weights come again from the base.
FULL = states.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


class Checkpoints:
    """Saves and loads checkpoints in the `checkpoints` folder of a run; the last `keep` of them stay.

    A checkpoint holds the trainable weights, the optimizer's state, the scale of the loss in float16, the random states
    of every process, the trainer's counters (among them how many updates were done, which is the position in the data),
    and how long each log was.
    """

    def __init__(self, run: "RunFolder", keep: int, accelerator: Accelerator):
        self.run, self.folder, self.keep, self.accelerator = run, run.path / "checkpoints", keep, accelerator

    def path(self, update: int) -> Path:
        """The checkpoint after so many updates."""
        return self.folder / f"update-{update:06d}.pt"

    def updates(self) -> list[int]:
        """The updates that have a checkpoint, in order; damaged ones too."""
        names = (path.stem.removeprefix("update-") for path in self.folder.glob("update-*.pt"))
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, actor_critic: nn.Module, optimizer, counters: dict) -> None:
        """Write one after `counters["updates_done"]` updates. Raises `InputError` where the disk is full."""
        scaler = self.accelerator.scaler
        state = {  # every process takes part: weights may be sharded
            "weights": _weights(actor_critic),
            "optimizer": _optimizer_state(actor_critic, optimizer),
            "scaler": scaler.state_dict() if scaler else {},
            "random": gather_object([random_states()]),
            "counters": counters,
            "logs": self.run.position(),
        }
        if self.accelerator.is_main_process:
            self._write(state, self.path(counters["updates_done"]))
        self.accelerator.wait_for_everyone()

    def _write(self, state: dict, final: Path) -> None:
        temporary = self.folder / f".{final.name}"
        self.folder.mkdir(exist_ok=True)
        try:
            torch.save(state, temporary)
            os.replace(temporary, final)
            for old in self.updates()[: -self.keep]:
                self.path(old).unlink()
        except (OSError, RuntimeError) as error:  # torch's writer raises the second
            temporary.unlink(missing_ok=True)
            last = max(self.updates(), default=None)
            kept = "" if last is None else f"; the one of update {last} is complete"
            raise InputError(f"{self.folder}: checkpoint not written ({error}): free some disk space{kept}") from error

    def load(self, actor_critic: nn.Module, optimizer, update: int = 0) -> dict:
        """Load a checkpoint into models, optimizer, random generators and logs; returns its counters. 0 is the last.

        Raises `InputError` where it is damaged, of another model or number of processes, or where a log is shorter than
        it was; the message names the checkpoint before it. Then nothing was changed.
        """
        existing = self.updates()
        if not existing or (update and update not in existing):
            there = f"there are {', '.join(map(str, existing))}" if existing else "there is none"
            raise InputError(f"{self.folder}: no checkpoint{f' of update {update}' if update else ''}: {there}")
        update = update or existing[-1]
        try:
            state = self._read(self.path(update), actor_critic)
        except InputError as error:
            older = [u for u in existing if u < update]
            fix = f"add --from_checkpoint {older[-1]} for the one before" if older else "start the run again"
            raise InputError(f"{self.path(update)}: {error}: {fix}") from None
        check_processes(self.path(update), len(state["random"]), self.accelerator.num_processes)
        if self.accelerator.is_main_process:
            newer = map(self.path, existing[existing.index(update) + 1 :])
            go_back(self.run, [*newer, *self.folder.glob(".update-*")], state["logs"])  # and what killed saves left
        states.set_model_state_dict(actor_critic, state["weights"], options=FULL)
        _set_optimizer_state(actor_critic, optimizer, state["optimizer"])
        if self.accelerator.scaler and state.get("scaler"):  # older checkpoints have none
            self.accelerator.scaler.load_state_dict(state["scaler"])
        set_random_states(state["random"][self.accelerator.process_index])
        self.accelerator.wait_for_everyone()
        return state["counters"]

    def _read(self, path: Path, actor_critic: nn.Module) -> dict:
        """A checkpoint, checked. Raises `InputError` with the reason where it cannot be used."""
        try:
            state = torch.load(path, weights_only=True)  # runs no code of whoever wrote the file
        except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError, KeyError):
            raise InputError("it is damaged") from None
        shapes = {name: tuple(p.shape) for name, p in _trainable(actor_critic).items()}
        if {name: tuple(value.shape) for name, value in state["weights"].items()} != shapes:
            raise InputError("its weights are those of another model or other adapters")
        self.run.check_logs(state["logs"])
        return state


def go_back(run: "RunFolder", newer: Iterable[Path], logs: Mapping[str, int]) -> None:
    """Delete the checkpoints that are newer than the one a run goes on from, and cut its logs back to that one's.

    Raises `InputError` where a log is shorter than `logs` says; then nothing was changed.
    """
    run.check_logs(logs)
    for path in newer:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    run.truncate_logs(logs)


def save_models(folder: Path, models: PPOModels, actor_critic: nn.Module, tokenizer, accelerator: Accelerator) -> None:
    """Save policy and critic as adapter folders (or full models) with the tokenizer: what the other commands take.

    Each replaces an older one when it is complete. Raises `InputError` where the disk is full.
    """
    for role in ("policy", "critic"):
        model, weights = getattr(models, role).model, full_state_dict(accelerator, actor_critic, role)
        if not accelerator.is_main_process:
            continue
        final = folder / role
        try:
            with written_as_a_whole(final) as temporary:
                model.save_pretrained(temporary, **weights)
                if role == "policy":
                    tokenizer.save_pretrained(temporary)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{final}: not written ({error}): free some disk space, then --resume") from error


# -- weights and optimizer --------------------------------------------------------------------------------------------


def _trainable(actor_critic: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name; a tied one appears once."""
    named = actor_critic.named_parameters()
    return {name.removeprefix("module."): p for name, p in named if p.requires_grad}


def _weights(actor_critic: nn.Module) -> dict[str, Tensor]:
    """Trainable weights by name; where they are sharded, in full on the main process and none elsewhere."""
    wanted, full = _trainable(actor_critic), states.get_model_state_dict(actor_critic, options=FULL)
    return {name: value.contiguous() for name, value in full.items() if name in wanted}


def _optimizer_state(actor_critic: nn.Module, optimizer) -> dict:
    """The optimizer's state by parameter name; empty before the first step, where torch would make one of zeros."""
    inner = optimizer.optimizer
    return states.get_optimizer_state_dict(actor_critic, inner, options=FULL) if inner.state else {}


def _set_optimizer_state(actor_critic: nn.Module, optimizer, saved: dict) -> None:
    inner = optimizer.optimizer
    if saved:
        # Before torch 2.10 a parameter without state is a KeyError.
        saved = saved | {"state": {name: {} for name in _trainable(actor_critic)} | saved["state"]}
        states.set_optimizer_state_dict(actor_critic, inner, saved, options=FULL)
    # For a parameter without state torch makes one of zeros that counts as one step: remove it. The policy has none
    # while the critic warms up.
    for group in inner.param_groups:
        if not any(name.startswith(f"{group['name']}.") and state for name, state in saved.get("state", {}).items()):
            for parameter in group["params"]:
                inner.state.pop(parameter, None)


# -- processes --------------------------------------------------------------------------------------------------------


def check_processes(checkpoint: Path, made: int, processes: int) -> None:
    """Raise `InputError` where another number of processes made a checkpoint: each has random states of its own."""
    if made != processes:
        fix = f"launch it with --num_processes {made}"
        raise InputError(f"{checkpoint}: made by {made} process{'es' * (made != 1)}, not {processes}: {fix}")
