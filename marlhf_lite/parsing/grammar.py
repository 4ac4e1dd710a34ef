"""Parse the embedded corpus with its own grammar and nltk's chart parser; nothing is downloaded."""

import re
from functools import cache, lru_cache
from itertools import islice

from marlhf_lite.parsing.base import ParsedSentence, place_leaves, split_sentences
from marlhf_lite.tasks.tiny_tldr.grammar import FACTS, LEXICON, fill, grammar, slots
from marlhf_lite.utils.trees import nltk

_WORD = re.compile(r"\w+|[^\w\s]")
_READINGS = 64  # the most trees of a sentence that are compared


class GrammarParser:
    """Parses sentences of the embedded grammar, in any combination of its phrases.

    Sampled text has names and numbers that the lexicon lacks: any capitalised word may be a name, any digits a number.
    Of several trees it takes the one with most verb phrases built as the corpus builds them, so that a sentence of the
    corpus gets the tree it was made from; among equals the smallest, then the first by its brackets.

    The grammar treats all words of a class alike, so a tree is found once for each pattern of words and kept.
    """

    def __init__(self):
        self._chart = nltk.parse.LeftCornerChartParser(grammar())
        self._known = {p.rhs()[0] for p in grammar().productions() if p.is_lexical()}
        self._pattern = lru_cache(8192)(self._parse_pattern)

    def __call__(self, text: str) -> list[ParsedSentence]:
        return [
            ParsedSentence(start, end, self._parse(text[start:end]))
            for start, end in split_sentences(text)
        ]

    def _parse(self, sentence: str) -> nltk.Tree | None:
        matches = list(_WORD.finditer(sentence))
        words = [self._class_of(match[0]) for match in matches]
        if not words or None in words:
            return None
        tree = self._pattern(" ".join(words))
        return tree and place_leaves(
            tree, [match.span() for match in matches], [match[0] for match in matches]
        )

    def _class_of(self, word: str) -> str | None:
        """Return the same word for all words that the grammar treats alike; None for a word that it cannot read."""
        if word in self._known:
            return _classes().get(word, word)
        if word.isdecimal():
            return LEXICON["number"][0]
        return LEXICON["name"][0] if word[:1].isupper() else None

    def _parse_pattern(self, pattern: str) -> nltk.Tree | None:
        return min(
            islice(self._chart.parse(pattern.split(" ")), _READINGS), key=_preference, default=None
        )


def _preference(tree: nltk.Tree) -> tuple[int, int, str]:
    """Return a sort key of a tree: the smallest is taken."""
    expected = sum(_shape(sub) in _frames() for sub in tree.subtrees(lambda t: t.label() == "VP"))
    return -expected, sum(1 for _ in tree.subtrees()), tree.pformat(margin=10**9)


@cache
def _classes() -> dict[str, str]:
    """Map each word that fills a slot to the first word with the same tags."""
    tags: dict[str, set] = {}
    for production in grammar().productions():
        if production.is_lexical():
            tags.setdefault(production.rhs()[0], set()).add(production.lhs())
    first: dict[frozenset, str] = {}
    words = [word for group in LEXICON.values() for word in group]
    return {word: first.setdefault(frozenset(tags[word]), word) for word in words}


@cache
def _frames() -> frozenset[str]:
    """Return the corpus's own verb phrases, with the words that fill slots left open."""
    return frozenset(
        _shape(fill(t, tuple(LEXICON[s][0] for s in slots(t)))) for t in FACTS.values()
    )


def _shape(tree: nltk.Tree) -> str:
    """Write a tree's brackets, with a star for each word that fills a slot."""
    if tree.height() == 2:
        word = "*" if tree[0] in _classes() else tree[0]
        return f"({tree.label()} {word})"
    return f"({tree.label()} {' '.join(map(_shape, tree))})"
