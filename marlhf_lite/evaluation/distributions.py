"""Distributions of scores, and how training moved them: quantiles, low-quality tails, and each response's shift from
the baseline's for the same prompt (paper: Figures 3, 10, 14, 16, 20; Appendix D.3)."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from marlhf_lite.evaluation.scores import check_one_temperature, score_matrix, to_frame
from marlhf_lite.evaluation.statistics import bootstrap_mean, paired_bootstrap, wilson
from marlhf_lite.utils.errors import InputError

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TAILS = (0.05, 0.25)  # quantiles of the baseline below which a response is called of low quality


def score_table(responses: pd.DataFrame | Sequence[Mapping]) -> pd.DataFrame:
    """Return the reward model's scores with a column for each method and the index (id, sample).

    `responses` must be at one temperature, because shifts between temperatures would count as those of a method. Raises
    `InputError` for several temperatures, for a response without the score, and if methods differ in their prompts or
    numbers of samples.
    """
    frame = to_frame(responses)
    check_one_temperature(frame)
    groups = frame.groupby("method", sort=False)
    columns = {method: score_matrix(rows, "rm_score").stack() for method, rows in groups}
    # pandas joins by (id, sample), sorted, and leaves NaN where a method lacks one.
    table = pd.DataFrame(columns)
    if table.isna().any(axis=None):
        raise InputError(f"{', '.join(columns)}: prompts or samples differ: evaluate all alike")
    order_of_rows = next(iter(columns.values())).index
    return table.loc[order_of_rows]


def distributions(scores: pd.DataFrame) -> list[dict]:
    """Return how each method's scores are distributed, and how many are in the tails of the baseline's distribution.

    Returns:
        For each method in `scores` (a `score_table`) `mean` (bootstrap over prompts), `std`, `quantiles` ({q: score})
        and `below`: for each quantile of the baseline in TAILS `threshold` (that quantile), `share` of responses below
        it (Wilson interval, as wide as for one sample per prompt) and, except for the baseline, `change` (paired
        bootstrap).
    """
    base = scores[baseline(scores)]
    rows = []
    for method, values in scores.items():
        below = []
        for threshold in np.quantile(base, TAILS).tolist():
            tail = {"threshold": threshold, "share": _share(values < threshold)}
            if method != base.name:
                ours = _by_prompt(values < threshold)
                of_baseline = _by_prompt(base < threshold)
                tail["change"] = paired_bootstrap(ours, of_baseline)._asdict()
            below.append(tail)
        rows.append(
            {
                "method": method,
                "std": float(values.std(ddof=0)),
                **_location(values),
                "below": below,
            }
        )
    return rows


def shifts(scores: pd.DataFrame) -> pd.DataFrame:
    """Return each response's score minus that of the baseline's response with the same prompt and sample number.

    If `evaluate_checkpoints` drew these two responses, they also share their random numbers.
    """
    base = baseline(scores)
    return scores.drop(columns=base).sub(scores[base], axis=0)


def _by_prompt(values: pd.Series) -> pd.Series:
    """Return the mean over the samples of each prompt."""
    return values.groupby(level="id", sort=False).mean()


def _location(values: pd.Series) -> dict:
    """Return `mean` and `quantiles` of `distributions`."""
    quantiles = values.quantile(list(QUANTILES)).to_dict()
    return {"mean": bootstrap_mean(_by_prompt(values))._asdict(), "quantiles": quantiles}


def _share(below: pd.Series) -> dict:
    """Return the share of True with Wilson's interval, as wide as for one sample per prompt."""
    prompts = _by_prompt(below)
    return wilson(float(prompts.sum()), len(prompts))._asdict()


def baseline(scores: pd.DataFrame) -> str:
    """Return the method that others are compared with: SFT, else the first one."""
    return "SFT" if "SFT" in scores else scores.columns[0]
