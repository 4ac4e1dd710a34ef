"""Sampling on a GPU: one step in tensors that stay, captured once as a CUDA graph and replayed for each token.

transformers' `generate` starts some 800 small kernels a token, and starting them takes longer than running them. The
tokens are those that `generate` draws from the same random state, up to rounding.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StaticCache
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from marlhf_lite.models.fast.last_layer import has_plain_last_layer, position_ids
from marlhf_lite.models.positions import shared_rope_limit
from marlhf_lite.utils.errors import one_line

# steps between looks at whether all responses have ended, which wait for the device
CHECK_EVERY = 16


def has_plain_cache(model: PreTrainedModel) -> bool:
    """Return whether a step of a causal LM can be replayed: full attention by sdpa, and weights of plain numbers."""
    plain = has_plain_last_layer(model.base_model) and model.config._attn_implementation == "sdpa"
    if not plain or getattr(model, "is_quantized", False) or shared_rope_limit(model):
        return False
    return not any(StaticCache(model.config, 1).is_sliding)


class Decoder:
    """Responses to prompts [B, P], padded on the left, as far as they are sampled."""

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        mask: Tensor,
        sampling,
        ends: Sequence[int],
        pad: int,
    ):
        (rows, width), device = ids.shape, ids.device
        total = width + sampling.max_new_tokens
        self.model, self.pad, self.greedy = model, pad, sampling.temperature == 0
        self.processors = LogitsProcessorList()  # those of `generate`, in its order
        if not self.greedy:
            self.processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self.processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.processors.append(TopPLogitsWarper(sampling.top_p))
        self.cache, self.ends = (
            StaticCache(model.config, total),
            torch.tensor(list(ends), device=device),
        )
        self.tokens = torch.cat([ids, ids.new_full((rows, total - width), pad)], 1)
        self.seen = torch.zeros(rows, 1, 1, total, dtype=torch.bool, device=device)
        self.seen[..., :width] = mask.bool()[:, None, None]
        self.column = torch.tensor([width], device=device)  # of the newest token
        self.position = mask.long().sum(1, keepdim=True)
        self.going = torch.ones(rows, dtype=torch.bool, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        inputs = {"attention_mask": mask, "position_ids": position_ids(mask), "logits_to_keep": 1}
        self._draw(model(input_ids=ids, past_key_values=self.cache, **inputs).logits[:, -1])

    def step(self) -> None:
        """Sample the next token of each response."""
        self.seen.index_fill_(3, self.column, True)
        newest = self.tokens.index_select(1, self.column)
        inputs = {
            "attention_mask": self.seen,
            "position_ids": self.position,
            "past_key_values": self.cache,
        }
        logits = self.model(input_ids=newest, **inputs).logits[:, -1]
        self.column += 1
        self.position += 1
        self._draw(logits)

    def captured(self) -> Callable[[], None]:
        """Sample two tokens, and return what samples one more: a graph's replay, or `step` if none can be captured."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are chosen and loaded outside of the graph
            self.step()
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # nothing ran while it was captured
            warnings.warn(
                f"sampling is slower, without a CUDA graph: {one_line(error)}", stacklevel=2
            )
            return self.step
        return graph.replay

    def _draw(self, logits: Tensor) -> None:
        scores = logits.float()
        if self.greedy:
            token = scores.argmax(-1, keepdim=True)
        else:
            # As `torch.multinomial` draws, which may wait for the device to look for NaN.
            no_tokens = cast(torch.LongTensor, self.tokens[:, :0])  # which these do not read
            probabilities = self.processors(no_tokens, scores).softmax(-1)
            self.finite &= probabilities.isfinite().all()
            token = (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(
                -1, keepdim=True
            )
        token = token.where(self.going[:, None], self.pad)
        self.tokens.index_copy_(1, self.column, token)
        self.going &= ~torch.isin(token[:, 0], self.ends)


@torch.no_grad()
def decode(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, sampling, ends: Sequence[int], pad: int
) -> Tensor:
    """Tokens [B, P + T'] of prompts and responses; T' is `max_new_tokens`, and what follows an end is `pad`.

    On a CPU the steps run without a graph. Raises `RuntimeError` if probabilities are not finite, as torch does.
    """
    decoder = Decoder(model, ids, mask, sampling, ends, pad)
    step, done = decoder.step, 1
    if ids.is_cuda and sampling.max_new_tokens > CHECK_EVERY:
        step, done = decoder.captured(), 3
    while done < sampling.max_new_tokens and (done % CHECK_EVERY or decoder.going.any()):
        step()
        done += 1
    if not decoder.finite:
        raise RuntimeError("probability tensor: not finite")
    return decoder.tokens
