"""Values by Monte Carlo and what critics see, against values by enumeration and closed forms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import PROMPTS, fails
from transformers import GemmaConfig, GemmaForCausalLM

from marlhf_lab.credit import monte_carlo
from marlhf_lab.credit.credit import (
    credit_seen,
    explainable,
    explained_by_quarter,
    token_noise,
    token_values,
)
from marlhf_lab.credit.monte_carlo import (
    continue_responses,
    even_cuts,
    monte_carlo_scores,
    state_scores,
)
from marlhf_lab.credit.ranking import compare_rankings, next_tokens, rank_next_tokens
from marlhf_lite.models.actor_critic import PolicyModel, position_ids
from marlhf_lite.training.rollout import Sampling, from_tokens, generate

PAD, END, LIMIT = 0, 1, 3
SAMPLING = Sampling(LIMIT, temperature=0.8, top_k=0)
WORTH = torch.tensor(
    [[0.0, 0.3, -1.0, 2.0, 0.5], [0.0, 0.1, 1.5, -0.5, -2.0], [0.0, 1.0, -1.0, 0.7, 0.2]]
)


class Letters:
    """A tokenizer of five ids: 0 pads, 1 ends; a prompt is its letters, c, d and e."""

    pad_token_id, eos_token_id = PAD, END

    def __call__(self, prompts, **options):
        return {"input_ids": [["abcde".find(letter) for letter in prompt] for prompt in prompts]}

    def decode(self, ids):
        return ""  # it has no space, and takes none off

    def batch_decode(self, rows, skip_special_tokens=True, **options):
        return [
            "".join("abcde"[i] for i in row if i > END or not skip_special_tokens) for row in rows
        ]


@pytest.fixture(scope="module")
def policy():
    """A random Gemma over five tokens, in float64."""
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 5,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    ends = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None}
    config = GemmaConfig(**sizes, **heads, **ends, initializer_range=0.6)
    return PolicyModel(GemmaForCausalLM(config).double().eval())


def reward(rollout):
    """What each token is worth at its place: order matters."""
    rows = rollout.response_ids
    return (WORTH[torch.arange(rows.shape[1]), rows] * rollout.mask).sum(1)


@torch.no_grad()
def value(policy, prompt, prefix):
    """V* of a state by enumeration of all its continuations."""
    if len(prefix) == LIMIT or (prefix and prefix[-1] == END):
        return sum(WORTH[place, token].item() for place, token in enumerate(prefix))
    tokens = torch.tensor([Letters()([prompt])["input_ids"][0] + prefix])
    p = (
        policy.model(tokens, position_ids=position_ids(torch.ones_like(tokens))).logits[0, -1] / 0.8
    ).softmax(-1)
    return sum(p[token].item() * value(policy, prompt, [*prefix, token]) for token in range(5))


STATES = [("cd", [2, 3]), ("c", []), ("ede", [4]), ("c", [4]), ("cd", []), ("e", [3, 3])]


def test_monte_carlo_finds_the_values_of_enumeration_in_the_order_given(policy):
    torch.manual_seed(0)
    prompts, prefixes = zip(*STATES, strict=True)
    scores = monte_carlo_scores(
        policy,
        Letters(),
        prompts,
        prefixes,
        reward,
        SAMPLING,
        continuations=600,
        batch_size=1200,
        progress="",
    )
    truth = torch.tensor([value(policy, *state) for state in STATES], dtype=torch.float64)
    assert scores.shape == (6, 600) and truth.std() > 0.3
    assert ((scores.mean(1) - truth) / (scores.std(1) / 600**0.5)).abs().max() < 4


def test_continuations_keep_the_minimum_of_the_whole_response(policy):
    """Each state has its own number of tokens left until a response may end."""
    prompts, prefixes = zip(*STATES, strict=True)
    torch.manual_seed(0)
    free = continue_responses(policy.model, Letters(), prompts, prefixes, 50, SAMPLING)
    some = continue_responses(
        policy.model, Letters(), prompts, prefixes, 50, replace(SAMPLING, min_new_tokens=2)
    )
    assert some.lengths.min() == 3 == LIMIT and free.lengths.min() == 1
    ends = some.response_ids == END
    assert not ends[:, :2].any() and ends[:, 2].any()


def responses(policy, prompts, count):
    """A rollout of `count` responses of two tokens to each prompt."""
    rows = torch.randint(
        2, 5, (count * len(prompts), 2), generator=torch.Generator().manual_seed(2)
    ).tolist()
    return from_tokens(Letters(), prompts * count, rows, [END])


def test_an_oracle_sees_all_and_a_constant_nothing(policy):
    rollout = responses(policy, ["c"], 10)
    cuts = torch.tensor([[0, 1]]).expand(len(rollout), 2)
    torch.manual_seed(3)
    scores = state_scores(
        policy, Letters(), rollout, cuts, reward, SAMPLING, continuations=400, progress=""
    )
    truth = torch.tensor(
        [
            [value(policy, "c", prefix[:t]) for t in (0, 1)]
            for prefix in rollout.response_ids.tolist()
        ]
    )
    assert credit_seen(truth, scores).mean == pytest.approx(1, abs=0.1)
    assert credit_seen(0.3 * truth + 7, scores).mean == pytest.approx(0.3, abs=0.03)
    assert credit_seen(torch.full_like(truth, 2.0), scores)[:3] == (0, 0, 0)


def synthetic(rows=400, cuts=4, k=4, seen=1.0, noise=0.0, spread=3.0, seed=0):
    """Values and scores of a walk with unit steps: V = seen·V* + noise, scores V* + spread."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(rows, cuts, generator=generator, dtype=torch.float64).cumsum(1)
    scores = truth[..., None] + spread * torch.randn(
        rows, cuts, k, generator=generator, dtype=torch.float64
    )
    return seen * truth + noise * torch.randn(
        truth.shape, generator=generator, dtype=torch.float64
    ), scores


@pytest.mark.parametrize(("seen", "noise"), [(1.0, 0.0), (0.4, 2.0), (0.0, 1.0)])
def test_the_share_seen_is_not_biased_by_noise_of_critic_or_continuations(seen, noise):
    found = [
        credit_seen(*synthetic(seen=seen, noise=noise, seed=seed), n=200) for seed in range(30)
    ]
    means = np.array([interval.mean for interval in found])
    assert abs(means.mean() - seen) < 4 * means.std() / 30**0.5 + 0.01
    assert np.mean([i.low <= seen <= i.high for i in found]) > 0.75
    assert np.isnan(credit_seen(torch.randn(5, 2), torch.ones(5, 2, 4)).mean), (
        "values that do not vary"
    )


def test_explained_variance_by_quarter_against_a_loop():
    torch.manual_seed(0)
    lengths = [4, 7, 9, 12, 5, 8]
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    values, scores = torch.randn(6, 12, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    found = explained_by_quarter(values, scores, mask, n=10)
    places = [(b, t, 4 * t // length) for b, length in enumerate(lengths) for t in range(length)]
    for quarter in range(4):
        rows, columns = zip(*((b, t) for b, t, q in places if q == quarter), strict=True)
        y, v = scores[list(rows)].numpy(), values[rows, columns].numpy()
        assert found[quarter].mean == pytest.approx(1 - np.var(y - v) / np.var(y))
    perfect = explained_by_quarter(scores[:, None].expand(6, 12), scores, mask)
    assert [i[:3] for i in perfect] == [(1, 1, 1)] * 4
    assert np.isnan(explained_by_quarter(values, torch.ones(6), mask)[0].mean)


def test_explainable_is_the_share_of_variance_before_the_cut():
    _, scores = synthetic(rows=4000, cuts=3, spread=2.0)
    for cut, interval in enumerate(explainable(scores)):
        assert interval.mean == pytest.approx((cut + 1) / (cut + 1 + 4), abs=0.03)


def test_token_noise_of_critic_and_truth():
    still = torch.zeros(3000, 4, dtype=torch.float64)
    scores = still[..., None] + 3 * torch.randn(3000, 4, 6, dtype=torch.float64)
    critic, truth = token_noise(still + 0.5 * torch.randn_like(still), scores)
    assert critic.mean == pytest.approx(0.5, rel=0.05) and truth.mean < 0.4  # 3 / √6 would be 1.2
    values, scores = synthetic(rows=3000)
    critic, truth = token_noise(values, scores)
    assert critic.mean == pytest.approx(0.5**0.5, rel=0.05) and truth.mean == pytest.approx(
        0.5**0.5, rel=0.15
    )


def test_rankings():
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(2000, 5, generator=generator, dtype=torch.float64)
    scores = truth[..., None] + 0.1 * torch.randn(
        2000, 5, 4, generator=generator, dtype=torch.float64
    )
    found = compare_rankings(truth, scores)
    assert (
        found.critic.mean > 0.9
        and found.halves.mean > 0.9
        and found.spread == pytest.approx(1, rel=0.05)
    )
    assert compare_rankings(-truth, scores).critic.mean < 0.05
    chance = compare_rankings(torch.randn(truth.shape, generator=generator), scores).critic
    assert chance.low < 0.2 < chance.high
    order = torch.randperm(5, generator=generator)
    assert compare_rankings(truth[:, order], scores[:, order]).critic == found.critic


def test_ties_of_a_ranking_are_broken_at_random():
    values, nothing = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]] * 30), torch.zeros(30, 5, 4)
    found = compare_rankings(values, nothing)
    assert found.critic.mean == pytest.approx(1 / 5) and found.halves.mean == pytest.approx(1 / 5)
    # best: 0 or 1; 1, 2 or 3
    first, second = torch.tensor([3.0, 3, 1, 0, 0]), torch.tensor([2.0, 7, 7, 7, 0])
    found = compare_rankings(values.flip(1), torch.stack([first, second], 1).expand(30, 5, 2))
    assert found.halves.mean == pytest.approx(1 / 6) and found.critic.mean == pytest.approx(1 / 2)


def test_ranking_of_an_oracle_end_to_end(policy):
    torch.manual_seed(4)
    prompts = ["c", "cd", "ede", "d"]
    rollout = responses(policy, prompts, 6)

    def oracle(tokens, attention_mask):
        """V* after the one token behind a prompt, at the last place of each row."""
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(tokens, attention_mask, strict=True)]
        last = [value(policy, "".join("abcde"[i] for i in row[:-1]), row[-1:]) for row in rows]
        return torch.tensor(last, dtype=torch.float64)[:, None].expand(tokens.shape)

    given = (
        policy,
        oracle,
        Letters(),
        rollout,
        torch.zeros(24, 1, dtype=torch.long),
        reward,
        SAMPLING,
    )
    found = rank_next_tokens(*given, alternatives=3, continuations=200, progress="")
    assert found.critic.mean > 0.8 and found.alternatives == 3
    tokens = next_tokens(policy, Letters(), ["c"] * 50, [[]] * 50, SAMPLING, 3)
    assert all(len(set(row)) == 3 and END not in row for row in tokens.tolist())
    first = (
        next_tokens(policy, Letters(), ["c"] * 4000, [[]] * 4000, SAMPLING, 1)
        .flatten()
        .bincount(minlength=5)
    )
    ids = torch.tensor([[2]])
    logits = policy.model(ids).logits[0, -1].detach() / 0.8
    logits[END] = -torch.inf
    assert (first / 4000 - logits.softmax(-1)).abs().max() < 0.03


def test_states_of_a_rollout(policy):
    rollout = from_tokens(Letters(), ["c", "de"], [[2, 3, 4, 1], [4, 4]], [END])
    cuts = even_cuts(rollout.lengths, places=1)
    assert cuts.tolist() == [[0, 2, 3], [0, 0, 1]]
    assert monte_carlo.prefixes_at(rollout, cuts) == [[], [2, 3], [2, 3, 4], [], [], [4]]

    def places(tokens, mask):
        return (mask.cumsum(1) - 1).float()

    assert token_values(places, rollout).tolist() == [[0, 1, 2, 3], [1, 2, 0, 0]]


def test_what_cannot_be_sampled_or_scored_is_refused(policy):
    states, how = (
        (policy, Letters(), ["c"]),
        {"sampling": SAMPLING, "continuations": 4, "progress": ""},
    )
    fails(lambda: monte_carlo_scores(*states, [[2, 3, 4]], reward, **how), "prefix")
    fails(
        lambda: monte_carlo_scores(
            *states, [[]], lambda r: torch.full((len(r),), torch.nan), **how
        ),
        "scores",
    )
    fails(lambda: next_tokens(*states, [[]], SAMPLING, 5), "alternatives 5")


def test_responses_continue_as_if_they_were_read_anew(roles, tokenizer):
    """With top-k 1 there is one continuation: that of `generate`, whatever was read together and in how many steps."""
    greedy, prompts = Sampling(30, top_k=1), PROMPTS[:4]
    whole = generate(roles.policy.model, tokenizer, prompts, greedy)
    ids = [row[m].tolist() for row, m in zip(whole.response_ids, whole.mask, strict=True)]
    cuts = [0, 3, 11, 17]
    prefixes = [row[: min(cut, len(row) - 1)] for row, cut in zip(ids, cuts, strict=True)]
    again = continue_responses(roles.policy.model, tokenizer, prompts, prefixes, 2, greedy)
    assert max(map(len, ids)) > 20
    found = [row[m].tolist() for row, m in zip(again.response_ids, again.mask, strict=True)]
    assert found == [row for row in ids for _ in range(2)]
    assert again.ended.tolist() == whole.ended.repeat_interleave(2).tolist()
