"""Where scores lie and where training moved them: quantiles, low-quality tails, and each response's shift against the
baseline's for the same prompt (paper: Figures 3, 10, 14, 16, 20; Appendix D.3)."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from marlhf_lite.evaluation.scores import score_matrix, to_frame
from marlhf_lite.evaluation.statistics import bootstrap_mean, paired_bootstrap, wilson
from marlhf_lite.utils.errors import InputError

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TAILS = (0.05, 0.25)  # quantiles of the baseline below which a response is called of low quality


def score_table(responses: pd.DataFrame | Sequence[Mapping], score: str = "rm_score") -> pd.DataFrame:
    """Scores with a column for each method and the index (id, sample): the same prompts and samples for all.

    `responses` have the same samples of the same prompts for every method, at one temperature. Raises `InputError` for
    a response without the score, and for methods with different prompts or numbers of samples.
    """
    frame = to_frame(responses)
    matrices = {method: score_matrix(rows, score) for method, rows in frame.groupby("method", sort=False)}
    first, scores = next(iter(matrices.items()))
    for method, values in matrices.items():
        if values.shape != scores.shape or not scores.index.isin(values.index).all():
            shapes = " and ".join(f"{x.shape[0]} x {x.shape[1]}" for x in (scores, values))
            raise InputError(f"{first} and {method}: prompts or samples differ ({shapes}): evaluate both alike")
    return pd.DataFrame({method: values.loc[scores.index].stack() for method, values in matrices.items()})


def distributions(scores: pd.DataFrame) -> list[dict]:
    """How each method's scores are distributed, and how many lie in the tails of the baseline's distribution.

    Returns:
        For each method in `scores` (a `score_table`) `mean` (bootstrap over prompts), `std`, `quantiles` ({q: score})
        and `below`: for each quantile of the baseline in TAILS `threshold` (that quantile), `share` of responses below
        it (Wilson interval, as wide as for one sample a prompt) and, but for the baseline, `change` (paired bootstrap).
    """
    base = scores[baseline(scores)]
    rows = []
    for method, values in scores.items():
        below = []
        for threshold in np.quantile(base, TAILS).tolist():
            tail = {"threshold": threshold, "share": _share(values < threshold)}
            if method != base.name:
                shares = (_by_prompt(x < threshold) for x in (values, base))
                tail["change"] = paired_bootstrap(*shares)._asdict()
            below.append(tail)
        rows.append({"method": method, "std": float(values.std(ddof=0)), **_location(values), "below": below})
    return rows


def shifts(scores: pd.DataFrame) -> pd.DataFrame:
    """Each response's score minus the baseline's for the same prompt and sample number, without the baseline itself.

    Responses with the same number share their random numbers where `evaluate_checkpoints` drew them.
    """
    base = baseline(scores)
    return scores.drop(columns=base).sub(scores[base], axis=0)


def shift_summary(scores: pd.DataFrame) -> list[dict]:
    """For each method but the baseline: `mean` shift, its `quantiles`, and the share `below` 0, with their intervals.

    The share below 0 is that of responses which training made worse.
    """
    return [
        {"method": method, **_location(x), "below": [{"threshold": 0.0, "share": _share(x < 0)}]}
        for method, x in shifts(scores).items()
    ]


def _by_prompt(values: pd.Series) -> pd.Series:
    return values.groupby(level="id", sort=False).mean()


def _location(values: pd.Series) -> dict:
    quantiles = values.quantile(list(QUANTILES)).to_dict()
    return {"mean": bootstrap_mean(_by_prompt(values))._asdict(), "quantiles": quantiles}


def _share(below: pd.Series) -> dict:
    prompts = _by_prompt(below)
    return wilson(float(prompts.sum()), len(prompts))._asdict()


def baseline(scores: pd.DataFrame) -> str:
    """The method that others are compared with: SFT, or the first one where there is no SFT."""
    return "SFT" if "SFT" in scores else scores.columns[0]
