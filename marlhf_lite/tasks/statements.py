"""What generated corpora share: sentences with open slots, written and read back, and a rater's noisy preference."""

import math
import random
import re
from collections.abc import Callable, Sequence

SLOT = re.compile(r"\{(\w+)\}")


def slots(template: str) -> tuple[str, ...]:
    """Names of the open slots of a template, left to right."""
    return tuple(SLOT.findall(template))


def pattern(template: str) -> re.Pattern:
    """A pattern with a group of its own name for each slot, such as `(?P<food>\\w+)`, each one word."""
    pieces = SLOT.split(template)  # text and slot names by turns
    return re.compile("".join(rf"(?P<{p}>\w+)" if i % 2 else re.escape(p) for i, p in enumerate(pieces)))


def sentences(text: str) -> list[str]:
    """The sentences of a text without their end marks."""
    return [part.strip() for part in re.split(r"[.!?\n]+", text) if part.strip()]


def rated_pair(
    rng: random.Random,
    prompt: str,
    write: Callable[[], str],
    rate: Callable[[Sequence[str]], Sequence[float]],
    sharpness: float,
) -> dict[str, str]:
    """Two different responses that `write` makes, as a preference pair of a rater who errs.

    Bradley and Terry on the scores of `rate`: P(a preferred to b) = sigmoid(sharpness · (score_a − score_b)).
    """
    first = second = write()
    while second == first:
        second = write()
    a, b = rate((first, second))
    if rng.random() > 1 / (1 + math.exp(-sharpness * (a - b))):
        first, second = second, first
    return {"prompt": prompt, "chosen": first, "rejected": second}
