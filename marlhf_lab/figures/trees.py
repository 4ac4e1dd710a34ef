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
    """Return the nodes at which the rule `Parsing` ends its descent, and the macro actions that follow from them.

    Nodes are given by their positions in the tree, macro actions as spans (first, last + 1) of leaves.

    Args:
        tree: the sentence.
        counts: how many tokens of the model each leaf has.
        most: the largest number of tokens with which a node of several leaves stays whole. For a cutoff C it is C − 1,
            because phrases of fewer than C tokens do; if the cutoff is inclusive, C.
    """
    ends = set()
    starts: list[int] = []  # the first leaf of each macro action
    covered = 0  # how many leaves, from the left, are under the ends found so far
    # Depth first, as the rule descends: parents before their children, and children from left to right.
    for position, (first, last) in _leaves_under(tree).items():
        has_several_leaves = last - first > 1
        is_below_an_end = first < covered
        is_too_large = has_several_leaves and sum(counts[first:last]) > most
        if is_below_an_end or is_too_large:
            continue
        ends.add(position)
        if has_several_leaves or not starts:  # a single leaf joins the macro action before it
            starts.append(first)
        covered = last
    return ends, list(pairwise([*starts, covered]))


def tree_figure(tree: nltk.Tree, counts: Sequence[int], most: int) -> Axes:
    """Draw a tree and how the rule `Parsing` cuts it; arguments as for `tree_cut`.

    Each node has its label and its number of tokens. Nodes at which the descent ends have a frame, and nodes below
    these are faint. Lines under the leaves are the macro actions, with their numbers of tokens.
    """
    ends, macro_actions = tree_cut(tree, counts, most)
    leaves_under = _leaves_under(tree)
    # 1. Leaves stand side by side, each as wide as its word; all stand in the lowest line.
    lowest_line = tree.height() - 1
    widths = [max(len(str(word)), 3) + 2.2 for word in tree.leaves()]
    edges = np.concatenate([[0], np.cumsum(widths)])  # leaf i is between edges i and i + 1
    _, ax = plt.subplots(
        figsize=(max(edges[-1] * 0.088, 3.0), 0.36 * (lowest_line + 1.6)), layout="constrained"
    )
    ax.set(xlim=(0, edges[-1]), ylim=(lowest_line + 1.1, -0.5))
    ax.axis("off")
    # 2. Nodes and leaves, in reverse: a node stands in the middle above its children, so their places come first.
    places: dict[tuple, tuple[float, int]] = {}
    for position in reversed(leaves_under):
        node = tree[position]
        first, last = leaves_under[position]
        is_faint = _is_below(position, ends)
        is_end = position in ends
        if isinstance(node, nltk.Tree):
            text = f"{node.label()} {sum(counts[first:last])}"
            colour_of_text = "0.6" if is_faint else "black"
            children = [places[*position, number] for number in range(len(node))]
            x = (children[0][0] + children[-1][0]) / 2
            y = len(position)  # how many nodes are above it
            colour_of_lines = "0.8" if is_faint or is_end else "0.45"
            for child_x, child_y in children:
                ax.plot([x, child_x], [y, child_y], color=colour_of_lines, linewidth=0.8, zorder=1)
        else:
            text = str(node)
            colour_of_text = "black"
            x = (edges[first] + edges[last]) / 2
            y = lowest_line
        places[position] = x, y
        frame = {
            "boxstyle": "round,pad=0.2",
            "fc": "white",
            "ec": "black" if is_end else "none",
            "lw": 0.9,
        }
        ax.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            zorder=2,
            color=colour_of_text,
            bbox=frame,
            fontsize=9,
            parse_math=False,
        )
    # 3. Macro actions: lines under the leaves, with their tokens.
    for number, (first, last) in enumerate(macro_actions):
        left = edges[first] + 0.3
        right = edges[last] - 0.3
        ax.plot(
            [left, right],
            [lowest_line + 0.45] * 2,
            color=SPANS[number % 2],
            linewidth=3,
            solid_capstyle="butt",
        )
        ax.text(
            (left + right) / 2,
            lowest_line + 0.8,
            str(sum(counts[first:last])),
            ha="center",
            va="center",
            fontsize=9,
            parse_math=False,
        )
    return ax


def _leaves_under(tree: nltk.Tree) -> dict[tuple, tuple[int, int]]:
    """Return position -> (first, last + 1), the numbers of the leaves under it, for every node and leaf, depth first.

    Under a leaf's position there is the leaf itself.
    """
    positions_of_leaves = tree.treepositions("leaves")
    leaves_under = {}
    for position in tree.treepositions():
        numbers = []
        for number, position_of_leaf in enumerate(positions_of_leaves):
            # A position is the path from the root; a leaf is under all beginnings of its path.
            if position_of_leaf[: len(position)] == position:
                numbers.append(number)
        leaves_under[position] = numbers[0], numbers[-1] + 1
    return leaves_under


def _is_below(position: tuple, ends: set) -> bool:
    """Whether one of the nodes above this position is in `ends`."""
    return any(position[:depth] in ends for depth in range(len(position)))
