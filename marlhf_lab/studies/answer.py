"""Does MA-RLHF work, and when? The answer on one screen: a table of situations and a figure, from stored results.

A number is a ratio: how many times as many updates as PPO a method needs to reach the same score; below 1 it is faster.
`python -m marlhf_lab.studies.answer` prints the table and draws the figure again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt

from marlhf_lab.studies.contrasts import curve_of, ratio_of_updates
from marlhf_lab.studies.paper import typeset
from marlhf_lab.studies.results import by_method, stored_results, t_quantile
from marlhf_lite.evaluation.statistics import trailing_mean
from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import method_styles
from marlhf_lite.utils.tables import interval, markdown

FIGURE = "answer/four_situations.png"
# inches: in a notebook as wide as the page
WIDE = max(1.5 * plots.WIDTH, plots.STYLE["figure.figsize"][0])


class Situation(NamedTuple):
    """A row of the table: the study that measured it, and the methods that it compares."""

    text: str
    study: str
    # (study, [method, PPO]) -> the number with its interval
    measure: Callable[[str, Sequence[str]], str]
    ppo: str
    ours: str
    horizon: str  # PPO with a longer horizon


def to_score(study: str, methods: Sequence[str], score: float, window: int) -> str:
    """Updates of the first method over those of the second, to a score that was chosen before the first run."""
    return interval(ratio_of_updates(stored_results(study), methods, score, window), beside=1)


LABELS = {"PPO": "PPO (λ = 0.95)", "MA-PPO": "MA-PPO (n = 5)", "PPO lam^(1/5)": "PPO with λ = 0.99"}
WORD, STEPS = partial(to_score, score=0.8, window=3), partial(to_score, score=0.6, window=5)
LONG = "PPO lam^(1/5)"
SITUATIONS = (
    Situation("one word decides a noisy score 64 tokens later; the critic cannot predict it", "critic_confirm", WORD,
              "blind PPO", "blind MA-PPO", f"blind {LONG}"),
    Situation("arithmetic, step by step; the critic cannot predict the result", "steps_confirm", STEPS, "PPO",
              "MA-PPO", LONG),
    Situation("the first task again, but the critic was trained beforehand and predicts part of the score",
              "critic_confirm", WORD, "seeing PPO", "seeing MA-PPO", f"seeing {LONG}"),
)  # fmt: skip
PANELS = {  # title -> study, methods by their names in the legend
    "word 128 tokens before the score, no noise; new critic": (
        "umbrella", "L128 first E0", "L128 first E4", "L128 first E1"),
    "word next to the score, no noise; new critic": ("umbrella", "L32 last E0", "L32 last E4", None),
    "word 64 tokens before a noisy score; critic trained first": (
        "critic_confirm", "seeing PPO", "seeing MA-PPO", f"seeing {LONG}"),
    "arithmetic in steps; new critic": ("steps_confirm", "PPO", "MA-PPO", LONG),
}  # fmt: skip


def answer_table() -> str:
    """The situations as a Markdown table; brackets: 95 % t-intervals over seeds, paired by seed."""
    lines = []
    for row in SITUATIONS:
        seeds = len(by_method(stored_results(row.study))[row.ppo])
        ratios = [row.measure(row.study, [method, row.ppo]) for method in (row.ours, row.horizon)]
        lines.append([f"{row.text} ({seeds} seeds)", *ratios])
    return typeset(markdown(["task", "MA-PPO, 5 tokens", "PPO, λ = 0.99"], lines))


@plt.rc_context(plots.STYLE | {"figure.figsize": (WIDE, WIDE)})
def answer_figure() -> np.ndarray:
    """Draw learning curves of four of the situations with one legend; returns the [4] Axes."""
    axes, styles = plots.grid(len(PANELS), 0.1, 0.3), method_styles(LABELS)
    for ax, (title, (study, *methods)) in zip(axes, PANELS.items(), strict=True):
        runs = by_method(stored_results(study))
        for name, method in zip(LABELS, methods, strict=True):
            if method:
                _draw(ax, [*runs[method].values()], styles[name] | {"label": LABELS[name]})
        plots.dress(ax, "update", "score")
        seeds = len(runs[methods[0]])
        ax.set_title(f"{title}\n({study}, {seeds} seeds)", fontsize="small")
    plots.legend(axes[0])
    text = (
        "Score of training batches, mean of the last 3 updates; line: mean over seeds, band: its 95 % interval (it may "
        "pass what can be reached, and with noise a line may pass 1). The axes differ. If the critic cannot "
        "predict the score and the deciding words come long before it (top left, bottom right), MA-PPO is ahead of "
        "PPO on the way, and so is PPO with λ = 0.99. Next to the score (top right; λ = 0.99 was not run) we found no "
        "difference; a line dips when one run falls and comes back. With a noisy score and a critic that was trained "
        "first (bottom left) MA-PPO is slower; a few slow runs lower its mean. The upper panels are not in the table."
    )
    plots.caption(axes[0].figure, text)
    return axes


def _draw(ax: plt.Axes, runs: Sequence[Mapping], style: Mapping) -> None:
    """The mean of smoothed curves over seeds, with the 95 % t-interval of this mean."""
    curves = np.array(
        [trailing_mean([row["gold_mean"] for row in curve_of(run)], 3) for run in runs]
    )
    updates, mean = np.arange(1, curves.shape[1] + 1), curves.mean(0)
    half = t_quantile(len(runs) - 1) * curves.std(0, ddof=1) / len(runs) ** 0.5
    ax.plot(updates, mean, linewidth=1.6, **style)
    ax.fill_between(
        updates, mean - half, mean + half, color=style["color"], alpha=0.18, linewidth=0
    )


if __name__ == "__main__":
    print(answer_table())
    plots.save(answer_figure(), Path("figures") / FIGURE)
