"""Every option of the command line, of `--config` files and of presets, as dataclasses; `--help` prints their help.

A command takes the classes whose options it uses (`config.commands`). Numbers are checked against their bounds when an
object is made. Options have the names of TRL and transformers, where these have the option.
"""

import math
import re
from typing import Literal

from marlhf_lite.config.checked import Checked, option
from marlhf_lite.utils.errors import InputError

# The run, the model, the data


class SeedConfig(Checked):
    """Random seed."""

    seed: int = option(0, "Seed of model initialisation, data order and sampling.", least=0, most=2**32 - 1)


class OutputConfig(Checked):
    """Output folder."""

    output_dir: str = option("", "Folder for all output. Default: below runs/; for a study data/results/<name>.")


class RunConfig(SeedConfig, OutputConfig):
    """Output folder, how a run goes on, and random seed."""

    overwrite: bool = option(False, "Permission to replace the run in --output_dir.")
    resume: str = option("", "Folder of a run to go on with, with its options; --updates may be higher.")


class ModelConfig(Checked):
    """Base model and its LoRA adapters. The paper trains all weights; adapters need higher learning rates."""

    model: str = option("tiny-gemma", "Base model: an embedded one (its data set's own), a folder, or a hub name.")
    chat_template: str = option(
        "auto",
        "Chat template of rows whose texts are lists of messages; auto: the tokenizer's where it has one, none: such "
        "rows as Human: and Assistant: transcripts, text: for rows of text too, each prompt as a user's message, "
        "templated: texts that a template wrote already, or a file with a template.",
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = option(
        "float32", "Number format of the base weights; auto: as they are saved."
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = option(
        "auto", "Attention implementation; auto: sdpa, or eager for a family without it (Gemma-2)."
    )
    finetune: Literal["lora", "full"] = option(
        "lora", "Trained weights; lora: adapters over one frozen base, full: all weights of four models (the paper)."
    )
    load_in_4bit: bool = option(False, "Base weights in 4 bits (bitsandbytes), for --finetune lora.")
    gradient_checkpointing: bool = option(False, "Recomputation of activations: less memory, more time.")
    lora_r: int = option(16, "Rank of every adapter.", least=1)
    lora_alpha: int = option(32, "Scale of every adapter, divided by its rank.", least=1)
    lora_target_modules: str = option("all-linear", "Layers with an adapter: all-linear, or a regular expression.")


class LengthConfig(Checked):
    """Limits of prompts and responses."""

    max_prompt_length: int = option(512, "Longest prompt in tokens; longer ones are dropped and counted.", least=1)
    max_response_length: int = option(
        96, "Longest response (turn) in tokens; longer ones are cut. Table 5: 512.", least=1
    )


class DataConfig(LengthConfig):
    """Data set, its split and its limits."""

    dataset: str = option(
        "tiny-tldr",
        "Data set: tiny-tldr, -hh, -webgpt, -steps, -code, -umbrella or -guess (embedded), a file (.jsonl .json .csv "
        ".tsv .parquet .arrow), a pattern of files, a folder, an address, or a hub name.",
    )
    columns: str = option("", "Other names of columns, as prompt=question,chosen=good,rejected=bad.")
    dataset_config: str = option("", "Configuration of the data set, as load_dataset's name.")
    data_dir: str = option("", "Folder inside the data set, as load_dataset's data_dir.")
    split: str = option("", "Split to train on, such as train_prefs (tests: test_prefs). Default: train.")
    size: int | None = option(None, "Number of rows, or of pairs to judge, drawn at random. Default: all.", least=1)
    dataset_streaming: bool = option(False, "Reading of a hub data set only until it has given --size rows.")
    split_seed: int = option(1234, "Seed of the 20/40/40 split into SFT, reward model and PPO.")
    template: Literal["paper", "released"] = option("paper", "Prompts of TL;DR and WebGPT: the paper's or its code's.")
    part: str = option(
        "",
        "Rows to evaluate on, such as TL;DR's news articles (cnn_dm), default the test part; of tiny-umbrella the "
        "length and place, such as L32-first.",
    )
    bad_rows: Literal["error", "drop"] = option("error", "Treatment of faulty rows: stop at the first, or drop them.")


class SFTInputConfig(Checked):
    """The SFT model that the command starts from."""

    sft: str = option("", "Folder of the SFT adapter, or of the run that made it.")


class RMInputConfig(Checked):
    """The reward model that the command uses."""

    rm: str = option("", "Folder of the reward model's adapter, or of the run that made it.")


class InputConfig(RMInputConfig, SFTInputConfig):
    """Models that earlier stages made."""


class TrainedPolicyConfig(Checked):
    """The policy to use."""

    policy: str = option("", "Folder of a policy, or of the run that trained it.")


REWARDS = ("rm", "gold", "tests", "all_tests", "environment")  # all others are functions


class RewardConfig(Checked):
    """The reward of a response."""

    reward: str = option(
        "rm",
        "Reward: rm, gold (embedded task), tests (unit tests, Appendix B.5), all_tests (these, but all or nothing), or "
        "package.module:function, from (prompts, responses) to scores; environment (the default with "
        "--environment): its own. For evaluate only a function changes anything.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        environment = getattr(self, "environment", "")
        if environment and self.reward == "rm":  # a reward model reads no dialogues
            self.reward = "environment"
        if self.reward == "environment" and not environment:
            raise InputError("--reward environment: there is none: give --environment, or another reward")


class EnvironmentConfig(Checked):
    """An environment that answers the policy, turn by turn."""

    environment: str = option("", "Class that answers the policy in turns, as package.module:Class (docs/guide.md).")
    max_turns: int = option(8, "Most turns of the policy in a response, with --environment.", least=1)
    max_observation_length: int = option(64, "Longest answer of --environment in tokens; others are cut.", least=1)


class ProgramConfig(Checked):
    """Where programs run that are judged by unit tests, and the limits of one with all its tests."""

    executor: Literal["monty", "bubblewrap"] = option(
        "monty", "Sandbox; monty: a subset of Python, everywhere, bubblewrap: all of it, on Linux."
    )
    test_seconds: float = option(4.0, "Wall time in seconds.", above=0)
    test_memory: int = option(256, "Memory in MB.", least=32)


# SFT, reward model, DPO


# Those of transformers' schedules that need no arguments of their own.
Decay = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"]
NoDecay = Literal["constant", "constant_with_warmup"]


class TrainerConfig(Checked):
    """Settings that SFT, reward model and DPO share, as transformers' Trainer names them."""

    per_device_train_batch_size: int = option(
        0, "Most rows per forward and backward pass; 0: the whole batch.", least=0
    )
    lr_scheduler_type: Literal[Decay, NoDecay] = option(
        "cosine", "Learning-rate schedule, by transformers' name for it."
    )
    warmup_ratio: float = option(0.1, "Share of the updates in which the learning rate warms up.", least=0, below=1)


class SFTStageConfig(Checked):
    """Supervised fine-tuning on prompt and chosen response; the loss is on the response."""

    sft_epochs: float = option(1.5, "Passes over the SFT part of the data; 0: the base model as it is.", least=0)
    sft_batch_size: int = option(32, "Sequences per update.", least=1)
    sft_learning_rate: float = option(2e-3, "Peak learning rate of SFT, for LoRA.", above=0)


class RewardModelConfig(Checked):
    """Reward model: Bradley-Terry on preference pairs, from the SFT adapter."""

    rm_epochs: float = option(1.0, "Passes over the reward-model part of the data.", above=0)
    rm_batch_size: int = option(32, "Pairs per update.", least=1)
    rm_learning_rate: float = option(1.5e-3, "Peak learning rate of the reward model, for LoRA.", above=0)
    rm_loss: Literal["last", "all"] = option(
        "last", "Scores to compare; last: at the last token, all: all tokens after the pair diverges (released code)."
    )


class DPOStageConfig(Checked):
    """DPO on the pairs of the reward-model part, from the SFT adapter, which is also the reference."""

    dpo_epochs: float = option(1.0, "Passes over the reward-model part of the data.", above=0)
    dpo_batch_size: int = option(32, "Pairs per update.", least=1)
    dpo_learning_rate: float = option(1e-3, "Peak learning rate of DPO, for LoRA. Paper, all weights: 2e-7.", above=0)
    dpo_beta: float = option(0.1, "Coefficient beta of DPO. The paper: 0.1 on TL;DR, 0.01 on HH-RLHF.", above=0)


# Macro actions


# Rules by what ends a macro action: its length, the text, or what the models say of it.
TERMINATIONS = ("fixed", "randomized", "listed", "whole", "turn", "sentence", "sentence_shuffled", "parsing")
TERMINATIONS += ("perplexity", "value_change", "cutpoints")


class MacroConfig(Checked):
    """What a macro action is, its value, and how it enters the losses."""

    termination: str = option(
        "fixed",
        f"Termination rule of macro actions (section 3.2.1): {', '.join(TERMINATIONS)}, or your own as "
        "package.module:function; turn: where --environment answers; listed: --lengths in order, the last again and "
        "again; value_change, cutpoints: where the critic's value changes most, or the policy was least sure; "
        "sentence_shuffled: lengths of sentences in random order, a control.",
    )
    n: str = option(
        "5", "Tokens per macro action (on average for value_change, cutpoints): an integer or inf; 1: token-level PPO."
    )
    last_token_alone: bool = option(False, "The last token always as a macro action of its own (released code).")
    lengths: str = option("2,3,5,10", "Lengths for randomized (released code: 1,2,3,5,10) and listed, comma-separated.")
    perplexity_rule: Literal["macro", "prefix", "token"] = option(
        "macro",
        "Perplexity that may not rise, for perplexity: the macro action's (section 3.2.1), that of the response so far "
        "(Appendix B.4), or a token's own (released code).",
    )
    perplexity_early: bool = option(False, "A perplexity macro action begins one token early (released code).")
    parser: Literal["grammar", "stanza", "link", "python"] = option(
        "grammar", "Parser for parsing: grammar (embedded task), stanza or link for English, or python (tree-sitter)."
    )
    cutoff: int = option(5, "Size in tokens below which a phrase is one macro action, for parsing.", least=1)
    sigma: Literal["equal", "unit", "start", "position", "position_reversed"] = option(
        "equal", "Weights of token values in a macro action's value (Appendix D.1); start: its first token alone."
    )
    reward_pooling: Literal["sum", "mean"] = option(
        "sum",
        "Pooling of KL rewards in a macro action: sum (paper), or mean (released code: beta over its length).",
    )
    rho: float = option(1.0, "Discount per token inside a macro action, for --reward_pooling sum.", above=0, most=1)
    ratio: Literal["token", "macro", "macro_mean"] = option(
        "token",
        "Importance ratio of a token (Appendix E), a macro action (section 3.2.2), or its geometric mean (GSPO).",
    )
    value_target: Literal["token", "macro"] = option(
        "token", "Values that regress to the return: every token's (Appendix E), or the macro action's (Algorithm 1)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_pooling == "mean" and self.rho != 1.0:
            raise InputError(f"--rho {self.rho}: --reward_pooling mean weighs tokens by --sigma: leave it out")

    @property
    def token_level(self) -> bool:
        """Whether every macro action is one token."""
        return self.termination == "fixed" and self.n == "1"


# Sampling, PPO, RLOO and GRPO


class SamplingConfig(Checked):
    """How responses are sampled."""

    temperature: float = option(0.8, "Sampling temperature.", above=0)
    top_k: int = option(50, "Number of likeliest tokens to sample from; 0: all.", least=0)
    top_p: float = option(1.0, "Probability mass of the likeliest tokens to sample from.", above=0, most=1)
    min_response_length: int = option(
        0, "Tokens that a response has at least: no end token is sampled before them; 0: no minimum.", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = getattr(self, "max_response_length", math.inf)  # a command's, beside these options
        if self.min_response_length > longest:
            limit = f"--max_response_length {longest}"
            raise InputError(f"--min_response_length {self.min_response_length}: above {limit}: give at most that")


class BatchConfig(Checked):
    """Sizes of batches."""

    batch_size: int = option(32, "Responses per update, over all processes.", least=1)
    micro_batch_size: int = option(
        16, "Responses per pass: changes memory, not gradients; 0: the most that fit, found by a dry run.", least=0
    )


class GenerationBatchConfig(BatchConfig):
    """Sizes of batches, while sampling too."""

    generation_batch_size: int = option(
        0, "Responses that a process samples at a time, for memory; 0: all that it has in an update.", least=0
    )


class RolloutConfig(BatchConfig, SamplingConfig):
    """What PPO, RLOO and GRPO share: sampling, batches, reward and KL penalty."""

    updates: int = option(30, "Number of rollout-and-update rounds.", least=1)
    prompt_epochs: float | None = option(None, "Passes over the prompts, instead of --updates (Table 5).", above=0)
    policy_learning_rate: float = option(2e-3, "Learning rate of the policy, for LoRA.", above=0)
    warmup_updates: float = option(5, "Updates of linear warm-up; below 1: their share of all updates.", least=0)
    rl_lr_scheduler_type: Literal["constant", "linear", "cosine"] = option(
        "constant", "Learning-rate schedule after the warm-up; linear and cosine: down to 0."
    )
    adam_beta1: float = option(0.9, "First beta of AdamW (released code: 0.9).", least=0, below=1)
    adam_beta2: float = option(0.999, "Second beta of AdamW (released code: 0.95).", least=0, below=1)
    weight_decay: float = option(0.0, "Weight decay of matrices (released code: 0.1).", least=0)
    max_grad_norm: float = option(1.0, "Largest norm of the gradient, for policy and critic apart.", above=0)
    kl_coef: float = option(0.05, "Coefficient beta of the KL penalty towards the SFT model.", least=0)
    score_clip: float = option(0.0, "Largest absolute reward score (released code: 2.5); 0: no limit.", least=0)
    cliprange: float = option(0.2, "Clip range of the policy ratio.", above=0)
    logprobs_at_temperature: bool = option(False, "Log-probabilities at the sampling temperature instead of at 1.")


class PPOConfig(RolloutConfig, GenerationBatchConfig):
    """PPO with a critic, over macro actions."""

    rollouts: int = option(1, "Responses to each prompt of a batch (Table 5: Rollout).", least=1)
    num_ppo_epochs: int = option(1, "Passes over each rollout.", least=1)
    critic_epochs: int = option(1, "Passes over a rollout of --critic_warmup, where the critic learns alone.", least=1)
    num_mini_batches: int = option(1, "Optimizer steps per pass over a rollout.", least=1)
    critic_learning_rate: float = option(3e-3, "Learning rate of the critic, for LoRA.", above=0)
    gamma: float = option(1.0, "Discount per macro action.", above=0, most=1)
    lam: float = option(0.95, "GAE's lambda per macro action.", least=0, most=1)
    objective: str = option(
        "",
        "Equations other than MA-PPO's, comma-separated: sae (lambda at the borders of macro actions, values of "
        "tokens), vapo (lambda by length, vapo=0.05 gives alpha), vc_ppo (lambda of the critic's returns, vc_ppo=1), "
        "released (losses as means over each response), or your own as package.module:Class.",
    )
    whiten: bool = option(False, "Whitening of advantages over the whole update.")
    cliprange_value: float = option(0.2, "Clip range of value changes; 0: no clipping.", least=0)
    kl_estimator: Literal["k1", "k3"] = option("k1", "KL estimator: k1, the log-ratio (paper), or k3 (never negative).")
    kl_ceiling: float = option(0.0, "KL in nats a response beyond which a run stops early; 0: none.", least=0)
    critic_warmup: int = option(0, "Number of first updates that train the critic alone.", least=0)
    critic_init: Literal["rm", "sft"] = option("rm", "Start of the critic: rm with its head, or sft with a new head.")
    critic_head_init: Literal["normal", "zero"] = option(
        "normal", "Start of a critic's new head: normal (deviation 0.1 / sqrt(width)), or zero: all values begin at 0."
    )

    vllm_importance_sampling_mode: Literal["none", "token", "macro"] = option(
        "none",
        "Weights of the policy's loss where servers sample: their log-probabilities may differ from the trainer's. "
        "token: the ratio trainer / server of each token; macro: of each macro action.",
    )
    vllm_importance_sampling_clip_max: float = option(
        3.0, "Largest such weight; also the bound of the metric sampler_beyond.", least=1
    )


class GroupConfig(RolloutConfig):
    """What RLOO and GRPO share: a group of responses to each prompt takes the critic's place."""

    num_generations: int = option(4, "Responses to each prompt (K). The paper's RLOO: 4.", least=2)


class RLOOStageConfig(GroupConfig):
    """RLOO: REINFORCE with a leave-one-out baseline."""

    whiten: bool = option(False, "Whitening of advantages over the whole update.")


class GRPOStageConfig(GroupConfig):
    """GRPO: advantages divided by the standard deviation of their group."""

    loss_type: Literal["grpo", "dapo", "dr_grpo"] = option(
        "grpo", "Mean in GRPO's loss; grpo: over tokens, then responses, dapo: all tokens, dr_grpo: longest length."
    )


class EngineConfig(Checked):
    """What samples responses in PPO and in evaluation."""

    rollout_engine: Literal["generate", "vllm"] = option(
        "generate", "What samples responses: generate (transformers), or vllm, servers that load the LoRA adapter."
    )
    vllm_url: str = option(
        "", "Addresses of vLLM servers, comma-separated, such as http://localhost:8000; VLLM_API_KEY holds their key."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "give addresses such as http://localhost:8000, without /v1"
        if bool(self.vllm_urls) != (self.rollout_engine == "vllm"):
            raise InputError(f"--vllm_url {self.vllm_url}: it goes with --rollout_engine vllm, and that with it: {fix}")
        if getattr(self, "vllm_importance_sampling_mode", "none") != "none" and not self.vllm_urls:
            mode = f"--vllm_importance_sampling_mode {self.vllm_importance_sampling_mode}"
            raise InputError(f"{mode}: it goes with --rollout_engine vllm: transformers samples from the policy itself")
        for url in self.vllm_urls:
            if not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./-]*)?", url) or url.rstrip("/").endswith("/v1"):
                raise InputError(f"--vllm_url {url}: not an address: {fix}")

    @property
    def vllm_urls(self) -> list[str]:
        """The addresses of `vllm_url`."""
        return [url.strip() for url in self.vllm_url.split(",") if url.strip()]


# Checkpoints and logs


class CheckpointConfig(Checked):
    """Checkpoints of a run."""

    checkpoint_every: int = option(10, "Updates between checkpoints, and one at the end; 0: none.", least=0)
    save_total_limit: int = option(2, "Number of latest checkpoints that are kept.", least=1)
    from_checkpoint: int = option(0, "Update whose checkpoint --resume takes. Default: the latest.", least=0)


class LoggingConfig(Checked):
    """Tests, samples and trackers while a run goes on."""

    eval_every: int = option(0, "Updates between tests on held-out prompts; 0: no tests.", least=0)
    test_prompts: int = option(64, "Number of held-out prompts in such a test.", least=1)
    diagnose_critic_every: int = option(
        1, "Updates between metrics of what PPO's critic knows of the final score; 0: none.", least=0
    )
    report_to: str = option("", "Trackers that also get the metrics, comma-separated: tensorboard, wandb.")


# Evaluation and judges


class EvaluationConfig(Checked):
    """Evaluation on held-out prompts, at several temperatures and with several samples if asked."""

    eval_prompts: int = option(256, "Number of held-out prompts to answer.", least=1)
    eval_temperatures: str = option("", "Sampling temperatures, such as 0,0.4,0.8; 0 is greedy.")
    eval_samples: int = option(1, "Number of responses to each prompt at each temperature.", least=1)
    best_of: str = option("", "Numbers N of best-of-N, such as 1,4,8; --eval_samples is at least the largest.")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes, _ = self.sizes, self.temperatures  # refuses what is no number
        if sizes and sizes[-1] > self.eval_samples:
            given = f"there are {self.eval_samples} samples a prompt"
            raise InputError(f"--best_of {self.best_of}: {given}: add --eval_samples {sizes[-1]}")

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures of `eval_temperatures` in ascending order; none where it is empty."""
        return _numbers("eval_temperatures", self.eval_temperatures, least=0.0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes N of `best_of` in ascending order."""
        return _numbers("best_of", self.best_of, least=1, kind=int)


def _numbers(option: str, text: str, least: float, kind: type = float) -> tuple:
    """Comma-separated numbers in ascending order, each once; none where `text` is empty."""
    try:
        found = {kind(word) for word in text.split(",")} if text.strip() else set()
    except ValueError:
        found = {math.nan}
    if not all(math.isfinite(x) and x >= least for x in found):
        whole = "whole " * (kind is int)
        raise InputError(f"--{option} {text}: give {whole}numbers from {least:g} up, comma-separated")
    return tuple(sorted(found))


class EndpointConfig(Checked):
    """An OpenAI-compatible endpoint as judge."""

    judge_url: str = option("https://api.openai.com/v1", "Base URL of the endpoint, without /chat/completions.")
    judge_model: str = option("", "Name of the model at the endpoint.")
    judge_key_env: str = option("OPENAI_API_KEY", "Environment variable of the key; an empty name for none.")
    judge_max_tokens: int = option(400, "Longest verdict in tokens; 0: no limit in the request.", least=0)
    workers: int = option(0, "Number of runs (study) or requests (judge) at a time; 0: a fitting one.", least=0)
