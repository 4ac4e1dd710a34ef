"""The embedded default: `tiny-tldr`, posts to summarise, with preferences sampled from a known truth.

Posts state six facts about one person between fillers; summaries state some of them, sometimes wrongly, with
their own fillers. Labels are drawn from the Bradley-Terry model on the gold score, so a reward model can be no
better than its raters. If a policy optimises it too hard, gold falls while the reward still rises.
"""

import random
from dataclasses import dataclass

import nltk

from marlhf_lab.corpora.rater import rated_pair
from marlhf_lite.tasks.templates import tldr_prompt
from marlhf_lite.tasks.tiny_tldr.gold import gold_scores
from marlhf_lite.tasks.tiny_tldr.grammar import (
    FACTS,
    FILLERS,
    LEXICON,
    OPENERS,
    detokenize,
    fill,
    sentence,
    slots,
    subject,
)

SUBREDDITS = ("advice", "family", "roommates", "pets", "travel", "money", "cooking", "tifu")
FACTS_PER_POST = 5  # the person comes on top
RATER_SHARPNESS = 1.0  # P(a preferred to b) = sigmoid(RATER_SHARPNESS * (gold_a - gold_b))


@dataclass(frozen=True)
class Post:
    """A generated post: the facts that it states, and its sentences."""

    subreddit: str
    who: tuple[str, str]  # relation, name
    facts: tuple[tuple[str, tuple[str, ...]], ...]  # (kind, values)
    trees: tuple[nltk.Tree, ...]  # one per sentence

    @property
    def prompt(self) -> str:
        return tldr_prompt(self.subreddit, " ".join(detokenize(tree) for tree in self.trees))


@dataclass(frozen=True)
class Quality:
    """How a summary is written: chance to state a fact, to get it wrong, and to add a filler after a sentence."""

    cover: float
    wrong: float
    filler: float

    @classmethod
    def sample(cls, rng: random.Random) -> "Quality":
        """Draw the quality of one summary. `wrong` is 0 in three of five."""
        return cls(
            cover=rng.uniform(0.3, 1.0),
            wrong=rng.choice((0.0, 0.0, 0.0, 0.1, 0.3)),
            filler=rng.uniform(0.0, 1.0),
        )


def _values(rng: random.Random, kind: str) -> tuple[str, ...]:
    """Draw words for the open slots of a fact of this kind."""
    return tuple(rng.choice(LEXICON[slot]) for slot in slots(FACTS[kind]))


def _group(rng: random.Random, facts: list) -> list[list]:
    """Split facts into groups of one or two, one group for each sentence, in order."""
    groups = []
    rest = list(facts)
    while rest:
        size = min(len(rest), rng.choice((1, 2)))
        groups.append(rest[:size])
        rest = rest[size:]
    return groups


def _tell(
    rng: random.Random, who, facts, opener_rate: float, filler_rate: float, lead: bool
) -> list[nltk.Tree]:
    """Write sentences, as trees, that state `facts` (kind, values) in order, with openers and fillers.

    Args:
        who: relation and name of the person whom the facts are about.
        opener_rate: chance that a sentence begins with an opener, such as "last week".
        filler_rate: chance that a filler, a sentence without a fact, follows a sentence.
        lead: whether a filler may also come first, with the same chance.
    """
    fillers = iter(rng.sample(FILLERS, len(FILLERS)))  # in random order, so none comes twice
    trees = []
    if lead and rng.random() < filler_rate:
        trees.append(fill(next(fillers)))
    for number, group in enumerate(_group(rng, facts)):
        opener = None
        if rng.random() < opener_rate:
            opener = fill(rng.choice(OPENERS))
        # The first sentence names the person, and the others have a pronoun.
        noun_phrase = subject(who, introduce=number == 0, after_opener=opener is not None)
        verb_phrases = [fill(FACTS[kind], values) for kind, values in group]
        trees.append(sentence(noun_phrase, verb_phrases, opener))
        if rng.random() < filler_rate:
            trees.append(fill(next(fillers)))
    return trees


def make_post(rng: random.Random) -> Post:
    """Make a random post about one person, with five facts of different kinds, openers and fillers."""
    who = (rng.choice(LEXICON["relation"]), rng.choice(LEXICON["name"]))
    kinds = rng.sample(sorted(FACTS), FACTS_PER_POST)
    facts = tuple((kind, _values(rng, kind)) for kind in kinds)
    trees = _tell(rng, who, facts, opener_rate=0.4, filler_rate=0.5, lead=True)
    return Post(subreddit=rng.choice(SUBREDDITS), who=who, facts=facts, trees=tuple(trees))


def make_summary(rng: random.Random, post: Post, quality: Quality) -> list[nltk.Tree]:
    """Write a summary of the post, as trees of its sentences. A wrong fact keeps its kind and gets other values."""
    kept = [fact for fact in post.facts if rng.random() < quality.cover]
    if not kept:  # every summary states at least one fact
        kept = [rng.choice(post.facts)]
    facts = []
    for kind, values in kept:
        if rng.random() < quality.wrong:
            values = _values(rng, kind)
        facts.append((kind, values))
    return _tell(rng, post.who, facts, opener_rate=0.0, filler_rate=quality.filler, lead=False)


def summary_text(trees: list[nltk.Tree]) -> str:
    """The text of a summary from the trees of its sentences. It starts with a space, as text after `TL;DR:` does."""
    return " " + " ".join(detokenize(tree) for tree in trees)


def make_pair(rng: random.Random) -> dict[str, str]:
    """Make a preference: two summaries of a post, labelled by a noisy rater (Bradley-Terry on the gold score)."""
    post = make_post(rng)
    return rated_pair(
        rng,
        post.prompt,
        write=lambda: summary_text(make_summary(rng, post, Quality.sample(rng))),
        rate=lambda summaries: gold_scores([post.prompt] * 2, summaries),
        sharpness=RATER_SHARPNESS,
    )
