"""Values by Monte Carlo: the mean score of sampled continuations of a state.

The value V*(s_t) of a state (a prompt with the first t tokens of a response) is the mean score of its continuations
under the policy. It is estimated from sampled continuations, as VinePPO does (arXiv 2410.01679). Two independent halves
of the continuations separate what varies between states from the noise of the estimate: the mean of a product of two
halves is free of noise, that of a square is not.

Shapes: B responses, C cuts of a response, N states, K continuations of a state. Scores are the reward's.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import LogitsProcessor

from marlhf_lite.evaluation.sampling import SeededSampling, read_all_but_last
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.tasks.tokenization import encode_prompts, pad
from marlhf_lite.training.rewards import score_responses
from marlhf_lite.training.rollout import (
    Rollout,
    Sampling,
    end_of_text,
    from_tokens,
    merged_adapter,
    nonfinite_probabilities_refused,
    sample,
)
from marlhf_lite.utils.errors import InputError

Reward = Callable[[Rollout], Tensor]
TOKENS_AT_A_TIME = 8  # then the responses that have ended leave the batch


def even_cuts(lengths: Tensor, places: int = 3) -> Tensor:
    """Cuts [B, 1 + 2·places] of responses: 0, then pairs of neighbours (t, t+1) at `places` evenly spread positions.

    A cut t is the state before token t. `lengths` [B] count tokens; every response has at least 2.
    """
    shares = torch.arange(1, places + 1, device=lengths.device) / (places + 1)
    starts = (lengths[:, None] * shares).long().minimum(lengths[:, None] - 2)
    pairs = torch.stack([starts, starts + 1], dim=2).flatten(1)
    return torch.cat([torch.zeros_like(lengths)[:, None], pairs], dim=1)


def prefixes_at(rollout: Rollout, cuts: Tensor) -> list[list[int]]:
    """The first t response tokens of each response, for each of its cuts t [B, C]: B·C lists, response by response."""
    ids = rollout.response_ids.tolist()
    return [row[:cut] for row, places in zip(ids, cuts.tolist(), strict=True) for cut in places]


def monte_carlo_scores(
    policy: PolicyModel,
    tokenizer,
    prompts: Sequence[str],
    prefixes: Sequence[Sequence[int]],
    reward: Reward,
    sampling: Sampling,
    continuations: int = 16,
    batch_size: int = 256,
    progress: str = "continuations",
) -> Tensor:
    """Scores [N, K] of K sampled continuations of each of N states; their mean is the value V* of the state.

    Args:
        policy: continues the responses, at `sampling`'s temperature; the length limit counts the whole response.
        prompts: [N] texts, one for each state.
        prefixes: [N] token ids of the response so far; ids, because a text could be tokenised in another way.
        reward: scores a rollout [B], as in training.
        continuations: K, even, for two halves.
        batch_size: continuations that are sampled at a time.
        progress: name of the progress bar; empty for none.

    Raises:
        InputError: a prefix as long as the limit, or rewards that are not one finite number per response.
    """
    if any(len(prefix) >= sampling.max_new_tokens for prefix in prefixes):
        raise InputError(
            f"states: a prefix is as long as a response may be, {sampling.max_new_tokens} tokens"
        )
    # States with equally many tokens left share a batch, so that it does not wait for its longest row.
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))
    size = max(batch_size // continuations, 1)
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    scores, training = [], policy.training
    policy.eval()
    with merged_adapter(policy.model), nonfinite_probabilities_refused():
        for rows in tqdm(batches, desc=progress, disable=not progress):
            texts = [prompts[i] for i in rows], [prefixes[i] for i in rows]
            rollout = continue_responses(policy.model, tokenizer, *texts, continuations, sampling)
            scores.append(
                score_responses(reward, rollout).cpu().double().reshape(len(rows), continuations)
            )
    policy.train(training)
    return torch.cat(scores)[torch.tensor(order).argsort()]


def state_scores(
    policy: PolicyModel,
    tokenizer,
    rollout: Rollout,
    cuts: Tensor,
    reward: Reward,
    sampling: Sampling,
    **more,
) -> Tensor:
    """Scores [B, C, K] of continuations of each response from each of its cuts; see `monte_carlo_scores`."""
    prompts = [prompt for prompt in rollout.prompts for _ in range(cuts.shape[1])]
    prefixes = prefixes_at(rollout, cuts)
    return monte_carlo_scores(
        policy, tokenizer, prompts, prefixes, reward, sampling, **more
    ).reshape(*cuts.shape, -1)


def halves(scores: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Two independent estimates of V* [...] from scores [..., K]."""
    first, second = (half.cpu().double().mean(-1).numpy() for half in scores.chunk(2, dim=-1))
    return first, second


class EndsForbidden(LogitsProcessor):
    """Forbids the tokens `ends` in each row until it has `least` [B] new tokens."""

    def __init__(self, least: Tensor, ends: Sequence[int]):
        self.least, self.ends, self.prompt_width = least, list(ends), None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.prompt_width is None:
            self.prompt_width = input_ids.shape[1]
        short = (self.least > input_ids.shape[1] - self.prompt_width).to(scores.device)
        ends = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
        ends[self.ends] = True
        return scores.masked_fill(short[:, None] & ends, -torch.inf)


@torch.no_grad()
def continue_responses(
    model,
    tokenizer,
    prompts: Sequence[str],
    prefixes: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
) -> Rollout:
    """Sample `count` responses that begin with each prefix: N·count rows, those of a state next to each other.

    Each state is read once. Every few tokens the responses that have ended leave the batch.
    """
    ends = end_of_text(model, tokenizer)
    known = [
        [*ids, *prefix]
        for ids, prefix in zip(encode_prompts(tokenizer, prompts), prefixes, strict=True)
    ]
    ids, attention_mask = (
        x.to(next(model.parameters()).device) for x in pad(known, tokenizer.pad_token_id, left=True)
    )
    lengths = torch.tensor([len(prefix) for prefix in prefixes]).repeat_interleave(count)
    left, least = sampling.max_new_tokens - lengths, sampling.min_new_tokens - lengths
    copies = [row for row in range(len(ids)) for _ in range(count)]
    past = read_all_but_last(model, ids, attention_mask, copies)
    ids, attention_mask = ids[copies], attention_mask[copies]
    width, rows = ids.shape[1], torch.arange(len(ids))
    new: list[list[int]] = [[] for _ in rows]
    while len(rows):
        there = ids.shape[1] - width  # new tokens of every row that continues
        step, short = min(TOKENS_AT_A_TIME, int(left[rows].max()) - there), least[rows] - there
        forbid = (EndsForbidden(short, ends),) if short.max() > 0 else ()
        warping = (sampling.temperature, sampling.top_k, sampling.top_p)
        step_sampling = SeededSampling(step, *warping, past=past, processors=forbid)
        tokens, mask, ended = sample(model, tokenizer, ids, attention_mask, step_sampling)
        for row, ids_of_row, valid in zip(
            rows.tolist(), tokens[:, ids.shape[1] :], mask, strict=True
        ):
            new[row] += ids_of_row[valid].tolist()
        goes_on = ~ended.cpu() & (torch.tensor([len(new[row]) for row in rows]) < left[rows])
        ids, attention_mask = (
            tokens[goes_on],
            torch.nn.functional.pad(attention_mask, (0, step), value=1)[goes_on],
        )
        rows = rows[goes_on]
        if len(rows) and past is not None:
            past.batch_select_indices(goes_on.nonzero().flatten().to(ids.device))
    # A row may have fewer tokens left than its batch: cut at its own limit, it is as if it was sampled up to there.
    whole = [[*prefixes[i // count], *row[: left[i]]] for i, row in enumerate(new)]
    return from_tokens(tokenizer, [p for p in prompts for _ in range(count)], whole, ends).to(
        tokens.device
    )
