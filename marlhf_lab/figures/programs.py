"""Outcomes of sampled programs while a policy learned."""

import numpy as np
from matplotlib import pyplot as plt

from marlhf_lite.evaluation.statistics import trailing_mean
from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import PROGRAMS

# Each area, from the bottom up, and the shares of `extras.programs.rewards.SHARES` that it adds up.
OUTCOMES = {
    "passed all tests": ("share_passed",),
    "failed a test": ("share_failed",),
    "runtime error": ("share_runtime_error", "share_timeout", "share_unsupported"),
    "compile error": ("share_compile_error",),
}


@plt.rc_context(plots.STYLE)
def outcome_shares(runs: plots.Runs, smooth: int = 5) -> np.ndarray:
    """Draw the shares of each method's training programs by their outcome, as stacked areas; means over its runs.

    Args:
        runs: rows have the metrics of `extras.programs.rewards.SHARES`. Runtime errors include time-outs and programs
            that the executor does not support. Runs of a method are cut to the shortest one.
        smooth: number of updates averaged; 1 for none.

    Returns:
        The Axes of the panels, one for each method.
    """
    axes = plots.grid(len(runs), 0.12, 0.36, sharey=True)
    for ax, (method, group) in zip(axes, runs.items(), strict=True):
        length = min(map(len, group))
        areas = [
            np.mean(
                [[sum(row[name] for name in names) for row in run[:length]] for run in group],
                axis=0,
            )
            for names in OUTCOMES.values()
        ]
        updates = [row["update"] for row in group[0][:length]]
        areas = [trailing_mean(area, smooth) for area in areas]
        ax.stackplot(
            updates,
            areas,
            colors=[PROGRAMS[name] for name in OUTCOMES],
            labels=list(OUTCOMES),
            linewidth=0,
        )
        ax.set(title=method, ylim=(0, 1))
        ax.margins(x=0)
        plots.dress(ax, "update", "share")
    plots.legend(axes[0])
    text = "Programs of the training batches by what became of them: mean over seeds and the last {} updates."
    plots.caption(axes[0].figure, text.format(smooth))
    return axes
