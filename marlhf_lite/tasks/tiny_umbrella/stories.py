"""The embedded task `tiny-umbrella`: a forecast, and a story in which one word decides the score.

A prompt names a person, a day, a forecast, the number of lines and the place of the decision. The response says `Take
the umbrella.` or `Leave the umbrella.`, and tells lines without any weather. Each line has eight tokens and begins
with a countdown, so that a small model keeps the number of lines. So `--part` chooses the number of tokens between the
decisive word and the score.
"""

import functools
import random
import re
from pathlib import Path

import datasets
import yaml

from marlhf_lite.tasks.splits import Task, make_task
from marlhf_lite.tasks.tiny_umbrella.gold import PLACES, RIGHT, WRONG, gold_scores
from marlhf_lite.utils.errors import InputError

_WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
NAMES, RAIN, DAYS, VERBS, ADJECTIVES, NOUNS, NUMBERS = (
    tuple(words.split())
    for words in _WORDS.values()  # in the order of the file
)
# only in pretraining: nobody is in doubt
SURE = {"storm": RIGHT, "flood": RIGHT, "sun": WRONG, "heat": WRONG}
LINE_TOKENS = 8  # seven words and the full stop
LENGTHS = (8, 32, 64, 128)  # L of `part`: tokens of the story without the decision
DEFAULT_PART = "L32-first"
DEFAULT_SIZE = 1000
_PART = re.compile(rf"L({'|'.join(map(str, LENGTHS))})-({'|'.join(PLACES)})(-noise)?")


def parse_part(part: str) -> tuple[int, str, float]:
    """Return L, place and kappa of a part such as `L32-first` or `L8-last-noise`. Raises `InputError` for others."""
    match = _PART.fullmatch(part or DEFAULT_PART)
    if match is None:
        lengths = ", ".join(f"L{length}" for length in LENGTHS)
        places = ", ".join(PLACES)
        raise InputError(
            f"--part {part}: tiny-umbrella has length-place or length-place-noise, with a length of {lengths} and a "
            f"place of {places}, such as {DEFAULT_PART}"
        )
    length, place, noise = match.groups()
    kappa = 1.0 if noise else 0.0
    return int(length), place, kappa


def make_prompt(rng: random.Random, lines: int, place: str, forecast: str = "") -> str:
    """Return a forecast, of rain if none is given, with the task that it sets."""
    who = rng.choice(NAMES)
    day = rng.choice(DAYS)
    forecast = forecast or rng.choice(RAIN)
    noun = "line" if lines == 1 else "lines"
    where = "anywhere" if place == "random" else place
    return f"Forecast for {who} on {day}: {forecast}. Write {lines} {noun}, umbrella {where}:"


def make_story(rng: random.Random, lines: int, place: str, choice: str) -> str:
    """Return a response with this decision at this place; it starts with a space, as text after a colon does."""
    sentences = []
    for number in reversed(NUMBERS[:lines]):  # a countdown
        who = rng.choice(NAMES)
        verb = rng.choice(VERBS)
        adjective = rng.choice(ADJECTIVES)
        noun = rng.choice(NOUNS)
        sentences.append(f"At {number} {who} {verb} the {adjective} {noun}.")
    # Drawn for every place, so that the stories after this one have the same words whatever the place is.
    anywhere = rng.randint(0, lines)
    lines_before = {"first": 0, "last": lines, "random": anywhere}[place]
    sentences.insert(lines_before, f"{choice} the umbrella.")
    return " " + " ".join(sentences)


def make_pair(rng: random.Random, lines: int, place: str) -> dict[str, str]:
    """Return a prompt with a story that decides right, chosen, and one that decides wrong, rejected."""
    prompt = make_prompt(rng, lines, place)
    chosen = make_story(rng, lines, place, choice=RIGHT)
    rejected = make_story(rng, lines, place, choice=WRONG)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def load_tiny_umbrella(size: int | None, seed: int, part: str = "") -> Task:
    """Return the task with `size` pairs (default 1000), split as the paper does, 10 % held out.

    In the SFT part the chosen story decides right in half of the rows, in other parts always. Raises `InputError` for
    an unknown `part`, and for too small a size.
    """
    length, place, kappa = parse_part(part)
    rng = random.Random(f"tiny-umbrella-{seed}")
    pairs = [make_pair(rng, length // LINE_TOKENS, place) for _ in range(size or DEFAULT_SIZE)]
    gold = functools.partial(gold_scores, place=place, kappa=kappa)
    task = make_task("tiny-umbrella", pairs, seed, gold=gold)
    # Every other row of the SFT part is swapped, so that SFT makes a model that decides at random.
    first_swapped = 1 - rng.randint(0, 1)
    rows = []
    for number, row in enumerate(task.splits["sft"]):
        if number % 2 == first_swapped:
            row = row | {"chosen": row["rejected"], "rejected": row["chosen"]}
        rows.append(row)
    task.splits["sft"] = datasets.Dataset.from_list(rows)
    return task
