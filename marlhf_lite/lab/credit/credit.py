"""How much of each token's credit a critic sees, measured against values by Monte Carlo.

The value V*(s_t) of a state (a prompt with the first t tokens of a response) is the mean score of its continuations
under the policy. It is estimated from sampled continuations, as VinePPO does (arXiv 2410.01679). Two independent halves
of the continuations tell what varies between states from what is noise of the estimate: a product of two halves has no
noise in its mean, a square has.

Shapes: B responses, T response tokens, C cuts of a response, K continuations of a state. Scores are the reward's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.generation import logits_process as logits

from marlhf_lite.evaluation.agreement import wilson
from marlhf_lite.evaluation.sampling import CachedSampling, read_all_but_last
from marlhf_lite.evaluation.statistics import Interval, percentile_interval
from marlhf_lite.models.actor_critic import PolicyModel, position_ids
from marlhf_lite.tasks.tokenization import encode_prompts, pad
from marlhf_lite.training.metrics import quarters
from marlhf_lite.training.rewards import check_scores
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
RESAMPLES = 2000  # of bootstraps over responses
TOKENS_AT_A_TIME = 8  # between two looks at which responses have ended
Critic = Callable[[Tensor, Tensor], Tensor]  # (tokens [B, L], attention mask [B, L]) -> values [B, L]

# -- states -----------------------------------------------------------------------------------------------------------


def even_cuts(lengths: Tensor, places: int = 3) -> Tensor:
    """Cuts [B, 1 + 2·places] of responses: 0, then pairs of neighbours (t, t+1) at `places` evenly spread positions.

    A cut t is the state before token t. `lengths` [B] count tokens; every response needs at least 2. Raises
    `InputError` for shorter ones.
    """
    if (lengths < 2).any():
        row = int((lengths < 2).nonzero()[0])
        raise InputError(f"cuts: response {row} has {int(lengths[row])} tokens: leave out those with fewer than 2")
    shares = torch.arange(1, places + 1, device=lengths.device) / (places + 1)
    starts = (lengths[:, None] * shares).long().clamp(min=0).minimum(lengths[:, None] - 2)
    pairs = torch.stack([starts, starts + 1], dim=2).flatten(1)
    return torch.cat([torch.zeros_like(lengths)[:, None], pairs], dim=1)


def prefixes_at(rollout: Rollout, cuts: Tensor) -> list[list[int]]:
    """The first t response tokens of each response, for each of its cuts t: B·C lists, response by response.

    `cuts` [B, C] lie between 0 and the response's last token. Raises `InputError` for others.
    """
    if cuts.dim() != 2 or len(cuts) != len(rollout):
        raise InputError(f"cuts: shape {tuple(cuts.shape)} for {len(rollout)} responses: give [responses, cuts]")
    wrong = (cuts < 0) | (cuts >= rollout.lengths.to(cuts.device)[:, None])
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        last = int(rollout.lengths[row]) - 1
        raise InputError(f"cuts: {int(cuts[row, place])} for response {row}: its tokens are numbered 0 to {last}")
    ids = rollout.response_ids.tolist()
    return [row[:cut] for row, own in zip(ids, cuts.tolist(), strict=True) for cut in own]


@torch.no_grad()
def token_values(critic: Critic, rollout: Rollout) -> Tensor:
    """The critic's V(s_t) before each response token: [B, T], 0 on padding."""
    values = []
    for rows in torch.arange(len(rollout)).split(64):
        part = rollout.select(rows).trim()
        found = part.before_tokens(critic(part.tokens, part.attention_mask))
        values.append(rollout.widen(found.masked_fill(~part.mask, 0.0)))
    return torch.cat(values)


# -- values by Monte Carlo --------------------------------------------------------------------------------------------


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
        policy: who continues, at `sampling`'s temperature; the length limit counts the whole response.
        prompts: [N] texts, one for each state.
        prefixes: [N] token ids of the response so far; ids, for a text could be cut into other tokens.
        reward: scores a rollout [B], as in training.
        continuations: K, an even number from 4 up: two halves of at least two each.
        batch_size: continuations that are sampled at a time.
        progress: name of the progress bar; empty for none.

    Raises:
        InputError: too few continuations, no states, a prefix that leaves no token to sample, a bad reward.
    """
    check_continuations(continuations)
    ends = end_of_text(policy.model, tokenizer)
    _check_states(prompts, prefixes, sampling.max_new_tokens, ends)
    # States with as many tokens left come together, so that a batch does not wait for its longest row.
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))
    size = max(batch_size // continuations, 1)
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    scores, training = [], policy.training
    policy.eval()
    with merged_adapter(policy.model), nonfinite_probabilities_refused():
        for rows in tqdm(batches, desc=progress, disable=not progress):
            given = [prompts[i] for i in rows], [prefixes[i] for i in rows]
            rollout = continue_responses(policy.model, tokenizer, *given, continuations, sampling)
            scores.append(_scores(reward, rollout).reshape(len(rows), continuations))
    policy.train(training)
    return torch.cat(scores)[torch.tensor(order).argsort()]


def check_continuations(continuations: int) -> None:
    """Raise `InputError` unless there are two halves of at least two continuations each."""
    if continuations < 4 or continuations % 2:
        raise InputError(f"continuations {continuations}: give an even number from 4 up: two halves, two or more each")


def _check_states(prompts: Sequence[str], prefixes: Sequence[Sequence[int]], limit: int, ends: Sequence[int]) -> None:
    if not len(prefixes) or len(prompts) != len(prefixes):
        raise InputError(f"states: {len(prompts)} prompts and {len(prefixes)} prefixes: give one of each, at least one")
    for row, prefix in enumerate(prefixes):
        if len(prefix) >= limit:
            raise InputError(f"states: prefix {row} has {len(prefix)} tokens, the limit of a response is {limit}")
        if len(prefix) and prefix[-1] in ends:
            raise InputError(f"states: prefix {row} ends with an end token: nothing follows it")


@torch.no_grad()
def continue_responses(
    model, tokenizer, prompts: Sequence[str], prefixes: Sequence[Sequence[int]], count: int, sampling: Sampling
) -> Rollout:
    """Sample `count` responses that begin with each prefix: N·count rows, a state's next to each other.

    A state is read once. Responses that have ended leave the batch every few tokens, so that the others do not wait.
    """
    ends = end_of_text(model, tokenizer)
    given = [[*ids, *prefix] for ids, prefix in zip(encode_prompts(tokenizer, prompts), prefixes, strict=True)]
    ids, attention_mask = (x.to(next(model.parameters()).device) for x in pad(given, tokenizer.pad_token_id, left=True))
    left = torch.tensor([sampling.max_new_tokens - len(prefix) for prefix in prefixes]).repeat_interleave(count)
    copies = [row for row in range(len(ids)) for _ in range(count)]
    past = read_all_but_last(model, ids, attention_mask, copies)
    ids, attention_mask = ids[copies], attention_mask[copies]
    width, rows = ids.shape[1], torch.arange(len(ids))
    new: list[list[int]] = [[] for _ in rows]
    while len(rows):
        step = min(TOKENS_AT_A_TIME, int(left[rows].max()) - (ids.shape[1] - width))
        some = CachedSampling(step, sampling.temperature, sampling.top_k, sampling.top_p, past)
        tokens, mask, ended = sample(model, tokenizer, ids, attention_mask, some)
        for row, found, valid in zip(rows.tolist(), tokens[:, ids.shape[1] :], mask, strict=True):
            new[row] += found[valid].tolist()
        goes_on = ~ended.cpu() & (torch.tensor([len(new[row]) for row in rows]) < left[rows])
        ids, attention_mask = tokens[goes_on], torch.nn.functional.pad(attention_mask, (0, step), value=1)[goes_on]
        rows = rows[goes_on]
        if len(rows) and past is not None:
            past.batch_select_indices(goes_on.nonzero().flatten().to(ids.device))
    # A row may have fewer tokens left than its batch: cut at its own limit, it has the law of sampling up to there.
    whole = [[*prefixes[i // count], *row[: left[i]]] for i, row in enumerate(new)]
    return from_tokens(tokenizer, [p for p in prompts for _ in range(count)], whole, ends).to(tokens.device)


def _scores(reward: Reward, rollout: Rollout) -> Tensor:
    """[B] float64 on the CPU. Raises `InputError` for scores that are not one finite number each."""
    found = Rollout(**vars(rollout) | {"scores": reward(rollout)})
    check_scores(found)
    return found.scores.double().cpu()


def state_scores(
    policy: PolicyModel, tokenizer, rollout: Rollout, cuts: Tensor, reward: Reward, sampling: Sampling, **how
) -> Tensor:
    """Scores [B, C, K] of continuations of each response from each of its cuts; see `monte_carlo_scores`."""
    prompts = [prompt for prompt in rollout.prompts for _ in range(cuts.shape[1])]
    prefixes = prefixes_at(rollout, cuts)
    return monte_carlo_scores(policy, tokenizer, prompts, prefixes, reward, sampling, **how).reshape(*cuts.shape, -1)


def halves(scores: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Two independent estimates of V* [...] from scores [..., K]. Raises `InputError` for too few continuations."""
    check_continuations(scores.shape[-1])
    first, second = (half.double().mean(-1).cpu().numpy() for half in scores.chunk(2, dim=-1))
    return first, second


# -- what the critic sees ---------------------------------------------------------------------------------------------


def credit_seen(values: Tensor, scores: Tensor, n: int = RESAMPLES) -> Interval:
    """The share s = Cov(V_t − V_0, V*_t − V*_0) / Var(V*_t − V*_0) of what happened since the first cut.

    1: the critic notices all of it; 0: it is blind; noise of V does not change s. The variance comes from the product
    of two halves of the continuations, so their noise does not enter it. Other first cuts than the start of the
    response are possible: with (t, t+1) it is the share of a single token's credit.

    Args:
        values: [B, C] the critic's V at the cuts, C >= 2.
        scores: [B, C, K] scores of continuations, see `state_scores`.
        n: resamples of the bootstrap over responses.

    Returns:
        The share with its interval; NaN where the values' variance is not above its noise: sample more continuations.
    """
    change, a, b = (_change(np.asarray(x, dtype=float)) for x in (values.cpu(), *halves(scores)))
    truth = (a + b) / 2
    columns = (np.ones_like(change), change, truth, a, b, change * truth, a * b)
    return cluster_bootstrap(_per_row(columns), _slope, n)


def _change(x: np.ndarray) -> np.ndarray:
    return x[:, 1:] - x[:, :1]


def _slope(sums: np.ndarray) -> np.ndarray:
    n, x, y, a, b, xy, ab = np.moveaxis(sums, -1, 0)
    variance = ab / n - a * b / n**2
    return np.where(variance > 0, (xy / n - x * y / n**2) / np.where(variance > 0, variance, 1.0), np.nan)


def explained_by_quarter(values: Tensor, scores: Tensor, mask: Tensor, n: int = RESAMPLES) -> list[Interval]:
    """1 − Var(score − V_t) / Var(score) over the tokens of each quarter of the responses: four intervals.

    values: [B, T]; scores: [B] of the same responses; mask: [B, T]. The bootstrap is over responses. NaN where all
    scores are equal.
    """
    score = np.asarray(scores.cpu(), dtype=float)[:, None] * np.ones(mask.shape)
    error, place, found = score - np.asarray(values.cpu(), dtype=float), quarters(mask).cpu().numpy(), []
    for quarter in range(4):
        inside = (place == quarter).astype(float)
        columns = [inside * x for x in (np.ones_like(error), error, error**2, score, score**2)]
        found.append(cluster_bootstrap(_per_row(columns), _explained, n))
    return found


def _explained(sums: np.ndarray) -> np.ndarray:
    n, error, error2, score, score2 = np.moveaxis(sums, -1, 0)
    n = np.where(n > 0, n, np.nan)
    variance = score2 / n - (score / n) ** 2
    flat = ~(variance > 1e-12 * score2 / n)
    return np.where(flat, np.nan, 1 - (error2 / n - (error / n) ** 2) / np.where(flat, 1.0, variance))


def explainable(scores: Tensor) -> list[Interval]:
    """Var(V*) / Var(score) at each cut: the explained variance of a critic that knows V*, the most there can be.

    scores: [B, C, K]; C intervals. The rest of the scores' variance is decided after the cut.
    """
    (a, b), mean = halves(scores), np.asarray(scores.double().mean(-1).cpu())
    square = np.asarray(scores.double().square().mean(-1).cpu())
    columns = np.stack([np.ones_like(a), a, b, a * b, mean, square], axis=-1)
    return [cluster_bootstrap(columns[:, cut], _variance_share) for cut in range(a.shape[1])]


def _variance_share(sums: np.ndarray) -> np.ndarray:
    n, a, b, ab, y, y2 = np.moveaxis(sums, -1, 0)
    variance = y2 / n - (y / n) ** 2
    return np.where(variance > 0, (ab / n - a * b / n**2) / np.where(variance > 0, variance, 1.0), np.nan)


def token_noise(values: Tensor, scores: Tensor, n: int = RESAMPLES) -> tuple[Interval, Interval]:
    """ν: the root of half the mean squared step from a token to the next, of V and of V*, in the unit of the scores.

    Errors of a critic that are independent from token to token have standard deviation ν, if V* hardly moves. V* moves
    by what a token earns; the second ν says how much that is.

    Args:
        values: [B, 2·P] the critic's V at P pairs of neighbouring cuts, as those of `even_cuts` after the first.
        scores: [B, 2·P, K] scores of continuations there.
    """
    critic, a, b = (
        np.diff(np.asarray(x, dtype=float).reshape(len(values), -1, 2), axis=2)[..., 0]
        for x in (values.cpu(), *halves(scores))
    )
    steps = {"critic": critic**2, "truth": a * b}
    return tuple(cluster_bootstrap(_per_row((np.ones_like(x), x)), _half_root, n) for x in steps.values())


def _half_root(sums: np.ndarray) -> np.ndarray:
    return np.sqrt(np.clip(sums[..., 1] / sums[..., 0] / 2, 0.0, None))


def cluster_bootstrap(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], n: int = RESAMPLES) -> Interval:
    """A statistic of summed columns, with the percentile interval when rows are drawn again.

    sums: [P, M] what each of P prompts or responses adds to M columns; statistic: [..., M] -> [...].
    """
    if not len(sums):
        raise InputError("bootstrap: no responses: give at least one, better 30 or more")
    weights = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), n)
    return percentile_interval(statistic(sums.sum(0)), statistic(weights @ sums))


def _per_row(columns: Sequence[np.ndarray]) -> np.ndarray:
    """[B, M] sums over the tokens of a response, from M columns [B, T]."""
    return np.stack([column.sum(1) for column in columns], axis=-1)


# -- which of k tokens is best ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """In what share of states the token with the highest V* is ranked first."""

    alternatives: int  # k tokens a state: chance is 1 / k
    critic: Interval  # by the critic's value of the state after the token
    halves: Interval  # by a second half of the continuations: what this many of them can tell
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
    **how,
) -> Ranking:
    """At each state draw `alternatives` next tokens from the policy, all different, and ask which leads furthest.

    The first half of the continuations says which token is best, and critic and second half are compared with it. End
    tokens are no alternatives, for a critic has no value after them. VinePPO (arXiv 2410.01679) asks critics this.

    Args:
        rollout, cuts: the states; cuts [B, C]. The limit of a response leaves at least two tokens at each.
        policy, critic, reward, sampling, continuations, how: see `monte_carlo_scores`.

    Raises:
        InputError: fewer than 2 alternatives, or more than the policy can choose among.
    """
    if alternatives < 2:
        raise InputError(f"alternatives {alternatives}: give at least 2 tokens to choose among")
    prompts = [prompt for prompt in rollout.prompts for _ in range(cuts.shape[1])]
    prefixes = prefixes_at(rollout, cuts)
    tokens = next_tokens(policy, tokenizer, prompts, prefixes, sampling, alternatives)
    prompts = [prompt for prompt in prompts for _ in range(alternatives)]
    longer = [[*prefix, t] for prefix, row in zip(prefixes, tokens.tolist(), strict=True) for t in row]
    scores = monte_carlo_scores(policy, tokenizer, prompts, longer, reward, sampling, continuations, **how)
    states = from_tokens(tokenizer, prompts, longer, []).to(next(policy.parameters()).device)
    return compare_rankings(_last_values(critic, states).reshape(tokens.shape), scores.reshape(*tokens.shape, -1))


def compare_rankings(values: Tensor, scores: Tensor) -> Ranking:
    """From the critic's values [N, k] and scores [N, k, K] of continuations after each of k tokens."""
    a, b = halves(scores)
    best, k = a.argmax(1), a.shape[1]
    found = (x.argmax(1) == best for x in (np.asarray(values.cpu()), b))
    by_critic, by_half = (wilson(int(right.sum()), len(right)) for right in found)
    centred_a, centred_b = (x - x.mean(1, keepdims=True) for x in (a, b))
    variance = (centred_a * centred_b).sum() / (len(a) * (k - 1))
    return Ranking(k, by_critic, by_half, float(np.sqrt(max(variance, 0.0))))


@torch.no_grad()
def next_tokens(policy: PolicyModel, tokenizer, prompts, prefixes, sampling: Sampling, count: int) -> Tensor:
    """[N, count] different next tokens of each state, drawn from the policy one after the other; no end tokens."""
    found = []
    for rows in torch.arange(len(prefixes)).split(64):
        texts = encode_prompts(tokenizer, [prompts[i] for i in rows])
        ids = [[*text, *prefixes[i]] for text, i in zip(texts, rows.tolist(), strict=True)]
        tokens, mask = (x.to(next(policy.parameters()).device) for x in pad(ids, tokenizer.pad_token_id, left=True))
        places = position_ids(mask)
        scores = policy.model(input_ids=tokens, attention_mask=mask, position_ids=places, logits_to_keep=1).logits
        scores = scores[:, -1].float()
        scores[:, end_of_text(policy.model, tokenizer)] = -torch.inf
        probabilities = _shaped(scores, sampling).softmax(-1)
        if int((probabilities > 0).sum(1).min()) < count:
            raise InputError(f"alternatives {count}: --top_k and --top_p leave fewer tokens: raise them, or ask less")
        found.append(torch.multinomial(probabilities, count))
    return torch.cat(found)


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
    return torch.cat([part.at_last_token(critic(part.tokens, part.attention_mask)) for part in parts])
