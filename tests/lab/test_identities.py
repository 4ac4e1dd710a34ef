"""MA-PPO, MA-PPO-start and SAE are one advantage up to terms that are known: for every critic, rule and KL penalty.

Plain loops in double precision prove each identity on random responses, and the library agrees with the loops.
γ = 1, before whitening and clipping. V_k is the critic's value at the start of macro action k, V̄_k their mean in it.
"""

import itertools

import numpy as np
import pytest
import reference_macro as ref
import torch
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lite.config.method import MacroConfig
from marlhf_lite.experiments.named_rules import RULES, make_rule
from marlhf_lite.macro import (
    LargestChange,
    MacroActions,
    Perplexity,
    border_lam,
    gae,
    kl_rewards,
    macro_rewards,
    macro_values,
)
from marlhf_lite.models.loading import load_tokenizer

BETA = 0.3  # large, so that the rewards inside an action matter


def pooled(rewards, values, lengths, sigma, lam):
    """Advantages of macro actions, one for each: MA-PPO with σ equal, MA-PPO-start with σ start."""
    sums = [sum(part) for part in ref.split(rewards, lengths)]
    return ref.gae(sums, ref.pool(values, lengths, sigma), lam=lam)[0]


def segmental(rewards, values, lengths, lam):
    """SAE's advantages of tokens: λ at the last token of each action, 1 at all others."""
    lams = [1.0] * len(rewards)
    for end in np.cumsum(lengths):
        lams[end - 1] = lam
    return ref.gae(rewards, values, lam=lams)[0]


def known_before(rewards, values, lengths):
    """V_k − V(s_t) − (rewards already paid in k), for each token: nothing here depends on token t or on later ones."""
    terms = []
    for paid, inside in zip(ref.split(rewards, lengths), ref.split(values, lengths), strict=True):
        for place, value in enumerate(inside):
            terms.append(inside[0] - value - sum(paid[:place]))
    return terms


def repeated(advantages, lengths):
    """The advantage of its macro action for each token."""
    return np.repeat(advantages, lengths).tolist()


@st.composite
def responses(draw):
    """Rewards and values of 1 to 12 tokens, lengths of macro actions that cover them, and λ."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rewards, values = (rng.normal(size=sum(lengths)).tolist() for _ in range(2))
    return rewards, values, lengths, draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))


@given(responses())
def test_sae_is_the_value_at_the_start_up_to_what_is_known_before_the_token(response):
    rewards, values, lengths, lam = response
    start = repeated(pooled(rewards, values, lengths, "start", lam), lengths)
    expected = np.add(start, known_before(rewards, values, lengths))
    assert segmental(rewards, values, lengths, lam) == pytest.approx(expected.tolist(), abs=1e-12)


@given(responses())
def test_the_mean_is_the_value_at_the_start_with_a_baseline_that_has_read_the_action(response):
    rewards, values, lengths, lam = response
    gaps = np.subtract(ref.pool(values, lengths, "equal"), ref.pool(values, lengths, "start"))
    expected = []
    for k, start in enumerate(pooled(rewards, values, lengths, "start", lam)):
        later = sum((1 - lam) * lam**j * gap for j, gap in enumerate(gaps[k + 1 :]))
        expected.append(start - gaps[k] + later)
    found = pooled(rewards, values, lengths, "equal", lam)
    assert found == pytest.approx(expected, abs=1e-12)


@given(responses())
def test_with_a_constant_critic_the_mean_adds_nothing(response):
    rewards, values, lengths, lam = response
    constant = [values[0]] * len(values)
    mean, start = (pooled(rewards, constant, lengths, s, lam) for s in ("equal", "start"))
    assert mean == pytest.approx(start, abs=1e-12)


# -- the library, with every rule --------------------------------------------------------------------------------------

TEXTS = (
    "Ada has two red mirrors. She wants to sell one of them at four. Is it late?",
    "Take the umbrella.",
    "At one Ben counts the small clocks. They are old, and he paints them.",
)


def rule_on_text(name, seed):
    """Macro actions of a rule on ragged texts, with what the models would say about them."""
    tokenizer = load_tokenizer("tiny-gemma")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    width = max(map(len, ids)) + 2
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in ids])
    tokens = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
    generator = torch.Generator().manual_seed(seed)
    logprobs, reference, values = (torch.randn(mask.shape, generator=generator) for _ in range(3))
    context = {
        "token_ids": tokens,
        "tokenizer": tokenizer,
        "ref_logprobs": -reference.abs(),
        "logprobs": -logprobs.abs(),
        "values": values,
        "step": 0,
        "process": 0,
    }
    rule = make_rule(MacroConfig(termination=name, n="3", lengths="2,3,5"))
    return mask, rule(mask, **context), context


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_library_agrees_for_every_rule(name):
    """Responses of unequal lengths, a KL penalty in the rewards; identities 1 and 2 token by token."""
    mask, macro, context = rule_on_text(name, seed=3)
    check_library(mask, macro, context["logprobs"], context["ref_logprobs"], context["values"])


@pytest.mark.parametrize("seed", range(4))  # odd ones: responses in turns, with holes
def test_the_library_agrees_for_any_boundaries(seed):
    data = ref.Batch(seed)
    starts = ref.starts(data.parts, data.mask)
    macro = MacroActions.from_starts(starts, data.mask)
    check_library(data.mask, macro, data.old_logprobs, data.ref_logprobs, data.old_values)


def check_library(mask, macro, logprobs, reference, values, lam=0.8):
    """The library's SAE, MA-PPO-start and MA-PPO against the identities, in its single precision."""
    penalties = kl_rewards(logprobs, reference, mask, BETA)
    scores = torch.linspace(-1, 1, len(mask))
    tokens = macro.single_tokens
    found = {
        sigma: gae(
            macro_rewards(penalties, scores, macro),
            macro_values(values, macro, sigma),
            macro.mask,
            lam=lam,
        )[0]
        for sigma in ("equal", "start")
    }
    rewards = macro_rewards(penalties, scores, tokens)
    single_values = macro_values(values, tokens)
    lams = tokens.sum(border_lam(macro, lam))
    sae = gae(rewards, single_values, tokens.mask, lam=lams)[0]
    for row in range(len(mask)):
        lengths = macro.lengths[row][macro.mask[row]].tolist()
        valid = tokens.mask[row]
        paid, known = rewards[row][valid].tolist(), single_values[row][valid].tolist()
        start = found["start"][row][macro.mask[row]].tolist()
        expected = np.add(repeated(start, lengths), known_before(paid, known, lengths))
        assert sae[row][valid].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        loop = pooled(paid, known, lengths, "equal", lam)
        assert found["equal"][row][macro.mask[row]].tolist() == pytest.approx(loop, abs=1e-4)


# -- the expected gradient ---------------------------------------------------------------------------------------------

TOKENS = 5
ANSWERS = list(itertools.product((0, 1), repeat=TOKENS))


def small_world(seed):
    """Random functions of a prefix: the chance of a 1, the value, a reward, the reference's log-probability."""
    rng = np.random.default_rng(seed)
    prefixes = [p for n in range(TOKENS + 1) for p in itertools.product((0, 1), repeat=n)]
    names = ("chance", "value", "reward", "reference")
    world = {name: dict(zip(prefixes, rng.normal(size=len(prefixes)))) for name in names}
    world["chance"] = {p: 1 / (1 + np.exp(-x)) for p, x in world["chance"].items()}
    return world


def expected_gradient(world, advantages):
    """By each prefix's logit, summed over all answers: E[Σ_t Â_t ∂ log π(a_t) / ∂ logit]."""
    gradient = dict.fromkeys((a[:t] for a in ANSWERS for t in range(TOKENS)), 0.0)
    for answer, row in zip(ANSWERS, advantages, strict=True):
        chances = [world["chance"][answer[:t]] for t in range(TOKENS)]
        weight = np.prod([p if token else 1 - p for p, token in zip(chances, answer, strict=True)])
        for t, (p, token) in enumerate(zip(chances, answer, strict=True)):
            gradient[answer[:t]] += weight * row[t] * (token - p)
    return np.array([*gradient.values()])


def difference_of_gradients(world, lengths_of, lam):
    """SAE's expected gradient minus that of MA-PPO-start: the largest component, over all prefixes."""
    start, sae = [], []
    for answer in ANSWERS:
        lengths = lengths_of(answer)
        rewards = [world["reward"][answer[: t + 1]] for t in range(TOKENS)]
        values = [world["value"][answer[:t]] for t in range(TOKENS)]
        start.append(repeated(pooled(rewards, values, lengths, "start", lam), lengths))
        sae.append(segmental(rewards, values, lengths, lam))
    gap = expected_gradient(world, sae) - expected_gradient(world, start)
    return np.abs(gap).max()


def lengths_from(begins):
    """Lengths of macro actions; `begins` says of each token whether it begins one. The first token always does."""
    starts = [0] + [t for t in range(1, TOKENS) if begins[t]]
    return np.diff([*starts, TOKENS]).tolist()


def after_a_separator(answer):
    """A token begins an action if the token before it is a 1: it looks back only."""
    return lengths_from([t > 0 and answer[t - 1] == 1 for t in range(TOKENS)])


def at_a_separator(answer):
    """A token begins an action if it is a 1 itself: the rule reads the token that it judges."""
    return lengths_from([token == 1 for token in answer])


def by_perplexity(world):
    """The library's rule: a token begins an action if it raises the perplexity, so the rule reads this token."""

    def lengths_of(answer):
        mask = torch.ones(1, TOKENS, dtype=torch.bool)
        told = [[-abs(world["reference"][answer[: t + 1]]) for t in range(TOKENS)]]
        macro = Perplexity()(mask, ref_logprobs=torch.tensor(told))
        return macro.lengths[0][macro.mask[0]].tolist()

    return lengths_of


def by_value_change(world):
    """The library's rule: it ranks the changes of the critic's values in the whole answer, so it reads later tokens."""

    def lengths_of(answer):
        values = torch.tensor([[world["value"][answer[:t]] for t in range(TOKENS)]])
        macro = LargestChange("values", 2)(torch.ones(1, TOKENS, dtype=torch.bool), values=values)
        return macro.lengths[0][macro.mask[0]].tolist()

    return lengths_of


def after_a_jump(world):
    """A token begins an action if the critic's value just before it has moved by more than 0.5: known before it."""

    def lengths_of(answer):
        values = [world["value"][answer[:t]] for t in range(TOKENS)]
        return lengths_from([t > 0 and abs(values[t] - values[t - 1]) > 0.5 for t in range(TOKENS)])

    return lengths_of


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.integers(1, TOKENS))
def test_rules_that_look_back_leave_the_expected_gradient_unchanged(seed, lam, n):
    world = small_world(seed)
    fixed = ref.fixed_lengths(TOKENS, n)
    for lengths_of in (lambda answer: fixed, after_a_separator, after_a_jump(world)):
        assert difference_of_gradients(world, lengths_of, lam) < 1e-12


@pytest.mark.parametrize("lam", [0.5, 0.95, 1.0])
def test_rules_that_read_the_token_do_not(lam):
    """The counterexample: the identity holds, and the expected gradients differ."""
    world = small_world(seed=1)
    for lengths_of in (at_a_separator, by_perplexity(world), by_value_change(world)):
        assert difference_of_gradients(world, lengths_of, lam) > 1e-3
