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
        """Return y [.., out] for x [.., in], with `weight` [out, in], A [rank, in] and B [out, rank]."""
        ctx.save_for_backward(x, weight, A, B)
        ctx.scale = scale
        return nn.functional.linear(x, torch.addmm(weight, B, A, alpha=scale), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Return the gradients of `forward`'s arguments; `grad` is that of y, and None means that one is not needed.

        With G the gradient of y and s the scale they are x: G (W + s B A); A: s (G B)ᵀ x; B: s Gᵀ (x Aᵀ).
        """
        x, weight, A, B = ctx.saved_tensors
        flat_grad = grad.flatten(0, -2)  # [tokens, out]
        flat_x = x.flatten(0, -2)  # [tokens, in]
        needs_x, _, _, needs_A, needs_B, _ = ctx.needs_input_grad
        grad_x = grad_A = grad_B = None
        if needs_x:
            merged = torch.addmm(weight, B, A, alpha=ctx.scale)
            grad_x = grad @ merged
        if needs_A:
            grad_A = ((flat_grad @ B).T @ flat_x).mul_(ctx.scale)
        if needs_B:
            grad_B = (flat_grad.T @ (flat_x @ A.T)).mul_(ctx.scale)
        # In the order of x, weight, bias, A, B, scale. The weight, the bias and the scale do not train.
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
        """Return y [.., out] for x [.., in], with `weight` [out, in], A [rank, in] and B [out, rank]."""
        low_A = A.to(x.dtype)
        low_B = B.to(x.dtype)
        y = nn.functional.linear(x, weight, bias)
        inner = x.flatten(0, -2) @ low_A.T  # x Aᵀ [tokens, rank]
        y.view(-1, y.shape[-1]).addmm_(inner, low_B.T, alpha=scale)  # into y, without a copy of it
        ctx.save_for_backward(x, weight, low_A, low_B, inner)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Return the gradients of `forward`'s arguments; `grad` is that of y, and None means that one is not needed.

        With G the gradient of y and s the scale they are x: G W + s (G B) A; A: s (G B)ᵀ x; B: s Gᵀ (x Aᵀ).
        """
        x, weight, low_A, low_B, inner = ctx.saved_tensors
        flat_grad = grad.flatten(0, -2)  # [tokens, out]
        flat_x = x.flatten(0, -2)  # [tokens, in]
        grad_inner = flat_grad @ low_B  # G B [tokens, rank]
        needs_x, _, _, needs_A, needs_B, _ = ctx.needs_input_grad
        grad_x = grad_A = grad_B = None
        if needs_x:
            grad_x = grad @ weight
            grad_x.view(-1, grad_x.shape[-1]).addmm_(grad_inner, low_A, alpha=ctx.scale)
        if needs_A:
            grad_A = _sum_over_tokens(grad_inner, flat_x).mul_(ctx.scale)
        if needs_B:
            grad_B = _sum_over_tokens(flat_grad, inner).mul_(ctx.scale)
        # In the order of x, weight, bias, A, B, scale. The weight, the bias and the scale do not train.
        return grad_x, None, None, grad_A, grad_B, None


def _sum_over_tokens(left: Tensor, right: Tensor) -> Tensor:
    """[m, n] in float32 from [N, m] and [N, n]; a sum over many tokens may be more than float16 holds."""
    if left.dtype == torch.float16:
        left = left.float()
        right = right.float()
    return (left.T @ right).float()


class MergedLoraLinear(lora.Linear):
    """A LoRA layer in fewer passes if that is exact up to rounding; in all other cases PEFT's own forward.

    The weight must not be quantised. If it is in float32, the adapter is merged into it for the pass. In 16 bits the
    sum W + s B A would round small adapters away, so there the adapter's product is added to the layer's.
    """

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        has_other_arguments = bool(args or kwargs)  # such as names of adapters for each row
        way = WAYS.get(x.dtype)
        if way is None or has_other_arguments or not self._computes_plain_lora(x):
            return super().forward(x, *args, **kwargs)
        base = self.base_layer
        name = self.active_adapters[0]
        A = self.lora_A[name].weight
        B = self.lora_B[name].weight
        # A function of autograd takes no keywords: x, weight, bias, A, B, scale.
        return way.apply(x, base.weight, base.bias, A, B, self.scaling[name])

    def _computes_plain_lora(self, x: Tensor) -> bool:
        """Return whether PEFT would compute x Wᵀ + b + s (x Aᵀ) Bᵀ for `x`, with one adapter in float32 and no more.

        Only then may this module compute it in its own, faster way.
        """
        names = self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return False
        name = names[0]
        A = self.lora_A[name]
        is_linear = type(self.base_layer) is nn.Linear and type(A) is nn.Linear
        is_variant = name in self.lora_variant  # such as DoRA, which also scales the weight
        # `x` may have the base's 16 bits: then it is cast for the adapter, which is part of the formula.
        has_known_formats = (
            x.dtype == self.base_layer.weight.dtype and A.weight.dtype == torch.float32
        )
        has_dropout = self.training and not isinstance(self.lora_dropout[name], nn.Identity)
        has_bias = self.lora_bias[name]  # a bias of B
        casts_by_itself = torch.is_autocast_enabled(x.device.type)
        is_plain = is_linear and not is_variant and has_known_formats
        return is_plain and not (has_dropout or has_bias or casts_by_itself)


# The format of x and of the base's weights -> the function that computes a layer.
WAYS = {
    torch.float32: _MergedLinear,
    torch.bfloat16: _AddedLinear,
    torch.float16: _AddedLinear,
}


def use_merged_forward(model: nn.Module) -> nn.Module:
    """Let all LoRA layers on linear layers of `model` use `MergedLoraLinear`; returns `model`."""
    for module in model.modules():
        if type(module) is lora.Linear:
            module.__class__ = MergedLoraLinear
    return model
