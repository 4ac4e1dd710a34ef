"""Figures of evaluation: each function draws one figure from stored responses and returns its Axes.

As in `plotting.training`, figures are for a width of 10 cm and have a caption that `caption` replaces.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.evaluation.best_of_n import best_of_n, score_that_picks
from marlhf_lite.evaluation.distributions import baseline, shifts
from marlhf_lite.evaluation.responses import read_responses
from marlhf_lite.evaluation.scores import check_one_temperature, score_matrix, to_frame
from marlhf_lite.evaluation.statistics import Interval, bootstrap_mean, finite
from marlhf_lite.plotting.styles import method_styles
from marlhf_lite.plotting.training import (
    STYLE,
    Runs,
    caption,
    dress,
    grid,
    label_of,
    legend,
    make_words_on_cells_readable,
    panels,
    percent,
    signed,
    subplots,
)
from marlhf_lite.utils.errors import InputError


@plt.rc_context(STYLE)
def best_of_n_map(cells: Sequence[Mapping], score: str = "rm_score") -> np.ndarray:
    """Draw best-of-N by temperature, a panel for each method on one colour scale (Figure 8). Returns [methods] Axes.

    `cells` are those of `best_of_n.best_of_n`. Cells of temperature 0 are left out, because they have only N = 1. If
    `score` is the gold score, it is that of the response that the reward model picks. Raises `InputError` if no cell
    is left, or one lacks the score.
    """
    cells = [cell for cell in cells if cell["temperature"] != 0]
    if not cells or not all(score in cell for cell in cells):
        raise InputError(
            f"cells: none with {score}: give those of best_of_n at temperatures above 0"
        )
    table = pd.DataFrame([{**cell, "mean": cell[score]["mean"]} for cell in cells])
    methods = table["method"].unique()
    rows_of_panel = table["n"].nunique()
    # In units of the width: a row of cells, the title of a panel, and the axis at the bottom.
    height = len(methods) * (0.06 * rows_of_panel + 0.09) + 0.08
    axes = subplots((len(methods), 1), height, sharex=True)[:, 0]
    scale = {
        "vmin": table["mean"].min(),
        "vmax": table["mean"].max(),
        "cmap": "cividis",
        "cbar": False,
    }
    all_sizes = sorted(table["n"].unique())
    all_temperatures = sorted(table["temperature"].unique())
    for ax, method in zip(axes, methods, strict=True):
        of_method = table[table["method"] == method]
        means = of_method.pivot(index="n", columns="temperature", values="mean")
        # All panels have the same cells; those that a method lacks are empty.
        means = means.reindex(index=all_sizes, columns=all_temperatures)
        texts = means.map(signed)
        seaborn.heatmap(
            means, annot=texts, fmt="", annot_kws={"size": "medium"}, linewidths=0.5, ax=ax, **scale
        )
        make_words_on_cells_readable(ax)
        ax.invert_yaxis()  # small N at the bottom
        ax.grid(False)
        ax.tick_params(axis="y", rotation=0)
        is_last = ax is axes[-1]
        ax.set(xlabel="sampling temperature" if is_last else "", ylabel="N")
        ax.set_title(method, fontsize="medium", loc="left", parse_math=False)
    axes[0].figure.colorbar(
        axes[0].collections[0], ax=axes.tolist(), label=label_of(score), aspect=30
    )
    by = cells[0].get("by", "rm_score")  # the score that picks the best response
    kept = "" if score == by else f" The kept response is the one with the best {label_of(by)}."
    counts = f"{cells[0]['prompts']} prompts, from {cells[0]['samples']} samples each"
    caption(axes[0].figure, f"Best of N, mean over {counts}.{kept}")
    return axes


@plt.rc_context(STYLE)
def best_of_n_curve(
    responses: pd.DataFrame | Sequence[Mapping] | str | Path, score: str = "", by: str = ""
) -> Axes:
    """Draw the score of best-of-N over N, for N = 1, 2, 4, … up to the number of samples of a prompt.

    Args:
        responses: at one temperature above 0, with several samples of each prompt, or the run or file that has them
            (`marlhf evaluate --eval_samples 16`).
        score: the column to draw; by default `by`.
        by: the column by which the best response is picked; see `best_of_n`.
    """
    frame = _responses_of(responses)
    check_one_temperature(frame)
    # The number of samples of a prompt, taken from the first method. Only the shape of the matrix counts, so any column
    # that all responses have would do.
    first_method = frame[frame["method"] == frame["method"].iloc[0]]
    samples = score_matrix(first_method, "sample").shape[1]
    sizes = [2**k for k in range(samples.bit_length())]  # the powers of 2 up to `samples`
    cells = best_of_n(frame, sizes, by)
    by = cells[0]["by"]
    score = score or by
    ax = subplots((1, 1), 0.68)[0, 0]
    for method, style in method_styles(frame["method"].unique(), marker=True).items():
        of_method = [cell for cell in cells if cell["method"] == method]
        n = [cell["n"] for cell in of_method]
        low = [cell[score]["low"] for cell in of_method]
        high = [cell[score]["high"] for cell in of_method]
        ax.fill_between(n, low, high, color=style["color"], alpha=0.15, linewidth=0)
        means = [cell[score]["mean"] for cell in of_method]
        ax.plot(n, means, label=method, linewidth=1.4, markersize=5, **style)
    dress(ax, "N responses to choose from", score)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, map(str, sizes))
    legend(ax)
    kept = "" if score == by else f" The kept response is the one with the best {label_of(by)}."
    caption(
        ax.figure,
        f"Mean over {cells[0]['prompts']} prompts; bands: 95 % bootstrap intervals over prompts.{kept}",
    )
    return ax


@plt.rc_context(STYLE)
def reward_against_kl(
    responses: pd.DataFrame | Sequence[Mapping] | str | Path, score: str = ""
) -> Axes:
    """Draw the score of each method over its KL to the SFT model: how far it has moved away for its score.

    Args:
        responses: at one temperature, or the run or file that has them. If the table has several runs, such as runs
            with different --kl_coef, they show how the score grows with the KL.
        score: the column to draw; by default that of the reward.

    Raises:
        InputError: the responses have no KL, or several temperatures.
    """
    frame = _responses_of(responses)
    check_one_temperature(frame)
    kl = "kl_k3" if "kl_k3" in frame else "kl"  # k3 is never below 0; older files have k1 alone
    if kl not in frame:
        raise InputError("responses: no KL: score them against the SFT model (--sft)")
    score = score or score_that_picks(frame)
    ax = subplots((1, 1), 0.68)[0, 0]
    for method, style in method_styles(frame["method"].unique(), marker=True).items():
        rows = frame[frame["method"] == method]
        x = bootstrap_mean(score_matrix(rows, kl).mean(axis=1))
        y = bootstrap_mean(score_matrix(rows, score).mean(axis=1))
        errors = {"xerr": _bar(x), "yerr": _bar(y)}
        look = {"color": style["color"], "marker": style["marker"], "markersize": 5}
        ax.errorbar(x.mean, y.mean, **errors, label=method, linestyle="", elinewidth=1, **look)
    dress(ax, "KL to the SFT model (nats a response)", score)
    legend(ax)
    count = frame["id"].nunique()
    caption(
        ax.figure,
        f"Means over {count} prompts; bars: 95 % bootstrap intervals over prompts. Left and up is better.",
    )
    return ax


def _bar(interval: Interval) -> list[list[float]]:
    """Return [2, 1] lengths of an error bar, down and up from the mean.

    Rounding may put an end of the interval on the wrong side of the mean; matplotlib refuses negative lengths.
    """
    down = interval.mean - interval.low
    up = interval.high - interval.mean
    return [[max(down, 0.0)], [max(up, 0.0)]]


def _responses_of(responses: pd.DataFrame | Sequence[Mapping] | str | Path) -> pd.DataFrame:
    """Return a table of responses; if `responses` is a path, those in this run or file."""
    if isinstance(responses, str | Path):
        return read_responses(responses)
    return to_frame(responses)


@plt.rc_context(STYLE)
def temperature_sweep(responses: pd.DataFrame | Sequence[Mapping], score: str = "rm_score") -> Axes:
    """Draw the mean score over sampling temperature, with intervals over prompts; 0 is greedy (paper: Figure 21)."""
    frame = to_frame(responses)
    of_prompts = {}  # the mean score of each prompt, by method and temperature
    for key, rows in frame.groupby(["method", "temperature"], sort=False):
        of_prompts[key] = score_matrix(rows, score).mean(axis=1)
    means = pd.concat(of_prompts, names=["method", "temperature"])
    table = means.rename("score").reset_index()
    ax = subplots((1, 1), 0.68)[0, 0]

    def ends_of_interval(values: pd.Series) -> tuple[float, float]:
        interval = bootstrap_mean(values, 2000)  # resamples
        return interval.low, interval.high

    band = {"errorbar": ends_of_interval, "err_kws": {"alpha": 0.15, "linewidth": 0}}
    # One call for each method, because in a single call seaborn would choose dashes of its own.
    for name, style in method_styles(frame["method"].unique(), marker=True).items():
        rows = table[table["method"] == name]
        look = {"markersize": 5, "markeredgewidth": 0, **style}
        seaborn.lineplot(
            rows, x="temperature", y="score", label=name, linewidth=1.4, ax=ax, **look, **band
        )
    dress(ax, "sampling temperature", score)
    legend(ax)
    caption(ax.figure, "Bands: 95 % bootstrap intervals over prompts.")
    return ax


@plt.rc_context(STYLE)
def shift_histogram(scores: pd.DataFrame) -> np.ndarray:
    """Draw each response's score minus the baseline's for the same prompt, by method (paper: Figures 10, 20).

    `scores` are those of `score_table`. Returns the Axes of a panel per method, flat; they share bins and axes.
    """
    moved = shifts(scores)  # a column for each method but the baseline
    count = moved.shape[1]
    # A single panel is as wide as two, so it is higher.
    height_of_panel = 0.34 if count > 1 else 0.5
    axes = grid(count, 0.06, height_of_panel, sharex=True, sharey=True)
    bins = np.histogram_bin_edges(moved, bins=30)
    for ax, (method, style) in zip(axes, method_styles(moved).items(), strict=True):
        look = {"color": style["color"], "alpha": 0.6, "element": "step", "linewidth": 0}
        seaborn.histplot(moved[method], bins=bins, stat="proportion", ax=ax, **look)
        ax.axvline(0, color="black", linewidth=0.8)
        ax.axvline(moved[method].mean(), linewidth=1, color=style["color"], linestyle="--")
        title = f"{method}: {percent((moved[method] > 0).mean())} better"
        ax.set_title(title, fontsize="medium", loc="left", parse_math=False)
        dress(ax, "", "")
    axes[0].figure.supxlabel(
        f"reward model score minus that of {baseline(scores)}, same prompt", fontsize="medium"
    )
    axes[0].figure.supylabel("share of responses", fontsize="medium")
    caption(axes[0].figure, "Solid line: no change. Dashed: mean shift.")
    return axes


@plt.rc_context(STYLE)
def score_quantiles(
    scores: Mapping[str, Sequence[float]], thresholds: Sequence[float] = (), label: str = "rm_score"
) -> Axes:
    """Draw the share of responses that score no more than x, which shows the tails (paper: Figures 3, 14, 16).

    `scores` maps each method to its scores [N]. `thresholds` are marked by vertical lines. Raises `InputError` if a
    method has no scores, or one that is not finite.
    """
    arrays = {name: finite(name, values) for name, values in scores.items()}
    ax = subplots((1, 1), 0.68)[0, 0]
    for name, style in method_styles(arrays).items():
        legend_text = f"{name}, mean {signed(arrays[name].mean())}"
        seaborn.ecdfplot(x=arrays[name], label=legend_text, linewidth=1.4, ax=ax, **style)
    for threshold in thresholds:
        ax.axvline(threshold, color="0.4", linewidth=0.7)
    dress(ax, label, "share of responses up to x")
    legend(ax)
    marked = " Vertical lines: thresholds." if len(thresholds) else ""
    caption(
        ax.figure,
        f"Further right and lower is better; the left end is the low-quality tail.{marked}",
    )
    return ax


@plt.rc_context(STYLE)
def over_optimisation(runs: Runs, smooth: int = 5) -> Axes:
    """Draw gold score against reward model score over training: if the path turns down, only the proxy improves.

    Not in the paper. The rows of `runs` need `update`, `score_mean` and `gold_mean`; `smooth` and the errors are those
    of `reward_curves`.
    """
    ax = panels(runs, [("score_mean", "gold_mean")], (1, 1), 0.68, smooth)[0, 0]
    caption(
        ax.figure,
        "A run is a path through its updates to a large dot. Right but down: over-optimisation.",
    )
    return ax
