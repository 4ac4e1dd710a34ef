"""Options of the command line, of `--config` files and of presets, as dataclasses; `--help` prints their help.

Those of the method (macro actions, sampling, PPO) are in `config.method`. A command takes the classes whose options it
uses (`config.commands`). Numbers are checked against their bounds when an object is made. An option that TRL or
transformers also have has their name.
"""

import math
from typing import Literal

from marlhf_lite.config.checked import Checked, option
from marlhf_lite.config.method import (
    TERMINATIONS,
    BatchConfig,
    CheckpointConfig,
    GenerationBatchConfig,
    KeepBestConfig,
    LengthConfig,
    LoggingConfig,
    MacroConfig,
    PPOConfig,
    PPOTrainerConfig,
    RolloutConfig,
    SamplingConfig,
    SeedConfig,
)
from marlhf_lite.utils.errors import InputError, check_address

# The run, the model, the data


class OutputConfig(Checked):
    """Output folder."""

    output_dir: str = option("", "Folder for all output. Default: a new one in runs/.")


class AcceptConfig(Checked):
    """What has changed since a run was made."""

    accept_changed: bool = option(
        False, "Continue with changed models, code or data; a run records the change."
    )


class RunConfig(SeedConfig, AcceptConfig, OutputConfig):
    """Output folder, resuming, and random seed."""

    resume: str = option(
        "", "Folder of a run to continue with its options; --updates may be higher."
    )


class ResumeAtConfig(Checked):
    """Going back to an earlier checkpoint."""

    at: int | None = option(
        None,
        "With --resume: the earlier update whose checkpoint to continue from; later ones are deleted. Default: the "
        "last one.",
        least=1,
    )


class ModelConfig(Checked):
    """Base model and its LoRA adapters. The paper trains all weights; adapters need higher learning rates."""

    model: str = option(
        "tiny-gemma",
        "Base model: an embedded one (default: the data set's), a folder, or a hub name.",
    )
    chat_template: str = option(
        "auto",
        "Chat template that writes lists of messages; auto: the tokenizer's if it has one, none: Human: and "
        "Assistant: transcripts instead, text: also for rows of text, each prompt as a user's message; or a file with "
        "a template.",
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = option(
        "float32", "Number format of the base weights; auto: as they are saved."
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = option(
        "auto", "Attention implementation; auto: sdpa, or eager for a family without it (Gemma-2)."
    )
    finetune: Literal["lora", "full"] = option(
        "lora",
        "Trained weights; lora: adapters over one frozen base, full: all weights of four models (the paper).",
    )
    load_in_4bit: bool = option(
        False, "Base weights in 4 bits (bitsandbytes), for --finetune lora."
    )
    gradient_checkpointing: bool | Literal["auto"] = option(
        False,
        "Recompute activations: less memory, more time. auto: PPO does so if few rows fit without it in a dry run; "
        "other stages always do.",
    )
    fast: str = option(
        "auto",
        "Ways to compute the same numbers in less time; auto: on a CPU all, on a GPU those that a record of `make gpu` "
        "allows; off: none; or some of lora, last_layer, graph, fused, with commas between them.",
    )
    lora_r: int = option(16, "Rank of every adapter.", least=1)
    lora_alpha: int = option(32, "Scale of every adapter, divided by its rank.", least=1)
    lora_target_modules: str = option(
        "all-linear", "Layers with an adapter: all-linear, or a regular expression."
    )


class DataConfig(LengthConfig):
    """Data set, its split and its limits."""

    dataset: str = option(
        "tiny-tldr",
        "Data set: tiny-tldr, -hh, -webgpt, -steps, -code, -umbrella or -guess (embedded), a file (.jsonl .json .csv "
        ".tsv .parquet), a pattern of files, a folder, an address, or a hub name.",
    )
    columns: str = option("", "Your names of columns, as prompt=question,chosen=good,rejected=bad.")
    dataset_config: str = option("", "Configuration of the data set, as load_dataset's name.")
    data_dir: str = option("", "Folder inside the data set, as load_dataset's data_dir.")
    split: str = option(
        "", "Split to train on, such as train_prefs (tests: test_prefs). Default: train."
    )
    size: int | None = option(
        None, "Number of rows, or of pairs to judge, drawn at random. Default: all.", least=1
    )
    template: Literal["paper", "released"] = option(
        "paper", "Prompts of TL;DR and WebGPT: the paper's or its code's."
    )
    part: str = option(
        "",
        "Rows to evaluate on, such as TL;DR's news articles (cnn_dm). Default: the test part. For tiny-umbrella: "
        "length and position, such as L32-first.",
    )
    bad_rows: Literal["error", "drop"] = option(
        "error", "How to treat faulty rows: stop at the first, or drop them."
    )


class SFTInputConfig(Checked):
    """The SFT model that the command starts from."""

    sft: str = option("", "Folder of the SFT adapter, or of the run that made it.")


class InputConfig(SFTInputConfig):
    """Models that earlier stages made."""

    rm: str = option("", "Folder of the reward model's adapter, or of the run that made it.")


class TrainedPolicyConfig(Checked):
    """The policy to use."""

    policy: str = option("", "Folder of a policy, or of the run that trained it.")


REWARDS = ("rm", "gold", "tests", "all_tests", "environment")  # any other is a function


class RewardConfig(Checked):
    """The reward of a response."""

    reward: str = option(
        "rm",
        "Reward: rm, gold (embedded task), tests (unit tests, Appendix B.5), all_tests (the same, all or nothing), "
        "environment (what --environment gives, its default), or package.module:function, from (prompts, responses) "
        "to scores. marlhf evaluate uses only a function.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        environment = getattr(self, "environment", "")  # an option that a command has beside these
        # With an environment the default is its rewards: a reward model reads no dialogues.
        if environment and self.reward == "rm":
            self.reward = "environment"


class EnvironmentConfig(Checked):
    """An environment that answers the policy, turn by turn."""

    environment: str = option(
        "", "Class that answers the policy in turns, as package.module:Class (docs/guide.md)."
    )
    max_turns: int = option(
        8, "Most turns of the policy per response, with --environment.", least=1
    )
    max_observation_length: int = option(
        64, "Longest answer of --environment in tokens; longer ones are cut.", least=1
    )


class ProgramConfig(Checked):
    """Sandbox for programs that unit tests judge, and the limits of a program with all its tests."""

    executor: Literal["monty", "bubblewrap"] = option(
        "monty",
        "Sandbox; monty: a subset of Python, on any system, bubblewrap: all of Python, on Linux.",
    )
    test_seconds: float = option(4.0, "Wall time in seconds.", above=0)
    test_memory: int = option(256, "Memory in MB.", least=32)


# SFT, reward model, DPO


# The schedules of transformers that take no further arguments.
Decay = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"]
NoDecay = Literal["constant", "constant_with_warmup"]


class TrainerConfig(Checked):
    """Settings that SFT, reward model and DPO share, as transformers' Trainer names them."""

    per_device_train_batch_size: int = option(
        0, "Most rows per forward and backward pass; 0: the batch.", least=0
    )
    lr_scheduler_type: Literal[Decay, NoDecay] = option(
        "cosine", "Learning-rate schedule, as transformers names it."
    )
    warmup_ratio: float = option(
        0.1, "Share of the updates in which the learning rate warms up.", least=0, below=1
    )


class SFTStageConfig(Checked):
    """Supervised fine-tuning on prompt and chosen response; the loss is on the response."""

    sft_epochs: float = option(
        1.5, "Passes over the SFT part of the data; 0: the base model unchanged.", least=0
    )
    sft_batch_size: int = option(32, "Sequences per update.", least=1)
    sft_learning_rate: float = option(2e-3, "Peak learning rate of SFT, for LoRA.", above=0)


class RewardModelConfig(Checked):
    """Reward model: Bradley-Terry on preference pairs, from the SFT adapter."""

    rm_epochs: float = option(1.0, "Passes over the reward-model part of the data.", above=0)
    rm_batch_size: int = option(32, "Pairs per update.", least=1)
    rm_learning_rate: float = option(
        1.5e-3, "Peak learning rate of the reward model, for LoRA.", above=0
    )
    rm_loss: Literal["last", "all"] = option(
        "last",
        "Scores to compare; last: at the last token, all: at all after the pair diverges (released code).",
    )


class DPOStageConfig(Checked):
    """DPO on the pairs of the reward-model part, from the SFT adapter, which is also the reference."""

    dpo_epochs: float = option(1.0, "Passes over the reward-model part of the data.", above=0)
    dpo_batch_size: int = option(32, "Pairs per update.", least=1)
    dpo_learning_rate: float = option(
        1e-3, "Peak learning rate of DPO, for LoRA. Paper, all weights: 2e-7.", above=0
    )
    dpo_beta: float = option(
        0.1, "Coefficient beta of DPO. The paper: 0.1 on TL;DR, 0.01 on HH-RLHF.", above=0
    )


class GroupConfig(RolloutConfig):
    """What RLOO and GRPO share: a group of responses to each prompt replaces the critic."""

    num_generations: int = option(4, "Responses to each prompt (K). The paper's RLOO: 4.", least=2)


class RLOOStageConfig(GroupConfig):
    """RLOO: REINFORCE with a leave-one-out baseline."""

    whiten: bool = option(False, "Whiten advantages over the whole update.")


class GRPOStageConfig(GroupConfig):
    """GRPO: advantages divided by the standard deviation of their group."""


class EngineConfig(Checked):
    """What samples responses in PPO and in evaluation."""

    sampler: str = option(
        "generate",
        "What samples: generate (transformers), vllm (servers that VLLM_URL names: see docs/scaling.md), or your "
        "own as package.module:name.",
    )


# Evaluation and judges


class EvaluationConfig(Checked):
    """Evaluation on held-out prompts, at several temperatures and with several samples if asked."""

    eval_prompts: int = option(256, "Number of held-out prompts to answer.", least=1)
    eval_temperatures: str = option("", "Sampling temperatures, such as 0,0.4,0.8; 0 is greedy.")
    eval_samples: int = option(
        1, "Number of responses to each prompt at each temperature.", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.temperatures  # raises for a bad value as soon as the options are made

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures of `eval_temperatures` in ascending order, each once; empty if none are given.

        Raises `InputError` for text that is no list of numbers from 0 up.
        """
        text = self.eval_temperatures
        if not text.strip():
            return ()
        try:
            temperatures = {float(word) for word in text.split(",")}
        except ValueError:
            temperatures = {math.nan}  # refused below, as infinity and negative numbers are
        if not all(0 <= temperature < math.inf for temperature in temperatures):
            raise InputError(f"--eval_temperatures {text}: give numbers from 0 up, comma-separated")
        return tuple(sorted(temperatures))


class EndpointConfig(Checked):
    """An OpenAI-compatible endpoint as judge."""

    judge_url: str = option(
        "https://api.openai.com/v1",
        "Base URL, without /chat/completions; OPENAI_API_KEY has the endpoint's key.",
    )
    judge_model: str = option("", "Name of the model at the endpoint.")
    judge_max_tokens: int = option(
        400, "Longest verdict in tokens; 0: ask without limit and temperature.", least=0
    )
    workers: int = option(0, "Number of requests at a time; 0: chosen for you.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("judge_url", self.judge_url)
