"""Where the memory of a run goes, as bars."""

from collections.abc import Mapping

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.plotting import training as plots


@plt.rc_context(plots.STYLE)
def memory_bars(estimates: Mapping[str, object], card: float) -> Axes:
    """Draw two bars for each estimate of `extras.memory`, in GB: the memory of sampling, and that of training.

    `card`: bytes of a graphics card's memory, which a dotted line marks.
    """
    ax = plots.subplots((1, 1), 0.46)[0, 0]
    for row, memory in enumerate(estimates.values()):
        # Weights, adapters and optimizer stay in memory all the time, so both bars begin with them. The colours leave
        # out C3: it would look like C1 to colour-blind readers, and bars have no line styles to tell them apart by.
        always = (
            ("weights", memory.weights, "C0"),
            ("adapters and optimizer", memory.adapters + memory.optimizer, "C1"),
        )
        sampling = (*always, ("sampling", memory.generation, "C2"))
        training = (*always, ("training", memory.training, "C4"))
        for shift, parts in ((-0.2, sampling), (0.2, training)):
            left = 0  # bytes of the parts so far
            for label, size, colour in parts:
                ax.barh(row + shift, size / 1e9, 0.36, left / 1e9, color=colour, label=label)
                left += size
    gigabytes = card / 1e9
    label = f"a card of {gigabytes:.0f} GB"
    ax.axvline(gigabytes, color="0.3", linestyle=":", linewidth=1, label=label)
    # Every bar has labels for its parts. The dict keeps one of each, so the legend has each name once.
    handles, names = ax.get_legend_handles_labels()
    by_name = dict(zip(names, handles, strict=True))
    ax.figure.legend(by_name.values(), by_name, loc="outside upper center", ncols=3)
    ax.set_yticks(range(len(estimates)), estimates)
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3, linewidth=0.5)
    ax.set(xlabel="GB, estimated from the model's config", ylabel="what is trained, and how")
    return ax
