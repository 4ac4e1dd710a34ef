"""Options of PPO, and of how its run is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marlhf_lite.config.option import option


@dataclass
class PPOConfig:
    """PPO with a critic. `marlhf ppo --n 1` is token-level PPO, everything else alike."""

    updates: int = option(30, "Rollout-and-update rounds.", least=1)
    prompt_epochs: float | None = option(
        None, "Passes over the PPO prompts, instead of --updates (Table 5: Epochs).", above=0
    )
    batch_size: int = option(32, "Responses per update, over all processes.", least=1)
    rollouts: int = option(1, "Responses to each prompt of a batch (Table 5: Rollout).", least=1)
    micro_batch_size: int = option(
        16,
        "Responses per forward and backward pass: changes memory, not gradients. 0: the most that fit, found by a dry "
        "run of the longest possible batch.",
        least=0,
    )
    generation_batch_size: int = option(
        0, "Responses sampled at a time, for the memory of their keys and values; 0: a process's whole share.", least=0
    )
    num_ppo_epochs: int = option(1, "Passes over each rollout.", least=1)
    num_mini_batches: int = option(1, "Optimizer steps per pass over a rollout.", least=1)
    policy_learning_rate: float = option(2e-3, "Of the policy's adapter.", above=0)
    critic_learning_rate: float = option(3e-3, "Of the critic's adapter and head.", above=0)
    warmup_updates: int = option(5, "Updates of linear warm-up; then constant.", least=0)
    max_grad_norm: float = option(1.0, "Gradient clipping, for policy and critic apart.", above=0)
    kl_coef: float = option(0.05, "beta of the KL reward to the SFT model.", least=0)
    kl_in: Literal["reward", "loss"] = option("reward", "Where beta's KL enters: the reward (paper), or the loss.")
    kl_estimator: Literal["k1", "k3"] = option("k1", "log-ratio (paper), or ratio - 1 - log-ratio (never negative).")
    kl_target: float = option(0.0, "Adapt beta towards this KL in nats a response; 0 keeps beta fixed.", least=0)
    kl_horizon: int = option(10000, "Responses over which an adaptive beta reacts.", least=1)
    kl_ceiling: float = option(
        0.0, "Stop early where the KL of an update, in nats a response, goes beyond this; 0 is off.", least=0
    )
    score_clip: float = option(0.0, "Clamp reward scores to +-this (released code: 2.5); 0 is off.", least=0)
    score_scale: float = option(1.0, "Factor on reward scores, after clamping.", above=0)
    whiten_scores: bool = option(False, "Shift and scale an update's scores to mean 0, deviation 1, before clamping.")
    missing_eos_penalty: float = option(0.0, "Taken from the score of a response that does not end by itself.", least=0)
    clip: float = option(0.2, "Clip range of the policy ratio.", above=0)
    cliprange_value: float = option(0.2, "Clip range of value changes; 0 is off.", least=0)
    max_log_ratio: float = option(20.0, "Log-ratios are clamped to +-this before exp, against overflow.", above=0)
    gamma: float = option(1.0, "Discount per macro action.", above=0, most=1)
    lam: float = option(0.95, "GAE's lambda per macro action.", least=0, most=1)
    whiten: bool = option(False, "Whiten advantages over the whole update.")
    critic_warmup: int = option(0, "First updates that train the critic alone.", least=0)
    critic_init: Literal["rm", "sft"] = option("rm", "The critic starts from: rm (adapter and head) or sft (new head).")
    temperature: float = option(0.8, "Of sampling.", above=0)
    top_k: int = option(50, "Of sampling; 0 turns it off.", least=0)
    top_p: float = option(1.0, "Of sampling.", above=0, most=1)
    logprobs_at_temperature: bool = option(False, "Log-probabilities at the sampling temperature instead of 1.")
    generator: Literal["transformers", "vllm"] = option("transformers", "What samples responses; vllm needs a GPU.")


@dataclass
class KeepOptions:
    """What a PPO run leaves behind while it goes on, and when it gives up."""

    checkpoint_every: int = option(10, "Updates between checkpoints; there is one at the end too. 0: none.", least=0)
    save_total_limit: int = option(2, "How many of the last checkpoints stay.", least=1)
    from_checkpoint: int = option(0, "With --resume: go on from this update's checkpoint, not the last.", least=0)
    sample_every: int = option(10, "Updates between samples written to samples.jsonl.", least=1)
    completions: int = option(0, "Show this many responses with their scores wherever samples are written.", least=0)
    eval_every: int = option(0, "Updates between tests on held-out prompts; 0: none.", least=0)
    test_prompts: int = option(64, "Held-out prompts of such a test.", least=1)
    keep_best: bool = option(False, "Keep the policy of the test with the best RM score, in best/policy.")
    max_bad_updates: int = option(3, "Give up after this many non-finite updates in a row; each is skipped.", least=1)
    trackers: str = option("", "Log to these too, comma-separated: tensorboard, wandb.")
