"""Estimate the GPU memory of SFT, reward model and PPO from the model's config alone: no weights are loaded.

Weights, optimizer, logits, and the cache of keys and values are counted; activations follow a rule of thumb, which a
test compares with the allocations of real modules.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from marlhf_lite.config.commands import MemoryCommand
from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.architectures import known_config
from marlhf_lite.models.loading import NO_CODE, model_path
from marlhf_lite.models.logprobs import MAX_LOGITS
from marlhf_lite.training.rollout import MERGED_SHARE
from marlhf_lite.training.runner import FEW_ROWS
from marlhf_lite.utils.errors import InputError

GIB = 2**30
ADAPTER_BYTES = 4  # adapters are float32 for every base
FOUR_BITS = 0.516  # bytes per weight: 4 bits, and doubly quantised scales of blocks of 64
CUDA_CONTEXT = 0.6 * GIB  # CUDA's own memory, about the same on all cards
TILE = 4096 * 32_768  # logits that TRL's SFT computes at a time, tokens by vocabulary
FRAGMENTS = 1.05  # what allocators hold beyond live tensors


@dataclass(frozen=True)
class Memory:
    """Bytes by part. `generation` and `training` take turns, so the larger one counts."""

    weights: float  # of the base, or of four models
    adapters: float
    optimizer: float  # Adam's two moments
    generation: float  # keys and values, a prefill pass, and copies with the adapter merged
    training: float  # gradients, activations and logits of a micro-batch, or the optimizer's step
    cuda: float  # CUDA's own memory

    @property
    def peak(self) -> float:
        fixed = self.weights + self.adapters + self.optimizer
        return (fixed + max(self.generation, self.training)) * FRAGMENTS + self.cuda


def estimate_memory(options: MemoryCommand, gpu: bool = True) -> Memory:
    """Estimate the memory of one process that runs PPO with these options, one of `--num_processes`.

    The batch is the longest: prompts of --max_prompt_length, responses of --max_response_length. `gpu` adds
    CUDA's own memory. Sampling merges LoRA's adapter into copies if a card of --gpu GiB has room for them; without
    --gpu they are not counted. With --gradient_checkpointing auto, activations are recomputed unless a card of --gpu
    GiB has room for all of them. On a CPU a process needs more: about 0.5 GiB for its libraries, and copies that its
    matrix products make.
    """
    if options.gradient_checkpointing == "auto":
        rows = options.micro_batch_size or FEW_ROWS
        kept = estimate_memory(replace(options, gradient_checkpointing=False, micro_batch_size=rows))
        if kept.peak <= options.gpu * GIB and not is_spread(options):
            return replace(kept, cuda=kept.cuda if gpu else 0.0)
        options = replace(options, gradient_checkpointing=True)
    base = empty_base(_in_passes(options))
    size, width = _bytes(base.parameters()), base.config.get_text_config().hidden_size
    head, scored = base.get_output_embeddings(), 1 + (options.reward == "rm")  # critic, and the reward model
    if options.finetune == "full":
        untied = 0 if base.config.get_text_config().tie_word_embeddings else _bytes([head.weight])
        critic = size - untied + width * base.dtype.itemsize  # without the vocabulary's head, with one of width 1
        weights, adapters, trained = 2 * size + scored * critic, 0, size + critic
    else:
        score, adapter = ADAPTER_BYTES * width, adapter_bytes(base, options)
        adapters = (2 + scored) * adapter + 2 * scored * score
        weights, trained = base_bytes(base, options), 2 * adapter + score
    share = math.ceil(options.batch_size / options.num_processes)
    rows = options.generation_batch_size or share
    rows = min(rows, share) if options.num_processes > 1 else rows
    prompt, response = options.max_prompt_length, options.max_response_length
    gradients = 0 if is_spread(options) else trained
    merged = merged_bytes(base, options)
    memory = Memory(
        weights=weights,
        adapters=adapters,
        optimizer=2 * trained,
        generation=merged + generation_bytes(base, rows, prompt + response, adapters=options.load_in_4bit),
        training=training_bytes(base, options, min(options.micro_batch_size or 1, share), prompt, response, gradients),
        cuda=CUDA_CONTEXT if gpu else 0.0,
    )
    # The critic's weights and gradient, until the pass ends, and the policy's weights; its head's gradient is counted.
    return _spread(memory, base, options, whole=3) if is_spread(options) else memory


def estimate_stage(options: MemoryCommand, stage: str, rows: int, gpu: bool = True) -> Memory:
    """Estimate the memory of one process that trains `sft` or `rm` with `rows` rows a pass; a pair has two texts."""
    base, lora = empty_base(_in_passes(options)), options.finetune == "lora"
    weights = base_bytes(base, options)
    trained = adapter_bytes(base, options) if lora else weights
    tokens = rows * (options.max_prompt_length + options.max_response_length) * (2 if stage == "rm" else 1)
    kept, again = activation_bytes(base, options, tokens)
    tiles = 1 if gpu else 6  # Triton works in place, torch's operations do not
    logits = tiles * base.dtype.itemsize * min(tokens * 32_768, TILE) if stage == "sft" else 0
    head = head_gradient_bytes(base, options) if stage == "sft" else 0
    memory = Memory(
        weights=weights,
        adapters=trained if lora else 0,
        optimizer=2 * trained,
        generation=0,
        training=(0 if is_spread(options) else trained) + kept + max(logits, again, head),
        cuda=CUDA_CONTEXT if gpu else 0.0,
    )
    return _spread(memory, base, options, whole=1 if stage == "sft" else 2) if is_spread(options) else memory


def is_spread(options: MemoryCommand) -> bool:
    """Return whether FSDP2 spreads all weights over processes. With LoRA, under DDP, each has the whole base."""
    return options.num_processes > 1 and options.finetune == "full"


def _in_passes(options: MemoryCommand) -> MemoryCommand:
    """Return the options with the number format of passes: the base's, or bfloat16 as in fsdp2.yaml."""
    return replace(options, dtype="bfloat16") if is_spread(options) else options


def _spread(memory: Memory, base: PreTrainedModel, options: MemoryCommand, whole: int) -> Memory:
    """Convert a memory that is counted in bfloat16 to that of one process under FSDP2.

    Trained weights, their gradients and moments are float32, frozen models bfloat16, and a process holds a share of
    each. It holds two layers whole (the next one is fetched ahead), the gradients of a layer, and the buffer that sums
    those of the previous one; and `whole` times the weights outside of layers, which stay with their gradients until
    the backward pass ends. Earlier micro-batches left the share of all gradients. Adam's step is fused and needs no
    more.
    """
    trained, processes = memory.optimizer / 2, options.num_processes
    gradients = 2 * trained / processes
    layers = [part for part in base.modules() if type(part).__name__ in base._no_split_modules]
    layer = max(_bytes(part.parameters()) for part in layers)
    outside = _bytes(base.parameters()) - sum(_bytes(part.parameters()) for part in layers)
    return replace(
        memory,
        weights=(memory.weights + trained) / processes,
        optimizer=2 * memory.optimizer / processes,
        generation=memory.generation and memory.generation + 2 * layer + outside,
        training=gradients + memory.training + 4 * layer + whole * outside,
    )


def base_bytes(base: PreTrainedModel, options: ModelConfig) -> float:
    """Return the bytes of one model's weights; in 4 bits only the linear layers of the blocks shrink."""
    blocks = list(_adapted(base, "all-linear")) if options.load_in_4bit else []
    return _bytes(base.parameters()) + sum(w.numel() * FOUR_BITS for w in blocks) - _bytes(blocks)


def adapter_bytes(base: PreTrainedModel, options: ModelConfig) -> int:
    """Return the bytes of one adapter, without a score head."""
    layers = _adapted(base, options.lora_target_modules)
    return ADAPTER_BYTES * options.lora_r * sum(sum(w.shape) for w in layers)


def empty_base(options: ModelConfig) -> PreTrainedModel:
    """Return the model's modules without weights, from its config. Raises `InputError` if there is no config."""
    name = options.model
    config, folder = known_config(name), Path(name).expanduser()
    is_folder = name not in EMBEDDED_MODELS and folder.is_dir()  # it needs no tokenizer here
    path = str(folder) if is_folder or config else model_path(name)
    try:
        config = config or AutoConfig.from_pretrained(path, **NO_CODE)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--model {name}: no config ({reason}): check the name, or give a folder with it") from None
    dtype = config.dtype or torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
    attention = None if options.attn_implementation == "auto" else options.attn_implementation
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention, **NO_CODE)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _adapted(base: PreTrainedModel, targets: str) -> Iterable[Tensor]:
    """Yield the weights that get an adapter: those of the blocks' linear layers (GPT-2: Conv1D) named in `targets`."""
    for name, module in base.named_modules():
        linear = isinstance(module, nn.Linear | Conv1D) and module is not base.get_output_embeddings()
        if linear and (targets == "all-linear" or re.fullmatch(targets, name)):
            yield module.weight


def training_bytes(
    base: PreTrainedModel, options: ModelConfig, rows: int, prompt: int, response: int, trained: int
) -> float:
    """Return the bytes that a micro-batch's forward and backward pass through policy and critic needs beside weights.

    `trained` is the bytes of all gradients, which earlier micro-batches left.
    """
    kept, again = activation_bytes(base, options, rows * (prompt + response))
    logits = 4 * 4 * min(rows * response * base.config.get_text_config().vocab_size, MAX_LOGITS)  # two are gradients
    # The backward pass goes through the critic first, then through the policy, whose head comes first.
    return trained + max(2 * kept + max(logits, again), kept + head_gradient_bytes(base, options))


def head_gradient_bytes(base: PreTrainedModel, options: ModelConfig) -> int:
    """Return the bytes for making the gradient of a trained head: sums in float32, and a rounded copy."""
    weight = base.get_output_embeddings().weight
    return (4 + weight.element_size()) * weight.numel() if options.finetune == "full" else 0


def merged_bytes(base: PreTrainedModel, options: MemoryCommand) -> int:
    """Return the bytes of the weights that sampling copies to merge the adapter into them; 0 if it makes no copies.

    See `training.rollout.merged_adapter`.
    """
    copies = _bytes(_adapted(base, options.lora_target_modules))
    plain = options.finetune == "lora" and not options.load_in_4bit and base.dtype == torch.float32
    return copies if plain and copies <= MERGED_SHARE * options.gpu * GIB else 0


def activation_bytes(base: PreTrainedModel, options: ModelConfig, tokens: int) -> tuple[float, float]:
    """Return the bytes that one model keeps of `tokens` tokens for its backward pass, and the bytes computed again.

    A layer keeps the inputs of its products and norms; over 4 bits, PEFT, which computes the adapters, keeps those
    of products in float32, once for each. With gradient checkpointing a layer keeps only its own input, and one at a
    time is computed again. Real modules keep up to a third more or less.
    """
    config, element = base.config.get_text_config(), base.dtype.itemsize
    hidden, layers = config.hidden_size, config.num_hidden_layers
    queries, keys, inner = _widths(config)
    inputs = element * (2 * hidden + queries + inner)
    if options.load_in_4bit:
        inputs = ADAPTER_BYTES * (5 * hidden + queries + inner)
    norms = 4 * hidden * (4 if options.finetune == "full" else 2)  # a weight that trains needs the scaled input, too
    layer = tokens * (inputs + element * (queries + 2 * keys + 3 * inner) + norms)
    if not options.gradient_checkpointing:
        return layers * layer, 0
    return layers * tokens * hidden * element, layer


def generation_bytes(base: PreTrainedModel, rows: int, width: int, adapters: bool) -> float:
    """Return the bytes of keys and values of `rows` sequences of `width` tokens, and of a layer's pass or the logits.

    The pass reads only the prompts. It is counted for `width` tokens, because allocators lose more here than elsewhere
    while the cache grows (measured: benchmarks/README.md). `adapters` beside quantised weights set the number format
    of the pass.
    """
    config, element = base.config.get_text_config(), base.dtype.itemsize
    _, keys, inner = _widths(config)
    cache = rows * width * config.num_hidden_layers * 2 * keys * element
    layer = rows * width * (ADAPTER_BYTES if adapters else element) * (3 * inner + 4 * config.hidden_size)
    return cache + max(layer, rows * config.vocab_size * (element + 16))


def _widths(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return the elements of a token's queries, of its keys (and of its values), and inside the MLP."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return heads * head_dim, key_heads * head_dim, getattr(config, "intermediate_size", None) or 4 * hidden


def memory_table(memory: Memory, gpu: float = 0.0) -> str:
    """Format the parts in GiB, and whether they fit a card of `gpu` GiB."""
    parts = asdict(memory)
    lines = [f"{name:<11} {size / GIB:8.2f} GiB" for name, size in parts.items() if size]
    lines.append(f"{'peak':<11} {memory.peak / GIB:8.2f} GiB  (generation and training take turns; 5 % for fragments)")
    if gpu:
        lines.append(f"{'fits' if memory.peak <= gpu * GIB else 'does not fit'} a card of {gpu:g} GiB")
    return "\n".join(lines)
