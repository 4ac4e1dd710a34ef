"""Studies whose outcome is the mean reward of some updates: differences of methods, paired by seed.

Methods of a seed share prompts and random numbers. A difference may also be taken from the same difference in another
study, with other seeds: an interaction.
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

REWARD = "score_mean"  # the reward that was trained on; a gold score is another metric
METRICS = {
    REWARD: "mean reward",
    "kl_k1": "KL",
    EXPLAINED: "explained variance",
    "value_noise": "noise of values",
}
LAST = 5  # updates in the KL at the end


def means_of(
    results: Sequence[Mapping], span: Sequence[int], metric: str = REWARD
) -> dict[str, dict[int, float]]:
    """Method -> seed -> mean of a metric over the updates of `span`, first and last included. Runs without the
    metric are left out (RLOO and GRPO have no values).
    """

    def values(run: Mapping) -> list[float]:
        return [
            row[metric]
            for row in curve_of(run)
            if span[0] <= row["update"] <= span[1] and metric in row
        ]

    return {
        method: {
            seed: float(np.mean(numbers)) for seed, run in runs.items() if (numbers := values(run))
        }
        for method, runs in by_method(results).items()
    }


def difference_of_means(
    results: Sequence[Mapping], methods: Sequence[str], span: Sequence[int]
) -> dict:
    """Mean, low, high and by_seed of one method's mean reward minus another's, with `visible` and the seeds."""
    ours, theirs = (means_of(results, span).get(method, {}) for method in methods)
    seeds = sorted(set(ours) & set(theirs))
    gaps = [ours[seed] - theirs[seed] for seed in seeds]
    value = t_interval(gaps) if gaps else {"mean": None, "low": None, "high": None, "by_seed": []}
    return value | {"seeds": seeds, "visible": visible_gap(gaps) if len(gaps) > 1 else None}


def interaction(far: Sequence[float], near: Sequence[float]) -> dict:
    """Mean, low and high (Welch's t-interval) of the mean of `far` minus that of `near`, with `visible`."""
    if min(len(far), len(near)) < 2:
        return {"mean": None, "low": None, "high": None, "by_seed": [], "visible": None}
    test = stats.ttest_ind(far, near, equal_var=False)
    low, high = test.confidence_interval()
    error = (np.var(far, ddof=1) / len(far) + np.var(near, ddof=1) / len(near)) ** 0.5
    value = {
        "mean": float(np.mean(far) - np.mean(near)),
        "low": float(low),
        "high": float(high),
        "by_seed": [],
    }
    return value | {"visible": minimum_detectable(error, test.df)}


def contrasts_of(study, results: Sequence[Mapping]) -> dict[str, dict]:
    """Name of each contrast of a `Study` -> its numbers."""
    values = {}
    for name, contrast in study.contrasts.items():
        methods, other = contrast["difference"], contrast.get("subtracted_from")
        here = difference_of_means(results, methods, study.mean_updates)
        if other:
            there = difference_of_means(stored_results(other), methods, study.mean_updates)
            here |= interaction(there["by_seed"], here["by_seed"])
        values[name] = here
    return values


def mean_reward_report(study, results: Sequence[Mapping], folder: Path, figures: Path) -> str:
    """Write table.md and summary.json to `folder` and figures to `figures`. Returns the table. `study` is a `Study`."""
    contrasts, span = contrasts_of(study, results), study.mean_updates
    means = {words: means_of(results, span, metric) for metric, words in METRICS.items()}
    means["KL at the end"] = means_of(results, (span[1] - LAST + 1, span[1]), "kl_k1")
    drawn = {"learning_curves": learning_curves({"": list(study.methods)}, results, REWARD)}
    drawn["learning_curves"][0].set_ylabel("mean reward")
    if known := {name: value for name, value in contrasts.items() if value["mean"] is not None}:
        drawn["differences"] = differences(study, known)
    seeds = [value["seeds"] for value in contrasts.values()][:1] or means[METRICS[REWARD]].values()
    legend = _legend(study, len(set.intersection(*map(set, seeds))))
    parts = [_contrast_table(contrasts)] * bool(contrasts) + [legend, _method_table(means)]
    text = "\n\n".join(parts) + add_equal_kl(study, results, drawn)
    write_report({"study": study.name, "contrasts": contrasts, "means": means}, text, folder)
    save_figures(drawn, figures)
    return text


def differences(study, contrasts: Mapping[str, Mapping]) -> np.ndarray:
    """Plot contrasts of `contrasts_of`, all with a mean, in the colour of their first method; returns the [1] Axes."""
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
    lines = []
    for number, (name, value) in enumerate(contrasts.items()):
        by_seed = "; ".join(tables.number(gap, "+.2f") for gap in value["by_seed"])
        role = "exploration" if number else "primary outcome"
        cells = [
            tables.interval(value, "+.3f") + f" ({by_seed})" * bool(by_seed),
            tables.number(value["visible"]),
        ]
        lines.append([name, role, *cells])
    return tables.markdown(["contrast", "", "difference", "could be seen"], lines)


def _legend(study, seeds: int) -> str:
    """The text below both tables; `seeds`: the seeds of the primary outcome, or without contrasts of every method."""
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
    def cell(by_seed: Mapping) -> str:
        return tables.interval(t_interval([*by_seed.values()])) if by_seed else "-"

    methods = next(iter(means.values()))
    lines = [
        [method, *(cell(by_method[method]) for by_method in means.values())] for method in methods
    ]
    return tables.markdown(["method", *means], lines)
