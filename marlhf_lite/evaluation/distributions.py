"""Where scores lie and where training moved them: quantiles, low-quality tails, and each response's shift against the
baseline's for the same prompt (paper: Figures 3, 10, 14, 16, 20; Appendix D.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from marlhf_lite.evaluation.agreement import wilson
from marlhf_lite.evaluation.responses import matrix
from marlhf_lite.evaluation.statistics import bootstrap_mean, paired_bootstrap
from marlhf_lite.utils.errors import InputError

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def score_tables(rows: Sequence[Mapping], score: str = "rm_score") -> dict[str, np.ndarray]:
    """Method to its scores [P, S], with the same prompts in the same order for all.

    Args:
        rows: responses, with an `id` or else told apart by prompt; S samples of each prompt at one temperature.
        score: the column.

    Raises:
        InputError: no rows, a response without the score, or methods with different prompts or numbers of samples.
    """
    methods = dict.fromkeys(row["method"] for row in rows)
    if not methods:
        raise InputError("rows: none, give at least one method's responses")
    found = {method: matrix([row for row in rows if row["method"] == method], score) for method in methods}
    first, (ids, scores) = next(iter(found.items()))
    tables = {}
    for method, (others, values) in found.items():
        if set(others) != set(ids) or values.shape != scores.shape:
            shapes = " and ".join(f"{x.shape[0]} x {x.shape[1]}" for x in (scores, values))
            raise InputError(f"{first} and {method}: prompts or samples differ ({shapes}): evaluate both alike")
        place = {name: i for i, name in enumerate(others)}
        tables[method] = values[[place[name] for name in ids]]
    return tables


def distributions(
    tables: Mapping[str, np.ndarray],
    baseline: str = "SFT",
    thresholds: Sequence[float] = (),
    quantiles: Sequence[float] = QUANTILES,
    level: float = 0.95,
) -> list[dict]:
    """How each method's scores are distributed, and how many lie in the tail below each threshold.

    Args:
        tables: as `score_tables` gives them.
        baseline: a method; the first where there is none of this name.
        thresholds: in the unit of the scores; by default the 5 % and 25 % quantiles of the baseline, so that the share
            of low-quality responses is told on the baseline's own scale.

    Returns:
        For each method `mean` (bootstrap over prompts), `std`, `quantiles` ({q: score}) and `below`: for each threshold
        `threshold`, `share` (Wilson interval, as wide as for one sample a prompt) and, for methods other than the
        baseline, `change` (bootstrap paired by prompt).
    """
    base = tables[_baseline(tables, baseline)]
    thresholds = [float(x) for x in (thresholds or np.quantile(base, [0.05, 0.25]))]
    found = []
    for method, values in tables.items():
        row = {"method": method, "mean": bootstrap_mean(values.mean(1), level)._asdict(), "std": float(values.std())}
        row["quantiles"] = {q: float(np.quantile(values, q)) for q in quantiles}
        row["below"] = [_below(values, None if values is base else base, x, level) for x in thresholds]
        found.append(row)
    return found


def _below(values: np.ndarray, base: np.ndarray | None, threshold: float, level: float) -> dict:
    share = (values < threshold).mean(1)  # of a prompt's samples
    row = {"threshold": threshold, "share": wilson(float(share.sum()), len(share), level)._asdict()}
    if base is not None:
        row["change"] = paired_bootstrap(share, (base < threshold).mean(1), level)._asdict()
    return row


def shifts(tables: Mapping[str, np.ndarray], baseline: str = "SFT") -> dict[str, np.ndarray]:
    """Method to [P, S]: each response's score less the baseline's for the same prompt and sample number.

    The baseline itself is left out. Responses of like number share their noise where `evaluate_checkpoints` drew them.
    """
    name = _baseline(tables, baseline)
    return {method: values - tables[name] for method, values in tables.items() if method != name}


def shift_summary(
    tables: Mapping[str, np.ndarray],
    baseline: str = "SFT",
    thresholds: Sequence[float] = (0.0,),
    quantiles: Sequence[float] = QUANTILES,
    level: float = 0.95,
) -> list[dict]:
    """For each method but the baseline: `mean` shift, its `quantiles`, and the share of shifts `below` each threshold.

    Intervals are over prompts. The share below 0 is that of prompts which training made worse.
    """
    return [
        {
            "method": method,
            "mean": bootstrap_mean(values.mean(1), level)._asdict(),
            "quantiles": {q: float(np.quantile(values, q)) for q in quantiles},
            "below": [_below(values, None, threshold, level) for threshold in thresholds],
        }
        for method, values in shifts(tables, baseline).items()
    ]


def _baseline(tables: Mapping[str, np.ndarray], name: str) -> str:
    return name if name in tables else next(iter(tables))
