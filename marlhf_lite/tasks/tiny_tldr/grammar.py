"""A small English grammar for posts and summaries, so that every sentence has a gold constituency tree.

A *fact* is a verb phrase with one or two open slots (`moved to {place}`). Sentences join a subject with one or two
facts; fillers are fixed sentences without a fact. All text of the embedded corpus comes from the templates in
`grammar.yaml`, and `grammar()` returns the same templates as an `nltk.CFG`. Tense, agreement and quotation would add
words but nothing to credit, so the grammar leaves them out.
"""

import itertools
import re
from functools import cache
from pathlib import Path

import yaml

from marlhf_lite.tasks.statements import SLOT, slots
from marlhf_lite.utils.trees import nltk

_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# slot -> the words that fill it; names and places are every start with every end
LEXICON: dict[str, tuple[str, ...]] = {}
for _slot, _ends in _DATA["ends"].items():
    _starts_and_ends = itertools.product(_DATA["starts"].split(), _ends.split())
    LEXICON[_slot] = tuple(start + end for start, end in _starts_and_ends)
LEXICON["number"] = tuple(str(i) for i in range(11, 100))
LEXICON |= {slot: tuple(words.split()) for slot, words in _DATA["lexicon"].items()}
FACTS: dict[str, str] = _DATA["facts"]  # kind -> bracketed verb phrase
WHO: str = _DATA["who"]  # bracketed noun phrase with the slots relation and name
OPENERS: list[str] = _DATA["openers"]  # bracketed phrases that may begin a sentence
FILLERS: list[str] = _DATA["fillers"]  # bracketed sentences without a fact
_TAGS: dict[str, str] = _DATA["tags"]  # slot -> the tag of its words, if it is not NN
PRONOUNS: dict[str, str] = {}  # relation, such as sister -> pronoun, such as She
for _pronoun, _relations in _DATA["pronouns"].items():
    PRONOUNS |= dict.fromkeys(_relations.split(), _pronoun)


@cache
def _parsed(template: str) -> nltk.Tree:
    """Return the tree of a bracketed template, in which each slot is the leaf of its tag."""

    def with_tag(slot: re.Match) -> str:
        return f"({_TAGS.get(slot[1], 'NN')} {slot[0]})"

    return nltk.Tree.fromstring(SLOT.sub(with_tag, template))


def fill(template: str, values: tuple[str, ...] = ()) -> nltk.Tree:
    """Return the template's tree with its slots filled by `values`, in order."""
    remaining = iter(values)

    def copy(node):
        if isinstance(node, nltk.Tree):
            return nltk.Tree(node.label(), [copy(child) for child in node])
        is_slot = SLOT.fullmatch(node)
        return next(remaining) if is_slot else node

    return copy(_parsed(template))


def fill_with_first_words(template: str) -> nltk.Tree:
    """Return the template's tree with the first word of the lexicon in each slot: an example of its form."""
    return fill(template, tuple(LEXICON[slot][0] for slot in slots(template)))


def subject(who: tuple[str, str], introduce: bool, after_opener: bool = False) -> nltk.Tree:
    """Return the noun phrase for the person a post is about: `My sister Marla` the first time, a pronoun later.

    `who` is the relation and the name. After an opener, as in `Last week my sister`, it begins with a small letter.
    """
    if introduce:
        template = WHO.replace("My", "my") if after_opener else WHO
        return fill(template, who)
    relation, _ = who
    pronoun = PRONOUNS[relation]
    if after_opener:
        pronoun = pronoun.lower()
    return nltk.Tree("NP", [nltk.Tree("PRP", [pronoun])])


def sentence(
    noun_phrase: nltk.Tree, verb_phrases: list[nltk.Tree], opener: nltk.Tree | None = None
) -> nltk.Tree:
    """Return `[opener] subject verb-phrase [and verb-phrase].` as a tree, from one or two verb phrases."""
    verb_phrase = verb_phrases[0]
    if len(verb_phrases) == 2:
        verb_phrase = nltk.Tree("VP", [verb_phrases[0], nltk.Tree("CC", ["and"]), verb_phrases[1]])
    children = [noun_phrase, verb_phrase, nltk.Tree(".", ["."])]
    if opener:
        children.insert(0, opener)
    return nltk.Tree("S", children)


def detokenize(tree: nltk.Tree) -> str:
    """Return the tree's leaves as text: one space between words, none before the full stop."""
    return " ".join(tree.leaves()).replace(" .", ".")


@cache
def grammar() -> nltk.CFG:
    """Return templates and lexicon as one context-free grammar with start symbol S (a few hundred productions).

    It is read off from example trees in which every template occurs: a node and its children are a production. The
    words that may fill slots are added from the lexicon.
    """
    # 1. Whole sentences: fillers; and one or two facts, with and without an opener, about a person by name or pronoun.
    fillers = [nltk.Tree.fromstring(text) for text in FILLERS]
    openers = [nltk.Tree.fromstring(text) for text in OPENERS]
    verb_phrases = [fill_with_first_words(template) for template in FACTS.values()]
    name = LEXICON["name"][0]
    examples = list(fillers)
    for opener in (None, *openers):
        for introduce in (True, False):
            noun_phrase = subject(("sister", name), introduce, after_opener=opener is not None)
            examples.append(sentence(noun_phrase, verb_phrases[:1], opener))
            examples.append(sentence(noun_phrase, verb_phrases[:2], opener))

    # 2. Phrases that those sentences lack: the other facts, and each pronoun, at the start and after an opener.
    examples += verb_phrases
    for relation in PRONOUNS:
        for after_opener in (True, False):
            examples.append(subject((relation, name), introduce=False, after_opener=after_opener))

    # 3. Their productions, and the words of the lexicon, each once and in this order.
    productions: dict[nltk.Production, None] = {}
    for tree in examples:
        productions |= dict.fromkeys(tree.productions())
    for slot, words in LEXICON.items():
        tag = nltk.Nonterminal(_TAGS.get(slot, "NN"))
        for word in words:
            productions[nltk.Production(tag, [word])] = None
    return nltk.CFG(start=nltk.Nonterminal("S"), productions=list(productions))
