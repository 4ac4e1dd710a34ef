"""Log-probabilities of given tokens from hidden states, in memory that does not grow with tokens x vocabulary.

The logits of a response are [T, V]: with 256k tokens in the vocabulary they, and what their softmax and its gradient
keep, outweigh the rest of a pass. Above `MAX_LOGITS` of them, tiles are made, folded into log-sum-exp, dropped, and
made again in the backward pass.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE, ChunkedLogProbFunction

MAX_LOGITS = 2**23  # elements: 32 MiB in float32. What fits goes through at once, without a second projection
_TILE = {"cpu": 2**20}  # there a tile passes through several tensors, best in the cache;
_DEVICE_TILE = 2**25  # on a GPU one kernel folds it, and the projection wants it large
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")  # as configs name them


@dataclass(frozen=True)
class HeadForm:
    """What stands between a linear head and the logits: `z = scale * (W h + b)`, then `softcap * tanh(z / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, projected: Tensor) -> Tensor:
        z = projected * self.scale if self.scale != 1 else projected
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def is_bare(head: nn.Module | None) -> bool:
    """Whether reading the head's weight is the same as calling it: no adapter, quantised or sharded weight, or hook."""
    return type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head))


@torch.no_grad()
def head_form(model: PreTrainedModel) -> HeadForm | None:
    """The form of a causal LM's head; None where it is none that is known, and only the model can make its logits.

    Names in configs do not tell (Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it), so each reading
    of them is tried against the model's own logits of random hidden states, small and large enough to meet a cap.
    """
    head = model.get_output_embeddings()
    if model.base_model is model or not is_bare(head) or head.weight.is_meta or not head.weight.numel():
        return None
    rows = torch.randn(4, head.in_features, generator=torch.Generator().manual_seed(0)).to(head.weight)
    spread = head(rows).float().std().clamp(min=1e-9)
    hidden = rows * (torch.tensor([[0.1], [1.0], [10.0], [100.0]]).to(spread) / spread).to(rows)
    projected = head(hidden).float()
    try:
        expected = _logits(model, hidden).float()
    except Exception:  # code of any model on a stand-in backbone: whatever it objects to, its plain forward is right
        return None
    return next((form for form in _readings(model.config) if _agree(form(projected), expected, hidden.dtype)), None)


class _Answer(BaseModelOutputWithPast):
    """A backbone's output with nothing but hidden states; router logits, cross attentions and the like are None."""

    def __getattr__(self, name: str) -> None:
        return None


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """[N, V] logits that the model's own forward makes of `hidden` [N, H], with nothing computed below its head."""
    backbone, outer = copy.copy(model.base_model), copy.copy(model)
    backbone.forward = lambda *_, **__: _Answer(last_hidden_state=hidden[None])
    outer._modules = model._modules | {model.base_model_prefix: backbone}
    return outer(input_ids=torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)).logits[0]


def _readings(config) -> list[HeadForm]:
    """What the config may mean, the plainest first."""
    text = config.get_text_config()
    factors = [f for name in _FACTORS if isinstance(f := getattr(text, name, None), int | float) and f]
    cap = getattr(text, "final_logit_softcapping", None)
    scales = [1.0, *factors, *(1 / f for f in factors)]
    return [HeadForm(scale, c) for c in ([None, cap] if cap else [None]) for scale in scales]


def _agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Within rounding, row by row: their sizes differ a thousandfold."""
    if ours.shape != theirs.shape:
        return False
    allowed = max(1e-4, 4 * torch.finfo(dtype).eps) * theirs.abs().amax(-1)
    return bool(((ours - theirs).abs().amax(-1) <= allowed).all())


def from_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`(log-probability of each target [..], entropy [..])` in float32 from logits [.., V]; entropy has no gradient."""
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropy


def from_hidden(
    hidden: Tensor, head: nn.Linear, targets: Tensor, temperature: float = 1.0, form: HeadForm | None = None
) -> tuple[Tensor, Tensor]:
    """The same from last hidden states [.., H] and a head; gradients reach `hidden` and the head's parameters.

    Large ones take TRL's function: online log-sum-exp over tiles of the vocabulary, accumulated in float32 whatever
    the head's dtype; a Triton kernel on GPUs, torch elsewhere.
    """
    form = form or HeadForm()
    if targets.numel() * head.out_features <= MAX_LOGITS:
        return from_logits(form(head(hidden)), targets, temperature)
    rows = min(targets.numel(), TOKEN_CHUNK_SIZE)
    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        head.weight,
        head.bias,
        targets.reshape(-1),
        temperature,
        _TILE.get(hidden.device.type, _DEVICE_TILE) // rows,
        form.softcap,
        form.scale,
        ("entropy",),
    )
    return logprobs.view(targets.shape), entropy.detach().view(targets.shape)
