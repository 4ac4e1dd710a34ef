"""Weights that FSDP2 spreads over processes: whole again while responses are sampled, and to be saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def summon_full_params(module: nn.Module) -> Iterator[None]:
    """Every process holds all weights inside this block, so that each can sample at its own pace.

    Without it, a layer's weights would be gathered at each token, and a process whose responses end early would
    leave the others waiting. Does nothing for modules that are not sharded.
    """
    shards = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not shards:
        yield
        return
    shards[0]._get_fsdp_state()._lazy_init()  # the first forward pass would make its own layer the root
    for part in shards:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for i, part in enumerate(shards):
            part.set_reshard_after_forward(i > 0, recurse=False)  # the root stays whole between forward and backward
            part.reshard()


def whole(x: Tensor) -> Tensor:
    """A tensor that may be spread over processes, as a plain one."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor that may be spread."""
    return x.to_local() if hasattr(x, "to_local") else x


def saved_part(accelerator: Accelerator, actors: nn.Module, name: str) -> dict:
    """Arguments of `save_pretrained` for policy or critic: none, but where weights are spread, all of them."""
    if accelerator.distributed_type != "FSDP":
        return {}
    state, start = accelerator.get_state_dict(actors), f"{name}.model."
    return {"state_dict": {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}}
