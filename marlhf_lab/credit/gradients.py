"""Policy gradients of advantage estimators, compared with an unbiased one: direction and noise.

An estimator turns the scores and values of a rollout into advantages, and these into a gradient of the policy. The
ladder of estimators (presets `estimators/E0` …) changes one thing at a time: E0 is token-level PPO; E1 has λ^(1/5)
for λ; E2 has λ at every fifth token and 1 between (segment-level advantage estimation); E3 has macro actions with the
value of their first token as baseline; E4, MA-PPO, with the mean of their values; E5 also averages KL rewards in a
macro action. Beside it MC has Monte-Carlo returns, λ = 1, and VC a critic with its own λ (value calibration, arXiv
2503.01491).

The reference is REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740): it needs no critic, and
its expectation is the gradient of the objective, score minus β·KL. This is exact if log-probabilities are those of the
sampling distribution (`logprobs_at_temperature`, no top-k or top-p), and nearly exact otherwise.

Each of P prompts is answered K times; the k-th answers to all prompts are replicate k. The mean of products of
*different* replicates is free of noise, so noise makes no gradient look longer than it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from marlhf_lab.credit.credit import RESAMPLES
from marlhf_lab.credit.monte_carlo import continue_responses
from marlhf_lite.config.method import MacroConfig, PPOConfig, PPOTrainerConfig
from marlhf_lite.config.parser import preset_file
from marlhf_lite.evaluation.statistics import Interval, percentile_interval
from marlhf_lite.experiments.named_rules import make_rule
from marlhf_lite.macro import TerminationRule, Whole, kl_per_token
from marlhf_lite.training.experience import Batch, ModelOutputs
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.objectives import build_objective
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import scores_for_training
from marlhf_lite.training.rollout import (
    Rollout,
    concatenate,
    merged_adapter,
    nonfinite_probabilities_refused,
)
from marlhf_lite.utils.run_folder import read_yaml

REFERENCE = "RLOO"


@dataclass(frozen=True)
class Estimator:
    """What turns a rollout into advantages; whitening over an update is left out."""

    config: PPOTrainerConfig
    rule: TerminationRule

    @property
    def objective(self) -> Objective:
        # Not `make_objective`: a ladder also changes what has no effect.
        return build_objective(self.config.objective, self.config)

    def batch(self, trainer: PPOTrainer, rollout: Rollout) -> Batch:
        """The trainer's rollout, segmented by this estimator's rule."""
        return self.objective.batch(rollout, trainer.segment(rollout, self.rule, self.config))


def preset_estimator(name: str, config: PPOTrainerConfig, seed: int = 0) -> Estimator:
    """The estimator of the preset `estimators/<name>`, which changes `config`; its macro actions begin as by default.

    Raises `InputError` for an unknown name.
    """
    source = f"estimator {name}"
    values = read_yaml(preset_file(f"estimators/{name}", source), source)
    values |= {"n": str(values["n"])} if "n" in values else {}  # YAML reads a number
    values = {
        f.name: values[f.name]
        for kind in (PPOConfig, MacroConfig)
        for f in fields(kind)
        if f.name in values
    }
    # they go together
    values["objective"] = ",".join(filter(None, [config.objective, values.get("objective")]))
    config = replace(config, **vars(MacroConfig()) | values)
    return Estimator(config, make_rule(config, seed))


def sample_replicates(trainer: PPOTrainer, prompts: Sequence[str], replicates: int) -> Rollout:
    """Scored responses of the trainer's policy: row k·P + p is answer k to prompt p; K is at least 4, better 16."""
    policy, tokenizer = trainer.models.policy, trainer.tokenizer
    policy.eval()
    with merged_adapter(policy.model), nonfinite_probabilities_refused():
        size = max(256 // replicates, 1)
        groups = [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]
        arguments = ((group, [[]] * len(group), replicates, trainer.sampling) for group in groups)
        parts = [continue_responses(policy.model, tokenizer, *each) for each in arguments]
    policy.train()
    rollout = concatenate(parts, tokenizer.pad_token_id)
    by_replicate = torch.arange(len(rollout)).reshape(len(prompts), replicates).T.flatten()
    return trainer.score(rollout.select(by_replicate))


def policy_gradients(
    trainer: PPOTrainer,
    rollout: Rollout,
    replicates: int,
    estimators: Mapping[str, Estimator],
    progress="gradients",
) -> dict[str, Tensor]:
    """The gradient of the policy loss on each replicate, [K, W] in float32 on the CPU, by estimator and for RLOO.

    `rollout` is that of `sample_replicates`. Losses, values and advantages are the trainer's own; all replicates share
    one normalizer, so that their mean is the gradient of all of them.
    """
    reference = Estimator(replace(trainer.config, **vars(MacroConfig())), Whole())
    everyone = {**estimators, REFERENCE: reference}
    counts = {
        name: one.objective.counts(one.batch(trainer, rollout)) / replicates
        for name, one in everyone.items()
    }
    advantages = leave_one_out(total_returns(trainer, rollout).reshape(replicates, -1)).flatten()
    gradients: dict[str, list[Tensor]] = {name: [] for name in everyone}
    rows = torch.arange(len(rollout)).reshape(replicates, -1)
    for replicate in tqdm(rows, desc=progress, disable=not progress):
        sums = dict.fromkeys(gradients, 0.0)
        for part in replicate.split(trainer.state.micro_batch.now):
            responses = rollout.select(part)
            outputs = trainer.compute_outputs(responses)
            for name, one in everyone.items():
                weights = advantages[part] if one is reference else None
                sums[name] += _gradient(trainer, one, responses, outputs, weights, counts[name])
        for name, gradient in sums.items():
            gradients[name].append(gradient)
    return {name: torch.stack(parts) for name, parts in gradients.items()}


def _gradient(
    trainer, estimator, rollout, outputs: ModelOutputs, advantages: Tensor | None, normalizers
) -> Tensor:
    """[W] of one micro-batch; `advantages` [B] of whole responses replace the estimator's own."""
    batch = estimator.batch(trainer, rollout)
    old = estimator.objective.advantages(batch, outputs)
    if advantages is not None:
        old = replace(old, advantages=advantages[:, None].to(old.advantages) * batch.steps.mask)
    loss, _ = estimator.objective.losses(batch, outputs, old, normalizers)
    parts = torch.autograd.grad(loss, trainer.parameters["policy"], retain_graph=True)
    return torch.cat([part.flatten() for part in parts]).float().cpu()


@torch.no_grad()
def total_returns(trainer: PPOTrainer, rollout: Rollout) -> Tensor:
    """[B] what a response earns in all: its score minus β times its KL."""
    # over turns, if turns are paid
    scores = scores_for_training(rollout, trainer.config).reshape(len(rollout), -1).sum(1)
    kl = []
    for part in torch.arange(len(rollout)).split(trainer.state.micro_batch.now):
        batch = rollout.select(part)
        logprobs = trainer.compute_outputs(batch).logprobs
        kl.append(
            kl_per_token(
                logprobs, batch.ref_logprobs, batch.mask, trainer.objective.variant.kl_estimator
            ).sum(1)
        )
    return scores - trainer.config.kl_coef * torch.cat(kl).to(scores)


def leave_one_out(returns: Tensor) -> Tensor:
    """Each return [K, P] minus the mean of the K − 1 others to the same prompt."""
    count = len(returns)
    return (returns - returns.mean(0)) * count / (count - 1)


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientComparison:
    """An estimator's gradient against the reference's."""

    # length of the expected gradient along the reference's, as a share of it: the signal that is
    # left
    kept: Interval
    # cosine of the two expected gradients: 1 if the estimator is not biased in direction
    direction: Interval
    # expected cosine, to first order, of the gradient of one batch: bias and noise together
    batch: Interval
    # variance of the gradient of one batch, as a multiple of its squared expected length
    noise: Interval


def compare_gradients(
    gradients: Tensor, reference: Tensor, batch_share: float = 1.0
) -> GradientComparison:
    """Compare gradients of K independent replicates with the reference's of the same replicates.

    Args:
        gradients, reference: [K, W], K >= 4.
        batch_share: responses of a training batch over those of a replicate; the variance falls as one over it.

    Returns:
        Intervals of a bootstrap over replicates, for these prompts only. NaN if noise hides the signal: sample more
        replicates.
    """
    within, cross, other = (
        _products(*pair) for pair in ((gradients,) * 2, (gradients, reference), (reference,) * 2)
    )
    count = len(gradients)
    weights = (
        np.random.default_rng(0)
        .multinomial(count, np.full(count, 1 / count), RESAMPLES)
        .astype(float)
    )
    point = _cosines(np.ones((1, count)), within, cross, other, batch_share)
    draws = _cosines(weights, within, cross, other, batch_share)
    return GradientComparison(
        *(percentile_interval(x[0], d) for x, d in zip(point, draws, strict=True))
    )


def _products(a: Tensor, b: Tensor) -> np.ndarray:
    """[K, K] inner products in float64, a piece of the parameters at a time."""
    pieces = zip(a.split(2**16, dim=1), b.split(2**16, dim=1), strict=True)
    return sum((x.double() @ y.double().T).numpy() for x, y in pieces)


def _cosines(
    weights: np.ndarray, within, cross, other, batch_share: float
) -> tuple[np.ndarray, ...]:
    """Share kept, direction, batch cosine and noise [n] when replicates count as often as `weights` [n, K] say."""
    length, along, reference = (_between(weights, x) for x in (within, cross, other))
    variance = ((weights @ np.diag(within)) / weights.sum(1) - length) / batch_share
    # If noise hides a length, its estimate may be below 0: then there is nothing to compare.
    length, reference = (np.where(x > 0, x, np.nan) for x in (length, reference))
    direction, batch = (
        along / np.sqrt(length * reference),
        along / np.sqrt((length + variance) * reference),
    )
    return along / reference, direction, batch, variance / length


def _between(weights: np.ndarray, products: np.ndarray) -> np.ndarray:
    """[n] the weighted mean of products of different replicates."""
    total = np.einsum("ni,ij,nj->n", weights, products, weights) - weights**2 @ np.diag(products)
    pairs = weights.sum(1) ** 2 - (weights**2).sum(1)
    return total / np.where(pairs > 0, pairs, np.nan)  # a draw may consist of one replicate
