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
    """Return the updates in which the policy learned, without the first ones, in which only the critic was warmed up.

    An update without a gold score gets its reward as the gold score, because a reward by rule is its own gold score.
    """
    updates = run["curve"][run["options"].get("critic_warmup", 0) :]
    # A gold score of the row itself wins.
    return [{"gold_mean": row.get("score_mean")} | row for row in updates]


def updates_to(run: Mapping, threshold: float, window: int) -> int | None:
    """Return after how many updates of the policy the mean of the last `window` gold scores reaches `threshold`.

    None if it never does.
    """
    return updates_to_reach([row["gold_mean"] for row in curve_of(run)], threshold, window)


def ratio_of_updates(
    results: Sequence[Mapping], ratio: Sequence[str], threshold: float, window: int
) -> dict:
    """Return how many times as many updates one method needs as another: mean, low, high, by_seed and seeds.

    The mean is geometric. If no seed has all methods, mean, low and high are None.

    Args:
        results: result files of a study.
        ratio: methods [A, B], for A over B, or [A, B, C, D], for the ratio A over B over the ratio C over D.
        threshold, window: see `updates_to`.
    """
    # 1. method -> seed -> the logarithm of its updates; a run that never arrives counts with all of them.
    logs: dict[str, dict[int, float]] = {method: {} for method in ratio}
    for run in results:
        if run["method"] in logs:
            updates = updates_to(run, threshold, window) or len(curve_of(run))
            logs[run["method"]][run["seed"]] = math.log(updates)
    # 2. log A − log B − log C + log D, paired by seed.
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in logs.values())))
    signs = (1, -1, -1, 1)[: len(ratio)]
    gaps = []
    for seed in seeds:
        gaps.append(
            sum(sign * logs[method][seed] for sign, method in zip(signs, ratio, strict=True))
        )
    if gaps:
        value = t_interval(gaps)
    else:
        value = {"mean": None, "low": None, "high": None, "by_seed": []}
    return ratios_from_logs(value) | {"seeds": seeds}


def ratio_to_final_score(
    results: Sequence[Mapping], ratio: Sequence[str], reference: str = "PPO"
) -> dict:
    """Return the ratio of updates of two methods [A, B], A over B, until they reach the final score of `reference`.

    This is how the paper measures speed. In each seed the goal is the final score of the reference with that seed. The
    reference reaches it by construction, and a method that never does counts with all its updates. Scores are rewards
    of training batches (`score_mean`).
    """
    runs = by_method(results)

    def scores_of(method: str, seed: int) -> list[float]:
        return [row["score_mean"] for row in curve_of(runs[method][seed])]

    logs = []
    for seed in sorted(runs[reference]):
        goal = final_score(scores_of(reference, seed))
        updates = []
        for method in ratio:
            scores = scores_of(method, seed)
            updates.append(updates_to_reach(scores, goal) or len(scores))
        ours, theirs = updates
        logs.append(math.log(ours / theirs))
    return ratios_from_logs(t_interval(logs))


def ratios_from_logs(logs: Mapping) -> dict:
    """Turn the logarithms of ratios into ratios: mean, low, high and each of by_seed; None stays None."""
    return {key: None if value is None else np.exp(value).tolist() for key, value in logs.items()}


def contrast_table(study, results: Sequence[Mapping]) -> str:
    """The contrasts of a `Study` as a Markdown table with a legend; empty if its protocol names none."""
    planned = len(study.seeds)
    lines = []
    seeds_of_primary = 0  # set by the first contrast, which is the primary outcome
    for number, (name, contrast) in enumerate(study.contrasts.items()):
        ratio = ratio_of_updates(results, contrast["ratio"], study.threshold, study.window)
        seeds = len(ratio["seeds"])
        margin = contrast.get("margin")
        if number == 0:
            role = "primary outcome"
            seeds_of_primary = seeds
        else:
            role = "exploration" if margin is None else f"equal within {margin:g}?"
            if seeds < planned:
                role += f" ({seeds} of {planned} seeds)"
        by_seed = "; ".join(f"{value:.2f}" for value in ratio["by_seed"])
        cell = f"{interval(ratio, beside=1)} ({by_seed})"
        lines.append([name, role, cell, verdict(ratio, margin)])
    if not lines:
        return ""
    is_complete = seeds_of_primary == planned
    legend = LEGENDS["contrasts"].format(
        window=study.window,
        threshold=study.threshold,
        seeds=seeds_of_primary,
        planned=planned,
        unfinished="" if is_complete else ": unfinished, so nothing is claimed yet",
    )
    heads = ["contrast", "", "ratio of updates", "the interval"]
    return markdown(heads, lines) + f"\n\n{legend}"


def verdict(value: Mapping, margin: float | None) -> str:
    """Say where the interval of a ratio is: within the margin of equality, above 1, below 1, or on both sides of 1.

    With a margin of 1.25, ratios from 1/1.25 to 1.25 are equal; None if the protocol gives none. Without an interval
    the text is "-".
    """
    if value["low"] is None:
        return "-"
    if margin and 1 / margin <= value["low"] and value["high"] <= margin:
        return f"equal within {margin:g}"
    if value["low"] > 1:
        return "above 1"
    if value["high"] < 1:
        return "below 1"
    return "holds 1"
