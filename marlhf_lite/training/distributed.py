"""Several processes: sums over them, and the weights that FSDP2 spreads over them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from marlhf_lite.utils.errors import ServerError
from marlhf_lite.utils.precision import has_float64

Result = TypeVar("Result")


def sum_over_processes(numbers: Mapping[str, Tensor | float], accelerator: Accelerator) -> dict[str, float]:
    """The named numbers, summed over processes, in float64: one wait for the device and for the other processes."""
    device = accelerator.device if has_float64(accelerator.device) else "cpu"
    stacked = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in numbers.values()])
    return dict(zip(numbers, accelerator.reduce(stacked, reduction="sum").tolist(), strict=True))


def together(work: Callable[..., Result], *args) -> Result:
    """`work(*args)` of this process. Raises `ServerError` in all processes where it does in one: none waits."""
    result, told = None, []
    try:
        result = work(*args)
    except ServerError as error:
        told = [str(error)]
    if found := gather_object(told):
        raise ServerError(found[0])
    return result


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 spreads the weights of this module or of a part of it."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


@contextmanager
def summon_full_params(module: nn.Module) -> Iterator[None]:
    """Every process holds all weights inside this block, so that each can sample at its own pace.

    Otherwise the weights of a layer would be gathered at each token, and a process whose responses end early would
    leave the others waiting. It does nothing for modules that are not sharded.
    """
    shards = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not shards:
        yield
        return
    # Before any other pass: FSDP2 takes the first module that runs for its root.
    shards[0]._get_fsdp_state()._lazy_init()
    for part in shards:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for i, part in enumerate(shards):
            # The root keeps its weights between forward and backward pass, as FSDP2 does by default.
            part.set_reshard_after_forward(i > 0, recurse=False)
            part.reshard()


def full_tensor(x: Tensor) -> Tensor:
    """A tensor that may be spread over processes, as a plain one with all its elements."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local_tensor(x: Tensor) -> Tensor:
    """This process's part of a tensor that may be spread."""
    return x.to_local() if hasattr(x, "to_local") else x


def full_state_dict(accelerator: Accelerator, actor_critic: nn.Module, role: str) -> dict:
    """Arguments of `save_pretrained` for policy or critic: all weights where they are sharded, else none."""
    if accelerator.distributed_type != "FSDP":
        return {}
    state, start = accelerator.get_state_dict(actor_critic), f"{role}.model."
    return {"state_dict": {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}}
