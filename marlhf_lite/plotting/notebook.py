"""What every teaching notebook begins with: its profile, its set-up, a check of its figures, its badges.

The profile comes from the environment variable MARLHF_PROFILE, and only from here; a notebook asks for a budget once,
near its top: ``seeds = profile().pick(smoke=2, cpu=20)``. ``python -m marlhf_lite.plotting.notebook badges owner/name``
makes all badges and install cells point at that GitHub repository.
"""

import argparse
import functools
import os
import platform
import random
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from marlhf_lite import __version__
from marlhf_lite.utils.errors import InputError

PROFILES = ("smoke", "cpu", "gpu")
T = TypeVar("T")


@dataclass(frozen=True)
class Profile:
    """How much a notebook computes: smoke (a test, seconds), cpu (minutes on two cores), gpu (Colab, Kaggle)."""

    name: str

    def pick(self, smoke: T, cpu: T, gpu: T | None = None) -> T:
        """The value for this profile; without one for gpu, that of cpu."""
        return {"smoke": smoke, "cpu": cpu, "gpu": cpu if gpu is None else gpu}[self.name]


def profile() -> Profile:
    """The profile that MARLHF_PROFILE names; cpu where it is not set."""
    name = os.environ.get("MARLHF_PROFILE") or "cpu"
    if name not in PROFILES:
        raise InputError(f"MARLHF_PROFILE: expected one of {', '.join(PROFILES)}, got {name!r}")
    return Profile(name)


def setup(seed: int = 0) -> None:
    """Seeds every generator, sets the plot style, checks figures from now on, and prints the versions in one line."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    _plot_style()
    _watch_figures()
    print(
        f"marlhf_lite {__version__} · torch {torch.__version__} · Python {platform.python_version()}"
        f" · profile {profile().name} · seed {seed}"
    )


def _plot_style() -> None:
    import seaborn
    from matplotlib import pyplot as plt

    from marlhf_lite.plotting.training import STYLE

    seaborn.set_palette("colorblind")
    figure = {"dpi": 96, "figsize": (6.3, 2.8), "constrained_layout.use": True}
    own = {"axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5, "font.size": 9, "lines.linewidth": 1.4}
    plt.rcParams.update(STYLE | own | {f"figure.{name}": value for name, value in figure.items()})


# Figures


def _watch_figures() -> None:
    """In a notebook, `check_figures` runs before figures are shown and closed: by plt.show, or after each cell."""
    try:
        from IPython import get_ipython
        from matplotlib_inline.backend_inline import flush_figures
    except ImportError:
        return
    if (shell := get_ipython()) is None:
        return
    for callback in (check_figures, flush_figures):  # in this order, whatever was registered before
        with suppress(ValueError):
            shell.events.unregister("post_execute", callback)
    shell.events.register("post_execute", check_figures)
    shell.events.register("post_execute", flush_figures)
    from matplotlib import pyplot as plt

    if not hasattr(plt.show, "__wrapped__"):
        plt.show = _checked(plt.show)


def _checked(show: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(show)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        check_figures()
        show(*args, **kwargs)

    return wrapper


def check_figures() -> None:
    """Raises InputError if an open figure has axes with data but without a label on x or y.

    A label on axes that share the x or the y counts for all of them. Colour bars need one label; axes that are
    switched off, none.
    """
    from matplotlib import pyplot as plt

    for number in plt.get_fignums():
        figure = plt.figure(number)
        for place, ax in enumerate(figure.axes):
            if not (ax.axison and ax.get_visible() and ax.has_data()):
                continue
            x = bool(figure.get_supxlabel()) or any(a.get_xlabel() for a in ax.get_shared_x_axes().get_siblings(ax))
            y = bool(figure.get_supylabel()) or any(a.get_ylabel() for a in ax.get_shared_y_axes().get_siblings(ax))
            if not (x and y) and not (ax.get_label() == "<colorbar>" and (x or y)):
                raise InputError(f"figure {number}, axes {place}: no label on {'y' if x else 'x'}")


def show(axes: Any, dpi: int = 100) -> None:
    """Shows the figure of these Axes and closes it: in 64 colours, which makes a notebook's file a third as large."""
    import numpy as np
    from IPython.display import display
    from matplotlib import pyplot as plt
    from PIL import Image

    check_figures()
    file, figure = BytesIO(), np.ravel(axes)[0].get_figure(root=True)
    figure.savefig(file, dpi=dpi, bbox_inches="tight")
    plt.close(figure)
    display(Image.open(file).convert("RGB").quantize(64))


# Badges

_REPOSITORY = re.compile(
    r"(?P<before>colab\.research\.google\.com/github/|kaggle\.com/kernels/welcome\?src=https://github\.com/"
    r"|git\+https://github\.com/)[\w.-]+/[\w.-]+"
)


def rewrite_badges(repository: str, paths: Sequence[Path]) -> list[Path]:
    """Makes Colab and Kaggle badges and install cells in these files point at ``owner/name``; returns those changed."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise InputError(f"repository {repository!r}: give it as owner/name")
    changed = []
    for path in paths:
        before = path.read_text(encoding="utf-8")
        after = _REPOSITORY.sub(rf"\g<before>{repository}", before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: ``badges owner/name``, in the root of the checkout."""
    parser = argparse.ArgumentParser(prog="python -m marlhf_lite.plotting.notebook")
    badges = parser.add_subparsers(required=True).add_parser("badges", help="point all badges at a GitHub repository")
    badges.add_argument("repository", help="owner/name")
    badges.add_argument("--root", type=Path, default=Path(), help="the checkout (default: here)")
    options = parser.parse_args(arguments)
    readme = options.root / "README.md"
    paths = sorted((options.root / "notebooks").rglob("*.ipynb")) + ([readme] if readme.is_file() else [])
    try:
        changed = rewrite_badges(options.repository, [p for p in paths if ".ipynb_checkpoints" not in p.parts])
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(changed)} of {len(paths)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
