"""Checkpoints of a PPO run: everything it needs to go on bit by bit as if it had never stopped.

A checkpoint is one file, or where FSDP2 spreads the weights a folder into which each process writes what it holds. It
is written under another name and renamed when it is complete, so a kill leaves all of it or nothing.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from marlhf_lite.models.shards import read_shards, tensor_shapes, write_shards
from marlhf_lite.training.distributed import is_sharded, whole_weights
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.random_states import random_states, set_random_states
from marlhf_lite.utils.seals import atomic_folder, broken, seal

if TYPE_CHECKING:
    from marlhf_lite.utils.run_folder import RunFolder

ADAM = ("step", "exp_avg", "exp_avg_sq")  # of torch's AdamW, a parameter
STATE = "state.pt"  # in a folder of shards: what is neither a weight nor a moment of the optimizer
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
        """The checkpoint after so many updates: a folder of shards where there is one, else a file."""
        folder = self.folder / f"update-{update:06d}"
        return folder if folder.is_dir() else folder.with_suffix(".pt")

    def updates(self) -> list[int]:
        """The updates that have a checkpoint, in order; damaged ones too."""
        names = {path.stem.removeprefix("update-") for path in self.folder.glob("update-*")}
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, actor_critic: nn.Module, optimizer, counters: dict) -> None:
        """Write one after `counters["updates_done"]` updates. Raises `InputError` where the disk is full."""
        scaler = self.accelerator.scaler
        state = {
            "scaler": scaler.state_dict() if scaler else {},
            "random": gather_object([random_states()]),
            "counters": counters,
            "logs": self.run.position(),
        }
        place, keeps = self.folder / f"update-{counters['updates_done']:06d}", self.accelerator.is_main_process
        if is_sharded(actor_critic):
            self._write_shards(state, actor_critic, optimizer, place)
        else:
            state["weights"], state["optimizer"] = _weights(actor_critic), _optimizer_state(actor_critic, optimizer)
            if keeps:
                self._write(lambda path: torch.save(state, path), place.with_suffix(".pt"))
        self.accelerator.wait_for_everyone()

    def _write_shards(self, state: dict, actor_critic: nn.Module, optimizer, final: Path) -> None:
        """All processes write what they hold, and the main one the rest, with the policy's config for its readers."""
        part, is_main = self.folder / f".{final.name}", self.accelerator.is_main_process

        def write_rest(path: Path) -> None:
            torch.save(state, path / STATE)
            actor_critic.policy.model.config.save_pretrained(path)

        if is_main:
            shutil.rmtree(part, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with self._disk_is_full(part):
            write_shards(_local_state(actor_critic, optimizer), part)
        if is_main:
            self._write(write_rest, final)

    def _write(self, write: Callable[[Path], None], final: Path) -> None:
        """`write(path)` under another name, which becomes `final`; then the oldest checkpoints go."""
        temporary = self.folder / f".{final.name}"
        self.folder.mkdir(exist_ok=True)
        with self._disk_is_full(temporary):
            write(temporary)
            seal(temporary)
            if final.is_dir():  # a file is replaced in one step, a folder is not
                _remove(final)
            os.replace(temporary, final)
            _remove(final.with_suffix("" if final.suffix else ".pt"))  # of another number of processes
            for old in self.updates()[: -self.keep]:
                _remove(self.path(old))

    @contextmanager
    def _disk_is_full(self, temporary: Path) -> Iterator[None]:
        """Make one line of what a full disk raises in this block, and remove what was written."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch's writer raises the second
            _remove(temporary)
            last = max(self.updates(), default=None)
            kept = "" if last is None else f"; the one of update {last} is complete"
            raise InputError(f"{self.folder}: checkpoint not written ({error}): free some disk space{kept}") from error

    def load(self, actor_critic: nn.Module, optimizer, update: int = 0) -> dict:
        """Load a checkpoint into models, optimizer, random generators and logs; returns its counters. 0 is the last.

        Raises `InputError` where it is damaged, of another model or number of processes, or where a log is shorter than
        it was; the message names the checkpoint before it. Then nothing was changed on
        the disk.
        """
        existing = self.updates()
        if not existing or (update and update not in existing):
            there = f"there are {', '.join(map(str, existing))}" if existing else "there is none"
            raise InputError(f"{self.folder}: no checkpoint{f' of update {update}' if update else ''}: {there}")
        update = update or existing[-1]
        path = self.path(update)
        try:
            state = self._read(path, actor_critic)
            if path.is_dir():
                self._load_shards(path, actor_critic, optimizer)
        except InputError as error:
            older = [u for u in existing if u < update]
            fix = f"add --from_checkpoint {older[-1]} for the one before" if older else "start the run again"
            raise InputError(f"{path}: {error}: {fix}") from None
        made, processes = len(state["random"]), self.accelerator.num_processes
        if not path.is_dir():  # shards are read by any number of processes
            check_processes(path, made, processes)
            states.set_model_state_dict(actor_critic, state["weights"], options=FULL)
            _set_optimizer_state(actor_critic, optimizer, state["optimizer"])
        if self.accelerator.scaler and state.get("scaler"):  # older checkpoints have none
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.accelerator.is_main_process:
            newer = map(self.path, existing[existing.index(update) + 1 :])
            rewind_run(self.run, [*newer, *self.folder.glob(".update-*")], state["logs"])  # and what killed saves left
        if made == processes:
            set_random_states(state["random"][self.accelerator.process_index])
        else:
            self.accelerator.print(f"{path}: made by {made} processes, not {processes}: responses will be others")
        self.accelerator.wait_for_everyone()
        return state["counters"]

    def _load_shards(self, path: Path, actor_critic: nn.Module, optimizer) -> None:
        tensors = _local_state(actor_critic, optimizer, wanted=tensor_shapes(path))
        read_shards(tensors, path, no_dist=self.accelerator.num_processes == 1)

    def _read(self, path: Path, actor_critic: nn.Module) -> dict:
        """A checkpoint, checked; without its shards. Raises `InputError` with the reason where it cannot be used."""
        is_folder = path.is_dir()
        try:
            if not is_folder and broken(path):
                raise ValueError
            state = torch.load(path / STATE if is_folder else path, weights_only=True)  # runs no code of its writer
        except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError, KeyError):
            raise InputError("it is damaged") from None
        shapes = _weight_shapes(path) if is_folder else {name: tuple(w.shape) for name, w in state["weights"].items()}
        if shapes != {name: tuple(p.shape) for name, p in _trainable(actor_critic).items()}:
            raise InputError("its weights are those of another model or other adapters")
        if is_folder and broken(path):  # after what names the shard
            raise InputError("it is damaged")
        self.run.check_logs(state["logs"])
        return state


def rewind_run(run: "RunFolder", newer: Iterable[Path], logs: Mapping[str, int]) -> None:
    """Delete the checkpoints that are newer than the one a run goes on from, and cut its logs back to that one's.

    Raises `InputError` where a log is shorter than `logs` says; then nothing was changed.
    """
    run.check_logs(logs)
    _remove(*newer)
    run.truncate_logs(logs)


def _remove(*paths: Path) -> None:
    """Delete files and folders; one that is not there is no fault, and half a folder never has its name."""
    for path in paths:
        if path.is_dir():
            hidden = path.with_name(f".{path.name.lstrip('.')}.old")
            os.replace(path, hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink(missing_ok=True)


def save_models(folder: Path, models: PPOModels, actor_critic: nn.Module, tokenizer, accelerator: Accelerator) -> None:
    """Save policy and critic as adapter folders (or full models) with the tokenizer: what the other commands take.

    Each replaces an older one when it is complete. Raises `InputError` where the disk is full.
    """
    for role in ("policy", "critic"):
        model = getattr(models, role).model
        weights = {"state_dict": whole_weights(model)} if is_sharded(actor_critic) else {}
        if not accelerator.is_main_process:
            continue
        final = folder / role
        try:
            with atomic_folder(final) as temporary:
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


def _local_state(actor_critic: nn.Module, optimizer, wanted: Iterable[str] | None = None) -> dict[str, Tensor]:
    """What this process holds of weights (`weights.NAME`) and of Adam's state (`exp_avg.NAME` and others), by name.

    With `wanted`, names of a checkpoint, Adam's state gets the tensors that it names, and no others.
    """
    held, inner = {}, optimizer.optimizer
    for name, parameter in _trainable(actor_critic).items():
        held[f"weights.{name}"] = parameter.detach()
        if wanted is not None:
            inner.state.pop(parameter, None)
            kinds = [kind for kind in ADAM if f"{kind}.{name}" in wanted]
            if kinds:
                inner.state[parameter] = {kind: _empty(kind, parameter) for kind in kinds}
        held |= {f"{kind}.{name}": tensor for kind, tensor in inner.state.get(parameter, {}).items()}
    return held


def _weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights in a folder of shards by name. Raises `InputError` where a shard is missing."""
    shapes, start = tensor_shapes(folder), "weights."
    return {name.removeprefix(start): shape for name, shape in shapes.items() if name.startswith(start)}


def _empty(kind: str, parameter: Tensor) -> Tensor:
    """A tensor as Adam makes it for this parameter: a count of steps, or a moment of each weight."""
    if kind == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


# -- processes --------------------------------------------------------------------------------------------------------


def check_processes(checkpoint: Path, made: int, processes: int) -> None:
    """Raise `InputError` where another number of processes made a checkpoint: each has random states of its own."""
    if made != processes:
        fix = f"launch it with --num_processes {made}"
        raise InputError(f"{checkpoint}: made by {made} process{'es' * (made != 1)}, not {processes}: {fix}")
