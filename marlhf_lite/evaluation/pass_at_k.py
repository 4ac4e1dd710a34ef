"""pass@k: the chance that one of k sampled programs passes all tests of its problem (paper, Table 3)."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from marlhf_lite.evaluation.scores import name_temperatures, score_matrix, table
from marlhf_lite.evaluation.statistics import bootstrap_mean
from marlhf_lite.utils.errors import InputError

STRATA = ("introductory", "interview", "competition")  # the difficulties of APPS
ALL = "all"


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return 1 − C(n−c, k) / C(n, k) of one problem: the unbiased estimator of Chen et al. (2021), arXiv 2107.03374.

    n is the number of `samples`, of which c `passed`, and k ≤ n may be tried. Raises `InputError` for other numbers.
    """
    if not 0 <= passed <= samples:
        raise InputError(f"passed {passed}: of {samples} samples: give 0 to {samples}")
    if not 1 <= k <= samples:
        raise InputError(f"k {k}: there are {samples} samples: give 1 to {samples}, or sample more")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def pass_rates(
    responses: pd.DataFrame, difficulty: Mapping[str, str] | None = None, ks: Sequence[int] = (1, 5)
) -> list[dict]:
    """Return pass@k of each method for each difficulty and over all problems, as in Table 3.

    Args:
        responses: rows of `evaluate_checkpoints` with `gold`, the share of tests that a program passed.
        difficulty: prompt to difficulty, if the data have it.
        ks: those beyond the number of samples are left out.

    Returns:
        Dicts with method, difficulty, problems, and `pass@k` as an interval; the bootstrap draws problems.
    """
    rows = []
    for method, rows_of in name_temperatures(responses).groupby("method", sort=False):
        shares = score_matrix(rows_of, "gold")
        samples = shares.shape[1]
        counts = (shares == 1).sum(axis=1)  # of a problem's programs, those that pass all tests
        prompts = rows_of.drop_duplicates("id").set_index("id")["prompt"].reindex(counts.index)
        strata = prompts.map(difficulty or {})
        levels = [name for name in strata.dropna().unique() if name]
        ordered = [name for name in STRATA if name in levels] + sorted(set(levels) - set(STRATA))
        for stratum in [*ordered, ALL]:
            chosen = counts if stratum == ALL else counts[strata == stratum]
            row = {"method": method, "difficulty": stratum, "problems": len(chosen)}
            for k in (k for k in ks if k <= samples):
                row[f"pass@{k}"] = bootstrap_mean(
                    [pass_at_k(samples, int(count), k) for count in chosen]
                )._asdict()
            rows.append(row)
    return rows


def pass_table(rows: Sequence[Mapping]) -> str:
    """Return the rows of `pass_rates` as a Markdown table, with intervals in brackets."""
    return table(rows, list(dict.fromkeys(name for row in rows for name in row)))
