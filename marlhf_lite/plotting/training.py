"""The paper's pictures: each function draws one figure from records, to be read at 10 cm wide, and returns its Axes.

`runs` maps a method to its runs, one for each seed; a run is a list of rows, as `RunFolder.metrics` gives them.
A function that makes its own figure puts a caption below it, which `caption` replaces. Nothing here shows a figure.
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import seaborn
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from marlhf_lite.evaluation.statistics import Curves, finite, seed_curves
from marlhf_lite.utils.errors import InputError

Runs = Mapping[str, Sequence[Sequence[Mapping]]]
WIDTH = 10 / 2.54  # inches
DPI = 150
STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.2,
    "figure.dpi": DPI,
}
# Where the name in the records does not say enough; a name without a unit here is a pure number.
LABELS = {
    "rm_score_mean": "reward model score",
    "gold_mean": "gold score",
    "kl_k1": "KL, k1 (nats a response)",
    "kl_k3": "KL, k3 (nats a response)",
    "entropy": "entropy (nats)",
    "response_length": "response length (tokens)",
    "eos_rate": "share of responses with EOS",
    "clip_fraction": "share of ratios clipped",
    "advantage_norm": "L2 norm of Â",
    "q_norm": "L2 norm of Q̂",
    "advantage_rms": "RMS of Â per macro action",
    "q_rms": "RMS of Q̂ per macro action",
    "macro_length": "macro action length (tokens)",
}

_PALETTE = seaborn.color_palette("colorblind").as_hex()
_KNOWN = {"SFT": ("#7f7f7f", ":"), "PPO": (_PALETTE[0], "--"), "MA-PPO": (_PALETTE[3], "-")}
_COLOURS = [*(_PALETTE[index] for index in (2, 4, 1, 9)), "#222222"]
_LINES = ["-.", (0, (6, 1.5)), (0, (3, 1, 1, 1, 1, 1)), "-"]  # with 5 colours: 20 pairs before one comes again


def method_styles(names: Collection[str]) -> dict[str, dict]:
    """Colour and line style of each method: SFT, PPO and MA-PPO have theirs, others in order of appearance."""
    others = [name for name in names if name not in _KNOWN]
    free = {name: (_COLOURS[i % len(_COLOURS)], _LINES[i % len(_LINES)]) for i, name in enumerate(others)}
    return {name: dict(zip(("color", "linestyle"), (_KNOWN | free)[name], strict=True)) for name in names}


@plt.rc_context(STYLE)
def reward_curves(runs: Runs, metric: str = "rm_score_mean", smooth: int = 5, ax: Axes | None = None) -> Axes:
    """A metric over updates (paper: Figures 2, 5, 6, 9, 13, 15, 19).

    One run: every update, faint, and the mean of the last `smooth`. Several: each so averaged, thin; their mean; and a
    band of ±1 standard deviation (N−1), over the updates that all of them have.

    Args:
        runs: rows have `update` and, in some, the metric; nulls are skipped.
        metric: the name in the rows; its unit is on the axis.
        smooth: updates averaged, counted among those with a value; 1 for none.
        ax: where to draw; None makes a figure.

    Raises InputError for no runs or rows, a metric they do not have, or seeds without an update in common.
    """
    if ax is None:
        ax = panels(runs, [("update", metric)], (1, 1), 0.68, smooth)[0, 0]
        caption(ax.figure, _reading(runs, smooth))
    else:
        _fill(ax, _all_curves(runs, ("update", metric), smooth), ("update", metric))
        ax.legend()
    return ax


@plt.rc_context(STYLE)
def score_distribution(
    scores: Mapping[str, Sequence[float]], ax: Axes | None = None, label: str = "reward model score"
) -> Axes:
    """Histograms of each method's scores over the same 30 bins, the means marked (paper: Figures 3, 14, 16).

    Args:
        scores: method to its finite scores [N], one for each response, N ≥ 1; N may differ.
        ax: where to draw; None makes a figure.
        label: what the scores are, with their unit, for the axis.

    Raises InputError for no methods, or a method without scores or with one that is not finite.
    """
    if not scores:
        raise InputError("scores is empty: give at least one method with its scores")
    arrays = {name: finite(name, values) for name, values in scores.items()}
    own, ax = ax is None, subplots((1, 1), 0.68)[0, 0] if ax is None else ax
    bins = np.histogram_bin_edges(np.concatenate(list(arrays.values())), bins=30)
    for name, style in method_styles(arrays).items():
        share = np.histogram(arrays[name], bins)[0] / len(arrays[name])
        mean = arrays[name].mean()
        text = f"{name}, mean {mean:.2f}".replace("-0.00", "0.00").replace("mean -", "mean −")
        ax.stairs(share, bins, fill=True, color=style["color"], alpha=0.12)
        ax.stairs(share, bins, label=text, gid=f"{name} line", linewidth=1.2, **style)
        ax.axvline(mean, gid=f"{name} mean", linewidth=0.8, **style)
    dress(ax, label, "share of responses")
    if own:
        legend(ax)
        caption(ax.figure, "Vertical lines: means. Further right is better.")
    else:
        ax.legend()
    return ax


@plt.rc_context(STYLE)
def l2_norms(runs: Runs, smooth: int = 5) -> np.ndarray:
    """L2 norms of advantages and Q values over updates (paper: Figure 11), and their root mean squares beneath.

    A norm falls merely by having fewer terms: with n tokens to a macro action, by √n. The lower row takes that out.
    Rows have `update`, `advantage_norm`, `q_norm`, `advantage_rms` and `q_rms`. Returns [2,2] Axes, advantages left and
    Q values right. `smooth` and errors as in `reward_curves`.
    """
    names = ("advantage_norm", "q_norm", "advantage_rms", "q_rms")
    axes = panels(runs, [("update", name) for name in names], (2, 2), 1.1, smooth)
    text = "Top: norms fall merely by having fewer terms, as macro actions do. Bottom: per macro action, comparable."
    caption(axes[0, 0].figure, text)
    return axes


@plt.rc_context(STYLE)
def reward_against_gold(runs: Runs, smooth: int = 5) -> np.ndarray:
    """Reward model score and gold score over the KL to the reference: over-optimisation, where only the first rises.

    Not in the paper, which reports reward hacking on WebGPT (Appendix C.2). A run is a path through its updates that
    ends in a dot, single updates as points; several are thin, with the mean of both coordinates.
    Rows have `update`, `kl_k1`, `rm_score_mean` and `gold_mean`. Returns [2] Axes, reward model score left and gold
    score right. `smooth`, here of both coordinates, and errors as in `reward_curves`.
    """
    axes = panels(runs, [("kl_k1", name) for name in ("rm_score_mean", "gold_mean")], (1, 2), 0.6, smooth)[0]
    caption(axes[0].figure, "Large dots: last update. Left up, right down: over-optimisation.")
    return axes


def caption(fig: Figure, text: str) -> None:
    """Puts `text` below everything in the figure, wrapped to its width, in place of an earlier caption.

    It hangs outside the figure's own area: save with `save`, or with bbox_inches="tight" as notebooks do.
    """
    for old in [item for item in fig.texts if item.get_gid() == "caption"]:
        old.remove()
    fig.draw_without_rendering()  # places the axes, so that we know where they end
    width, height = fig.get_size_inches()
    bottom = (min(0, fig.get_tightbbox().y0) - 0.06) / height
    text = " ".join(text.split())
    # parse_math off: a lone dollar sign is money, not a formula.
    item = fig.text(0, bottom, text, gid="caption", fontsize=7.5, color="0.25", va="top", parse_math=False)
    # Measured at the resolution of `save`: hinting makes letters relatively narrower at others.
    measure, font = RendererAgg(1, 1, DPI).get_text_width_height_descent, item.get_fontproperties()
    columns, lines = len(text), [text]
    while columns > 20 and max(measure(line, font, False)[0] for line in lines) > width * DPI:
        columns -= 1
        lines = textwrap.wrap(text, columns)
    item.set_text("\n".join(lines))


def save(figure: Figure | Axes | np.ndarray, path: str | Path) -> Path:
    """Writes a figure, given itself or by its Axes, as .png of 150 dpi; the same figure gives the same bytes."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise InputError(f"{path}: figures are saved as PNG, give a name that ends in .png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = figure if isinstance(figure, Figure) else np.ravel(figure)[0].get_figure(root=True)
    for _ in range(2):  # a layout settles at its second pass; only then does saving again give the same
        figure.draw_without_rendering()
    figure.savefig(path, dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    return path


def subplots(shape: tuple[int, int], height: float) -> np.ndarray:
    return plt.subplots(*shape, figsize=(WIDTH, height * WIDTH), layout="constrained", squeeze=False)[1]


def _all_curves(runs: Runs, pair: tuple[str, str], smooth: int) -> dict[str, Curves]:
    if not runs:
        raise InputError("runs is empty: give at least one method with a run")
    metrics = [name for name in pair if name != "update"]
    return {name: seed_curves(group, metrics, smooth, name) for name, group in runs.items()}


def panels(runs: Runs, pairs: list[tuple[str, str]], shape: tuple[int, int], height: float, smooth: int) -> np.ndarray:
    """A figure with a panel for each pair of x and y. All data first: a mistake in it leaves no empty figure."""
    curves = [_all_curves(runs, pair, smooth) for pair in pairs]
    axes = subplots(shape, height)
    for ax, methods, pair in zip(axes.flat, curves, pairs, strict=True):
        _fill(ax, methods, pair)
    legend(axes[0, 0])
    return axes


def _fill(ax: Axes, methods: dict[str, Curves], pair: tuple[str, str]) -> None:
    for name, style in method_styles(methods).items():
        _draw(ax, name, style, methods[name], path=pair[0] != "update")
    dress(ax, *pair)


def _draw(ax: Axes, name: str, style: dict, curves: Curves, path: bool) -> None:
    """One method; a path has no band, for its seeds differ in x too, and says where it ends."""
    faint = {"color": style["color"], "alpha": 0.4, "linewidth": 0.6}
    several = len(curves.raw) > 1
    if path and not several:
        faint |= {"linestyle": "none", "marker": ".", "markersize": 2}
    # The last two columns are x and y; without an x of its own, that is the update.
    for table in curves.smoothed if several else curves.raw:
        ax.plot(table[:, -2], table[:, -1], gid=f"{name} {'seed' if several else 'raw'}", **faint)
    x, y, spread = curves.mean[:, -2], curves.mean[:, -1], curves.std[:, -1]
    if several and not path:
        ax.fill_between(x, y - spread, y + spread, color=style["color"], alpha=0.15, lw=0, gid=f"{name} band")
    ax.plot(x, y, gid=f"{name} line", label=name, linewidth=1.4, **style)
    if path:
        ax.plot(x[-1:], y[-1:], "o", color=style["color"], markersize=4, gid=f"{name} end")


def _reading(runs: Runs, smooth: int) -> str:
    counts = {len(group) for group in runs.values()}
    parts = [f"Faint: single updates; bold: mean of the last {smooth}."] if 1 in counts and smooth > 1 else []
    if seeds := sorted(counts - {1}):
        averaged = f" (means of {smooth} updates)" if smooth > 1 else ""
        parts.append(f"Thin: {' or '.join(map(str, seeds))} seeds{averaged}; bold: their mean; band: ±1 std.")
    return " ".join(parts)


def dress(ax: Axes, x: str, y: str) -> None:
    ax.set(xlabel=LABELS.get(x, x.replace("_", " ")), ylabel=LABELS.get(y, y.replace("_", " ")))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=x == "update"))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    ax.grid(alpha=0.3, linewidth=0.5)


def legend(ax: Axes) -> None:
    """Above the panels, never on the data, in as many columns as fit the width at 8 points."""
    handles, labels = ax.get_legend_handles_labels()
    columns = int(WIDTH * 72 / (36 + 4.8 * max(map(len, labels))))
    ax.figure.legend(handles, labels, loc="outside upper left", ncols=max(1, min(columns, len(labels))))
