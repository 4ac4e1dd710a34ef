"""LoRA layers that add the adapter to the weight before the product: one large matrix product instead of three.

PEFT computes x Wᵀ + s (x Aᵀ) Bᵀ, which is three products and two passes over the output. For N tokens, W + s B A costs
only r / N of x Wᵀ, so it is made in every pass, dropped after it, and made again in the backward pass. Sums are
rounded in another order; everything else (names of weights, saved files, `merge_and_unload`) is PEFT's.
"""

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _MergedLinear(torch.autograd.Function):
    """y = x (W + s B A)ᵀ + b with a frozen W and b. Keeps x for the backward pass, and no copy of any weight."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, A, B)
        ctx.scale = scale
        return nn.functional.linear(x, torch.addmm(weight, B, A, alpha=scale), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, A, B = ctx.saved_tensors
        flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
        grad_x = grad_A = grad_B = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ torch.addmm(weight, B, A, alpha=ctx.scale)
        if ctx.needs_input_grad[3]:
            grad_A = ((flat_grad @ B).T @ flat_x).mul_(ctx.scale)
        if ctx.needs_input_grad[4]:
            grad_B = (flat_grad.T @ (flat_x @ A.T)).mul_(ctx.scale)
        return grad_x, None, None, grad_A, grad_B, None


class MergedLoraLinear(lora.Linear):
    """A LoRA layer as one product where that is exact up to rounding; in all other cases PEFT's own forward.

    The weight must be an unquantised float32 one: in bfloat16 the sum W + s B A would round small adapters away.
    """

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        if args or kwargs or not self._can_merge(x):
            return super().forward(x, *args, **kwargs)
        base, name = self.base_layer, self.active_adapters[0]
        A, B = self.lora_A[name].weight, self.lora_B[name].weight
        return _MergedLinear.apply(x, base.weight, base.bias, A, B, self.scaling[name])

    def _can_merge(self, x: Tensor) -> bool:
        names = self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return False
        A, dropout, weight = self.lora_A[names[0]], self.lora_dropout[names[0]], self.base_layer.weight
        plain = type(self.base_layer) is nn.Linear and type(A) is nn.Linear
        plain = plain and names[0] not in self.lora_variant
        exact = x.dtype == weight.dtype == A.weight.dtype == torch.float32
        no_noise = isinstance(dropout, nn.Identity) or not self.training
        return (
            plain
            and exact
            and no_noise
            and not self.lora_bias[names[0]]
            and not torch.is_autocast_enabled(x.device.type)
        )


def use_merged_forward(model: nn.Module) -> nn.Module:
    """Let all LoRA layers on linear layers of `model` use `MergedLoraLinear`; returns `model`."""
    for module in model.modules():
        if type(module) is lora.Linear:
            module.__class__ = MergedLoraLinear
    return model
