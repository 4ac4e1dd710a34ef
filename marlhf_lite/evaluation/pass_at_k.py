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
        ks: the values of k; those above the number of samples are left out.

    Returns:
        Dicts with method, difficulty, problems, and `pass@k` as an interval; the bootstrap draws problems.
    """
    table = []
    for method, rows in name_temperatures(responses).groupby("method", sort=False):
        # How many of each problem's programs pass all tests.
        shares_of_tests = score_matrix(rows, "gold")  # [problems, samples]
        samples = shares_of_tests.shape[1]
        passing = (shares_of_tests == 1).sum(axis=1)
        # The difficulty of each problem, empty or NaN if it is not known; and the difficulties in order: first those of
        # `STRATA`, then others.
        prompts = rows.drop_duplicates("id").set_index("id")["prompt"].reindex(passing.index)
        difficulty_of = prompts.map(difficulty or {})
        found = {name for name in difficulty_of.dropna().unique() if name}
        ordered = [name for name in STRATA if name in found] + sorted(found - set(STRATA))
        for stratum in [*ordered, ALL]:
            chosen = passing if stratum == ALL else passing[difficulty_of == stratum]
            row = {"method": method, "difficulty": stratum, "problems": len(chosen)}
            for k in ks:
                if k <= samples:
                    chances = [pass_at_k(samples, int(count), k) for count in chosen]
                    row[f"pass@{k}"] = bootstrap_mean(chances)._asdict()
            table.append(row)
    return table


def pass_table(rows: Sequence[Mapping]) -> str:
    """Return the rows of `pass_rates` as a Markdown table, with intervals in brackets."""
    return table(rows, list(dict.fromkeys(name for row in rows for name in row)))
