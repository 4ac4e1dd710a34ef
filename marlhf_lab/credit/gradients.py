"""Policy gradients of advantage estimators, compared with an unbiased one: direction and noise.

An estimator turns the scores and values of a rollout into advantages, and these into a gradient of the policy. The
ladder of estimators (presets `estimators/E0` …) changes one thing at a time: E0 is token-level PPO; E1 has λ^(1/5)
instead of λ; E2 has λ at every fifth token and 1 between (segmental advantage estimation); E3 has macro actions, and
the value of an action's first token as its baseline; E4, MA-PPO, has the mean of its values as baseline; E5 also
averages KL rewards in a macro action. Two estimators stand beside the ladder: MC has Monte-Carlo returns (λ = 1), and
VC gives the critic its own λ (value calibration, arXiv 2503.01491).

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
    """Options and a rule that turn a rollout into advantages. Advantages are not whitened."""

    config: PPOTrainerConfig
    rule: TerminationRule

    @property
    def objective(self) -> Objective:
        # Not `make_objective`, which refuses options that have no effect with an objective: a ladder may change such
        # options, too.
        return build_objective(self.config.objective, self.config)

    def batch(self, trainer: PPOTrainer, rollout: Rollout) -> Batch:
        """The trainer's rollout, segmented by this estimator's rule."""
        return self.objective.batch(rollout, trainer.segment(rollout, self.rule, self.config))


def preset_estimator(name: str, config: PPOTrainerConfig, seed: int = 0) -> Estimator:
    """The estimator of the preset `estimators/<name>`: `config`, changed by the preset.

    All options of macro actions that the preset does not name have their defaults, whatever `config` says. `seed` is
    used if the rule draws lengths at random. Raises `InputError` for an unknown name.
    """
    source = f"estimator {name}"
    preset = read_yaml(preset_file(f"estimators/{name}", source), source)
    if "n" in preset:
        # The option is a text, because it can also be "inf", and YAML reads 5 as a number.
        preset["n"] = str(preset["n"])
    # A preset may also hold options of commands, which an estimator has no use for.
    names = {option.name for kind in (PPOConfig, MacroConfig) for option in fields(kind)}
    changes = {key: value for key, value in preset.items() if key in names}
    # If both `config` and the preset name an objective, both hold: the names are joined by a comma.
    objectives = [config.objective, changes.get("objective")]
    changes["objective"] = ",".join(objective for objective in objectives if objective)
    # First the defaults of macro actions, over them the preset.
    config = replace(config, **vars(MacroConfig()) | changes)
    return Estimator(config, make_rule(config, seed))


def sample_replicates(trainer: PPOTrainer, prompts: Sequence[str], replicates: int) -> Rollout:
    """Sample K = `replicates` responses to each of P prompts from the trainer's policy, and score them.

    Row k·P + p is answer k to prompt p. `compare_gradients` needs K of at least 4; 16 is better.
    """
    policy = trainer.models.policy
    tokenizer = trainer.tokenizer
    prompts_at_a_time = max(256 // replicates, 1)  # about 256 responses at a time
    parts = []
    policy.eval()
    with merged_adapter(policy.model), nonfinite_probabilities_refused():
        for start in range(0, len(prompts), prompts_at_a_time):
            some = list(prompts[start : start + prompts_at_a_time])
            # Prefixes without tokens, so whole responses are sampled.
            empty_responses = [[]] * len(some)
            parts.append(
                continue_responses(
                    policy.model, tokenizer, some, empty_responses, replicates, trainer.sampling
                )
            )
    policy.train()
    rollout = concatenate(parts, tokenizer.pad_token_id)
    # `continue_responses` returns the answers to a prompt next to each other (row p·K + k). Reorder the rows so that
    # the answers of a replicate are next to each other.
    by_replicate = torch.arange(len(rollout)).reshape(len(prompts), replicates).T.flatten()
    return trainer.score(rollout.select(by_replicate))


def policy_gradients(
    trainer: PPOTrainer,
    rollout: Rollout,
    replicates: int,
    estimators: Mapping[str, Estimator],
    progress: str = "gradients",
) -> dict[str, Tensor]:
    """The gradient of the policy loss on each of K replicates, for each estimator and for RLOO.

    Returns the name of an estimator (RLOO's is `REFERENCE`) -> [K, W], a gradient of W parameters for each replicate,
    in float32 on the CPU. Losses and values are the trainer's own. All replicates share one normalizer, so the mean of
    their gradients is the gradient of the whole rollout.

    Args:
        trainer: its policy, critic and options; nothing is trained.
        rollout: what `sample_replicates` returned.
        replicates: K, answers to each prompt.
        estimators: name to estimator; no name may be `REFERENCE`.
        progress: name of the progress bar; empty for none.
    """
    # RLOO gives a whole response one advantage, so for the reference a response is one macro action. `_gradient` gets
    # RLOO's advantages in place of those that this estimator would compute.
    reference = Estimator(replace(trainer.config, **vars(MacroConfig())), Whole())
    all_estimators = {**estimators, REFERENCE: reference}
    returns = total_returns(trainer, rollout).reshape(replicates, -1)
    rloo_advantages = leave_one_out(returns).flatten()
    normalizers = {}
    for name, estimator in all_estimators.items():
        # A loss is a sum over terms, divided by their number. Each replicate divides by a K-th of the number of terms
        # in the whole rollout, not by its own number.
        counts = estimator.objective.counts(estimator.batch(trainer, rollout))
        normalizers[name] = counts / replicates
    gradients: dict[str, list[Tensor]] = {name: [] for name in all_estimators}
    rows_of_replicates = torch.arange(len(rollout)).reshape(replicates, -1)
    for rows in tqdm(rows_of_replicates, desc=progress, disable=not progress):
        sums = dict.fromkeys(gradients, 0.0)
        for part in rows.split(trainer.state.micro_batch.now):
            responses = rollout.select(part)
            # One pass of the models serves all estimators.
            outputs = trainer.compute_outputs(responses)
            for name, estimator in all_estimators.items():
                advantages = rloo_advantages[part] if estimator is reference else None
                sums[name] += _gradient(
                    trainer, estimator, responses, outputs, advantages, normalizers[name]
                )
        for name, gradient in sums.items():
            gradients[name].append(gradient)
    return {name: torch.stack(parts) for name, parts in gradients.items()}


def _gradient(
    trainer: PPOTrainer,
    estimator: Estimator,
    responses: Rollout,
    outputs: ModelOutputs,
    advantages: Tensor | None,
    normalizers,
) -> Tensor:
    """[W] the gradient of the policy loss on a micro-batch of responses, in float32 on the CPU.

    If `advantages` [B], one for each response, are given, they replace those that the estimator computes. The graph of
    `outputs` is kept, because the next estimator needs it again.
    """
    batch = estimator.batch(trainer, responses)
    old = estimator.objective.advantages(batch, outputs)
    if advantages is not None:
        on_steps = advantages[:, None].to(old.advantages) * batch.steps.mask
        old = replace(old, advantages=on_steps)
    # `old` has the same outputs without a gradient, so all ratios are 1, as at the first step of an update. The loss
    # includes the critic's, which does not depend on the policy's parameters.
    loss, _ = estimator.objective.losses(batch, outputs, old, normalizers)
    parts = torch.autograd.grad(loss, trainer.parameters["policy"], retain_graph=True)
    return torch.cat([part.flatten() for part in parts]).float().cpu()


@torch.no_grad()
def total_returns(trainer: PPOTrainer, rollout: Rollout) -> Tensor:
    """[B] the total return of each response: its score minus β times its KL."""
    estimator_of_kl = trainer.objective.variant.kl_estimator
    # A response has one score, or, if each turn is rewarded, a score for each turn. Then their sum counts.
    scores = scores_for_training(rollout, trainer.config).reshape(len(rollout), -1).sum(1)
    kl_of_parts = []
    for rows in torch.arange(len(rollout)).split(trainer.state.micro_batch.now):
        part = rollout.select(rows)
        logprobs = trainer.compute_outputs(part).logprobs
        kl = kl_per_token(logprobs, part.ref_logprobs, part.mask, estimator_of_kl)
        kl_of_parts.append(kl.sum(1))
    return scores - trainer.config.kl_coef * torch.cat(kl_of_parts).to(scores)


def leave_one_out(returns: Tensor) -> Tensor:
    """[K, P] each return [K, P] minus the mean return of the K − 1 other answers to the same prompt."""
    count = len(returns)
    # With m the mean of all K: the mean of the others is (K m − r) / (K − 1), so r minus it is (r − m) K / (K − 1).
    return (returns - returns.mean(0)) * count / (count - 1)


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientComparison:
    """An estimator's gradient against the reference's."""

    # Length of the expected gradient along the reference's, as a share of it: the signal that is left.
    kept: Interval
    # Cosine of the two expected gradients: 1 if the estimator is not biased in direction.
    direction: Interval
    # Expected cosine, to first order, of the gradient of one batch: bias and noise together.
    batch: Interval
    # Variance of the gradient of one batch, as a multiple of its squared expected length.
    noise: Interval


def compare_gradients(
    gradients: Tensor, reference: Tensor, batch_share: float = 1.0
) -> GradientComparison:
    """Compare an estimator's gradients of K independent replicates with the reference's gradients of the same ones.

    Args:
        gradients, reference: [K, W], K >= 4.
        batch_share: how many times as many responses a training batch has as a replicate. The variance of a training
            batch's gradient is that of a replicate's, divided by this number.

    Returns:
        Intervals of a bootstrap over replicates, for these prompts only. NaN if noise hides the signal: sample more
        replicates.
    """
    products = GradientProducts(
        within=_inner_products(gradients, gradients),
        cross=_inner_products(gradients, reference),
        reference=_inner_products(reference, reference),
    )
    count = len(gradients)
    # [RESAMPLES, K] how often each draw of the bootstrap has each replicate
    times_drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    found = _comparison_of_draws(np.ones((1, count)), products, batch_share)
    draws = _comparison_of_draws(times_drawn.astype(float), products, batch_share)
    return GradientComparison(
        **{name: percentile_interval(found[name][0], draws[name]) for name in found}
    )


@dataclass(frozen=True)
class GradientProducts:
    """[K, K] inner products of replicates' gradients: row i and column j belong to replicates i and j."""

    within: np.ndarray  # of the estimator's with each other
    cross: np.ndarray  # of the estimator's with the reference's
    reference: np.ndarray  # of the reference's with each other


def _inner_products(a: Tensor, b: Tensor) -> np.ndarray:
    """[K, K] inner products of the rows of a and b [K, W] in float64."""
    # A piece of the parameters at a time, so that no whole gradient is copied to float64.
    pieces = zip(a.split(2**16, dim=1), b.split(2**16, dim=1), strict=True)
    return sum((x.double() @ y.double().T).numpy() for x, y in pieces)


def _comparison_of_draws(
    weights: np.ndarray, products: GradientProducts, batch_share: float
) -> dict[str, np.ndarray]:
    """The four numbers of `GradientComparison` for n draws of replicates, each [n].

    weights: [n, K] how often each draw has each replicate.
    """
    # Products of two different replicates estimate products of the two *expected* gradients, because their noise is
    # independent. The product of a replicate with itself adds the variance of its noise.
    squared_length = _mean_of_different(weights, products.within)
    along = _mean_of_different(weights, products.cross)
    squared_reference = _mean_of_different(weights, products.reference)
    mean_square = (weights @ np.diag(products.within)) / weights.sum(1)
    variance = (mean_square - squared_length) / batch_share
    # If noise hides a length, its estimate may be below 0: then there is nothing to compare.
    squared_length = np.where(squared_length > 0, squared_length, np.nan)
    squared_reference = np.where(squared_reference > 0, squared_reference, np.nan)
    return {
        "kept": along / squared_reference,
        "direction": along / np.sqrt(squared_length * squared_reference),
        "batch": along / np.sqrt((squared_length + variance) * squared_reference),
        "noise": variance / squared_length,
    }


def _mean_of_different(weights: np.ndarray, products: np.ndarray) -> np.ndarray:
    """[n] the weighted mean of products [K, K] of *different* replicates, which is free of their noise."""
    all_pairs = np.einsum("ni,ij,nj->n", weights, products, weights)
    total = all_pairs - weights**2 @ np.diag(products)  # without those of a replicate with itself
    pairs = weights.sum(1) ** 2 - (weights**2).sum(1)
    return total / np.where(pairs > 0, pairs, np.nan)  # a draw may consist of one replicate
