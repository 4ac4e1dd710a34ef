"""How every teaching notebook begins (its profile and set-up), and how it shows figures and diagrams.

The profile is the notebook's parameter `profile` or, if that is empty, the environment variable MARLHF_PROFILE. A
notebook asks for its budget once, near its top: ``seeds = pick(smoke=2, cpu=20)``.
"""

import gzip
import html
import os
import platform
import random
import sys
from base64 import b64encode
from dataclasses import dataclass, field
from importlib import metadata
from io import BytesIO
from typing import Any, TypeVar

from tqdm.std import tqdm

from marlhf_lite import __version__
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.libraries import ignore_warnings
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.threads import choose_threads

PROFILES = ("smoke", "cpu", "gpu")
PAGE = {
    "font.size": 10,
    "figure.dpi": 96,
    "figure.figsize": (7.2, 3.0),
    "figure.constrained_layout.use": True,
}
# Colab and Kaggle have these packages in another version than the library needs: name of the module -> of the package.
REPLACED = {
    "pyarrow": "pyarrow",
    "datasets": "datasets",
    "transformers": "transformers",
    "huggingface_hub": "huggingface_hub",
    "numpy": "numpy",
    "pandas": "pandas",
    "PIL": "pillow",
}
# How PIL reduces the colours of a picture, so that its file is a third as large. Method 1, MAXCOVERAGE, keeps the
# colours of thin lines.
PALETTE = {"colors": 64, "method": 1, "kmeans": 1, "dither": 0}
# A figure to play with stands in an iframe, and its picture in the output after it. If the page shows the iframe (in
# JupyterLab, on the site), this style hides the picture.
HIDE_STILL = (
    "<style>:is(.jp-OutputArea-child, .output):has(iframe.play) + * {display: none}</style>"
)
T = TypeVar("T")


def profile_name() -> str:
    """Return the name of the profile: smoke (a test, seconds), cpu (minutes on two cores) or gpu (Colab, Kaggle).

    Raises `InputError` if MARLHF_PROFILE has another name.
    """
    name = os.environ.get("MARLHF_PROFILE") or "cpu"
    if name not in PROFILES:
        raise InputError(f"profile: expected one of {', '.join(PROFILES)}, got {name!r}")
    return name


def pick(smoke: T, cpu: T, gpu: T | None = None) -> T:
    """Return the value for this notebook's profile. If the profile is gpu and has no value, it is cpu's."""
    name = profile_name()
    if name == "smoke":
        return smoke
    if name == "gpu" and gpu is not None:
        return gpu
    return cpu


def setup(seed: int = 0, profile: str = "", sharpness: float = 1.5) -> None:
    """Seed all random generators, choose the number of threads, set the style of figures and bars, print versions.

    From then on the checks of exercises take NumPy arrays, and show an answer that they refuse.

    profile: the notebook's parameter, as papermill sets it; if it is empty, MARLHF_PROFILE decides.
    sharpness: pixels of a figure for each pixel of the page; choose less if many figures make the file large.

    Raises `InputError` if a package was imported before `pip install` replaced it.
    """
    check_restart()  # before anything below imports a package
    import numpy as np
    import torch
    import tqdm.auto
    from matplotlib import pyplot as plt
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    from marlhf_lab.figures import exercises
    from marlhf_lite.plotting.training import STYLE

    os.environ["MARLHF_PROFILE"] = profile or os.environ.get("MARLHF_PROFILE", "")
    torch.set_num_threads(choose_threads())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tqdm.auto.tqdm = _Bar  # before the modules that train import it
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # of tokenisation
    ignore_warnings()
    STYLE.update(PAGE)  # the library's figures, too, are as wide as the page
    grid = {"axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5, "lines.linewidth": 1.4}
    plt.rcParams.update(STYLE | grid)
    # IPython's own formats for figures are turned off, and the project's is registered in their place.
    set_matplotlib_formats()
    _show_figures_as_pictures(sharpness)
    exercises.watch()
    print(
        f"marlhf_lite {__version__} · torch {torch.__version__} · Python {platform.python_version()}"
        f" · profile {profile_name()} · seed {seed}"
    )


class _Bar(tqdm):
    """A progress bar on stdout: its last state stays in the saved notebook, and there are no widgets to lose."""

    def __init__(self, *args: Any, **kwargs: Any):
        look = {
            "file": sys.stdout,
            "mininterval": 0.5,
            "bar_format": "{l_bar}{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]",
            "ncols": 90,
        }
        disappears = not kwargs.get("leave", True)
        # A bar that disappears leaves blanks in the saved output. If nobody watches it, it is left out.
        if disappears and headless():
            kwargs["disable"] = True
        super().__init__(*args, **look | kwargs)


def check_restart() -> None:
    """Raise `InputError` if the kernel has imported another version of a package than the one now installed."""
    for name, package in REPLACED.items():
        module = sys.modules.get(name)
        loaded = getattr(module, "__version__", None)
        if loaded is None:  # not imported yet: the import will find what is installed
            continue
        installed = metadata.version(package)
        if loaded != installed:
            raise InputError(
                f"{name} {loaded} was imported before {installed} was installed: restart the kernel (in Colab: "
                "Runtime, Restart session; in Kaggle: Run, Restart), then run all cells again"
            )


def show(axes: Any) -> None:
    """Show the figure of these Axes and close it."""
    import numpy as np
    from IPython.display import display
    from matplotlib import pyplot as plt

    figure = np.ravel(axes)[0].get_figure(root=True)
    display(figure)
    plt.close(figure)


def _show_figures_as_pictures(sharpness: float) -> None:
    """Show all figures as PNG: JupyterLab and GitHub show PNG, but not SVG, in a notebook that nobody has trusted."""
    from IPython import get_ipython
    from matplotlib.figure import Figure

    def bundle(figure: Figure) -> tuple[dict, dict]:
        picture, width = _picture(figure, sharpness)
        return {"image/png": picture}, {"image/png": {"width": width}}

    shell = get_ipython()
    if shell:  # it is None outside of a notebook
        shell.display_formatter.mimebundle_formatter.for_type(Figure, bundle)


def _picture(figure: Any, sharpness: float) -> tuple[str, int]:
    """Return a figure as PNG in base64, and its width on the page, in pixels."""
    import PIL.Image

    # A figure has `sharpness` times as many pixels as its place on the page.
    drawn = BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight", dpi=sharpness * PAGE["figure.dpi"])
    picture = PIL.Image.open(drawn).convert("RGB").quantize(**PALETTE)
    with_few_colours = BytesIO()
    picture.save(with_few_colours, "png", optimize=True)
    return b64encode(with_few_colours.getvalue()).decode(), round(picture.width / sharpness)


@dataclass(frozen=True)
class Bundle:
    """The output of a cell in several forms (by MIME type); a page shows the richest form that it may."""

    forms: dict
    metadata: dict = field(default_factory=dict)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict, dict]:
        return self.forms, self.metadata


def diagram(name: str) -> Bundle:
    """Return one of the project's diagrams as the output of a cell; it also works without the repository."""
    drawing = shipped(f"diagrams/{name}.svg", "figures")
    return Bundle(_still(drawing) | {"image/svg+xml": drawing.read_text(encoding="utf-8")})


def play(name: str, height: int) -> None:
    """Show a figure to play with, `height` pixels high, and a picture of it.

    Only the picture is visible if the figure cannot run: on GitHub, or in JupyterLab before the notebook is trusted.
    """
    from IPython.display import HTML, display

    display(HTML(page(name, height)))
    display(Bundle(_still(shipped(f"interactive/{name}.html", "figures"))))


def page(name: str, height: int) -> str:
    """Return the HTML of a figure to play with, which needs no second file.

    The notebook holds the page compressed; the browser unpacks it.
    """
    content = shipped(f"interactive/{name}.html", "figures").read_bytes()
    # Without the time in gzip's header, the same page always has the same bytes.
    packed = b64encode(gzip.compress(content, mtime=0)).decode()
    opened = f"""<script>(async () => {{
const bytes = Uint8Array.from(atob("{packed}"), (c) => c.charCodeAt(0));
const page = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
document.open(); document.write(page); document.close(); }})();</script>"""
    size = f'width="100%" height="{height}" style="border:0"'
    frame = f'<iframe class="play" srcdoc="{html.escape(opened)}" title="{name}" {size}></iframe>'
    return f"<div>{HIDE_STILL}{frame}</div>"


def _still(path: Any) -> dict:
    """Return the picture of a diagram or a page by MIME type; figures/pictures.py has made it, beside its source."""
    return {
        "image/png": b64encode(path.with_suffix(".png").read_bytes()).decode(),
        "text/plain": path.stem,
    }


def rounded(numbers: Any, digits: int) -> Any:
    """Return a table, an array or a tensor with its numbers rounded; −0 becomes 0."""
    import pandas as pd
    import torch

    # Adding 0.0 turns −0 into 0. In a table only columns of floats can hold −0; others, such as texts, stay.
    if isinstance(numbers, pd.DataFrame):
        floats = numbers.select_dtypes("floating").columns
        table = numbers.round(digits)
        table[floats] = table[floats] + 0.0
        return table
    if isinstance(numbers, torch.Tensor):
        return numbers.round(decimals=digits) + 0.0
    return numbers.round(digits) + 0.0


def frame(columns: Any, digits: int = 2, index: Any = None) -> Any:
    """Return a table with these columns (a dict, or rows), its numbers rounded; −0 becomes 0."""
    import pandas as pd

    return rounded(pd.DataFrame(columns, index=index), digits)


def headless() -> bool:
    """Return whether nobody sees this cell run: a program such as nbclient or papermill sent it.

    Such programs allow no input, and a notebook in a browser does. Outside of a notebook the answer is True.
    """
    from IPython import get_ipython

    request = getattr(get_ipython(), "parent_header", {})
    return not request.get("content", {}).get("allow_stdin", False)
