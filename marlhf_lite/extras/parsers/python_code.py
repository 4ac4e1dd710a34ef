"""Parse Python programs with tree-sitter, which gives every text a tree, even a broken program."""

from typing import Any

from marlhf_lite.parsing.base import Leaf, ParsedSentence
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.trees import nltk


class PythonParser:
    """Parse the whole text as one sentence. Parts that are not Python are under nodes named ERROR.

    The constructor raises `InputError` if the package is missing; a text never raises.
    """

    def __init__(self):
        try:  # optional packages, which nothing else needs
            import tree_sitter
            import tree_sitter_python
        except ImportError:
            fix = "pip install tree-sitter tree-sitter-python"
            raise InputError(f"--parser python: tree-sitter is not installed: {fix}") from None
        self._parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_python.language()))

    def __call__(self, text: str) -> list[ParsedSentence]:
        if not text.strip():
            return []
        root = self._parser.parse(text.encode(errors="replace")).root_node
        return [ParsedSentence(0, len(text), _tree_of(root, text))]


def _tree_of(root: Any, text: str) -> nltk.Tree:
    """Return the tree of a tree-sitter node, whose leaves know from where to where they stand in the text.

    A list of nodes that are still to be converted takes the place of recursion, because programs may nest deeper than
    Python's stack.
    """
    # tree-sitter gives places in bytes, and a leaf has them in characters. So this is the number of the character to
    # which each byte belongs, and at last the end of the text.
    character_of_byte = []
    for i, character in enumerate(text):
        character_of_byte += [i] * len(character.encode(errors="replace"))
    character_of_byte.append(len(text))

    top = nltk.Tree(root.type, [])
    still_to_convert = [(root, top)]
    while still_to_convert:
        node, tree = still_to_convert.pop()
        for child in node.children or [node]:  # a root without children is its own leaf
            if child.child_count:
                subtree = nltk.Tree(child.type, [])
                tree.append(subtree)  # it is filled later
                still_to_convert.append((child, subtree))
            else:
                start = character_of_byte[child.start_byte]
                end = character_of_byte[child.end_byte]
                tree.append(Leaf(text[start:end], start, end))
    return top
