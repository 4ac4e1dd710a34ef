"""Contrasts of speed: how many times as many updates one method needs as another, as log ratios paired by seed.

A run that never reaches the score counts with all its updates. The first contrast of a protocol is the study's primary
outcome and decides its claim; all others are exploration, unless the protocol gives a margin within which it calls two
methods equal.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from marlhf_lab.studies.legends import LEGENDS
from marlhf_lab.studies.results import by_method, t_interval
from marlhf_lite.evaluation.statistics import final_score, updates_to_reach
from marlhf_lite.utils.tables import interval, markdown


def curve_of(run: Mapping) -> list[Mapping]:
    """The updates in which the policy learned, without a critic's warm-up. A reward by rule is its own gold score."""
    updates = run["curve"][run["options"].get("critic_warmup", 0) :]
    return [{"gold_mean": row.get("score_mean")} | row for row in updates]


def updates_to(run: Mapping, threshold: float, window: int) -> int | None:
    """Updates of the policy until the mean of the last `window` gold scores reaches `threshold`; None: never."""
    return updates_to_reach([row["gold_mean"] for row in curve_of(run)], threshold, window)


def ratio_of_updates(
    results: Sequence[Mapping], ratio: Sequence[str], threshold: float, window: int
) -> dict:
    """Return mean, low, high and by_seed of the ratio of updates of two methods, or of such a ratio over another.

    Args:
        results: result files of a study.
        ratio: methods [A, B], for A over B, or [A, B, C, D], for (A over B) over (C over D).
    """
    logs = {method: {} for method in ratio}
    for run in (run for run in results if run["method"] in logs):
        logs[run["method"]][run["seed"]] = math.log(
            updates_to(run, threshold, window) or len(curve_of(run))
        )
    seeds = sorted(set.intersection(*(set(value) for value in logs.values())))
    signs = (1, -1, -1, 1)[: len(ratio)]
    gaps = [
        sum(sign * logs[method][seed] for sign, method in zip(signs, ratio, strict=True))
        for seed in seeds
    ]
    value = t_interval(gaps) if gaps else {"mean": None, "low": None, "high": None, "by_seed": []}
    return ratios_from_logs(value) | {"seeds": seeds}


def ratio_to_final_score(
    results: Sequence[Mapping], ratio: Sequence[str], reference: str = "PPO"
) -> dict:
    """Return the ratio of updates of two methods [A, B], A over B, to the final score of `reference` with that seed.

    This is how the paper measures speed. The reference reaches it by construction; a method that never
    reaches it counts with all its updates. Scores are rewards of training batches (`score_mean`).
    """
    runs, logs = by_method(results), []
    for seed in sorted(runs[reference]):
        curves = {
            name: [row["score_mean"] for row in curve_of(runs[name][seed])]
            for name in {*ratio, reference}
        }
        goal = final_score(curves[reference])
        reached = {
            name: updates_to_reach(curve, goal) or len(curve) for name, curve in curves.items()
        }
        logs.append(math.log(reached[ratio[0]] / reached[ratio[1]]))
    return ratios_from_logs(t_interval(logs))


def ratios_from_logs(logs: Mapping) -> dict:
    """Ratios from their logarithms."""
    return {key: None if value is None else np.exp(value).tolist() for key, value in logs.items()}


def contrast_table(study, results: Sequence[Mapping]) -> str:
    """The contrasts of a `Study` as a Markdown table with a legend; empty if its protocol names none."""
    lines, seeds = [], []
    for number, (name, contrast) in enumerate(study.contrasts.items()):
        ratio = ratio_of_updates(results, contrast["ratio"], study.threshold, study.window)
        seeds.append(len(ratio["seeds"]))
        margin = contrast.get("margin")
        role = (
            "primary outcome"
            if number == 0
            else "exploration"
            if margin is None
            else f"equal within {margin:g}?"
        )
        role += (
            f" ({seeds[-1]} of {len(study.seeds)} seeds)"
            if number and seeds[-1] < len(study.seeds)
            else ""
        )
        by_seed = "; ".join(f"{value:.2f}" for value in ratio["by_seed"])
        lines.append(
            [name, role, f"{interval(ratio, beside=1)} ({by_seed})", verdict(ratio, margin)]
        )
    if not lines:
        return ""
    unfinished = "" if seeds[0] == len(study.seeds) else ": unfinished, so nothing is claimed yet"
    legend = LEGENDS["contrasts"].format(
        window=study.window,
        threshold=study.threshold,
        seeds=seeds[0],
        planned=len(study.seeds),
        unfinished=unfinished,
    )
    return markdown(["contrast", "", "ratio of updates", "the interval"], lines) + f"\n\n{legend}"


def verdict(value: Mapping, margin: float | None) -> str:
    """Compare the interval of a ratio with 1, and with a margin of equality."""
    if value["low"] is None:
        return "-"
    if margin and 1 / margin <= value["low"] and value["high"] <= margin:
        return f"equal within {margin:g}"
    return "above 1" if value["low"] > 1 else "below 1" if value["high"] < 1 else "holds 1"
