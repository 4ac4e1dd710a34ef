"""Does the critic know which of k next tokens is best? VinePPO (arXiv 2410.01679) asks this question."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as logits

from marlhf_lab.credit.credit import Critic
from marlhf_lab.credit.monte_carlo import Reward, halves, monte_carlo_scores, prefixes_at
from marlhf_lite.evaluation.statistics import Interval, wilson
from marlhf_lite.models.actor_critic import PolicyModel, position_ids
from marlhf_lite.tasks.tokenization import encode_prompts, pad
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
    """At each state draw `alternatives` next tokens from the policy, all different, and ask which leads furthest.

    The first half of the continuations decides which token is best; critic and second half are compared with it. End
    tokens are left out, because a critic has no value after them.

    Args:
        rollout, cuts: the states; cuts [B, C]. The limit of a response leaves at least two tokens at each.
        policy, critic, reward, sampling, continuations, options: see `monte_carlo_scores`.

    Raises:
        InputError: more alternatives than the policy can choose among.
    """
    prompts = [prompt for prompt in rollout.prompts for _ in range(cuts.shape[1])]
    prefixes = prefixes_at(rollout, cuts)
    tokens = next_tokens(policy, tokenizer, prompts, prefixes, sampling, alternatives)
    prompts = [prompt for prompt in prompts for _ in range(alternatives)]
    longer = [
        [*prefix, t] for prefix, row in zip(prefixes, tokens.tolist(), strict=True) for t in row
    ]
    scores = monte_carlo_scores(
        policy, tokenizer, prompts, longer, reward, sampling, continuations, **options
    )
    states = from_tokens(tokenizer, prompts, longer, []).to(next(policy.parameters()).device)
    return compare_rankings(
        _last_values(critic, states).reshape(tokens.shape), scores.reshape(*tokens.shape, -1)
    )


def compare_rankings(values: Tensor, scores: Tensor) -> Ranking:
    """From the critic's values [N, k] and scores [N, k, K] of continuations after each of k tokens."""
    a, b = halves(scores)
    hits = (_same_best(a, x) for x in (np.asarray(values.cpu()), b))
    by_critic, by_half = (wilson(float(right.sum()), len(right)) for right in hits)
    centred_a, centred_b = (x - x.mean(1, keepdims=True) for x in (a, b))
    variance = (centred_a * centred_b).sum() / (len(a) * (a.shape[1] - 1))
    return Ranking(a.shape[1], by_critic, by_half, float(np.sqrt(max(variance, 0.0))))


def _same_best(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[N] probability that a and b [N, k] have the same best token; ties are broken at random."""
    best_a, best_b = (x == x.max(1, keepdims=True) for x in (a, b))
    return (best_a & best_b).sum(1) / (best_a.sum(1) * best_b.sum(1))


@torch.no_grad()
def next_tokens(
    policy: PolicyModel, tokenizer, prompts, prefixes, sampling: Sampling, count: int
) -> Tensor:
    """[N, count] different next tokens of each state, drawn from the policy without replacement; no end tokens."""
    drawn = []
    for rows in torch.arange(len(prefixes)).split(64):
        texts = encode_prompts(tokenizer, [prompts[i] for i in rows])
        ids = [[*text, *prefixes[i]] for text, i in zip(texts, rows.tolist(), strict=True)]
        tokens, mask = (
            x.to(next(policy.parameters()).device)
            for x in pad(ids, tokenizer.pad_token_id, left=True)
        )
        places = position_ids(mask)
        scores = policy.model(
            input_ids=tokens, attention_mask=mask, position_ids=places, logits_to_keep=1
        ).logits
        scores = scores[:, -1].float()
        scores[:, end_of_text(policy.model, tokenizer)] = -torch.inf
        probabilities = _shaped(scores, sampling).softmax(-1)
        if int((probabilities > 0).sum(1).min()) < count:
            raise InputError(
                f"alternatives {count}: --top_k and --top_p leave fewer tokens: raise them, or give fewer"
            )
        drawn.append(torch.multinomial(probabilities, count))
    return torch.cat(drawn)


def _shaped(scores: Tensor, sampling: Sampling) -> Tensor:
    """Logits [N, V] as `generate` shapes them: temperature, top-k, top-p."""
    scores = scores / sampling.temperature
    if sampling.top_k:
        scores = logits.TopKLogitsWarper(min(sampling.top_k, scores.shape[1]))(None, scores)
    return logits.TopPLogitsWarper(sampling.top_p)(None, scores) if sampling.top_p < 1 else scores


@torch.no_grad()
def _last_values(critic: Critic, rollout: Rollout) -> Tensor:
    """[N] the critic's value after the last token of each row."""
    parts = (rollout.select(rows).trim() for rows in torch.arange(len(rollout)).split(256))
    return torch.cat(
        [part.at_last_token(critic(part.tokens, part.attention_mask)) for part in parts]
    )
