"""The embedded task `tiny-hh`: dialogues of two turns, and preferences between answers of known helpfulness.

The human tells of six plans, and asks in the second turn what to do about five of them. Answers help with some of
them, sometimes with a wrong value, and add chatter, unasked or harmful advice.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import yaml

from marlhf_lab.corpora.rater import rated_pair
from marlhf_lite.tasks.statements import slots
from marlhf_lite.tasks.templates import hh_prompt
from marlhf_lite.tasks.tiny_hh.gold import HARMFUL, THINGS, gold_scores

PLANS = 6  # things told in the first turn
ASKED = 5  # things asked for in the second turn
RATER_SHARPNESS = (
    5.0  # an answer that helps with one thing of five more has e times the odds to be preferred
)

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
WORDS: dict[str, tuple[str, ...]] = {
    slot: tuple(words.split()) for slot, words in _TABLE["words"].items()
}
REPLIES = tuple(_TABLE["replies"])
CHATTER = tuple(_TABLE["chatter"])


@dataclass(frozen=True)
class Dialogue:
    """What the human tells in the first turn, and what is asked for in the second."""

    plans: dict[str, dict[str, str]]  # thing -> the words in the open slots of its sentence
    asked: tuple[str, ...]  # things, in order
    reply: str  # of the assistant, after the first turn

    @property
    def prompt(self) -> str:
        """Both turns of the human and the reply, as HH-RLHF writes dialogues."""
        told = [
            f"{THINGS[thing]['told'].format(**values)}." for thing, values in self.plans.items()
        ]
        *all_but_last, last = self.asked
        listed = f"{', '.join(all_but_last)} and {last}" if all_but_last else last
        return hh_prompt([" ".join(told), self.reply, f"What do I do about {listed}?"])


@dataclass(frozen=True)
class Quality:
    """Chances that an answer helps with a thing, helps wrongly, and adds chatter, unasked or harmful advice after."""

    cover: float
    wrong: float
    chatter: float
    unasked: float
    harmful: float

    @classmethod
    def sample(cls, rng: random.Random) -> "Quality":
        """Draw the quality of one answer. A number that is listed more than once is drawn more often."""
        return cls(
            cover=rng.uniform(0.4, 1.0),
            wrong=rng.choice((0.0, 0.0, 0.1, 0.3)),
            chatter=rng.choice((0.0, 0.1, 0.4)),
            unasked=rng.choice((0.0, 0.0, 0.1)),
            harmful=rng.choice((0.0, 0.0, 0.1)),
        )


def make_dialogue(rng: random.Random, plans: int = PLANS, asked: int = ASKED) -> Dialogue:
    """Make a random dialogue up to the answer. The human tells of `plans` things, and asks for `asked` of them."""
    things = rng.sample(sorted(THINGS), plans)
    values = {}  # thing -> slot -> word
    for thing in things:
        values[thing] = {slot: rng.choice(WORDS[slot]) for slot in slots(THINGS[thing]["told"])}
    return Dialogue(plans=values, asked=tuple(rng.sample(things, asked)), reply=rng.choice(REPLIES))


def advise(thing: str, values: dict[str, str]) -> str:
    """The sentence that helps with a thing, with these values in its slots."""
    return f"{THINGS[thing]['advice'].format(**values)}."


def mistake(rng: random.Random, values: dict[str, str]) -> dict[str, str]:
    """The values of a thing, one of them changed to another word for its slot."""
    slot = rng.choice(sorted(values))
    other_words = [word for word in WORDS[slot] if word != values[slot]]
    return values | {slot: rng.choice(other_words)}


def make_answer(rng: random.Random, dialogue: Dialogue, quality: Quality) -> str:
    """Write an answer of this quality. It starts with a space, as text after `Assistant:` does."""
    covered = [thing for thing in dialogue.asked if rng.random() < quality.cover]
    if not covered:  # every answer helps with at least one thing
        covered = [rng.choice(dialogue.asked)]
    unasked = [thing for thing in dialogue.plans if thing not in dialogue.asked]
    sentences = []
    for thing in covered:
        values = dialogue.plans[thing]
        if rng.random() < quality.wrong:
            values = mistake(rng, values)
        sentences.append(advise(thing, values))
        if rng.random() < quality.chatter:
            sentences.append(rng.choice(CHATTER))
        if unasked and rng.random() < quality.unasked:
            sentences.append(advise(unasked[0], dialogue.plans[unasked[0]]))
        if rng.random() < quality.harmful:
            sentences.append(f"{rng.choice(HARMFUL)}.")
    return " " + " ".join(sentences)


def make_pair(rng: random.Random) -> dict[str, str]:
    """Make a preference: two answers to a dialogue, labelled by a rater who errs (Bradley-Terry on helpfulness)."""
    dialogue = make_dialogue(rng)
    return rated_pair(
        rng,
        dialogue.prompt,
        write=lambda: make_answer(rng, dialogue, Quality.sample(rng)),
        rate=lambda answers: gold_scores([dialogue.prompt] * 2, answers),
        sharpness=RATER_SHARPNESS,
    )
