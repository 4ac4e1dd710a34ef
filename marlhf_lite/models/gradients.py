"""RMSNorm and rotary embeddings with gradients in closed form.

transformers computes them in small operations, each with a tensor of its own, and autograd adds as many; these need
about half of them. Results are the same up to rounding.
"""

import functools
import sys

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel


class _RMSNorm(torch.autograd.Function):
    """y = r x w with r = 1 / sqrt(mean(x²) + ε), over the last dimension. Keeps x and r for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        r = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, r = ctx.saved_tensors
        product = grad * x
        rows = product.flatten(0, -2)
        grad_weight = rows.T @ r.flatten() if ctx.needs_input_grad[1] else None
        # r depends on x, too: ∂r/∂x = -r³ x / D.
        through_r = (rows @ weight).view_as(r) * r.square() / -x.shape[-1]
        return (
            torch.mul(grad, weight, out=product).addcmul_(x, through_r).mul_(r),
            grad_weight,
            None,
        )


class _Rotation(torch.autograd.Function):
    """Turns queries or keys x [B, heads, L, D] by the angles of their positions, and their gradient back.

    cos and sin [B, 1, L, D] are of each angle twice, D / 2 apart.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _turn(grad, *ctx.saved_tensors, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    turned = x * cos
    (first, second), (left, right), half = x.chunk(2, -1), turned.chunk(2, -1), sin.chunk(2, -1)[0]
    left.addcmul_(second, half, value=-sign)
    right.addcmul_(first, half, value=sign)
    return turned


def use_closed_gradients(model: PreTrainedModel) -> None:
    """Give these gradients to all models of this one's family, in this process; see `last_layer.PLAIN_LAYERS`.

    Norms of 16 bits stay transformers' own, which compute in float32.
    """
    modeling, norm = sys.modules[type(model).__module__], type(model.base_model.norm)
    if hasattr(norm.forward, "__wrapped__"):
        return
    plain, is_gemma = norm.forward, model.config.model_type == "gemma"

    @functools.wraps(plain)
    def normalise(self, x: Tensor) -> Tensor:
        if not x.dtype == self.weight.dtype == torch.float32:
            return plain(self, x)
        weight, eps = (
            (1 + self.weight, self.eps) if is_gemma else (self.weight, self.variance_epsilon)
        )
        return _RMSNorm.apply(x, weight, eps)

    @functools.wraps(modeling.apply_rotary_pos_emb)
    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)

    norm.forward, modeling.apply_rotary_pos_emb = normalise, rotate
