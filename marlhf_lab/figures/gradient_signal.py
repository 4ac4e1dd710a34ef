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

# a critic's name in the record -> its name on the page, from the critic that knows least
CRITICS = {
    "zero, start": "head of zero, untrained",
    "constant": "constant: the mean reward",
    "zero, trained": "head of zero, trained",
    "normal, start": "normal head, untrained",
    "normal, trained": "normal head, trained",
}
# what the record has of each critic -> the head of its column
KNOWN = {
    "value_noise": "noise of the values",
    "score_explained_variance": "explained variance of the score",
}
# an estimator's name in the record -> its name on the page, if it differs
METHODS = {"PPO lam^(1/5)": "PPO-0.99", "PPO lam=1": "PPO, λ = 1"}
FIGURE = Path("figures") / "gradient_signal" / "signal_to_noise.png"


def gradient_record(name: str = "benchmark_gradient_signal") -> dict:
    """The stored record. The record whose name ends with `_afterwards` looks for the reasons of what was found."""
    return json.loads(shipped(f"results/{name}.json").read_text(encoding="utf-8"))


def ratio_table(record: Mapping) -> str:
    """Signal-to-noise of each estimator over PPO's, a line for each critic, in Markdown; the primary critic is bold.

    If PPO's signal is not above 0, a ratio means nothing, and the table has "-" instead.
    """
    estimators = list(record["found"][record["primary"]]["over_PPO"])
    lines = []
    for critic, words in CRITICS.items():
        found = record["found"][critic]
        signal_of_ppo = found["signal_to_noise"]["PPO"]
        if signal_of_ppo > 0:
            ratios = [interval(found["over_PPO"][estimator], ".2f") for estimator in estimators]
        else:
            ratios = ["-"] * len(estimators)
        name = f"**{words}**" if critic == record["primary"] else words
        lines.append([name, number(signal_of_ppo), *ratios])
    heads = [f"{METHODS.get(estimator, estimator)} / PPO" for estimator in estimators]
    return markdown(["critic", "PPO", *heads], lines)


def critic_table(record: Mapping) -> str:
    """Noise of each critic's values, and its explained variance of the score, in Markdown."""
    measured = record["cells"]["critics"]
    lines = []
    for critic, words in CRITICS.items():
        numbers = [number(measured[critic][key], ".3f") for key in KNOWN]
        lines.append([words, *numbers])
    return markdown(["critic", *KNOWN.values()], lines)


@plots.plt.rc_context(plots.STYLE)
def signal_figure(record: Mapping, reasons: Mapping) -> np.ndarray:
    """Draw signal-to-noise by critic and estimator, and below it how values move with the score; return the [2] Axes.

    record, reasons: what `gradient_record` returns for the name without and with `_afterwards`.
    """
    axes = plots.subplots((2, 1), 1.15)[:, 0]
    above, below = axes
    estimators = list(record["found"][record["primary"]]["signal_to_noise"])
    styles = plots.method_styles(estimators, marker=True)
    # 1. Above: a line for each critic, in it an interval and a mark for each estimator.
    for line, critic in enumerate(CRITICS):
        for rank, estimator in enumerate(estimators):
            # The estimators of a critic are 0.2 apart, around the middle of its line.
            place = line + 0.2 * (rank - (len(estimators) - 1) / 2)
            style = styles[estimator]
            projections = record["cells"]["projections"][critic][estimator]
            drawn = drawn_signals(projections, resamples=2000)
            # The legend has each estimator once, so only the marks of the first critic have a label.
            above.plot(
                np.percentile(drawn, [2.5, 97.5]), [place, place], color=style["color"], linewidth=2
            )
            above.plot(
                record["found"][critic]["signal_to_noise"][estimator],
                place,
                label=METHODS.get(estimator, estimator) if line == 0 else None,
                color=style["color"],
                marker=style["marker"],
                markersize=6,
                linestyle="none",
            )
    above.axvline(0, color="0.2", linewidth=1.2, zorder=0)
    primary = list(CRITICS).index(record["primary"])
    above.axhspan(primary - 0.5, primary + 0.5, color="0.92", zorder=-1)
    above.text(
        0.01,
        primary,
        "primary:\nMA-PPO\nis last",
        transform=above.get_yaxis_transform(),
        verticalalignment="center",
        fontsize="small",
    )
    above.set_yticks(range(len(CRITICS)), CRITICS.values())
    above.set(
        ylim=(len(CRITICS) - 0.5, -0.5), ylabel="critic", xlabel="signal over noise of one batch"
    )
    above.grid(axis="x", alpha=0.3, linewidth=0.5)
    # 2. Below: a line for each critic whose values were compared with the score, by token of the answer.
    correlations = reasons["cells"]["correlations"]
    for (critic, by_token), dashes in zip(correlations.items(), ("-", "--", ":"), strict=True):
        below.plot(by_token, linestyle=dashes, color="black", linewidth=1.5, label=CRITICS[critic])
    below.axhline(0, color="0.2", linewidth=1.2, zorder=0)
    below.legend(fontsize="small", loc="lower right")
    below.set(
        ylim=(-0.3, 0.32),
        xlabel="token of the answer (the first 12 words are paid)",
        ylabel="correlation of V with the score",
    )
    handles, labels = above.get_legend_handles_labels()
    above.figure.legend(handles, labels, loc="outside upper center", ncols=4)
    text = (
        "Above: projections of the gradients of 64 batches of 16 answers on the gradient of the other half's 512 "
        "answers, mean over standard deviation; bars: 95 % intervals of a bootstrap over batches. With a constant "
        "critic MA-PPO is ahead of PPO; with the trained head of zero, the primary one, it is last. Below: the values "
        "of that critic rise with the score while the paid words are written."
    )
    plots.caption(above.figure, text)
    return axes


if __name__ == "__main__":
    stored = gradient_record()
    plots.save(
        signal_figure(stored, gradient_record("benchmark_gradient_signal_afterwards")), FIGURE
    )
    print(ratio_table(stored), critic_table(stored), sep="\n\n")
