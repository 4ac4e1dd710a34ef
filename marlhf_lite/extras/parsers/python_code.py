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
        try:
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
        return [ParsedSentence(0, len(text), _read(root, text))]


def _read(root: Any, text: str) -> nltk.Tree:
    """Convert a tree-sitter node, without recursion: programs may nest deeper than Python's stack."""
    # The character of each byte of the text, and of its end.
    character = [i for i, c in enumerate(text) for _ in c.encode(errors="replace")] + [len(text)]
    top = nltk.Tree(root.type, [])
    stack = [(root, top)]
    while stack:
        node, tree = stack.pop()
        for child in node.children or [node]:
            if child.child_count:
                tree.append(nltk.Tree(child.type, []))
                stack.append((child, tree[-1]))
            else:
                start, end = character[child.start_byte], character[child.end_byte]
                tree.append(Leaf(text[start:end], start, end))
    return top
