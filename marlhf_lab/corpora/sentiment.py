"""Prompts about everyday things, and rewards for how friendly an instruct model's answer sounds: in all of its words,
in its first, or in its last.

The score is VADER's compound value in [-1, 1], from a published lexicon (Hutto & Gilbert, 2014), or the lexicon's
valences of the words (-4 to 4 each), added up and clipped. Nothing in it is learned.
"""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import yaml

from marlhf_lite.utils.errors import InputError

WORDS = 12  # at the beginning or the end of an answer
# A sum of valences of 5 or more counts as 1. With this number the scores of untrained answers vary as much as VADER's
# compound values do.
MOST = 5.0


def write_prompts(folder: Path) -> None:
    """Write `train.jsonl` (400 prompts) and `test.jsonl` (100, about other things) to `folder`.

    There is a prompt for each topic and each form of a question; a prompt is the message of a user.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for name, topics in (("train", table["topics"]), ("test", table["held_out"])):
        lines = []
        for topic in topics.split(", "):
            for form in table["forms"]:
                message = {"role": "user", "content": form.format(topic)}
                lines.append(json.dumps({"prompt": [message]}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def all_words(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The score of each whole answer."""
    return _scores(responses)


def first_words(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The score of each answer's first 12 words: the reward comes long after the deciding words."""
    return _scores([" ".join(response.split()[:WORDS]) for response in responses])


def last_words(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The score of each answer's last 12 words: the reward comes right after the deciding words."""
    return _scores([" ".join(response.split()[-WORDS:]) for response in responses])


def first_valence(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The clipped sum of valences of each answer's first 12 words."""
    return _valences([" ".join(response.split()[:WORDS]) for response in responses])


def last_valence(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The clipped sum of valences of each answer's last 12 words."""
    return _valences([" ".join(response.split()[-WORDS:]) for response in responses])


def _valences(texts: Sequence[str]) -> list[float]:
    """The sum of the valences of each text's words, divided by `MOST` and clipped to [-1, 1].

    Unlike VADER's compound value, it has no rules for negation and emphasis. A word that is not in the lexicon adds 0.
    """
    vader = _vader()
    lexicon = vader.SentimentIntensityAnalyzer().lexicon
    scores = []
    for text in texts:
        words = vader.SentiText(text).words_and_emoticons
        total = sum(lexicon.get(word.lower(), 0.0) for word in words)
        scores.append(min(max(total / MOST, -1.0), 1.0))
    return scores


def _scores(texts: Sequence[str]) -> list[float]:
    """VADER's compound value of each text, in [-1, 1]."""
    analyzer = _vader().SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in texts]


def _vader() -> ModuleType:
    """Import VADER's library. It is an extra, so it is imported only when a score is asked for."""
    try:
        return importlib.import_module("vaderSentiment.vaderSentiment")
    except ImportError:
        raise InputError(
            "the reward is VADER's lexicon, which is not installed: pip install vaderSentiment"
        ) from None
