"""A constituency tree with its cut, as a figure and as text (§3.2.1, Figure 12)."""

from __future__ import annotations

from collections.abc import Sequence

import nltk
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.plotting.macro_actions import COLOURS
from marlhf_lite.utils.errors import InputError


def tree_cut(tree: nltk.Tree, counts: Sequence[int] | None = None, most: int = 4) -> tuple[set, list[tuple[int, int]]]:
    """Where `Parsing` ends its descent: positions of those nodes in the tree, and macro actions as spans of leaves.

    Args:
        counts: model tokens of every leaf; None counts a word as one token.
        most: tokens that a node with several leaves may have; a cutoff C is ``most=C - 1``, inclusive ``most=C``.
    """
    counts = _counts(tree, counts)
    ends, starts, leaf, stack = set(), [], 0, [()]
    while stack:
        position = stack.pop()
        node = tree[position]
        size = len(node.leaves()) if isinstance(node, nltk.Tree) else 1
        if size > 1 and sum(counts[leaf : leaf + size]) > most:
            stack.extend((*position, child) for child in reversed(range(len(node))))
            continue
        ends.add(position)
        if size > 1 or not starts:
            starts.append(leaf)
        leaf += size
    return ends, list(zip(starts, [*starts[1:], leaf], strict=True))


def tree_text(tree: nltk.Tree, counts: Sequence[int] | None = None, most: int = 4) -> str:
    """The tree as indented lines of label and tokens; ■ and the words where the descent ends, + where a leaf joins."""
    ends, _ = tree_cut(tree, counts, most)
    counts = _counts(tree, counts)
    lines, leaf, stack = [], 0, [()]
    while stack:
        position = stack.pop()
        node = tree[position]
        inner = isinstance(node, nltk.Tree)
        words = [str(word) for word in node.leaves()] if inner else [str(node)]
        name = f"{node.label()} {sum(counts[leaf : leaf + len(words)])}" if inner else f"{counts[leaf]}"
        if position in ends:
            mark = "+" if len(words) == 1 and leaf else "■"
            lines.append(f"{'  ' * len(position)}{mark} {name}  {' '.join(words)}")
            leaf += len(words)
        else:
            lines.append(f"{'  ' * len(position)}{name}")
            stack.extend((*position, child) for child in reversed(range(len(node))))
    return "\n".join(lines)


def tree_figure(tree: nltk.Tree, counts: Sequence[int] | None = None, most: int = 4, ax: Axes | None = None) -> Axes:
    """A constituency tree with its cut: nodes with their tokens, framed where the descent ends, macro actions below.

    Arguments as in `tree_cut`. Nodes under the cut are faint.
    """
    counts = _counts(tree, counts)
    ends, runs = tree_cut(tree, counts, most)
    words = [str(word) for word in tree.leaves()]
    edges = np.concatenate([[0], np.cumsum([max(len(word), 3) + 1.6 for word in words])])
    depth = tree.height() - 1
    if ax is None:
        size = (max(edges[-1] * 0.088, 3.0), 0.36 * (depth + 1.6))
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    ax.set(xlim=(0, edges[-1]), ylim=(depth + 1.1, -0.5))
    ax.axis("off")
    _draw_node(ax, tree, (), 0, _Leaves(edges, counts, depth), ends, False)
    for number, (a, b) in enumerate(runs):
        left, right = edges[a] + 0.3, edges[b] - 0.3
        ax.plot([left, right], [depth + 0.45] * 2, color=COLOURS[number % 2], linewidth=3, solid_capstyle="butt")
        note = f"{sum(counts[a:b])}"
        ax.text((left + right) / 2, depth + 0.8, note, ha="center", va="center", fontsize=8, parse_math=False)
    return ax


class _Leaves:
    """Where leaves stand: their edges, tokens, and the depth of their line."""

    def __init__(self, edges: np.ndarray, counts: Sequence[int], depth: int):
        self.edges, self.counts, self.depth, self.done = edges, counts, depth, 0


def _draw_node(ax: Axes, node, position: tuple, level: int, where: _Leaves, ends: set, below: bool) -> tuple:
    """Draws a node and all below it; its x and y."""
    faint, first = ("0.6" if below else "black"), where.done
    if isinstance(node, nltk.Tree):
        under = below or position in ends
        spots = [_draw_node(ax, c, (*position, i), level + 1, where, ends, under) for i, c in enumerate(node)]
        x, y = (spots[0][0] + spots[-1][0]) / 2, level
        for spot in spots:
            ax.plot([x, spot[0]], [y, spot[1]], color="0.8" if under else "0.45", linewidth=0.8, zorder=1)
        text = f"{node.label()} {sum(where.counts[first : where.done])}"
    else:
        x, y = (where.edges[first] + where.edges[first + 1]) / 2, where.depth
        where.done, text, faint = first + 1, str(node), "black"
    frame = {"boxstyle": "round,pad=0.2", "fc": "white", "ec": "black" if position in ends else "none", "lw": 0.9}
    ax.text(x, y, text, ha="center", va="center", fontsize=8, color=faint, bbox=frame, zorder=2, parse_math=False)
    return x, y


def _counts(tree: nltk.Tree, counts: Sequence[int] | None) -> list[int]:
    words = len(tree.leaves())
    if counts is not None and len(counts) != words:
        raise InputError(f"counts: {len(counts)} for a tree of {words} leaves: give one number of tokens for each")
    return [1] * words if counts is None else [int(c) for c in counts]
