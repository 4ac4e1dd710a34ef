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
FAMILIES_WITH_PLAIN_LAYERS = frozenset("gemma llama mistral qwen2".split())


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
    """Return the states [B, kept, H] at the last `kept` columns of rows [B, L], which may be padded on both sides.

    States at padding are arbitrary. `levers` are the choices of --fast: without `last_layer` among them, and for models
    that `has_plain_last_layer` does not accept, it is one plain pass of all layers.
    """
    # 1. In which column each row's tokens begin, and how many tokens the longest row has.
    width = tokens.shape[1]
    columns = torch.arange(width, device=tokens.device)
    starts = attention_mask.argmax(1)
    ends = (columns * attention_mask).amax(1) + 1
    latest_start, longest = _largest_of_each(starts, ends - starts)

    # 2. After each row has moved left by its start, the first column whose state is read: that of the row that moves
    #    furthest. It is below 0 if that row begins inside the last `kept` columns, so that its states at the first of
    #    these columns would be missing: then, too, the plain pass is taken.
    first_read = width - kept - latest_start
    may_shorten = "last_layer" in levers and has_plain_last_layer(backbone)
    if first_read < 0 or not may_shorten:
        output = backbone(
            input_ids=tokens,
            attention_mask=attention_mask,
            position_ids=position_ids(attention_mask),
            use_cache=False,
        )
        return output.last_hidden_state[:, -kept:]

    # 3. Move the rows left and run all layers, the last one only from `first_read` on.
    aligned = tokens.gather(1, (columns[:longest] + starts[:, None]).clamp(max=width - 1))
    skips_columns = first_read > 0
    last_layer = backbone.layers[-1]
    columns_of_last_layer = nullcontext()
    if skips_columns:
        columns_of_last_layer = _runs_at_last_positions_alone(last_layer, longest - first_read)
    with columns_of_last_layer:
        # Layers that are computed again in the backward pass take no cache.
        cache = None if backbone.gradient_checkpointing else _KeysAndValuesBefore()
        output = backbone(input_ids=aligned, past_key_values=cache, use_cache=False)
    states = output.last_hidden_state

    # 4. Move the states back to the columns of `tokens`.
    no_row_has_moved = latest_start == 0 and longest == width
    if no_row_has_moved:
        return states
    # Where in `states` each kept column of each row is now. Beyond the end there is only padding.
    read = (columns[-kept:] - starts[:, None] - first_read).clamp(max=states.shape[1] - 1)
    return states.gather(1, read[..., None].expand(-1, -1, states.shape[-1]))


def _largest_of_each(*tensors: Tensor) -> list[int]:
    """Return the largest number of each tensor. They are fetched together, so that the CPU waits for the GPU once."""
    return torch.stack([tensor.max() for tensor in tensors]).tolist()


def has_plain_last_layer(backbone: nn.Module) -> bool:
    """Return whether this model's last layer can run at its last positions alone, as `last_states` does it.

    It can for FAMILIES_WITH_PLAIN_LAYERS, if the classes are transformers' own and nobody has replaced a `forward`.
    """
    is_of_transformers = type(backbone).__module__.startswith("transformers.models.")
    if backbone.config.model_type not in FAMILIES_WITH_PLAIN_LAYERS or not is_of_transformers:
        return False
    if backbone.config._attn_implementation not in ("sdpa", "eager"):
        return False  # other kinds of attention do not take a mask with fewer rows than columns
    # A `forward` among the object's own attributes was put there by a library, as accelerate's hooks do.
    return "forward" not in vars(backbone.layers[-1])


class _KeysAndValuesBefore(Cache):
    """Stands where a layer looks for a cache, and puts given keys and values, if any, before those of the layer.

    Without keys and values it looks like an empty cache. If there were none at all, transformers would look for rows
    that are packed into one, and so wait for the device.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None):
        super().__init__(layers=[])
        self.keys = keys
        self.values = values

    def update(self, keys: Tensor, values: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            return keys, values
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)


@contextmanager
def _runs_at_last_positions_alone(layer: nn.Module, kept: int) -> Iterator[None]:
    """Inside this block a model's last layer returns its states [B, kept, H] at the last `kept` positions alone.

    At the positions before them it computes only keys and values, to which the kept positions attend. Gradient
    checkpointing leaves this layer out, at no cost in memory: the backward pass begins with this layer, so what it has
    kept is free again before any other layer is computed a second time.
    """
    plain_forward = layer.forward
    recomputes = layer.gradient_checkpointing

    def forward(
        hidden: Tensor,
        position_embeddings=None,
        attention_mask=None,
        position_ids=None,
        **other_arguments,
    ) -> Tensor:
        """Return the layer's states [B, kept, H] at the last `kept` positions of `hidden` [B, T, H].

        Stands in the place of the layer's own `plain_forward`. The model always passes positions, as cosines and sines
        [1 or B, T, head_dim] in `position_embeddings`; the defaults are those of the method that it replaces.
        """
        rows, length = hidden.shape[:2]
        skip = length - kept
        cos, sin = position_embeddings
        attention = layer.self_attn

        # 1. Keys and values of the positions that are skipped [B, heads, skip, head_dim], as the layer makes them.
        normed = layer.input_layernorm(hidden[:, :skip])
        shape = (rows, skip, -1, attention.head_dim)
        keys = attention.k_proj(normed).view(shape).transpose(1, 2)
        values = attention.v_proj(normed).view(shape).transpose(1, 2)
        # Rotary embeddings, as these families have them: k cos + rotate_half(k) sin.
        first_half, second_half = keys.chunk(2, -1)
        rotated = torch.cat([-second_half, first_half], -1)
        keys = keys * cos[:, None, :skip] + rotated * sin[:, None, :skip]

        # 2. The rows of the causal mask for the kept positions. Without a mask the kernel would make its own, and in a
        #    kernel's causal mask the first query, here position `skip`, attends to the first key alone.
        if attention_mask is None:
            ones = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden.device)
            attention_mask = ones.tril()

        # 3. The plain layer at the kept positions. It finds the skipped keys and values where it looks for a cache
        #    (there is none here: a pass over whole texts does not generate).
        other_arguments["past_key_values"] = _KeysAndValuesBefore(keys, values)
        return plain_forward(
            hidden[:, skip:],
            attention_mask=attention_mask[:, :, skip:],
            position_embeddings=(cos[:, skip:], sin[:, skip:]),
            position_ids=position_ids[:, skip:],
            **other_arguments,
        )

    layer.forward = forward  # an attribute of this one layer, which hides the method of its class
    layer.gradient_checkpointing = False
    try:
        yield
    finally:
        del layer.forward  # the method is found again
        layer.gradient_checkpointing = recomputes
