"""What a critic predicts: true values along answers, and how a critic learns them."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import SERIES


@plt.rc_context(plots.STYLE)
def value_paths(at: Sequence[int], groups: Mapping[str, np.ndarray]) -> Axes:
    """Draw true values along answers: a thin line for each answer, and a bold one for the mean of each group.

    at: the positions in an answer, in tokens written; groups: two names to the values [R, len(at)] of R answers.
    """
    ax = plots.subplots((1, 1), 0.42)[0, 0]
    for (name, values), colour in zip(groups.items(), (SERIES[0], SERIES[3]), strict=True):
        ax.plot(at, np.transpose(values), color=colour, alpha=0.25, linewidth=0.8)
        ax.plot(at, np.mean(np.asarray(values), 0), "o-", color=colour, label=name)
    plots.dress(ax, "t, tokens written", "V*, true value")
    ax.legend()
    return ax


@plt.rc_context(plots.STYLE)
def sight_figure(history: Sequence[Mapping]) -> Axes:
    """Draw the share of credit that a critic predicts after each update, with its interval, and its explained variance.

    `history`: a row for each update, with `s`, the interval of this share, and `explained`, an interval of the
    explained variance for each quarter of the answers. The figure shows the first and the last quarter.
    """
    ax = plots.subplots((1, 1), 0.42)[0, 0]
    seen = [row["s"] for row in history]
    lows = [share.low for share in seen]
    highs = [share.high for share in seen]
    means = [share.mean for share in seen]
    ax.plot(means, "o-", color=SERIES[0], label="s, share of the credit seen")
    ax.fill_between(range(len(seen)), lows, highs, color=SERIES[0], alpha=0.2)
    for quarter, style in ((0, ":"), (3, "--")):
        explained = [row["explained"][quarter].mean for row in history]
        label = f"explained variance, quarter {quarter + 1}"
        ax.plot(explained, style, color=SERIES[3], label=label)
    ax.axhline(0, color="0.5", linewidth=0.6)
    plots.dress(ax, "updates of the critic alone", "s and explained variance")
    ax.legend()
    return ax
