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
    """Make a preference pair of two different responses, labelled by a rater who sometimes errs.

    The label follows Bradley and Terry's model: P(a preferred to b) = sigmoid(sharpness · (score_a − score_b)).

    Args:
        write: returns a random response to the prompt.
        rate: returns the scores of two responses.
        sharpness: how much a difference of 1 in score counts; the larger it is, the more seldom the rater errs.
    """
    first = second = write()
    while second == first:  # until a response differs
        second = write()
    a, b = rate((first, second))
    chance_of_first = 1 / (1 + math.exp(-sharpness * (a - b)))
    if rng.random() > chance_of_first:
        first, second = second, first
    return {"prompt": prompt, "chosen": first, "rejected": second}
