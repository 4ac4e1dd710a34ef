"""Are all axes labelled, all colours from the table, and is all in its place? For every figure that is drawn."""

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.cm import ScalarMappable
from matplotlib.colors import same_color, to_hex, to_rgba_array

from marlhf_lite.plotting.styles import TABLE, method_styles

SCALES = {"cividis", "PuOr_r"}  # colours of numbers: from low to high, and with a middle


def unlabelled(figure):
    """A line for each axes with data that has no label on x or on y.

    A label on axes that share the x or the y counts for all of them. Colour bars need one label; axes that are
    switched off, none.
    """
    lines = []
    for place, ax in enumerate(figure.axes):
        if not (ax.axison and ax.get_visible() and ax.has_data()):
            continue
        x = bool(figure.get_supxlabel()) or any(
            a.get_xlabel() for a in ax.get_shared_x_axes().get_siblings(ax)
        )
        y = bool(figure.get_supylabel()) or any(
            a.get_ylabel() for a in ax.get_shared_y_axes().get_siblings(ax)
        )
        if not (x and y) and not (ax.get_label() == "<colorbar>" and (x or y)):
            lines.append(f"figure {figure.number}, axes {place}: no label on {'y' if x else 'x'}")
    return lines


def strange_colours(figure):
    """A line for each colour in a figure that is neither in the project's table nor grey, and for a strange scale."""
    found = set()
    for artist in figure.findobj():
        if isinstance(artist, ScalarMappable) and artist.get_array() is not None:
            found |= {artist.get_cmap().name} - SCALES
        else:
            getters = [
                getattr(artist, f"get_{name}", None) for name in ("color", "facecolor", "edgecolor")
            ]
            found |= {
                to_hex(c)
                for get in getters
                if get
                for c in to_rgba_array(get())
                if c[3] and np.ptp(c[:3]) > 0.01
            }
    return [
        f"figure {figure.number}: {colour} is not in the table" for colour in sorted(found - TABLE)
    ]


def check_figures():
    """All open figures are labelled and have the project's colours."""
    assert not [line for number in plt.get_fignums() for line in faults(plt.figure(number))]


def faults(figure):
    return [*unlabelled(figure), *strange_colours(figure)]


def check_layout(figure):
    """All is labelled, nothing overlaps, and the caption stands below all else, no wider than the figure."""
    figure.draw_without_rendering()
    assert not faults(figure)
    boxes = [ax.get_tightbbox() for ax in figure.axes if ax.axison]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    assert not any(a.shrunk(0.99, 0.99).overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    (caption,) = [text for text in figure.texts if text.get_gid() == "caption"]
    words = caption.get_window_extent()
    assert words.width <= 1.02 * figure.bbox.width and words.y1 <= min(box.y0 for box in boxes)


def lines(ax, name, bold=True):
    """[2,U] data of a method's bold lines, or of its thin ones, found by the method's colour."""
    own = [line for line in ax.lines if _is_of(name, line.get_color()) and len(line.get_xdata())]
    return [np.array(line.get_data(), float) for line in own if (line.get_linewidth() > 1) == bold]


def shapes(ax, name):
    """[N,2] outlines of a method's bands, or histograms."""
    own = [shape for shape in ax.collections if _is_of(name, shape.get_facecolor()[0][:3])]
    return [shape.get_paths()[0].vertices for shape in own if len(shape.get_paths())]


def _is_of(name, colour):
    return same_color(colour, method_styles([name])[name]["color"])


def watch():
    """A list that from now on gets the unlabelled axes and the strange colours of every figure that is drawn."""
    found, draw = [], FigureCanvasBase.print_figure

    def noting(canvas, *args, **kwargs):
        found.extend(faults(canvas.figure))
        return draw(canvas, *args, **kwargs)

    FigureCanvasBase.print_figure = noting
    return found
