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
from marlhf_lab.studies.results import page_name, t_interval
from marlhf_lite.plotting import training as plots
from marlhf_lite.utils import tables

SCORE = "gold_mean"  # metric of the curves
WINDOW = 3  # updates in a mean, if the protocol gives no other number
CRITIC = {
    "credit_seen": "credit seen s",
    "score_explained_variance": "explained variance of the score",
}
# Objectives for which `signal_kept` holds. vc_ppo and released leave advantages as they are; "" is PPO's own objective.
FORMULA_HOLDS = {"", "sae", "vc_ppo", "released"}


def learning_table(
    groups: Mapping[str, Sequence[str]],
    results: Sequence[Mapping],
    threshold: float,
    window: int = WINDOW,
) -> list[dict]:
    """Return one row for each method of each group that has results.

    Args:
        groups: name -> methods; the first method with results is the reference of its group.
        results: result files of the study, one for each method and seed.
        threshold: the gold score to reach.
        window: updates in the mean that is compared with the threshold.

    Returns:
        Rows with group, method, seeds; updates to the threshold and area under the curve, see `summary_of_speeds`; and
        if they are known, updates_difference and area_difference from the reference (see `t_interval`), credit_seen and
        score_explained_variance of the critic, and n and kept, see `_credit_kept`.
    """
    rows = []
    for group, names in groups.items():
        by_method = {}
        for name in names:
            runs = {result["seed"]: result for result in results if result["method"] == name}
            if runs:
                by_method[name] = runs
        speeds = {}
        for name, runs in by_method.items():
            speeds[name] = {
                seed: speed_of(run, threshold, window) for seed, run in sorted(runs.items())
            }
        for place, (name, runs) in enumerate(by_method.items()):
            row = {"group": group, "method": name} | summary_of_speeds(speeds[name])
            if place > 0:  # the method at place 0 is the reference itself
                reference = speeds[next(iter(by_method))]
                row |= differences_from(reference, speeds[name])
            row |= critic_while_learning(runs, speeds[name])
            options = runs[row["seeds"][0]]["options"]
            rows.append(row | _credit_kept(options, row.get("credit_seen")))
    return rows


def speed_of(run: Mapping, threshold: float, window: int) -> dict:
    """Return how fast a run learned.

    `reached` is the update at which the run reached the threshold, or None. `updates` is the same number, or the number
    of all the run's updates if it never reached the threshold. `area` is its mean score over all updates.
    """
    scores = [row[SCORE] for row in curve_of(run)]
    reached = updates_to(run, threshold, window)
    return {"reached": reached, "updates": reached or len(scores), "area": float(np.mean(scores))}


def summary_of_speeds(speeds: Mapping[int, Mapping]) -> dict:
    """Return a method's seeds, its updates (median, by_seed) and its area (mean, by_seed).

    In `by_seed` of updates, a run that never reaches the threshold has None. The median counts such runs as later than
    all others, and is None if it falls on one of them. `speeds`: seed -> `speed_of` its run.
    """
    reached = [speed["reached"] for speed in speeds.values()]
    areas = [speed["area"] for speed in speeds.values()]
    median = float(np.median([inf if update is None else update for update in reached]))
    return {
        "seeds": list(speeds),
        "updates": {"median": None if median == inf else median, "by_seed": reached},
        "area": {"mean": float(np.mean(areas)), "by_seed": areas},
    }


def differences_from(reference: Mapping[int, Mapping], speeds: Mapping[int, Mapping]) -> dict:
    """Return updates and area minus those of the reference, with t-intervals over the seeds that both have.

    `reference` and `speeds`: seed -> `speed_of` its run. A run that never reaches the threshold counts with all its
    updates.
    """
    differences = {}
    for key in ("updates", "area"):
        gaps = [
            speed[key] - reference[seed][key] for seed, speed in speeds.items() if seed in reference
        ]
        differences[f"{key}_difference"] = t_interval(gaps)
    return differences


def critic_while_learning(runs: Mapping[int, Mapping], speeds: Mapping[int, Mapping]) -> dict:
    """Return the means of CRITIC's metrics over all seeds and the updates until the threshold was reached.

    Later updates are left out: all scores are equal then, and there is no credit to predict.
    """
    values: dict[str, list[float]] = {key: [] for key in CRITIC}
    for seed, speed in speeds.items():
        for step in curve_of(runs[seed])[: speed["updates"]]:
            for key in CRITIC:
                if step.get(key) is not None:
                    values[key].append(step[key])
    return {key: float(np.mean(found)) for key, found in values.items() if found}


def _credit_kept(options: Mapping, seen: float | None) -> dict:
    """Return n, and as `kept` which share of the deciding word's credit its advantage keeps, by `signal_kept`.

    The three shares are for a critic that predicts nothing of the credit, one that predicts what the study has measured
    (`seen`), and one that predicts all. The dict is empty if the formula does not hold: for other tasks and objectives,
    and if the word's position or the macro actions are not fixed.
    """
    if options.get("dataset") != "tiny-umbrella" or "lam" not in options:
        return {}
    place = decisive_token(options.get("part", ""))
    has_fixed_actions = options.get("termination", "fixed") == "fixed"
    if place is None or not has_fixed_actions or options.get("last_token_alone"):
        return {}
    # The names of objectives without their values, as in "sae,vc_ppo=0.95"
    objectives = {word.partition("=")[0].strip() for word in options["objective"].split(",")}
    # SAE's baseline does not depend on the action's own tokens either, so it is that of the action's start.
    sigma = "start" if "sae" in objectives else options["sigma"]
    if objectives - FORMULA_HOLDS or sigma not in ("equal", "start"):
        return {}
    predicted_by_critic = min(max(seen or 0.0, 0.0), 1.0)  # an estimate can lie outside 0 to 1
    kept = []
    for share in (0.0, predicted_by_critic, 1.0):
        n = float(options["n"])
        kept.append(signal_kept(*place, n, options["lam"], share, sigma))
    return {"n": options["n"], "kept": kept}


# Report


def learning_report(study, results: Sequence[Mapping], folder: Path, figures: Path) -> str:
    """Write table.md and summary.json to `folder` and figures to `figures`, and return the text of table.md.

    `study` is a `Study`, and `results` are those of its runs that count.
    """
    # Name of a figure -> its methods; one figure without a name has all.
    groups = study.figures or {"": list(study.methods)}
    rows = learning_table(groups, results, study.threshold, study.window)
    text = markdown(rows, groups, study)
    contrasts = contrast_table(study, results)
    if contrasts:
        text = f"{contrasts}\n\n{text}"
    drawn = learning_figures(groups, results, rows)
    text += add_equal_kl(study, results, drawn)  # this adds its figure to `drawn`
    write_report({"study": study.name, "threshold": study.threshold, "methods": rows}, text, folder)
    save_figures(drawn, figures)
    return text


def markdown(rows: Sequence[Mapping], groups: Mapping[str, Sequence[str]], study) -> str:
    """Return one Markdown table for each group, and a legend. `study` is a `Study`."""
    speed = ["method", f"updates to {study.threshold:g}", "difference", "area", "difference"]
    heads = [*speed, *CRITIC.values(), "credit kept"]
    parts = []
    for group, names in groups.items():
        lines = [cells_of(row) for row in rows if row["group"] == group]
        title = f"**{group}**, differences from {names[0]}\n" if group else ""
        parts.append(f"{title}\n{tables.markdown(heads, lines)}")
    parts.append(LEGENDS["speed"].format(window=study.window, threshold=study.threshold))
    return "\n\n".join(parts)


def cells_of(row: Mapping) -> list[str]:
    """Return the cells of a method's line, from its row of `learning_table`; "-" for what the row does not have."""
    by_seed = "; ".join(str(update or "never") for update in row["updates"]["by_seed"])
    median = row["updates"]["median"]
    updates = "never" if median is None else f"{median:g}"
    area = tables.number(row["area"]["mean"])
    areas = "; ".join(tables.number(x) for x in row["area"]["by_seed"])
    critic = [tables.number(row[key]) if key in row else "-" for key in CRITIC]
    kept = " / ".join(tables.number(share) for share in row.get("kept", [])) or "-"
    return [
        row["method"],
        f"{updates} ({by_seed})",
        difference_in(row, "updates_difference", "+.1f"),
        f"{area} ({areas})",
        difference_in(row, "area_difference", "+.2f"),
        *critic,
        kept,
    ]


def difference_in(row: Mapping, key: str, form: str) -> str:
    """Return a difference with its interval; "-" for the reference, which has none."""
    return tables.interval(row[key], form) if key in row else "-"


def learning_figures(
    groups: Mapping[str, Sequence[str]], results: Sequence[Mapping], rows: Sequence[Mapping]
) -> dict[str, np.ndarray]:
    """Draw learning curves, with a panel for each group, and differences; return name of a figure -> its Axes."""
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
        curves = {}
        for name in names:
            # The panel's title names the group already.
            label = page_name(name.removeprefix(group).strip() or name)
            curves[label] = [curve_of(run) for run in results if run["method"] == name]
        plots.reward_curves(curves, metric, WINDOW, ax=ax)
        ax.set(title=group)
        if len(names) > 5:
            ax.legend(fontsize="x-small", ncols=2, handlelength=1.8, loc="lower right")
        else:
            ax.legend(fontsize="small")
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low - 0.4 * (high - low), high)  # room for the legends
    text = f"Training batches, mean of the last {WINDOW}. Thick: mean over seeds with ±1 std; thin: each seed."
    plots.caption(axes[0].figure, text)
    return axes


def differences(rows: Sequence[Mapping]) -> np.ndarray:
    """Plot updates to the threshold and area, minus those of the group's reference; return the [2] Axes."""
    text = (
        "Minus those of the group's first method, paired by seed. Dot: mean; bar: 95 % t-interval over seeds; small "
        "dots: each seed. Faster is further left on the left, further right on the right."
    )
    keys = {
        "updates_difference": "difference in\nupdates to threshold",
        "area_difference": "difference in area",
    }
    return dots([row for row in rows if "area_difference" in row], keys, text)
