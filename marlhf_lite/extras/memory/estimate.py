"""Estimate the GPU memory of SFT, reward model and PPO from the model's config alone: no weights are loaded.

Weights, optimizer, logits, and the cache of keys and values are counted; activations follow a rule of thumb, which a
test compares with the allocations of real modules.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from marlhf_lite.config.commands import MemoryCommand
from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.config.support import refuse_what_does_not_go_together
from marlhf_lite.models.architectures import known_config
from marlhf_lite.models.door import empty_model, read_config
from marlhf_lite.models.fast.switch import levers_of_choice
from marlhf_lite.models.logprobs import MAX_LOGITS
from marlhf_lite.models.tokenizers import model_path
from marlhf_lite.training.memory_limit import FEW_ROWS
from marlhf_lite.training.rollout import MERGED_SHARE
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.less_memory import rows_a_pass
from marlhf_lite.utils.tables import markdown

GIB = 2**30
ADAPTER_BYTES = 4  # adapters are float32 for every base
FOUR_BITS = 0.516  # bytes per weight: 4 bits, and doubly quantised scales of blocks of 64
CUDA_CONTEXT = 0.6 * GIB  # CUDA's own memory, about the same on all cards
# TRL's SFT computes logits in tiles: at a time of this many tokens, and of this many of the vocabulary's words.
TOKENS_OF_TILE = 4096
WORDS_OF_TILE = 32_768
FRAGMENTS = 1.05  # what allocators hold beyond live tensors
STAGES = {"sft": "SFT", "rm": "reward model", "ppo": "PPO"}


@dataclass(frozen=True)
class Memory:
    """Bytes by part. `loading`, `generation` and `training` take turns, so the largest of the three counts."""

    weights: float  # of the base, or of all models
    adapters: float
    optimizer: float  # Adam's two moments
    generation: float  # keys and values, a prefill pass, and copies with the adapter merged
    training: float  # gradients, activations and logits of a micro-batch
    loading: float = 0.0  # all models whole, before FSDP2 shares them
    cuda: float = CUDA_CONTEXT

    @property
    def peak(self) -> float:
        """Return the largest number of bytes at one time; while models are loaded, nothing else is there."""
        fixed = self.weights + self.adapters + self.optimizer
        while_it_runs = fixed + max(self.generation, self.training)
        return max(while_it_runs, self.loading) * FRAGMENTS + self.cuda


def memory_report(options: MemoryCommand) -> str:
    """Return a table in GiB of what each stage needs, and whether it fits a card of `--gpu` GiB.

    Raises `InputError` for weights that training refuses.
    """
    four_bits = "yes" if options.load_in_4bit else "no"
    refuse_what_does_not_go_together(
        {"finetune": options.finetune, "4 bits": four_bits, "stage": "ppo"}
    )
    stages = list(STAGES)
    # Such data have no pairs to train a reward model on.
    if options.reward in ("tests", "all_tests"):
        stages.remove("rm")
    needs = [estimate_memory(options, stage) for stage in stages]

    shares_models = options.finetune == "full" and options.num_processes > 1
    parts = [field.name for field in fields(Memory)] + ["peak"]
    if not shares_models:  # only FSDP2 first loads every model whole
        parts.remove("loading")
    rows = []
    for part in parts:
        rows.append([part, *(f"{getattr(memory, part) / GIB:.2f}" for memory in needs)])
    if options.gpu:
        row = [f"a card of {options.gpu:g}"]
        for memory in needs:
            row.append("fits" if memory.peak <= options.gpu * GIB else "does not fit")
        rows.append(row)
    note = "Generation and training take turns; the peak has 5 % for fragments. docs/scaling.md says what saves memory."
    if shares_models:
        note += f"\n{_note_on_cpu_memory(options)}"
    heads = ["GiB", *(STAGES[stage] for stage in stages)]
    return f"{markdown(heads, rows)}\n\n{note}"


def _note_on_cpu_memory(options: MemoryCommand) -> str:
    """Return what the machine's own memory (not a card's) must hold under FSDP2: each process reads models into it."""
    base = empty_base(options)
    read = _bytes(base.parameters()) / GIB
    written = 4 * base.num_parameters() / GIB  # trained weights are float32
    each = f"{read:.0f} GiB for each process while it reads a model"
    return f"CPU memory under FSDP2: {each}, and {written:.0f} GiB for the first one while it writes one."


def estimate_memory(options: MemoryCommand, stage: str = "ppo") -> Memory:
    """Estimate the memory of one process, one of `--num_processes`, that trains `sft`, `rm` or `ppo` on a GPU.

    All rows of the batch are as long as allowed: prompts of --max_prompt_length, responses of --max_response_length. If
    a card of --gpu GiB has room for them, sampling makes copies of weights with LoRA's adapter merged; without --gpu
    they are not counted. Adapters are computed as `--fast` says for a GPU: by PEFT, unless it takes the lever `lora`.
    With --gradient_checkpointing auto, activations are recomputed unless a card of --gpu GiB has room for all of PPO's.
    On a CPU a process needs more: about 0.5 GiB for its libraries, and copies that its matrix products make.

    Under FSDP2 trained weights, their gradients and moments are float32, frozen models bfloat16, and a process holds a
    share of each. Passes are in bfloat16. A process holds two layers whole (the next one is fetched ahead), the
    gradients of a layer, and the buffer that sums those of the previous one; and the weights outside of layers of each
    model that trains, with a reward model's or critic's gradient, until the backward pass ends (a language model's is
    that of the head). Adam's step is fused and needs no more. But first each process loads every model whole onto its
    card, in --dtype, and only then keeps its share.
    """
    trains_all_weights = options.finetune == "full"
    is_ppo = stage == "ppo"
    # FSDP2 shares the weights. With LoRA processes run under DDP, and each has the whole base.
    is_shared = trains_all_weights and options.num_processes > 1
    if is_ppo and options.gradient_checkpointing == "auto":
        rows = options.micro_batch_size or FEW_ROWS
        keeps_all = replace(options, gradient_checkpointing=False, micro_batch_size=rows)
        if_all_are_kept = estimate_memory(keeps_all)
        # Under FSDP2 activations are always recomputed: processes wait for each other in each layer, so none can try to
        # do without.
        if if_all_are_kept.peak <= options.gpu * GIB and not is_shared:
            return if_all_are_kept

    base = empty_base(replace(options, dtype="bfloat16") if is_shared else options)
    config = base.config.get_text_config()
    element = base.dtype.itemsize
    base_size = _bytes(base.parameters())
    head = base.get_output_embeddings().weight
    trains_language_model = stage != "rm"
    trains_score_model = stage != "sft"  # the critic of PPO, or the reward model

    # 1. Weights, adapters and moments, which are there all the time. `language_model` and `score_model` are the bytes
    #    that one model of each kind adds: all its weights, or with LoRA its adapter. A score model has a head of one
    #    number in place of the head of words.
    if trains_all_weights:
        # A tied head is the matrix of the embeddings, which a score model needs.
        head_of_words = 0 if config.tie_word_embeddings else _bytes([head])
        language_model = base_size
        score_model = base_size - head_of_words + config.hidden_size * element
        unused_score_head = 0
    else:
        score_head = ADAPTER_BYTES * config.hidden_size
        language_model = adapter_bytes(base, options)
        score_model = language_model + score_head
        # Beside the head that it trains or loads, PEFT keeps the head as it was.
        unused_score_head = score_head
    trained = frozen = unused_score_heads = 0
    if trains_language_model:
        trained += language_model
    if trains_score_model:
        trained += score_model
        unused_score_heads += unused_score_head
    if is_ppo:  # the reference
        frozen += language_model
    if is_ppo and options.reward == "rm":
        frozen += score_model
        unused_score_heads += unused_score_head
    processes = options.num_processes if is_shared else 1
    # FSDP2 trains in float32: four bytes for each weight that was read in bfloat16.
    growth = 4 // element if is_shared else 1
    # The bytes of the trained weights, which their gradients and each of Adam's two moments take as well.
    states = growth * trained / processes
    if trains_all_weights:
        weights = states + frozen / processes
        adapters = 0
    else:
        weights = base_bytes(base, options)
        adapters = trained + frozen + unused_score_heads

    # 2. A training pass. The backward pass goes through the critic first, then through the policy, from its head on.
    if is_ppo:
        batch = options.batch_size
        rows_asked = options.micro_batch_size or 1
    else:
        batch = getattr(options, f"{stage}_batch_size")
        rows_asked = options.per_device_train_batch_size
    rows_of_process = max(batch // options.num_processes, 1)
    texts_of_row = 2 if stage == "rm" else 1  # a pair has two
    rows = rows_a_pass(rows_asked, rows_of_process) * texts_of_row
    longest = options.max_prompt_length + options.max_response_length
    adapters_by_peft = computes_adapters_by_peft(options)
    kept, computed_again = activation_bytes(base, options, rows * longest, adapters_by_peft)
    logits = 0
    # PPO has four copies in float32, two of them gradients. Above MAX_LOGITS it computes them in tiles, too.
    if is_ppo:
        logits = 4 * 4 * min(rows * options.max_response_length * config.vocab_size, MAX_LOGITS)
    elif trains_language_model:
        logits = element * min(rows * longest, TOKENS_OF_TILE) * WORDS_OF_TILE
    head_gradient = 0
    if trains_all_weights and trains_language_model:  # sums in float32, and a rounded copy
        head_gradient = (4 + element) * head.numel()
    models_that_train = trains_language_model + trains_score_model
    # At the start of the backward pass all models keep their activations. When the head gets its gradient, those of the
    # critic are free again.
    at_its_start = models_that_train * kept + max(logits, computed_again)
    at_the_head = kept + head_gradient
    passes = max(at_its_start, at_the_head)

    # 3. What FSDP2 has whole: layers while they run, weights outside of layers, and while it loads, every model.
    layer = outside = loading = 0
    if is_shared:
        layer, outside = whole_bytes(base)
        # policy, critic and reference, perhaps a reward model; one model in the other stages
        models_of_stage = 3 + (options.reward == "rm") if is_ppo else 1
        loading = models_of_stage * _bytes(empty_base(options).parameters())
    # Two layers, the gradients of a layer, and the buffer that sums those of the previous layer.
    whole_in_training = 4 * layer
    if trains_language_model:
        whole_in_training += outside
    if trains_score_model:  # twice, because the gradient stays until the backward pass ends
        whole_in_training += 2 * outside

    # 4. Sampling, which only PPO does.
    generation = 0
    if is_ppo:
        sampled = options.generation_batch_size or rows_of_process
        if options.num_processes > 1:
            sampled = min(sampled, rows_of_process)
        generation = merged_bytes(base, options) + 2 * layer + outside  # this layer and the next
        generation += generation_bytes(base, sampled, longest, adapters_by_peft)
    return Memory(
        weights=weights,
        adapters=adapters,
        optimizer=2 * states,
        generation=generation,
        training=states + passes + whole_in_training,
        loading=loading,
    )


def whole_bytes(base: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes of a model's largest layer, and of its weights outside of layers."""
    layers = [part for part in base.modules() if type(part).__name__ in base._no_split_modules]
    outside = _bytes(base.parameters()) - sum(_bytes(part.parameters()) for part in layers)
    return max(_bytes(part.parameters()) for part in layers), outside


def base_bytes(base: PreTrainedModel, options: ModelConfig) -> float:
    """Return the bytes of one model's weights; with 4 bits, only the linear layers of the blocks have 4 bits."""
    blocks = list(_adapted(base, "all-linear")) if options.load_in_4bit else []
    return _bytes(base.parameters()) + sum(w.numel() * FOUR_BITS for w in blocks) - _bytes(blocks)


def adapter_bytes(base: PreTrainedModel, options: ModelConfig) -> int:
    """Return the bytes of one adapter, without a score head.

    A weight [out, in] gets two matrices: [r, in] and [out, r].
    """
    layers = _adapted(base, options.lora_target_modules)
    return ADAPTER_BYTES * options.lora_r * sum(sum(w.shape) for w in layers)


def empty_base(options: ModelConfig) -> PreTrainedModel:
    """Return the model's modules without weights, from its config. Raises `InputError` if there is no config."""
    name = options.model
    folder = Path(name).expanduser()
    is_folder = name not in EMBEDDED_MODELS and folder.is_dir()
    if is_folder and not (folder / "config.json").is_file():
        raise InputError(f"--model {name}: no config: check the name, or give a folder with it")
    config = known_config(name)  # of the paper's models, which need no network; else None
    if config is None:
        # `model_path` would ask a folder for a tokenizer, too, which is not needed here.
        path = str(folder) if is_folder else model_path(name)
        config = read_config(f"--model {name}", path)
    if options.dtype == "auto":
        dtype = config.dtype or torch.float32
    else:
        dtype = getattr(torch, options.dtype)
    return empty_model(config, dtype=dtype)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _adapted(base: PreTrainedModel, targets: str) -> Iterable[Tensor]:
    """Yield the weights that get an adapter: those of the blocks' linear layers (GPT-2: Conv1D) named in `targets`."""
    for name, module in base.named_modules():
        is_linear = isinstance(module, nn.Linear | Conv1D)
        is_head = module is base.get_output_embeddings()
        is_named = targets == "all-linear" or re.fullmatch(targets, name)
        if is_linear and not is_head and is_named:
            yield module.weight


def merged_bytes(base: PreTrainedModel, options: MemoryCommand) -> int:
    """Return the bytes of the weights that sampling copies to merge the adapter into them; 0 if it makes no copies.

    See `training.rollout.merged_adapter`.
    """
    # Only into float32: in other formats the sum of a weight and a small adapter would round the adapter away.
    can_merge = (
        options.finetune == "lora" and not options.load_in_4bit and base.dtype == torch.float32
    )
    copies = _bytes(_adapted(base, options.lora_target_modules))
    has_room = copies <= MERGED_SHARE * options.gpu * GIB
    return copies if can_merge and has_room else 0


def computes_adapters_by_peft(options: ModelConfig) -> bool:
    """Return whether a run on a GPU leaves the adapters to PEFT; False if there are no adapters.

    It leaves them unless `--fast` takes the lever `lora`, which needs weights that are not quantised. On a GPU
    `--fast auto` takes that lever only once a record shows equal numbers there.
    """
    if options.finetune != "lora":
        return False
    return options.load_in_4bit or "lora" not in levers_of_choice(options.fast, "cuda")


def activation_bytes(
    base: PreTrainedModel, options: ModelConfig, tokens: int, adapters_by_peft: bool
) -> tuple[float, float]:
    """Return the bytes that one model keeps of `tokens` tokens for its backward pass, and the bytes computed again.

    A layer keeps the inputs of its products and norms. PEFT computes adapters in float32: with `adapters_by_peft`, if
    the model has another format, each product keeps a copy of its input in float32, also if several products have the
    same input. With gradient checkpointing a layer keeps only its own input, and one layer at a time is computed again.
    Real modules keep up to a third more or less. What kernels of `--fast fused` save is not counted.
    """
    config = base.config.get_text_config()
    element = base.dtype.itemsize
    hidden = config.hidden_size
    layers = config.num_hidden_layers
    queries, keys, inner = _widths(config)
    # The inputs of products. Queries, keys and values have one hidden state as their input, and so have the two
    # products that begin the MLP.
    inputs = element * (2 * hidden + queries + inner)
    if adapters_by_peft and (options.load_in_4bit or base.dtype != torch.float32):
        # Five products have a hidden state as their input: those of queries, keys and values, and two of the MLP.
        inputs = ADAPTER_BYTES * (5 * hidden + queries + inner)
    # Two norms, in float32. A norm's weight that trains needs the scaled input, too.
    norms = 4 * hidden * (4 if options.finetune == "full" else 2)
    layer = tokens * (inputs + element * (queries + 2 * keys + 3 * inner) + norms)
    if not options.gradient_checkpointing:
        return layers * layer, 0
    return layers * tokens * hidden * element, layer


def generation_bytes(base: PreTrainedModel, rows: int, width: int, adapters_by_peft: bool) -> float:
    """Return the bytes that sampling `rows` sequences of `width` tokens needs beside the weights.

    They are the cache of keys and values, and either a layer's pass over the prompts or the logits, whichever is
    larger. The pass is counted for all `width` tokens, because allocators lose more here than elsewhere while the cache
    grows (measured: benchmarks/README.md). With `adapters_by_peft` a layer's outputs are in float32, as PEFT computes
    adapters.
    """
    config = base.config.get_text_config()
    element = base.dtype.itemsize
    _, keys, inner = _widths(config)
    tokens = rows * width
    cache = tokens * config.num_hidden_layers * 2 * keys * element
    element_of_outputs = ADAPTER_BYTES if adapters_by_peft else element
    layer = tokens * element_of_outputs * (3 * inner + 4 * config.hidden_size)
    logits = rows * config.vocab_size * (element + 16)
    return cache + max(layer, logits)


def _widths(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return the elements of a token's queries, of its keys (and of its values), and inside the MLP."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return (
        heads * head_dim,
        key_heads * head_dim,
        getattr(config, "intermediate_size", None) or 4 * hidden,
    )
