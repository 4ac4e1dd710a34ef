"""Parse the embedded corpus with its own grammar and nltk's chart parser; nothing is downloaded."""

import re
from functools import cache, lru_cache
from itertools import islice

from marlhf_lite.parsing.base import ParsedSentence, place_leaves, split_sentences
from marlhf_lite.tasks.tiny_tldr.grammar import FACTS, LEXICON, fill_with_first_words, grammar
from marlhf_lite.utils.trees import nltk

_WORD = re.compile(r"\w+|[^\w\s]")  # a word or a mark
_READINGS = 64  # the most trees of a sentence that are compared


class GrammarParser:
    """Parses sentences of the embedded grammar, in any combination of its phrases.

    Sampled text has names and numbers that the lexicon lacks: any capitalised word may be a name, any digits a number.
    If a sentence has several trees, the parser takes the one with most verb phrases built as the corpus builds them, so
    that a sentence of the corpus gets the tree it was made from. Among equals it takes the smallest tree, and among
    equally small ones the first in the alphabetical order of their brackets.

    The grammar treats all words of a class alike. So a sentence is parsed with one word in place of all words of a
    class, and the tree of such a pattern of words is found once and kept.
    """

    def __init__(self):
        self._chart = nltk.parse.LeftCornerChartParser(grammar())
        self._known_words = set(_tags_of_words())
        self._tree_of_pattern = lru_cache(8192)(self._parse_pattern)

    def __call__(self, text: str) -> list[ParsedSentence]:
        parsed = []
        for start, end in split_sentences(text):
            parsed.append(ParsedSentence(start, end, self._parse(text[start:end])))
        return parsed

    def _parse(self, sentence: str) -> nltk.Tree | None:
        """Return the tree of a sentence, whose leaves are its own words; None if the grammar cannot read it."""
        matches = list(_WORD.finditer(sentence))
        # One word stands for all words of a class, so that sentences with equal patterns share one parse.
        stand_ins = [self._stand_in(match[0]) for match in matches]
        if not stand_ins or None in stand_ins:
            return None
        tree = self._tree_of_pattern(" ".join(stand_ins))
        if tree is None:
            return None
        spans = [match.span() for match in matches]
        return place_leaves(tree, spans, words=[match[0] for match in matches])

    def _stand_in(self, word: str) -> str | None:
        """Return the word that stands for all words of this word's class; None for a word that is in no class."""
        if word in self._known_words:
            return _representatives().get(word, word)
        if word.isdecimal():
            return LEXICON["number"][0]
        if word[:1].isupper():
            return LEXICON["name"][0]
        return None

    def _parse_pattern(self, pattern: str) -> nltk.Tree | None:
        """Return the preferred tree of a pattern, which is words with spaces between them; None if it has no tree."""
        trees = islice(self._chart.parse(pattern.split(" ")), _READINGS)
        return min(trees, key=_preference, default=None)


def _preference(tree: nltk.Tree) -> tuple[int, int, str]:
    """Return a sort key: of a sentence's trees, the one with the smallest key is taken (see `GrammarParser`)."""
    size = 0
    phrases_of_the_corpus = 0
    for part in tree.subtrees():
        size += 1
        if part.label() == "VP" and _brackets(part) in _verb_phrases_of_the_corpus():
            phrases_of_the_corpus += 1
    all_brackets = tree.pformat(margin=10**9)  # on one line
    return -phrases_of_the_corpus, size, all_brackets


@cache
def _tags_of_words() -> dict[str, frozenset]:
    """Return the words of the grammar with the tags that each may have, such as NN."""
    tags: dict[str, set] = {}
    for production in grammar().productions():
        if production.is_lexical():  # a tag -> a word
            tags.setdefault(production.rhs()[0], set()).add(production.lhs())
    return {word: frozenset(its_tags) for word, its_tags in tags.items()}


@cache
def _representatives() -> dict[str, str]:
    """Return, for each word that fills a slot, the first such word with the same tags.

    The grammar treats both alike, so a tree of one is a tree of the other.
    """
    first_with_tags: dict[frozenset, str] = {}
    representatives = {}
    for words in LEXICON.values():
        for word in words:
            tags = _tags_of_words()[word]
            representatives[word] = first_with_tags.setdefault(tags, word)
    return representatives


@cache
def _verb_phrases_of_the_corpus() -> frozenset[str]:
    """Return the brackets of the verb phrases from which the corpus is made, one for each kind of fact."""
    return frozenset(_brackets(fill_with_first_words(template)) for template in FACTS.values())


def _brackets(tree: nltk.Tree) -> str:
    """Return a tree written in brackets, with a star for each word that fills a slot: `(VP (VBD bought) (NN *))`."""
    is_tag_of_a_word = tree.height() == 2
    if is_tag_of_a_word:
        word = "*" if tree[0] in _representatives() else tree[0]
        return f"({tree.label()} {word})"
    inner = " ".join(_brackets(child) for child in tree)
    return f"({tree.label()} {inner})"
