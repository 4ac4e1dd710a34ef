"""Prompts about plain things, and rewards for how friendly an answer of an instruct model sounds: in all of its words,
in its first, or in its last.

The score is VADER's compound value in [-1, 1], from a published lexicon (Hutto & Gilbert, 2014). Nothing of it is
learned, so no reward model's faults are in it. `python -m marlhf_lite.lab.corpora.sentiment` writes the prompts.
"""

import json
from collections.abc import Sequence
from pathlib import Path

WORDS = 12  # at the beginning or the end of an answer
FORMS = (
    "Tell me about {}.",
    "Describe {} in a few sentences.",
    "What should I know about {}?",
    "Explain to a child what {} is for.",
    "Write a short note about {}.",
)
TOPICS = (
    "a bicycle, a bridge, a broom, a bucket, a bus timetable, a button, a calendar, a candle, a canal, a chair, "
    "a clock, a coat, a compass, a cooking pot, a crossroads, a cup of tea, a desk, a dictionary, a door, a drawer, "
    "a factory, a farm, a fence, a ferry, a field of wheat, a filing cabinet, a fountain pen, a garden hose, a glove, "
    "a hammer, a harbour, a hat, a kettle, a key, a kitchen table, a ladder, a lamp, a library card, a lighthouse, "
    "a loaf of bread, a map, a market, a mirror, a mountain path, a museum, a newspaper, a notebook, a paintbrush, "
    "a park bench, a pencil, a pillow, a post office, a power station, a pulley, a radio, a railway station, "
    "a raincoat, a refrigerator, a river, a road sign, a roof, a rope, a ruler, a school bag, a screwdriver, "
    "a sewing machine, a shelf, a shoelace, a spoon, a staircase, a stamp, a street lamp, a suitcase, a swimming pool, "
    "a telephone, a thermometer, a ticket, a toolbox, a towel, a traffic light"
).split(", ")
HELD_OUT = (
    "a train, a tunnel, an umbrella, a vacuum cleaner, a village, a wall, a washing machine, a watering can, "
    "a weather report, a wheel, a wheelbarrow, a window, a windmill, a wooden box, a wool scarf, a workshop, "
    "an apple tree, an elevator, an envelope, an escalator"
).split(", ")


def write_prompts(folder: Path) -> None:
    """Write `train.jsonl` (400 prompts) and `test.jsonl` (100, about other things) as messages of a user."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, topics in (("train", TOPICS), ("test", HELD_OUT)):
        texts = [form.format(topic) for topic in topics for form in FORMS]
        rows = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def all_words(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The score of each whole answer."""
    return _scores(responses)


def first_words(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The score of each answer's first 12 words: what decides is long over when the reward comes."""
    return _scores([" ".join(response.split()[:WORDS]) for response in responses])


def last_words(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The score of each answer's last 12 words: what decides is the last thing that is written."""
    return _scores([" ".join(response.split()[-WORDS:]) for response in responses])


def _scores(texts: Sequence[str]) -> list[float]:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # pip install -e '.[real]'

    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in texts]


if __name__ == "__main__":
    write_prompts(Path("data/sentiment"))
