"""Random Gemmas, prompts and trainers in which every response has its full length: work that is the same every time.

A model's tokenizer is of words, and its EOS has an id that no model can sample, the vocabulary's size: responses never
end early, so two trainers that sample differently still do equal work. Weights are drawn once from a seed and saved;
any library that reads the Hugging Face format loads the same ones.
"""

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    GemmaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from marlhf_lite.config.options import ModelConfig, PPOTrainerConfig
from marlhf_lite.macro import FixedNGram, TerminationRule
from marlhf_lite.models.actor_critic import PPOModels
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_tokenizer,
    new_policy,
    new_reward_model,
)
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import ModelReward

SPECIAL = ("<pad>", "<bos>", "<unk>")  # the first ids; the words follow, and <eos> has the last id
POSITIONS = 1024


@dataclass(frozen=True)
class Shape:
    """A Gemma's sizes; one key-value head, heads of 64."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int


SHAPES = {
    "2M": Shape(vocabulary=512, hidden=192, inner=512, layers=4),  # that of the embedded model
    "30M": Shape(vocabulary=32_000, hidden=384, inner=1536, layers=8),
}


def write_model(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write random weights (float32), config and tokenizer to `folder`, and return the folder."""
    torch.manual_seed(seed)
    model = GemmaForCausalLM(_config(shape))
    model.generation_config.eos_token_id = None  # responses never end early
    hf_logging.disable_progress_bar()
    model.save_pretrained(folder)
    _tokenizer(shape.vocabulary).save_pretrained(folder)
    return folder


def write_models(folder: Path, seed: int) -> None:
    """Write a model of each of `SHAPES` to a folder of its name inside `folder`."""
    for name, shape in SHAPES.items():
        write_model(folder / name, shape, seed)


def size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how large an update is, with the same defaults in all benchmarks."""
    parser.add_argument("--batch", type=int, default=32, help="responses in an update")
    parser.add_argument(
        "--micro_batch", type=int, default=16, help="responses in a forward and backward pass"
    )
    parser.add_argument("--prompt", type=int, default=32, help="tokens in every prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens in every response")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def make_prompts(shape: Shape, count: int, tokens: int, seed: int = 0) -> list[str]:
    """`count` texts of exactly `tokens` tokens each, of words drawn at random; each word is one token."""
    rng = random.Random(seed)
    # The ids of the words, which are also in their names: w3, w4 …
    words = range(len(SPECIAL), shape.vocabulary)
    return [" ".join(f"w{i}" for i in rng.choices(words, k=tokens)) for _ in range(count)]


def write_pretrained(folder: Path, source: str) -> Path:
    """Write a copy of a pretrained model to `folder`, which is returned; the copy never ends a response.

    The new end token has an id beyond the model's vocabulary, so it cannot be sampled. `source` is a folder or the
    name of a model on the hub.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    if tokenizer.eos_token_id < model.config.vocab_size:
        raise ValueError(f"--model {source}: it could sample the new end token: give another model")
    hf_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_prompts_of(tokenizer, count: int, tokens: int, seed: int = 0) -> list[str]:
    """`count` texts of exactly `tokens` tokens each, for a byte-level tokenizer such as SmolLM2's.

    They are made of words that are one token with the space before them, drawn at random.
    """
    vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    # Such tokenizers write the space before a word as Ġ.
    words = sorted(
        token[1:]
        for token in vocabulary
        if token.startswith("Ġ") and token[1:].isascii() and token[1:].isalpha()
    )
    rng = random.Random(seed)
    prompts = ["".join(f" {word}" for word in rng.choices(words, k=tokens)) for _ in range(count)]
    for prompt in prompts:
        found = len(tokenizer(prompt)["input_ids"])
        if found != tokens:
            raise ValueError(f"a prompt of {tokens} words has {found} tokens: give another model")
    return prompts


def make_roles(options: ModelConfig, seed: int = 0) -> PPOModels:
    """Policy, reference, reward model and critic of the same weights; the last two with the same random head."""
    base = load_base(options)
    with tempfile.TemporaryDirectory() as folder:
        sft = Path(folder, "sft")
        rm = Path(folder, "rm")
        new_policy(base, options).save_pretrained(sft)
        new_reward_model(base, sft, seed).save_pretrained(rm)
        return build_models(base, sft, rm)


def make_trainer(
    options: ModelConfig, prompts: list[str], rule: TerminationRule, ppo: PPOTrainerConfig, **more
) -> PPOTrainer:
    """A trainer rewarded by its reward model; `more` are further arguments of `PPOTrainer`."""
    roles = make_roles(options, ppo.seed)
    return PPOTrainer(
        roles,
        load_tokenizer(options.model),
        prompts,
        ModelReward(roles.reward, ppo.micro_batch_size),
        rule,
        ppo,
        **more,
    )


def options(args: argparse.Namespace, **changes) -> PPOTrainerConfig:
    """PPO's options with a benchmark's sizes and seed: sampling is from all tokens, and there are no checkpoints."""
    sizes = {
        "batch_size": args.batch,
        "micro_batch_size": args.micro_batch,
        "max_response_length": args.response,
    }
    return PPOTrainerConfig(**sizes, seed=args.seed, top_k=0, checkpoint_every=0, **changes)


def shaped_trainer(
    args: argparse.Namespace,
    folder: Path,
    shape: str,
    n: int,
    ppo: PPOTrainerConfig,
    finetune: str = "lora",
    **more,
) -> tuple[PPOTrainer, list[str]]:
    """A trainer with macro actions of n tokens, on the model of this shape in `folder`, and a batch of prompts."""
    prompts = make_prompts(SHAPES[shape], args.batch, args.prompt, args.seed)
    model = ModelConfig(model=str(folder / shape), finetune=finetune)
    return make_trainer(model, prompts, FixedNGram(n), ppo, **more), prompts


def check_lengths(rows: list[dict], tokens: int) -> None:
    """Raise `RuntimeError` if a response was shorter than `tokens`, because then times could not be compared."""
    # The metric is a mean over the batch, and no response can be longer.
    if any(row["response_length"] != tokens for row in rows):
        raise RuntimeError("a response ended early: the comparison needs equal lengths")


def _config(shape: Shape) -> GemmaConfig:
    return GemmaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocabulary)), "<eos>"]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **names)
