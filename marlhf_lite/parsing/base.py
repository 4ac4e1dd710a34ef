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

    # The defaults are for `copy` and `pickle`, which first make a leaf of the word alone and then set its attributes.
    def __new__(cls, word: str, start: int = 0, end: int = 0) -> "Leaf":
        leaf = super().__new__(cls, word)
        leaf.start = start
        leaf.end = end
        return leaf


@dataclass(frozen=True)
class ParsedSentence:
    """The sentence text[start:end] of a text and its tree, which is None if the sentence could not be parsed.

    Several sentences may share a tree: do not edit it.
    """

    start: int
    end: int
    tree: nltk.Tree | None


class Parser(Protocol):
    """Any function from a text to its sentences.

    The sentences are in order and do not overlap, and the same holds for the leaves of each tree. If there is more than
    white space between two sentences, that text counts as a sentence without a tree.
    """

    def __call__(self, text: str) -> list[ParsedSentence]: ...


# Trees. Syntax trees of broken programs can be deeper than Python's stack, so functions that get them keep a list of
# nodes instead of calling themselves. `place_leaves`, which parsers of natural language use, does call itself.


def place_leaves(
    tree: nltk.Tree, spans: Sequence[tuple[int, int]], words: Sequence[str]
) -> nltk.Tree:
    """Return a copy of `tree` with new leaves, which know their places in a sentence.

    From left to right, leaf i of the copy is the `Leaf` words[i] with the span spans[i]: (start, end) in characters
    from the start of the sentence. The words need not be those of `tree`, but there must be one for each of its leaves.
    """
    new_leaves = iter([Leaf(word, *span) for word, span in zip(words, spans, strict=True)])

    def copy(node):
        if isinstance(node, nltk.Tree):
            return nltk.Tree(node.label(), [copy(child) for child in node])
        return next(new_leaves)  # the leaves are visited from left to right, as the words are

    return copy(tree)


def nodes(tree: nltk.Tree) -> list:
    """Return all nodes of a tree, its leaves included, parents before children and left before right."""
    visited = []
    stack = [tree]
    while stack:
        node = stack.pop()
        visited.append(node)
        if isinstance(node, nltk.Tree):
            stack.extend(reversed(node))  # so that the leftmost child is taken from the stack first
    return visited


def leaves(tree: nltk.Tree) -> list:
    """Return the same as `tree.leaves()`, for trees of any depth."""
    return [node for node in nodes(tree) if not isinstance(node, nltk.Tree)]


def cut(tree: nltk.Tree, bounds: Sequence[int], most: int) -> Iterator[tuple[int, bool]]:
    """Cut a tree into phrases, as the paper's parsing rule does (§3.2.1), and yield their ends from left to right.

    The descent is depth-first. It ends at a node with at most `most` tokens, and at a node with a single leaf, which
    cannot be cut further. Yields for each such node `(number of the first token after it, whether it has one leaf)`.

    Args:
        bounds: the tokens of leaf i are bounds[i] … bounds[i+1]−1, so there is one bound more than there are leaves.
        most: the largest number of tokens with which a node of several leaves stays whole.
    """
    # 1. Count the leaves below every node, from the bottom up: `nodes` has parents before children. A leaf itself gets
    #    no entry and counts as one.
    leaves_below: dict[int, int] = {}  # by the node's id, since two nodes may be equal
    for node in reversed(nodes(tree)):
        if isinstance(node, nltk.Tree):
            leaves_below[id(node)] = sum(leaves_below.get(id(child), 1) for child in node)

    # 2. Descend.
    stack = [tree]
    leaf = 0  # the number of the first leaf of the next node
    while stack:
        node = stack.pop()
        count = leaves_below.get(id(node), 1)
        is_short = bounds[leaf + count] - bounds[leaf] <= most
        if count == 1 or is_short:
            leaf += count
            yield bounds[leaf], count == 1
        else:
            stack.extend(reversed(node))  # so that the leftmost child comes first


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
_WORD = re.compile(r"[^\s(\[{\"'“‘«]+$")  # the last word of a text


def split_sentences(text: str) -> list[tuple[int, int]]:
    """Return `(start, end)` in characters of every sentence, without the white space around it.

    A sentence always ends at a line break, and at a mark that ends sentences in another script, such as `。`, `！`. It
    also ends at `.`, `!`, `?` and `…` if white space follows, or if Chinese or Japanese characters stand around the
    mark. Quotes and brackets that close after a mark belong to its sentence.

    Before white space there are exceptions. A full stop ends no sentence if it belongs to an abbreviation, an initial
    or the number of a list item; several dots end none if lower case follows. So a sentence that ends with an
    abbreviation is not split from the next one.
    """
    edges = [0]  # characters at which a sentence ends and the next one begins
    for match in _END.finditer(text):
        # Line breaks (`line`) and marks of other scripts (`wide`) always end a sentence; other marks may not.
        if match["line"] or match["wide"] or not _is_inside_sentence(text, edges[-1], match):
            edges.append(match.end())
    spans = []
    for start, end in itertools.pairwise([*edges, len(text)]):
        part = text[start:end]
        if part.strip():
            space_before = len(part) - len(part.lstrip())
            spans.append((start + space_before, start + len(part.rstrip())))
    return spans


def _is_inside_sentence(text: str, start: int, mark: re.Match) -> bool:
    """Return whether a mark such as a full stop does not end the sentence that begins at `start`.

    `mark` is a match of `_END` with a `stop`: one or more of `.`, `!`, `?`, `…` or double marks, before white space.
    """
    is_before_lower_case = text[mark.end() :].lstrip(" \t")[:1].islower()
    # Several dots may be a pause, as in "well ... no". Marks such as ! always end a sentence.
    if mark["stop"] != ".":
        has_only_dots = set(mark["stop"]) <= set(".…")
        return is_before_lower_case and has_only_dots
    last_word = _WORD.search(text, start, mark.start())
    word = last_word[0].lower() if last_word else ""
    is_first_word = text[start : mark.start()].strip() == word
    if word.isdigit() and is_first_word:
        return True  # the number of a list item, as in "1. First"
    if word in OFTEN_LAST:
        return is_before_lower_case
    is_initial = len(word) == 1 and word.isalpha() and word != "i"  # "so am I." ends a sentence
    return is_initial or word in ABBREVIATIONS or _DOTTED.fullmatch(word) is not None
