"""Which faster ways give equal numbers on a device, and so which defaults its record allows: for gpu.py.

Each way is compared with the plain one (`--fast off`, activations kept) on the same models: policy and critic of the
16-bit benchmark with adapters that change something, and a copy of both in float32.
"""

from __future__ import annotations

import copy
import math

import peft
import torch
from gpu_updates import Bench, make_prompts
from torch import Tensor, nn

from marlhf_lite.models.actor_critic import checkpoint_activations, trainable, unwrap_peft
from marlhf_lite.models.fast.fused import use_fused_kernels
from marlhf_lite.models.fast.lora import MergedLoraLinear, use_merged_forward
from marlhf_lite.models.fast.switch import set_levers
from marlhf_lite.training.rollout import Rollout, Sampling, from_tokens, generate
from marlhf_lite.utils.tables import markdown

# Way -> the option that takes it, and names of two measurements of gpu.py: an update without the way, and one with it.
WAYS = {
    "lora": ("--fast lora", "2 lora: before", "3 lora: + 16-bit adapters"),
    "checkpointing": (
        "--gradient_checkpointing auto",
        "3 lora: + 16-bit adapters",
        "3 lora: + no checkpointing",
    ),
    "graph": ("--fast graph", "3 lora: + no checkpointing", "3 lora: + a graph samples"),
    "last_layer": (
        "--fast last_layer",
        "3 lora: + a graph samples",
        "3 lora: + rows aligned left, last layer at responses",
    ),
    "fused": (
        "--fast fused",
        "3 lora: + rows aligned left, last layer at responses",
        "3 lora: + fused kernels",
    ),
}
NEEDS_A_CARD = ("graph", "fused")
# Relative distances that count as equal. In float32 only the order of sums differs.
OUTPUTS_IN_FLOAT32 = 1e-4
GRADIENTS_IN_FLOAT32 = 1e-3
# In 16 bits every operation rounds, so two ways cannot agree as closely. There a way must be as exact as the plain one:
# at most this many times as far from float32.
AS_EXACT_IN_16_BITS = 1.5


def equal_numbers(bench: Bench, way: str) -> dict:
    """Compare outputs (log-probabilities and values) and gradients of a way with those of the plain way.

    In float32 they must be near the plain ones. In 16 bits, where every operation rounds, the way must be about as near
    to the plain numbers in float32 as the plain way in 16 bits is. `equal` is true if both hold for both.
    """
    trainer = bench.trainer("lora")
    texts = responses_of_different_lengths(bench)
    roles_of_the_trainer = nn.ModuleList([trainer.models.policy, trainer.models.critic])
    in_16_bits = change_adapters(copy.deepcopy(roles_of_the_trainer))  # the trainer is used again
    in_float32 = copy.deepcopy(in_16_bits).float()
    plain_found = {}
    found = {}
    for dtype, models in {"float32": in_float32, "bfloat16": in_16_bits}.items():
        roles = [role.model for role in models]
        make_plain(models, roles)
        plain_found[dtype] = numbers(models, texts)
        take(way, models, roles)
        found[dtype] = numbers(models, texts)
    is_equal = True
    distances = {}
    # In the order in which `numbers` returns outputs and gradients.
    limits = {"outputs": OUTPUTS_IN_FLOAT32, "gradients": GRADIENTS_IN_FLOAT32}
    for i, (name, limit) in enumerate(limits.items()):
        exact = plain_found["float32"][i]
        apart = distance(found["float32"][i], exact)
        of_the_way = distance(found["bfloat16"][i], exact)
        of_the_plain_way = distance(plain_found["bfloat16"][i], exact)
        is_as_exact = of_the_way <= AS_EXACT_IN_16_BITS * of_the_plain_way
        is_equal = is_equal and apart <= limit and is_as_exact
        distances[name] = {
            "float32": apart,
            "bfloat16": of_the_way,
            "bfloat16, plain": of_the_plain_way,
        }
    return {"equal": is_equal, "distances": distances}


def equal_tokens(bench: Bench) -> dict:
    """Compare the responses that a CUDA graph samples with those of transformers, from the same random numbers.

    In float32 all must be equal; the share of equal responses in 16 bits is only recorded.
    """
    in_16_bits = copy.deepcopy(bench.trainer("lora").models.policy.eval().model)
    prompts = make_prompts(bench.tokenizer, bench.args.batch, bench.args.prompt)
    sampling = Sampling(bench.args.response)
    shares = {}
    for model in (in_16_bits, copy.deepcopy(in_16_bits).float()):
        make_plain(model, [model])
        torch.manual_seed(0)
        plain_ids = generate(model, bench.tokenizer, prompts, sampling).response_ids
        take("graph", model, [model])
        torch.manual_seed(0)
        graph_ids = generate(model, bench.tokenizer, prompts, sampling).response_ids
        share = 0.0  # if the longest responses differ in length
        if plain_ids.shape == graph_ids.shape:
            share = (plain_ids == graph_ids).all(1).float().mean().item()
        shares[str(model.dtype).removeprefix("torch.")] = share
    return {"equal": shares["float32"] == 1, "share_of_equal_responses": shares}


def responses_of_different_lengths(bench: Bench) -> Rollout:
    """Return prompts of different lengths with random responses of different lengths, as rollouts have them."""
    rows = bench.args.micro
    prompts = make_prompts(bench.tokenizer, rows, bench.args.prompt)
    generator = torch.Generator().manual_seed(0)
    responses = []
    kept = []
    for row, prompt in enumerate(prompts):
        length = max(1, bench.args.response * (row + 1) // rows)
        ids = torch.randint(3, len(bench.tokenizer), (length,), generator=generator)
        responses.append(ids.tolist())
        kept.append(prompt[: len(prompt) // (1 + row % 2)])  # every second prompt is cut in half
    # `ends` are tokens after which a response counts as ended, which makes no difference here.
    return from_tokens(bench.tokenizer, kept, responses, ends=[]).to(bench.device)


@torch.no_grad()
def change_adapters(models: nn.Module) -> nn.Module:
    """Draw weights for the adapters' second matrices, and return `models`, in training mode.

    New adapters change nothing, because these matrices begin as zeros.
    """
    torch.manual_seed(0)
    for name, weight in models.named_parameters():
        if "lora_B" in name and weight.requires_grad:
            weight.normal_(0, 0.01)
    return models.train()


def numbers(models: nn.ModuleList, texts: Rollout) -> tuple[Tensor, Tensor]:
    """Return the outputs, which are log-probabilities and values at all response tokens, and one gradient.

    The gradient is that of a weighted sum of the outputs, in which each has another weight, for all adapters' weights.
    """
    policy, critic = models
    length = texts.mask.shape[1]
    logprobs, _ = policy(texts.tokens, texts.attention_mask, length)
    # The value V(s_t) stands at the token before action t.
    values = critic(texts.tokens, texts.attention_mask, length)[:, -length - 1 : -1]
    outputs = torch.cat([logprobs[texts.mask], values[texts.mask]])
    weights = torch.linspace(-1, 1, len(outputs), device=outputs.device)
    gradients = torch.autograd.grad((weights * outputs).sum(), trainable(models))
    flat = torch.cat([gradient.float().flatten() for gradient in gradients])
    return outputs.detach(), flat


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference, relative to `theirs`; infinite if a number of `ours` is not finite."""
    relative = ((ours - theirs).norm() / theirs.norm()).item()
    return relative if math.isfinite(relative) else math.inf


def make_plain(models: nn.Module, roles: list[nn.Module]) -> None:
    """Switch all ways off: no levers, PEFT's own adapters, and activations that are kept."""
    for module in models.modules():
        if type(module) is MergedLoraLinear:  # a Linear of PEFT whose class was exchanged
            module.__class__ = peft.tuners.lora.Linear
    for model in roles:
        set_levers(unwrap_peft(model), frozenset())
        unwrap_peft(model).gradient_checkpointing_disable()


def take(way: str, models: nn.Module, roles: list[nn.Module]) -> None:
    """Switch one way on. Fused kernels are then on for all models of this process, and cannot be switched off."""
    if way == "lora":
        use_merged_forward(models)
    for model in roles:
        if way == "fused":
            use_fused_kernels(unwrap_peft(model))
        elif way == "checkpointing":
            checkpoint_activations(model)
        else:
            set_levers(unwrap_peft(model), frozenset({way}))


def verdicts(found: dict[str, dict]) -> dict[str, bool]:
    """Return for each way that was compared whether its numbers are equal; a way that raised an error is not."""
    equal = {}
    for way in WAYS:
        line = found.get(f"1 equal: {way}", {})
        if "equal" in line or "error" in line:
            equal[way] = line.get("equal", False)
    return equal


def defaults(found: dict[str, dict]) -> str:
    """Return the table of the defaults that a record allows: ways with equal numbers that make an update faster."""
    equal = verdicts(found)
    rows = []
    for way, (option, before, after) in WAYS.items():
        numbers_are = {True: "equal", False: "differ", None: "not compared"}[equal.get(way)]
        seconds_before = found.get(before, {}).get("seconds_per_update")
        seconds_after = found.get(after, {}).get("seconds_per_update")
        times = ""
        allowed = "no"
        if seconds_before and seconds_after:
            times = f"{seconds_before:.2f} → {seconds_after:.2f}"
        if way == "fused":  # a default would refuse families that liger-kernel does not know
            allowed = "no: it needs a package"
        elif equal.get(way):
            allowed = "yes, if it is faster"
            if times:
                allowed = "yes" if seconds_after < seconds_before else "no: not faster"
        rows.append([option, numbers_are, times, allowed])
    return markdown(["option", "numbers", "s an update", "a default on this card"], rows)
