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
    """[B, T] advantages that PPO over macro actions of n tokens gives each token, for these values; 0 on padding.

    The policy is taken to be the reference, so there is no KL, and the scores are the only rewards.

    Args:
        rollout: B responses with their scores.
        values: [B, T] V before each token.
        n: tokens of a macro action.
        lam: GAE's λ.
        sigma: how the values inside a macro action are weighed: `equal` is their mean, `start` the first of them.
        objective: the option `--objective`, such as `sae`; empty for PPO and MA-PPO.
    """
    options = PPOTrainerConfig(n=str(n), sigma=sigma, lam=lam)
    made_objective = build_objective(objective, options)
    # There is no KL if policy and reference have equal log-probabilities, so all of them may be 0.
    zeros = torch.zeros(rollout.mask.shape)
    from_reference = Rollout(**vars(rollout) | {"ref_logprobs": zeros})
    batch = made_objective.batch(from_reference, make_rule(options)(rollout.mask))
    outputs = ModelOutputs(
        logprobs=zeros, entropy=zeros, values=values.masked_fill(~rollout.mask, 0.0)
    )
    # One advantage for each step, which is a macro action, or a token if the objective says so.
    of_steps = made_objective.advantages(batch, outputs).advantages
    return batch.steps.broadcast(of_steps).masked_fill(~rollout.mask, 0.0)


@torch.no_grad()
def slopes(
    logprobs: Callable[[], Tensor], parameters: Sequence[Tensor], direction: Tensor, step: float
) -> Tensor:
    """[B, T] slopes of log-probabilities along a direction [W] of the parameters, by a central difference.

    The parameters are moved by ± `step` times the direction and then put back, even if `logprobs` fails.

    Args:
        logprobs: computes the log-probabilities [B, T] with the parameters as they are at that moment.
        parameters: all of them together have W numbers.
        direction: [W], in the order of `parameters`.
        step: how far the parameters move, in lengths of the direction.
    """
    parts = direction.split([parameter.numel() for parameter in parameters])
    starts = [parameter.detach().clone() for parameter in parameters]

    def logprobs_moved_by(distance: float) -> Tensor:
        for parameter, start, part in zip(parameters, starts, parts, strict=True):
            parameter.copy_(start + distance * part.view_as(parameter))
        return logprobs().double()

    try:
        ahead = logprobs_moved_by(step)
        behind = logprobs_moved_by(-step)
    finally:
        for parameter, start in zip(parameters, starts, strict=True):
            parameter.copy_(start)
    return (ahead - behind) / (2 * step)


def projection(advantages: Tensor, slope: Tensor, mask: Tensor) -> float:
    """The gradient of the mean of Â log π over tokens, along the direction in which log π has these slopes [B, T]."""
    return float((advantages.double() * slope)[mask].sum() / mask.sum())


def signal_to_noise(projections: Sequence[float]) -> float:
    """Mean of projections over batches (or answers), over their standard deviation (N − 1)."""
    return float(np.mean(projections) / np.std(projections, ddof=1))


def drawn_signals(*projections: Sequence[float], resamples: int = RESAMPLES) -> np.ndarray:
    """Draw batches (or answers) with replacement, and return each draw's `signal_to_noise` of every estimator.

    projections: [N] of each estimator, on the same batches; all estimators get the same batches in a draw.
    Returns [estimators, resamples].
    """
    of_all = np.array(projections)  # [estimators, N]
    count = of_all.shape[1]
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(resamples):
        some = of_all[:, generator.integers(count, size=count)]
        drawn.append(some.mean(1) / some.std(1, ddof=1))
    return np.transpose(drawn)


def ratio_of_signals(
    projections: Mapping[str, Sequence[float]], ours: str, theirs: str, resamples: int = RESAMPLES
) -> Interval:
    """Signal-to-noise of one estimator over another's on the same batches, with a bootstrap over batches.

    projections: name of an estimator -> [N], a number for each batch; ours, theirs: two of these names.
    """
    one, other = drawn_signals(projections[ours], projections[theirs], resamples=resamples)
    ratio = signal_to_noise(projections[ours]) / signal_to_noise(projections[theirs])
    return percentile_interval(ratio, one / other)


def difference_of_signals(
    ours: Sequence[float], theirs: Sequence[float], resamples: int = RESAMPLES
) -> Interval:
    """Signal-to-noise of one estimator minus another's on the same answers, with a bootstrap over answers.

    ours, theirs: [N] projections of the answers' gradients.
    """
    one, other = drawn_signals(ours, theirs, resamples=resamples)
    return percentile_interval(signal_to_noise(ours) - signal_to_noise(theirs), one - other)
