"""The game tiny-guess, and what is known of it by dynamic programming, against whole games through `macro`."""

import random
import statistics

import pytest
import reference_macro as ref
import torch

from marlhf_lab.credit.guesses import (
    GUESS,
    START,
    TOKENS,
    Estimator,
    credit,
    guesses,
    outcomes,
    turn_end_bias,
    value,
    value_of_guess,
    visits,
)
from marlhf_lite.macro import FixedNGram, MacroActions, Turn, gae, macro_rewards, macro_values
from marlhf_lite.tasks.tiny_guess.game import (
    HIGHEST,
    GuessGame,
    binary_search,
    gold_scores,
    hidden_number,
    make_guess,
    make_prompt,
    random_game,
    read_guess,
    score,
)

SMALL = (3, 6, 3)  # four numbers are left after three turns: three turns more at most
SINGLE = (1,) * TOKENS
ESTIMATORS = [
    Estimator(SINGLE, seen=0.4),
    Estimator(SINGLE, 0.95**0.2),
    Estimator((5, 3), seen=0.7),
    Estimator((8,), seen=1.0),
    Estimator((2, 6), 0.8, "start", 0.5),
]


def games(state, done=(), p=1.0):
    """All games from here: probability, and for each turn the state, the guess and the reward."""
    for guess in guesses(state):
        for q, reward, to in outcomes(state, guess):
            turns, share = (*done, (state, guess, reward)), p * q / len(guesses(state))
            yield from games(to, turns, share) if to else [(share, turns)]


def advantages(turns, estimator):
    """By the library: the advantage of the first guess of a game, with two tokens of the environment between turns."""
    mask, values, lengths = [], [], []
    for state, guess, _ in turns:
        mask += [True] * TOKENS + [False] * 2
        before, behind = (estimator.seen * x for x in (value(state), value_of_guess(state, guess)))
        values += [before] * (GUESS + 1) + [behind] * (TOKENS - GUESS - 1) + [9.0] * 2
        lengths += estimator.lengths
    mask, values = torch.tensor([mask]), torch.tensor([values])
    macro = MacroActions.from_starts(ref.starts([lengths], mask), mask)
    rewards = macro_rewards(
        torch.zeros_like(values), torch.tensor([[reward for *_, reward in turns]]), macro
    )
    pooled = macro_values(values, macro, estimator.sigma)
    return macro.broadcast(gae(rewards, pooled, macro.mask, lam=estimator.lam)[0])[0, GUESS].item()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_mean_and_variance_are_those_of_all_games(estimator):
    every = list(games(SMALL))
    assert sum(p for p, _ in every) == pytest.approx(1)
    assert value(SMALL) == pytest.approx(sum(p * turns[-1][2] for p, turns in every))
    for guess in guesses(SMALL):
        mine = [(p * len(guesses(SMALL)), turns) for p, turns in every if turns[0][1] == guess]
        estimates = [(p, advantages(turns, estimator)) for p, turns in mine]
        mean = sum(p * x for p, x in estimates)
        variance = sum(p * (x - mean) ** 2 for p, x in estimates)
        assert estimator.of_guess(SMALL, guess) == pytest.approx((mean, variance), abs=1e-5)
        assert value_of_guess(SMALL, guess) == pytest.approx(
            sum(p * turns[-1][2] for p, turns in mine)
        )


def test_what_is_known_in_closed_form():
    assert value(START, best=True) == pytest.approx(
        statistics.mean(score(binary_search(n)) for n in range(1, 17))
    )
    assert visits()[START] == 1 and sum(visits().values()) < 6
    exact = {"seen": 1.0}
    for estimator, kept in (
        (Estimator(SINGLE, 1.0), 1),  # no bias, whatever the critic
        (Estimator(SINGLE, **exact), 1),
        (Estimator((8,), sigma="start", **exact), 1),
        (Estimator((8,), **exact), 6 / 8),  # the mean of the values looks past the guess
        (Estimator((5, 3), **exact), 1 / 3),
    ):
        found = credit(estimator)
        assert (found.kept, found.cosine, found.bias) == pytest.approx((kept, 1, 0), abs=1e-6)
    blind = [credit(Estimator(*how)) for how in ((SINGLE,), ((8,),), (SINGLE, 1.0))]
    assert (
        blind[0].kept < blind[1].kept < blind[2].kept
        and blind[0].noise > blind[1].noise > blind[2].noise
    )


@pytest.mark.parametrize("sigma", ["equal", "start"])
def test_who_decides_where_a_turn_ends(sigma):
    """The gradient of the logit that chooses the tokens behind a guess, from the advantages that turns get."""
    before, p, v, q = GUESS + 1, 0.3, 0.5, 0.62
    gradient = 0.0
    for k, share, slope in ((2, p, 1 - p), (6, 1 - p, -p)):  # slope: of log π(k) in the logit of p
        values = torch.tensor([[v] * before + [q] * k])
        macro = Turn()(torch.ones_like(values, dtype=torch.bool))
        estimate = gae(torch.tensor([[q]]), macro_values(values, macro, sigma), macro.mask)[
            0
        ].item()
        gradient += share * slope * estimate
    # the truth: what stands behind is worth nothing
    expected = turn_end_bias(q - v, (2, 6), p) if sigma == "equal" else 0.0
    assert gradient == pytest.approx(expected, abs=1e-7)
    assert sigma == "start" or gradient > 0.005


def test_games_are_scored_by_what_was_said():
    rng = random.Random(0)
    hidden = [hidden_number(make_prompt(rng)) for _ in range(4000)]
    assert all(abs(hidden.count(n) / 4000 - 1 / HIGHEST) < 0.02 for n in range(1, HIGHEST + 1))
    for _ in range(50):
        prompt = make_prompt(rng)
        texts = random_game(rng, prompt)
        turns = len(texts[::2])
        found = read_guess(texts[-1]) == hidden_number(prompt)
        expected = binary_search(hidden_number(prompt)) - (turns if found else 7)
        assert gold_scores([prompt], ["".join(texts)]) == [expected] and turns <= 6
    assert gold_scores([prompt], ["I give up"]) == [binary_search(hidden_number(prompt)) - 7]


def test_an_answer_that_the_policy_writes_itself_finds_nothing():
    """Two numbers in a turn are no guess, though the words of the environment stand between them."""
    prompt = make_prompt(random.Random(0))
    hidden = hidden_number(prompt)
    both = f"{make_guess(hidden % 16 + 1)} Higher.{make_guess(hidden)}"
    for turn in range(1, 7):
        texts, (state,), done = [], GuessGame().reset([prompt]), False
        while not done:
            texts.append(both if state.turns + 1 == turn else " No idea.")
            (observation,), (reward,), (done,) = GuessGame().step([state], texts[-1:])
            texts += [] if done else [observation]
        assert reward == 0 and gold_scores([prompt], ["".join(texts)]) == [
            binary_search(hidden) - 7
        ]


def test_what_is_no_guess_costs_a_turn():
    for text in ("", "seven", "7 or 8", "17", "0", "9" * 5000, "٣"):
        game = GuessGame()
        (state,) = game.reset(["Game"])
        (observation,), (reward,), (done,) = game.step([state], [text])
        assert (reward, done, state.turns) == (0.0, False, 1)
        assert observation == " Say one number from 1 to 16."
    assert read_guess(make_guess(12)) == 12 == read_guess("12, yes, 12")
    assert FixedNGram(5)(torch.ones(1, TOKENS, dtype=torch.bool)).spans() == [[(0, 5), (5, 8)]]
