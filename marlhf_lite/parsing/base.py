"""What a parser is: text in, sentences with constituency trees and character spans out.

Trees are plain `nltk.Tree`, so that they print and draw as usual. Their leaves are `Leaf`: strings that know where they
stand in their sentence. A sentence that could not be parsed has no tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, TypeVar

import nltk

from marlhf_lite.parsing.sentences import split_sentences
from marlhf_lite.parsing.trees import Leaf, leaves
from marlhf_lite.utils.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class ParsedSentence:
    """text[start:end] and its tree; None where there is none. Trees may be shared between sentences: do not edit."""

    start: int
    end: int
    tree: nltk.Tree | None


class Parser(Protocol):
    """Any function from a text to its sentences, in order and apart; white space between them may be left out.

    Text in no sentence counts as a sentence without a tree. A parser is called from several threads at once if it has
    an attribute ``workers`` above 1 (see `Parsing`).
    """

    def __call__(self, text: str) -> list[ParsedSentence]: ...


class Memo:
    """A bounded cache: the least recently used entry goes first. Safe to use from several threads."""

    def __init__(self, make: Callable[[str], T], size: int = 8192):
        self.make, self.size = make, size
        self._kept: OrderedDict[str, T] = OrderedDict()
        self._lock = Lock()

    def __call__(self, key: str) -> T:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        value = self.make(key)  # unlocked: two threads may do the same work, none waits for the other
        with self._lock:
            self._kept[key] = value
            if len(self._kept) > self.size:
                self._kept.popitem(last=False)
        return value

    def __len__(self) -> int:
        return len(self._kept)


class SentenceParser:
    """A parser that takes one sentence at a time: a subclass gives `parse_sentence`; results are cached by its text."""

    workers = 0  # threads that `Parsing` starts for it; 0 parses where it is called

    def __init__(self, cache: int = 8192):
        self._parse = Memo(self.parse_sentence, cache)

    def parse_sentence(self, sentence: str) -> nltk.Tree | None:
        """The tree of a sentence without white space at its ends, leaves as `Leaf`; None if there is none."""
        raise NotImplementedError

    def __call__(self, text: str) -> list[ParsedSentence]:
        return [ParsedSentence(a, b, self._parse(text[a:b])) for a, b in split_sentences(text)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def check_sentences(sentences: Sequence[ParsedSentence], text: str, who: str) -> None:
    """Are they in order, apart and inside the text, and likewise the leaves in each? Raises InputError if not."""
    last = 0
    for sentence in sentences:
        if not last <= sentence.start <= sentence.end <= len(text):
            raise InputError(
                f"{who}: the parser gave a sentence at characters {sentence.start} to {sentence.end}, after one that "
                f"ends at {last}, in a text of {len(text)}: sentences must be in order and apart"
            )
        last, place = sentence.end, 0
        for leaf in [] if sentence.tree is None else leaves(sentence.tree):
            if not isinstance(leaf, Leaf) or not place <= leaf.start <= leaf.end <= sentence.end - sentence.start:
                whole = text[sentence.start : sentence.end]
                raise InputError(
                    f"{who}: the parser gave the leaf {leaf!r} in the sentence {whole!r}: "
                    "leaves must be of class Leaf, in order and apart, with spans from the start of their sentence"
                )
            place = leaf.end
