"""Scores at equal KL: a policy can score more only because it moves further from the reference.

A run is a path: after each update the policy has a KL (nats per response) and a score, here means of the last `WINDOW`
training batches. The path between two updates is a straight line; if the KL falls, its largest value so far counts.
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

WINDOW, POINTS = 5, 50  # updates in a mean; values of the KL at which paths are compared


def path_of(run: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """KL [U], which never falls, and gold score [U] of a run's updates."""
    rows = curve_of(run)
    kl, score = (
        trailing_mean([row[name] for row in rows], WINDOW) for name in ("kl_k1", "gold_mean")
    )
    return np.maximum.accumulate(kl), score


def score_name(results: Sequence[Mapping]) -> str:
    """What the score of the paths is: a reward model's if it trained the policy and there is no gold score."""
    trained_on = (
        row for run in results if run["options"].get("reward") == "rm" for row in run["curve"]
    )
    by_model = any("gold_mean" not in row for row in trained_on)
    return "RM score" if by_model else "gold score"


def difference_at_kl(results: Sequence[Mapping], ours: str, theirs: str) -> dict:
    """Return mean, low, high (95 % t-interval) and by_seed of what `ours` adds to the score of `theirs` at equal KL.

    For each seed the mean over the upper half of the KL that both runs reach, and `kl`, its end by seed.
    """
    runs, gaps, ends = by_method(results), [], []
    for seed in sorted(set(runs[ours]) & set(runs[theirs])):
        paths = [path_of(runs[method][seed]) for method in (ours, theirs)]
        ends.append(min(kl[-1] for kl, _ in paths))
        grid = np.linspace(ends[-1] / 2, ends[-1], POINTS)
        gaps.append(float(np.mean(np.interp(grid, *paths[0]) - np.interp(grid, *paths[1]))))
    return t_interval(gaps) | {"kl": ends}


def equal_kl_line(results: Sequence[Mapping], ours: str, theirs: str) -> str:
    """The difference at equal KL as a sentence in Markdown."""
    gap, score = difference_at_kl(results, ours, theirs), score_name(results)
    seeds, ends = (
        "; ".join(number(x, form) for x in gap[key])
        for key, form in (("by_seed", "+.2f"), ("kl", ".1f"))
    )
    return (
        f"At equal KL, {score} of training batches, {ours} minus {theirs}: {interval(gap, '+.2f')} ({seeds}): "
        f"mean over the upper half of the KL that both runs of a seed reach ({ends} nats), 95 % t-interval over seeds."
    )


@plt.rc_context(plots.STYLE)
def score_over_kl(results: Sequence[Mapping], methods: Sequence[str]) -> Axes:
    """Plot the score over the KL from the reference: thin, each seed; thick, the mean up to a KL that all reach."""
    ax, runs = plots.subplots((1, 1), 0.68)[0, 0], by_method(results)
    for name, style in plots.method_styles(methods).items():
        paths = [path_of(run) for run in runs[name].values()]
        for path in paths:
            ax.plot(*path, color=style["color"], linewidth=0.6, alpha=0.5)
        grid = np.linspace(0, min(kl[-1] for kl, _ in paths), POINTS)
        ax.plot(
            grid, np.mean([np.interp(grid, *path) for path in paths], axis=0), label=name, **style
        )
    plots.dress(
        ax,
        "KL from the reference (nats per response)",
        f"{score_name(results)} of training batches",
    )
    ax.legend()
    text = f"Means of the last {WINDOW} batches. Thin: each seed; thick: their mean, up to the KL that all seeds reach."
    plots.caption(ax.figure, text)
    return ax
