"""Does MA-RLHF work, and when? The answer as one table and one figure, from stored results.

In the first situations a number is a ratio: how many times as many updates as PPO a method needs to reach the same
score; below 1 it is faster. In the language model all runs have the same length, and a number is the difference of two
mean rewards. PPO-0.99 is the control: PPO on single tokens with λ = 0.95^(1/5), which loses over five tokens what
MA-PPO loses over one macro action.

`python -m marlhf_lab.studies.answer` prints the table and draws the figure again.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from marlhf_lab.studies.contrasts import ratio_of_updates, ratio_to_final_score
from marlhf_lab.studies.mean_reward import difference_of_means
from marlhf_lab.studies.paper import typeset
from marlhf_lab.studies.results import by_method, stored_results
from marlhf_lab.studies.study import load_study
from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import method_styles
from marlhf_lite.utils.tables import interval, markdown

FIGURE = "answer/situations.png"
# The figure's width in inches, so that it is as wide as the page in a notebook.
WIDE = max(1.5 * plots.WIDTH, plots.STYLE["figure.figsize"][0])
MA_PPO = "MA-PPO"
PPO_99 = "PPO-0.99"
LONG = "PPO lam^(1/5)"  # PPO-0.99, as most protocols call it
# Method -> the name whose colour it has in other figures, and its marker here.
STYLES = {MA_PPO: ("MA-PPO", "o"), PPO_99: (LONG, "s")}


class Situation(NamedTuple):
    """A row of the table and of the figure: what is compared in which study."""

    text: str
    study: str
    ppo: str  # the study's name for PPO
    # method, as the answer calls it -> its name in the study; a method that the study did not run is left out
    methods: Mapping[str, str]
    # methods whose comparison with PPO was fixed before the first run; all others are exploratory
    fixed: Sequence[str] = ()
    outcome: str = "updates / PPO's"  # to the study's threshold


CLAIMED = (1 / 2, 1 / 1.7)  # "1.7 to 2 times faster" (abstract), as a ratio of updates
FINAL = "updates to PPO's final score / PPO's"
REWARD = "reward − PPO's"
SITUATIONS = (
    Situation(
        "one early word decides a noisy score 64 tokens later; new critic",
        "critic_confirm",
        "blind PPO",
        {MA_PPO: "blind MA-PPO", PPO_99: f"blind {LONG}"},
    ),
    Situation(
        "arithmetic, step by step, to 60 % right; new critic",
        "steps_confirm",
        "PPO",
        {MA_PPO: "MA-PPO", PPO_99: LONG},
        fixed=[MA_PPO],
    ),
    Situation(
        "the first task, critic trained first; the word opens its macro action",
        "critic_confirm",
        "seeing PPO",
        {MA_PPO: "seeing MA-PPO", PPO_99: f"seeing {LONG}"},
        fixed=[MA_PPO],
    ),
    Situation(
        "the same; the word at any place of its macro action",
        "umbrella_start",
        "T",
        {MA_PPO: "M", PPO_99: "L"},
    ),
    Situation(
        "summaries, scored by a reward model",
        "summaries",
        "PPO",
        {MA_PPO: "MA-PPO", PPO_99: LONG},
        outcome=FINAL,
    ),
    Situation(
        "SmolLM2, rewarded for its first words (far from the score)",
        "sentiment_settle",
        "PPO",
        {MA_PPO: "MA-PPO", PPO_99: LONG},
        fixed=[MA_PPO, PPO_99],
        outcome=REWARD,
    ),
    Situation(
        "SmolLM2, rewarded for its last words (near the score)",
        "sentiment_near",
        "PPO",
        {MA_PPO: "MA-PPO"},
        fixed=[MA_PPO],
        outcome=REWARD,
    ),
)


def measured(row: Situation, method: str) -> dict:
    """Return mean, low and high of a method compared with PPO: a ratio of updates or a difference of rewards."""
    results = stored_results(row.study)
    study = load_study(row.study)
    pair = [row.methods[method], row.ppo]
    if row.outcome == REWARD:
        return difference_of_means(results, pair, study.mean_updates)
    if row.outcome == FINAL:
        return ratio_to_final_score(results, pair)
    return ratio_of_updates(results, pair, study.threshold, study.window)


def answer_table() -> str:
    """Return the situations as a Markdown table. Brackets have 95 % t-intervals over seeds, paired by seed."""
    lines = []
    for row in SITUATIONS:
        seeds = len(by_method(stored_results(row.study))[row.ppo])
        cells = [_cell(row, method) for method in (MA_PPO, PPO_99)]
        lines.append([f"{row.text} ({seeds} seeds)", row.outcome, *cells])
    return typeset(markdown(["task", "outcome", MA_PPO, PPO_99], lines))


def _cell(row: Situation, method: str) -> str:
    """Return the number of a method with its interval; a star marks a comparison not fixed before the first run."""
    if method not in row.methods:
        return "not run"
    found = measured(row, method)
    text = interval(found, "+.3f") if row.outcome == REWARD else interval(found, beside=1)
    return text if method in row.fixed else f"{text}*"


@plt.rc_context(plots.STYLE | {"figure.figsize": (WIDE, 0.62 * WIDE)})
def answer_figure() -> np.ndarray:
    """Draw each situation as a row with a dot for each method; return the two Axes.

    Ratios of updates are in the panel above, differences of rewards in the panel below.
    """
    rewards = [row for row in SITUATIONS if row.outcome == REWARD]
    ratios = [row for row in SITUATIONS if row.outcome != REWARD]
    figure, (above, below) = plt.subplots(
        2, 1, layout="constrained", height_ratios=[len(ratios) + 0.6, len(rewards) + 0.6]
    )
    # 1. Both panels: a line where a method is as good as PPO, and the dots.
    for ax, rows, no_difference in ((above, ratios, 1.0), (below, rewards, 0.0)):
        ax.axvline(no_difference, color="0.3", linewidth=1)
        for place, row in enumerate(rows):
            for method in row.methods:
                _dot(ax, place, method, row)
        ax.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize="small")
        ax.set_ylim(len(rows) - 0.4, -0.6)  # the first situation is at the top
        ax.set_ylabel("situation", fontsize="small")
        ax.grid(axis="x", alpha=0.3, linewidth=0.5)
    # 2. In the panel above, a bar for what the paper claims, in the one situation that it measured, too: summaries.
    outcomes = [row.outcome for row in ratios]
    summaries = outcomes.index(FINAL)
    above.plot(CLAIMED, [summaries, summaries], color="0.6", linewidth=6, solid_capstyle="butt")
    above.text(
        sum(CLAIMED) / 2,
        summaries - 0.15,  # above the bar: to its left are the names of the situations
        "the paper's claim",
        color="0.35",
        va="bottom",
        ha="center",
        fontsize="small",
    )
    above.set_xscale("log")
    above.xaxis.set_major_locator(FixedLocator([0.4, 0.5, 0.6, 0.8, 1, 1.2, 1.4]))
    above.xaxis.set_minor_locator(NullLocator())
    above.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    above.set_xlabel("updates needed, relative to PPO   (← fewer, better)", fontsize="small")
    below.set_xlabel("mean reward minus that of PPO   (more is better →)", fontsize="small")
    plots.legend(above)
    text = (
        "Where MA-PPO is faster than PPO (λ = 0.95), so is PPO-0.99, which has no macro actions. "
        "Where MA-PPO is slower or earns less, PPO-0.99 loses little or was not run. Dots are means over seeds "
        "(geometric ones above), lines their 95 % intervals; the vertical line is PPO. SmolLM2's rewards are before "
        "the KL penalty; after it no method gained. Hollow: not fixed before the first run."
    )
    plots.caption(figure, text)
    return np.array([above, below])


def _label(row: Situation) -> str:
    """Return the text of a situation in lines that fit beside the picture."""
    return "\n".join(textwrap.wrap(row.text, 40))


def _dot(ax: plt.Axes, place: int, method: str, row: Situation) -> None:
    """Draw a dot with its interval. MA-PPO stands a little above the middle of its row, PPO-0.99 a little below it."""
    found = measured(row, method)
    style, marker = STYLES[method]
    colour = method_styles([style])[style]["color"]
    height = place - 0.14 if method == MA_PPO else place + 0.14
    _, names_in_legend = ax.get_legend_handles_labels()
    ax.errorbar(
        found["mean"],
        height,
        xerr=[[found["mean"] - found["low"]], [found["high"] - found["mean"]]],
        color=colour,
        marker=marker,
        markersize=7,
        markerfacecolor=colour if method in row.fixed else "white",
        capsize=3,
        linestyle="none",
        label=None if method in names_in_legend else method,  # each once
    )


if __name__ == "__main__":
    print(answer_table())
    plots.save(answer_figure(), Path("figures") / FIGURE)
