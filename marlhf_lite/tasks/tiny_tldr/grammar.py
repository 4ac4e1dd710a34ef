"""A small English grammar for posts and summaries, so that every sentence has a gold constituency tree.

A *fact* is a verb phrase with one or two open slots (`moved to {place}`). Sentences join a subject with one or two
facts; fillers are fixed sentences without a fact. All text of the embedded corpus comes from the templates in
`grammar.yaml`, and `grammar()` returns the same templates as an `nltk.CFG`. Tense, agreement and quotation would add
words but nothing to credit, so the grammar leaves them out.
"""

from functools import cache
from pathlib import Path

import yaml

from marlhf_lite.tasks.statements import SLOT, slots
from marlhf_lite.utils.trees import nltk

_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# slot -> the words that fill it
LEXICON: dict[str, tuple[str, ...]] = {
    slot: tuple(start + end for start in _DATA["starts"].split() for end in ends.split())
    for slot, ends in _DATA["ends"].items()
}
LEXICON["number"] = tuple(str(i) for i in range(11, 100))
LEXICON |= {slot: tuple(words.split()) for slot, words in _DATA["lexicon"].items()}
FACTS: dict[str, str] = _DATA["facts"]  # kind -> bracketed verb phrase
WHO, OPENERS, FILLERS, _TAGS = (_DATA[name] for name in ("who", "openers", "fillers", "tags"))
PRONOUNS = {
    relation: pronoun for pronoun, group in _DATA["pronouns"].items() for relation in group.split()
}


@cache
def _parsed(template: str) -> nltk.Tree:
    return nltk.Tree.fromstring(SLOT.sub(lambda m: f"({_TAGS.get(m[1], 'NN')} {m[0]})", template))


def fill(template: str, values: tuple[str, ...] = ()) -> nltk.Tree:
    """Return the template's tree with its slots filled by `values`, in order."""
    remaining = iter(values)

    def copy(node):
        if isinstance(node, str):
            return next(remaining) if SLOT.fullmatch(node) else node
        return nltk.Tree(node.label(), [copy(child) for child in node])

    return copy(_parsed(template))


def subject(who: tuple[str, str], introduce: bool, after_opener: bool = False) -> nltk.Tree:
    """Return the person a post is about: `My sister Marla` the first time, a pronoun later."""
    if introduce:
        return fill(WHO.replace("My", "my") if after_opener else WHO, who)
    pronoun = PRONOUNS[who[0]]
    return nltk.Tree("NP", [nltk.Tree("PRP", [pronoun.lower() if after_opener else pronoun])])


def sentence(
    noun_phrase: nltk.Tree, verb_phrases: list[nltk.Tree], opener: nltk.Tree | None = None
) -> nltk.Tree:
    """Return `[opener] subject verb-phrase [and verb-phrase].` as a tree."""
    verb_phrase = verb_phrases[0]
    if len(verb_phrases) == 2:
        verb_phrase = nltk.Tree("VP", [verb_phrases[0], nltk.Tree("CC", ["and"]), verb_phrases[1]])
    children = [noun_phrase, verb_phrase, nltk.Tree(".", ["."])]
    return nltk.Tree("S", ([opener] if opener else []) + children)


def detokenize(tree: nltk.Tree) -> str:
    """Return the tree's leaves as text: one space between words, none before the full stop."""
    return " ".join(tree.leaves()).replace(" .", ".")


@cache
def grammar() -> nltk.CFG:
    """Return templates and lexicon as one context-free grammar with start symbol S (a few hundred productions)."""
    trees = [nltk.Tree.fromstring(f) for f in FILLERS]
    phrases = [fill(t, tuple(LEXICON[s][0] for s in slots(t))) for t in FACTS.values()]
    who = ("sister", LEXICON["name"][0])
    for opener in (None, *map(nltk.Tree.fromstring, OPENERS)):
        for introduce in (True, False):
            noun_phrase = subject(who, introduce, after_opener=opener is not None)
            trees += [sentence(noun_phrase, phrases[:k], opener) for k in (1, 2)]
    trees += phrases
    trees += [subject((r, who[1]), False, lower) for r in PRONOUNS for lower in (True, False)]
    productions = {p: None for tree in trees for p in tree.productions()}
    for slot, words in LEXICON.items():
        tag = nltk.Nonterminal(_TAGS.get(slot, "NN"))
        productions |= {nltk.Production(tag, [word]): None for word in words}
    return nltk.CFG(nltk.Nonterminal("S"), list(productions))
