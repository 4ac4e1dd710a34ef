"""Does the critic know which of k next tokens is best? VinePPO (arXiv 2410.01679) asks this question."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as logits

from marlhf_lab.credit.credit import Critic
from marlhf_lab.credit.monte_carlo import Reward, halves, monte_carlo_scores, prefixes_at, repeated
from marlhf_lite.evaluation.statistics import Interval, wilson
from marlhf_lite.models.actor_critic import PolicyModel, position_ids
from marlhf_lite.tasks.padding import pad
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import Rollout, Sampling, end_of_text, from_tokens
from marlhf_lite.utils.errors import InputError


@dataclass(frozen=True)
class Ranking:
    """The share of states in which the token with the highest V* is ranked first."""

    alternatives: int  # k tokens per state: chance is 1 / k
    critic: Interval  # by the critic's value of the state after the token
    halves: Interval  # by the second half of the continuations: the best that so few can do
    spread: float  # standard deviation of V* between the tokens of a state, without its noise


def rank_next_tokens(
    policy: PolicyModel,
    critic: Critic,
    tokenizer,
    rollout: Rollout,
    cuts: Tensor,
    reward: Reward,
    sampling: Sampling,
    alternatives: int = 5,
    continuations: int = 16,
    **options,
) -> Ranking:
    """At each state draw `alternatives` different next tokens from the policy, and ask which has the highest V*.

    The first half of the continuations decides which token is best; the choices of the critic and of the second half
    are compared with it. End tokens are left out, because a critic has no value after them.

    Args:
        rollout, cuts: the states are the cuts [B, C] of these responses. At each of them the limit on the length allows
            two more tokens: the one that is drawn, and one to continue with.
        policy, reward, sampling, continuations, options: see `monte_carlo_scores`.
        critic: gives the values.

    Raises:
        InputError: in a state, top-k and top-p leave fewer tokens than `alternatives`.
    """
    # 1. Draw tokens [B·C, k] at the states.
    prompts_of_states = repeated(rollout.prompts, cuts.shape[1])
    prefixes = prefixes_at(rollout, cuts)
    tokens = next_tokens(policy, tokenizer, prompts_of_states, prefixes, sampling, alternatives)
    # 2. The states after each of these tokens: B·C·k of them, with those that follow the same state next to each other.
    prompts = repeated(prompts_of_states, alternatives)
    longer = []
    for prefix, tokens_of_state in zip(prefixes, tokens.tolist(), strict=True):
        longer += [[*prefix, token] for token in tokens_of_state]
    # 3. Continue them, and ask the critic.
    scores = monte_carlo_scores(
        policy, tokenizer, prompts, longer, reward, sampling, continuations, **options
    )
    # The empty list: no token ends a response, since these go on.
    states = from_tokens(tokenizer, prompts, longer, []).to(next(policy.parameters()).device)
    values = _last_values(critic, states)
    return compare_rankings(values.reshape(tokens.shape), scores.reshape(*tokens.shape, -1))


def compare_rankings(values: Tensor, scores: Tensor) -> Ranking:
    """The ranking by the critic's values [N, k] and by scores [N, k, K] of continuations after each of k tokens."""
    a, b = halves(scores)  # [N, k] each
    states, alternatives = a.shape
    # `a` decides which token is best. The critic and the other half each try to find it.
    hits_of_critic = _chance_of_same_best(a, np.asarray(values.cpu()))
    hits_of_half = _chance_of_same_best(a, b)
    # The variance of V* between the tokens of a state. The noise of the two halves is independent, so the mean of their
    # product has none. It is divided by k − 1, because the mean of each state was subtracted.
    product = (a - a.mean(1, keepdims=True)) * (b - b.mean(1, keepdims=True))
    variance = product.sum() / (states * (alternatives - 1))
    return Ranking(
        alternatives=alternatives,
        critic=wilson(float(hits_of_critic.sum()), states),
        halves=wilson(float(hits_of_half.sum()), states),
        spread=float(np.sqrt(max(variance, 0.0))),  # noise may bring the product below 0
    )


def _chance_of_same_best(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[N] probability that a and b [N, k] choose the same token, if each draws one of its highest at random."""
    is_best_in_a = a == a.max(1, keepdims=True)
    is_best_in_b = b == b.max(1, keepdims=True)
    return (is_best_in_a & is_best_in_b).sum(1) / (is_best_in_a.sum(1) * is_best_in_b.sum(1))


@torch.no_grad()
def next_tokens(
    policy: PolicyModel, tokenizer, prompts, prefixes, sampling: Sampling, count: int
) -> Tensor:
    """[N, count] different next tokens of each state, drawn from the policy without replacement; no end tokens.

    prompts, prefixes: [N] texts, and token ids of the responses so far. Raises `InputError` if top-k and top-p leave
    fewer than `count` possible tokens in a state.
    """
    device = next(policy.parameters()).device
    drawn = []
    for rows in torch.arange(len(prefixes)).split(64):
        prompt_ids = encode_prompts(tokenizer, [prompts[row] for row in rows])
        states = []
        for row, ids in zip(rows.tolist(), prompt_ids, strict=True):
            states.append([*ids, *prefixes[row]])
        # Padding is on the left, so the last column has the last token of every row.
        tokens, mask = pad(states, tokenizer.pad_token_id, left=True)
        mask = mask.to(device)
        output = policy.model(
            input_ids=tokens.to(device),
            attention_mask=mask,
            position_ids=position_ids(mask),
            logits_to_keep=1,
        )
        scores = output.logits[:, -1].float()
        scores[:, end_of_text(policy.model, tokenizer)] = -torch.inf
        probabilities = _shaped(scores, sampling).softmax(-1)
        fewest = int((probabilities > 0).sum(1).min())
        if fewest < count:
            raise InputError(
                f"alternatives {count}: --top_k and --top_p leave fewer tokens: raise them, or give fewer"
            )
        drawn.append(torch.multinomial(probabilities, count))
    return torch.cat(drawn)


def _shaped(scores: Tensor, sampling: Sampling) -> Tensor:
    """Logits [N, V] after temperature, top-k (0: all tokens) and top-p (1: all tokens), as `generate` applies them."""
    scores = scores / sampling.temperature
    if sampling.top_k:
        scores = logits.TopKLogitsWarper(min(sampling.top_k, scores.shape[1]))(None, scores)
    if sampling.top_p < 1:
        scores = logits.TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores


@torch.no_grad()
def _last_values(critic: Critic, rollout: Rollout) -> Tensor:
    """[N] the critic's value after the last token of each row."""
    values = []
    for rows in torch.arange(len(rollout)).split(256):
        part = rollout.select(rows).trim()
        values.append(part.at_last_token(critic(part.tokens, part.attention_mask)))
    return torch.cat(values)
