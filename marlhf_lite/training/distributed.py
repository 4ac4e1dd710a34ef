"""Several processes: sums over them, and weights that FSDP2 shards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.precision import has_float64

Result = TypeVar("Result")


def sum_over_processes(
    numbers: Mapping[str, Tensor | float], accelerator: Accelerator
) -> dict[str, float]:
    """Sum the named numbers over processes, in float64, with one wait for the device and the other processes."""
    device = accelerator.device if has_float64(accelerator.device) else "cpu"
    in_float64 = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in numbers.values()]
    sums = accelerator.reduce(torch.stack(in_float64), reduction="sum").tolist()
    return dict(zip(numbers, sums, strict=True))


def raise_on_all_ranks(work: Callable[..., Result], *args) -> Result:
    """Return `work(*args)` of this process; an `InputError` in one process is raised in all of them.

    Otherwise the others would go on, and wait for the process that failed.
    """
    results: list[Result] = []  # none if the work of this process fails
    errors: list[InputError] = []
    try:
        results = [work(*args)]
    except InputError as error:
        errors = [error]
    errors_of_all = gather_object(errors)
    if errors_of_all:
        raise errors_of_all[0]
    return results[0]


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards the weights of this module or of a part of it."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def shard_frozen(*frozen: nn.Module | None, beside: nn.Module, accelerator: Accelerator) -> None:
    """Shard frozen models over processes by FSDP2, if accelerate has sharded those that train (`beside`).

    A process then holds its share of each layer, and all of a layer while that layer runs.
    """
    if not is_sharded(beside):
        return
    plugin = accelerator.state.fsdp_plugin
    precision = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    policies = {"mp_policy": precision, "offload_policy": plugin.cpu_offload}
    for model in frozen:
        if model is None:  # a reward that is code has no model
            continue
        # FSDP2 would round the weights to `param_dtype`, the format of the passes, in every pass. Frozen weights never
        # change, so once is enough. None leaves each weight its own format.
        for weight in model.parameters():
            weight.data = weight.data.to(precision.param_dtype or weight.dtype)
        names_of_layers = set(cast(Iterable[str], model._no_split_modules))
        layers = [part for part in model.modules() if type(part).__name__ in names_of_layers]
        for layer in layers:
            fully_shard(layer, **policies, reshard_after_forward=True)
        fully_shard(model, **policies, reshard_after_forward=True)


@contextmanager
def gathered_outside_layers(model: nn.Module, root: nn.Module | None = None) -> Iterator[None]:
    """In this block parts of a model can run without the model's own `forward`: `generate`, or backbone and head.

    FSDP2 gathers the weights of a module when its `forward` is called. For each layer that happens in the block, too.
    The weights outside layers (embeddings, last norm, head) belong to `model` itself, whose `forward` is not called, so
    they are gathered here and stay whole until the block ends. A model that is not sharded needs none of this.

    All processes must make the same number of passes: see `synced_gpus` in `rollout.sample`. `root` is the module that
    runs in training, if it contains `model`.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    # FSDP2 takes the first module that runs for the root of all others. In the block that would be a single layer, and
    # FSDP2 would refuse the true root in training: so the true one is initialised first.
    (root if isinstance(root, FSDPModule) else model)._get_fsdp_state()._lazy_init()
    model.set_reshard_after_forward(False, recurse=False)
    model.unshard()
    try:
        yield
    finally:
        model.set_reshard_after_forward(True, recurse=False)
        model.reshard()


def full_tensor(x: Tensor) -> Tensor:
    """Return all elements of a tensor that may be sharded, as a plain tensor."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local_tensor(x: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be sharded."""
    return x.to_local() if hasattr(x, "to_local") else x


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights by name, on the CPU. Names of tied weights share one tensor.

    All processes must call this if FSDP2 shards the weights; only the main process then gets them, the others get {}.
    """
    keeps_them = not is_sharded(model) or PartialState().is_main_process
    weights: dict[str, Tensor] = {}
    # A tensor with several names is gathered and copied once.
    whole_by_identity: dict[int, Tensor] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in whole_by_identity:
            whole = full_tensor(weight).detach()  # all processes take part in this
            whole_by_identity[id(weight)] = whole.cpu() if keeps_them else torch.empty(0)
        if keeps_them:
            weights[name] = whole_by_identity[id(weight)]
    return weights
