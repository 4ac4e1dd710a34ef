"""Checkpoints of a PPO run: everything it needs to go on bit by bit as if it had never stopped.

A checkpoint is a folder. It is written under another name and renamed when every file is on the disk, so a kill leaves
it whole or absent; its manifest holds size and SHA-256 of each file, so damage is found before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict as parts

from marlhf_lite.models.actor_critic import PPOModels
from marlhf_lite.training.distributed import saved_part
from marlhf_lite.training.learner import Learner
from marlhf_lite.training.random_state import random_states, set_random_states
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import RunFolder

MANIFEST = "manifest.json"
FILES = ("weights.safetensors", "optimizer.pt", "state.json")  # and random-<process>.pt
# Whole tensors on the CPU, whatever wraps the model.
WHOLE = parts.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


class Checkpoints:
    """Saves and loads checkpoints under `run`/checkpoints; the last `keep` stay.

    Held: trainable weights, optimizer, random states of every process, the KL coefficient and other counters, how many
    updates were done (which is the data cursor, since batches follow from the seed), and how long each log was.
    """

    def __init__(self, run: RunFolder, keep: int, accelerator: Accelerator):
        self.run, self.folder, self.keep, self.accelerator = run, run.path / "checkpoints", keep, accelerator

    def path(self, update: int) -> Path:
        return self.folder / f"update-{update:06d}"

    def updates(self) -> list[int]:
        """The updates that have a checkpoint, in order; damaged ones too."""
        names = (path.name.removeprefix("update-") for path in self.folder.glob("update-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, learner: Learner, generated: int) -> None:
        """Write one after `learner.updates` updates. Raises `InputError` where the disk is full; older ones stay."""
        temporary = self.folder / f".{self.path(learner.updates).name}.tmp"
        weights = _weights(learner)  # every process takes part, if they are sharded
        optimizer = _moments(learner)
        if self.accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        try:
            torch.save(random_states(), temporary / f"random-{self.accelerator.process_index}.pt")
            if self.accelerator.is_main_process:
                save_file(weights, temporary / "weights.safetensors")
                torch.save(optimizer, temporary / "optimizer.pt")
                write_json(temporary / "state.json", self._state(learner, generated))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                self._finish(temporary, self.path(learner.updates))
        except (OSError, RuntimeError, SafetensorError) as error:  # torch's writer raises the second
            shutil.rmtree(temporary, ignore_errors=True)
            last = max(self.updates(), default=None)
            kept = f"; the one of update {last} is whole" if last is not None else ""
            raise InputError(f"{self.folder}: checkpoint not written ({error}): free some disk space{kept}") from error
        self.accelerator.wait_for_everyone()

    def load(self, learner: Learner, update: int = 0) -> dict:
        """Put a checkpoint's state into `learner`, random generators and logs; its counters. 0 is the last one.

        Raises `InputError` where it is damaged, of another run or of another number of processes, or where the logs
        are not those it was written with, and names the one before it.
        """
        done = self.updates()
        if not done or (update and update not in done):
            there = f"there are {', '.join(map(str, done))}" if done else "there is none"
            raise InputError(f"{self.folder}: no checkpoint{f' of update {update}' if update else ''}: {there}")
        update = update or done[-1]
        try:
            state = self._read(self.path(update), learner)
        except InputError as error:
            older = [u for u in done if u < update]
            mend = f"add --from_checkpoint {older[-1]} for the one before" if older else "start the run again"
            raise InputError(f"{self.path(update)}: {error}: {mend}") from None
        if self.accelerator.is_main_process:
            for later in (u for u in done if u > update):  # of a past that now does not happen
                self._remove(later)
            self.run.truncate_logs(state["logs"])
            for rest in self.folder.glob(".update-*"):  # of a save that was killed
                shutil.rmtree(rest)
        self.accelerator.wait_for_everyone()
        return state

    def _state(self, learner: Learner, generated: int) -> dict:
        logs = self.run.position()
        return {
            "update": learner.updates,
            "processes": self.accelerator.num_processes,
            "generated_tokens": generated,
            "kl_coef": learner.ppo.kl_coef,
            "micro_batch_size": learner.ppo.micro_batch_size,
            "bad_in_row": learner.bad_in_row,
            "logs": logs,
            "log_digests": {name: self._log_digest(name, size) for name, size in logs.items()},
        }

    def _log_digest(self, name: str, size: int) -> str:
        """SHA-256 of a log's first `size` bytes. They hold the clock's times: no two runs have the same."""
        if not size:
            return ""
        with open(self.run.path / name, "rb") as file:
            return hashlib.sha256(file.read(size)).hexdigest()

    def _check_logs(self, state: Mapping) -> None:
        now = self.run.position()
        for name, size in state["logs"].items():
            if now[name] < size:
                raise InputError(f"{name} has {now[name]} bytes instead of {size} or more")
            if self._log_digest(name, size) != state["log_digests"][name]:
                raise InputError(f"{name} is not the one it was written with: another run's checkpoint, or edited")

    def _finish(self, temporary: Path, final: Path) -> None:
        files = sorted(temporary.iterdir())
        logs = [self.run.path / name for name, size in self.run.position().items() if size]
        for path in (*files, *logs):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        write_json(temporary / MANIFEST, {path.name: _fingerprint(path) for path in files})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for old in self.updates()[: -self.keep]:
            self._remove(old)

    def _remove(self, update: int) -> None:
        """Under another name first, so that a kill leaves no half of it that looks whole."""
        gone = self.folder / f".{self.path(update).name}.old"
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(self.path(update), gone)
        shutil.rmtree(gone)

    def _read(self, folder: Path, learner: Learner) -> dict:
        _check(folder)
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if state["processes"] != self.accelerator.num_processes:
            raise InputError(f"made by {state['processes']} processes, not {self.accelerator.num_processes}")
        weights = load_file(folder / "weights.safetensors")
        if {k: v.shape for k, v in weights.items()} != {k: p.shape for k, p in _trainable(learner).items()}:
            raise InputError("its weights are those of another model or other adapters")
        self._check_logs(state)
        parts.set_model_state_dict(learner.actors, weights, options=WHOLE)
        _set_moments(learner, torch.load(folder / "optimizer.pt", weights_only=True))
        learner.restore(state)
        set_random_states(torch.load(folder / f"random-{self.accelerator.process_index}.pt", weights_only=True))
        return state


def save_models(folder: Path, roles: PPOModels, learner: Learner, tokenizer) -> None:
    """Policy and critic as adapter folders (or whole models), with the tokenizer: what the other commands take.

    Each takes the place of an older one when it is whole. Raises `InputError` where the disk is full.
    """
    for name in ("policy", "critic"):
        model, state = getattr(roles, name).model, saved_part(learner.accelerator, learner.actors, name)
        if not learner.accelerator.is_main_process:
            continue
        place, temporary = folder / name, folder / f".{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            model.save_pretrained(temporary, **state)
            if name == "policy":
                tokenizer.save_pretrained(temporary)
            shutil.rmtree(place, ignore_errors=True)
            os.replace(temporary, place)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise InputError(f"{place}: not written ({error}): free some disk space, then --resume") from error


def _trainable(learner: Learner) -> dict[str, torch.Tensor]:
    """Trainable parameters by name. Frozen ones come again from the base; a tied one is held once."""
    named = learner.actors.named_parameters()
    return {name.removeprefix("module."): p for name, p in named if p.requires_grad}


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    """Trainable weights by name; where they are sharded, whole on the main process and none elsewhere."""
    wanted = _trainable(learner)
    whole = parts.get_model_state_dict(learner.actors, options=WHOLE)
    return {name: value.contiguous() for name, value in whole.items() if name in wanted}


def _moments(learner: Learner) -> dict:
    """The optimizer's state by parameter name; empty before the first step, where torch would make one of zeros."""
    optimizer = learner.optimizer.optimizer
    return parts.get_optimizer_state_dict(learner.actors, optimizer, options=WHOLE) if optimizer.state else {}


def _set_moments(learner: Learner, saved: dict) -> None:
    """The inverse. torch makes a state of zeros, and one step old, for each parameter that had none: out with it."""
    optimizer = learner.optimizer.optimizer
    if saved:
        parts.set_optimizer_state_dict(learner.actors, optimizer, saved, options=WHOLE)
    for group in optimizer.param_groups:  # the policy has none while the critic warms up
        if not any(name.startswith(f"{group['name']}.") for name in saved.get("state", ())):
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)


def _check(folder: Path) -> None:
    """Is every file there that the manifest names, as it was written, and does it name all there have to be?"""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        known = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise InputError(f"it has no readable {MANIFEST}, so it was not written here or is damaged") from None
    for name in (*known, *FILES):
        path, (size, digest) = folder / name, known.get(name, (0, ""))
        if name not in known or not path.is_file():
            raise InputError(f"{name} is missing")
        if path.stat().st_size != size:
            raise InputError(f"{name} has {path.stat().st_size} bytes instead of {size}")
        if _fingerprint(path)["sha256"] != digest:
            raise InputError(f"{name} is not what was written")


def _fingerprint(path: Path) -> dict:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
