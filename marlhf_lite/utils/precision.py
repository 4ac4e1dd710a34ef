"""Float64, which not every device has."""

from functools import cache

import torch
from torch import Tensor


@cache
def has_float64(device: torch.device) -> bool:
    """Whether tensors of float64 can be made on this device; on mps (Apple) they cannot."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True


def exact(x: Tensor) -> Tensor:
    """`x` in float64: on its own device, or on the CPU where that has no float64."""
    return x.double() if has_float64(x.device) else x.cpu().double()
