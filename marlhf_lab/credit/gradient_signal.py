"""Signal and noise of one batch's policy gradient along a direction that improves the reward.

A batch's gradient is the sum over its tokens of Â_t ∇ log π(a_t | s_t). Along a direction u it is the sum of Â_t d_t,
where d_t is the slope of log π(a_t | s_t) along u. So one pass along u serves all estimators of the advantage: they
differ only in the weights Â_t. A batch's signal is its mean projection over batches, its noise their
standard deviation.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.evaluation.statistics import Interval, percentile_interval
from marlhf_lite.experiments.named_rules import make_rule
from marlhf_lite.training.experience import ModelOutputs
from marlhf_lite.training.objectives import build_objective
from marlhf_lite.training.rollout import Rollout

RESAMPLES = 10_000


def token_advantages(
    rollout: Rollout, values: Tensor, n: int, lam: float, sigma: str = "equal", objective: str = ""
) -> Tensor:
    """[B, T] advantages that PPO over macro actions of n tokens gives each token, for these values [B, T].

    `sigma` weighs the values inside a macro action: `equal` is their mean, `start` the first of them. `objective` is
    the option of that name. The policy is still the reference, so there is no KL, and the scores are the only rewards.
    """
    options, zeros = (
        PPOTrainerConfig(n=str(n), sigma=sigma, lam=lam),
        torch.zeros(rollout.mask.shape),
    )
    made = build_objective(objective, options)
    from_reference = Rollout(**vars(rollout) | {"ref_logprobs": zeros})
    batch = made.batch(from_reference, make_rule(options)(rollout.mask))
    old = made.advantages(batch, ModelOutputs(zeros, zeros, values.masked_fill(~rollout.mask, 0.0)))
    return batch.steps.broadcast(old.advantages).masked_fill(~rollout.mask, 0.0)


@torch.no_grad()
def slopes(
    logprobs: Callable[[], Tensor], parameters: Sequence[Tensor], direction: Tensor, step: float
) -> Tensor:
    """[B, T] slopes of log-probabilities along a direction [W] of the parameters, by a central difference.

    `logprobs` computes them with the parameters as they are; these are moved by ± `step` times the direction and put
    back.
    """
    parts = direction.split([p.numel() for p in parameters])
    values, kept = [], [p.detach().clone() for p in parameters]
    try:
        for sign in (1.0, -1.0):
            for p, start, part in zip(parameters, kept, parts, strict=True):
                p.copy_(start + sign * step * part.view_as(p))
            values.append(logprobs().double())
    finally:
        for p, start in zip(parameters, kept, strict=True):
            p.copy_(start)
    return (values[0] - values[1]) / (2 * step)


def projection(advantages: Tensor, slope: Tensor, mask: Tensor) -> float:
    """The gradient of the mean over tokens of Â log π, along the direction of `slope` [B, T]."""
    return float((advantages.double() * slope)[mask].sum() / mask.sum())


def signal_to_noise(projections: Sequence[float]) -> float:
    """Mean of projections over batches (or answers), over their standard deviation (N − 1)."""
    return float(np.mean(projections) / np.std(projections, ddof=1))


def drawn_signals(*projections: Sequence[float], resamples: int = RESAMPLES) -> np.ndarray:
    """Bootstrap `signal_to_noise` of estimators [N]: [estimators, resamples]; all get the same rows in a draw."""
    every, rng, drawn = np.array(projections), np.random.default_rng(0), []
    for _ in range(resamples):
        some = every[:, rng.integers(every.shape[1], size=every.shape[1])]
        drawn.append(some.mean(1) / some.std(1, ddof=1))
    return np.transpose(drawn)


def ratio_of_signals(
    projections: Mapping[str, Sequence[float]], ours: str, theirs: str, **options: int
) -> Interval:
    """Signal-to-noise of one estimator over another's on the same batches, with a bootstrap over batches."""
    pair = projections[ours], projections[theirs]
    one, other = drawn_signals(*pair, **options)
    return percentile_interval(signal_to_noise(pair[0]) / signal_to_noise(pair[1]), one / other)


def difference_of_signals(
    ours: Sequence[float], theirs: Sequence[float], **options: int
) -> Interval:
    """Signal-to-noise of one estimator minus another's on the same answers, with a bootstrap over answers."""
    one, other = drawn_signals(ours, theirs, **options)
    return percentile_interval(signal_to_noise(ours) - signal_to_noise(theirs), one - other)
