"""The paper's pictures of evaluation: each function draws one figure from stored answers and returns its Axes.

Like those in `plots`, they are to be read at 10 cm wide, have a caption that `plots.caption` replaces, and are written
with `plots.save`; none of them shows a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from marlhf_lite.evaluation.agreement import WinRate
from marlhf_lite.evaluation.distributions import shifts
from marlhf_lite.evaluation.scores import score_matrix, to_frame
from marlhf_lite.evaluation.statistics import bootstrap_mean, finite
from marlhf_lite.plotting.training import STYLE, WIDTH, Runs, caption, dress, legend, method_styles, panels, subplots
from marlhf_lite.utils.errors import InputError

NAMES = {"rm_score": "reward model score", "gold": "gold score"}
_OUTCOMES = {"win": ("#0173b2", "white"), "tie": ("#d5d5d5", "black"), "lose": ("#de8f05", "black")}


@plt.rc_context(STYLE)
def best_of_n_map(cells: Sequence[Mapping], score: str = "rm_score") -> np.ndarray:
    """Best-of-N by temperature, a panel for each method on one colour scale (paper: Figure 8). Returns [methods] Axes.

    Args:
        cells: as `best_of_n.best_of_n` gives them; temperature 0, which has N = 1 alone, is left out.
        score: rm_score, or gold for the gold score of what the reward model picks.

    Raises InputError for no cells, or cells without the score.
    """
    cells = [cell for cell in cells if cell["temperature"] != 0]
    if not cells or not all(score in cell for cell in cells):
        raise InputError(f"cells: none with {score}: give those of best_of_n at temperatures above 0")
    methods, temperatures = dict.fromkeys(c["method"] for c in cells), sorted({c["temperature"] for c in cells})
    sizes = sorted({cell["n"] for cell in cells})
    grid = {method: np.full((len(sizes), len(temperatures)), np.nan) for method in methods}
    for cell in cells:
        grid[cell["method"]][sizes.index(cell["n"]), temperatures.index(cell["temperature"])] = cell[score]["mean"]
    height = len(methods) * (0.06 * len(sizes) + 0.09) + 0.08
    figure, axes = plt.subplots(
        len(methods), 1, sharex=True, squeeze=False, figsize=(WIDTH, height * WIDTH), layout="constrained"
    )
    for ax, (method, values) in zip(axes[:, 0], grid.items(), strict=True):
        image = _heat(ax, values, *(f([v for g in grid.values() for v in g.ravel()]) for f in (np.nanmin, np.nanmax)))
        _ticks(ax, [f"{t:g}" for t in temperatures], list(map(str, sizes)))
        ax.set_title(method, fontsize=8, loc="left", parse_math=False)
        ax.set_ylabel("N")
    axes[-1, 0].set_xlabel("sampling temperature")
    figure.colorbar(image, ax=axes[:, 0].tolist(), label=NAMES.get(score, score), aspect=30)
    prompts = cells[0]["prompts"]
    kept = "" if score == "rm_score" else " The kept response is the one with the best reward model score."
    caption(figure, f"Best of N, mean over {prompts} prompts, from {cells[0]['samples']} samples each.{kept}")
    return axes[:, 0]


@plt.rc_context(STYLE)
def temperature_sweep(rows: pd.DataFrame | Sequence[Mapping], score: str = "rm_score", level: float = 0.95) -> Axes:
    """Mean score over sampling temperature, with intervals over prompts; 0 is greedy (paper: Figure 21).

    `rows` are answers at several temperatures. Raises InputError for none, or answers without the score.
    """
    frame, points = to_frame(rows), {}
    if not len(frame):
        raise InputError("rows: none, give answers at several temperatures")
    for (method, temperature), group in frame.groupby(["method", "temperature"], sort=False):
        interval = bootstrap_mean(score_matrix(group, score).mean(axis=1), level, 2000)
        points.setdefault(method, []).append((temperature, *interval[:3]))
    ax = subplots((1, 1), 0.68)[0, 0]
    for method, style in method_styles(points).items():
        x, mean, low, high = np.array(sorted(points[method])).T
        ax.fill_between(x, low, high, color=style["color"], alpha=0.15, lw=0, gid=f"{method} band")
        ax.plot(x, mean, marker="o", markersize=3, linewidth=1.4, label=method, gid=f"{method} line", **style)
    dress(ax, "sampling temperature", NAMES.get(score, score))
    legend(ax)
    caption(ax.figure, f"Bands: {level:.0%} bootstrap intervals over prompts.")
    return ax


@plt.rc_context(STYLE)
def shift_histogram(scores: pd.DataFrame, baseline: str = "SFT", label: str = "reward model score") -> np.ndarray:
    """Each response's score less the baseline's for the same prompt, a panel for each method (paper: Figures 10, 20).

    `scores` are those of `score_table`. Returns the Axes of the panels, flat; they share bins and axes.
    Raises InputError for scores of one method alone.
    """
    moved = shifts(scores, baseline)
    count = moved.shape[1]
    if not count:
        raise InputError(f"shifts: {', '.join(scores)} alone: give another method to compare with it")
    columns = min(2, count)
    lines = -(-count // columns)
    axes = plt.subplots(
        lines, columns, sharex=True, sharey=True, squeeze=False, layout="constrained",
        figsize=(WIDTH, (0.06 + (0.34 if columns > 1 else 0.5) * lines) * WIDTH),
    )[1]  # fmt: skip
    bins = np.histogram_bin_edges(moved, bins=30)
    for ax, (method, style) in zip(axes.flat, method_styles(moved).items(), strict=False):
        values = moved[method].to_numpy()
        ax.stairs(np.histogram(values, bins)[0] / len(values), bins, fill=True, color=style["color"], alpha=0.6)
        ax.axvline(0, color="black", linewidth=0.8)
        ax.axvline(values.mean(), linewidth=1, gid=f"{method} mean", color=style["color"], linestyle="--")
        ax.set_title(f"{method}: {(values > 0).mean():.0%} better", fontsize=8, loc="left", parse_math=False)
        dress(ax, "", "")
    for ax in axes.flat[count:]:
        ax.axis("off")
    base = baseline if baseline in scores else scores.columns[0]
    axes[0, 0].figure.supxlabel(f"{label} less that of {base}, same prompt", fontsize=8)
    axes[0, 0].figure.supylabel("share of responses", fontsize=8)
    caption(axes[0, 0].figure, "Solid line: no change. Dashed: mean shift.")
    return axes.flat[:count]


@plt.rc_context(STYLE)
def score_quantiles(
    scores: Mapping[str, Sequence[float]], thresholds: Sequence[float] = (), label: str = "reward model score"
) -> Axes:
    """The share of responses that score no more than x: tails that a histogram hides (paper: Figures 3, 14, 16).

    `scores`: method to finite scores [N]; `thresholds` are marked. Raises InputError for no methods or no scores.
    """
    if not scores:
        raise InputError("scores is empty: give at least one method with its scores")
    arrays = {name: np.sort(finite(name, values)) for name, values in scores.items()}
    ax = subplots((1, 1), 0.68)[0, 0]
    for name, style in method_styles(arrays).items():
        ax.ecdf(arrays[name], label=name, gid=f"{name} line", linewidth=1.4, **style)
    for threshold in thresholds:
        ax.axvline(threshold, color="0.4", linewidth=0.7, gid="threshold")
    dress(ax, label, "share of responses up to x")
    legend(ax)
    marked = " Vertical lines: thresholds." if len(thresholds) else ""
    caption(ax.figure, f"Further right and lower is better; the left end is the low-quality tail.{marked}")
    return ax


@plt.rc_context(STYLE)
def over_optimisation(runs: Runs, smooth: int = 5) -> Axes:
    """Gold score against reward model score over training: where the path turns down, only the proxy still improves.

    Not in the paper. Rows have `update`, `rm_score_mean` and `gold_mean`; `smooth` and errors as in
    `plots.reward_curves`.
    """
    ax = panels(runs, [("rm_score_mean", "gold_mean")], (1, 1), 0.68, smooth)[0, 0]
    caption(
        ax.figure, "A run is a path through its updates; large dots: last update. Right but down: over-optimisation."
    )
    return ax


@plt.rc_context(STYLE)
def agreement_map(table: Sequence[Mapping]) -> Axes:
    """Agreement of every two raters in per cent, with Cohen's κ (paper: Table 1).

    `table` is that of `agreement.agreement_table`. Raises InputError for an empty one.
    """
    if not table:
        raise InputError("table is empty: give verdicts of at least two raters")
    names = list(dict.fromkeys(name for row in table for name in (row["a"], row["b"])))
    values, texts = np.full((len(names), len(names)), np.nan), {}
    for row in table:
        place = names.index(row["b"]), names.index(row["a"])
        share, kappa = row["agreement"], row["kappa"]["mean"]
        values[place] = share["mean"]
        words = "κ undefined" if np.isnan(kappa) else f"κ {kappa:.2f}".replace("-", "−")
        texts[place] = f"{share['mean']:.0%}\n[{share['low']:.0%}, {share['high']:.0%}]\n{words}"
    ax = subplots((1, 1), 0.16 * len(names))[0, 0]
    image = _heat(ax, values[1:, :-1], 0, 1, {(i - 1, j): text for (i, j), text in texts.items()})
    _ticks(ax, names[:-1], names[1:])
    ax.invert_yaxis()  # as the paper's table: the first rater on top
    ax.set(xlabel="rater", ylabel="rater")
    ax.figure.colorbar(image, label="agreement", format=PercentFormatter(1))
    pairs = sorted({row["pairs"] for row in table})
    count = str(pairs[0]) if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]}"
    caption(ax.figure, f"Share of {count} pairs with the same verdict [interval], and Cohen's κ.")
    return ax


@plt.rc_context(STYLE)
def win_rates(rates: Mapping[str, WinRate]) -> Axes:
    """Wins, ties and losses as stacked bars, with the interval of the win rate behind them (paper: Figures 4, 17).

    `rates`: who against whom by which judge, as the bar is called, to `agreement.win_rate`. Raises InputError for none.
    """
    if not rates:
        raise InputError("rates is empty: give at least one win rate")
    ax = subplots((1, 1), 0.1 * len(rates) + 0.24)[0, 0]
    left = np.zeros(len(rates))
    totals = np.array([rate.win + rate.tie + rate.lose for rate in rates.values()])
    for outcome, (colour, text) in _OUTCOMES.items():
        share = np.array([getattr(rate, outcome) for rate in rates.values()]) / totals
        bars = ax.barh(range(len(rates)), share, left=left, color=colour, height=0.66, label=outcome, gid=outcome)
        ax.bar_label(
            bars, [f"{x:.0%}" if x >= 0.06 else "" for x in share], label_type="center", color=text, fontsize=7
        )
        left += share
    names = [f"{n}\n{r.rate.mean:.0%} [{r.rate.low:.0%}, {r.rate.high:.0%}]" for n, r in rates.items()]
    ax.set_yticks(range(len(rates)), names, parse_math=False)
    ax.axvline(0.5, color="black", linewidth=0.8, linestyle="--", zorder=0)  # seen between the bars
    ax.set(xlim=(0, 1), xlabel="share of pairs", ylabel="win rate [interval]")
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    legend(ax)
    level = next(iter(rates.values())).rate.level
    caption(ax.figure, f"Win rate: ties count half; in brackets its {level:.0%} interval.")
    return ax


def _heat(ax: Axes, values: np.ndarray, low: float, high: float, texts: Mapping[tuple, str] | None = None):
    """A colour for each cell with its number in it; the first row is drawn at the bottom."""
    image = ax.pcolormesh(values, cmap="cividis", vmin=low, vmax=high, edgecolors="white", linewidth=0.5)
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value):
            words = texts[i, j] if texts else f"{value:.2f}".replace("-", "−")
            shade = "black" if high > low and (value - low) / (high - low) > 0.5 else "white"
            ax.text(j + 0.5, i + 0.5, words, ha="center", va="center", fontsize=7, color=shade)
    return image


def _ticks(ax: Axes, x: Sequence[str], y: Sequence[str]) -> None:
    ax.set_xticks(np.arange(len(x)) + 0.5, x, parse_math=False)
    ax.set_yticks(np.arange(len(y)) + 0.5, y, parse_math=False)
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
