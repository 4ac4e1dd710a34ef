"""Figures of evaluation: each function draws one figure from stored responses and returns its Axes.

Like those in `plotting.training`, they are to be read at 10 cm wide and have a caption that `caption` replaces.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from marlhf_lite.evaluation.agreement import WinRate
from marlhf_lite.evaluation.distributions import baseline, shifts
from marlhf_lite.evaluation.scores import score_matrix, to_frame
from marlhf_lite.evaluation.statistics import bootstrap_mean, finite
from marlhf_lite.plotting.styles import OUTCOMES, method_styles
from marlhf_lite.plotting.training import STYLE, Runs, caption, dress, grid, legend, panels, signed, subplots
from marlhf_lite.utils.errors import InputError

NAMES = {"rm_score": "reward model score", "gold": "gold score"}


@plt.rc_context(STYLE)
def best_of_n_map(cells: Sequence[Mapping], score: str = "rm_score") -> np.ndarray:
    """Draw best-of-N by temperature, a panel for each method on one colour scale (Figure 8). Returns [methods] Axes.

    `cells` are those of `best_of_n.best_of_n`; temperature 0, which has N = 1 alone, is left out. `score` may be gold:
    the gold score of what the reward model picks. Raises `InputError` for no cells, or cells without the score.
    """
    cells = [cell for cell in cells if cell["temperature"] != 0]
    if not cells or not all(score in cell for cell in cells):
        raise InputError(f"cells: none with {score}: give those of best_of_n at temperatures above 0")
    table = pd.DataFrame([{**cell, "mean": cell[score]["mean"]} for cell in cells])
    methods, sizes = table["method"].unique(), table["n"].nunique()
    height = len(methods) * (0.06 * sizes + 0.09) + 0.08
    axes = subplots((len(methods), 1), height, sharex=True)[:, 0]
    scale = {"vmin": table["mean"].min(), "vmax": table["mean"].max(), "cmap": "cividis", "cbar": False}
    for ax, method in zip(axes, methods, strict=True):
        means = table[table["method"] == method].pivot(index="n", columns="temperature", values="mean")
        means = means.reindex(index=sorted(table["n"].unique()), columns=sorted(table["temperature"].unique()))
        texts = means.map(signed)
        seaborn.heatmap(means, annot=texts, fmt="", annot_kws={"size": "medium"}, linewidths=0.5, ax=ax, **scale)
        ax.invert_yaxis()
        ax.grid(False)
        ax.tick_params(axis="y", rotation=0)
        ax.set(xlabel="sampling temperature" if ax is axes[-1] else "", ylabel="N")
        ax.set_title(method, fontsize="medium", loc="left", parse_math=False)
    axes[0].figure.colorbar(axes[0].collections[0], ax=axes.tolist(), label=NAMES.get(score, score), aspect=30)
    kept = "" if score == "rm_score" else " The kept response is the one with the best reward model score."
    counts = f"{cells[0]['prompts']} prompts, from {cells[0]['samples']} samples each"
    caption(axes[0].figure, f"Best of N, mean over {counts}.{kept}")
    return axes


@plt.rc_context(STYLE)
def temperature_sweep(responses: pd.DataFrame | Sequence[Mapping], score: str = "rm_score") -> Axes:
    """Draw the mean score over sampling temperature, with intervals over prompts; 0 is greedy (paper: Figure 21)."""
    frame = to_frame(responses)
    groups = frame.groupby(["method", "temperature"], sort=False)
    means = pd.concat({key: score_matrix(rows, score).mean(axis=1) for key, rows in groups}, names=groups.keys)
    table, styles = means.rename("score").reset_index(), method_styles(frame["method"].unique())
    ax = subplots((1, 1), 0.68)[0, 0]
    look = {"hue": "method", "palette": {name: style["color"] for name, style in styles.items()}, "linewidth": 1.4}
    band = {"errorbar": lambda x: bootstrap_mean(x, 2000)[1:3], "err_kws": {"alpha": 0.15, "linewidth": 0}}
    seaborn.lineplot(table, x="temperature", y="score", marker="o", markersize=4, ax=ax, **look, **band)
    dress(ax, "sampling temperature", NAMES.get(score, score))
    legend(ax)
    caption(ax.figure, "Bands: 95 % bootstrap intervals over prompts.")
    return ax


@plt.rc_context(STYLE)
def shift_histogram(scores: pd.DataFrame) -> np.ndarray:
    """Draw each response's score minus the baseline's for the same prompt, a panel a method (paper: Figures 10, 20).

    `scores` are those of `score_table`. Returns the Axes of the panels, flat; they share bins and axes.
    """
    moved = shifts(scores)
    count = moved.shape[1]
    axes = grid(count, 0.06, 0.34 if count > 1 else 0.5, sharex=True, sharey=True)
    bins = np.histogram_bin_edges(moved, bins=30)
    for ax, (method, style) in zip(axes, method_styles(moved).items(), strict=True):
        look = {"color": style["color"], "alpha": 0.6, "element": "step", "linewidth": 0}
        seaborn.histplot(moved[method], bins=bins, stat="proportion", ax=ax, **look)
        ax.axvline(0, color="black", linewidth=0.8)
        ax.axvline(moved[method].mean(), linewidth=1, color=style["color"], linestyle="--")
        title = f"{method}: {(moved[method] > 0).mean():.0%} better"
        ax.set_title(title, fontsize="medium", loc="left", parse_math=False)
        dress(ax, "", "")
    axes[0].figure.supxlabel(f"reward model score minus that of {baseline(scores)}, same prompt", fontsize="medium")
    axes[0].figure.supylabel("share of responses", fontsize="medium")
    caption(axes[0].figure, "Solid line: no change. Dashed: mean shift.")
    return axes


@plt.rc_context(STYLE)
def score_quantiles(
    scores: Mapping[str, Sequence[float]], thresholds: Sequence[float] = (), label: str = "reward model score"
) -> Axes:
    """Draw the share of responses that score no more than x, which shows the tails (paper: Figures 3, 14, 16).

    `scores`: method to finite scores [N]; `thresholds` are marked. Raises `InputError` for other scores.
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
    caption(ax.figure, f"Further right and lower is better; the left end is the low-quality tail.{marked}")
    return ax


@plt.rc_context(STYLE)
def over_optimisation(runs: Runs, smooth: int = 5) -> Axes:
    """Draw gold score against reward model score over training: where the path turns down, only the proxy improves.

    Not in the paper. Rows have `update`, `rm_score_mean` and `gold_mean`; `smooth` and errors as in `reward_curves`.
    """
    ax = panels(runs, [("rm_score_mean", "gold_mean")], (1, 1), 0.68, smooth)[0, 0]
    caption(ax.figure, "A run is a path through its updates to a large dot. Right but down: over-optimisation.")
    return ax


@plt.rc_context(STYLE)
def agreement_map(table: Sequence[Mapping]) -> Axes:
    """Draw the agreement of every two raters, with Cohen's κ, from rows of `agreement_table` (paper: Table 1)."""
    names = list(dict.fromkeys(name for row in table for name in (row["a"], row["b"])))
    shares = pd.DataFrame(np.nan, names[1:], names[:-1])
    texts = pd.DataFrame("", names[1:], names[:-1])
    for row in table:
        share, kappa = row["agreement"], row["kappa"]["mean"]
        words = "κ undefined" if np.isnan(kappa) else f"κ {signed(kappa)}"
        shares.loc[row["b"], row["a"]] = share["mean"]
        texts.loc[row["b"], row["a"]] = f"{share['mean']:.0%}\n[{share['low']:.0%}, {share['high']:.0%}]\n{words}"
    pairs = [row["pairs"] for row in table]
    ax = subplots((1, 1), 0.16 * len(names))[0, 0]
    bar = {"label": "agreement", "format": PercentFormatter(1)}
    look = {"vmin": 0, "vmax": 1, "cmap": "cividis", "linewidths": 0.5, "annot_kws": {"size": "medium"}}
    seaborn.heatmap(shares, annot=texts, fmt="", cbar_kws=bar, ax=ax, **look)
    ax.grid(False)
    ax.set(xlabel="rater", ylabel="rater")
    count = " to ".join(map(str, sorted({min(pairs), max(pairs)})))
    caption(ax.figure, f"Share of {count} pairs with the same verdict [interval], and Cohen's κ.")
    return ax


@plt.rc_context(STYLE)
def win_rates(rates: Mapping[str, WinRate]) -> Axes:
    """Draw wins, ties and losses as stacked bars, with the win rate and its interval (paper: Figures 4, 17).

    `rates`: what a bar is called to its `agreement.win_rate`.
    """
    counts = pd.DataFrame({name: {key: getattr(rate, key) for key in OUTCOMES} for name, rate in rates.items()}).T
    ax = subplots((1, 1), 0.1 * len(rates) + 0.24)[0, 0]
    counts.div(counts.sum(axis=1), axis=0).plot.barh(stacked=True, width=0.66, color=OUTCOMES, legend=False, ax=ax)
    for bars, key in zip(ax.containers, OUTCOMES, strict=True):
        text = "black" if key == "tie" else "white"
        ax.bar_label(bars, fmt=lambda x: f"{x:.0%}" if x >= 0.06 else "", label_type="center", color=text)
    names = [f"{n}\n{r.rate.mean:.0%} [{r.rate.low:.0%}, {r.rate.high:.0%}]" for n, r in rates.items()]
    ax.set_yticks(range(len(rates)), names, parse_math=False)
    ax.axvline(0.5, color="black", linewidth=0.8, linestyle="--", zorder=0)  # seen between the bars
    ax.set(xlim=(0, 1), xlabel="share of pairs", ylabel="win rate [interval]")
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    legend(ax)
    caption(ax.figure, "Win rate: ties count half; in brackets its 95 % interval.")
    return ax
