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
from marlhf_lite.tasks.padding import pad
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import Rollout, Sampling, generate


def uniform_numbers(names: Sequence[str], length: int) -> Tensor:
    """Return [B, T] uniform numbers in [0, 1), a row of `length` = T for each name; a row depends only on its name."""
    rows = []
    for name in names:
        # `backslashreplace`: a name may hold half a surrogate pair, for which UTF-8 has no bytes.
        digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()
        seed = int.from_bytes(digest[:8], "big")  # torch takes seeds of 64 bits
        rows.append(torch.rand(length, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(rows) if rows else torch.zeros(0, length)


class InverseTransformSampler(LogitsProcessor):
    """Leaves one token of each row possible: the one that the row's next uniform number picks.

    Temperature, top-k and top-p act as in `transformers`: the k most probable tokens are kept, and of these the fewest
    whose probabilities add up to top-p. If several tokens have the k-th largest logit, still only k tokens are kept.
    """

    def __init__(self, uniforms: Tensor, sampling: Sampling):
        """Take uniform numbers [B, T] for T tokens; `sampling` gives temperature, top-k and top-p."""
        self.uniforms = uniforms
        self.sampling = sampling
        self.prompt_width: int | None = None  # the first call sees only the prompt, and sets it

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [B, V] that are 0 at the token that is drawn and −∞ at all others; `input_ids` [B, L]."""
        if self.prompt_width is None:
            self.prompt_width = input_ids.shape[1]
        step = input_ids.shape[1] - self.prompt_width  # tokens of the response so far

        # 1. Probabilities [B, K] of the K most probable tokens, the most probable first, by temperature and top-k.
        vocabulary = scores.shape[1]
        kept = min(self.sampling.top_k or vocabulary, vocabulary)  # 0: all
        logits, tokens = (scores.float() / self.sampling.temperature).topk(kept)
        p = logits.softmax(-1)
        # 2. Top-p drops a token if the more probable ones reach top-p without it.
        if self.sampling.top_p < 1:
            before = p.cumsum(-1) - p  # the sum over the more probable ones
            p = p.masked_fill(before >= self.sampling.top_p, 0.0)
        # 3. The token at which the sum of probabilities passes u, which is uniform between 0 and their total.
        reached = p.cumsum(-1)
        total = reached[:, -1:]
        u = self.uniforms[:, step, None].to(scores.device) * total
        place = (reached <= u).sum(-1, keepdim=True)
        last_possible = (p > 0).sum(-1, keepdim=True) - 1
        place = place.minimum(last_possible)  # u may round up to the total
        drawn = tokens.gather(1, place)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


@dataclass(frozen=True)
class SeededSampling(Sampling):
    """`Sampling` for `rollout.generate` that can continue a cache, and can draw by inverse transform."""

    # Keys and values of all tokens of the prompts but the last, to which `generate` adds; None if nothing was read.
    past: object = None
    # [B, max_new_tokens]. Without them, or at temperature 0, `generate` draws in its own way.
    uniforms: Tensor | None = None
    processors: tuple[LogitsProcessor, ...] = ()  # what changes the logits before a token is drawn

    @classmethod
    def like(cls, sampling: Sampling) -> "SeededSampling":
        """Return `sampling` as a `SeededSampling`, as yet without a cache and without uniform numbers."""
        return cls(**{field.name: getattr(sampling, field.name) for field in fields(Sampling)})

    def of_turn(self, turn: int, rows: Sequence[int]) -> "SeededSampling":
        """Return the sampling of turn number `turn` in these rows of the batch.

        Each turn has its own random numbers, which depend on the name of its row and on the turn.
        """
        if not self.seed_names or not rows:
            return self
        names = [f"{self.seed_names[row]}/{turn}" for row in rows]
        return replace(self, uniforms=uniform_numbers(names, self.max_new_tokens))

    def arguments(self) -> dict:
        """Return the arguments of transformers' `generate` for this sampling.

        If there are uniform numbers, `InverseTransformSampler` leaves one token possible, and `generate` takes it as
        the most probable one.
        """
        arguments = super().arguments()
        if self.past is not None:
            arguments["past_key_values"] = self.past
        processors = LogitsProcessorList(self.processors)
        if self.temperature > 0 and self.uniforms is not None:
            # The sampler reads temperature, top-k and top-p from this object, so `generate` gets none of them.
            processors.append(InverseTransformSampler(self.uniforms, self))
            arguments |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if processors:
            arguments["logits_processor"] = processors
        return arguments


@torch.no_grad()
def generate_seeded(model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
    """Return one response to each prompt. Each response has a name, from which its random numbers are computed.

    `sampling.seed_names` [B] are the names, such as "seed/prompt/sample"; torch's random state stays unused. If prompts
    are repeated, the model reads each different prompt only once.
    """
    row_of_prompt = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    past = None
    if len(row_of_prompt) < len(prompts):  # some are repeated
        different = list(row_of_prompt)
        ids, mask = pad(encode_prompts(tokenizer, different), tokenizer.pad_token_id, left=True)
        device = next(model.parameters()).device
        rows = [row_of_prompt[prompt] for prompt in prompts]
        # The keys and values of each prompt's tokens but the last, once for each response.
        past = read_all_but_last(model, ids.to(device), mask.to(device), rows)
    uniforms = uniform_numbers(sampling.seed_names, sampling.max_new_tokens)
    seeded = replace(SeededSampling.like(sampling), past=past, uniforms=uniforms)
    return generate(model, tokenizer, prompts, seeded)


@torch.no_grad()
def read_all_but_last(model, ids: Tensor, mask: Tensor, rows: Sequence[int]):
    """Return a cache of the keys and values of all tokens but the last; None if prompts have only one token.

    `ids` and `mask` [N, P] are different prompts, each of which is read once. The cache has B rows: `rows` [B] says
    which prompt each of them belongs to, so that a prompt may be repeated. `generate` reads the last token itself,
    because it needs the logits there.
    """
    ids = ids[:, :-1]
    mask = mask[:, :-1]
    if not ids.shape[1]:
        return None
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position_ids(mask),
        use_cache=True,
        logits_to_keep=1,  # no logits are needed, and those of all tokens would take memory
    )
    past = output.past_key_values
    past.batch_select_indices(torch.tensor(rows, device=ids.device))  # repeats rows, in place
    return past
