"""The true score of a story: +1 for the right decision about the umbrella, −1 for the wrong one or none.

Every forecast is wet, so the right decision is always to take it: the difficulty is to credit the word that decided.
Noise adds a term of mean 0 and standard deviation 1. It sums a fixed sign for each sentence of the story, so it is a
function of the text that no word predicts: a learner can only average it out.
"""

import re
import zlib

DECISIONS = RIGHT, WRONG = "Take", "Leave"
PLACES = ("first", "last", "random")

_DECISION = re.compile(rf"\b({RIGHT}|{WRONG}) the umbrella\.")


def decision(response: str, place: str) -> str | None:
    """Return the decision of a story; None if it has none, two different ones, or one at another place."""
    matches = list(_DECISION.finditer(response))
    if len({match[1] for match in matches}) != 1:
        return None
    before, after = response[: matches[0].start()], response[matches[-1].end() :]
    there = {"first": not before.strip(), "last": not after.strip(), "random": True}[place]
    return matches[0][1] if there else None


def noise(response: str) -> float:
    """Return the sum of the sentences' signs over the root of their number; the decision's sentence is left out."""
    sentences = [text.strip() for text in _DECISION.sub("", response).split(".") if text.strip()]
    signs = [
        1 - 2 * (zlib.crc32(text.encode("utf-8", "backslashreplace")) & 1) for text in sentences
    ]
    return sum(signs) / max(len(signs), 1) ** 0.5


def gold_scores(
    prompts: list[str], responses: list[str], place: str = "first", kappa: float = 0.0
) -> list[float]:
    """Return ±1 for the decision, plus `kappa` times the noise, for each response."""
    return [
        (1.0 if decision(text, place) == RIGHT else -1.0) + kappa * noise(text)
        for text in responses
    ]
