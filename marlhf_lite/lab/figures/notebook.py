"""What every teaching notebook begins with, its profile and its set-up, and how it shows figures and diagrams.

The environment variable MARLHF_PROFILE names the profile. A notebook asks for its budget once, near its top:
``seeds = profile().pick(smoke=2, cpu=20)``.
"""

import base64
import gzip
import html
import os
import platform
import random
import re
import sys
import warnings
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeVar

from tqdm.std import tqdm

from marlhf_lite import __version__
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.threads import choose_threads

PROFILES = ("smoke", "cpu", "gpu")
PAGE = {"font.size": 10, "figure.dpi": 96, "figure.figsize": (7.2, 3.0), "figure.constrained_layout.use": True}
SVG_METADATA = ("Date", "Creator", "Format", "Type")  # all left out: a figure drawn again is the same text
T = TypeVar("T")


@dataclass(frozen=True)
class Profile:
    """How much a notebook computes: smoke (a test, seconds), cpu (minutes on two cores), gpu (Colab, Kaggle)."""

    name: str

    def pick(self, smoke: T, cpu: T, gpu: T | None = None) -> T:
        """Return the value for this profile; the gpu profile takes cpu's value if it has none of its own."""
        return {"smoke": smoke, "cpu": cpu, "gpu": cpu if gpu is None else gpu}[self.name]


def profile() -> Profile:
    """Return the profile that MARLHF_PROFILE names, or cpu if the variable is not set."""
    name = os.environ.get("MARLHF_PROFILE") or "cpu"
    if name not in PROFILES:
        raise InputError(f"MARLHF_PROFILE: expected one of {', '.join(PROFILES)}, got {name!r}")
    return Profile(name)


def setup(seed: int = 0) -> None:
    """Seed all random generators, choose the number of threads, set the style of figures and bars, print versions."""
    import numpy as np
    import torch
    import tqdm.auto
    from matplotlib import pyplot as plt
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    from marlhf_lite.plotting.training import STYLE

    torch.set_num_threads(choose_threads())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tqdm.auto.tqdm = _Bar  # before the modules that train import it
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # those of tokenization
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # TRL still uses the old names
    STYLE.update(PAGE)  # the library's figures, too, are as wide as the page
    own = {"axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5, "lines.linewidth": 1.4}
    own |= {"font.sans-serif": ["DejaVu Sans", "sans-serif"]}  # an SVG repeats this list for each of its texts
    plt.rcParams.update(STYLE | own)
    set_matplotlib_formats("svg", metadata=dict.fromkeys(SVG_METADATA))
    print(
        f"marlhf_lite {__version__} · torch {torch.__version__} · Python {platform.python_version()}"
        f" · profile {profile().name} · seed {seed}"
    )


class _Bar(tqdm):
    """A progress bar on stdout: its last state stays in the saved notebook, and there are no widgets to lose."""

    def __init__(self, *args: Any, **kwargs: Any):
        look = {"bar_format": "{l_bar}{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]", "ncols": 90}
        if not kwargs.get("leave", True) and headless():  # nobody sees it, and blanks would stay of it
            kwargs["disable"] = True
        super().__init__(*args, **{"file": sys.stdout, "mininterval": 0.5, **look} | kwargs)


def show(axes: Any, width: int = 680) -> None:
    """Show the figure of these Axes and close it: as SVG, or as a PNG of twice the resolution if its file is smaller.

    width: pixels on the page, for a figure that is not wider by itself.
    """
    import numpy as np
    import PIL.Image
    from IPython.display import SVG, Image, display
    from matplotlib import pyplot as plt

    figure = np.ravel(axes)[0].get_figure(root=True)
    width = max(width, round(96 * figure.get_figwidth()))
    drawing, picture = BytesIO(), BytesIO()
    figure.savefig(drawing, format="svg", bbox_inches="tight", metadata=dict.fromkeys(SVG_METADATA))
    figure.savefig(picture, format="png", bbox_inches="tight", dpi=2 * width / figure.get_figwidth())
    plt.close(figure)
    small = BytesIO()  # with 256 colours its file is a third as large
    PIL.Image.open(picture).convert("RGB").quantize(256).save(small, "png", optimize=True)
    svg, png = _sized(drawing.getvalue().decode(), width), small.getvalue()
    display(SVG(svg) if len(svg) < len(png) * 4 / 3 else Image(png, width=width))  # a notebook holds PNG as base64


def diagram(name: str) -> Any:
    """Return one of the project's diagrams as the output of a cell: it is there without the repository, too."""
    from IPython.display import SVG

    return SVG(filename=str(shipped(f"diagrams/{name}.svg", "figures")))


def play(name: str, height: int) -> Any:
    """Return a figure to play with as the output of a cell: a page that needs no second file, `height` pixels high.

    The notebook holds the page compressed; the browser unpacks it.
    """
    from IPython.display import HTML

    page = shipped(f"interactive/{name}.html", "figures").read_bytes()
    packed = base64.b64encode(gzip.compress(page, mtime=0)).decode()
    opened = f"""<script>(async () => {{
const bytes = Uint8Array.from(atob("{packed}"), (c) => c.charCodeAt(0));
const page = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
document.open(); document.write(page); document.close(); }})();</script>"""
    size = f'width="100%" height="{height}" style="border:0"'
    return HTML(f'<div><iframe class="play" srcdoc="{html.escape(opened)}" title="{name}" {size}></iframe></div>')


def rounded(numbers: Any, digits: int) -> Any:
    """Return a table, an array or a tensor with its numbers rounded; what rounds to −0 is 0."""
    import pandas as pd
    import torch

    if isinstance(numbers, pd.DataFrame):
        return numbers.assign(**{name: numbers[name].round(digits) + 0.0 for name in numbers.select_dtypes("number")})
    return numbers.round(decimals=digits) + 0.0 if isinstance(numbers, torch.Tensor) else numbers.round(digits) + 0.0


def headless() -> bool:
    """Was this cell sent by a program that runs notebooks without a browser? nbclient and papermill allow no input."""
    from IPython import get_ipython

    request = getattr(get_ipython(), "parent_header", {})
    return not request.get("content", {}).get("allow_stdin", False)


def _sized(svg: str, width: int) -> str:
    """The SVG with a width in pixels, whose height follows, and half as long; text and scales keep their digits."""
    svg = re.sub(r'width="[^"]+" height="[^"]+"', f'width="{width}"', svg, count=1)
    svg = re.sub(r'(<g) id="[^"]+"| transform="rotate\(-?0 [^"]+"', r"\1", svg)
    svg = re.sub(r' (?:d|x|y)="[^"]+"', lambda points: re.sub(r"(\.\d)\d+", r"\1", points[0]), svg)
    svg = re.sub(r' style="[^"]+"', lambda style: re.sub(r"([:;]) ", r"\1", style[0]), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><")  # a notebook holds each line with marks of its own
    return re.sub(r' d="[^"]+"', lambda path: re.sub(r" ?([A-Za-z]) ", r"\1", path[0]), svg)
