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

# Steps between two looks at whether all responses have ended: to look, the CPU must wait for the GPU.
CHECK_EVERY = 16


def has_plain_cache(model: PreTrainedModel) -> bool:
    """Return whether a step of a causal LM can be captured once and replayed.

    It needs full attention by sdpa, weights that are not quantised, and a RoPE whose angles do not change with the
    longest text: every step of such a RoPE looks how long the texts are now, which a graph cannot do.
    """
    plain = has_plain_last_layer(model.base_model) and model.config._attn_implementation == "sdpa"
    if not plain or getattr(model, "is_quantized", False) or shared_rope_limit(model):
        return False
    return not any(StaticCache(model.config, 1).is_sliding)


class Decoder:
    """Responses to prompts [B, P], padded on the left, as far as they are sampled.

    A CUDA graph repeats the same kernels on the same memory. So everything that changes from step to step, even the
    number of the column, is a tensor that is changed in place, and nothing asks the device for a number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        mask: Tensor,
        sampling,
        ends: Sequence[int],
        pad: int,
    ):
        """Read the prompts, and sample the first token of each response.

        Args:
            ids, mask: the tokens of the prompts [B, P], and 1 for those that are no padding.
            sampling: has max_new_tokens, temperature, top_k and top_p; temperature 0 takes the most probable token.
            ends: the tokens that end a response.
            pad: the token that stands after the end.
        """
        rows, width = ids.shape
        device = ids.device
        total = width + sampling.max_new_tokens
        self.model = model
        self.pad = pad
        self.ends = torch.tensor(list(ends), device=device)
        self.greedy = sampling.temperature == 0
        self.processors = LogitsProcessorList()  # those of `generate`, in its order
        if not self.greedy:
            self.processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self.processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.processors.append(TopPLogitsWarper(sampling.top_p))
        # Keys and values, with room for the whole response from the start.
        self.cache = StaticCache(model.config, total)
        # Prompts and responses [B, P + T]; what is not sampled yet is padding.
        self.tokens = torch.cat([ids, ids.new_full((rows, total - width), pad)], 1)
        # Which columns attention may read, in the shape [B, heads, queries, columns] that sdpa takes.
        self.seen = torch.zeros(rows, 1, 1, total, dtype=torch.bool, device=device)
        self.seen[..., :width] = mask.bool()[:, None, None]
        # The column of `tokens` in which the newest token is, or is written next; all rows have the same.
        self.column = torch.tensor([width], device=device)
        # The position of the newest token in its own row [B, 1], which does not count padding.
        self.position = mask.long().sum(1, keepdim=True)
        # Which responses have not ended [B].
        self.going = torch.ones(rows, dtype=torch.bool, device=device)
        # Whether all probabilities so far were finite. If the CPU asked after each step, it would wait for the GPU.
        self.finite = torch.ones((), dtype=torch.bool, device=device)

        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids(mask),
            past_key_values=self.cache,
            logits_to_keep=1,
        )
        self._draw(output.logits[:, -1])

    def step(self) -> None:
        """Sample the next token of each response, from the newest one and the cache of those before."""
        self.seen.index_fill_(3, self.column, True)
        newest = self.tokens.index_select(1, self.column)
        output = self.model(
            input_ids=newest,
            attention_mask=self.seen,
            position_ids=self.position,
            past_key_values=self.cache,
        )
        self.column += 1
        self.position += 1
        self._draw(output.logits[:, -1])

    def captured(self) -> Callable[[], None]:
        """Sample two tokens, and return what samples one more: a graph's replay, or `step` if none can be captured."""
        # Two plain steps on another stream, as torch asks: kernels are chosen and loaded outside of the graph.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        # The third call only records its kernels: nothing runs until the graph is replayed.
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
        except torch.OutOfMemoryError:
            raise  # a `RuntimeError`, too; the caller tries again with fewer rows
        except RuntimeError as error:  # a kernel that cannot be captured; nothing was changed
            warnings.warn(
                f"sampling is slower, without a CUDA graph: {one_line(error)}", stacklevel=2
            )
            return self.step
        return graph.replay

    def _draw(self, logits: Tensor) -> None:
        """Draw a token of each response from logits [B, V], write it to `column`, and note which responses end.

        A response that has ended before gets padding.
        """
        scores = logits.float()
        if self.greedy:
            token = scores.argmax(-1, keepdim=True)
        else:
            no_tokens = cast(torch.LongTensor, self.tokens[:, :0])  # these processors read none
            probabilities = self.processors(no_tokens, scores).softmax(-1)
            self.finite &= probabilities.isfinite().all()
            # The largest p / e with e exponential is token i with probability p_i. `torch.multinomial` draws in the
            # same way and from the same random numbers, but may make the CPU wait to look for NaN.
            exponential = torch.empty_like(probabilities).exponential_(1)
            token = (probabilities / exponential).argmax(-1, keepdim=True)
        token = token.where(self.going[:, None], self.pad)
        self.tokens.index_copy_(1, self.column, token)
        self.going &= ~torch.isin(token[:, 0], self.ends)


@torch.no_grad()
def decode(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, sampling, ends: Sequence[int], pad: int
) -> Tensor:
    """Return tokens [B, P + T'] of prompts and responses; T' is `max_new_tokens`, and what follows an end is `pad`.

    On a CPU, and for short responses, the steps run without a graph. Raises `RuntimeError` if probabilities are not
    finite, as torch does.
    """
    decoder = Decoder(model, ids, mask, sampling, ends, pad)
    step = decoder.step
    done = 1  # tokens: the decoder has drawn the first
    if ids.is_cuda and sampling.max_new_tokens > CHECK_EVERY:
        step = decoder.captured()
        done += 2  # it has drawn two more, as a graph needs before it is captured
    while done < sampling.max_new_tokens:
        # The CPU waits for the GPU to learn whether all responses have ended, so it asks seldom.
        if done % CHECK_EVERY == 0 and not decoder.going.any():
            break
        step()
        done += 1
    if not decoder.finite:
        raise RuntimeError("probability tensor: not finite")
    return decoder.tokens
