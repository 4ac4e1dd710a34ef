"""Lines that a lesson computed, in one call: named series in one panel or several, with one legend."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import SERIES, method_styles

# name -> [N] numbers, or [2, N] with the positions on the x axis first
Series = Mapping[str, Sequence]
LINES = ("-", "--", ":", "-.")


def line_figure(series: Series, x: str, y: str, **look: object) -> Axes:
    """Draw named series in one panel; `look`: as for `line_panels`."""
    return line_panels({"": series}, x, y, **look)[0]


@plt.rc_context(plots.STYLE)
def line_panels(
    panels: Mapping[str, Series],
    x: str,
    y: str,
    at: Sequence[float] | None = None,
    dots: Mapping[str, Series] | None = None,
    drawstyle: str = "default",
    bands: Sequence[tuple[float, float]] = (),
    **axis: object,
) -> np.ndarray:
    """Draw named series as lines, a panel for each title, with the legend of the first panel above all of them.

    If a name is that of a method, its line has the method's colour and style, as in all figures of the project.

    Args:
        panels: title to series.
        x, y: labels of the axes, with units.
        at: [N] positions on the x axis of series without positions; None: 1, 2, …
        dots: title to series that are drawn as dots, in the colour of the line with the same name.
        drawstyle: how matplotlib joins the points of a line, such as "steps-mid".
        bands: the two ends of each grey band on the x axis.
        axis: further properties of all panels, such as ``ylim`` and ``xscale``.

    Returns:
        The Axes of the panels.
    """
    axes = plots.subplots((1, len(panels)), 0.42, sharey=True)[0]
    dots = dots or {}
    names: list[str] = []
    for series in (*panels.values(), *dots.values()):
        names += series  # its names, with repetitions
    styles = _styles(names)
    for ax, (title, series) in zip(axes, panels.items(), strict=True):
        for name, numbers in series.items():
            places, heights = _places_and_heights(numbers, at)
            ax.plot(places, heights, label=name, drawstyle=drawstyle, **styles[name])
        for name, numbers in dots.get(title, {}).items():
            places, heights = _places_and_heights(numbers, at)
            label = None if name in series else name  # the legend has the line of this name already
            ax.plot(places, heights, "o", markersize=3, color=styles[name]["color"], label=label)
        plots.dress(ax, x, y if ax is axes[0] else "")
        for low, high in bands:
            ax.axvspan(low, high, color="0.9", zorder=0)
        ax.set_title(title, fontsize="medium")
        ax.set(**axis)
    plots.legend(axes[0])
    return axes


def _styles(names: Sequence[str]) -> dict[str, dict]:
    """Return name -> colour and line style of a method or a quantity.

    A method has its own line style. A name that is no method's is a quantity: `method_styles` gives it a colour of
    `SERIES` and a solid line, and here each quantity gets another line style.
    """
    styles = method_styles(list(dict.fromkeys(names)))
    quantities = 0
    with_lines = {}
    for name, style in styles.items():
        if style["color"] in SERIES:
            style = style | {"linestyle": LINES[quantities % len(LINES)]}
            quantities += 1
        with_lines[name] = style
    return with_lines


def _places_and_heights(numbers: Sequence, at: Sequence[float] | None) -> tuple[Sequence, Sequence]:
    """Return the positions on the x axis and the numbers of a series, [N] each.

    If a series has no positions of its own (see `Series`), they are `at`; without `at`, 1, 2, …
    """
    numbers = np.asarray(numbers, dtype=float)
    if numbers.ndim == 2:  # [2, N], with positions
        places, heights = numbers
        return places, heights
    if at is None:
        at = range(1, len(numbers) + 1)
    return at, numbers


@plt.rc_context(plots.STYLE)
def signed_bars(series: Series, x: str, y: str, linear: float) -> Axes:
    """Draw named series as bars from 0, side by side at 1, 2, …, each with its number, so that every sign can be seen.

    Beyond ±`linear` the y axis is logarithmic, because a large number would hide the sign of a small one.
    """
    ax = plots.subplots((1, 1), 0.5)[0, 0]
    styles = _styles(list(series))
    width = 0.8 / len(series)
    for rank, (name, numbers) in enumerate(series.items()):
        # The bars of all series at one position stand side by side, around this position.
        places = np.arange(1, len(numbers) + 1) + width * (rank - (len(series) - 1) / 2)
        bars = ax.bar(places, numbers, 0.9 * width, color=styles[name]["color"], label=name)
        rounded = np.round(numbers, 3) + 0.0  # a negative zero becomes 0
        words = [f"{number:+.3f}".replace("-", "−") for number in rounded]
        ax.bar_label(bars, words, padding=2, fontsize="small")
    ax.axhline(0, color="0.2", linewidth=1.2)
    ax.set_yscale("symlog", linthresh=linear)  # linear up to ±`linear`
    ax.margins(y=0.2)
    longest = max(len(numbers) for numbers in series.values())
    ax.set(xlabel=x, ylabel=y, xticks=range(1, longest + 1), yticks=[0])
    ax.tick_params(axis="y", which="minor", left=False)
    plots.legend(ax)
    return ax


@plt.rc_context(plots.STYLE)
def reward_panels(curves: plots.Runs, goal: float, y: str, smooth: int = 5) -> np.ndarray:
    """Draw the rewards of each method in a separate panel, beside the goal, a grey line; return the Axes."""
    axes = plots.subplots((1, len(curves)), 0.45, sharey=True)[0]
    for ax, (name, runs) in zip(axes, curves.items(), strict=True):
        plots.reward_curves({name: runs}, smooth=smooth, ax=ax)
        ax.get_legend().remove()
        ax.axhline(goal, color="0.6", linewidth=0.8)
        ax.set_title(name, fontsize="medium")
        ax.set(xlabel="update", ylabel=y if ax is axes[0] else "")
    return axes
