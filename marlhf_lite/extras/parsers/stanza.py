"""Parse English with stanza's neural parser, an optional package; its model is downloaded once."""

from typing import Any

import nltk

from marlhf_lite.parsing.base import ParsedSentence, place_leaves
from marlhf_lite.utils.errors import InputError


class StanzaParser:
    """Parse with stanza's English pipeline, which also splits the sentences.

    The constructor raises `InputError` if the package or its model is missing.
    """

    background = True  # stanza computes in torch, so other threads can run

    def __init__(self):
        try:
            import stanza
        except ImportError:
            fix = "pip install 'marlhf-lite[parse]' (or pip install stanza)"
            raise InputError(f"parser stanza: the package is not installed: {fix}") from None
        try:
            self.pipeline = stanza.Pipeline("en", processors="tokenize,pos,constituency", verbose=False)
        except Exception as error:  # stanza's own, requests' and file errors if the model cannot be loaded
            fix = "on a machine with a network, run python -c \"import stanza; stanza.download('en')\""
            what = f"its English model is not here ({type(error).__name__})"
            raise InputError(f"parser stanza: {what}: {fix}") from None

    def __call__(self, text: str) -> list[ParsedSentence]:
        sentences = self.pipeline(text).sentences if text.strip() else []
        return [sentence for sentence in map(read_sentence, sentences) if sentence.start < sentence.end]


def read_sentence(sentence: Any) -> ParsedSentence:
    """Convert a stanza sentence. If words without spans share a token (`don't`), the first word gets all characters."""
    spans: list[tuple[int, int]] = []
    for token in sentence.tokens:
        for place, word in enumerate(token.words):
            start, end = getattr(word, "start_char", None), getattr(word, "end_char", None)
            if start is None or end is None:
                start, end = (token.end_char if place else token.start_char), token.end_char
            spans.append((start, end))
    start, end = sentence.tokens[0].start_char, sentence.tokens[-1].end_char
    tree = sentence.constituency and read_tree(sentence.constituency)
    if not tree or len(tree.leaves()) != len(spans):
        return ParsedSentence(start, end, None)
    return ParsedSentence(start, end, place_leaves(tree, [(a - start, b - start) for a, b in spans], tree.leaves()))


def read_tree(tree: Any) -> nltk.Tree | str:
    """Convert stanza's tree (`label`, `children`; a leaf has none) to an `nltk.Tree` with plain words as leaves."""
    return nltk.Tree(tree.label, [read_tree(c) for c in tree.children]) if tree.children else tree.label
