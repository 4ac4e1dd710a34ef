"""A parser of your own: stanza's trees of English, after `pip install stanza`. With this file in the current folder:
marlhf run --termination stanza_phrases:Phrases"""

import nltk
import stanza

from marlhf_lite.parsing import ParsedSentence, Parsing
from marlhf_lite.parsing.base import place_leaves


class Phrases(Parsing):
    """Phrases of fewer than `cutoff` tokens from stanza's trees. Stanza downloads its English model once."""

    def __init__(self, cutoff=5):
        super().__init__(StanzaParser(), cutoff)


class StanzaParser:
    """A function from a text to its sentences with their trees; stanza also splits the sentences."""

    def __init__(self):
        self.pipeline = stanza.Pipeline("en", processors="tokenize,pos,constituency", verbose=False)

    def __call__(self, text):
        if not text.strip():
            return []
        parsed = [read_sentence(sentence) for sentence in self.pipeline(text).sentences]
        return [sentence for sentence in parsed if sentence.start < sentence.end]


def read_sentence(sentence):
    """Convert a stanza sentence. If words without spans share a token (`don't`), the first word gets all characters."""
    spans = []
    for token in sentence.tokens:
        for place, word in enumerate(token.words):
            start = getattr(word, "start_char", None)
            end = getattr(word, "end_char", None)
            if start is None or end is None:  # the others get an empty span at the token's end
                start = token.start_char if place == 0 else token.end_char
                end = token.end_char
            spans.append((start, end))
    first = sentence.tokens[0].start_char
    last = sentence.tokens[-1].end_char
    tree = None
    if sentence.constituency:
        tree = read_tree(sentence.constituency)
    if not tree or len(tree.leaves()) != len(spans):  # then no leaf can be given its place
        return ParsedSentence(first, last, None)
    places = [(start - first, end - first) for start, end in spans]  # within the sentence
    return ParsedSentence(first, last, place_leaves(tree, places, tree.leaves()))


def read_tree(tree):
    """Convert stanza's tree (`label`, `children`; a leaf has none) to an `nltk.Tree` with plain words as leaves."""
    if not tree.children:
        return tree.label
    return nltk.Tree(tree.label, [read_tree(child) for child in tree.children])
