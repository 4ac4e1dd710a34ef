"""Float64 on devices that may lack it."""

from functools import cache

import torch
from torch import Tensor


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether this device has float64; mps (Apple) does not."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True


def exact(x: Tensor) -> Tensor:
    """Return `x` in float64: on its own device, or on the CPU if the device has no float64."""
    return x.double() if has_float64(x.device) else x.cpu().double()
