"""Every option in one place. A field's `help` is what `marlhf <command> --help` prints.

Presets (`presets/*.yaml`) and `--config` files hold the same names; flags win over files, files over presets.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def option(default, help: str, **metadata):
    """A dataclass field whose help text is shown on the command line."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class RunOptions:
    """Where a run goes and how it repeats."""

    output_dir: str = option("", "Folder for config, metrics, samples and checkpoints. Default: runs/<command>-<time>.")
    overwrite: bool = option(False, "Replace the run in --output_dir if there is one.")
    seed: int = option(0, "Seeds model initialisation, data order and sampling.")


@dataclass
class ModelOptions:
    """Which model, and its LoRA adapters. The paper trains all weights; adapters want higher learning rates."""

    model: str = option("tiny-gemma", "tiny-gemma (embedded), a local folder, or a hub name such as google/gemma-2b.")
    dtype: str = option("float32", "Of the frozen base: float32, bfloat16, float16, or auto (as saved).")
    attention: str = option("sdpa", "Attention implementation: sdpa, eager, flash_attention_2.")
    lora_r: int = option(16, "Rank of every adapter.")
    lora_alpha: int = option(32, "Adapters are scaled by alpha / r.")
    lora_dropout: float = option(0.0, "Dropout inside adapters. PPO's ratio wants 0.")
    lora_targets: str = option("all-linear", "Which layers get an adapter: all-linear, or a regular expression.")


@dataclass
class DataOptions:
    """Which preference data, and its limits."""

    dataset: str = option("tiny-tldr", "tiny-tldr (embedded), a file (.jsonl .json .csv .parquet, .gz), or a hub name.")
    size: int | None = option(None, "Use this many pairs, drawn at random. Default: all.")
    split_seed: int = option(1234, "Seeds the 20/40/40 split into SFT, reward model and PPO.")
    bad_rows: str = option("error", "Faulty rows: error (stop at the first), or drop (and count).")
    max_prompt_length: int = option(512, "Prompts of more tokens are dropped and counted.")
    max_response_length: int = option(96, "Responses are cut here; generation stops here. Table 5: 512.")


@dataclass
class SFTOptions:
    """Supervised fine-tuning on prompt and chosen response, loss on the response alone."""

    sft_epochs: float = option(3.0, "Passes over the SFT part.")
    sft_batch_size: int = option(32, "Sequences per update.")
    sft_learning_rate: float = option(2e-3, "Peak learning rate (cosine, for LoRA).")
    sft_warmup_ratio: float = option(0.1, "Share of updates that warm up.")


@dataclass
class RMOptions:
    """Reward model: Bradley-Terry on preference pairs, from the SFT adapter."""

    rm_epochs: float = option(1.0, "Passes over the reward-model part.")
    rm_batch_size: int = option(32, "Pairs per update.")
    rm_learning_rate: float = option(1e-3, "Peak learning rate (cosine, for LoRA).")
    rm_warmup_ratio: float = option(0.1, "Share of updates that warm up.")
    rm_loss: str = option("last", "last: compare scores at the last token. all: as the released code, the mean over all "
                          "tokens from where the pair diverges.")  # fmt: skip


@dataclass
class MacroOptions:
    """What a macro action is, what it is worth and how it enters the losses."""

    termination: str = option("fixed", "Rule that ends a macro action: fixed, randomized, whole.")
    n: str = option("5", "Tokens per macro action for fixed: an integer, or inf. 1 is token-level PPO.")
    lengths: str = option("2,3,5,10", "Lengths for randomized (released code: 1,2,3,5,10).")
    repeats: int = option(3, "How often randomized repeats its lengths.")
    sigma: str = option("equal", "Value of a macro action: equal, unit, position, position_reversed (Appendix D.1).")
    reward_pooling: str = option("sum", "KL reward inside a macro action: sum (paper) or mean (released code; this "
                                 "shrinks beta by about the macro length).")  # fmt: skip
    rho: float = option(1.0, "Discount inside a macro action, for sum.")
    ratio: str = option("token", "Importance ratio: token (Appendix E) or macro (joint probability, section 3.2.2).")
    value_target: str = option("token", "Critic regression: token (Appendix E) or macro (Algorithm 1).")


@dataclass
class PPOOptions:
    """PPO with a critic. `marlhf ppo --n 1` is token-level PPO, everything else alike."""

    updates: int = option(40, "Rollout-and-update rounds.")
    batch_size: int = option(64, "Responses per update.")
    micro_batch_size: int = option(32, "Responses per forward and backward pass; changes memory, not gradients.")
    ppo_epochs: int = option(1, "Passes over each rollout.")
    minibatches: int = option(1, "Optimizer steps per pass over a rollout.")
    policy_learning_rate: float = option(1e-3, "Of the policy's adapter.")
    critic_learning_rate: float = option(1e-3, "Of the critic's adapter and head.")
    warmup_updates: int = option(5, "Updates of linear warm-up; then constant.")
    max_grad_norm: float = option(1.0, "Gradient clipping, for policy and critic apart.")
    kl_coef: float = option(0.05, "beta of the KL reward to the SFT model.")
    score_clip: float | None = option(None, "Clamp reward scores to +-this (released code: 2.5). Default: off.")
    clip: float = option(0.2, "Clip range of the policy ratio.")
    value_clip: float | None = option(0.2, "Clip range of value changes; none turns it off.")
    gamma: float = option(1.0, "Discount per macro action.")
    lam: float = option(0.95, "GAE's lambda per macro action.")
    whiten: bool = option(False, "Whiten advantages over the whole update.")
    critic_init: str = option("rm", "The critic starts from: rm (adapter and head) or sft (new head).")
    temperature: float = option(0.8, "Of sampling.")
    top_k: int = option(50, "Of sampling; 0 turns it off.")
    top_p: float = option(1.0, "Of sampling.")
    logprobs_at_temperature: bool = option(False, "Log-probabilities at the sampling temperature instead of 1.")
    sample_every: int = option(10, "Updates between samples written to samples.jsonl.")


@dataclass
class EvalOptions:
    """Evaluation on held-out prompts."""

    eval_prompts: int = option(256, "Held-out prompts to answer.")
    eval_batch_size: int = option(128, "Prompts per generation batch.")


ALL = (RunOptions, ModelOptions, DataOptions, SFTOptions, RMOptions, MacroOptions, PPOOptions, EvalOptions)
