"""The last decoder layer at the positions whose output is read: all give keys and values, only these the rest.

Log-probabilities and values of a response need no output at its prompt. Sums are rounded in another order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Families whose layer is norm, attention with rotated q and k, norm, MLP; others norm, scale or fuse in between.
PLAIN_LAYERS = frozenset("gemma llama mistral qwen2".split())


def last_states(backbone: nn.Module, kept: int, **inputs) -> Tensor:
    """The backbone's states [B, kept, H] at the last `kept` positions, which is all that is computed if it can be."""
    if not 0 < kept < inputs["input_ids"].shape[1] or not has_plain_last_layer(backbone):
        return backbone(**inputs).last_hidden_state[:, -kept:]
    with _last_layer_at(backbone.layers[-1], kept):
        return backbone(**inputs).last_hidden_state


def has_plain_last_layer(backbone: nn.Module) -> bool:
    """Return whether the last layer can run at few positions."""
    known = backbone.config.model_type in PLAIN_LAYERS and type(backbone).__module__.startswith("transformers.models.")
    if not known or backbone.config._attn_implementation not in ("sdpa", "eager"):
        return False
    return "forward" not in vars(backbone.layers[-1])


class _Before:
    """Keys and values of the positions before, in the place of a cache."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)


@contextmanager
def _last_layer_at(layer: nn.Module, kept: int) -> Iterator[None]:
    """Inside this block the layer returns its states [B, kept, H] at the last `kept` positions.

    Checkpointing leaves it out: the backward pass begins with it, so nothing else is kept while it would be recomputed.
    """
    plain, recomputes = layer.forward, layer.gradient_checkpointing

    def forward(hidden: Tensor, position_embeddings=None, attention_mask=None, position_ids=None, **more) -> Tensor:
        (rows, length), attention = hidden.shape[:2], layer.self_attn
        skip, (cos, sin) = length - kept, position_embeddings
        read = layer.input_layernorm(hidden[:, :skip])
        shape = (rows, skip, -1, attention.head_dim)
        keys, values = (part(read).view(shape).transpose(1, 2) for part in (attention.k_proj, attention.v_proj))
        if attention_mask is None:  # the kernel's own causal mask begins at the first key
            attention_mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=read.device).tril()
        attention_mask = attention_mask[:, :, skip:]
        first, second = keys.chunk(2, -1)
        keys = keys * cos[:, None, :skip] + torch.cat([-second, first], -1) * sin[:, None, :skip]
        more["past_key_values"] = _Before(keys, values)
        at = {"position_embeddings": (cos[:, skip:], sin[:, skip:]), "position_ids": position_ids[:, skip:]}
        return plain(hidden[:, skip:], attention_mask=attention_mask, **at, **more)

    layer.forward, layer.gradient_checkpointing = forward, False
    try:
        yield
    finally:
        del layer.forward
        layer.gradient_checkpointing = recomputes
