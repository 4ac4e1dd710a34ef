"""Input checks shared by the macro-action functions. Each raises `InputError`, which names the argument."""

from numbers import Integral

import torch
from torch import Tensor

from marlhf_lite.utils.errors import InputError


def first_true(flags: Tensor) -> tuple[int, ...]:
    """Index of the first True in reading order; ``flags`` must hold one."""
    return tuple(flags.nonzero()[0].tolist())


def check_shape(name: str, x: Tensor, like: Tensor) -> None:
    """Check that ``x`` has the shape of ``like``."""
    if x.shape != like.shape:
        raise InputError(f"{name}: expected shape {tuple(like.shape)}, got {tuple(x.shape)}")


def check_matrix(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Check that ``x`` is a two-dimensional tensor of this dtype."""
    if x.dim() != 2 or x.dtype != dtype:
        shape = f"{x.dtype} {tuple(x.shape)}"
        raise InputError(
            f"{name}: expected a tensor of dtype {dtype} and 2 dimensions, got {shape}"
        )


def clean(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """Convert ``x`` to float32 with 0 wherever ``mask`` is False.

    The fill comes before any arithmetic, so NaN on padding reaches neither results nor gradients. NaN where ``mask`` is
    True stays in the result: a check of values would make a GPU wait.
    """
    check_shape(name, x, mask)
    return x.float().masked_fill(~mask, 0.0)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that ``value`` is one of ``choices``."""
    if value not in choices:
        raise InputError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_int(name: str, value: float, least: int | None = None) -> None:
    """Check that ``value`` is an integer (a bool is refused), and at least ``least``."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or (least is not None and value < least)
    ):
        bound = "" if least is None else f" >= {least}"
        raise InputError(f"{name}: expected an integer{bound}, got {value!r}")
