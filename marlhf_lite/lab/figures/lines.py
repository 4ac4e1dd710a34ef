"""Lines that a lesson computed, in one call: named series in one panel or several, with one legend."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import method_styles

Series = Mapping[str, Sequence]  # name -> [N] numbers, or [2, N] with the places on the x axis first


def line_figure(series: Series, x: str, y: str, **look: object) -> Axes:
    """Draw named series in one panel; `look`: as for `line_panels`."""
    return line_panels({"": series}, x, y, **look)[0]


@plt.rc_context(plots.STYLE)
def line_panels(
    panels: Mapping[str, Series],
    x: str,
    y: str,
    at: Sequence[float] | None = None,
    marker: str = "",
    step: bool = False,
    **axis: object,
) -> np.ndarray:
    """Draw named series as lines, a panel for each title, with one legend above them.

    A name that speaks of a method has that method's colour and line, as in all figures of the project.

    Args:
        panels: title to series.
        x, y: labels of the axes, with units.
        at: [N] places on the x axis of series that have none of their own; None: 1, 2, …
        marker: of each number, as matplotlib has them; series whose name ends with "dots" are markers alone.
        step: whether numbers are drawn as steps around their places.
        axis: further properties of all panels, such as ``ylim`` and ``xscale``.

    Returns:
        The Axes of the panels.
    """
    axes = plots.subplots((1, len(panels)), 0.42, sharey=True)[0]
    styles = method_styles(list(dict.fromkeys(name for series in panels.values() for name in series)))
    for ax, (title, series) in zip(axes, panels.items(), strict=True):
        for name, numbers in series.items():
            numbers = np.asarray(numbers, dtype=float)
            pair = numbers if numbers.ndim == 2 else (range(1, len(numbers) + 1) if at is None else at, numbers)
            look = styles[name] | {"marker": marker, "markersize": 3}
            look |= {"linestyle": "none", "marker": "o"} if name.endswith("dots") else {}
            ax.plot(*pair, label=name, drawstyle="steps-mid" if step else "default", **look)
        plots.dress(ax, x, y if ax is axes[0] else "")
        ax.set_title(title, fontsize="medium")
        ax.set(**axis)
    plots.legend(axes[0])
    return axes


@plt.rc_context(plots.STYLE)
def reward_panels(curves: plots.Runs, goal: float, y: str, smooth: int = 5) -> np.ndarray:
    """Draw the rewards of each method in a panel of its own, beside the goal, a grey line; return the Axes."""
    axes = plots.subplots((1, len(curves)), 0.45, sharey=True)[0]
    for ax, (name, runs) in zip(axes, curves.items(), strict=True):
        plots.reward_curves({name: runs}, smooth=smooth, ax=ax)
        ax.get_legend().remove()
        ax.axhline(goal, color="0.6", linewidth=0.8)
        ax.set_title(name, fontsize="medium")
        ax.set(xlabel="update", ylabel=y if ax is axes[0] else "")
    return axes
