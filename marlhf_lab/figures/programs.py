"""Outcomes of sampled programs while a policy learned."""

import numpy as np
from matplotlib import pyplot as plt

from marlhf_lite.evaluation.statistics import trailing_mean
from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import PROGRAMS

# The areas from the bottom up: the name of each, and the metrics of `extras.programs.rewards.SHARES` that it adds up.
OUTCOMES = {
    "passed all tests": ("share_passed",),
    "failed a test": ("share_failed",),
    "runtime error": ("share_runtime_error", "share_timeout", "share_unsupported"),
    "compile error": ("share_compile_error",),
}


@plt.rc_context(plots.STYLE)
def outcome_shares(runs: plots.Runs, smooth: int = 5) -> np.ndarray:
    """Draw how many of each method's training programs had which outcome, as stacked areas of shares.

    Shares are means over the method's runs.

    Args:
        runs: rows have the metrics of `extras.programs.rewards.SHARES`. Runtime errors include time-outs and programs
            that the executor does not support. A method's runs are cut to the length of its shortest one.
        smooth: number of updates averaged; 1 for none.

    Returns:
        The Axes of the panels, one for each method.
    """
    axes = plots.grid(len(runs), 0.12, 0.36, sharey=True)
    for ax, (method, group) in zip(axes, runs.items(), strict=True):
        shortest = min(len(run) for run in group)
        group = [run[:shortest] for run in group]
        areas = []
        for names in OUTCOMES.values():
            of_runs = []  # [runs, updates]
            for run in group:
                of_runs.append([sum(row[name] for name in names) for row in run])
            areas.append(trailing_mean(np.mean(of_runs, axis=0), smooth))
        ax.stackplot(
            [row["update"] for row in group[0]],
            areas,
            colors=[PROGRAMS[name] for name in OUTCOMES],
            labels=list(OUTCOMES),
            linewidth=0,
        )
        ax.set(title=method, ylim=(0, 1))
        ax.margins(x=0)
        plots.dress(ax, "update", "share")
    plots.legend(axes[0])
    plots.caption(
        axes[0].figure,
        "Programs of the training batches by what became of them: mean over seeds and the last "
        f"{smooth} updates.",
    )
    return axes
