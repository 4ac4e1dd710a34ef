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
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from marlhf_lite.models.actor_critic import PPOModels
from marlhf_lite.models.shards import read_metadata, read_shards, write_shards
from marlhf_lite.training.distributed import is_sharded, whole_weights
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.random_states import random_states, set_random_states
from marlhf_lite.utils.seals import DELETE_IT, atomic_folder, broken, seal

if TYPE_CHECKING:
    from marlhf_lite.utils.run_folder import RunFolder

STATE = "state.pt"  # in a folder of shards: everything but the tensors of weights and optimizer
ADAM = ("step", "exp_avg", "exp_avg_sq")  # the state that torch's AdamW keeps for a parameter


class Checkpoints:
    """Saves and loads checkpoints in the `checkpoints` folder of a run; the last `keep` of them stay."""

    def __init__(self, run: "RunFolder", keep: int, accelerator: Accelerator):
        self.run, self.folder, self.keep, self.accelerator = (
            run,
            run.path / "checkpoints",
            keep,
            accelerator,
        )

    def path(self, update: int) -> Path:
        """The checkpoint after this many updates: a folder of shards if there is one, else a file."""
        folder = self.folder / f"update-{update:06d}"
        return folder if folder.is_dir() else folder.with_suffix(".pt")

    def updates(self) -> list[int]:
        """The updates that have a checkpoint, in order; damaged ones too."""
        names = {path.stem.removeprefix("update-") for path in self.folder.glob("update-*")}
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, actor_critic: nn.Module, optimizer, counters: dict) -> None:
        """Write the checkpoint after `counters["updates_done"]` updates, then delete the oldest ones.

        An error, such as that of a full disk, leaves the earlier checkpoints and no part of this one.
        """
        scaler, sharded = self.accelerator.scaler, is_sharded(actor_critic)
        state = {
            "scaler": scaler.state_dict() if scaler else {},
            "random": gather_object([random_states()]),
            "counters": counters,
            "logs": self.run.position(),
        }
        place = self.folder / f"update-{counters['updates_done']:06d}"
        final = place if sharded else place.with_suffix(".pt")
        temporary, tensors = self.folder / f".{final.name}", local_tensors(actor_critic, optimizer)
        if self.accelerator.is_main_process:
            self.folder.mkdir(exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            if sharded:
                write_shards(tensors, temporary)
            if self.accelerator.is_main_process:
                if sharded:
                    torch.save(state, temporary / STATE)
                    # for readers of the policy
                    actor_critic.policy.model.config.save_pretrained(temporary)
                else:
                    torch.save(
                        state
                        | {"tensors": {n: x.to("cpu", copy=True) for n, x in tensors.items()}},
                        temporary,
                    )
                seal(temporary)
                if final.is_dir():  # it is not replaced in one step, as a file is
                    _remove(final)
                os.replace(temporary, final)
                _remove(*map(self.path, self.updates()[: -self.keep]))
        except BaseException:
            if self.accelerator.is_main_process:
                _remove(temporary)
            raise
        self.accelerator.wait_for_everyone()

    def load(self, actor_critic: nn.Module, optimizer) -> dict:
        """Load the last checkpoint into models, optimizer, random generators and logs; return its counters.

        Raises `InputError` if it is damaged or does not fit (another model, number of processes, or shorter logs); then
        nothing was changed on the disk.
        """
        if not (existing := self.updates()):
            raise InputError(f"{self.folder}: there is no checkpoint: train without resuming")
        path, processes = self.path(existing[-1]), self.accelerator.num_processes
        try:
            state = self._read(path, actor_critic)
            if path.is_dir():
                tensors = local_tensors(actor_critic, optimizer, wanted=state["tensors"])
                read_shards(tensors, path, no_dist=processes == 1)
        except InputError as error:
            raise InputError(f"{path}: {error}: {DELETE_IT}") from None
        made = len(state["random"])
        if not path.is_dir():  # any number of processes reads shards
            check_processes(path, made, processes)
            for name, tensor in local_tensors(
                actor_critic, optimizer, wanted=state["tensors"]
            ).items():
                tensor.copy_(state["tensors"][name])
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.accelerator.is_main_process:
            # with what killed saves left
            rewind_run(self.run, self.folder.glob(".update-*"), state["logs"])
        if made == processes:
            set_random_states(state["random"][self.accelerator.process_index])
        else:
            self.accelerator.print(
                f"{path}: made by {made} processes, not {processes}: responses will be others"
            )
        self.accelerator.wait_for_everyone()
        return state["counters"]

    def _read(self, path: Path, actor_critic: nn.Module) -> dict:
        """Read a checkpoint; of shards only their shapes. Raises `InputError` with the reason if it is unusable."""
        if name := broken(path):
            raise InputError(f"it is damaged ({name})")
        is_folder = path.is_dir()
        # With weights alone the file runs no code of its writer.
        state = torch.load(
            path / STATE if is_folder else path, weights_only=True, map_location="cpu"
        )
        if is_folder:
            state["tensors"] = {
                name: x.size for name, x in read_metadata(path).state_dict_metadata.items()
            }
        shapes = {name: tuple(getattr(x, "shape", x)) for name, x in state["tensors"].items()}
        own = {f"weights.{name}": tuple(p.shape) for name, p in _trainable(actor_critic).items()}
        if own != {name: shape for name, shape in shapes.items() if name.startswith("weights.")}:
            raise InputError("its weights are those of another model or other adapters")
        self.run.check_logs(state["logs"])
        return state


def rewind_run(run: "RunFolder", newer: Iterable[Path], logs: Mapping[str, int]) -> None:
    """Delete the checkpoints that are newer than the one a run continues from, and cut its logs back to that one's.

    Raises `InputError` if a log is shorter than `logs` says; then nothing was changed.
    """
    run.check_logs(logs)
    _remove(*newer)
    run.truncate_logs(logs)


def _remove(*paths: Path) -> None:
    """Delete files and folders that exist; a folder first loses its name, so half of one never has it."""
    for path in paths:
        if path.is_dir():
            hidden = path.with_name(f".{path.name.lstrip('.')}.old")
            os.replace(path, hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink(missing_ok=True)


def _trainable(actor_critic: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name; a tied one appears once."""
    named = actor_critic.named_parameters()
    return {name.removeprefix("module."): p for name, p in named if p.requires_grad}


def local_tensors(
    actor_critic: nn.Module, optimizer, wanted: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """This process's part of the weights (`weights.NAME`) and of Adam's state (`exp_avg.NAME` and others), by name.

    With `wanted`, the names in a checkpoint, Adam first gets empty tensors for the state named there, and no other.
    """
    tensors, inner = {}, optimizer.optimizer
    for name, parameter in _trainable(actor_critic).items():
        tensors[f"weights.{name}"] = parameter.detach()
        if wanted is not None:
            inner.state.pop(parameter, None)
            if kinds := [kind for kind in ADAM if f"{kind}.{name}" in wanted]:
                inner.state[parameter] = {kind: _empty(kind, parameter) for kind in kinds}
        tensors |= {
            f"{kind}.{name}": tensor for kind, tensor in inner.state.get(parameter, {}).items()
        }
    return tensors


def _empty(kind: str, parameter: Tensor) -> Tensor:
    """A tensor as Adam makes it for this parameter: a count of steps, or a moment of each weight."""
    if kind == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def check_processes(checkpoint: Path, made: int, processes: int) -> None:
    """Raise `InputError` if another number of processes made a checkpoint: each has its own random states."""
    if made != processes:
        fix = f"launch it with --num_processes {made}"
        raise InputError(
            f"{checkpoint}: made by {made} process{'es' * (made != 1)}, not {processes}: {fix}"
        )


def save_models(
    folder: Path, models: PPOModels, actor_critic: nn.Module, tokenizer, accelerator: Accelerator
) -> None:
    """Save policy and critic as adapter folders (or full models) with the tokenizer, as the other commands take them.

    Each replaces an older one when it is complete.
    """
    for role in ("policy", "critic"):
        model = getattr(models, role).model
        weights = {"state_dict": whole_weights(model)} if is_sharded(actor_critic) else {}
        if accelerator.is_main_process:
            with atomic_folder(folder / role) as temporary:
                model.save_pretrained(temporary, **weights)
                if role == "policy":
                    tokenizer.save_pretrained(temporary)
