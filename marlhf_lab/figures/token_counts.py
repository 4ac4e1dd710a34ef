"""Figures of a data set: lengths in tokens, what a limit cuts, and labels against the true quality.

`counts` maps a part of the data to `prompt`, `chosen` and `rejected`, each the lengths of its texts in tokens.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.evaluation.statistics import bootstrap_mean
from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import SERIES
from marlhf_lite.utils.tables import markdown

Counts = Mapping[str, Mapping[str, np.ndarray]]
EDGES = (0.01, 0.5, 1, 1.5, 2, 3, 4, 6)  # of bins of the difference in gold score
SIDES = ("chosen", "rejected")


def length_table(name: str, counts: Counts) -> str:
    """Return a table in Markdown with a line for each part of the data (paper: Table 4).

    It has the number of rows, and the mean and the largest length of prompts and of answers. `name`, that of the data
    set, is the head of the first column.
    """
    lines = []
    for part, lengths in counts.items():
        line = [part, str(len(lengths["prompt"]))]
        for of_texts in lengths.values():  # prompts, chosen and rejected answers
            line += [f"{of_texts.mean():.1f}", f"{of_texts.max()}"]
        lines.append(line)
    return markdown(
        [name, "rows", "prompt, mean", "max", "chosen, mean", "max", "rejected, mean", "max"], lines
    )


@plt.rc_context(plots.STYLE)
def length_figure(counts: Counts) -> np.ndarray:
    """Draw the distribution of prompt lengths in each part (left), and of chosen and rejected answers' lengths (right).

    On the right a thin line marks each mean. Returns the [2] Axes.
    """
    axes = plots.subplots((1, 2), 0.45)[0]
    of_prompts, of_answers = axes
    prompts = joined(counts, "prompt")
    bins = np.linspace(prompts.min(), prompts.max(), 20)
    for (part, lengths), line in zip(counts.items(), ("-", "--", "-.", ":"), strict=False):
        of_prompts.hist(
            lengths["prompt"],
            bins,
            density=True,  # parts have different numbers of rows
            histtype="step",
            linestyle=line,
            linewidth=1.4,
            label=part,
        )
    for side, colour, line in zip(SIDES, (SERIES[0], SERIES[3]), ("-", "--"), strict=True):
        lengths = joined(counts, side)
        look = {"color": colour, "linestyle": line}
        of_answers.hist(lengths, np.linspace(0, 120, 25), histtype="step", label=side, **look)
        of_answers.axvline(lengths.mean(), linewidth=0.8, **look)
    plots.dress(of_prompts, "prompt length (tokens)", "density")
    plots.dress(of_answers, "answer length (tokens)", "pairs")
    for ax, corner in ((of_prompts, "upper left"), (of_answers, "upper right")):
        ax.margins(y=0.35)
        ax.legend(loc=corner)
    return axes


@plt.rc_context(plots.STYLE)
def limit_figure(counts: Counts, default: int) -> Axes:
    """Draw the share of prompts and answers that are not longer than a limit, by the limit.

    `default`: the default limit for answers, in tokens, which a line marks.
    """
    ax = plots.subplots((1, 1), 0.42)[0, 0]
    for side, look in zip(("prompt", *SIDES), ("C2-", "C0--", "C3:"), strict=True):
        values = np.sort(joined(counts, side))
        # After sorting, i + 1 texts are at most as long as text i.
        ax.plot(values, np.arange(1, len(values) + 1) / len(values), look, label=side)
    ax.axvline(default, color="0.4", linewidth=0.8)
    ax.text(default + 1, 0.08, f"{default}: default\nfor answers", color="0.3")
    plots.dress(ax, "limit (tokens)", "share within the limit")
    ax.set(ylim=(0, 1.03))
    ax.legend(loc="upper left")
    return ax


@plt.rc_context(plots.STYLE)
def label_figure(right: Sequence[bool], size: Sequence[float]) -> Axes:
    """Draw how often labels agree with the gold score, by the difference in gold score, beside Bradley-Terry's model.

    right: [N] whether a pair's label agrees; size: [N] the absolute difference. Bins with fewer than five pairs are
    left out.
    """
    ax = plots.subplots((1, 1), 0.42)[0, 0]
    right = np.asarray(right, float)
    size = np.asarray(size)
    # 1. For each bin: its mean difference, the share of labels that agree, and the interval of this share.
    sizes = []
    means = []
    below = []
    above = []
    for low, high in pairwise(EDGES):
        inside = (size >= low) & (size < high)
        if inside.sum() < 5:
            continue
        share = bootstrap_mean(right[inside], n=1000)
        sizes.append(size[inside].mean())
        means.append(share.mean)
        below.append(share.mean - share.low)
        above.append(share.high - share.mean)
    # 2. The picture.
    grid = np.linspace(0, 5, 50)
    ax.plot(grid, 1 / (1 + np.exp(-grid)), color="0.4", linestyle="--", label="Bradley–Terry")
    ax.errorbar(sizes, means, [below, above], fmt="o", color=SERIES[0], label="measured")
    plots.dress(ax, "difference in gold score", "label agrees with gold")
    ax.set(ylim=(0.4, 1.02))
    ax.legend(loc="lower right")
    return ax


def joined(counts: Counts, side: str) -> np.ndarray:
    """The lengths of the texts of one side (prompts, chosen or rejected answers) in all parts together."""
    return np.concatenate([lengths[side] for lengths in counts.values()])
