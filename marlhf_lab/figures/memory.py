"""Where the memory of a run goes, as bars."""

from collections.abc import Mapping

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.plotting import training as plots


@plt.rc_context(plots.STYLE)
def memory_bars(estimates: Mapping[str, object], card: float) -> Axes:
    """Draw two bars for each estimate of `extras.memory`, in GB: the memory of sampling, and that of training.

    `card`: bytes of a card, a dotted line.
    """
    ax = plots.subplots((1, 1), 0.46)[0, 0]
    for row, memory in enumerate(estimates.values()):
        fixed = {
            "weights": memory.weights,
            "adapters and optimizer": memory.adapters + memory.optimizer,
        }
        turns = {"sampling": memory.generation, "training": memory.training}
        for (turn, size), shift, colour in zip(
            turns.items(), (-0.2, 0.2), ("C2", "C3"), strict=True
        ):
            left = 0
            for (part, part_size), fill in zip(
                (fixed | {turn: size}).items(), ("C0", "C1", colour), strict=True
            ):
                ax.barh(row + shift, part_size / 1e9, 0.36, left / 1e9, color=fill, label=part)
                left += part_size
    ax.axvline(
        card / 1e9, color="0.3", linestyle=":", linewidth=1, label=f"a card of {card / 1e9:.0f} GB"
    )
    handles, names = ax.get_legend_handles_labels()
    by_name = dict(zip(names, handles, strict=True))
    ax.figure.legend(by_name.values(), by_name, loc="outside upper center", ncols=3)
    ax.set_yticks(range(len(estimates)), estimates)
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3, linewidth=0.5)
    ax.set(xlabel="GB, estimated from the model's config", ylabel="what is trained, and how")
    return ax
