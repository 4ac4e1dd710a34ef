"""Scores at equal KL: a policy can score more only because it moves further from the reference.

A run is a path: after each update the policy has a KL (nats per response) and a score, here means of the last `WINDOW`
training batches. Between two updates the path is a straight line. If the KL falls, its largest value so far counts, so
that a path never goes back.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lab.studies.contrasts import curve_of
from marlhf_lab.studies.results import by_method, t_interval
from marlhf_lite.evaluation.statistics import trailing_mean
from marlhf_lite.plotting import training as plots
from marlhf_lite.utils.tables import interval, number

WINDOW = 5  # updates in a mean
POINTS = 50  # values of the KL at which paths are compared


def path_of(run: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """Return the KL [U], which never falls, and the gold score [U] of a run's updates.

    An update without a gold score has its reward instead (`curve_of`).
    """
    rows = curve_of(run)
    kl = trailing_mean([row["kl_k1"] for row in rows], WINDOW)
    score = trailing_mean([row["gold_mean"] for row in rows], WINDOW)
    return np.maximum.accumulate(kl), score


def score_name(results: Sequence[Mapping]) -> str:
    """Return the name of the score that the paths of these runs have (see `path_of`).

    It is the RM score if a run has no gold score and its reward, which stands in its place, is that of a reward model.
    """
    for run in results:
        if run["options"].get("reward") != "rm":
            continue
        if any("gold_mean" not in row for row in run["curve"]):
            return "RM score"
    return "gold score"


def difference_at_kl(results: Sequence[Mapping], ours: str, theirs: str) -> dict:
    """Return what `ours` adds to the score of `theirs` at equal KL: mean, low, high (95 % t-interval), by_seed and kl.

    A seed's number is the mean difference over the upper half of the KL that both of its runs reach. `kl` has the upper
    end of this range by seed.
    """
    runs = by_method(results)
    gaps = []
    ends = []
    for seed in sorted(set(runs[ours]) & set(runs[theirs])):
        our_kl, our_score = path_of(runs[ours][seed])
        their_kl, their_score = path_of(runs[theirs][seed])
        end = min(our_kl[-1], their_kl[-1])
        grid = np.linspace(end / 2, end, POINTS)
        gap = np.interp(grid, our_kl, our_score) - np.interp(grid, their_kl, their_score)
        gaps.append(float(np.mean(gap)))
        ends.append(end)
    return t_interval(gaps) | {"kl": ends}


def equal_kl_line(results: Sequence[Mapping], ours: str, theirs: str) -> str:
    """Return the difference at equal KL as a sentence in Markdown."""
    gap = difference_at_kl(results, ours, theirs)
    score = score_name(results)
    seeds = "; ".join(number(difference, "+.2f") for difference in gap["by_seed"])
    ends = "; ".join(number(kl, ".1f") for kl in gap["kl"])
    return (
        f"At equal KL, {score} of training batches, {ours} minus {theirs}: {interval(gap, '+.2f')} ({seeds}): "
        f"mean over the upper half of the KL that both runs of a seed reach ({ends} nats), 95 % t-interval over seeds."
    )


@plt.rc_context(plots.STYLE)
def score_over_kl(results: Sequence[Mapping], methods: Sequence[str]) -> Axes:
    """Plot the score over the KL from the reference: each seed as a thin line, their mean as a thick one.

    The mean ends at the KL that all seeds of the method reach.
    """
    ax = plots.subplots((1, 1), 0.68)[0, 0]
    runs = by_method(results)
    for name, style in plots.method_styles(methods).items():
        paths = [path_of(run) for run in runs[name].values()]
        for kl, score in paths:
            ax.plot(kl, score, color=style["color"], linewidth=0.6, alpha=0.5)
        end = min(kl[-1] for kl, _ in paths)
        grid = np.linspace(0, end, POINTS)
        mean = np.mean([np.interp(grid, kl, score) for kl, score in paths], axis=0)
        ax.plot(grid, mean, label=name, **style)
    plots.dress(
        ax,
        "KL from the reference (nats per response)",
        f"{score_name(results)} of training batches",
    )
    ax.legend()
    text = f"Means of the last {WINDOW} batches. Thin: each seed; thick: their mean, up to the KL that all seeds reach."
    plots.caption(ax.figure, text)
    return ax
