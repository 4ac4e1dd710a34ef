"""What a parser gives: the sentences of a text, each with its characters and its constituency tree.

Trees are plain `nltk.Tree`, so that they print and draw as usual. Their leaves are `Leaf`: strings that know their
place in the sentence. A sentence that could not be parsed has no tree.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from marlhf_lite.utils.trees import nltk


class Leaf(str):
    """A word or mark of a tree, with its span in characters from the start of its sentence, end excluded."""

    start: int
    end: int

    # a copy is made without a span, then gets it
    def __new__(cls, word: str, start: int = 0, end: int = 0) -> "Leaf":
        leaf = super().__new__(cls, word)
        leaf.start, leaf.end = start, end
        return leaf


@dataclass(frozen=True)
class ParsedSentence:
    """The sentence text[start:end] and its tree, or None. Trees may be shared between sentences: do not edit them."""

    start: int
    end: int
    tree: nltk.Tree | None


class Parser(Protocol):
    """Any function from a text to its sentences, in order and without overlap, and so are the leaves of each.

    Text between sentences that is more than white space counts as a sentence without a tree.
    """

    def __call__(self, text: str) -> list[ParsedSentence]: ...


# Trees. Syntax trees of broken programs can be deeper than Python's stack, so only `place_leaves` recurses.


def place_leaves(
    tree: nltk.Tree, spans: Sequence[tuple[int, int]], words: Sequence[str]
) -> nltk.Tree:
    """Copy `tree` with these words and spans as its leaves, one each, left to right."""
    remaining = iter(zip(words, spans, strict=True))

    def copy(node):
        if isinstance(node, nltk.Tree):
            return nltk.Tree(node.label(), [copy(child) for child in node])
        word, span = next(remaining)
        return Leaf(word, *span)

    return copy(tree)


def nodes(tree: nltk.Tree) -> list:
    """Return all nodes with the leaves, parents before children and left before right."""
    visited, stack = [], [tree]
    while stack:
        visited.append(stack.pop())
        if isinstance(visited[-1], nltk.Tree):
            stack.extend(reversed(visited[-1]))
    return visited


def leaves(tree: nltk.Tree) -> list:
    """Return the same as `tree.leaves()`, for trees of any depth."""
    return [node for node in nodes(tree) if not isinstance(node, nltk.Tree)]


def cut(tree: nltk.Tree, bounds: Sequence[int], most: int) -> Iterator[tuple[int, bool]]:
    """Descend depth-first and yield the nodes where the descent ends (§3.2.1): `(end of its tokens, single leaf?)`.

    Args:
        bounds: the tokens of leaf i are bounds[i] … bounds[i+1]−1; one longer than there are leaves.
        most: tokens that a node with several leaves may have to stay whole.
    """
    counts: dict[int, int] = {}  # leaves below every node, by the node's id
    for node in reversed([node for node in nodes(tree) if isinstance(node, nltk.Tree)]):
        counts[id(node)] = sum(
            counts[id(child)] if isinstance(child, nltk.Tree) else 1 for child in node
        )
    stack, leaf = [tree], 0
    while stack:
        node = stack.pop()
        count = counts[id(node)] if isinstance(node, nltk.Tree) else 1
        if count == 1 or bounds[leaf + count] - bounds[leaf] <= most:
            leaf += count
            yield bounds[leaf], count == 1
        else:
            stack.extend(reversed(node))


# Sentences, by rule: nltk's own splitter needs a download.

ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st mt vs cf al approx dept est fig ltd corp vol pp ca ph.d gen gov sen rep col lt capt "
    "sgt rev hon jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
OFTEN_LAST = frozenset("etc a.m p.m inc co".split())  # abbreviations that may also end a sentence
# Unicode's Sentence_Terminal besides `.!?…`: double marks, which white space follows; marks of other scripts, from
# Armenian to Meitei, Chinese and Japanese, which need no white space because words do not contain them; and the wide
# full stop, which numbers contain. Added are Greek's question mark and Tibetan's mark, which also ends clauses.
_DOUBLE = "\u203c\u203d\u2047-\u2049"
_UNSPACED = "\u037e\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965\u0f0d\u0f0e"
_UNSPACED += "\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u1803\u1809\u1944\u1945\u1aa8-\u1aab"
_UNSPACED += "\u1b5a\u1b5b\u1b5e\u1b5f\u1b7d\u1b7e\u1c3b\u1c3c\u1c7e\u1c7f\u3002\ua4ff\ua60e\ua60f\ua6f3\ua6f7"
_UNSPACED += (
    "\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb\uff01\uff1f\uff61"
)
# kana and Chinese characters: many write .!? between them without a space
_EAST = "\u3041-\u30ff\u3400-\u9fff"
_CLOSING = "[\"'”’“«»‹›)\\]}*_」』）】》〉]*"
_END = re.compile(
    rf"(?P<stop>[.!?…{_DOUBLE}]+){_CLOSING}(?=\s)|(?P<line>[\n\r])|"
    rf"(?P<wide>[{_UNSPACED}]+|(?<=[{_EAST}])(?:\.|[!?]+)(?=[{_EAST}])|\uff0e(?![0-9\uff10-\uff19])){_CLOSING}"
)
_DOTTED = re.compile(r"[^\W\d_]\.[^\W\d_]")  # e.g, U.S, z.B
_WORD = re.compile(r"[^\s(\[{\"'“‘«]+$")


def split_sentences(text: str) -> list[tuple[int, int]]:
    """Return `(start, end)` in characters of every sentence, without the white space around it.

    A sentence ends at a line break, at `。`, `！`, `？` or what ends sentences in other scripts, and at `.`, `!`, `?`,
    `…` before white space or between characters of Chinese and Japanese (all with closing quotes and brackets), unless
    the full stop belongs to an abbreviation, an initial or the number of a list item, or lower case follows dots. The
    end of a sentence at an abbreviation is missed.
    """
    edges = [0]
    for match in _END.finditer(text):
        if match["line"] or match["wide"] or not _goes_on(text, edges[-1], match):
            edges.append(match.end())
    spans = []
    for start, end in itertools.pairwise([*edges, len(text)]):
        part = text[start:end]
        if part.strip():
            spans.append((start + len(part) - len(part.lstrip()), start + len(part.rstrip())))
    return spans


def _goes_on(text: str, start: int, match: re.Match) -> bool:
    """Return whether the mark of `match` is inside the sentence that begins at `start`."""
    before_lower_case = text[match.end() :].lstrip(" \t")[:1].islower()
    if match["stop"] != ".":
        return before_lower_case and set(match["stop"]) <= set(".…")
    word = _WORD.search(text, start, match.start())
    word = word[0].lower() if word else ""
    if word.isdigit() and text[start : match.start()].strip() == word:
        return True  # the number of a list item, as in "1. First"
    initial = len(word) == 1 and word.isalpha() and word != "i"
    if word in OFTEN_LAST:
        return before_lower_case
    return initial or word in ABBREVIATIONS or bool(_DOTTED.fullmatch(word))
