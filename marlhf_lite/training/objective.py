"""What an update of PPO optimises, in four equations: rewards, advantages, and the two losses.

A subclass changes one of them: `rewards`, `estimate`, `policy_loss` or `value_loss`; `examples/my_objective.py` is one.
The trainer takes it as `objective=`, the command line as `--objective package.module:Class`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf_lite import macro
from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.macro._checks import clean
from marlhf_lite.training.experience import Batch, Experience, ModelOutputs
from marlhf_lite.training.rewards import shape_scores
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.user_code import named_errors

LossAndStats = tuple[Tensor, dict[str, Tensor]]
OUR_STATS = ("clip_fraction", "approx_kl", "count")  # of `macro.policy_loss` and `macro.value_loss`


@dataclass(frozen=True)
class Objective:
    """MA-PPO's equations, for steps 4 and 5 of an update: functions of tensors, without models and processes.

    Shapes: B responses, T response tokens, S steps. A step is a macro action; with n = 1 it is a token.
    """

    config: PPOTrainerConfig

    # : in the losses, over all tokens (or macro actions), or over each response first
    mean = "token"
    kl_estimator = "k1"  #: of the KL penalty; k1 is the log-ratio itself
    user_name = ""  #: the value of `--objective`, if it names a user's class

    # -- the equations ------------------------------------------------------------------------------------------------

    def rewards(self, batch: Batch, outputs: ModelOutputs) -> Tensor:
        """R_τ [B, S]: r_t = −β (log π_old − log π_ref) of a step's tokens, and the score on the last step (3.2.2)."""
        config, rollout = self.config, batch.rollout
        token_rewards = macro.kl_rewards(
            outputs.logprobs, rollout.ref_logprobs, rollout.mask, config.kl_coef, self.kl_estimator
        )
        scores = shape_scores(rollout, config)
        return macro.macro_rewards(
            token_rewards, scores, batch.steps, config.reward_pooling, config.rho, config.sigma
        )

    def estimate(self, rewards: Tensor, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Â_τ and Q̂_τ = Â_τ + V(ω_τ), each [B, S], from rewards and values [B, S] by GAE (Appendix E).

        δ_τ = R_τ + γ V(ω_{τ+1}) − V(ω_τ),  Â_τ = Σ_k (γλ)^k δ_{τ+k}.
        """
        return self.gae(rewards, values, batch, self.lam(batch))

    def policy_loss(
        self, batch: Batch, outputs: ModelOutputs, old: Experience, count: Tensor
    ) -> LossAndStats:
        """−min(ρ Â, clip(ρ, 1−ε, 1+ε) Â), with ρ = π / π_old of a token or of a macro action (Appendix E, 3.2.2).

        Return a loss and stats. The loss is the sum of the micro-batch's terms divided by `count`, the number of terms
        in the whole optimizer step. Stats are {}, those of `macro.policy_loss`, or other numbers, each a mean over the
        micro-batch: "ratio" is recorded as policy_ratio, the mean over responses.
        """
        return macro.policy_loss(
            outputs.logprobs,
            old.logprobs,
            old.advantages,
            batch.steps,
            clip=self.config.cliprange,
            ratio=self.config.ratio,
            normalizer=count,
            mean=self.mean,
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
            clip=self.config.cliprange_value or None,
            target=self.config.value_target,
            sigma=self.config.sigma,
            normalizer=count,
            mean=self.mean,
        )

    # -- their parts --------------------------------------------------------------------------------------------------

    def batch(self, rollout: Rollout, macro_actions: macro.MacroActions) -> Batch:
        """The responses with the steps that are counted, which are the macro actions."""
        return Batch(rollout, macro_actions, macro_actions)

    def lam(self, batch: Batch) -> float | Tensor:
        """λ of the advantages: one number, or one for each response [B, 1]."""
        return self.config.lam

    def gae(
        self, rewards: Tensor, values: Tensor, batch: Batch, lam: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns [B, S] with this λ."""
        return macro.gae(rewards, values, batch.steps.mask, self.config.gamma, lam)

    # -- what the trainer calls ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def advantages(self, batch: Batch, outputs: ModelOutputs) -> Experience:
        """These outputs as old ones, with advantages and returns of the steps.

        Raises `InputError` if a user's equation returns another shape.
        """
        # V(ω_τ) (Appendix D.1)
        values = macro.macro_values(outputs.values, batch.steps, self.config.sigma)
        with named_errors("objective", self.user_name):
            estimates = self.estimate(self.rewards(batch, outputs), values, batch)
            if not isinstance(estimates, tuple) or len(estimates) != 2:
                raise InputError("estimate: return a tuple of advantages and returns")
            names = ("advantages", "returns")
            advantages, returns = (
                clean(name, x, batch.steps.mask) for name, x in zip(names, estimates, strict=True)
            )
        return Experience(
            outputs.logprobs.detach(),
            outputs.entropy.detach(),
            outputs.values.detach(),
            advantages,
            returns,
        )

    def counts(self, batch: Batch) -> Tensor:
        """[3] terms of the policy loss and of the value loss (tokens or macro actions), and responses."""
        tokens, actions = batch.steps.token_mask.sum(), batch.steps.mask.sum()
        policy = tokens if self.config.ratio == "token" else actions
        value = tokens if self.config.value_target == "token" else actions
        return torch.stack([policy, value, batch.steps.token_mask.any(1).sum()]).float()

    def losses(
        self, batch: Batch, outputs: ModelOutputs, old: Experience, normalizers: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and stats whose sums over micro-batches are means of the optimizer step.

        `normalizers` are the `counts` of the whole optimizer step.
        """
        counts = normalizers[:2] if self.mean == "token" else normalizers[2].expand(2)
        # Both models get a gradient, if only 0, even if a user's loss uses one: processes wait for all gradients.
        total, stats = 0.0 * (outputs.logprobs.sum() + outputs.values.sum()), {}
        for name, count, terms in zip(("policy", "value"), counts, normalizers[:2], strict=True):
            with named_errors("objective", self.user_name):
                loss, parts = _checked_loss(
                    name, getattr(self, f"{name}_loss")(batch, outputs, old, count)
                )
            total, stats[f"{name}_loss"] = total + loss, loss.detach()
            if "clip_fraction" in parts:
                clipped = "clip_fraction" if name == "policy" else "value_clip_fraction"
                stats[clipped] = parts["clip_fraction"] * parts["count"] / terms
            # of the step's responses, for custom stats
            share = batch.steps.token_mask.any(1).sum() / normalizers[2]
            stats |= {
                f"{name}_{stat}": x * share for stat, x in parts.items() if stat not in OUR_STATS
            }
        return total, stats


def _checked_loss(name: str, returned: LossAndStats) -> LossAndStats:
    """Return a loss and its stats, as tensors without gradient. Raises `InputError` if an equation returned another."""
    if (
        not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict))
        or returned[0].dim()
    ):
        raise InputError(
            f"{name}_loss: return a tensor of one number, and a dict of stats, which may be empty"
        )
    stats = {stat: torch.as_tensor(x).detach() for stat, x in returned[1].items()}
    for stat, x in stats.items():
        if stat in ("loss", "grad_norm") or x.dim():
            raise InputError(
                f"{name}_loss: the stat {stat}: return one number, by another name than loss or grad_norm"
            )
    if "clip_fraction" in stats and "count" not in stats:
        raise InputError(
            f"{name}_loss: stats with clip_fraction, but no count: add the number of its terms"
        )
    return returned[0], stats
