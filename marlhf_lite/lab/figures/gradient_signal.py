"""The record of `benchmarks/gradient_signal.py` as a figure and as tables.

The figure goes to `figures/gradient_signal/` with `python -m marlhf_lite.lab.figures.gradient_signal`, which also
prints the tables.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from marlhf_lite.plotting import training as plots
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import interval, markdown, number

CRITICS = {  # of the record -> what the page calls it, from the one that knows least
    "zero, start": "head of zero, untrained",
    "constant": "constant: the mean reward",
    "zero, trained": "head of zero, trained",
    "normal, start": "normal head, untrained",
    "normal, trained": "normal head, trained",
}
KNOWN = {"value_noise": "noise of the values", "score_explained_variance": "explained variance of the score"}
FIGURE = Path("figures") / "gradient_signal" / "signal_to_noise.png"


def gradient_record() -> dict:
    """The stored record."""
    return json.loads(shipped("results/benchmark_gradient_signal.json").read_text(encoding="utf-8"))


def ratio_table(record: Mapping) -> str:
    """Signal-to-noise of each estimator over PPO's, a line for each critic, in Markdown."""
    names = list(record["found"][record["primary"]]["over_PPO"])
    lines = []
    for critic, words in CRITICS.items():
        row = record["found"][critic]
        ratios = [interval(row["over_PPO"][name], ".2f") for name in names]
        mark = "**" * (critic == record["primary"])
        lines.append([f"{mark}{words}{mark}", number(row["signal_to_noise"]["PPO"]), *ratios])
    return markdown(["critic", "PPO", *(f"{name} / PPO" for name in names)], lines)


def critic_table(record: Mapping) -> str:
    """Noise of each critic's values and what it explains of the score, in Markdown."""
    rows = record["cells"]["critics"]
    lines = [[words, *(number(rows[critic][key], ".3f") for key in KNOWN)] for critic, words in CRITICS.items()]
    return markdown(["critic", *KNOWN.values()], lines)


@plots.plt.rc_context(plots.STYLE)
def signal_figure(record: Mapping) -> np.ndarray:
    """Draw signal-to-noise ratios, and their ratios over PPO, by critic and estimator; returns the [2] Axes."""
    axes = plots.subplots((1, 2), 0.52, sharey=True)[0]
    names = list(record["found"][record["primary"]]["signal_to_noise"])
    looks = plots.method_styles(names, marker=True)
    for line, critic in enumerate(CRITICS):
        row = record["found"][critic]
        for rank, name in enumerate(names):
            place, look = line + 0.2 * (rank - (len(names) - 1) / 2), looks[name]
            style = {"color": look["color"], "marker": look["marker"], "markersize": 4, "linestyle": "none"}
            label = name if line == 0 else None
            axes[0].plot(row["signal_to_noise"][name], place, label=label, **style)
            if found := row["over_PPO"].get(name):
                sides = [[found["mean"] - found["low"]], [found["high"] - found["mean"]]]
                axes[1].errorbar(found["mean"], place, xerr=sides, linewidth=1.2, **style)
    for ax, text in zip(axes, ("signal over noise\nof one batch", "its ratio\nto PPO's"), strict=True):
        ax.axvline(ax is axes[1], color="0.6", linewidth=0.8, zorder=0)
        ax.set(xlabel=text)
        ax.grid(axis="x", alpha=0.3, linewidth=0.5)
    axes[0].set_yticks(range(len(CRITICS)), CRITICS.values())
    axes[0].set(ylim=(len(CRITICS) - 0.5, -0.5), ylabel="critic")
    axes[1].figure.legend(loc="outside upper center", ncols=len(names), fontsize="small")
    text = (
        "Projections of the gradients of 64 batches of 16 answers on the gradient of the other half's 512 answers: "
        "mean over standard deviation. Bars: 95 % intervals of a bootstrap over batches."
    )
    plots.caption(axes[0].figure, text)
    return axes


if __name__ == "__main__":
    stored = gradient_record()
    plots.save(signal_figure(stored), FIGURE)
    print(ratio_table(stored), critic_table(stored), sep="\n\n")
