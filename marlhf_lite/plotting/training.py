"""Figures of training, and what all figures of the project share: size, captions, files (colours: `plotting.styles`).

`runs` maps a method to its runs, one per seed. A run is a list of rows, as `RunFolder.metrics` gives them. Each
function draws one figure for a width of 10 cm (in a notebook: the width of the page) and returns its Axes. A new figure
has a caption, which `caption` replaces. No function shows a figure.
"""

import textwrap
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from marlhf_lite.plotting.styles import LABELS, MATPLOTLIB, SERIES, method_styles
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.tables import number

Runs = Mapping[str, Sequence[Sequence[Mapping]]]  # method -> its runs -> the rows of a run's log
WIDTH = 10 / 2.54  # inches
DPI = 170  # 10 cm are 669 pixels
STYLE = MATPLOTLIB | {"axes.prop_cycle": plt.cycler(color=SERIES), "figure.dpi": DPI}
STYLE |= {"figure.figsize": (WIDTH, 0.68 * WIDTH)}


# Figures


@plt.rc_context(STYLE)
def reward_curves(
    runs: Runs, metric: str = "score_mean", smooth: int = 5, ax: Axes | None = None
) -> Axes:
    """Draw a metric over updates (paper: Figures 2, 5, 6, 9, 13, 15, 19).

    A method with one run gets a faint line of every update, and a bold line of the mean over the last `smooth` updates.
    A method with several runs gets a thin line of such means for each run; and, over the updates that all its runs
    have, a bold line of the mean over runs with a band of ±1 standard deviation (N−1).

    Args:
        runs: every row has `update`, and some have the metric; a row whose metric is null is skipped.
        smooth: how many of the last updates with a value are averaged; 1 averages nothing.
        ax: the Axes to draw on; by default those of a new figure, which gets a caption.

    Raises:
        InputError: no rows, a missing metric, or seeds without an update in common.
    """
    if ax is None:
        ax = panels(runs, [("update", metric)], (1, 1), 0.68, smooth)[0, 0]
        caption(ax.figure, _explanation_of_lines(runs, smooth))
    else:
        _draw(ax, curve_tables(runs, [metric], smooth), "update", metric)
    return ax


@plt.rc_context(STYLE)
def l2_norms(runs: Runs, smooth: int = 5) -> np.ndarray:
    """Draw L2 norms of advantages and Q values over updates (paper: Figure 11), and their root mean squares below.

    A norm falls merely by having fewer terms: with n tokens per macro action, by √n. The lower row corrects for that.
    Returns [2,2] Axes, advantages left and Q values right. `smooth` and errors as in `reward_curves`.
    """
    names = ("advantage_norm", "q_norm", "advantage_rms", "q_rms")
    pairs = [("update", name) for name in names]
    axes = panels(runs, pairs, shape=(2, 2), height=1.1, smooth=smooth)
    text = "Top: norms fall merely by having fewer terms, as macro actions do. Bottom: per macro action, comparable."
    caption(axes[0, 0].figure, text)
    return axes


# Tables for seaborn


def curve_tables(
    runs: Runs, metrics: Sequence[str], smooth: int
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return three tables of the runs with the columns method, update, seed and the metrics.

    `runs` has a list of runs for each method, and `seed` is a run's place in that list. The first table has a row for
    each update of a run at which every metric has a value (see `_run_table`). The second table has the same rows, but
    in place of each value the mean over this update and those before it, `smooth` updates in all. The third table has
    those rows of the second whose update all runs of the method have, so that a mean over runs has the same runs
    everywhere. Errors are those of `reward_curves`.
    """
    for name, runs_of_method in runs.items():
        # There are no runs, or the method has the rows of one run in place of a list of runs.
        if not len(runs_of_method) or isinstance(runs_of_method[0], Mapping):
            raise InputError(
                f"{name}: give a list of runs, each a list of rows; for a single run [rows]"
            )
    parts = []
    for name, runs_of_method in runs.items():
        for seed, rows in enumerate(runs_of_method):
            parts.append(_run_table(name, rows, list(metrics)).assign(seed=seed))
    raw = pd.concat(parts, ignore_index=True)

    # `min_periods`: the first updates of a run are averaged over fewer than `smooth`.
    values_of_run = raw.groupby(["method", "seed"])[list(metrics)]
    means = values_of_run.transform(lambda values: values.rolling(smooth, min_periods=1).mean())
    smoothed = raw.assign(**means)

    # Each run has one row per update, so the size of a group is the number of runs that have this update.
    runs_at_update = raw.groupby(["method", "update"])["seed"].transform("size")
    runs_in_all = raw["method"].map(lambda name: len(runs[name]))
    shared = smoothed[runs_at_update == runs_in_all]
    without_shared = set(runs) - set(shared["method"])
    if without_shared:
        raise InputError(
            f"{min(without_shared)}: its runs have no update in common: give runs logged at the same updates"
        )
    return raw, smoothed, shared


def _run_table(name: str, rows: Sequence[Mapping], metrics: list[str]) -> pd.DataFrame:
    """Return a table of the updates of a run at which every metric has a value, in order; `name` is its method's.

    If several rows have the same update, as after a resume, only the last one counts. Raises `InputError` if a column
    is missing, or if no row has a value of every metric.
    """
    # As objects: pandas need not guess types, since the columns that are used become floats below.
    table = pd.DataFrame(list(rows), dtype=object)
    columns = ["update", *metrics]
    for column in columns:
        if column not in table:
            known = ", ".join(table) or "none"
            raise InputError(f"{name}: no {column!r} in its rows: name one of {known}")
    table = table[columns].astype(float)  # null becomes NaN
    # The last row of an update counts even if it lacks a value, so duplicates go before rows without a value do.
    table = table.drop_duplicates("update", keep="last").sort_values("update")
    table = table[np.isfinite(table).all(axis=1)]
    if not len(table):
        raise InputError(
            f"{name}: no update has a value of {' and '.join(metrics)}: give rows that have"
        )
    return table.assign(method=name)


# Drawing


def panels(
    runs: Runs, pairs: list[tuple[str, str]], shape: tuple[int, int], height: float, smooth: int
) -> np.ndarray:
    """Make a figure with a panel for each pair (x, y), and return its Axes [rows, columns].

    x and y are names of metrics, or "update". `shape` is the number of rows and of columns of panels, and `height` the
    height of the figure in units of its width. All tables are made before the figure, so that an error in the data
    leaves no empty figure behind.
    """
    curves = []
    for pair in pairs:
        metrics = [name for name in pair if name != "update"]
        curves.append(curve_tables(runs, metrics, smooth))
    axes = subplots(shape, height)
    for ax, tables, pair in zip(axes.flat, curves, pairs, strict=True):
        _draw(ax, tables, *pair)
    legend(axes[0, 0])
    for ax in axes.flat[1:]:  # one legend is enough, because all panels have the same methods
        ax.get_legend().remove()
    return axes


def _draw(
    ax: Axes, tables: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame], x: str, y: str
) -> None:
    """Draw each method's runs faintly and the mean over them in bold; `tables` are those of `curve_tables`.

    If `x` is "update", all of these are curves, and the mean has a band of ±1 standard deviation. If `x` is a metric,
    they are paths from update to update, and the path of the mean ends with a dot. If a method has a single run,
    its raw values are faint, and its smoothed curve or path is bold.
    """
    raw, smoothed, shared = tables
    # For each row of the tables: does its method have a single run? `seed` numbers the runs of a method from 0, so the
    # largest one is then 0.
    is_single_run = raw.groupby("method")["seed"].transform("max") == 0

    # 1. The looks: each method has its colour; its mean is bold, with the method's dashes, and its runs are faint.
    colours = {}
    dashes = {}  # as seaborn wants them: "" is a solid line
    for name, style in method_styles(raw["method"].unique()).items():
        colours[name] = style["color"]
        dashes[name] = "" if style["linestyle"] == "-" else style["linestyle"][1]
    line = {"x": x, "y": y, "hue": "method", "palette": colours}
    bold = {"style": "method", "dashes": dashes, "linewidth": 1.4, "ax": ax}
    # More than 16 runs are drawn fainter and thinner, so that the means stay clear.
    strength = min(1.0, 16 / raw.groupby(["method", "seed"]).ngroups)
    faint = {
        "units": "seed",  # a line for each run,
        "estimator": None,  # without averaging them
        "sort": False,  # in the order of updates; along a path x may go back
        "ax": ax,
        "alpha": max(0.2, 0.4 * strength),
        "linewidth": max(0.4, 0.6 * strength),
    }

    if x == "update":
        # 2. Curves over updates. Of single runs `where` takes the raw values, of others the smoothed ones.
        runs = smoothed.where(~is_single_run, raw)
        seaborn.lineplot(runs, **line, **faint, legend=False)
        band = {"errorbar": "sd", "err_kws": {"alpha": 0.15, "linewidth": 0}}
        seaborn.lineplot(shared, **line, **bold, **band)
    else:
        # 3. Paths of one metric over another; the raw values of a single run are small dots.
        dots = {"linewidth": 0, "legend": False, "ax": ax}
        if is_single_run.any():
            seaborn.scatterplot(raw[is_single_run], **line, **dots, s=3, alpha=0.4)
        if not is_single_run.all():
            seaborn.lineplot(smoothed[~is_single_run], **line, **faint, legend=False)
        means = shared.groupby(["method", "update"], sort=False, as_index=False)[[x, y]].mean()
        seaborn.lineplot(means, **line, **bold, estimator=None, sort=False)
        ends_of_paths = means.groupby("method").tail(1)
        seaborn.scatterplot(ends_of_paths, **line, **dots, s=20)
    ax.get_legend().set_title(None)
    dress(ax, x, y)


def _explanation_of_lines(runs: Runs, smooth: int) -> str:
    """Return the part of a caption that says what faint, thin and bold lines are."""
    counts = {len(runs_of_method) for runs_of_method in runs.values()}
    parts = []
    # With `smooth` 1 the faint and the bold line of a single run are the same.
    if 1 in counts and smooth > 1:
        parts.append(f"Faint: single updates; bold: mean of the last {smooth}.")
    several = sorted(counts - {1})
    if several:
        seeds = " or ".join(map(str, several))
        parts.append(
            f"Thin: {seeds} seeds, means of {smooth} updates; bold: their mean; band: ±1 std."
        )
    return " ".join(parts)


def subplots(shape: tuple[int, int], height: float, **options) -> np.ndarray:
    """Make a figure of STYLE's width and return its Axes [rows, columns]; `height` is a multiple of the width."""
    width = plt.rcParams["figure.figsize"][0]
    return plt.subplots(
        *shape, figsize=(width, height * width), layout="constrained", squeeze=False, **options
    )[1]


def grid(count: int, margin: float, height: float, **options) -> np.ndarray:
    """Make a figure of `count` panels, two per row, and return their Axes, flat.

    In units of the figure's width, each row of panels is `height` high, and `margin` is added for the whole figure.
    """
    rows = ceil(count / 2)
    columns = min(2, count)
    axes = subplots((rows, columns), margin + height * rows, **options).ravel()
    for ax in axes[count:]:
        ax.set_axis_off()
    return axes[:count]


def dress(ax: Axes, x: str, y: str) -> None:
    """Label both axes, with few ticks and a grid."""
    ax.set(xlabel=label_of(x), ylabel=label_of(y))
    ax.xaxis.set_major_locator(
        MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=x == "update")
    )
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    ax.grid(alpha=0.3, linewidth=0.5)


def label_of(name: str) -> str:
    """Return what figures call a metric or a score.

    A name that is not in the table stays if it is a user's function, module:function; otherwise underscores become
    spaces.
    """
    return LABELS.get(name, name if ":" in name else name.replace("_", " "))


def signed(value: float) -> str:
    """Return a number as figures write it: two decimals, with a minus sign instead of a hyphen."""
    return number(value).replace("-", "−")


def percent(share: float) -> str:
    """Return a share as figures write it: in whole percent, with a space before the sign."""
    return f"{100 * share:.0f} %"


def make_words_on_cells_readable(ax: Axes) -> None:
    """Write on each cell of seaborn's heat map in black or in white, whichever stands out more from its colour.

    Seaborn writes in white on colours of middle lightness, where black has twice the contrast.
    """
    cells = ax.collections[0]
    # Cells without a value have no words.
    colours = cells.get_facecolors()[~np.ma.getmaskarray(cells.get_array()).ravel()]
    for words, colour in zip(ax.texts, colours, strict=True):
        # The relative luminance of WCAG 2. Above 0.179 black has more contrast than white.
        channels = colour[:3]
        linear = np.where(
            channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
        )
        luminance = linear @ [0.2126, 0.7152, 0.0722]
        words.set_color("black" if luminance > 0.179 else "white")


def legend(ax: Axes) -> None:
    """Put the legend above the panels, in as many columns as fit the width."""
    handles, labels = ax.get_legend_handles_labels()
    if ax.get_legend():
        ax.get_legend().remove()
    # Widths in units of the font's size, which is in points (72 to the inch): a letter takes about 0.6, and a line with
    # its margins 4.5.
    width = ax.figure.get_figwidth() * 72 / plt.rcParams["font.size"]
    width_of_column = 4.5 + 0.6 * max(map(len, labels))
    columns_that_fit = int(width / width_of_column)
    columns = max(1, min(columns_that_fit, len(labels)))
    ax.figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def caption(figure: Figure, text: str) -> None:
    """Put `text` under the figure, in place of an earlier caption.

    The text is outside the figure's area, so write the figure with `save`, which includes it.
    """
    for old in [item for item in figure.texts if item.get_gid() == "caption"]:
        old.remove()
    size = plt.rcParams["font.size"] - 1
    # A line has as many letters as fit the width: about 133 / size to the inch.
    wrapped = textwrap.fill(" ".join(text.split()), int(133 / size * figure.get_figwidth()))
    # parse_math off: a lone dollar sign is money, not a formula.
    figure.text(
        0.01, -0.02, wrapped, gid="caption", fontsize=size, color="0.25", va="top", parse_math=False
    )


# Entries that are left out of a file's metadata, by its ending. Without version and date the same figure gives the
# same bytes.
WITHOUT_DATES = {".png": {"Software": None}, ".pdf": {"CreationDate": None}}


def save(figure: Figure | Axes | np.ndarray, path: str | Path) -> Path:
    """Write a figure, or the figure of these Axes, as .png or .pdf; the same figure gives the same bytes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(figure, Figure):  # Axes, or an array of them
        figure = np.ravel(figure)[0].get_figure(root=True)
    # a layout settles at its second pass: from then on saving gives the same bytes
    for _ in range(2):
        figure.draw_without_rendering()
    with plt.rc_context({"pdf.fonttype": 42}):  # letters stay letters in a PDF file
        figure.savefig(path, dpi=DPI, bbox_inches="tight", metadata=WITHOUT_DATES.get(path.suffix))
    return path


def save_to_see_and_to_print(figure: Figure | Axes | np.ndarray, folder: Path, name: str) -> None:
    """Write a figure twice, as NAME.png to look at and as NAME.pdf to print."""
    for ending in (".png", ".pdf"):
        save(figure, folder / f"{name}{ending}")
