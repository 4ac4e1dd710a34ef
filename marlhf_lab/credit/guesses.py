"""What each estimator makes of a guess in `tiny-guess`, against the truth: bias and variance, by dynamic programming.

The policy guesses at random among the numbers that no answer rules out, as at the start of training. A state is the
interval that is left and the turns that were taken; its value V(s), and the value Q(s, g) after a guess, are exact.
The critic predicts the share `seen` of them. A turn has `TOKENS` tokens, and number `GUESS` (from 0) is the guess: the
critic says V(s) up to and with this token, and Q(s, g) after it. There is no KL, and γ = 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import sqrt

import numpy as np

from marlhf_lite.tasks.tiny_guess.game import HIGHEST, MAX_TURNS, score

TOKENS = 8  # of a turn
GUESS = 5  # the token of a turn, from 0, that is the guess
State = tuple[int, int, int]  # lowest and highest number that is left, turns that were taken
START: State = (1, HIGHEST, 0)


def outcomes(state: State, guess: int) -> Iterator[tuple[float, float, State | None]]:
    """Yield each outcome of a guess: its probability, its reward, and the next state, or None if the game ends."""
    low, high, turns = state
    count = high - low + 1
    is_last_turn = turns + 1 == MAX_TURNS
    yield 1 / count, score(turns + 1), None  # the guess is right
    # The number is below the guess, or above it.
    for first, last in ((low, guess - 1), (guess + 1, high)):
        if first <= last:
            next_state = None if is_last_turn else (first, last, turns + 1)
            yield (last - first + 1) / count, 0.0, next_state


def guesses(state: State) -> range:
    """The numbers that are left."""
    lowest, highest, _ = state
    return range(lowest, highest + 1)


@lru_cache(None)
def value(state: State, best: bool = False) -> float:
    """V(s), the expected score of random guesses; if `best`, of the best guesses, which halve the interval."""
    values = [value_of_guess(state, guess, best) for guess in guesses(state)]
    return max(values) if best else sum(values) / len(values)


def value_of_guess(state: State, guess: int, best: bool = False) -> float:
    """Q(s, g): the expected score after this guess. The guesses that follow are random; if `best`, the best ones."""
    expected = 0.0
    for probability, reward, next_state in outcomes(state, guess):
        later = value(next_state, best) if next_state else 0.0
        expected += probability * (reward + later)
    return expected


def visits(start: State = START) -> dict[State, float]:
    """How often random games reach each state in which the policy guesses: state -> probability."""
    shares = {start: 1.0}
    for turns in range(start[2], MAX_TURNS):
        states_of_turn = [state for state in shares if state[2] == turns]
        for state in states_of_turn:
            count = len(guesses(state))  # the policy guesses each of them equally often
            for guess in guesses(state):
                for probability, _, next_state in outcomes(state, guess):
                    if next_state:
                        reached = shares[state] * probability / count
                        shares[next_state] = shares.get(next_state, 0.0) + reached
    return shares


@dataclass(frozen=True)
class Estimator:
    """GAE over the macro actions of a turn.

    The advantage of a macro action is known + fade · (R + V(ω') + λ Â'). R is the turn's reward; V(ω') and Â' are value
    and advantage of the next turn's first macro action, both 0 if the game ends. `known` depends only on the values of
    this turn's macro actions; `fade` is λ^k if k macro actions follow in the turn.
    """

    lengths: tuple[int, ...]  # of a turn's macro actions, in tokens; together they are `TOKENS`
    lam: float = 0.95
    sigma: str = "equal"  # the value of a macro action is the mean over its tokens; "start": that of its first token
    seen: float = 0.0  # the share of the values that the critic predicts

    def of_guess(self, state: State, guess: int) -> tuple[float, float]:
        """Mean and variance of the advantage that this guess gets."""
        known, fade = self._known_and_fade(
            self._values_of_actions(state, guess), self._action_with_the_guess()
        )
        mean, mean_square = self._moments(state, guess, known, fade)
        return mean, max(mean_square - mean**2, 0.0)  # rounding may bring it below 0

    def _action_with_the_guess(self) -> int:
        """Which macro action of a turn, from 0, has the token `GUESS`."""
        ends = accumulate(self.lengths)
        return next(action for action, end in enumerate(ends) if end > GUESS)

    def _values_of_actions(self, state: State, guess: int) -> list[float]:
        """V(ω) of each macro action of a turn with this guess, as the critic predicts it."""
        before = self.seen * value(state)
        after = self.seen * value_of_guess(state, guess)
        of_tokens = [before] * (GUESS + 1) + [after] * (TOKENS - GUESS - 1)
        values = []
        start = 0
        for length in self.lengths:
            inside = of_tokens[start : start + length]
            values.append(inside[0] if self.sigma == "start" else sum(inside) / len(inside))
            start += length
        return values

    def _known_and_fade(self, values: list[float], action: int) -> tuple[float, float]:
        """`known` and `fade` of macro action number `action` in a turn whose actions have these values.

        The advantage is the sum of λ^k δ over the actions k = 0, 1, … from this one on. Inside a turn there is no
        reward, so δ is the difference of two values. The last action's δ is R + V(ω') − its value: only its value is
        known.
        """
        fade = self.lam ** (len(values) - 1 - action)
        known = 0.0
        for k, (value_now, value_next) in enumerate(pairwise(values[action:])):
            known += self.lam**k * (value_next - value_now)
        return known - fade * values[-1], fade

    def _moments(self, state: State, guess: int, known: float, fade: float) -> tuple[float, float]:
        """Mean and mean square of known + fade · (R + V(ω') + λ Â') over what the guess may lead to."""
        mean = 0.0
        mean_square = 0.0
        for probability, reward, next_state in outcomes(state, guess):
            # X = V(ω') + λ Â' is random, because it depends on the next guesses. Its mean is m, its mean square m2.
            m, m2 = self._moments_of_turn(next_state) if next_state else (0.0, 0.0)
            fixed = known + fade * reward
            mean += probability * (fixed + fade * m)
            # the mean of (fixed + fade · X)²
            mean_square += probability * (fixed**2 + 2 * fixed * fade * m + fade**2 * m2)
        return mean, mean_square

    @lru_cache(None)  # noqa: B019 - estimators are few and small
    def _moments_of_turn(self, state: State) -> tuple[float, float]:
        """Mean and mean square of V(ω) + λ Â of the first macro action of a turn, over random guesses."""
        moments = []
        for guess in guesses(state):
            values = self._values_of_actions(state, guess)
            known, fade = self._known_and_fade(values, 0)
            # V(ω) + λ Â = V(ω) + λ (known + fade · …)
            moments.append(
                self._moments(state, guess, values[0] + self.lam * known, self.lam * fade)
            )
        mean, mean_square = np.mean(moments, axis=0)
        return mean, mean_square


@dataclass(frozen=True)
class Credit:
    """An estimator against the truth, over all guesses of random games.

    All numbers compare the guesses of a state, because what its guesses share has no gradient.
    """

    kept: float  # slope of the estimate on the true advantage: the share of the credit that is left
    cosine: float  # of the mean estimate with the true advantage
    # The estimate is divided by `kept` before it is compared with the truth; both are in units of the truth's root mean
    # square.
    bias: float  # root mean square of (mean estimate / kept − truth)
    noise: float  # root of the estimate's mean variance, over `kept`


def credit(estimator: Estimator, start: State = START) -> Credit:
    """Compare an estimator with the true advantages Q(s, g) - V(s), over all guesses of games from `start`."""
    # 1. A row for each guess in each state: how often random games make it, its true advantage, and the estimate's
    # mean and variance. Only the guesses of a state are compared with each other, so the mean over a state's guesses is
    # subtracted from their means.
    rows = []
    for state, share in visits(start).items():
        estimates = np.array([estimator.of_guess(state, guess) for guess in guesses(state)])
        mean_of_state = estimates[:, 0].mean()
        for guess, (mean, variance) in zip(guesses(state), estimates, strict=True):
            truth = value_of_guess(state, guess) - value(state)
            rows.append((share / len(estimates), truth, mean - mean_of_state, variance))
    weight, truth, mean, variance = np.array(rows).T
    # 2. Moments over all guesses, each weighed by how often it is made.
    product = float(weight @ (truth * mean))
    square_of_truth = float(weight @ truth**2)
    square_of_mean = weight @ mean**2
    kept = product / square_of_truth
    square_of_bias = weight @ (mean / kept - truth) ** 2
    return Credit(
        kept=kept,
        cosine=product / sqrt(square_of_truth * square_of_mean),
        bias=sqrt(square_of_bias / square_of_truth),
        noise=sqrt((weight @ variance) / square_of_truth) / kept,
    )


def turn_end_bias(
    advantage: float, behind: tuple[int, int], p: float = 0.5, before: int = GUESS + 1
) -> float:
    """A bias of macro actions that are whole turns, if the policy decides how much it says after a guess.

    The critic is exact, and values have equal weights. If a turn has `before` tokens up to and with the guess, and b
    after it, then V(ω) = (before V + b Q) / (before + b), so its advantage is the share before / (before + b) of Q - V.
    Let the policy choose b among the two numbers `behind`, the first with probability p. Then the gradient with respect
    to the logit of p, which is returned, is p (1 - p) (Q - V) times the difference of the two shares. It should be 0,
    because b does not change the score. But after a good guess shorter turns are taught, after a bad one longer ones.
    With the value of the first token alone (`sigma` start) both shares are 1, and there is no bias.

    advantage: Q - V of the guess.
    """
    first_share, second_share = (before / (before + b) for b in behind)
    return p * (1 - p) * advantage * (first_share - second_share)
