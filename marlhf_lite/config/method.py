"""Options of the method: macro actions, sampling, batches, PPO, checkpoints and logs; see `config.options`."""

import math
from typing import Literal

from marlhf_lite.config.checked import Checked, option
from marlhf_lite.utils.errors import InputError

# Macro actions


# Rules by what ends a macro action: its length, the text, or what the models say of it.
TERMINATIONS = (
    "fixed",
    "randomized",
    "listed",
    "whole",
    "turn",
    "sentence",
    "sentence_shuffled",
    "parsing",
)
TERMINATIONS += ("perplexity", "value_change", "cutpoints")


class MacroConfig(Checked):
    """What a macro action is, its value, and how it enters the losses."""

    termination: str = option(
        "fixed",
        f"Rule that ends macro actions (section 3.2.1): {', '.join(TERMINATIONS)}, or your own as "
        "package.module:function; turn: one for each turn of --environment; listed: --lengths in order, then the last "
        "one again; value_change: where the critic's value changes most; cutpoints: where the policy was least sure; "
        "sentence_shuffled: a control, lengths of sentences in random order.",
    )
    n: str = option(
        "5",
        "Tokens per macro action (a mean for value_change, cutpoints) or inf; 1: token-level PPO.",
    )
    last_token_alone: bool = option(
        False, "Make the last token a separate macro action (released code)."
    )
    lengths: str = option(
        "2,3,5,10",
        "Lengths for randomized (released code: 1,2,3,5,10) and listed, comma-separated.",
    )
    perplexity_rule: Literal["macro", "prefix", "token"] = option(
        "macro",
        "Perplexity whose rise ends a macro action, for perplexity: that of the macro action (section 3.2.1), of the "
        "response so far (Appendix B.4), or of the token (released code).",
    )
    perplexity_early: bool = option(
        False, "Begin a perplexity macro action one token early (released code)."
    )
    parser: Literal["grammar", "python"] = option(
        "grammar", "Parser for parsing: grammar (embedded task) or python (tree-sitter)."
    )
    cutoff: int = option(
        5, "Number of tokens below which a phrase is one macro action, for parsing.", least=1
    )
    sigma: Literal["equal", "unit", "start", "position", "position_reversed"] = option(
        "equal",
        "Weights of token values in a macro action's value (Appendix D.1); start: only its first token.",
    )
    reward_pooling: Literal["sum", "mean"] = option(
        "sum",
        "Pooling of KL rewards in a macro action: sum (paper), or mean (released code: beta over its length).",
    )
    rho: float = option(
        1.0, "Discount per token inside a macro action, for --reward_pooling sum.", above=0, most=1
    )
    ratio: Literal["token", "macro", "macro_mean"] = option(
        "token",
        "Importance ratio of a token (Appendix E), a macro action (section 3.2.2), or its geometric mean (GSPO).",
    )
    value_target: Literal["token", "macro"] = option(
        "token",
        "Values that learn the return: every token's (Appendix E), or the macro action's (Algorithm 1).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_pooling == "mean" and self.rho != 1.0:
            raise InputError(
                f"--rho {self.rho}: --reward_pooling mean weighs tokens by --sigma: leave it out"
            )

    @property
    def token_level(self) -> bool:
        """Whether every macro action is one token."""
        return self.termination == "fixed" and self.n == "1"


# Seed, lengths, sampling, PPO, RLOO and GRPO


class SeedConfig(Checked):
    """Random seed."""

    seed: int = option(
        0, "Seed of model initialisation, data order and sampling.", least=0, most=2**32 - 1
    )


class LengthConfig(Checked):
    """Limits of prompts and responses."""

    max_prompt_length: int = option(
        512, "Longest prompt in tokens; longer ones are dropped and counted.", least=1
    )
    max_response_length: int = option(
        96, "Longest response (turn) in tokens, cut there. Table 5: 512.", least=1
    )


class SamplingConfig(Checked):
    """How responses are sampled."""

    temperature: float = option(0.8, "Sampling temperature.", above=0)
    top_k: int = option(50, "Number of likeliest tokens to sample from; 0: all.", least=0)
    top_p: float = option(
        1.0, "Probability mass of the likeliest tokens to sample from.", above=0, most=1
    )
    min_response_length: int = option(
        0,
        "Fewest tokens of a response: no end token is sampled before them; 0: no minimum. Log-probabilities and KL "
        "ignore this rule, and are biased at tokens where it excludes an end.",
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # A command has this option beside those of sampling; without it there is no limit.
        longest = getattr(self, "max_response_length", math.inf)
        if self.min_response_length > longest:
            limit = f"--max_response_length {longest}"
            raise InputError(
                f"--min_response_length {self.min_response_length}: above {limit}: give at most that"
            )


class BatchConfig(Checked):
    """Sizes of batches."""

    batch_size: int = option(32, "Responses per update, over all processes.", least=1)
    micro_batch_size: int = option(
        16, "Responses per pass: affects memory, not gradients; 0: all that fit.", least=0
    )


class GenerationBatchConfig(BatchConfig):
    """Sizes of batches, also while sampling."""

    generation_batch_size: int = option(
        0, "Responses sampled at a time by a process; 0: all of an update.", least=0
    )


class RolloutConfig(BatchConfig, SamplingConfig):
    """What PPO, RLOO and GRPO share: sampling, batches, reward and KL penalty."""

    updates: int = option(30, "Number of rollout-and-update rounds.", least=1)
    prompt_epochs: float | None = option(
        None, "Passes over the prompts, instead of --updates (Table 5).", above=0
    )
    policy_learning_rate: float = option(2e-3, "Learning rate of the policy, for LoRA.", above=0)
    warmup_updates: float = option(
        5, "Updates of linear warm-up; below 1: their share of all updates.", least=0
    )
    rl_lr_scheduler_type: Literal["constant", "linear", "cosine"] = option(
        "constant", "Learning-rate schedule after the warm-up; linear and cosine: down to 0."
    )
    adam_beta1: float = option(0.9, "First beta of AdamW (released code: 0.9).", least=0, below=1)
    adam_beta2: float = option(
        0.999, "Second beta of AdamW (released code: 0.95).", least=0, below=1
    )
    weight_decay: float = option(0.0, "Weight decay of matrices (released code: 0.1).", least=0)
    max_grad_norm: float = option(
        1.0, "Largest norm of the gradient, separately for policy and critic.", above=0
    )
    kl_coef: float = option(
        0.05, "Coefficient beta of the KL penalty towards the SFT model.", least=0
    )
    score_clip: float = option(
        0.0, "Largest absolute score, of a turn with --environment; 0: no limit.", least=0
    )
    cliprange: float = option(0.2, "Clip range of the policy ratio.", above=0)
    logprobs_at_temperature: bool = option(
        False, "Take log-probabilities at the sampling temperature instead of at 1."
    )


class PPOConfig(RolloutConfig, GenerationBatchConfig):
    """PPO with a critic, over macro actions."""

    rollouts: int = option(1, "Responses to each prompt of a batch (Table 5: Rollout).", least=1)
    num_ppo_epochs: int = option(1, "Passes over each rollout.", least=1)
    critic_epochs: int = option(
        1, "Passes over a rollout of --critic_warmup, when only the critic learns.", least=1
    )
    num_mini_batches: int = option(1, "Optimizer steps per pass over a rollout.", least=1)
    critic_learning_rate: float = option(3e-3, "Learning rate of the critic, for LoRA.", above=0)
    gamma: float = option(
        1.0, "Discount per macro action; per token with --objective sae.", above=0, most=1
    )
    lam: float = option(0.95, "GAE's lambda per macro action.", least=0, most=1)
    objective: str = option(
        "",
        "Equations instead of MA-PPO's, comma-separated: sae (lambda only between macro actions, values of tokens), "
        "vapo (lambda by length, vapo=0.05 gives alpha), vc_ppo (lambda of the critic's returns, vc_ppo=1), released "
        "(losses as means over each response), k3 (a KL penalty that is never negative), or your own as "
        "package.module:Class.",
    )
    whiten: bool = option(False, "Whiten advantages over the whole update.")
    cliprange_value: float = option(0.2, "Clip range of value changes; 0: no clipping.", least=0)
    kl_ceiling: float = option(
        0.0, "KL in nats per response above which a run stops early; 0: none.", least=0
    )
    critic_warmup: int = option(0, "Number of first updates that train only the critic.", least=0)
    critic_init: Literal["rm", "sft"] = option(
        "rm", "Start of the critic: rm with its head, or sft with a new head."
    )
    critic_head_init: Literal["normal", "zero"] = option(
        "normal",
        "Start of a critic's new head: normal (the same for all seeds), or zero: all values begin at 0.",
    )


# Checkpoints and logs


class CheckpointConfig(Checked):
    """Checkpoints of a run."""

    checkpoint_every: int = option(
        10, "Updates between checkpoints, and one at the end; 0: none.", least=0
    )
    save_total_limit: int = option(2, "Number of latest checkpoints to keep.", least=1)


class LoggingConfig(Checked):
    """Tests, samples and trackers during a run."""

    eval_every: int = option(0, "Updates between tests on held-out prompts; 0: no tests.", least=0)
    test_prompts: int = option(64, "Number of held-out prompts in a test.", least=1)
    report_to: str = option(
        "", "Trackers to send the metrics to, comma-separated: tensorboard, wandb, trackio, …"
    )


class KeepBestConfig(Checked):
    """The best update of a run, by its tests on held-out prompts."""

    keep_best: str = option(
        "",
        "Number of the held-out tests, such as score_mean or score_win_rate: the run ends with the policy of the "
        "update in which it was best (transformers: load_best_model_at_end).",
    )
    patience: int = option(
        0,
        "Tests in a row without a better --keep_best at which a run stops (transformers: EarlyStoppingCallback); "
        "0: never.",
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience and not self.keep_best:
            fix = "give --keep_best, such as score_mean"
            raise InputError(f"--patience {self.patience}: nothing to compare: {fix}")
        has_tests = getattr(self, "eval_every", 0)  # an option that a command has beside these
        if self.keep_best and not has_tests:
            what = "without tests on held-out prompts"
            raise InputError(f"--keep_best {self.keep_best}: {what}: give --eval_every")


class PPOTrainerConfig(
    PPOConfig,
    MacroConfig,
    KeepBestConfig,
    CheckpointConfig,
    LoggingConfig,
    LengthConfig,
    SeedConfig,
):
    """All options of `PPOTrainer` in one object; those of `marlhf ppo` and `marlhf run` include them."""
