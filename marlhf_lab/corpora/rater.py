"""A rater's noisy preference, which all generated corpora share."""

import math
import random
from collections.abc import Callable, Sequence


def rated_pair(
    rng: random.Random,
    prompt: str,
    write: Callable[[], str],
    rate: Callable[[Sequence[str]], Sequence[float]],
    sharpness: float,
) -> dict[str, str]:
    """Two different responses of `write` as a preference pair, labelled by a rater who sometimes errs.

    Bradley and Terry on the scores of `rate`: P(a preferred to b) = sigmoid(sharpness · (score_a − score_b)).
    """
    first = second = write()
    while second == first:
        second = write()
    a, b = rate((first, second))
    chance_of_first = 1 / (1 + math.exp(-sharpness * (a - b)))
    if rng.random() > chance_of_first:
        first, second = second, first
    return {"prompt": prompt, "chosen": first, "rejected": second}
