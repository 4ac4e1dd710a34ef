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
    """Draw named series as lines, a panel for each title, with the legend of the first above them.

    If a name is that of a method, its line has the method's colour and style, as in all figures of the project.

    Args:
        panels: title to series.
        x, y: labels of the axes, with units.
        at: [N] positions on the x axis of series without positions; None: 1, 2, …
        dots: title to series that are drawn as dots, in the colour of the line with the same name.
        drawstyle: of the lines, as matplotlib has them, such as "steps-mid".
        bands: ends of grey bands on the x axis.
        axis: further properties of all panels, such as ``ylim`` and ``xscale``.

    Returns:
        The Axes of the panels.
    """
    axes, dots = plots.subplots((1, len(panels)), 0.42, sharey=True)[0], dots or {}
    styles = _styles([name for series in (*panels.values(), *dots.values()) for name in series])
    for ax, (title, series) in zip(axes, panels.items(), strict=True):
        for name, numbers in series.items():
            ax.plot(*_places(numbers, at), label=name, drawstyle=drawstyle, **styles[name])
        for name, numbers in dots.get(title, {}).items():
            look = {"color": styles[name]["color"], "label": None if name in series else name}
            ax.plot(*_places(numbers, at), "o", markersize=3, **look)
        plots.dress(ax, x, y if ax is axes[0] else "")
        for ends in bands:
            ax.axvspan(*ends, color="0.9", zorder=0)
        ax.set_title(title, fontsize="medium")
        ax.set(**axis)
    plots.legend(axes[0])
    return axes


def _styles(names: Sequence[str]) -> dict[str, dict]:
    """The styles of methods; the styles of quantities have a colour, and here lines that differ."""
    styles = method_styles(list(dict.fromkeys(names)))
    quantities = [name for name, style in styles.items() if style["color"] in SERIES]
    lines = {name: LINES[place % len(LINES)] for place, name in enumerate(quantities)}
    return {
        name: style | {"linestyle": lines.get(name, style["linestyle"])}
        for name, style in styles.items()
    }


def _places(numbers: Sequence, at: Sequence[float] | None) -> Sequence:
    numbers = np.asarray(numbers, dtype=float)
    return (
        numbers
        if numbers.ndim == 2
        else (range(1, len(numbers) + 1) if at is None else at, numbers)
    )


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
