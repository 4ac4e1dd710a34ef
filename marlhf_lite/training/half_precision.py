"""Training through a float16 model: the gradients are larger on their way back through it, and right again afterwards.

Gradients of single tokens are below the smallest number of float16, and would become 0.
"""

from functools import cached_property

import torch
from torch import nn

HALF_LOSS_SCALE = 2.0**12  # what gradients are multiplied by where they start, and divided by where they arrive


def loss_scale(model: nn.Module) -> float:
    """`HALF_LOSS_SCALE` where weights are float16, or of 4 bits and computed with in float16; else 1."""
    formats = {p.dtype for p in model.parameters()} | {getattr(m, "compute_dtype", None) for m in model.modules()}
    return HALF_LOSS_SCALE if torch.float16 in formats else 1.0


class ScaledGradients:
    """Makes a trainer of transformers scale gradients by `loss_scale`; it logs and clips as without. The first base."""

    @cached_property
    def _scale(self) -> float:
        return 1.0 if self.is_deepspeed_enabled else loss_scale(self.model)  # DeepSpeed scales by itself

    def compute_loss(self, *args, **kwargs):
        found = super().compute_loss(*args, **kwargs)
        loss = found[0] if isinstance(found, tuple) else found
        if loss.requires_grad and self._scale != 1.0:
            loss.register_hook(lambda gradient: gradient * self._scale)
        return found

    def _clip_grad_norm(self, model):
        if self._scale != 1.0:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self._scale
        return super()._clip_grad_norm(model)
