"""Parse English with stanza's neural parser, an optional package; its model is downloaded once."""

from functools import lru_cache
from typing import Any

import nltk

from marlhf_lite.parsing.base import ParsedSentence, place_leaves
from marlhf_lite.utils.errors import InputError


class StanzaParser:
    """Parse with a stanza pipeline, which also splits the sentences.

    Raises `InputError`, when made, if the package or its model is missing.

    Args:
        pipeline: a `stanza.Pipeline` with the processors tokenize, pos and constituency; None makes an English one.
    """

    background = True  # stanza computes in torch, which lets other threads go on

    def __init__(self, pipeline: Any = None):
        self.pipeline = pipeline if pipeline is not None else _english()
        self._parse = lru_cache(2048)(self._parse_text)

    def __call__(self, text: str) -> list[ParsedSentence]:
        return self._parse(text) if text.strip() else []

    def _parse_text(self, text: str) -> list[ParsedSentence]:
        return [s for s in map(read_sentence, self.pipeline(text).sentences) if s.start < s.end]


def _english() -> Any:
    try:
        import stanza
    except ImportError:
        raise InputError(
            "parser stanza: the package is not installed: pip install 'marlhf-lite[parse]' (or pip install stanza)"
        ) from None
    try:
        return stanza.Pipeline("en", processors="tokenize,pos,constituency", verbose=False)
    except Exception as error:  # stanza raises its own, requests' and file errors when the model cannot be had
        raise InputError(
            f"parser stanza: its English model is not here ({type(error).__name__}): on a machine with a network, run "
            "python -c \"import stanza; stanza.download('en')\""
        ) from None


def read_sentence(sentence: Any) -> ParsedSentence:
    """Convert a stanza sentence. Of words that share a token without spans of their own (`don't`), the first gets all
    characters and the others none."""
    spans: list[tuple[int, int]] = []
    for token in sentence.tokens:
        for place, word in enumerate(token.words):
            start, end = getattr(word, "start_char", None), getattr(word, "end_char", None)
            if start is None or end is None:
                start, end = (token.start_char if place == 0 else token.end_char), token.end_char
            spans.append((start, end))
    start, end = sentence.tokens[0].start_char, sentence.tokens[-1].end_char
    tree = sentence.constituency and read_tree(sentence.constituency)
    if not tree or len(tree.leaves()) != len(spans):
        return ParsedSentence(start, end, None)
    return ParsedSentence(start, end, place_leaves(tree, [(a - start, b - start) for a, b in spans], tree.leaves()))


def read_tree(tree: Any) -> nltk.Tree | str:
    """Convert stanza's tree (`label`, `children`; a leaf has none) to an `nltk.Tree` with plain words as leaves."""
    return nltk.Tree(tree.label, [read_tree(c) for c in tree.children]) if tree.children else tree.label
