"""Training through a float16 model: gradients are scaled up on their way back through it, and divided again after.

Without that, gradients of single tokens are below the smallest number of float16 and become 0.
"""

from functools import cached_property
from typing import TYPE_CHECKING, cast

from torch import nn

from marlhf_lite.training.optimizer import loss_scale

if TYPE_CHECKING:  # what this class is mixed into
    from transformers import Trainer
else:
    Trainer = object


class ScaledGradients(Trainer):
    """Makes a trainer of transformers scale gradients by `loss_scale`, and log and clip the true ones.

    It must be the first base class of a trainer: others compute the loss without calling the next one's `compute_loss`.
    """

    @cached_property
    def _scale(self) -> float:
        return loss_scale(cast(nn.Module, self.model))

    def compute_loss(self, *args, **kwargs):
        """The loss, and other outputs if they are asked for. The loss is not scaled, only its gradient is."""
        result = super().compute_loss(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        # Without a gradient (an evaluation) there is nothing to scale.
        if loss.requires_grad and self._scale != 1.0:
            loss.register_hook(lambda gradient: gradient * self._scale)
        return result

    def _clip_grad_norm(self, model):
        """Divide the gradients by the scale again, then clip them and return their norm."""
        if self._scale != 1.0:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self._scale
        return super()._clip_grad_norm(model)
