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
    """Write table.md and summary.json to `folder` and figures to `figures`. Returns the table. `study` is a `Study`."""
    rows = study_table(results, study.baseline, study.target_method)
    text, drawn = (
        markdown(rows, study.baseline, study.target_method),
        study_figures(study, results, rows),
    )
    text += add_equal_kl(study, results, drawn)
    write_report({"study": study.name, "methods": rows}, text, folder)
    save_figures(drawn, figures)
    return text


def add_equal_kl(study, results: Sequence[Mapping], drawn: dict[str, Axes | np.ndarray]) -> str:
    """Return a paragraph on the two methods of `study.equal_kl`, empty without runs of both, and add its figure."""
    if not study.equal_kl or not set(study.equal_kl) <= {result["method"] for result in results}:
        return ""
    drawn["score_over_kl"] = score_over_kl(results, study.equal_kl)
    return f"\n\n{equal_kl_line(results, *study.equal_kl)}"


def write_report(summary: Mapping, text: str, folder: Path) -> None:
    """Write the summary as summary.json and the text as table.md."""
    write_json(folder / "summary.json", summary)
    write_atomically(folder / "table.md", f"{text}\n".encode())


def save_figures(drawn: Mapping[str, Axes | np.ndarray], figures: Path) -> None:
    """Write figures, by name, as PNG files, and close them."""
    for name, axes in drawn.items():
        plots.save(axes, figures / f"{name}.png")
    plt.close("all")


def markdown(rows: Sequence[Mapping], baseline: str = "SFT", target_method: str = "PPO") -> str:
    """Write scores and costs, rows of `study_table`, as two Markdown tables with a legend under each."""
    heads = {"method": "method"} | SCORES
    for key, other in (
        ("gain", f"gain over {baseline}"),
        ("difference", f"difference from {target_method}"),
    ):
        heads |= {f"{score}_{key}": f"{text}: {other}" for score, text in SCORES.items()}
    score = "RM score" if any("rm_score" in row for row in rows) else "reward"
    costs = {"method": "method"} | {
        name: f"{text} to {target_method}'s final {score}" for name, text in COSTS.items()
    }
    costs |= {f"cost_{name}": f"{text} in all" for name, text in COSTS.items()}
    costs[EXPLAINED] = "critic: explained variance of the score"
    parts = [table(rows, heads | {"kl": "KL (nats)", "tokens": "length"}, _cell), LEGENDS["scores"]]
    trained = [row for row in rows if "cost_updates" in row]
    return "\n\n".join(
        parts + ([table(trained, costs, _cell), LEGENDS["costs"]] if trained else [])
    )


def _cell(row: Mapping, name: str) -> str:
    value, is_cost = row.get(name), name.removeprefix("cost_") in COSTS
    if not isinstance(value, Mapping):
        digits = 0 if is_cost else 2 if name == EXPLAINED else 1
        return (
            "-"
            if value is None
            else value
            if isinstance(value, str)
            else number(value, f".{digits}f")
        )
    form = ".0f" if is_cost else ".2f"
    seeds = "; ".join("never" if x is None else number(x, form) for x in value["by_seed"])
    if value["mean"] is None:
        return f"({seeds})"
    if value.get("std") is not None:
        return f"{number(value['mean'])} ± {number(value['std'])} ({seeds})"
    return f"{interval({'low': None, 'high': None} | value, form)} ({seeds})"


def study_figures(
    study, results: Sequence[Mapping], rows: Sequence[Mapping]
) -> dict[str, Axes | np.ndarray]:
    """Draw the figures of each group of methods that the study names: name of a figure to its Axes."""
    runs = by_method(results)
    drawn: dict[str, Axes | np.ndarray] = {}
    for group, names in (study.figures or {"": list(runs)}).items():
        prefix = f"{group}_" if group else ""
        chosen = [row for row in rows if row["method"] in names]
        drawn[f"{prefix}final_scores"] = final_scores(chosen, study.baseline)
        if any(f"{score}_difference" in row for row in chosen for score in SCORES):
            drawn[f"{prefix}differences"] = final_scores(chosen, study.target_method, "difference")
        if any(name in row for row in chosen for name in COSTS):
            drawn[f"{prefix}costs"] = costs(chosen, study.target_method)
        drawn |= {
            f"{prefix}{name}": axes
            for name, axes in _curves(runs, names, study.baseline, scores_of(results)).items()
        }
    return drawn


# score -> its metric while training
METRICS = {"rm_score": "score_mean", "reward": "score_mean", "gold": "gold_mean"}


def _curves(runs: Mapping, names: Sequence[str], baseline: str, scores: Mapping[str, str]) -> dict:
    """Score curves, L2 norms and outcomes of programs, each if all these methods have its metric in some update."""
    drawn = {}
    for score in (score for score in METRICS if score in scores):
        metric = METRICS[score]
        gains = {name: gain_curves(runs[name], runs.get(baseline, {}), score) for name in names}
        gains = {name: curves for name, curves in gains.items() if _has(curves, metric)}
        if gains:
            axes = drawn[metric] = plots.reward_curves(gains, metric)
            if any(score in run["final"] for run in runs.get(baseline, {}).values()):
                axes.set_ylabel(f"{SCORES[score]}, gain over {baseline}")
            # no reward model: unit tests gave the score
            elif score == "rm_score" and baseline in runs:
                axes.set_ylabel("reward of a response")
    curves = {name: [run["curve"] for run in runs[name].values()] for name in names}
    norms = {name: rows for name, rows in curves.items() if _has(rows, "advantage_norm")}
    programs = {name: rows for name, rows in curves.items() if _has(rows, "share_passed")}
    drawn |= {"l2_norms": plots.l2_norms(norms)} if norms else {}
    return drawn | ({"outcomes": outcome_shares(programs)} if programs else {})


def _has(curves: Sequence[Sequence[Mapping]], metric: str) -> bool:
    return all(any(row.get(metric) is not None for row in curve) for curve in curves)


def gain_curves(
    by_seed: Mapping[int, Mapping], base: Mapping[int, Mapping], score: str
) -> list[list[dict]]:
    """Subtract from each curve the mean of the baseline with the same seed on the held-out prompts; 0 without one."""
    out = []
    for seed, run in sorted(by_seed.items()):
        zero = (
            float(np.mean(base[seed]["final"][score]))
            if seed in base and score in base[seed]["final"]
            else 0.0
        )
        metric = METRICS[score]
        out.append(
            [
                row | {metric: row[metric] - zero}
                for row in run["curve"]
                if row.get(metric) is not None
            ]
        )
    return out


def final_scores(rows: Sequence[Mapping], other: str = "SFT", kind: str = "gain") -> np.ndarray:
    """Plot gains over the baseline or differences from the target method, with mean, interval and every seed.

    Args:
        rows: rows of `study_table`. Where none has any gain or difference, the scores themselves are shown, ±1 std.
        other: the method compared with.
        kind: "gain" or "difference".

    Returns:
        [1 to 3] Axes, of the scores on the held-out prompts.
    """
    word = {"gain": "gain over", "difference": "difference from"}[kind]
    word += " " if len(word + other) < 15 else "\n"  # so that neighbouring labels do not touch
    keys = {f"{score}_{kind}": f"{text},\n{word}{other}" for score, text in SCORES.items()}
    keys = {key: label for key, label in keys.items() if any(key in row for row in rows)}
    compared = bool(keys)
    bars = "95 % interval over seeds and prompts" if compared else "±1 std over seeds"
    text = (
        f"Held-out prompts. Dot: mean; bar: {bars}; small dots: each seed. Further right is better."
    )
    return dots(rows, keys if compared else SCORES, text)


def costs(rows: Sequence[Mapping], target_method: str = "PPO") -> np.ndarray:
    """Plot what each method needs to reach the target method's final reward; [3] Axes: updates, tokens, seconds."""
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
    """
    keys = {key: label for key, label in keys.items() if any(key in row for row in rows)}
    shown = [row for row in rows if any(key in row for key in keys)]
    axes = plots.subplots((1, len(keys)), 0.14 + 0.055 * len(shown))[0]
    styles = plots.method_styles([row["method"] for row in rows])
    for ax, (key, label) in zip(axes, keys.items(), strict=True):
        if key.endswith(("_gain", "_difference")):
            ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
        for place, row in enumerate(shown):
            if key in row:
                _point(ax, row[key], place, styles[row["method"]]["color"])
        ax.set(xlabel=label, ylim=(len(shown) - 0.5, -0.5))
        ax.set_yticks(range(len(shown)), [row[line] for row in shown] if ax is axes[0] else [])
        if len(keys) > 2:  # narrow panels
            ax.locator_params(axis="x", nbins=2)
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.grid(axis="x", alpha=0.3, linewidth=0.5)
    axes[0].figure.supylabel(line, fontsize="medium")
    plots.caption(axes[0].figure, text)
    return axes


def _point(ax: Axes, value: Mapping, place: int, colour: str) -> None:
    """Draw mean, interval (or ±1 std) and seeds of a method at height `place`."""
    mean, seeds = value["mean"], [x for x in value["by_seed"] if x is not None]
    ax.plot(seeds, [place + 0.25] * len(seeds), ".", color=colour, markersize=3)
    if mean is None:
        text, there = (
            f"never: {len(value['by_seed']) - len(seeds)} of {len(value['by_seed'])}",
            (0.98, place - 0.12),
        )
        ax.annotate(
            text,
            there,
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize="small",
        )
        return
    low, high = value.get("low"), value.get("high")
    sides = (value.get("std") or 0.0,) * 2 if low is None else (mean - low, high - mean)
    ax.errorbar(
        mean,
        place,
        xerr=[[side] for side in sides],
        fmt="o",
        color=colour,
        markersize=4.5,
        linewidth=1.6,
    )
