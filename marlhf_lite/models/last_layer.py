"""The last decoder layer only at the positions whose output is read: all positions give keys and values, few the rest.

Log-probabilities and values of a response need no output at its prompt. Queries, the product after attention and the
MLP of the last layer are then made at the response alone; sums are rounded in another order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlhf_lite.config.options import ModelConfig

# Families of transformers whose layer is norm, attention with rotated q and k, norm, MLP. Others norm or scale in
# between, or fuse q, k and v.
PLAIN_LAYERS = frozenset("gemma llama mistral qwen2".split())


def last_states(backbone: nn.Module, kept: int, **inputs) -> Tensor:
    """The backbone's states [B, kept, H] at the last `kept` positions, which is all that is computed if it can be."""
    if not 0 < kept < inputs["input_ids"].shape[1] or not has_plain_last_layer(backbone):
        return backbone(**inputs).last_hidden_state[:, -kept:]
    with _last_layer_at(backbone.layers[-1], kept):
        return backbone(**inputs).last_hidden_state


def has_plain_last_layer(backbone: nn.Module) -> bool:
    """Return whether a model's last layer can run at few positions: see `PLAIN_LAYERS`.

    Not so under gradient checkpointing, which runs a layer again later, and for kernels that read masks of their own.
    """
    config = backbone.config
    known = config.model_type in PLAIN_LAYERS and type(backbone).__module__.startswith("transformers.models.")
    if not known or config._attn_implementation not in ("sdpa", "eager"):
        return False
    layer = backbone.layers[-1]
    return "forward" not in vars(layer) and not (layer.gradient_checkpointing and layer.training)


def ways(base: PreTrainedModel, options: ModelConfig) -> dict[str, str]:
    """How layers of this base are computed under these options, for the run's record."""
    adapters = "added in " + str(base.dtype).removeprefix("torch.")
    adapters = "by peft" if options.load_in_4bit else "merged" if base.dtype == torch.float32 else adapters
    plain = has_plain_last_layer(base.base_model) and not options.gradient_checkpointing
    return {
        "adapters": adapters if options.finetune == "lora" else "none",
        "last_layer": "at responses" if plain else "whole",
    }


class _Before:
    """Keys and values of the positions before, in the place of a cache."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


@contextmanager
def _last_layer_at(layer: nn.Module, kept: int) -> Iterator[None]:
    """Inside this block the layer returns its states [B, kept, H] at the last `kept` positions."""
    plain = layer.forward

    def forward(hidden: Tensor, position_embeddings=None, attention_mask=None, position_ids=None, **more) -> Tensor:
        (rows, length), attention = hidden.shape[:2], layer.self_attn
        skip, (cos, sin) = length - kept, position_embeddings
        read = layer.input_layernorm(hidden[:, :skip])
        shape = (rows, skip, -1, attention.head_dim)
        keys, values = (part(read).view(shape).transpose(1, 2) for part in (attention.k_proj, attention.v_proj))
        if attention_mask is None:  # the kernel's own causal mask begins at the first key
            seen = torch.ones(kept, length, dtype=torch.bool, device=read.device).tril(skip)
            attention_mask = seen.expand(rows, 1, kept, length)
        else:
            attention_mask = attention_mask[:, :, skip:]
        more["past_key_values"] = _Before(_rotate(keys, cos[:, :skip], sin[:, :skip]), values)
        at = {"position_embeddings": (cos[:, skip:], sin[:, skip:]), "position_ids": position_ids[:, skip:]}
        return plain(hidden[:, skip:], attention_mask=attention_mask, **at, **more)

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
