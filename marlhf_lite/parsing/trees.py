"""Constituency trees: leaves that know their place, and the descent that cuts a tree into macro actions.

Nothing here recurses, except `place_leaves`: syntax trees of broken programs can be deeper than Python's stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import nltk


class Leaf(str):
    """A word or mark of a tree, with its span in characters from the start of its sentence, end excluded."""

    start: int
    end: int

    def __new__(cls, word: str, start: int, end: int) -> Leaf:
        leaf = super().__new__(cls, word)
        leaf.start, leaf.end = start, end
        return leaf

    def __getnewargs__(self) -> tuple[str, int, int]:
        return str(self), self.start, self.end


def place_leaves(tree: nltk.Tree, spans: Sequence[tuple[int, int]], words: Sequence[str]) -> nltk.Tree:
    """A copy of `tree` with these words and spans as its leaves, one each, left to right. Recurses with the tree."""
    remaining = iter(zip(words, spans, strict=True))

    def copy(node):
        if isinstance(node, nltk.Tree):
            return nltk.Tree(node.label(), [copy(child) for child in node])
        word, span = next(remaining)
        return Leaf(word, *span)

    return copy(tree)


def leaves(tree: nltk.Tree) -> list:
    """Like ``tree.leaves()``, for trees of any depth (syntax trees of broken programs can be deep)."""
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, nltk.Tree):
            stack.extend(reversed(node))
        else:
            found.append(node)
    return found


def _leaf_counts(tree: nltk.Tree) -> dict[int, int]:
    """Leaves below every node, by the node's id."""
    order, stack = [], [tree]
    while stack:
        order.append(stack.pop())
        stack += [child for child in order[-1] if isinstance(child, nltk.Tree)]
    counts: dict[int, int] = {}
    for node in reversed(order):
        counts[id(node)] = sum(counts[id(c)] if isinstance(c, nltk.Tree) else 1 for c in node)
    return counts


def cut(tree: nltk.Tree, bounds: Sequence[int], most: int) -> Iterator[tuple[int, int, bool]]:
    """The nodes where the descent ends, in order: (first token, end of its tokens, does it join the one before).

    Args:
        bounds: the tokens of leaf i are bounds[i] … bounds[i+1]−1; one longer than there are leaves.
        most: tokens that a node with several leaves may have to stay whole.
    """
    counts, stack, leaf = _leaf_counts(tree), [tree], 0
    while stack:
        node = stack.pop()
        size = counts[id(node)] if isinstance(node, nltk.Tree) else 1
        first, last = bounds[leaf], bounds[leaf + size]
        if size == 1 or last - first <= most:
            yield first, last, size == 1
            leaf += size
        else:
            stack.extend(reversed(node))
