"""What each estimator makes of a guess in `tiny-guess`, against the truth: bias and variance, by dynamic programming.

The policy guesses at random among the numbers that no answer rules out, as at the start of training. A state is the
interval that is left and the turns that were taken; its value V(s), and the value Q(s, g) after a guess, are exact.
The critic predicts the share `seen` of them. A turn has `TOKENS` tokens, and number `GUESS` (from 0) is the guess: the
critic says V(s) up to and with this token, and Q(s, g) after it. There is no KL, and γ = 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import sqrt

import numpy as np

from marlhf_lite.tasks.tiny_guess.game import HIGHEST, MAX_TURNS, score

TOKENS, GUESS = 8, 5
State = tuple[int, int, int]  # lowest and highest number that is left, turns that were taken
START: State = (1, HIGHEST, 0)


def outcomes(state: State, guess: int) -> Iterator[tuple[float, float, State | None]]:
    """What a guess may lead to: probability, reward, and the next state, None if the game ends."""
    low, high, turns = state
    count, last = high - low + 1, turns + 1 == MAX_TURNS
    yield 1 / count, score(turns + 1), None
    for first, final in ((low, guess - 1), (guess + 1, high)):
        if first <= final:
            yield (final - first + 1) / count, 0.0, None if last else (first, final, turns + 1)


def guesses(state: State) -> range:
    """The numbers that are left."""
    return range(state[0], state[1] + 1)


@lru_cache(None)
def value(state: State, best: bool = False) -> float:
    """V(s) of random guesses; with `best`, of the best ones, which halve the interval."""
    values = [value_of_guess(state, guess, best) for guess in guesses(state)]
    return max(values) if best else sum(values) / len(values)


def value_of_guess(state: State, guess: int, best: bool = False) -> float:
    """Q(s, g): the expected score after this guess."""
    return sum(
        p * (reward + (value(to, best) if to else 0.0)) for p, reward, to in outcomes(state, guess)
    )


def visits(start: State = START) -> dict[State, float]:
    """How often random games reach each state in which the policy guesses."""
    shares = {start: 1.0}
    for turns in range(start[2], MAX_TURNS):
        for state in [state for state in shares if state[2] == turns]:
            for p, _, to in (way for guess in guesses(state) for way in outcomes(state, guess)):
                if to:
                    shares[to] = shares.get(to, 0.0) + shares[state] * p / len(guesses(state))
    return shares


@dataclass(frozen=True)
class Estimator:
    """GAE over the macro actions of a turn, which have these lengths in tokens; `sigma` is equal or start."""

    lengths: tuple[int, ...]
    lam: float = 0.95
    sigma: str = "equal"
    seen: float = 0.0  # the share of the values that the critic predicts

    def of_guess(self, state: State, guess: int) -> tuple[float, float]:
        """Mean and variance of the advantage that this guess gets."""
        action = next(i for i in range(len(self.lengths)) if sum(self.lengths[: i + 1]) > GUESS)
        mean, square = self._moments(
            state, guess, *self._advantage(self._values(state, guess), action)
        )
        return mean, max(square - mean**2, 0.0)

    def _values(self, state: State, guess: int) -> list[float]:
        """V(ω) of each macro action of a turn."""
        before, after = self.seen * value(state), self.seen * value_of_guess(state, guess)
        tokens = [before] * (GUESS + 1) + [after] * (TOKENS - GUESS - 1)
        parts = [tokens[sum(self.lengths[:i]) :][:n] for i, n in enumerate(self.lengths)]
        return [part[0] if self.sigma == "start" else sum(part) / len(part) for part in parts]

    def _advantage(self, values: list[float], step: int) -> tuple[float, float]:
        """Â of a macro action as (a, b) in a + b (R + V(ω') + λ Â'): reward of the turn, and V and Â of the next one.

        Inside a turn δ is the difference of two values.
        """
        fade = self.lam ** (len(values) - 1 - step)
        inner = [self.lam**i * (b - a) for i, (a, b) in enumerate(pairwise(values[step:]))]
        return sum(inner) - fade * values[-1], fade

    def _moments(self, state: State, guess: int, known: float, fade: float) -> tuple[float, float]:
        """Mean and mean square of a + b (R + V(ω') + λ Â') over what the guess may lead to."""
        mean = square = 0.0
        for p, reward, to in outcomes(state, guess):
            first, second = self._next(to) if to else (0.0, 0.0)
            fixed = known + fade * reward
            mean += p * (fixed + fade * first)
            square += p * (fixed**2 + 2 * fixed * fade * first + fade**2 * second)
        return mean, square

    @lru_cache(None)  # noqa: B019 - estimators are few and small
    def _next(self, state: State) -> tuple[float, float]:
        """Mean and mean square of V(ω) + λ Â of the first macro action of a turn, over random guesses."""
        moments = []
        for guess in guesses(state):
            values = self._values(state, guess)
            known, fade = self._advantage(values, 0)
            moments.append(
                self._moments(state, guess, values[0] + self.lam * known, self.lam * fade)
            )
        mean, square = np.mean(moments, axis=0)
        return mean, square


@dataclass(frozen=True)
class Credit:
    """An estimator against the truth, over all guesses of random games.

    All numbers compare the guesses of a state, because what its guesses share has no gradient.
    """

    kept: float  # slope of the estimate on the true advantage: the share of the credit that is left
    cosine: float  # of the mean estimate with the true advantage
    bias: float  # root mean square of mean estimate / kept - truth, over that of the truth
    noise: float  # root of the mean variance / kept, over the root mean square of the truth


def credit(estimator: Estimator, start: State = START) -> Credit:
    """Compare an estimator with the true advantages Q(s, g) - V(s)."""
    rows = []
    for state, share in visits(start).items():
        estimates = np.array([estimator.of_guess(state, guess) for guess in guesses(state)])
        true = [value_of_guess(state, guess) - value(state) for guess in guesses(state)]
        rows += zip(
            [share / len(true)] * len(true),
            true,
            *(estimates - [estimates[:, 0].mean(), 0]).T,
            strict=True,
        )
    weight, truth, mean, variance = np.array(rows).T
    across, size = float(weight @ (truth * mean)), float(weight @ truth**2)
    kept = across / size
    bias, noise = weight @ (mean / kept - truth) ** 2, weight @ variance
    return Credit(
        kept, across / sqrt(size * (weight @ mean**2)), sqrt(bias / size), sqrt(noise / size) / kept
    )


def turn_end_bias(
    advantage: float, behind: tuple[int, int], p: float = 0.5, before: int = GUESS + 1
) -> float:
    """Bias of turns if the policy decides how much it says after a guess; without bias it is 0.

    The critic is exact, and values have equal weights. A turn with `before` tokens up to and with the guess and b
    after it has V(ω) = (before V + b Q) / (before + b), so its advantage is the share before / (before + b) of Q - V.
    With b one of two numbers `behind`, the first with probability p, the gradient with respect to the logit of p is
    p (1 - p) (Q - V) times the difference of the two shares: after a good guess shorter turns are taught, after a bad
    one longer ones. With the value of the first token alone (`sigma` start) both shares are 1.
    """
    first, second = (before / (before + b) for b in behind)
    return p * (1 - p) * advantage * (first - second)
