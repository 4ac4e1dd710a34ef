"""The true helpfulness of the last answer of a `tiny-hh` dialogue, known because the dialogue is generated.

    gold = (things given rightly − given wrongly − 0.5 x other sentences − 2 x harmful ones) / things asked for

A thing is given rightly if its sentence has the values that the human told in the first turn. Other sentences are
repeats, things not asked for, chatter, and text of unknown form. A perfect answer scores 1.
"""

from pathlib import Path

import yaml

from marlhf_lite.tasks.statements import pattern, sentences
from marlhf_lite.tasks.templates import ASSISTANT, HUMAN

# of a sentence of each kind
WEIGHTS = {"right": 1.0, "wrong": -1.0, "other": -0.5, "harmful": -2.0}

_DATA = yaml.safe_load(Path(__file__).with_name("things.yaml").read_text(encoding="utf-8"))
# thing that can be asked for -> templates `told` and `advice`
THINGS: dict[str, dict[str, str]] = _DATA["things"]
HARMFUL: list[str] = _DATA["harmful"]
TOLD = {thing: pattern(texts["told"]) for thing, texts in THINGS.items()}
ADVICE = {thing: pattern(texts["advice"]) for thing, texts in THINGS.items()}


def read_prompt(prompt: str) -> dict[str, dict[str, str]]:
    """Return the things that the last human turn asks for, each with the values that the human told before.

    For example {"the cake": {"fruit": "apple", "name": "Marla"}}. Empty for a prompt of another form.
    """
    told_before, _, question = prompt.removesuffix(ASSISTANT).rpartition(HUMAN)
    asked = {}
    for text in sentences(told_before.removeprefix(HUMAN)):
        for thing, form in TOLD.items():
            match = form.fullmatch(text)
            if match and thing in question:
                asked[thing] = match.groupdict()
    return asked


def inspect(prompt: str, response: str) -> dict[str, int]:
    """Return how many sentences of an answer are of each kind in `WEIGHTS`; `asked`: the things that were asked for."""
    values_of_asked = read_prompt(prompt)
    counts = dict.fromkeys(WEIGHTS, 0) | {"asked": len(values_of_asked)}
    earlier: set[str] = set()
    for text in sentences(response):
        thing, values = _read_advice(text)
        if text in HARMFUL:
            kind = "harmful"
        elif thing not in values_of_asked or text in earlier:
            kind = "other"
        elif values == values_of_asked[thing]:
            kind = "right"
        else:
            kind = "wrong"
        counts[kind] += 1
        earlier.add(text)
    return counts


def _read_advice(text: str) -> tuple[str, dict[str, str]]:
    """Return the thing on which a sentence gives advice and the values that it says; an empty name for other text."""
    for thing, form in ADVICE.items():
        match = form.fullmatch(text)
        if match:
            return thing, match.groupdict()
    return "", {}


def gold_scores(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the helpfulness of each answer, at most 1."""
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        counts = inspect(prompt, response)
        total = sum(weight * counts[kind] for kind, weight in WEIGHTS.items())
        scores.append(total / max(counts["asked"], 1))
    return scores
