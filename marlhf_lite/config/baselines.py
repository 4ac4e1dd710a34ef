"""Options of the baselines: DPO, RLOO and GRPO (Appendix C.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marlhf_lite.config.option import option


@dataclass
class DPOStageConfig:
    """DPO on the pairs that the reward model learns from, starting at the SFT adapter, which is also the reference."""

    dpo_epochs: float = option(1.0, "Passes over the reward-model part.", above=0)
    dpo_batch_size: int = option(32, "Pairs per update.", least=1)
    dpo_micro_batch_size: int = option(
        0, "Pairs per forward and backward pass, added up to a batch; 0: a process's whole share.", least=0
    )
    dpo_learning_rate: float = option(
        1e-3, "Peak learning rate (for LoRA). The paper trains all weights, at 2e-7.", above=0
    )
    dpo_warmup_ratio: float = option(0.1, "Share of updates that warm up.", least=0, below=1)
    dpo_lr_scheduler: str = option("cosine", "Learning-rate schedule, by transformers' name for it.")
    dpo_beta: float = option(0.1, "beta of DPO's implicit reward. The paper: 0.1 on TL;DR, 0.01 on HH-RLHF.", above=0)


@dataclass
class GroupConfig:
    """RLOO and GRPO: a group of responses to each prompt takes the critic's place. The rest are PPO's options."""

    num_generations: int = option(
        4,
        "Responses to each prompt (K); an update has batch_size / K prompts. The paper's RLOO: 4.",
        least=2,
    )
    group_learning_rate: float = option(
        2e-3, "Of the policy's adapter. The paper's RLOO trains all weights, at 1.5e-5.", above=0
    )
    grpo_loss: Literal["grpo", "dapo", "dr_grpo"] = option(
        "grpo",
        "GRPO's mean: grpo over tokens, then responses; dapo over all tokens; dr_grpo over batch and longest length.",
    )


# Baseline -> options that its command takes, because they stand in groups that it shares with PPO, and that do nothing
# there; with each, the one that does, if there is one.
_PPO_ALONE = dict.fromkeys(
    (
        "rollouts generation_batch_size num_ppo_epochs num_mini_batches critic_learning_rate kl_in kl_estimator "
        "kl_target kl_horizon kl_ceiling cliprange_value max_log_ratio gamma lam critic_warmup critic_init generator "
        "from_checkpoint completions keep_best max_bad_updates trackers"
    ).split(),
    "",
)
_GROUP = _PPO_ALONE | {"policy_learning_rate": "group_learning_rate"}
IDLE: dict[str, dict[str, str]] = {
    "rloo": _GROUP | {"grpo_loss": ""},
    "grpo": _GROUP | {"whiten": ""},
    "dpo": _PPO_ALONE
    | dict.fromkeys(
        "warmup_updates max_grad_norm score_clip score_scale whiten_scores missing_eos_penalty clip whiten "
        "logprobs_at_temperature sample_every".split(),
        "",
    )
    | {
        "updates": "dpo_epochs",
        "prompt_epochs": "dpo_epochs",
        "batch_size": "dpo_batch_size",
        "policy_learning_rate": "dpo_learning_rate",
        "kl_coef": "dpo_beta",
    },
}
