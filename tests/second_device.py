"""A stand-in for a GPU: `marlhf` commands on a device that refuses tensors of the CPU.

    python tests/second_device.py "sft --size 40 --output_dir runs/a" "ppo --sft runs/a --output_dir runs/b"

The device is called `second:0`. Behind each of its tensors stands one on the CPU, so that a command computes the same
numbers as on the CPU, and draws the same samples. But an operation that takes tensors of both devices fails as it does
on CUDA, and so does `.numpy()`; and as mps (Apple) it has no float64. This shows where tensors are; of kernels,
precision, speed and memory it shows nothing.

A command that begins with `planted` samples responses whose mask is left on the CPU, and must fail for that reason.
Exit code: 0 where every command did what it should. Torch stays changed, so the process is for nothing else.
"""

import os
import shlex
import sys
import time
from collections import Counter
from unittest import mock

# The device that accelerate and transformers take if there is no GPU.
os.environ["ACCELERATE_TORCH_DEVICE"] = "second:0"

import safetensors.torch
import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)


class Module(_DummyBackendModule):
    """What `torch.cuda` is for CUDA: autocast asks it."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("second", Module())

SECOND = torch.device("second", 0)
aten = torch.ops.aten
# Only these operations may take numbers from one device to another.
COPIES = (aten._to_copy.default, aten.copy_.default)
# As on CUDA, the second argument of these, the indices, may be on the CPU.
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)
counts = Counter()


class OnSecond(torch.Tensor):
    """A tensor of the second device; `numbers` is the CPU tensor behind it."""

    @staticmethod
    def __new__(cls, numbers):
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=numbers.dtype, device=SECOND, **layout
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, *args, **(kwargs or {}))

    @property
    def data(self):
        return OnSecond(self.numbers)

    @data.setter
    def data(self, other):
        self.numbers = other.numbers

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = memo[id(self)] = OnSecond(self.numbers.clone()).requires_grad_(
                self.requires_grad
            )
            # By this torch knows that a tensor of another class is a parameter.
            copied._is_param = getattr(self, "_is_param", False)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        """`torch.save` writes the CPU tensor, so what is read again is on the CPU."""
        return self.numbers.__reduce_ex__(protocol)

    def tolist(self):
        return self.numbers.tolist()

    def data_ptr(self):
        return self.numbers.data_ptr()

    def untyped_storage(self):
        return self.numbers.untyped_storage()


def compute(operation, *args, **kwargs):
    """Run an operation on the CPU tensors behind its arguments; the result is where CUDA would leave it."""
    # 1. The arguments, with the CPU tensor in place of each tensor of the second device.
    leaves, tree = tree_flatten((args, kwargs))
    if operation not in COPIES:
        refuse_strangers(operation, args, kwargs)
    args, kwargs = tree_unflatten(
        [x.numbers if isinstance(x, OnSecond) else x for x in leaves], tree
    )
    # 2. Where the result belongs: to the device that is asked for, or, of a copy, to that of the target.
    belongs_to_second = torch.device(kwargs.get("device") or SECOND) == SECOND
    if operation is aten.copy_.default:
        belongs_to_second = isinstance(leaves[0], OnSecond)
    if kwargs.get("device"):
        kwargs["device"] = "cpu"  # where it is computed
    # 3. The result.
    result = operation(*args, **kwargs)
    counts["operations"] += 1
    if not belongs_to_second:
        return result
    if any(
        x.dtype == torch.float64 for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)
    ):
        raise TypeError(f"{operation}: second:0 has no float64")
    # An operation in place returns the tensor that it has changed, and not another one around the same numbers.
    known = {id(x.numbers): x for x in leaves if isinstance(x, OnSecond)}
    return tree_map_only(
        torch.Tensor, lambda x: known[id(x)] if id(x) in known else OnSecond(x), result
    )


def refuse_strangers(operation, args, kwargs):
    """Raise an error if an argument is a tensor of the CPU; a single number, without a dimension, may be there."""
    if operation.overloadpacket in INDEXING and isinstance(args[0], OnSecond):
        args = (args[0], *args[2:])  # without the indices
    for x in tree_flatten((args, kwargs))[0]:
        if isinstance(x, torch.Tensor) and not isinstance(x, OnSecond) and x.dim():
            raise RuntimeError(
                f"{operation}: not on one device: second:0, and cpu for the shape {tuple(x.shape)}"
            )


# Tensors that are made on the device, and copies inside `torch.tensor`, do not pass through the class.
kernels = torch.library.Library("aten", "IMPL")
for made in (aten.empty.memory_format, aten.empty_strided.default, aten.copy_.default):
    kernels.impl(
        made, lambda *args, made=made, **kwargs: compute(made, *args, **kwargs), "PrivateUse1"
    )


def load_file(filename, device="cpu", load=safetensors.torch.load_file, **kwargs):
    """safetensors' own function, which knows only the devices of its list: read on the CPU, then move."""
    return {name: x.to(device) for name, x in load(filename, **kwargs).items()}


safetensors.torch.load_file = load_file  # before others import it


def run(words):
    """Run one command, and return whether it did what it should, on the device."""
    from marlhf_lite.cli import main
    from marlhf_lite.training import rollout

    if words[0] != "planted":
        return main(words) == 0 and counts["operations"] > 0
    # A planted fault: the mask of the responses is left on the CPU.
    mask_of = rollout.response_mask
    with mock.patch.object(
        rollout, "response_mask", lambda *given: tuple(x.cpu() for x in mask_of(*given))
    ):
        try:
            main(words[1:])
        except RuntimeError as error:
            return "not on one device" in str(error)
    return False


if __name__ == "__main__":
    for line in sys.argv[1:]:
        counts.clear()
        begin = time.process_time()
        done = run(shlex.split(line))
        seconds = time.process_time() - begin
        print(
            f"{'ok' if done else 'FAILED'}: {line}: {counts['operations']} operations, {seconds:.1f} s of one core"
        )
        if not done:
            sys.exit(1)
