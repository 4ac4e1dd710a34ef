"""Best-of-N (rejection sampling): N responses, of which the one with the best reward model score is kept (Figure 8).

With S ≥ N samples of a prompt, the expected best of N is estimated without bias from all of them: each stands for the
share of the N-subsets in which it is the best. So one set of samples serves every N, and no N is sampled again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from marlhf_lite.evaluation.responses import matrix
from marlhf_lite.evaluation.statistics import bootstrap_mean, finite
from marlhf_lite.utils.errors import InputError

SIZES = (1, 4, 8, 16, 32)


def best_weights(scores: Sequence[float], n: int) -> np.ndarray:
    """[S] the chance that a sample is the best of `n` drawn from all S without replacement; they add up to 1.

    The sample with i others below it has C(i, n−1) / C(S, n). Equal scores share their chances.

    Args:
        scores: [S] finite numbers.
        n: from 1 to S.

    Raises:
        InputError: an n out of range, or scores that are not finite.
    """
    scores = finite("scores", scores)
    check_sizes([n], len(scores), "scores")
    weight = np.zeros(len(scores))
    weight[-1] = n / len(scores)
    for i in range(len(scores) - 1, n - 1, -1):  # C(i−1, n−1) / C(i, n−1) = (i − n + 1) / i
        weight[i - 1] = weight[i] * (i - n + 1) / i
    _, rank = np.unique(scores, return_inverse=True)
    shared = np.bincount(rank[np.argsort(scores, kind="stable")], weight) / np.bincount(rank)
    return shared[rank]


def best_of_n(
    rows: Sequence[Mapping], sizes: Sequence[int] = SIZES, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> list[dict]:
    """What best-of-N reaches for every method, temperature and N: the grid of Figure 8, with intervals over prompts.

    The gold score is that of the response which the reward model picks, so it may fall while the RM score rises.

    Args:
        rows: as `evaluate_checkpoints` gives them, with rm_score, and gold where it is known.
        sizes: the N. Greedy responses (temperature 0) are all the same, so they have N = 1 alone.
        level, resamples, seed: of the bootstrap over prompts, see `bootstrap_mean`.

    Returns:
        Dicts with method, temperature, n, samples, prompts, rm_score and gold (each mean, low, high, level), and
        kl_bound: log N − (N−1)/N nats, which the KL of best-of-N to the policy it samples from cannot exceed.

    Raises:
        InputError: an N larger than the samples stored, or prompts with different numbers of samples.
    """
    groups: dict[tuple, list[Mapping]] = {}
    for row in rows:
        groups.setdefault((row["method"], row.get("temperature")), []).append(row)
    columns = {key: _columns(group, sizes) for key, group in groups.items()}  # all checks before the first bootstrap
    return [
        {"method": method, "temperature": temperature, "n": n, **_cell(values, n, level, resamples, seed)}
        for (method, temperature), (values, here) in columns.items()
        for n in here
    ]


def _columns(rows: Sequence[Mapping], sizes: Sequence[int]) -> tuple[dict[str, np.ndarray], list[int]]:
    """`({name: [P, S]}, the N that make sense)` of one method at one temperature."""
    names = [name for name in ("rm_score", "gold") if name == "rm_score" or rows[0].get(name) is not None]
    values = {name: matrix(rows, name)[1] for name in names}
    here = [n for n in sizes if n == 1] if rows[0].get("temperature") == 0 else list(sizes)
    check_sizes(here, values["rm_score"].shape[1], f"{rows[0]['method']} at temperature {rows[0].get('temperature')}")
    return values, here


def _cell(values: Mapping[str, np.ndarray], n: int, level: float, resamples: int, seed: int) -> dict:
    weights = np.array([best_weights(scores, n) for scores in values["rm_score"]])
    best = {name: bootstrap_mean((weights * v).sum(1), level, resamples, seed)._asdict() for name, v in values.items()}
    return {
        "samples": weights.shape[1],
        "prompts": len(weights),
        **best,
        "kl_bound": math.log(n) - (n - 1) / n,
    }


def pick_best(rows: Sequence[Mapping], n: int, method: str = "") -> list[dict]:
    """The response with the best RM score among each prompt's first `n`; of equal ones the first.

    Args:
        rows: of one method at one temperature.
        n: at most the samples stored.
        method: what the picked rows are called; by default "<method> best-of-<n>".

    Raises:
        InputError: as `best_of_n`.
    """
    methods = {row["method"] for row in rows}
    if len(methods) > 1 or len({row.get("temperature") for row in rows}) > 1:
        raise InputError(f"best of {n}: rows of {', '.join(sorted(methods))}: give one method at one temperature")
    if not rows:
        return []
    check_sizes([n], matrix(rows, "rm_score")[1].shape[1], rows[0]["method"])
    best: dict[str, Mapping] = {}
    for row in sorted(rows, key=lambda row: row.get("sample", 0)):
        key = row.get("id", row["prompt"])
        if row.get("sample", 0) < n and (key not in best or row["rm_score"] > best[key]["rm_score"]):
            best[key] = row
    order = dict.fromkeys(row.get("id", row["prompt"]) for row in rows)
    return [dict(best[key]) | {"method": method or f"{rows[0]['method']} best-of-{n}"} for key in order]


def check_sizes(sizes: Sequence[int], samples: int, source: str) -> None:
    """Raises `InputError` for an N below 1 or above the samples there are of each prompt."""
    for n in sizes:
        if n < 1:
            raise InputError(f"best_of {n}: give at least 1")
        if n > samples:
            raise InputError(
                f"best_of {n}: {source} has {samples} samples a prompt: give at most {samples}, or --eval_samples {n}"
            )
