"""What every teaching notebook begins with: its profile and its set-up.

The environment variable MARLHF_PROFILE names the profile. A notebook asks for its budget once, near its top:
``seeds = profile().pick(smoke=2, cpu=20)``.
"""

import os
import platform
import random
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeVar

from marlhf_lite import __version__
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.threads import choose_threads

PROFILES = ("smoke", "cpu", "gpu")
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
    """Seed all random generators, choose the number of threads, set the plot style, and print the versions."""
    import numpy as np
    import seaborn
    import torch
    from matplotlib import pyplot as plt

    from marlhf_lite.plotting.training import STYLE

    torch.set_num_threads(choose_threads())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    seaborn.set_palette("colorblind")
    figure = {"figure.dpi": 96, "figure.figsize": (6.3, 2.8), "figure.constrained_layout.use": True}
    own = {"axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5, "font.size": 9, "lines.linewidth": 1.4}
    plt.rcParams.update(STYLE | own | figure)
    print(
        f"marlhf_lite {__version__} · torch {torch.__version__} · Python {platform.python_version()}"
        f" · profile {profile().name} · seed {seed}"
    )


def show(axes: Any, dpi: int = 100) -> None:
    """Show the figure of these Axes and close it. Its 64 colours make a notebook's file a third as large."""
    import numpy as np
    from IPython.display import display
    from matplotlib import pyplot as plt
    from PIL import Image

    file, figure = BytesIO(), np.ravel(axes)[0].get_figure(root=True)
    figure.savefig(file, dpi=dpi, bbox_inches="tight")
    plt.close(figure)
    display(Image.open(file).convert("RGB").quantize(64))
