"""A small English grammar for posts and summaries, so that every sentence has a gold constituency tree.

A *fact* is a verb phrase with one or two open slots (`moved to {place}`). Sentences join a subject with one or two
facts; fillers are fixed sentences that carry no fact. All text of the embedded corpus is derived from the templates
below, and `grammar()` returns the same templates as an `nltk.CFG`. What is left out on purpose: tense, agreement and
quotation, which would add words but nothing to credit.
"""

from __future__ import annotations

import itertools
from functools import cache

import nltk

from marlhf_lite.tasks.statements import SLOT, slots

_STARTS = "Mar Tol Ben Lis Kor Ven Dar Hel Jor Sam Rin Fal Gre Os Pim Quil Rud Sel Tam Ul Wen Yor Zed Bru".split()
_PERSON_ENDS = "la ric na ton sie mund ra vin ty lo das mer".split()
_PLACE_ENDS = "wick ford stead holm bury dale mouth by ness ham gate moor".split()


def _cross(starts: list[str], ends: list[str]) -> tuple[str, ...]:
    return tuple(a + b for a, b in itertools.product(starts, ends))


LEXICON: dict[str, tuple[str, ...]] = {
    "name": _cross(_STARTS, _PERSON_ENDS),
    "place": _cross(_STARTS, _PLACE_ENDS),
    "number": tuple(str(i) for i in range(11, 100)),
    "adjective": tuple(
        "old new red blue green tiny huge loud cheap clean dusty broken fancy heavy shiny soft purple wooden".split()
    ),
    "thing": tuple(
        "kettle laptop bicycle guitar lamp jacket camera ladder blender mirror drill tent clock piano wallet scarf "
        "teapot radio printer suitcase".split()
    ),
    "animal": tuple("cat dog parrot rabbit turtle hamster goat ferret lizard pony duck hedgehog".split()),
    "food": tuple("soup lasagna curry pancakes noodles dumplings chili waffles risotto stew omelettes tacos".split()),
    "venue": tuple("harbor library gym bakery station museum airport market theater clinic stadium cafe".split()),
    "weekday": tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()),
    "relation": tuple("sister aunt mother niece brother uncle father nephew cousin boss roommate neighbor".split()),
}
_TAGS = {"name": "NNP", "place": "NNP", "number": "CD", "adjective": "JJ", "weekday": "NNP"}

# kind -> bracketed verb phrase; each starts with a verb of its own, which is what the gold scorer looks for.
FACTS: dict[str, str] = {
    "move": "(VP (VBD moved) (PP (IN to) (NP {place})))",
    "job": "(VP (VBD worked) (PP (IN for) (NP {name})))",
    "pet": "(VP (VBD adopted) (NP (DT a) {adjective} {animal}))",
    "debt": "(VP (VBD owed) (NP (PRP me)) (NP {number} (NNS dollars)))",
    "damage": "(VP (VBD broke) (NP (PRP$ my) {adjective} {thing}))",
    "leave": "(VP (VBD left) (PP (IN on) (NP {weekday})))",
    "wait": "(VP (VBD waited) (NP {number} (NNS days)))",
    "meet": "(VP (VBD met) (NP {name}) (PP (IN at) (NP (DT the) {venue})))",
    "cook": "(VP (VBD cooked) (NP {food}) (PP (IN for) (NP {name})))",
    "lose": "(VP (VBD lost) (NP (DT the) {adjective} {thing}))",
    "sell": "(VP (VBD sold) (NP (DT the) {thing}) (PP (IN for) (NP {number} (NNS euros))))",
    "visit": "(VP (VBD visited) (NP (NP {place}) (PP (IN with) (NP {name}))))",
}
WHO = "(NP (PRP$ My) {relation} {name})"
PRONOUNS = {
    relation: pronoun
    for pronoun, group in {
        "She": "sister aunt mother niece",
        "He": "brother uncle father nephew",
        "They": "cousin boss roommate neighbor",
    }.items()
    for relation in group.split()
}
# Openers stand before a fact in posts only: something a summary has to leave out.
OPENERS: tuple[str, ...] = (
    "(ADVP (RB Then))",
    "(NP (JJ Last) (NN week))",
    "(PP (IN After) (NP (DT that)))",
    "(PP (TO To) (VP (VB be) (ADJP (JJ honest))))",
    "(PP (IN For) (NP (DT some) (NN reason)))",
    "(PP (IN On) (NP (NN top) (PP (IN of) (NP (DT that)))))",
)
FILLERS: tuple[str, ...] = (
    "(S (ADJP (JJ Sorry) (PP (IN for) (NP (DT the) (JJ long) (NN post)))) (. .))",
    "(S (NP (PRP I)) (VP (VBP am) (ADJP (JJ new)) (ADVP (RB here))) (. .))",
    "(S (NP (NNS Thanks)) (PP (IN for) (NP (NN reading))) (. .))",
    "(S (NP (PRP I)) (VP (VBP do) (RB not) (VP (VB know) (SBAR (WHNP (WP what)) (S (TO to) (VP (VB do)))))) (. .))",
    "(S (NP (DT This)) (VP (VBZ is) (NP (DT a) (JJ strange) (NN story))) (. .))",
    "(S (NP (PRP I)) (VP (VBP feel) (ADJP (RB really) (JJ tired)) (PP (IN of) (NP (DT this)))) (. .))",
    "(S (VP (VB Let) (S (NP (PRP me)) (VP (VB explain)))) (. .))",
    "(S (NP (DT Any) (NN advice)) (VP (VBZ is) (ADJP (JJ welcome))) (. .))",
)


@cache
def _parsed(template: str) -> nltk.Tree:
    return nltk.Tree.fromstring(SLOT.sub(lambda m: f"({_TAGS.get(m[1], 'NN')} {m[0]})", template))


def fill(template: str, values: tuple[str, ...] = ()) -> nltk.Tree:
    """The template's tree with its slots filled by `values`, in order."""
    remaining = iter(values)

    def copy(node):
        if isinstance(node, str):
            return next(remaining) if SLOT.fullmatch(node) else node
        return nltk.Tree(node.label(), [copy(child) for child in node])

    return copy(_parsed(template))


def subject(who: tuple[str, str], introduce: bool, after_opener: bool = False) -> nltk.Tree:
    """The person a post is about: `My sister Marla` the first time, a pronoun later."""
    if introduce:
        return fill(WHO.replace("My", "my") if after_opener else WHO, who)
    pronoun = PRONOUNS[who[0]]
    return nltk.Tree("NP", [nltk.Tree("PRP", [pronoun.lower() if after_opener else pronoun])])


def sentence(noun_phrase: nltk.Tree, verb_phrases: list[nltk.Tree], opener: nltk.Tree | None = None) -> nltk.Tree:
    """`[opener] subject verb-phrase [and verb-phrase].` as a tree."""
    verb_phrase = verb_phrases[0]
    if len(verb_phrases) == 2:
        verb_phrase = nltk.Tree("VP", [verb_phrases[0], nltk.Tree("CC", ["and"]), verb_phrases[1]])
    children = [noun_phrase, verb_phrase, nltk.Tree(".", ["."])]
    return nltk.Tree("S", ([opener] if opener else []) + children)


def detokenize(tree: nltk.Tree) -> str:
    """The tree's leaves as text: words parted by one space, the full stop set against the word before it."""
    return " ".join(tree.leaves()).replace(" .", ".")


@cache
def grammar() -> nltk.CFG:
    """The templates and the lexicon as one context-free grammar with start symbol S (a few hundred productions)."""
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
