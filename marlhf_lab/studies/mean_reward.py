"""Studies whose outcome is the mean reward of some updates: differences of methods, paired by seed.

They can be paired because all methods of a seed share prompts and random numbers. Such a difference may also be
subtracted from the same difference in another study, which has other seeds: this is an interaction.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from marlhf_lab.studies.contrasts import curve_of
from marlhf_lab.studies.learning import learning_curves
from marlhf_lab.studies.legends import LEGENDS
from marlhf_lab.studies.power import minimum_detectable, visible_gap
from marlhf_lab.studies.reports import add_equal_kl, dots, save_figures, write_report
from marlhf_lab.studies.results import EXPLAINED, by_method, stored_results, t_interval
from marlhf_lite.utils import tables

REWARD = "score_mean"  # the metric of an update with the reward that was trained on
METRICS = {
    REWARD: "mean reward",
    "kl_k1": "KL",
    EXPLAINED: "explained variance",
    "value_noise": "noise of values",
}
LAST = 5  # the KL at the end is a mean over so many updates


def means_of(
    results: Sequence[Mapping], span: Sequence[int], metric: str = REWARD
) -> dict[str, dict[int, float]]:
    """Return method -> seed -> mean of a metric over the updates of `span`, first and last included.

    Runs without the metric are left out: those of RLOO and GRPO, for example, have no values of a critic.
    """
    first, last = span
    means: dict[str, dict[int, float]] = {}
    for method, runs in by_method(results).items():
        means[method] = {}
        for seed, run in runs.items():
            rows = [row for row in curve_of(run) if first <= row["update"] <= last]
            values = [row[metric] for row in rows if metric in row]
            if values:
                means[method][seed] = float(np.mean(values))
    return means


def difference_of_means(
    results: Sequence[Mapping], methods: Sequence[str], span: Sequence[int]
) -> dict:
    """Return one method's mean reward minus another's, paired by seed: mean, low, high, by_seed, seeds and visible.

    If no seed has both methods, mean, low and high are None. `visible` is the smallest difference that could have been
    seen (`studies.power`), or None with fewer than two seeds.
    """
    means = means_of(results, span)
    ours, theirs = (means.get(method, {}) for method in methods)
    seeds = sorted(set(ours) & set(theirs))
    gaps = [ours[seed] - theirs[seed] for seed in seeds]
    if gaps:
        value = t_interval(gaps)
    else:
        value = {"mean": None, "low": None, "high": None, "by_seed": []}
    return value | {"seeds": seeds, "visible": visible_gap(gaps) if len(gaps) > 1 else None}


def interaction(far: Sequence[float], near: Sequence[float]) -> dict:
    """Return the mean of `far` minus that of `near`: mean, low and high (Welch's t-interval), by_seed and visible.

    `far` and `near` have a number for each seed. Their seeds are different ones and cannot be paired, so `by_seed` is
    empty. If one of the two has fewer than two seeds, there is no interval, and all else is None.
    """
    if min(len(far), len(near)) < 2:
        return {"mean": None, "low": None, "high": None, "by_seed": [], "visible": None}
    test = stats.ttest_ind(far, near, equal_var=False)
    low, high = test.confidence_interval()
    # the standard error of the difference
    error = (np.var(far, ddof=1) / len(far) + np.var(near, ddof=1) / len(near)) ** 0.5
    return {
        "mean": float(np.mean(far) - np.mean(near)),
        "low": float(low),
        "high": float(high),
        "by_seed": [],
        "visible": minimum_detectable(error, test.df),
    }


def contrasts_of(study, results: Sequence[Mapping]) -> dict[str, dict]:
    """Return name of each contrast of a `Study` -> its numbers, see `difference_of_means` and `interaction`."""
    values = {}
    for name, contrast in study.contrasts.items():
        methods = contrast["difference"]
        value = difference_of_means(results, methods, study.mean_updates)
        other_study = contrast.get("subtracted_from")
        if other_study:
            other_results = stored_results(other_study)
            there = difference_of_means(other_results, methods, study.mean_updates)
            # This replaces the numbers, except for the seeds, which stay those of this study.
            value |= interaction(there["by_seed"], value["by_seed"])
        values[name] = value
    return values


def mean_reward_report(study, results: Sequence[Mapping], folder: Path, figures: Path) -> str:
    """Write table.md and summary.json to `folder` and figures to `figures`, and return the text of table.md.

    `study` is a `Study`, and `results` are those of its runs that count.
    """
    # 1. Numbers. `means`: head of a column -> method -> seed -> mean.
    contrasts = contrasts_of(study, results)
    first, last = study.mean_updates
    means = {words: means_of(results, (first, last), metric) for metric, words in METRICS.items()}
    means["KL at the end"] = means_of(results, (last - LAST + 1, last), "kl_k1")
    # 2. Figures.
    drawn = {"learning_curves": learning_curves({"": list(study.methods)}, results, REWARD)}
    drawn["learning_curves"][0].set_ylabel("mean reward")
    with_a_mean = {name: value for name, value in contrasts.items() if value["mean"] is not None}
    if with_a_mean:
        drawn["differences"] = differences(study, with_a_mean)
    # 3. How many seeds count: those of the primary contrast, or else those that every method has.
    if contrasts:
        primary = next(iter(contrasts.values()))
        seeds = set(primary["seeds"])
    else:
        of_methods = means[METRICS[REWARD]].values()
        seeds = set.intersection(*(set(by_seed) for by_seed in of_methods))
    # 4. The page.
    parts = [_legend(study, len(seeds)), _method_table(means)]
    if contrasts:
        parts.insert(0, _contrast_table(contrasts))
    text = "\n\n".join(parts) + add_equal_kl(study, results, drawn)
    write_report({"study": study.name, "contrasts": contrasts, "means": means}, text, folder)
    save_figures(drawn, figures)
    return text


def differences(study, contrasts: Mapping[str, Mapping]) -> np.ndarray:
    """Plot contrasts, each in the colour of its first method; return the [1] Axes.

    `contrasts`: those of `contrasts_of` that have a mean.
    """
    first, last = study.mean_updates
    text = (
        f"Mean reward of the training batches of updates {first} to {last}, differences of two methods. Dot: mean; "
        "bar: 95 % interval over seeds; small dots: each seed, if seeds are paired. Further right is better for the "
        "first method."
    )
    rows = [
        {
            "contrast": name,
            "method": study.contrasts[name]["difference"][0],
            "reward_difference": value,
        }
        for name, value in contrasts.items()
    ]
    return dots(rows, {"reward_difference": "difference in mean reward"}, text, line="contrast")


def _contrast_table(contrasts: Mapping[str, Mapping]) -> str:
    """Return a Markdown table with a line for each contrast; the first contrast is the primary outcome."""
    lines = []
    for number, (name, value) in enumerate(contrasts.items()):
        role = "primary outcome" if number == 0 else "exploration"
        difference = tables.interval(value, "+.3f")
        if value["by_seed"]:
            by_seed = "; ".join(tables.number(gap, "+.2f") for gap in value["by_seed"])
            difference += f" ({by_seed})"
        lines.append([name, role, difference, tables.number(value["visible"])])
    return tables.markdown(["contrast", "", "difference", "could be seen"], lines)


def _legend(study, seeds: int) -> str:
    """Return the text below both tables.

    `seeds`: how many seeds the primary outcome has, or, without contrasts, how many have a run of every method.
    """
    first, last = study.mean_updates
    return LEGENDS["mean reward"].format(
        first=first,
        last=last,
        differences=LEGENDS["differences of means"] if study.contrasts else "",
        seeds=seeds,
        planned=len(study.seeds),
        unfinished="" if seeds == len(study.seeds) else ": unfinished, so nothing is claimed yet",
    )


def _method_table(means: Mapping[str, Mapping]) -> str:
    """Return a Markdown table with a line for each method; `means`: head of a column -> method -> seed -> number."""

    def cell(by_seed: Mapping) -> str:
        return tables.interval(t_interval(list(by_seed.values()))) if by_seed else "-"

    methods = next(iter(means.values()))
    lines = []
    for method in methods:
        lines.append([method, *(cell(by_method[method]) for by_method in means.values())])
    return tables.markdown(["method", *means], lines)
