"""What an update of PPO optimises, in four equations: rewards, advantages, and the two losses.

Published forms of them have names (see `objectives`), and a `Variant` says which of these forms are used. A subclass
changes an equation in another way: `rewards`, `estimate`, `policy_loss` or `value_loss`; `examples/my_objective.py` is
one. The trainer takes it as `objective=`, the command line as `--objective package.module:Class`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf_lite import macro
from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.macro._checks import clean
from marlhf_lite.training.experience import Batch, Experience, ModelOutputs
from marlhf_lite.training.rewards import scores_for_training
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.user_code import named_errors

LossAndStats = tuple[Tensor, dict[str, Tensor]]
OUR_STATS = ("clip_fraction", "approx_kl", "count")  # of `macro.policy_loss` and `macro.value_loss`


@dataclass(frozen=True)
class Variant:
    """The form of each equation; the defaults are MA-PPO's."""

    #: Every token has its own value, and λ counts at the bounds of macro actions.
    steps_are_tokens: bool = False
    #: λ of the advantages is 1 − 1 / (α · macro actions) of each response, with this α, instead of `--lam`.
    alpha_of_lam: float | None = None
    #: λ of the returns, to which the critic regresses, if it is not that of the advantages.
    lam_of_returns: float | None = None
    #: The mean of the losses: over all tokens (or macro actions), or over each "response" first.
    loss_mean: str = "token"
    #: Of the KL penalty: k1 is the log-ratio d itself, k3 is exp(−d) − 1 + d.
    kl_estimator: str = "k1"


@dataclass(frozen=True)
class Objective:
    """MA-PPO's equations, for steps 4 and 5 of an update: functions of tensors, without models and processes.

    Shapes: B responses, T response tokens, S steps. A step is a macro action; with n = 1 it is a token.
    """

    config: PPOTrainerConfig
    variant: Variant = Variant()
    user_name: str = ""  #: the value of `--objective`, if it names a user's class

    # -- the equations ------------------------------------------------------------------------------------------------

    def rewards(self, batch: Batch, outputs: ModelOutputs) -> Tensor:
        """R_τ [B, S]: r_t = −β (log π_old − log π_ref) of a step's tokens, and the score on the last step (3.2.2)."""
        config = self.config
        rollout = batch.rollout
        token_rewards = macro.kl_rewards(
            outputs.logprobs,
            rollout.ref_logprobs,
            rollout.mask,
            config.kl_coef,
            self.variant.kl_estimator,
        )
        return macro.macro_rewards(
            token_rewards,
            scores_for_training(rollout, config),
            batch.steps,
            config.reward_pooling,
            config.rho,
            config.sigma,
        )

    def estimate(
        self, rewards: Tensor, values: Tensor, batch: Batch, outputs: ModelOutputs | None = None
    ) -> tuple[Tensor, Tensor]:
        """Â_τ and Q̂_τ = Â_τ + V(ω_τ), each [B, S], from rewards and values [B, S] by GAE (Appendix E).

        δ_τ = R_τ + γ V(ω_{τ+1}) − V(ω_τ),  Â_τ = Σ_k (γλ)^k δ_{τ+k}. This equation does not read the `outputs`: the
        log-probabilities, entropies and values of the tokens [B, T]. A subclass may, and may leave the argument out.
        """
        advantages, returns = self.gae(rewards, values, batch, self.lam(batch))
        if self.variant.lam_of_returns is not None:  # with 1, returns are the plain sum of rewards
            _, returns = self.gae(rewards, values, batch, self.variant.lam_of_returns)
        return advantages, returns

    def policy_loss(
        self, batch: Batch, outputs: ModelOutputs, old: Experience, count: Tensor
    ) -> LossAndStats:
        """−min(ρ Â, clip(ρ, 1−ε, 1+ε) Â), with ρ = π / π_old of a token or of a macro action (Appendix E, 3.2.2).

        Return a loss and stats. The loss is the sum of the micro-batch's terms divided by `count`, the number of terms
        in the whole optimizer step. Stats are {}, those of `macro.policy_loss`, or your own numbers, each a mean over
        the responses of the micro-batch: a stat "ratio" is recorded as policy_ratio.
        """
        return macro.policy_loss(
            outputs.logprobs,
            old.logprobs,
            old.advantages,
            batch.steps,
            clip=self.config.cliprange,
            ratio=self.config.ratio,
            normalizer=count,
            mean=self.variant.loss_mean,
        )

    def value_loss(
        self, batch: Batch, outputs: ModelOutputs, old: Experience, count: Tensor
    ) -> LossAndStats:
        """½ max((V − Q̂)², (V_clipped − Q̂)²), of a token or of a macro action (Appendix E, Algorithm 1).

        Return a loss and stats, as `policy_loss` does.
        """
        return macro.value_loss(
            outputs.values,
            old.values,
            old.returns,
            batch.steps,
            clip=self.config.cliprange_value or None,  # 0 turns the clipping off
            target=self.config.value_target,
            sigma=self.config.sigma,
            normalizer=count,
            mean=self.variant.loss_mean,
        )

    # -- their parts --------------------------------------------------------------------------------------------------

    def batch(self, rollout: Rollout, macro_actions: macro.MacroActions) -> Batch:
        """The responses with the steps that are counted: the macro actions, or single tokens."""
        if self.variant.steps_are_tokens:
            return Batch(rollout, macro_actions, steps=macro_actions.single_tokens)
        return Batch(rollout, macro_actions, steps=macro_actions)

    def lam(self, batch: Batch) -> float | Tensor:
        """λ of the advantages: one number, or one for each response [B, 1]."""
        if self.variant.alpha_of_lam is None:
            return self.config.lam
        return macro.adaptive_lam(batch.macro_actions.mask, self.variant.alpha_of_lam)

    def gae(
        self, rewards: Tensor, values: Tensor, batch: Batch, lam: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns [B, S] with this λ."""
        if self.variant.steps_are_tokens:
            # λ counts at the last token of a macro action, and is 1 before it.
            lam_of_tokens = macro.border_lam(batch.macro_actions, lam)  # [B, T]
            # [B, S]: each step is one token here, so a sum over the step is the λ of this token.
            lam = batch.steps.sum(lam_of_tokens)
        return macro.gae(rewards, values, batch.steps.mask, self.config.gamma, lam)

    # -- what the trainer calls ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def advantages(self, batch: Batch, outputs: ModelOutputs) -> Experience:
        """Return what an update learns from: these outputs without gradient, and advantages and returns of the steps.

        `outputs` are those of the policy that sampled and of the critic before the update. They become the π_old and
        V_old that the losses compare with. A user's `estimate` gets them, too, if it can take a fourth argument.

        Raises `InputError` if a user's equation returns another shape.
        """
        # V(ω_τ) of each step (Appendix D.1).
        values = macro.macro_values(outputs.values, batch.steps, self.config.sigma)
        with named_errors("objective", self.user_name):
            rewards = self.rewards(batch, outputs)
            if _takes_outputs(self.estimate):
                estimates = self.estimate(rewards, values, batch, outputs)
            else:
                estimates = self.estimate(rewards, values, batch)
            if not isinstance(estimates, tuple) or len(estimates) != 2:
                raise InputError("estimate: return a tuple of advantages and returns")
            advantages = clean("advantages", estimates[0], batch.steps.mask)
            returns = clean("returns", estimates[1], batch.steps.mask)
        return Experience(
            logprobs=outputs.logprobs.detach(),
            entropy=outputs.entropy.detach(),
            values=outputs.values.detach(),
            advantages=advantages,
            returns=returns,
        )

    def counts(self, batch: Batch) -> Tensor:
        """[3] float32: how many terms the policy loss and the value loss have, and how many responses there are.

        A term is a token or a macro action. A response without a token does not count.
        """
        tokens = batch.steps.token_mask.sum()
        actions = batch.steps.mask.sum()
        responses = batch.steps.token_mask.any(1).sum()
        policy_terms = tokens if self.config.ratio == "token" else actions
        value_terms = tokens if self.config.value_target == "token" else actions
        return torch.stack([policy_terms, value_terms, responses]).float()

    def losses(
        self, batch: Batch, outputs: ModelOutputs, old: Experience, normalizers: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and stats whose sums over micro-batches are means of the optimizer step.

        `normalizers` are the `counts` of the whole optimizer step.
        """
        policy_terms, value_terms, responses = normalizers
        # What the sum of each loss is divided by: the number of its terms, or that of responses if each response counts
        # the same.
        policy_count = policy_terms
        value_count = value_terms
        if self.variant.loss_mean == "response":
            policy_count = value_count = responses
        with named_errors("objective", self.user_name):
            returned = self.policy_loss(batch, outputs, old, policy_count)
            policy_loss, policy_stats = _checked_loss("policy_loss", returned)
            returned = self.value_loss(batch, outputs, old, value_count)
            value_loss, value_stats = _checked_loss("value_loss", returned)

        # A user's losses may use the outputs of one model only. Both models still get a gradient, here of 0, because
        # with several processes all wait until every parameter has one.
        no_gradient = 0.0 * (outputs.logprobs.sum() + outputs.values.sum())
        total = no_gradient + policy_loss + value_loss

        # As in `counts`, a response without a token does not count.
        responses_here = batch.steps.token_mask.any(1).sum()
        share = responses_here / responses
        stats = {"policy_loss": policy_loss.detach()}
        stats |= _parts_of_step("policy", policy_stats, terms=policy_terms, share=share)
        stats |= {"value_loss": value_loss.detach()}
        stats |= _parts_of_step("value", value_stats, terms=value_terms, share=share)
        return total, stats


def _takes_outputs(estimate: Callable) -> bool:
    """Whether `estimate` can be called with `outputs` as its fourth argument; a user's own may leave it out."""
    try:
        inspect.signature(estimate).bind("rewards", "values", "batch", "outputs")
    except TypeError:
        return False
    return True


def _parts_of_step(
    role: str, stats: dict[str, Tensor], *, terms: Tensor, share: Tensor
) -> dict[str, Tensor]:
    """Turn a micro-batch's stats of one loss, which are means, into parts: their sum over a step is the step's mean.

    `terms` is the number of the loss's terms in the whole optimizer step, `share` the share of the step's responses
    that are in this micro-batch, and `role` ("policy" or "value") begins the names of the parts.
    """
    parts = {}
    if "clip_fraction" in stats:
        # It is a mean over the `count` terms of the micro-batch. The metric of the policy has no prefix.
        name = "clip_fraction" if role == "policy" else f"{role}_clip_fraction"
        parts[name] = stats["clip_fraction"] * stats["count"] / terms
    for name, mean in stats.items():
        if name not in OUR_STATS:  # a user's own stat, a mean over the responses of the micro-batch
            parts[f"{role}_{name}"] = mean * share
    return parts


def _checked_loss(name: str, returned: LossAndStats) -> LossAndStats:
    """Return the loss that the equation `name` returned, and its stats as tensors without gradient.

    Raises `InputError` unless `returned` is a pair: the loss, a tensor of one number, and a dict of stats, each of one
    number, too.
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    is_loss_and_stats = (
        is_pair and isinstance(returned[0], torch.Tensor) and isinstance(returned[1], dict)
    )
    if not is_loss_and_stats or returned[0].dim():
        raise InputError(
            f"{name}: return a tensor of one number, and a dict of stats, which may be empty"
        )
    loss, returned_stats = returned
    stats = {stat: torch.as_tensor(x).detach() for stat, x in returned_stats.items()}
    for stat, x in stats.items():
        # A stat is recorded as policy_STAT or value_STAT. The trainer itself records metrics of these two names.
        if stat in ("loss", "grad_norm") or x.dim():
            fix = "return one number, by another name than loss or grad_norm"
            raise InputError(f"{name}: the stat {stat}: {fix}")
    if "clip_fraction" in stats and "count" not in stats:  # `_parts_of_step` weighs it by the count
        raise InputError(
            f"{name}: stats with clip_fraction, but no count: add the number of its terms"
        )
    return loss, stats
