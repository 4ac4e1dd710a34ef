"""Seeded sampling for evaluation: the random numbers belong to a response, not to its batch.

A token is drawn by inverse-transform sampling: one uniform number u picks the token at which the cumulative probability
passes u. The numbers of a response come only from its name. So a response is the same in any batch and after any
interruption, up to rounding, and two policies that answer the same prompt use common random numbers, which makes
comparisons by prompt tighter.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from marlhf_lite.models.actor_critic import position_ids
from marlhf_lite.tasks.tokenization import encode_prompts, pad
from marlhf_lite.training.rollout import Rollout, Sampling, generate


def uniform_numbers(names: Sequence[str], length: int) -> Tensor:
    """Return [B, T] uniform numbers in [0, 1), a row for each name; a row depends only on its name."""
    rows = []
    for name in names:
        seed = int.from_bytes(
            hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()[:8], "big"
        )
        rows.append(torch.rand(length, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(rows) if rows else torch.zeros(0, length)


class InverseTransformSampler(LogitsProcessor):
    """Leaves one token of each row possible: the one that the row's next uniform number picks.

    Temperature, top-k and top-p act as in `transformers`: of the k most probable tokens stay the fewest whose
    probabilities reach top-p. Of equal logits at the k-th place only k tokens stay.
    """

    def __init__(self, uniforms: Tensor, sampling: Sampling):
        self.uniforms, self.sampling, self.prompt_width = uniforms, sampling, None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.prompt_width is None:
            self.prompt_width = input_ids.shape[1]
        kept = min(self.sampling.top_k or scores.shape[1], scores.shape[1])
        # the most probable first
        logits, tokens = (scores.float() / self.sampling.temperature).topk(kept)
        p = logits.softmax(-1)
        if self.sampling.top_p < 1:
            p = p.masked_fill(p.cumsum(-1) - p >= self.sampling.top_p, 0.0)
        reached = p.cumsum(-1)
        u = (
            self.uniforms[:, input_ids.shape[1] - self.prompt_width, None].to(scores.device)
            * reached[:, -1:]
        )
        place = (reached <= u).sum(-1, keepdim=True)
        place = place.minimum((p > 0).sum(-1, keepdim=True) - 1)  # u may round up to the total
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens.gather(1, place), 0.0)


@dataclass(frozen=True)
class SeededSampling(Sampling):
    """`Sampling` for `rollout.generate` that continues a cache, or draws by inverse transform."""

    # a cache of all tokens but the last, to which `generate` adds; None: nothing was read
    past: object = None
    # [B, max_new_tokens]; None, and temperature 0, leave sampling to `generate`
    uniforms: Tensor | None = None
    processors: tuple[LogitsProcessor, ...] = ()  # what changes the logits before a token is drawn

    @classmethod
    def like(cls, sampling: Sampling) -> "SeededSampling":
        """Return the same sampling, by the random numbers of its names."""
        return cls(**{field.name: getattr(sampling, field.name) for field in fields(Sampling)})

    def of_turn(self, turn: int, rows: Sequence[int]) -> "SeededSampling":
        """Return the sampling of a turn, which has its own random numbers."""
        if not self.seed_names or not rows:
            return self
        names = [f"{self.seed_names[row]}/{turn}" for row in rows]
        return replace(self, uniforms=uniform_numbers(names, self.max_new_tokens))

    def arguments(self) -> dict:
        """Return arguments of `generate`: with uniform numbers, greedy over what `InverseTransformSampler` leaves."""
        arguments = super().arguments() | (
            {} if self.past is None else {"past_key_values": self.past}
        )
        processors = LogitsProcessorList(self.processors)
        if self.temperature > 0 and self.uniforms is not None:
            processors.append(InverseTransformSampler(self.uniforms, self))
            arguments |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return arguments | ({"logits_processor": processors} if processors else {})


@torch.no_grad()
def generate_seeded(model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
    """Return one response to each prompt, drawn with the random numbers of its name. A repeated prompt is read once.

    `sampling.seed_names` [B] identify responses, such as "seed/prompt/sample"; torch's random state stays unused.
    """
    rows, past = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}, None
    if len(rows) < len(prompts):
        ids, mask = pad(encode_prompts(tokenizer, list(rows)), tokenizer.pad_token_id, left=True)
        device = next(model.parameters()).device
        past = read_all_but_last(
            model, ids.to(device), mask.to(device), [rows[prompt] for prompt in prompts]
        )
    uniforms = uniform_numbers(sampling.seed_names, sampling.max_new_tokens)
    return generate(
        model,
        tokenizer,
        prompts,
        replace(SeededSampling.like(sampling), past=past, uniforms=uniforms),
    )


@torch.no_grad()
def read_all_but_last(model, ids: Tensor, mask: Tensor, rows: Sequence[int]):
    """Return a cache of all tokens but the last of some rows of `ids` [N, P], which may repeat; None if P is 1."""
    ids, mask = ids[:, :-1], mask[:, :-1]
    if not ids.shape[1]:
        return None
    places = position_ids(mask)
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=places, use_cache=True, logits_to_keep=1
    )
    past = output.past_key_values
    past.batch_select_indices(torch.tensor(rows, device=ids.device))
    return past
