"""How fast methods learn: updates to a fixed score, area under the curve, and their differences, paired by seed.

For a study with a `threshold`. Its outcome is the gold score of the training batches, so nothing is evaluated after
training. The reference of each group of `figures` is its first method.
"""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from marlhf_lab.credit.signal_kept import decisive_token, signal_kept
from marlhf_lab.studies.contrasts import contrast_table, curve_of, updates_to
from marlhf_lab.studies.legends import LEGENDS
from marlhf_lab.studies.reports import add_equal_kl, dots, save_figures, write_report
from marlhf_lab.studies.results import t_interval
from marlhf_lite.plotting import training as plots
from marlhf_lite.utils import tables

# metric of the curves; updates in a mean, if the protocol gives no other number
SCORE, WINDOW = "gold_mean", 3
CRITIC = {
    "credit_seen": "credit seen s",
    "score_explained_variance": "explained variance of the score",
}
# objectives; the last two leave advantages as they are
FORMULA_HOLDS = {"", "sae", "vc_ppo", "released"}


def learning_table(
    groups: Mapping[str, Sequence[str]],
    results: Sequence[Mapping],
    threshold: float,
    window: int = WINDOW,
) -> list[dict]:
    """Return one row for each method of each group that has results.

    Args:
        groups: name -> methods; the first one with results is the reference of its group.
        results: result files of the study, one for each method and seed.
        threshold: the gold score to reach.
        window: updates in the mean that is compared with it.

    Returns:
        group, method, seeds; updates (median or None, by_seed with None if it is not reached); area (mean, by_seed);
        and if known updates_difference and area_difference (mean, low, high, by_seed), credit_seen,
        score_explained_variance, n, and kept (three shares).
    """
    rows = []
    for group, names in groups.items():
        runs = {name: {r["seed"]: r for r in results if r["method"] == name} for name in names}
        runs = {name: by_seed for name, by_seed in runs.items() if by_seed}
        speeds = {
            name: {seed: _speed(run, threshold, window) for seed, run in runs[name].items()}
            for name in runs
        }
        rows += [
            _row(group, name, runs[name], speeds[name], speeds[next(iter(runs))]) for name in runs
        ]
    return rows


def _speed(run: Mapping, threshold: float, window: int) -> dict:
    """Return updates to the threshold (`reached`, None: never; `updates`, the budget for never), and the area."""
    scores, updates = [row[SCORE] for row in curve_of(run)], updates_to(run, threshold, window)
    return {"reached": updates, "updates": updates or len(scores), "area": float(np.mean(scores))}


def _row(group: str, name: str, runs: Mapping, speeds: Mapping, reference: Mapping) -> dict:
    seeds = sorted(runs)
    reached, areas = ([speeds[seed][key] for seed in seeds] for key in ("reached", "area"))
    median = float(np.median([inf if x is None else x for x in reached]))
    row = {"group": group, "method": name, "seeds": seeds}
    row["updates"] = {"median": median if median < inf else None, "by_seed": reached}
    row["area"] = {"mean": float(np.mean(areas)), "by_seed": areas}
    if speeds is not reference:
        for key in ("updates", "area"):
            gaps = [speeds[seed][key] - reference[seed][key] for seed in seeds if seed in reference]
            row[f"{key}_difference"] = t_interval(gaps)
    # While the policy is learning: later all scores are equal, and there is no credit to predict.
    learning = [step for seed in seeds for step in curve_of(runs[seed])[: speeds[seed]["updates"]]]
    for key in CRITIC:
        values = [step[key] for step in learning if step.get(key) is not None]
        if values:
            row[key] = float(np.mean(values))
    return row | _kept(runs[seeds[0]]["options"], row.get("credit_seen"))


def _kept(options: Mapping, seen: float | None) -> dict:
    """n, and the formula's prediction for the deciding token, if its position is fixed and the formula holds."""
    place = (
        decisive_token(options.get("part", ""))
        if options.get("dataset") == "tiny-umbrella"
        else None
    )
    if place is None or "lam" not in options or options.get("termination", "fixed") != "fixed":
        return {}
    objectives = {word.partition("=")[0].strip() for word in options["objective"].split(",")}
    sigma = "start" if "sae" in objectives else options["sigma"]
    if (
        objectives - FORMULA_HOLDS
        or sigma not in ("equal", "start")
        or options.get("last_token_alone")
    ):
        return {}
    shares = (0.0, min(max(seen or 0.0, 0.0), 1.0), 1.0)
    kept = [signal_kept(*place, float(options["n"]), options["lam"], s, sigma) for s in shares]
    return {"n": options["n"], "kept": kept}


# Report


def learning_report(study, results: Sequence[Mapping], folder: Path, figures: Path) -> str:
    """Write table.md and summary.json to `folder` and figures to `figures`. Returns the table. `study` is a `Study`."""
    groups = study.figures or {"": list(study.methods)}
    rows = learning_table(groups, results, study.threshold, study.window)
    text = "\n\n".join(
        [*filter(None, [contrast_table(study, results)]), markdown(rows, groups, study)]
    )
    drawn = learning_figures(groups, results, rows)
    text += add_equal_kl(study, results, drawn)
    write_report({"study": study.name, "threshold": study.threshold, "methods": rows}, text, folder)
    save_figures(drawn, figures)
    return text


def markdown(rows: Sequence[Mapping], groups: Mapping[str, Sequence[str]], study) -> str:
    """Write one Markdown table for each group, and a legend. `study` is a `Study`."""
    speed = ["method", f"updates to {study.threshold:g}", "difference", "area", "difference"]
    heads = [*speed, *CRITIC.values(), "credit kept"]
    parts = []
    for group, names in groups.items():
        lines = [_line(row) for row in rows if row["group"] == group]
        title = [f"**{group}**, differences from {names[0]}"] if group else []
        parts.append("\n".join([*title, "", tables.markdown(heads, lines)]))
    return "\n\n".join(
        [*parts, LEGENDS["speed"].format(window=study.window, threshold=study.threshold)]
    )


def _line(row: Mapping) -> list[str]:
    reached, median = row["updates"]["by_seed"], row["updates"]["median"]
    updates = f"{'never' if median is None else f'{median:g}'} ({'; '.join(str(x or 'never') for x in reached)})"
    area = f"{tables.number(row['area']['mean'])} ({'; '.join(map(tables.number, row['area']['by_seed']))})"
    gaps = [
        (row.get(f"{key}_difference"), form)
        for key, form in (("updates", "+.1f"), ("area", "+.2f"))
    ]
    gaps = [tables.interval(gap, form) if gap else "-" for gap, form in gaps]
    critic = [tables.number(row[key]) if key in row else "-" for key in CRITIC]
    kept = " / ".join(map(tables.number, row["kept"])) if "kept" in row else "-"
    return [row["method"], updates, gaps[0], area, gaps[1], *critic, kept]


def learning_figures(
    groups: Mapping[str, Sequence[str]], results: Sequence[Mapping], rows: Sequence[Mapping]
) -> dict[str, np.ndarray]:
    """Draw learning curves, a panel for each group, and differences: name of a figure to its Axes."""
    drawn = {"learning_curves": learning_curves(groups, results)}
    if any("area_difference" in row for row in rows):
        drawn["differences"] = differences(rows)
    return drawn


@plt.rc_context(plots.STYLE)
def learning_curves(
    groups: Mapping[str, Sequence[str]], results: Sequence[Mapping], metric: str = SCORE
) -> np.ndarray:
    """Plot a score over updates, one panel for each group; returns the Axes."""
    axes = plots.grid(len(groups), 0.15, 0.45, sharey=True)
    for ax, (group, names) in zip(axes, groups.items(), strict=True):
        curves = {name: [curve_of(r) for r in results if r["method"] == name] for name in names}
        short = {name.removeprefix(group).strip() or name: runs for name, runs in curves.items()}
        plots.reward_curves(short, metric, WINDOW, ax=ax)
        ax.set(title=group)
        many = {"fontsize": "x-small", "ncols": 2, "handlelength": 1.8, "loc": "lower right"}
        ax.legend(**(many if len(names) > 5 else {"fontsize": "small"}))
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low - 0.4 * (high - low), high)  # room for the legends
    text = f"Training batches, mean of the last {WINDOW}. Thick: mean over seeds with ±1 std; thin: each seed."
    plots.caption(axes[0].figure, text)
    return axes


def differences(rows: Sequence[Mapping]) -> np.ndarray:
    """Plot updates to the threshold and area, minus those of the group's reference; returns the [2] Axes."""
    text = (
        "Minus those of the group's first method, paired by seed. Dot: mean; bar: 95 % t-interval over seeds; small "
        "dots: each seed. Faster is further left on the left, further right on the right."
    )
    keys = {
        "updates_difference": "difference in\nupdates to threshold",
        "area_difference": "difference in area",
    }
    return dots([row for row in rows if "area_difference" in row], keys, text)
