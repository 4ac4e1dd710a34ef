"""What an update of PPO optimises: advantages over macro actions, and the two losses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf_lite import macro
from marlhf_lite.config.options import MacroConfig, PPOConfig
from marlhf_lite.training.outputs import Batch, ModelOutputs, OldOutputs
from marlhf_lite.training.rewards import shape_scores
from marlhf_lite.training.rollout import Rollout


@dataclass(frozen=True)
class Objective:
    """What an update optimises: the equations of steps 4 and 5. It knows no model and no process."""

    config: PPOConfig
    macro_config: MacroConfig

    def batch(self, rollout: Rollout, macro_actions: macro.MacroActions) -> Batch:
        """The responses with the steps that are counted: macro actions, or with `--gae_over tokens` (SAE) tokens."""
        over_tokens = self.macro_config.gae_over == "tokens"
        return Batch(rollout, macro_actions, macro_actions.single_tokens if over_tokens else macro_actions)

    @torch.no_grad()
    def advantages(self, batch: Batch, outputs: ModelOutputs) -> OldOutputs:
        """These outputs as old ones, with advantages and returns by GAE over macro actions."""
        config, options, rollout, steps = self.config, self.macro_config, batch.rollout, batch.steps
        # r_t = −β (log π_old − log π_ref) of each token (section 2.2) ...
        beta, estimator = config.kl_coef, config.kl_estimator
        token_rewards = macro.kl_rewards(outputs.logprobs, rollout.ref_logprobs, rollout.mask, beta, estimator)
        # ... summed over each macro action, and the score of the response on the last one: R_τ (section 3.2.2).
        scores = shape_scores(rollout.scores, config)
        rewards = macro.macro_rewards(token_rewards, scores, steps, options.reward_pooling, options.rho, options.sigma)
        # V(ω_τ) = Σ_i σ_i V(s_{t_τ+i}) (Appendix D.1).
        values = macro.macro_values(outputs.values, steps, options.sigma)
        # δ_τ = R_τ + γ V(ω_{τ+1}) − V(ω_τ),  Â_τ = Σ_k (γλ)^k δ_{τ+k},  Q̂_τ = Â_τ + V(ω_τ) (Appendix E).
        lam = macro.adaptive_lam(batch.macro_actions.mask, config.lam_alpha) if config.lam_alpha else config.lam
        lam = self._lam_of_steps(batch, lam)
        advantages, returns = macro.gae(rewards, values, steps.mask, config.gamma, lam)
        if config.critic_lam is not None:  # a λ of its own for what the critic regresses to (VC-PPO)
            lam = self._lam_of_steps(batch, config.critic_lam)
            _, returns = macro.gae(rewards, values, steps.mask, config.gamma, lam)
        old = (outputs.logprobs.detach(), outputs.entropy.detach(), outputs.values.detach())
        return OldOutputs(*old, advantages, returns)

    def _lam_of_steps(self, batch: Batch, lam: float | Tensor) -> float | Tensor:
        """λ of the steps that are counted: macro actions, or with `--gae_over tokens` their borders."""
        return macro.border_lam(batch.macro_actions, lam) if self.macro_config.gae_over == "tokens" else lam

    def counts(self, batch: Batch) -> Tensor:
        """[3] terms of the policy loss and of the value loss (tokens or macro actions), and responses."""
        tokens, actions = batch.steps.token_mask.sum(), batch.steps.mask.sum()
        policy = tokens if self.macro_config.ratio == "token" else actions
        value = tokens if self.macro_config.value_target == "token" else actions
        return torch.stack([policy, value, batch.steps.token_mask.any(1).sum()]).float()

    def losses(
        self, batch: Batch, outputs: ModelOutputs, old: OldOutputs, normalizers: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and stats whose sums over micro-batches are means of the optimizer step.

        `normalizers` are the `counts` of the whole optimizer step.
        """
        config, options = self.config, self.macro_config
        # Each mean is over all tokens (macro actions) of the step, or over its responses.
        over = normalizers[:2] if config.loss_mean == "token" else normalizers[2].expand(2)
        # −min(ρ Â, clip(ρ, 1−ε, 1+ε) Â), with ρ = π / π_old of a token or of a macro action (Appendix E, section 3.2.2)
        policy, policy_stats = macro.policy_loss(
            outputs.logprobs,
            old.logprobs,
            old.advantages,
            batch.steps,
            clip=config.cliprange,
            ratio=options.ratio,
            normalizer=over[0],
            mean=config.loss_mean,
        )
        # ½ max((V − Q̂)², (V_clipped − Q̂)²), of a token or of a macro action (Appendix E, Algorithm 1)
        value, value_stats = macro.value_loss(
            outputs.values,
            old.values,
            old.returns,
            batch.steps,
            clip=config.cliprange_value or None,
            target=options.value_target,
            sigma=options.sigma,
            normalizer=over[1],
            mean=config.loss_mean,
        )
        return policy + value, {
            "policy_loss": policy.detach(),
            "value_loss": value.detach(),
            "clip_fraction": policy_stats["clip_fraction"] * policy_stats["count"] / normalizers[0],
            "value_clip_fraction": value_stats["clip_fraction"] * value_stats["count"] / normalizers[1],
        }
