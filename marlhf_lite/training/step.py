"""One update of MA-PPO: from a scored rollout to gradients (paper, Algorithm 1).

With one optimizer step per rollout the old log-probabilities and values *are* the new ones, detached: policy and critic
each run forward once and backward once, and nothing else does. More steps, or whitening over the whole update, need
the old ones beforehand: `freeze` runs one forward pass more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from marlhf_lite.config.options import MacroConfig, PPOConfig, RolloutConfig
from marlhf_lite.macro import (
    MacroActions,
    clip_scores,
    gae,
    kl_per_token,
    kl_rewards,
    macro_rewards,
    macro_values,
    policy_loss,
    value_loss,
    whiten,
)
from marlhf_lite.training.rollout import Rollout


def shape_scores(rollout: Rollout, options: RolloutConfig) -> Tensor:
    """Return the scores that are trained on, [B]: clamped, less the penalty of a missing EOS."""
    scores = clip_scores(rollout.scores, options.score_clip or None)
    return scores - options.missing_eos_penalty * (~rollout.ended).float()


@dataclass(frozen=True)
class Estimate:
    """Advantages and returns of a batch, per macro action: both [B, S], 0 on padding."""

    advantages: Tensor
    returns: Tensor

    def select(self, rows: slice | Tensor) -> Estimate:
        return Estimate(self.advantages[rows], self.returns[rows])


def estimate(
    batch: Rollout, macro: MacroActions, logprobs: Tensor, values: Tensor, how: MacroConfig, ppo: PPOConfig
) -> Estimate:
    """KL-shaped macro rewards and macro values into GAE (section 3.2.2, Appendix D.1). Inputs [B, T], no gradient.

    `batch.rewards` are the shaped scores, see `shape_scores`.
    """
    beta = ppo.kl_coef if ppo.kl_in == "reward" else 0.0
    token_rewards = kl_rewards(logprobs, batch.ref_logprobs, batch.mask, beta, ppo.kl_estimator)
    rewards = macro_rewards(token_rewards, batch.rewards, macro, how.reward_pooling, how.rho, sigma=how.sigma)
    return Estimate(*gae(rewards, macro_values(values, macro, how.sigma), macro.mask, ppo.gamma, ppo.lam))


@dataclass(frozen=True)
class Pass:
    """What the models said of a micro-batch, all [B, T]."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor

    @classmethod
    def cat(cls, parts: list[Pass]) -> Pass:
        return cls(*(torch.cat([getattr(p, name) for p in parts]) for name in ("logprobs", "entropy", "values")))

    def detach(self) -> Pass:
        return Pass(self.logprobs.detach(), self.entropy.detach(), self.values.detach())

    def finite(self) -> tuple[Pass, list[str]]:
        """This pass with 0 for NaN and ±inf, so that every process can go on, and the names of what had any."""
        named = {"policy log-probabilities": self.logprobs, "critic values": self.values}
        bad = [name for name, x in named.items() if not x.detach().isfinite().all()]
        return (Pass(*(torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in vars(self).values())) if bad else self), bad


def replace_nonfinite_ref_logprobs(rollout: Rollout) -> tuple[Rollout, list[str]]:
    """The rollout with 0 for reference log-probabilities that are NaN or ±inf, and their name if there are any."""
    if rollout.ref_logprobs[rollout.mask].isfinite().all():
        return rollout, []
    finite = torch.nan_to_num(rollout.ref_logprobs, 0.0, 0.0, 0.0)
    return replace(rollout, ref_logprobs=finite), ["reference log-probabilities"]


def run_models(actors: nn.Module, batch: Rollout, ppo: PPOConfig) -> Pass:
    """One forward pass of policy and critic (`ActorCritic`), with gradients where they are on. Padding is 0."""
    part = batch.trim()
    temperature = ppo.temperature if ppo.logprobs_at_temperature else 1.0
    logprobs, entropy, scores = actors(part.tokens, part.attention_mask, part.mask.shape[1], temperature)
    made = (logprobs, entropy, part.before_tokens(scores))
    return Pass(*(batch.widen(x.masked_fill(~part.mask, 0.0)) for x in made))


@torch.no_grad()
def freeze(
    actors: nn.Module, rollout: Rollout, macro: MacroActions, how: MacroConfig, ppo: PPOConfig, reduce: Callable
) -> tuple[Rollout, Pass, Estimate, list[str]]:
    """The rollout with old log-probabilities and values, the pass they come from, the estimate for all its steps, and
    the names of what was not finite.

    `reduce` sums a tensor over processes, for whitening.
    """
    rows = torch.arange(len(rollout)).split(ppo.micro_batch_size)
    before, bad = Pass.cat([run_models(actors, rollout.select(r), ppo) for r in rows]).finite()
    made = estimate(rollout, macro, before.logprobs, before.values, how, ppo)
    if ppo.whiten:
        made = replace(made, advantages=whiten(made.advantages, macro.mask, reduce))
    return replace(rollout, logprobs=before.logprobs, values=before.values), before, made, bad


def needs_freeze(ppo: PPOConfig) -> bool:
    """Whether an update has several optimizer steps, or whitens: then old values must be kept."""
    return ppo.num_ppo_epochs > 1 or ppo.num_mini_batches > 1 or ppo.whiten


@dataclass(frozen=True)
class Losses:
    """Losses of a micro-batch (scalars with gradients), and its stats: sums over terms divided by `counts`."""

    policy: Tensor
    value: Tensor
    stats: dict[str, float]


def compute_losses(
    now: Pass,
    batch: Rollout,
    macro: MacroActions,
    made: Estimate,
    how: MacroConfig,
    ppo: PPOConfig,
    counts: Tensor,
) -> Losses:
    """Losses of one micro-batch, divided by `counts` (see `loss_normalizers`) of the whole optimizer step."""
    old_logprobs = now.logprobs.detach() if batch.logprobs is None else batch.logprobs
    old_values = now.values.detach() if batch.values is None else batch.values
    policy, on_policy = policy_loss(
        now.logprobs,
        old_logprobs,
        made.advantages,
        macro,
        ppo.cliprange,
        how.ratio,
        normalizer=counts[0],
    )
    value, on_value = value_loss(
        now.values,
        old_values,
        made.returns,
        macro,
        ppo.cliprange_value or None,
        how.value_target,
        how.sigma,
        normalizer=counts[1],
    )
    if ppo.kl_in == "loss":
        terms = kl_per_token(now.logprobs, batch.ref_logprobs.detach(), batch.mask, ppo.kl_estimator)
        policy = policy + ppo.kl_coef * terms.sum() / counts[2]
    stats = {
        "policy_loss": policy.item(),
        "value_loss": value.item(),
        "clip_fraction": (on_policy["clip_fraction"] * on_policy["count"] / counts[0]).item(),
        "value_clip_fraction": (on_value["clip_fraction"] * on_value["count"] / counts[1]).item(),
    }
    return Losses(policy, value, stats)


def loss_normalizers(macro: MacroActions, how: MacroConfig) -> Tensor:
    """[3] what the policy loss, the value loss and a KL in the loss average over: tokens, or macro actions."""
    tokens, actions = macro.token_mask.sum(), macro.mask.sum()
    by_token = (how.ratio == "token", how.value_target == "token", True)
    return torch.stack([tokens if token else actions for token in by_token]).float()
