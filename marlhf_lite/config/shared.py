"""Options that most commands take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marlhf_lite.config.option import option


@dataclass
class RunConfig:
    """Where a run goes and how it repeats."""

    output_dir: str = option("", "Folder for config, metrics, samples and checkpoints. Default: runs/<command>-<time>.")
    overwrite: bool = option(False, "Replace the run in --output_dir if there is one.")
    figures: str = option("", "Folder for figures. Default: figures/ inside the run; for demo, figures/demo here.")
    resume: str = option("", "Go on with the run in this folder, with its options. --updates may be higher.")
    seed: int = option(0, "Seeds model initialisation, data order and sampling.", least=0, most=2**32 - 1)


@dataclass
class ModelConfig:
    """Which model, and its LoRA adapters. The paper trains all weights; adapters want higher learning rates."""

    model: str = option("tiny-gemma", "tiny-gemma (embedded), a local folder, or a hub name such as google/gemma-2b.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = option("float32", "Of the frozen base; auto: as saved.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = option(
        "auto", "Attention implementation. auto: sdpa, or eager for a family without it (Gemma-2)."
    )
    finetune: Literal["lora", "full"] = option(
        "lora", "lora: adapters over one frozen base. full: all weights, four models (the paper's way)."
    )
    load_in_4bit: bool = option(False, "Base weights in 4 bits (bitsandbytes, on a GPU), for lora.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass: less memory, more time.")
    lora_r: int = option(16, "Rank of every adapter.", least=1)
    lora_alpha: int = option(32, "Adapters are scaled by alpha / r.", least=1)
    lora_dropout: float = option(0.0, "Dropout inside adapters. PPO's ratio wants 0.", least=0, below=1)
    lora_target_modules: str = option("all-linear", "Which layers get an adapter: all-linear, or a regular expression.")


@dataclass
class DataConfig:
    """Which preference data, and its limits."""

    dataset: str = option("tiny-tldr", "tiny-tldr (embedded), a file (.jsonl .json .csv .parquet, .gz), or a hub name.")
    size: int | None = option(None, "Use this many pairs, drawn at random. Default: all.", least=1)
    streaming: bool = option(False, "Read a hub data set only until it has --size rows.")
    split_seed: int = option(1234, "Seeds the 20/40/40 split into SFT, reward model and PPO.")
    bad_rows: Literal["error", "drop"] = option("error", "Faulty rows: stop at the first, or drop and count.")
    max_prompt_length: int = option(512, "Prompts of more tokens are dropped and counted.", least=1)
    max_response_length: int = option(96, "Responses are cut here; generation stops here. Table 5: 512.", least=1)


@dataclass
class InputConfig:
    """What earlier stages made."""

    sft: str = option("", "Folder of the SFT adapter, or the run it stands in.")
    rm: str = option("", "Folder of the reward adapter, or the run it stands in.")
    reward: str = option(
        "rm",
        "What PPO optimises: rm, gold (embedded task only), or your own function, package.module:function, that takes "
        "(prompts, responses) and returns scores.",
    )


@dataclass
class PolicyConfig:
    """What to evaluate."""

    policies: str = option("", "Folders of policy adapters, comma-separated, each as name=folder.")


@dataclass
class MemoryConfig:
    """What to compare an estimate with."""

    gpu: float = option(0.0, "Memory of the card in GiB; 0: say how much is needed, no more.", least=0)
    prompt_tokens: int = option(0, "Longest prompt; 0: --max_prompt_length.", least=0)
