"""Log-probabilities of given tokens from hidden states, in memory that does not grow with tokens x vocabulary.

The logits of a response are [T, V]: with 256k tokens in the vocabulary they, and what their softmax and its gradient
keep, outweigh the rest of a pass. Above `MAX_LOGITS` of them, tiles are made, folded into log-sum-exp, dropped, and
made again in the backward pass.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# elements: 32 MiB in float32. What fits goes through at once, without a second projection
MAX_LOGITS = 2**23
# Elements of a tile. On a CPU a tile passes through several tensors, which should stay in the cache. On a GPU one
# kernel reads it, and its matrix product is fast only if it is large.
_TILE = {"cpu": 2**20}
_DEVICE_TILE = 2**25
# Families of transformers whose logits are softcap(W h + b). Others scale them in ways that configs do not tell.
PLAIN_HEADS = frozenset(
    "gemma gemma2 gemma3_text gpt2 llama mistral mixtral olmo2 phi3 qwen2 qwen3".split()
)


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether a causal LM's logits can be made from its head's weight: see `PLAIN_HEADS`.

    They cannot if the head has an adapter, a hook, or a quantised or sharded weight, or if the model's class is not
    transformers' own: such a class may compute its logits in another way.
    """
    is_known = model.config.model_type in PLAIN_HEADS and type(model).__module__.startswith(
        "transformers.models."
    )
    return is_known and is_plain_linear(model.get_output_embeddings())


def is_plain_linear(head: nn.Module | None) -> bool:
    """Return whether a head is a linear layer whose weight can be read instead of calling it."""
    return type(head) is nn.Linear and not (
        head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    )


def from_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`(log-probability of each target [..], entropy [..])` in float32 from logits [.., V]; entropy has no gradient."""
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropy


def from_hidden(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`(log-probability of each target [..], entropy [..])` in float32 from last hidden states [.., H] and a head.

    Gradients of the log-probabilities reach `hidden` and the head's parameters; entropy has no gradient. Some families
    (Gemma 2) bound their logits to ±`softcap`; None leaves them as they are. If there are more than `MAX_LOGITS`
    logits, they are never all in memory: TRL's function adds up the log-sum-exp tile by tile of the vocabulary, in
    float32 whatever the head's dtype, by a Triton kernel on GPUs and by torch elsewhere.
    """
    if targets.numel() * head.out_features <= MAX_LOGITS:
        logits = head(hidden)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return from_logits(logits, targets, temperature)
    # Imported here because it takes seconds, and few runs are so large. PPO needs nothing else of trl.
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE, ChunkedLogProbFunction

    tokens_at_a_time = min(targets.numel(), TOKEN_CHUNK_SIZE)
    elements_of_a_tile = _TILE.get(hidden.device.type, _DEVICE_TILE)
    # A function of autograd takes no keywords.
    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        head.weight,
        head.bias,
        targets.reshape(-1),
        temperature,
        elements_of_a_tile // tokens_at_a_time,  # words of the vocabulary in a tile
        softcap,
        1.0,  # the logits' scale
        ("entropy",),  # what it returns beside the log-probabilities
    )
    return logprobs.view(targets.shape), entropy.detach().view(targets.shape)
