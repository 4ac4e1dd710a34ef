"""The record of `benchmarks/baseline_signal.py` as a table and a figure: signals, and the critic's response.

Neither is evidence of a mechanism, so no page shows them: direction and critic came from the same half of the answers,
and chance alone gives what was found (docs/results.md, "Two mechanisms that were not shown").
"""

import json
from collections.abc import Mapping

import numpy as np

from marlhf_lab.credit.critic_response import taken_away
from marlhf_lite.plotting import training as plots
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import interval, markdown, number

SHOWN = 16  # tokens after the choice


def baseline_record() -> dict:
    """The stored record."""
    return json.loads(shipped("results/benchmark_baseline_signal.json").read_text(encoding="utf-8"))


def signal_table(record: Mapping) -> str:
    """Signal over noise of one answer's gradient by estimator, and contrasts, one line per setting, in Markdown."""
    lines = []
    for setting, found in record["found"].items():
        mark = "**" * (setting == record["primary"])
        signals = [number(found["signal"][name]) for name in ("T", "L", "M", "S", "D", "fitted")]
        contrasts = [
            interval(found["contrasts"][name], "+.3f") for name in ("S - M", "D - L", "fitted - L")
        ]
        saved = interval(record["cells"][setting]["variance_saved"])
        lines.append(
            [f"{mark}{setting}{mark}", *signals, *(c.replace("-", "−") for c in contrasts), saved]
        )
    heads = [
        "setting",
        "T",
        "L",
        "M",
        "S",
        "D",
        "fitted",
        "S − M",
        "D − L",
        "fitted − L",
        "variance, V / fitted",
    ]
    return markdown(heads, lines)


@plots.plt.rc_context(plots.STYLE)
def response_figure(record: Mapping, n: int = 5) -> np.ndarray:
    """Draw each critic's response to a choice, the credit beside it, and what pooling subtracts; return the [2] Axes.

    All in deviations of the setting's score, for a choice of slope 1.
    """
    axes, places = plots.subplots((1, 2), 0.5)[0], []
    for rank, (setting, style) in enumerate(
        plots.method_styles([*record["cells"]], marker=True).items()
    ):
        cell = record["cells"][setting]
        unit, place = cell["score"]["deviation"], SHOWN + 1.5 + rank
        response = np.array([h["mean"] for h in cell["response"][:SHOWN]]) / unit
        credit = [cell["credit"][end] / unit for end in ("low", "mean", "high")]
        axes[0].plot(np.arange(1, SHOWN + 1), response, label=setting, **style | {"markersize": 3})
        axes[0].plot([place] * 2, credit[::2], color=style["color"], linewidth=1.2)
        axes[0].plot(place, credit[1], color=style["color"], marker=style["marker"], markersize=4)
        axes[1].plot(np.arange(n), taken_away(response, n), **style | {"markersize": 3})
        places.append(place)
    for ax in axes:
        ax.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    axes[0].axvline(SHOWN + 0.75, color="0.8", linewidth=0.8)
    axes[0].set(xlabel="tokens after the choice", ylabel="response, in deviations of the score")
    axes[0].set_xticks(
        [1, 5, 10, SHOWN - 1, np.mean(places)], ["1", "5", "10", str(SHOWN - 1), "credit"]
    )
    axes[1].set(xlabel="place of the token in its macro action", ylabel="taken away, same unit")
    axes[1].set_xticks(range(n))
    axes[0].figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize="small"
    )
    text = (
        "Left: how far a choice along the improving direction moves V, by tokens afterwards; then the credit that it "
        "earns, with its 95 % interval over answers. Right: what the mean of V over an action of five tokens "
        "subtracts from the choice's advantage, by its place in the action."
    )
    plots.caption(axes[0].figure, text)
    return axes
