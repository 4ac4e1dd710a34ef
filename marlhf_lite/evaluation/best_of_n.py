"""Best-of-N (rejection sampling): of N responses, keep the one with the best score by the reward model (Figure 8).

S ≥ N samples of a prompt give an unbiased estimate of the expected best of N: each sample counts by the share of the
N-subsets in which it is the best. So one set of samples serves every N.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from marlhf_lite.evaluation.scores import score_columns, score_matrix, to_frame
from marlhf_lite.evaluation.statistics import bootstrap_mean, finite
from marlhf_lite.utils.errors import InputError

SIZES = (1, 4, 8, 16, 32)
RESAMPLES = 2000  # of the bootstrap over prompts


def best_weights(scores: Sequence[float], n: int) -> np.ndarray:
    """Return for each of S samples the chance that it is the best of `n` samples, drawn from all S, as an array [S].

    The draws are without replacement, and the chances add up to 1. A sample with i others below it has the chance
    C(i, n−1) / C(S, n): its n − 1 companions must be among these i. Samples with equal scores share their chances.
    Raises `InputError` for an n outside 1 to S, and for `scores` [S] that are not finite.
    """
    scores = finite("scores", scores)
    if not 1 <= n <= len(scores):
        what = f"there are {len(scores)} samples a prompt"
        raise InputError(f"best_of {n}: {what}: give 1 to {len(scores)}, or --eval_samples {n}")
    # Sort the samples from the lowest score to the highest: the chance of the one in place i, if all scores differed.
    chance_in_place = []
    for i in range(len(scores)):
        chance_in_place.append(math.comb(i, n - 1) / math.comb(len(scores), n))
    # Samples with the same score are one level. Each of them gets the mean chance of the places that the level takes.
    _, level = np.unique(scores, return_inverse=True)
    level_in_place = level[np.argsort(scores, kind="stable")]
    chance_of_level = np.bincount(level_in_place, chance_in_place) / np.bincount(level)
    return chance_of_level[level]


def best_of_n(
    responses: pd.DataFrame | Sequence[Mapping], sizes: Sequence[int] = SIZES, by: str = ""
) -> list[dict]:
    """Return scores of best-of-N for every method, temperature and N, as in Figure 8, with intervals over prompts.

    Args:
        responses: several samples of each prompt, as `read_responses` gives them.
        sizes: the values of N.
        by: the score that picks the best response. By default that of the reward model; if there is none, that of
            another reward, and if there is none either, gold. All other scores are those of the response that was
            picked, so the gold score may fall while the score that picks rises.

    Returns:
        Dicts with method, temperature, n, samples, prompts, by, each score that is known (mean, low, high, level),
        and kl_bound: log N − (N−1)/N nats, an upper bound on the KL of best-of-N to the policy that it samples from.
        Greedy responses (temperature 0) are all the same, so they have only N = 1.

    Raises:
        InputError: an N above the number of stored samples, or prompts with different numbers of samples.
    """
    frame = to_frame(responses)
    by = by or score_that_picks(frame)
    cells = []
    groups = frame.groupby(["method", "temperature"], sort=False, dropna=False)
    for (method, temperature), group in groups:
        # Each score is [prompts, samples]. Those that no response of this method has are left out.
        scores = {by: score_matrix(group, by).to_numpy()}
        for name in score_columns(group):
            if name != by and group[name].notna().any():
                scores[name] = score_matrix(group, name).to_numpy()
        prompts, samples = scores[by].shape
        for n in sizes:
            if temperature == 0 and n > 1:  # all samples are the same
                continue
            # How likely each sample is the best of n; other scores are averaged with the same chances.
            weights = np.array([best_weights(row, n) for row in scores[by]])
            cell = {
                "method": method,
                "temperature": temperature,
                "n": n,
                "samples": samples,
                "prompts": prompts,
                "by": by,
            }
            for name, values in scores.items():
                of_prompts = (weights * values).sum(1)
                cell[name] = bootstrap_mean(of_prompts, RESAMPLES)._asdict()
            cell["kl_bound"] = math.log(n) - (n - 1) / n
            cells.append(cell)
    return cells


def score_that_picks(responses: pd.DataFrame) -> str:
    """Return the column of the score that the policies were trained on.

    It is rm_score; if responses have no such score, the column of another reward; and if they have none, gold.
    """
    there = [name for name in score_columns(responses) if responses[name].notna().any()]
    trained_on = [name for name in there if name != "gold"]
    return (trained_on or there or ["rm_score"])[0]
