"""LoRA layers in fewer passes than PEFT's: in float32 one large matrix product instead of three.

PEFT computes x Wᵀ + s (x Aᵀ) Bᵀ, which is three products and two passes over the output. In float32 the adapter is
added to the weight before the product: for N tokens, W + s B A costs only r / N of x Wᵀ, so it is made in every pass,
dropped after it, and made again in the backward pass. In 16 bits the three products stay, each in that format. Sums are
rounded in another order; everything else (names of weights, saved files, `merge_and_unload`) is PEFT's.
"""

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _MergedLinear(torch.autograd.Function):
    """y = x (W + s B A)ᵀ + b with a frozen W and b. Keeps x for the backward pass, and no copy of any weight."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, scale: float
    ) -> Tensor:
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


class _AddedLinear(torch.autograd.Function):
    """y = x Wᵀ + b + s (x Aᵀ) Bᵀ with frozen W and b of 16 bits, and A and B that stay in float32.

    PEFT computes the adapter in float32, which is four passes over float32 tensors as large as y. Here A and B are
    rounded to x's format, and the product's own epilogue adds it to y: sums inside a product are in float32.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, scale: float
    ) -> Tensor:
        low_A, low_B = A.to(x.dtype), B.to(x.dtype)
        y = nn.functional.linear(x, weight, bias)
        inner = x.flatten(0, -2) @ low_A.T
        y.view(-1, y.shape[-1]).addmm_(inner, low_B.T, alpha=scale)
        ctx.save_for_backward(x, weight, low_A, low_B, inner)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, low_A, low_B, inner = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        grad_inner, grad_x, grad_A, grad_B = flat @ low_B, None, None, None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            grad_x.view(-1, grad_x.shape[-1]).addmm_(grad_inner, low_A, alpha=ctx.scale)
        if ctx.needs_input_grad[3]:
            grad_A = _sum_over_tokens(grad_inner, x.flatten(0, -2)).mul_(ctx.scale)
        if ctx.needs_input_grad[4]:
            grad_B = _sum_over_tokens(flat, inner).mul_(ctx.scale)
        return grad_x, None, None, grad_A, grad_B, None


def _sum_over_tokens(left: Tensor, right: Tensor) -> Tensor:
    """[m, n] in float32 from [N, m] and [N, n]; a sum over many tokens may be more than float16 holds."""
    if left.dtype == torch.float16:
        left, right = left.float(), right.float()
    return (left.T @ right).float()


class MergedLoraLinear(lora.Linear):
    """A LoRA layer in fewer passes where that is exact up to rounding; in all other cases PEFT's own forward.

    The weight must be unquantised. A float32 one is merged. In 16 bits the sum W + s B A would round small adapters
    away, so there the adapter's product is added to the layer's.
    """

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        if args or kwargs or not (way := self._way(x)):
            return super().forward(x, *args, **kwargs)
        base, name = self.base_layer, self.active_adapters[0]
        A, B = self.lora_A[name].weight, self.lora_B[name].weight
        return way.apply(x, base.weight, base.bias, A, B, self.scaling[name])

    def _way(self, x: Tensor) -> type[torch.autograd.Function] | None:
        names = self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return None
        A, dropout, weight = (
            self.lora_A[names[0]],
            self.lora_dropout[names[0]],
            self.base_layer.weight,
        )
        plain = type(self.base_layer) is nn.Linear and type(A) is nn.Linear
        plain = plain and names[0] not in self.lora_variant
        exact = x.dtype == weight.dtype and A.weight.dtype == torch.float32
        no_noise = isinstance(dropout, nn.Identity) or not self.training
        own = not self.lora_bias[names[0]] and not torch.is_autocast_enabled(x.device.type)
        return WAYS.get(x.dtype) if plain and exact and no_noise and own else None


WAYS = {torch.float32: _MergedLinear, torch.bfloat16: _AddedLinear, torch.float16: _AddedLinear}


def use_merged_forward(model: nn.Module) -> nn.Module:
    """Let all LoRA layers on linear layers of `model` use `MergedLoraLinear`; returns `model`."""
    for module in model.modules():
        if type(module) is lora.Linear:
            module.__class__ = MergedLoraLinear
    return model
