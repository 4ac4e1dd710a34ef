"""Sampling whose noise belongs to a response, not to its batch, and roles made faster for answering many prompts.

A token is drawn by inversion: one uniform number u picks the token at which the cumulative probability passes u. The
u of a response come from its own name alone. So a response is the same in any batch and after any interruption, up to
rounding, and two policies that answer the same prompt share their noise, which makes comparisons by prompt tighter.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from peft import PeftModel
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel, position_ids
from marlhf_lite.tasks.tokenization import encode_prompts, pad
from marlhf_lite.training.rollout import Rollout, Sampling, generate

Role = TypeVar("Role", PolicyModel, ScalarHeadModel)
MERGE_BELOW = 2**30  # bytes of a model of which a second copy is made without asking


def noise(names: Sequence[str], length: int) -> Tensor:
    """[B, T] uniform numbers in [0, 1), a row for each name; the same name gives the same row, whatever the others."""
    rows = []
    for name in names:
        seed = int.from_bytes(hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()[:8], "big")
        rows.append(torch.rand(length, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(rows) if rows else torch.zeros(0, length)


class InverseTransformSampler(LogitsProcessor):
    """Leaves one token of each row possible: the one that the row's next uniform number picks.

    Temperature, top-k and top-p act as in `transformers`: on the k most probable tokens, of which the fewest whose
    probabilities reach top-p. Equal logits at the k-th place are cut at k.
    """

    def __init__(self, uniforms: Tensor, sampling: Sampling):
        self.uniforms, self.sampling, self.first = uniforms, sampling, None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.first = input_ids.shape[1] if self.first is None else self.first
        how = self.sampling
        kept = min(how.top_k or scores.shape[1], scores.shape[1])
        logits, tokens = (scores.float() / how.temperature).topk(kept)  # sorted, the most probable first
        p = logits.softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p >= how.top_p, 0.0) if how.top_p < 1 else p
        reached = p.cumsum(-1)
        u = self.uniforms[:, input_ids.shape[1] - self.first, None].to(scores.device) * reached[:, -1:]
        place = (reached <= u).sum(-1, keepdim=True)
        place = place.minimum((p > 0).sum(-1, keepdim=True) - 1)  # u may round up to the total
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens.gather(1, place), 0.0)


@dataclass(frozen=True)
class Seeded(Sampling):
    """`Sampling` by inversion, for `rollouts.generate`; `past` holds prompts that the model has read already."""

    uniforms: Tensor | None = None  # [B, max_new_tokens]; not used at temperature 0
    past: object = None  # a cache of all prompt tokens but the last

    def arguments(self) -> dict:
        """Arguments of `generate`: greedy over what `InverseTransformSampler` leaves."""
        given = super().arguments() | ({} if self.past is None else {"past_key_values": self.past})
        if self.temperature == 0:
            return given
        picked = LogitsProcessorList([InverseTransformSampler(self.uniforms, self)])
        return (
            given
            | {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
            | {"logits_processor": picked}
        )


@torch.no_grad()
def generate_seeded(model, tokenizer, prompts: Sequence[str], names: Sequence[str], sampling: Sampling) -> Rollout:
    """One response to each prompt, drawn with the noise of its name. A prompt that repeats is read once.

    `names` [B] tell responses apart, such as "seed/prompt/sample"; torch's random state is neither used nor changed.
    """
    chosen = {name: getattr(sampling, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    seeded = Seeded(**chosen, uniforms=noise(names, sampling.max_new_tokens), past=_read(model, tokenizer, prompts))
    return generate(model, tokenizer, prompts, seeded)


def _read(model, tokenizer, prompts: Sequence[str]):
    """A cache of all prompt tokens but the last, a row for each prompt; None where there is nothing to share."""
    unique = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    if len(unique) == len(prompts):
        return None
    ids, mask = pad(encode_prompts(tokenizer, list(unique)), tokenizer.pad_token_id, left=True)
    ids, mask = (x[:, :-1].to(next(model.parameters()).device) for x in (ids, mask))
    if not ids.shape[1]:
        return None
    places = position_ids(mask)
    past = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=True, logits_to_keep=1)
    past = past.past_key_values
    past.batch_select_indices(torch.tensor([unique[prompt] for prompt in prompts], device=ids.device))
    return past


def merged(role: Role) -> Role:
    """The role with its adapter folded into a copy of the weights: about twice as fast on a CPU.

    The role itself where it has no adapter, where a quantized base cannot hold the sum, or where the copy would take
    more than `MERGE_BELOW` bytes. Answers differ by rounding.
    """
    size = sum(p.numel() * p.element_size() for p in role.parameters())
    exact = all(p.is_floating_point() for p in role.parameters())
    if not isinstance(role.model, PeftModel) or not exact or size > MERGE_BELOW:
        return role
    role = copy.deepcopy(role)
    role.model.merge_adapter()
    return role
