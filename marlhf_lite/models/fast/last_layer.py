"""A backbone's states at a response: rows aligned left, and the last layer only where its output is read.

Aligned left, padding comes after a row's tokens, where causal attention hides it. Without a mask a GPU takes flash
attention, and fewer columns run if the longest prompt and the longest response are in different rows. Log-probabilities
and values of a response need no output of the last layer at its prompt, only keys and values. Sums are rounded in
another order.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

# Families whose layer is norm, attention with rotated q and k, norm, MLP; others norm, scale or fuse in between.
PLAIN_LAYERS = frozenset("gemma llama mistral qwen2".split())


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, L] positions that count attended tokens only, so left padding shifts nothing."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def last_states(
    backbone: nn.Module,
    kept: int,
    tokens: Tensor,
    attention_mask: Tensor,
    *,
    levers: frozenset[str],
) -> Tensor:
    """The backbone's states [B, kept, H] at the last `kept` columns of rows [B, L], which may be padded on both sides.

    States at padding are arbitrary. Without `last_layer` among the levers it is one plain pass of all layers.
    """
    width, columns = tokens.shape[1], torch.arange(tokens.shape[1], device=tokens.device)
    starts = attention_mask.argmax(1)
    latest, used = _most(starts, (columns * attention_mask).amax(1) + 1 - starts)
    first = width - kept - latest  # column of the aligned rows, the first that is read
    is_taken = "last_layer" in levers and has_plain_last_layer(backbone)
    if first < 0 or not is_taken:
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids(attention_mask)}
        return backbone(input_ids=tokens, **inputs, use_cache=False).last_hidden_state[:, -kept:]
    aligned = tokens.gather(1, (columns[:used] + starts[:, None]).clamp(max=width - 1))
    with _last_layer_at(backbone.layers[-1], used - first) if first else nullcontext():
        # layers that run twice take none
        cache = None if backbone.gradient_checkpointing else _Before()
        states = backbone(
            input_ids=aligned, past_key_values=cache, use_cache=False
        ).last_hidden_state
    if not latest and used == width:  # no row has moved
        return states
    read = (columns[-kept:] - starts[:, None] - first).clamp(max=states.shape[1] - 1)
    return states.gather(1, read[..., None].expand(-1, -1, states.shape[-1]))


def _most(*numbers: Tensor) -> list[int]:
    """The largest of each, by one wait for the device."""
    return torch.stack([x.max() for x in numbers]).tolist()


def has_plain_last_layer(backbone: nn.Module) -> bool:
    """Return whether the last layer can run at few positions."""
    known = backbone.config.model_type in PLAIN_LAYERS and type(backbone).__module__.startswith(
        "transformers.models."
    )
    if not known or backbone.config._attn_implementation not in ("sdpa", "eager"):
        return False
    return "forward" not in vars(backbone.layers[-1])


class _Before(Cache):
    """Keys and values of the positions before, if any, in the place of a cache, which it looks like when empty.

    Without a cache transformers would look for rows that are packed into one, and wait for the device.
    """

    def __init__(self, *before: Tensor):
        super().__init__(layers=[])
        self.before = before

    def update(self, keys: Tensor, values: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        if not self.before:
            return keys, values
        return torch.cat([self.before[0], keys], 2), torch.cat([self.before[1], values], 2)


@contextmanager
def _last_layer_at(layer: nn.Module, kept: int) -> Iterator[None]:
    """Inside this block the layer returns its states [B, kept, H] at the last `kept` positions.

    Checkpointing leaves it out: the backward pass begins with it, so nothing else is kept while it would be recomputed.
    """
    plain, recomputes = layer.forward, layer.gradient_checkpointing

    def forward(
        hidden: Tensor, position_embeddings=None, attention_mask=None, position_ids=None, **more
    ) -> Tensor:
        (rows, length), attention = hidden.shape[:2], layer.self_attn
        skip, (cos, sin) = length - kept, position_embeddings
        read = layer.input_layernorm(hidden[:, :skip])
        shape = (rows, skip, -1, attention.head_dim)
        keys, values = (
            part(read).view(shape).transpose(1, 2) for part in (attention.k_proj, attention.v_proj)
        )
        if attention_mask is None:  # the kernel's own causal mask begins at the first key
            attention_mask = torch.ones(
                1, 1, length, length, dtype=torch.bool, device=read.device
            ).tril()
        attention_mask = attention_mask[:, :, skip:]
        first, second = keys.chunk(2, -1)
        keys = keys * cos[:, None, :skip] + torch.cat([-second, first], -1) * sin[:, None, :skip]
        more["past_key_values"] = _Before(keys, values)
        at = {
            "position_embeddings": (cos[:, skip:], sin[:, skip:]),
            "position_ids": position_ids[:, skip:],
        }
        return plain(hidden[:, skip:], attention_mask=attention_mask, **at, **more)

    layer.forward, layer.gradient_checkpointing = forward, False
    try:
        yield
    finally:
        del layer.forward
        layer.gradient_checkpointing = recomputes
