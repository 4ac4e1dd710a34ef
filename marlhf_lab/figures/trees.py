"""A constituency tree with its cut, as a figure and as text (§3.2.1, Figure 12)."""

from collections.abc import Sequence
from itertools import pairwise

import nltk
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.plotting.styles import SPANS


def tree_cut(
    tree: nltk.Tree, counts: Sequence[int], most: int
) -> tuple[set, list[tuple[int, int]]]:
    """Return the positions in the tree where `Parsing` ends its descent, and macro actions as spans of leaves.

    Args:
        counts: model tokens of every leaf.
        most: tokens that a node with several leaves may have; a cutoff C is ``most=C - 1``, inclusive ``most=C``.
    """
    ends, starts, done = set(), [], 0
    for position, (first, last) in _spans(tree).items():
        several = last - first > 1
        # below an end, or too large to be one
        if first < done or (several and sum(counts[first:last]) > most):
            continue
        ends.add(position)
        if several or not starts:  # a single leaf joins the macro action before it
            starts.append(first)
        done = last
    return ends, list(pairwise([*starts, done]))


def tree_figure(tree: nltk.Tree, counts: Sequence[int], most: int) -> Axes:
    """Draw a tree with its cut: nodes with their tokens, framed where the descent ends, and macro actions below.

    Arguments as in `tree_cut`. Nodes under the cut are faint.
    """
    ends, runs = tree_cut(tree, counts, most)
    spans, depth = _spans(tree), tree.height() - 1
    edges = np.concatenate(
        [[0], np.cumsum([max(len(str(word)), 3) + 2.2 for word in tree.leaves()])]
    )
    ax = plt.subplots(
        figsize=(max(edges[-1] * 0.088, 3.0), 0.36 * (depth + 1.6)), layout="constrained"
    )[1]
    ax.set(xlim=(0, edges[-1]), ylim=(depth + 1.1, -0.5))
    ax.axis("off")
    places: dict[tuple, tuple[float, int]] = {}
    for position in reversed(spans):  # children before their parents
        node, (first, last) = tree[position], spans[position]
        faint, inner = _below(position, ends), isinstance(node, nltk.Tree)
        text, x, y = str(node), (edges[first] + edges[last]) / 2, depth
        if inner:
            text = f"{node.label()} {sum(counts[first:last])}"
            children = [places[*position, i] for i in range(len(node))]
            x, y = (children[0][0] + children[-1][0]) / 2, len(position)
            colour = "0.8" if faint or position in ends else "0.45"
            for child in children:
                ax.plot([x, child[0]], [y, child[1]], color=colour, linewidth=0.8, zorder=1)
        places[position] = x, y
        frame = {
            "boxstyle": "round,pad=0.2",
            "fc": "white",
            "ec": "black" if position in ends else "none",
            "lw": 0.9,
        }
        look = {
            "color": "0.6" if faint and inner else "black",
            "bbox": frame,
            "fontsize": 9,
            "parse_math": False,
        }
        ax.text(x, y, text, ha="center", va="center", zorder=2, **look)
    for number, (a, b) in enumerate(runs):
        left, right = edges[a] + 0.3, edges[b] - 0.3
        ax.plot(
            [left, right],
            [depth + 0.45] * 2,
            color=SPANS[number % 2],
            linewidth=3,
            solid_capstyle="butt",
        )
        note = str(sum(counts[a:b]))
        ax.text(
            (left + right) / 2,
            depth + 0.8,
            note,
            ha="center",
            va="center",
            fontsize=9,
            parse_math=False,
        )
    return ax


def _spans(tree: nltk.Tree) -> dict[tuple, tuple[int, int]]:
    """(first, last + 1) leaf under every position, depth first."""
    leaves = tree.treepositions("leaves")
    under = {
        p: [i for i, leaf in enumerate(leaves) if leaf[: len(p)] == p] for p in tree.treepositions()
    }
    return {position: (positions[0], positions[-1] + 1) for position, positions in under.items()}


def _below(position: tuple, ends: set) -> bool:
    return any(position[:depth] in ends for depth in range(len(position)))
