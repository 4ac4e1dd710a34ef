"""The record of `benchmarks/gradient_signal.py` as a figure and as tables.

The figure goes to `figures/gradient_signal/` with `python -m marlhf_lab.figures.gradient_signal`, which also
prints the tables.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from marlhf_lab.credit.gradient_signal import drawn_signals
from marlhf_lite.plotting import training as plots
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import interval, markdown, number

CRITICS = {  # of the record -> its name on the page, from the critic that knows least
    "zero, start": "head of zero, untrained",
    "constant": "constant: the mean reward",
    "zero, trained": "head of zero, trained",
    "normal, start": "normal head, untrained",
    "normal, trained": "normal head, trained",
}
KNOWN = {
    "value_noise": "noise of the values",
    "score_explained_variance": "explained variance of the score",
}
METHODS = {"PPO lam^(1/5)": "PPO-0.99", "PPO lam=1": "PPO, λ = 1"}  # names on the page
FIGURE = Path("figures") / "gradient_signal" / "signal_to_noise.png"


def gradient_record(name: str = "benchmark_gradient_signal") -> dict:
    """The stored record; the name with `_afterwards` is the record that looks for reasons."""
    return json.loads(shipped(f"results/{name}.json").read_text(encoding="utf-8"))


def ratio_table(record: Mapping) -> str:
    """Signal-to-noise of each estimator over PPO's, a line for each critic, in Markdown.

    If PPO's signal is negative, a ratio means nothing, and the table has "-".
    """
    names = list(record["found"][record["primary"]]["over_PPO"])
    lines = []
    for critic, words in CRITICS.items():
        row = record["found"][critic]
        base = row["signal_to_noise"]["PPO"]
        ratios = [interval(row["over_PPO"][name], ".2f") if base > 0 else "-" for name in names]
        mark = "**" * (critic == record["primary"])
        lines.append([f"{mark}{words}{mark}", number(base), *ratios])
    heads = [f"{METHODS.get(name, name)} / PPO" for name in names]
    return markdown(["critic", "PPO", *heads], lines)


def critic_table(record: Mapping) -> str:
    """Noise of each critic's values, and its explained variance of the score, in Markdown."""
    rows = record["cells"]["critics"]
    lines = [
        [words, *(number(rows[critic][key], ".3f") for key in KNOWN)]
        for critic, words in CRITICS.items()
    ]
    return markdown(["critic", *KNOWN.values()], lines)


@plots.plt.rc_context(plots.STYLE)
def signal_figure(record: Mapping, reasons: Mapping) -> np.ndarray:
    """Draw signal-to-noise by critic and estimator, and how values move with the score; returns the [2] Axes."""
    axes = plots.subplots((2, 1), 1.15)[:, 0]
    names = list(record["found"][record["primary"]]["signal_to_noise"])
    looks = plots.method_styles(names, marker=True)
    for line, critic in enumerate(CRITICS):
        for rank, name in enumerate(names):
            place, look = line + 0.2 * (rank - (len(names) - 1) / 2), looks[name]
            drawn = drawn_signals(record["cells"]["projections"][critic][name], resamples=2000)
            low, high = np.percentile(drawn, [2.5, 97.5])
            axes[0].plot([low, high], [place, place], color=look["color"], linewidth=2)
            style = {
                "color": look["color"],
                "marker": look["marker"],
                "markersize": 6,
                "linestyle": "none",
            }
            label = METHODS.get(name, name) if line == 0 else None
            axes[0].plot(
                record["found"][critic]["signal_to_noise"][name], place, label=label, **style
            )
    axes[0].axvline(0, color="0.2", linewidth=1.2, zorder=0)
    primary = list(CRITICS).index(record["primary"])
    axes[0].axhspan(primary - 0.5, primary + 0.5, color="0.92", zorder=-1)
    axes[0].text(
        0.01, primary, "primary:\nMA-PPO\nis last", transform=axes[0].get_yaxis_transform()
    ).set(verticalalignment="center", fontsize="small")
    axes[0].set_yticks(range(len(CRITICS)), CRITICS.values())
    axes[0].set(
        ylim=(len(CRITICS) - 0.5, -0.5), ylabel="critic", xlabel="signal over noise of one batch"
    )
    for (critic, values), dashes in zip(
        reasons["cells"]["correlations"].items(), ("-", "--", ":"), strict=True
    ):
        (line,) = axes[1].plot(values, linestyle=dashes, color="black", linewidth=1.5)
        line.set_label(CRITICS[critic])
    axes[1].axhline(0, color="0.2", linewidth=1.2, zorder=0)
    axes[1].legend(fontsize="small", loc="lower right")
    axes[1].set(
        ylim=(-0.3, 0.32),
        xlabel="token of the answer (the first 12 words are paid)",
        ylabel="correlation of V with the score",
    )
    axes[0].grid(axis="x", alpha=0.3, linewidth=0.5)
    axes[1].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    text = (
        "Above: projections of the gradients of 64 batches of 16 answers on the gradient of the other half's 512 "
        "answers, mean over standard deviation; bars: 95 % intervals of a bootstrap over batches. With a constant "
        "critic MA-PPO is ahead of PPO; with the trained head of zero, the primary one, it is last. Below: the values "
        "of that critic rise with the score while the paid words are written."
    )
    plots.caption(axes[0].figure, text)
    return axes


if __name__ == "__main__":
    stored = gradient_record()
    plots.save(
        signal_figure(stored, gradient_record("benchmark_gradient_signal_afterwards")), FIGURE
    )
    print(ratio_table(stored), critic_table(stored), sep="\n\n")
