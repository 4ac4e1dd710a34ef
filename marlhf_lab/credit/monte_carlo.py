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
from marlhf_lite.tasks.padding import pad
from marlhf_lite.tasks.tokenization import encode_prompts
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
TOKENS_AT_A_TIME = 8  # after so many tokens the responses that have ended leave the batch


def even_cuts(lengths: Tensor, places: int = 3) -> Tensor:
    """Cuts [B, 1 + 2·places] of responses: 0, then pairs of neighbours (t, t+1) at `places` evenly spread positions.

    A cut t is the state before token t. `lengths` [B] count tokens; every response has at least 2.
    """
    shares = torch.arange(1, places + 1, device=lengths.device) / (places + 1)
    # At most length − 2, so that t + 1, the second cut of a pair, is a position of the response, too.
    starts = (lengths[:, None] * shares).long().minimum(lengths[:, None] - 2)
    pairs = torch.stack([starts, starts + 1], dim=2).flatten(1)
    return torch.cat([torch.zeros_like(lengths)[:, None], pairs], dim=1)


def prefixes_at(rollout: Rollout, cuts: Tensor) -> list[list[int]]:
    """The first t response tokens of each response, for each of its cuts t [B, C]: B·C lists, response by response."""
    prefixes = []
    for ids, cuts_of_response in zip(rollout.response_ids.tolist(), cuts.tolist(), strict=True):
        prefixes += [ids[:cut] for cut in cuts_of_response]
    return prefixes


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
        policy: continues the responses.
        prompts: [N] texts, one for each state.
        prefixes: [N] token ids of the response so far; ids, because a text could be tokenised in another way.
        reward: scores a rollout [B], as in training.
        sampling: its limits on the length count the whole response, with the prefix.
        continuations: K, an even number, because `halves` splits them into two.
        batch_size: continuations that are sampled at a time.
        progress: name of the progress bar; empty for none.

    Raises:
        InputError: a prefix as long as the limit, or rewards that are not one finite number per response.
    """
    if any(len(prefix) >= sampling.max_new_tokens for prefix in prefixes):
        raise InputError(
            f"states: a prefix is as long as a response may be, {sampling.max_new_tokens} tokens"
        )
    # A batch samples until its last row has ended. So states with about equally many tokens left share a batch.
    by_length = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))
    states_at_a_time = max(batch_size // continuations, 1)
    batches = [
        by_length[start : start + states_at_a_time]
        for start in range(0, len(by_length), states_at_a_time)
    ]
    scores = []
    was_training = policy.training
    policy.eval()
    with merged_adapter(policy.model), nonfinite_probabilities_refused():
        for states in tqdm(batches, desc=progress, disable=not progress):
            rollout = continue_responses(
                policy.model,
                tokenizer,
                [prompts[i] for i in states],
                [prefixes[i] for i in states],
                continuations,
                sampling,
            )
            scores_of_batch = score_responses(reward, rollout).cpu().double()
            scores.append(scores_of_batch.reshape(len(states), continuations))
    policy.train(was_training)
    in_the_order_given = torch.tensor(by_length).argsort()
    return torch.cat(scores)[in_the_order_given]


def state_scores(
    policy: PolicyModel,
    tokenizer,
    rollout: Rollout,
    cuts: Tensor,
    reward: Reward,
    sampling: Sampling,
    **more,
) -> Tensor:
    """Scores [B, C, K] of continuations of each response from each of its cuts [B, C].

    `more` and the other arguments are those of `monte_carlo_scores`.
    """
    cuts_of_response = cuts.shape[1]
    prompts = repeated(rollout.prompts, cuts_of_response)
    prefixes = prefixes_at(rollout, cuts)
    scores = monte_carlo_scores(policy, tokenizer, prompts, prefixes, reward, sampling, **more)
    return scores.reshape(*cuts.shape, -1)


def repeated(items: Sequence[str], times: int) -> list[str]:
    """Each item `times` times, with the copies of an item next to each other."""
    copies = []
    for item in items:
        copies += [item] * times
    return copies


def halves(scores: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Two independent estimates of V* [...] from scores [..., K]: means of the first and of the second K/2."""
    first, second = (half.cpu().double().mean(-1).numpy() for half in scores.chunk(2, dim=-1))
    return first, second


class EndsForbidden(LogitsProcessor):
    """Forbids the tokens `ends` in each row until it has `least` [B] new tokens.

    One object serves one call of `generate`: the width of its first input is that of the prompts.
    """

    def __init__(self, least: Tensor, ends: Sequence[int]):
        self.least = least
        self.ends = list(ends)
        self.prompt_width: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.prompt_width is None:
            self.prompt_width = input_ids.shape[1]
        new_tokens = input_ids.shape[1] - self.prompt_width
        too_short = (self.least > new_tokens).to(scores.device)
        is_end = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
        is_end[self.ends] = True
        return scores.masked_fill(too_short[:, None] & is_end, -torch.inf)


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

    To save work, the model reads each state only once, and every few tokens the responses that have ended leave the
    batch.

    Args:
        model: the policy's language model.
        prompts, prefixes: [N] texts, and token ids of the responses so far, each shorter than a response may be.
        sampling: its limits count tokens of the whole response, with the prefix.
    """
    # 1. The model reads each state once, without its last token, which `generate` reads. Then each state is copied
    # `count` times.
    ends = end_of_text(model, tokenizer)
    device = next(model.parameters()).device
    states = [
        [*prompt_ids, *prefix]
        for prompt_ids, prefix in zip(encode_prompts(tokenizer, prompts), prefixes, strict=True)
    ]
    ids, attention_mask = pad(states, tokenizer.pad_token_id, left=True)
    ids = ids.to(device)
    attention_mask = attention_mask.to(device)
    state_of_row = torch.arange(len(states)).repeat_interleave(count).tolist()
    # The cache of keys and values, with its rows repeated; None if every state is a single token.
    past = read_all_but_last(model, ids, attention_mask, state_of_row)
    ids = ids[state_of_row]
    attention_mask = attention_mask[state_of_row]
    width_of_states = ids.shape[1]
    # 2. How many tokens each row may have after its prefix, and how many it must have.
    prefix_lengths = torch.tensor([len(prefix) for prefix in prefixes]).repeat_interleave(count)
    most = sampling.max_new_tokens - prefix_lengths
    least = sampling.min_new_tokens - prefix_lengths
    # 3. Sample a few tokens at a time, for the rows that have not ended: `rows` are their numbers.
    rows = torch.arange(len(ids))
    new_tokens: list[list[int]] = [[] for _ in rows]
    while len(rows):
        sampled = ids.shape[1] - width_of_states  # so far, in every row that continues
        step = min(TOKENS_AT_A_TIME, int(most[rows].max()) - sampled)
        # How many more tokens each row must have before an end token; if 0 or less, an end token may come at once.
        still_required = least[rows] - sampled
        processors = ()
        if still_required.max() > 0:
            processors = (EndsForbidden(still_required, ends),)
        step_sampling = SeededSampling(
            step,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            past=past,
            processors=processors,
        )
        tokens, valid, ended = sample(model, tokenizer, ids, attention_mask, step_sampling)
        added = tokens[:, ids.shape[1] :]
        for row, added_to_row, valid_in_row in zip(rows.tolist(), added, valid, strict=True):
            new_tokens[row] += added_to_row[valid_in_row].tolist()
        length = torch.tensor([len(new_tokens[row]) for row in rows])
        goes_on = ~ended.cpu() & (length < most[rows])
        # If a row goes on, `step` tokens were sampled, and none of its own is padding.
        ids = tokens[goes_on]
        attention_mask = torch.nn.functional.pad(attention_mask, (0, step), value=1)[goes_on]
        rows = rows[goes_on]
        if len(rows) and past is not None:
            past.batch_select_indices(goes_on.nonzero().flatten().to(ids.device))
    # 4. A step is as long as the row with the largest limit needs, so other rows may be longer than their own limit.
    # Cut at its limit, a row is as if it had been sampled only up to there.
    responses = []
    for row, state in enumerate(state_of_row):
        responses.append([*prefixes[state], *new_tokens[row][: most[row]]])
    whole = from_tokens(tokenizer, repeated(prompts, count), responses, ends)
    return whole.to(tokens.device)
