"""How much memory a PPO run needs, from the model's config alone: nothing is downloaded but that, nothing computed.

The real modules run forward and backward on fake tensors, which have shapes and no data, while every storage that
lives is counted. So LoRA, activation checkpointing, chunked log-probabilities and attention are those of the run.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from peft import TaskType, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.actor_critic import (
    ActorCritic,
    PolicyModel,
    ScalarHeadModel,
    checkpoint_activations,
    position_ids,
)
from marlhf_lite.models.loading import EMBEDDED_MODEL, lora_config, model_path, share, with_head
from marlhf_lite.models.logprobs import HeadForm
from marlhf_lite.utils.errors import InputError

GIB = 2**30
FOUR_BITS = 0.516  # bytes a weight: 4 bits, and doubly quantised scales of blocks of 64
CUDA_CONTEXT = 0.6 * GIB  # CUDA's own, on a card; about as large on all of them
FRAGMENTS = 1.05  # what allocators hold beyond what lives


@dataclass(frozen=True)
class Memory:
    """Bytes by part. `generation` and `training` take turns: the larger one counts."""

    weights: float  # of the base, or of four models
    adapters: float
    optimizer: float  # Adam's two moments
    generation: float  # keys and values, and a prefill pass
    training: float  # activations, logits and gradients of a micro-batch, or the optimizer's step
    context: float

    @property
    def peak(self) -> float:
        fixed = self.weights + self.adapters + self.optimizer
        return (fixed + max(self.generation, self.training)) * FRAGMENTS + self.context


def estimate_memory(options: SimpleNamespace, gpu: bool = True) -> Memory:
    """Memory of one process that runs PPO with these options (groups model, data, ppo), without sharding.

    The longest batch that can come: prompts of --max_prompt_length, responses of
    --max_response_length. On a GPU, CUDA's own memory is added.
    """
    model, ppo = options.model, options.ppo
    base = empty_base(model)
    actors, frozen = bare_roles(base, model)
    width = options.data.max_prompt_length
    length = options.data.max_response_length
    trained = [p for p in actors.parameters() if p.requires_grad]
    whole = model.finetune == "full"
    adapters = 0 if whole else _bytes(trained) + _bytes(p for p in frozen.parameters() if p.dtype == torch.float32)
    models = [base] if not whole else [actors.policy, actors.critic, *frozen]
    rows, micro = ppo.generation_batch_size or ppo.batch_size, ppo.micro_batch_size or 1
    return Memory(
        weights=sum(_weights(one, model.load_in_4bit) for one in models),
        adapters=adapters,
        optimizer=2 * _bytes(trained),
        generation=_peak(actors, lambda: _prefill(actors.policy.model, rows, width + length), 0),
        training=_peak(actors, lambda: training_pass(actors, micro, width, length), 2 * _bytes(trained)),
        context=CUDA_CONTEXT if gpu else 0.0,
    )


def empty_base(options: ModelConfig) -> PreTrainedModel:
    """The model's shape without weights, from its config. Raises `InputError` where there is no config."""
    name = options.model
    try:
        config = AutoConfig.from_pretrained(model_path(name) if name == EMBEDDED_MODEL else name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--model {name}: no config ({reason}): check the name, or give a folder with it") from None
    dtype = config.dtype or torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
    attention = None if options.attn_implementation == "auto" else options.attn_implementation
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return base.requires_grad_(options.finetune == "full")


def bare_roles(base: PreTrainedModel, options: ModelConfig) -> tuple[ActorCritic, nn.ModuleList]:
    """`(policy and critic, the frozen two)`, on the meta device."""

    def make(score: bool) -> nn.Module:
        one = copy.deepcopy(base) if options.finetune == "full" else share(base)
        one = with_head(one, 0) if score else one
        if options.finetune == "full":
            return one.requires_grad_(True)
        return get_peft_model(one, lora_config(options, TaskType.SEQ_CLS if score else TaskType.CAUSAL_LM))

    actors = ActorCritic(PolicyModel(make(False)), ScalarHeadModel(make(True))).train()
    text = base.config.get_text_config()
    actors.policy.form = HeadForm(softcap=getattr(text, "final_logit_softcapping", None))
    if options.gradient_checkpointing:
        for role in (actors.policy, actors.critic):
            checkpoint_activations(role.model)
    return actors, nn.ModuleList([make(False), make(True)])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _weights(model: nn.Module, four_bits: bool) -> float:
    """Bytes of a model's weights; tied ones once. In 4 bits the linear layers of the blocks shrink, no others."""
    total = _bytes(model.parameters())
    if four_bits:
        head = model.get_output_embeddings()
        blocks = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        total += sum(w.numel() * FOUR_BITS for w in blocks) - _bytes(blocks)
    return total


def _peak(module: nn.Module, work: Callable[[], None], least: float) -> float:
    """The most that lives at a time while `work` runs, over and above the weights; at least `least`."""
    with FakeTensorMode():
        _fake(module)
        with _Live() as live:
            work()
    return max(live.peak, least)


def _fake(module: nn.Module) -> None:
    """Give every parameter and buffer a shape on a device, but no data; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, old in store.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                store[name] = made[id(old)]


def _prefill(model: nn.Module, rows: int, width: int) -> None:
    """Keys and values of `rows` whole sequences, and one position's logits of each."""
    tokens = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.ones_like(tokens)
    model.eval()
    with torch.no_grad():
        out = model(input_ids=tokens, attention_mask=mask, position_ids=position_ids(mask), logits_to_keep=1)
        torch.softmax(out.logits.float(), -1).sort()
    model.train()


def training_pass(actors: ActorCritic, rows: int, prompt: int, length: int) -> None:
    """Forward and backward of a micro-batch."""
    tokens = torch.zeros(rows, prompt + length, dtype=torch.long)
    logprobs, _, scores = actors(tokens, torch.ones_like(tokens), length)
    (logprobs.sum() + scores.sum()).backward()


class _Live(TorchDispatchMode):
    """Bytes of the storages that operations made and that something still holds."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.sizes = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known:  # a view holds nothing new
                self._add(x.untyped_storage())
        return out

    def _add(self, storage) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += self.sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def memory_table(memory: Memory, gpu: float = 0.0) -> str:
    """The parts in GiB, and whether they fit a card of `gpu` GiB."""
    parts = {
        "weights": memory.weights,
        "adapters": memory.adapters,
        "optimizer": memory.optimizer,
        "generation": memory.generation,
        "training": memory.training,
        "CUDA": memory.context,
    }
    lines = [f"{name:<11} {size / GIB:8.2f} GiB" for name, size in parts.items() if size]
    lines.append(f"{'peak':<11} {memory.peak / GIB:8.2f} GiB  (generation and training take turns; 5 % for fragments)")
    if gpu:
        fits = memory.peak <= gpu * GIB
        verdict = "fits" if fits else "does not fit"
        lines.append(f"{verdict} a card of {gpu:g} GiB" + ("" if fits else f": {_advice(memory)}"))
    return "\n".join(lines)


def _advice(memory: Memory) -> str:
    if memory.weights > memory.peak / 2:
        return "the weights are most of it: --load_in_4bit, --finetune lora, a smaller --model, or sharding (FSDP)"
    if memory.generation > memory.training:
        return "lower --generation_batch_size"
    return "lower --micro_batch_size, or --gradient_checkpointing"
