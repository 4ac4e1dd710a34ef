"""The record of `benchmarks/temperature.py` as a figure: scores by sampling temperature, and changes beside PPO's."""

import json
from collections.abc import Mapping

import numpy as np

from marlhf_lab.studies.results import t_interval
from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import method_styles
from marlhf_lite.utils.shipped import shipped

TRAINED_AT = "0.8"  # the temperature of training, from which changes are counted
REFERENCE = "PPO"


def temperature_record() -> dict:
    """Return the stored record."""
    return json.loads(shipped("results/benchmark_temperature.json").read_text(encoding="utf-8"))


def changes_beside_ppo(record: Mapping, method: str) -> list[dict]:
    """Return, for each temperature, how the RM score changes from `TRAINED_AT` to it, minus PPO's change.

    The changes are those of `method`, with t-intervals over seeds. Scores are means over single answers.
    """
    intervals = []
    for temperature in record["found"]["means"][method]:
        gaps = []
        for of_seed in record["cells"].values():
            changes = {}
            # "1": one answer to a prompt, not the best of several
            for name in (method, REFERENCE):
                now = of_seed[name][temperature]["1"]["rm_score"]
                changes[name] = now - of_seed[name][TRAINED_AT]["1"]["rm_score"]
            gaps.append(changes[method] - changes[REFERENCE])
        intervals.append(t_interval(gaps))
    return intervals


@plots.plt.rc_context(plots.STYLE)
def temperature_figure(record: Mapping) -> np.ndarray:
    """Draw mean RM scores by temperature (left), and how they change in comparison with PPO's (right).

    Left, filled marks are means of one answer, white ones those of the best of eight. Returns the [2] Axes.
    """
    means = record["found"]["means"]
    axes = plots.subplots((1, 2), 0.62)[0]
    scores, changes = axes
    styles = method_styles([*means], marker=True)
    # 1. Left: how high each policy scores.
    for method, of_method in means.items():
        temperatures = [float(temperature) for temperature in of_method]
        style = styles[method] | {"markersize": 4}
        one = [by_size["1"]["rm_score"]["mean"] for by_size in of_method.values()]
        best = [by_size["8"]["rm_score"]["mean"] for by_size in of_method.values()]
        scores.plot(temperatures, one, label=method, **style)
        scores.plot(temperatures, best, **style | {"markerfacecolor": "white", "linewidth": 0.8})
    scores.set(ylabel="mean RM score", ylim=(0, 1.5))
    # 2. Right: what the paper's claim is about, the change with the temperature minus that of PPO.
    for rank, method in enumerate(("PPO-0.99", "MA-PPO")):
        places = np.array([float(temperature) for temperature in means[method]])
        # One method stands a little left of the temperature, the other a little right.
        places += 0.015 * (2 * rank - 1)
        intervals = changes_beside_ppo(record, method)
        mean = np.array([value["mean"] for value in intervals])
        half = mean - [value["low"] for value in intervals]
        style = styles[method] | {"markersize": 4, "linestyle": "none"}
        changes.errorbar(places, mean, half, capsize=3, **style)
    changes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    changes.set(ylabel="change, minus PPO's change")
    for ax in axes:
        ax.set_xlabel("sampling temperature")
        ax.set_xticks([0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    lines, methods = scores.get_legend_handles_labels()
    scores.figure.legend(lines, methods, loc="outside upper center", ncols=4, fontsize="small")
    return axes
