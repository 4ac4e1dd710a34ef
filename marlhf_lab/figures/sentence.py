"""Figures of the sentence that goes through notebooks 01, 04, 05 and 08. Each returns its Axes, for `notebook.show`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.macro import MacroActions
from marlhf_lite.plotting.styles import METHODS, SERIES, method_styles

# colours of quantities
UP = SERIES[1]
DOWN = SERIES[3]
BOTH = SERIES[0]


def value_steps(words: Sequence[str], values: Sequence[float]) -> Axes:
    """Draw the expected score as the sentence grows; the arrow at each word is its advantage.

    Args:
        words: the T words of the sentence.
        values: [T + 1], the expected score before each word, and the score.
    """
    _, ax = plt.subplots()
    values = np.asarray(values)
    # Step i is the value after i words. The last one stands there twice, because a step needs an end.
    levels = [*values, values[-1]]
    label = "V: score expected so far"
    ax.step(range(len(levels)), levels, where="post", color="0.35", label=label)
    for t, (before, after) in enumerate(pairwise(values), start=1):
        colour = UP if after > before else DOWN
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 2.5}
        ax.annotate("", (t, after), (t, before), arrowprops=arrow)
        text = f"A = {after - before:+.2f}".replace("-", "−")
        ax.text(t + 0.08, (before + after) / 2, text, color=colour, va="center")
    ax.set(xlabel="words written", ylabel="expected score", xlim=(0, len(values)), ylim=(0.5, 1.4))
    ax.set_xticks(range(len(values)), ["none", *words])
    ax.legend(loc="upper left")
    return ax


def errors_by_lam(
    lams: Sequence[float], errors: Mapping[str, Mapping[str, Sequence[float]]]
) -> Axes:
    """Draw bias, noise, and both together, of a batch's gradient by λ, a panel for each critic.

    A dot marks the λ at which both together are smallest.

    Args:
        lams: [N] the values of λ.
        errors: critic -> {"bias": [N], "noise": [N], "both": [N]}.
    """
    figure, axes = plt.subplots(1, len(errors), figsize=(7.4, 3), sharey=True)
    looks = {"bias": (DOWN, "--"), "noise": (UP, "-."), "both": (BOTH, "-")}
    for ax, (name, parts) in zip(axes, errors.items(), strict=True):
        for part, (colour, line) in looks.items():
            ax.plot(lams, parts[part], color=colour, linestyle=line, linewidth=2, label=part)
        best = int(np.argmin(parts["both"]))
        ax.plot(lams[best], parts["both"][best], "o", color=BOTH)
        ax.set(title=f"{name} critic", xlabel="λ", xticks=(0, 0.5, 1))
    axes[0].set_ylabel("error of a batch's gradient")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return axes[0]


def changes(words: Sequence[str], ratios: Mapping[str, Sequence[float]], border: float) -> Axes:
    """Draw the ratio of new to old probability for each word and method, as bars from 1 up or down.

    Args:
        words: the words of the sentence.
        ratios: two methods' names to their ratios, one for each word.
        border: where the two macro actions meet, on the x axis, on which word i is at i.
    """
    _, ax = plt.subplots()
    places = np.arange(len(words))
    for shift, (name, ratio) in zip((-0.2, 0.2), ratios.items(), strict=True):
        colour = method_styles([name])[name]["color"]
        ax.bar(places + shift, np.asarray(ratio) - 1, 0.38, bottom=1, color=colour, label=name)
    ax.axhline(1, color="0.3", linewidth=0.8)
    ax.axvline(border, color="0.3", linestyle=":", linewidth=1.2)
    ax.set(xlabel="word (dotted: bound of the macro actions)", ylabel="new probability / old")
    ax.set_xticks(places, words)
    ax.legend(loc="upper right")
    return ax


def pooled_values(
    words: Sequence[str], values: Sequence[float], macro: MacroActions, pooled: Mapping
) -> Axes:
    """Draw the values of single words as dots, and the values of macro actions as lines, one for each σ, with its name.

    The lines stand at the exact values. If lines are close to each other, their names are moved apart, and a thin line
    leads to each.

    Args:
        words, values: [T] of one answer.
        macro: the segmentation; the figure shows the spans of its first answer.
        pooled: {σ: [S] values of this answer's macro actions}.
    """
    _, ax = plt.subplots(figsize=(7.2, 3.6))
    ax.plot(range(len(words)), values, "o", color="0.3", label="value before the word")
    lines = dict(zip(pooled, ("-", "--", "-.", ":", (0, (5, 1))), strict=False))
    for number, (start, end) in enumerate(macro.spans()[0]):
        left = start - 0.4
        right = end - 0.75
        levels = [float(of_actions[number]) for of_actions in pooled.values()]
        heights_of_names = _apart(levels, least=0.045)
        for sigma, level, height in zip(pooled, levels, heights_of_names, strict=True):
            method = f"sigma {sigma}"
            colour = method_styles([method])[method]["color"]
            ax.hlines(level, left, right, color=colour, linestyle=lines[sigma], linewidth=2)
            ax.plot([right, right + 0.1], [level, height], color=colour, linewidth=0.8)
            # in black: some of the lines' colours are too pale for words
            ax.text(right + 0.13, height, sigma, color="0.2", va="center", fontsize="small")
    ax.set(xlabel="word", ylabel="value", xlim=(-0.6, len(words) + 0.6))
    ax.set_xticks(range(len(words)), words)
    ax.legend(loc="upper left")
    return ax


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """The heights, each moved up as little as needed to stand at least `least` above the next lower one."""
    moved = [0.0] * len(heights)
    highest = -np.inf  # of those that are placed so far
    for place in np.argsort(heights):  # from the lowest up
        highest = max(heights[place], highest + least)
        moved[place] = highest
    return moved


def ratio_spread(moves: np.ndarray, sizes: Sequence[int], outside: Sequence[float]) -> Axes:
    """Draw how the ratio of a macro action spreads with its length.

    Left, histograms of the ratio for three lengths; the grey band is 1 ± 0.2, inside of which nothing is clipped.
    Right, the share of ratios outside the band by length.

    Args:
        moves: [draws, T], log-ratios of single tokens; the log-ratio of a macro action is their sum.
        sizes: [N] lengths of macro actions in tokens; the first is 1.
        outside: [N] the share of ratios outside 1 ± 0.2 for each length.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3))
    styles = method_styles(["n=1", "n=5", "n=20"])
    for n in (1, 5, 20):
        ratios = np.exp(moves[:, :n].sum(1))
        counts, edges = np.histogram(ratios, bins=40, range=(0.4, 1.6))
        style = styles[f"n={n}"]
        left.stairs(counts / len(moves), edges, linewidth=1.6, label=f"n = {n}", **style)
    left.axvspan(0.8, 1.2, color="0.5", alpha=0.15, lw=0)
    left.set(xlabel="ratio of a macro action", ylabel="share of macro actions")
    left.legend(loc="upper left")
    right.semilogx(sizes, outside, "o-", color=METHODS["ratio macro"].colour, label="macro ratio")
    right.axhline(outside[0], color="0.4", linestyle="--", label="token ratio")
    right.set_xticks(sizes, [f"{n}" for n in sizes])
    right.minorticks_off()
    right.set(xlabel="n, tokens in a macro action", ylabel="share outside 1 ± 0.2", ylim=(-0.02, 1))
    right.legend()
    return left


def learnt_values(start: Sequence[float], ends: Mapping[str, Sequence[float]], goal: float) -> Axes:
    """Draw the values of one macro action's tokens before and after learning a return.

    Args:
        start: [n] the values before.
        ends: two losses' names to the values [n] after.
        goal: the return.
    """
    _, ax = plt.subplots()
    places = range(len(start))
    ax.plot(places, start, "o:", color="0.4", label="start")
    for (name, end), line in zip(ends.items(), ("C0s-", "C3^--"), strict=True):
        ax.plot(places, end, line, label=name)
    ax.axhline(goal, color="0.3", linewidth=0.8, label="return")
    ax.set(xlabel="token of the macro action", ylabel="value", xticks=places)
    ax.legend(loc="lower right")
    return ax
