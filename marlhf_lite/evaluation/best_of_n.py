"""Best-of-N (rejection sampling): of N responses, keep the one with the best reward model score (Figure 8).

S ≥ N samples of a prompt give an unbiased estimate of the expected best of N: each sample counts by the share of the
N-subsets in which it is the best. So one set of samples serves every N.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from marlhf_lite.evaluation.scores import SCORES, score_matrix, to_frame
from marlhf_lite.evaluation.statistics import bootstrap_mean, finite
from marlhf_lite.utils.errors import InputError

SIZES = (1, 4, 8, 16, 32)
RESAMPLES = 2000  # of the bootstrap over prompts


def best_weights(scores: Sequence[float], n: int) -> np.ndarray:
    """Return [S] chances that a sample is the best of `n` drawn from all S without replacement; they add up to 1.

    The sample with i others below it has C(i, n−1) / C(S, n). Equal scores share their chances. Raises `InputError`
    for an n outside 1 to S, and for `scores` [S] that are not finite.
    """
    scores = finite("scores", scores)
    if not 1 <= n <= len(scores):
        what = f"there are {len(scores)} samples a prompt"
        raise InputError(f"best_of {n}: {what}: give 1 to {len(scores)}, or --eval_samples {n}")
    weight = [math.comb(i, n - 1) / math.comb(len(scores), n) for i in range(len(scores))]
    _, rank = np.unique(scores, return_inverse=True)
    shared = np.bincount(rank[np.argsort(scores, kind="stable")], weight) / np.bincount(rank)
    return shared[rank]


def best_of_n(
    responses: pd.DataFrame | Sequence[Mapping], sizes: Sequence[int] = SIZES
) -> list[dict]:
    """Return scores of best-of-N for every method, temperature and N, as in Figure 8, with intervals over prompts.

    The gold score is that of the response which the reward model picks, so it may fall while the RM score rises.
    Greedy responses (temperature 0) are all the same, so they have only N = 1.

    Returns:
        Dicts with method, temperature, n, samples, prompts, rm_score and if known gold (mean, low, high, level), and
        kl_bound: log N − (N−1)/N nats, an upper bound on the KL of best-of-N to the policy that it samples from.

    Raises:
        InputError: an N above the number of stored samples, or prompts with different numbers of samples.
    """
    cells, frame = [], to_frame(responses)
    for (method, temperature), group in frame.groupby(
        ["method", "temperature"], sort=False, dropna=False
    ):
        names = [
            name
            for name in SCORES
            if name == "rm_score" or (name in group and group[name].notna().any())
        ]
        scores = {name: score_matrix(group, name).to_numpy() for name in names}
        prompts, samples = scores["rm_score"].shape
        for n in (n for n in sizes if n == 1 or temperature != 0):
            weights = np.array([best_weights(row, n) for row in scores["rm_score"]])
            cell = {
                "method": method,
                "temperature": temperature,
                "n": n,
                "samples": samples,
                "prompts": prompts,
            }
            for name, values in scores.items():
                cell[name] = bootstrap_mean((weights * values).sum(1), RESAMPLES)._asdict()
            cells.append(cell | {"kl_bound": math.log(n) - (n - 1) / n})
    return cells
