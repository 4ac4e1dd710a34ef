"""The report of a study: tables, a summary file and figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lab.figures.programs import outcome_shares
from marlhf_lab.studies.equal_kl import equal_kl_line, score_over_kl
from marlhf_lab.studies.legends import LEGENDS
from marlhf_lab.studies.results import COSTS, EXPLAINED, SCORES, by_method, scores_of, study_table
from marlhf_lite.plotting import training as plots
from marlhf_lite.utils.jsonl import write_atomically, write_json
from marlhf_lite.utils.tables import interval, number, table


def study_report(study, results: Sequence[Mapping], folder: Path, figures: Path) -> str:
    """Write table.md and summary.json to `folder` and figures to `figures`, and return the text of table.md.

    `study` is a `Study`, and `results` are those of its runs that count.
    """
    rows = study_table(results, study.baseline, study.target_method)
    drawn = study_figures(study, results, rows)
    text = markdown(rows, study.baseline, study.target_method)
    text += add_equal_kl(study, results, drawn)
    write_report({"study": study.name, "methods": rows}, text, folder)
    save_figures(drawn, figures)
    return text


def add_equal_kl(study, results: Sequence[Mapping], drawn: dict[str, Axes | np.ndarray]) -> str:
    """Return a paragraph on the two methods of `study.equal_kl`, and add its figure to `drawn`.

    If the study does not name two methods, or if one of them has no run, the text is empty and there is no figure.
    """
    methods_with_runs = {result["method"] for result in results}
    if not study.equal_kl or not set(study.equal_kl) <= methods_with_runs:
        return ""
    drawn["score_over_kl"] = score_over_kl(results, study.equal_kl)
    return f"\n\n{equal_kl_line(results, *study.equal_kl)}"


def write_report(summary: Mapping, text: str, folder: Path) -> None:
    """Write the summary as summary.json and the text as table.md."""
    write_json(folder / "summary.json", summary)
    write_atomically(folder / "table.md", f"{text}\n".encode())


def save_figures(drawn: Mapping[str, Axes | np.ndarray], figures: Path) -> None:
    """Write each figure, name -> its Axes, as a PNG file to look at and a PDF file to print; close all figures."""
    for name, axes in drawn.items():
        plots.save_to_see_and_to_print(axes, figures, name)
    plt.close("all")


def markdown(rows: Sequence[Mapping], baseline: str = "SFT", target_method: str = "PPO") -> str:
    """Return rows of `study_table` as two Markdown tables, scores and costs, with a legend under each.

    If no method is trained, there is no table of costs.
    """
    # 1. Scores: key of a row -> head of its column. `table` leaves out columns that no row has.
    heads = {"method": "method"} | SCORES
    for score, words in SCORES.items():
        heads[f"{score}_gain"] = f"{words}: gain over {baseline}"
    for score, words in SCORES.items():
        heads[f"{score}_difference"] = f"{words}: difference from {target_method}"
    heads |= {"kl": "KL (nats)", "tokens": "length"}
    parts = [table(rows, heads, _cell), LEGENDS["scores"]]
    # 2. Costs: to the final score of the target method, and of the whole training.
    trained = [row for row in rows if "cost_updates" in row]
    if trained:
        # The target of costs is the reward of training, which is the RM score if there is a reward model.
        score = "RM score" if any("rm_score" in row for row in rows) else "reward"
        heads = {"method": "method"}
        for cost, words in COSTS.items():
            heads[cost] = f"{words} to {target_method}'s final {score}"
        for cost, words in COSTS.items():
            heads[f"cost_{cost}"] = f"{words} in all"
        heads[EXPLAINED] = "critic: explained variance of the score"
        parts += [table(trained, heads, _cell), LEGENDS["costs"]]
    return "\n\n".join(parts)


def _cell(row: Mapping, name: str) -> str:
    """Return what a row of `study_table` has under this key as text.

    This is a word, a number, or a mean with its interval or its deviation over seeds, and each seed's in parentheses.
    """
    value = row.get(name)
    is_cost = name.removeprefix("cost_") in COSTS
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        if is_cost:
            return number(value, ".0f")
        return number(value, ".2f" if name == EXPLAINED else ".1f")
    form = ".0f" if is_cost else ".2f"
    seeds = "; ".join("never" if x is None else number(x, form) for x in value["by_seed"])
    if value["mean"] is None:  # a cost until a score that some seed never reached
        return f"({seeds})"
    if value.get("std") is not None:
        return f"{number(value['mean'])} ± {number(value['std'])} ({seeds})"
    # The score of a single seed has neither a deviation nor an interval; without low and high its mean stands alone.
    mean_and_interval = interval({"low": None, "high": None} | value, form)
    return f"{mean_and_interval} ({seeds})"


def study_figures(
    study, results: Sequence[Mapping], rows: Sequence[Mapping]
) -> dict[str, Axes | np.ndarray]:
    """Draw the figures of each group of methods that the study names; return name of a figure -> its Axes."""
    runs = by_method(results)
    groups = study.figures or {"": list(runs)}  # without groups, all methods are one
    drawn: dict[str, Axes | np.ndarray] = {}
    for group, methods in groups.items():
        prefix = f"{group}_" if group else ""
        of_group = [row for row in rows if row["method"] in methods]
        keys = set().union(*of_group)  # the keys that at least one row has
        drawn[f"{prefix}final_scores"] = final_scores(of_group, study.baseline)
        if any(f"{score}_difference" in keys for score in SCORES):
            differences = final_scores(of_group, study.target_method, "difference")
            drawn[f"{prefix}differences"] = differences
        if any(cost in keys for cost in COSTS):
            drawn[f"{prefix}costs"] = costs(of_group, study.target_method)
        for name, axes in _curves(runs, methods, study.baseline, scores_of(results)).items():
            drawn[f"{prefix}{name}"] = axes
    return drawn


# score of the held-out answers -> the metric of an update that has the same score of the training batch
METRICS = {"rm_score": "score_mean", "reward": "score_mean", "gold": "gold_mean"}


def _curves(
    runs: Mapping, methods: Sequence[str], baseline: str, scores: Mapping[str, str]
) -> dict[str, Axes | np.ndarray]:
    """Draw score curves, L2 norms and outcomes of programs; return name of a figure -> its Axes.

    A figure shows the methods that have its metric in every run, in at least one update. Without such a method it is
    not drawn. `runs`: see `by_method`; `scores`: see `scores_of`.
    """
    drawn = {}
    of_baseline = runs.get(baseline, {})
    # 1. Scores while training, as gains over the baseline if it has this score.
    for score, metric in METRICS.items():
        if score not in scores:
            continue
        gains = {}
        for method in methods:
            curves = gain_curves(runs[method], of_baseline, score)
            if _all_have(curves, metric):
                gains[method] = curves
        if not gains:
            continue
        axes = plots.reward_curves(gains, metric)
        drawn[metric] = axes
        baseline_has_score = any(score in run["final"] for run in of_baseline.values())
        if baseline_has_score:
            axes.set_ylabel(f"{SCORES[score]}, gain over {baseline}")
        elif score == "rm_score" and baseline in runs:
            # There is no reward model, and what training maximised is a reward from unit tests.
            axes.set_ylabel("reward of a response")
    # 2. Norms, and what became of programs.
    curves_of = {method: [run["curve"] for run in runs[method].values()] for method in methods}
    for name, metric, draw in (
        ("l2_norms", "advantage_norm", plots.l2_norms),
        ("outcomes", "share_passed", outcome_shares),
    ):
        chosen = {}
        for method, curves in curves_of.items():
            if _all_have(curves, metric):
                chosen[method] = curves
        if chosen:
            drawn[name] = draw(chosen)
    return drawn


def _all_have(curves: Sequence[Sequence[Mapping]], metric: str) -> bool:
    """Whether each of these curves has a number for the metric in some update."""
    return all(any(row.get(metric) is not None for row in curve) for curve in curves)


def gain_curves(
    by_seed: Mapping[int, Mapping], base: Mapping[int, Mapping], score: str
) -> list[list[dict]]:
    """Return the curves of a method with the score as a gain over the baseline: a list of updates for each seed.

    From the score's metric in each update, the baseline's mean score on the held-out prompts with the same seed is
    subtracted; nothing, if the baseline has no such run or score. Updates without the metric are left out.

    by_seed, base: seed -> run, of the method and of the baseline.
    """
    metric = METRICS[score]
    curves = []
    for seed, run in sorted(by_seed.items()):
        of_baseline = 0.0
        if seed in base and score in base[seed]["final"]:
            of_baseline = float(np.mean(base[seed]["final"][score]))
        curve = []
        for row in run["curve"]:
            if row.get(metric) is not None:
                curve.append(row | {metric: row[metric] - of_baseline})
        curves.append(curve)
    return curves


def final_scores(rows: Sequence[Mapping], other: str = "SFT", kind: str = "gain") -> np.ndarray:
    """Plot gains over the baseline or differences from the target method, with mean, interval and every seed.

    Args:
        rows: rows of `study_table`. If none of them has a gain or difference, the scores are shown instead, ±1 std.
        other: the method compared with.
        kind: "gain" or "difference".

    Returns:
        An array of Axes, a panel for each score that rows have.
    """
    words = "gain over" if kind == "gain" else "difference from"
    between = " " if len(words + other) < 15 else "\n"  # so that neighbouring labels do not touch
    labels = {}
    for score, name in SCORES.items():
        key = f"{score}_{kind}"
        if any(key in row for row in rows):
            labels[key] = f"{name},\n{words}{between}{other}"
    bars = "95 % interval over seeds and prompts"
    if not labels:
        labels = SCORES
        bars = "±1 std over seeds"
    text = (
        f"Held-out prompts. Dot: mean; bar: {bars}; small dots: each seed. Further right is better."
    )
    return dots(rows, labels, text)


def costs(rows: Sequence[Mapping], target_method: str = "PPO") -> np.ndarray:
    """Plot what each method needs to reach the target method's final reward.

    Returns [3] Axes: updates, tokens, seconds.
    """
    text = (
        f"Training cost until the reward first is the final one of {target_method} with the same seed. Dot: mean; "
        "bar: 95 % t-interval over seeds; small dots: each seed. 'never': it is not reached. Left is better."
    )
    axes = dots([row for row in rows if "updates" in row], COSTS, text)
    for ax in axes:
        ax.set_xlim(left=0)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}")
    return axes


@plt.rc_context(plots.STYLE)
def dots(
    rows: Sequence[Mapping], keys: Mapping[str, str], text: str, line: str = "method"
) -> np.ndarray:
    """Draw a panel for each key that rows have, and in it a line for each row that has one of them.

    A line has the name in the row's field `line`, and the colour of its `method`.

    Args:
        rows: dicts with `method` and, under some of the keys, a dict with `mean` and `by_seed`, and `low` and `high` or
            `std`, as the rows of `study_table` have.
        keys: key of a panel -> its label.
        text: the caption.
        line: the field of a row that has its line's name.
    """
    labels = {key: label for key, label in keys.items() if any(key in row for row in rows)}
    shown = [row for row in rows if any(key in row for key in labels)]
    axes = plots.subplots((1, len(labels)), 0.14 + 0.055 * len(shown))[0]
    styles = plots.method_styles([row["method"] for row in rows])
    for ax, (key, label) in zip(axes, labels.items(), strict=True):
        if key.endswith(("_gain", "_difference")):
            ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
        for place, row in enumerate(shown):
            if key in row:
                _point(ax, row[key], place, styles[row["method"]]["color"])
        ax.set(xlabel=label, ylim=(len(shown) - 0.5, -0.5))  # the first line is at the top
        names = [row[line] for row in shown] if ax is axes[0] else []
        ax.set_yticks(range(len(shown)), names)
        if len(labels) > 2:  # narrow panels
            ax.locator_params(axis="x", nbins=2)
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.grid(axis="x", alpha=0.3, linewidth=0.5)
    axes[0].figure.supylabel(line, fontsize="medium")
    plots.caption(axes[0].figure, text)
    return axes


def _point(ax: Axes, value: Mapping, place: int, colour: str) -> None:
    """Draw mean, interval (or ±1 std) and seeds of a method at height `place`.

    If some seeds never reached a score (None), there is no mean, and their number is written instead.
    """
    mean = value["mean"]
    seeds = [x for x in value["by_seed"] if x is not None]
    ax.plot(seeds, [place + 0.25] * len(seeds), ".", color=colour, markersize=3)  # below the mean
    if mean is None:
        count = len(value["by_seed"])
        ax.annotate(
            f"never: {count - len(seeds)} of {count}",
            (0.98, place - 0.12),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize="small",
        )
        return
    low = value.get("low")
    if low is None:  # no interval, but maybe a standard deviation over seeds
        left = right = value.get("std") or 0.0
    else:
        left = mean - low
        right = value["high"] - mean
    ax.errorbar(
        mean,
        place,
        xerr=[[left], [right]],
        fmt="o",
        color=colour,
        markersize=4.5,
        linewidth=1.6,
    )
