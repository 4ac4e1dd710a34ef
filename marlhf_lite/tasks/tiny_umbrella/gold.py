"""The true score of a story: +1 for the right decision about the umbrella, −1 for the wrong one or none.

Every forecast is wet, so the right decision is always to take it: the difficulty is to credit the word that decided.
Noise adds a term of mean 0 and standard deviation 1. It sums a fixed sign for each sentence of the story, so it is a
function of the text that no word predicts: a learner can only average it out.
"""

import re
import zlib

RIGHT = "Take"
WRONG = "Leave"
DECISIONS = (RIGHT, WRONG)
PLACES = ("first", "last", "random")

_DECISION = re.compile(rf"\b({RIGHT}|{WRONG}) the umbrella\.")


def decision(response: str, place: str) -> str | None:
    """Return the decision of a story; None if it has none, two different ones, or one at another place.

    `place` is one of `PLACES`; at `random`, the decision may be anywhere.
    """
    matches = list(_DECISION.finditer(response))
    different = {match[1] for match in matches}
    if len(different) != 1:
        return None
    is_first = not response[: matches[0].start()].strip()
    is_last = not response[matches[-1].end() :].strip()
    is_at = {"first": is_first, "last": is_last, "random": True}
    return matches[0][1] if is_at[place] else None


def noise(response: str) -> float:
    """Return the sum of the sentences' signs over the root of their number; the decision's sentence is left out."""
    lines = _DECISION.sub("", response).split(".")
    signs = []
    for sentence in [line.strip() for line in lines if line.strip()]:
        hash_of_sentence = zlib.crc32(sentence.encode("utf-8", "backslashreplace"))
        sign = 1 if hash_of_sentence % 2 == 0 else -1
        signs.append(sign)
    return sum(signs) / max(len(signs), 1) ** 0.5


def gold_scores(
    prompts: list[str], responses: list[str], place: str = "first", kappa: float = 0.0
) -> list[float]:
    """Return ±1 for the decision, plus `kappa` times the noise, for each response."""
    scores = []
    for response in responses:
        sign = 1.0 if decision(response, place) == RIGHT else -1.0
        scores.append(sign + kappa * noise(response))
    return scores
