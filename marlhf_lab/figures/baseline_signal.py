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
    """Signal over noise of one answer's gradient by estimator, as a table in Markdown with a line for each setting.

    After the estimators come differences of two of them, and how many times as noisy the critic's baseline is as a
    fitted one. Estimators have the letters of the benchmark. The name of the primary setting is bold.
    """
    estimators = ("T", "L", "M", "S", "D", "fitted")
    contrasts = ("S - M", "D - L", "fitted - L")
    lines = []
    for setting, found in record["found"].items():
        name = f"**{setting}**" if setting == record["primary"] else setting
        signals = [number(found["signal"][estimator]) for estimator in estimators]
        differences = []
        for contrast in contrasts:
            difference = interval(found["contrasts"][contrast], "+.3f")
            differences.append(difference.replace("-", "−"))
        saved = interval(record["cells"][setting]["variance_saved"])
        lines.append([name, *signals, *differences, saved])
    heads = [contrast.replace("-", "−") for contrast in contrasts]
    return markdown(["setting", *estimators, *heads, "variance, V / fitted"], lines)


@plots.plt.rc_context(plots.STYLE)
def response_figure(record: Mapping, n: int = 5) -> np.ndarray:
    """Draw each critic's response to a choice, the credit beside it, and what pooling subtracts; return the [2] Axes.

    The choice has slope 1 (see `critic_response`). All numbers are in units of the standard deviation of the setting's
    score. `n`: tokens of a macro action, in the panel on the right.
    """
    axes = plots.subplots((1, 2), 0.5)[0]
    left, right = axes
    styles = plots.method_styles([*record["cells"]], marker=True)
    # The credit of each setting is drawn in the left panel, too, to the right of the last token, side by side.
    places_of_credit = []
    for rank, (setting, style) in enumerate(styles.items()):
        cell = record["cells"][setting]
        unit = cell["score"]["deviation"]
        line = style | {"markersize": 3}
        # [SHOWN] the change of V 1, 2, … tokens after a choice
        response = np.array([after["mean"] for after in cell["response"][:SHOWN]]) / unit
        left.plot(np.arange(1, SHOWN + 1), response, label=setting, **line)
        place = SHOWN + 1.5 + rank
        places_of_credit.append(place)
        credit = cell["credit"]
        interval_of_credit = [credit["low"] / unit, credit["high"] / unit]
        left.plot([place, place], interval_of_credit, color=style["color"], linewidth=1.2)
        mean_credit = credit["mean"] / unit
        left.plot(place, mean_credit, color=style["color"], marker=style["marker"], markersize=4)
        right.plot(np.arange(n), taken_away(response, n), **line)
    for ax in axes:
        ax.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    left.axvline(SHOWN + 0.75, color="0.8", linewidth=0.8)
    left.set(xlabel="tokens after the choice", ylabel="response, in deviations of the score")
    left.set_xticks(
        [1, 5, 10, SHOWN - 1, np.mean(places_of_credit)],
        ["1", "5", "10", str(SHOWN - 1), "credit"],
    )
    right.set(xlabel="place of the token in its macro action", ylabel="taken away, same unit")
    right.set_xticks(range(n))
    lines, settings = left.get_legend_handles_labels()
    left.figure.legend(lines, settings, loc="outside upper center", ncols=3, fontsize="small")
    text = (
        "Left: how far a choice along the improving direction moves V, by tokens afterwards; then the credit that it "
        "earns, with its 95 % interval over answers. Right: what the mean of V over an action of five tokens "
        "subtracts from the choice's advantage, by its place in the action."
    )
    plots.caption(left.figure, text)
    return axes
