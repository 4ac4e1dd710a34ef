"""Updates on a device, with what makes them faster switched on and off, and what they had to compute: for gpu.py."""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from accelerate import PartialState
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GemmaConfig

from marlhf_lite.config.options import ModelConfig, PPOTrainerConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import PPOModels, checkpoint_activations, unwrap_peft
from marlhf_lite.models.architectures import known_config
from marlhf_lite.models.fast import last_layer, lora
from marlhf_lite.models.loading import (
    EMBEDDED_MODEL,
    build_models,
    load_base,
    load_tokenizer,
    new_policy,
    new_reward_model,
)
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training import rollout
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Sampling, generate

GIB = 2**30
# Peak of dense products in 16 bits, by a part of the card's name. The first part that fits counts, so "A100" stands
# before "A10".
TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "A10": 125, "L40": 181, "L4": 121, "T4": 65}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


# -- arithmetic -------------------------------------------------------------------------------------------------------


def training_flops(
    layers: int, head: int, tokens: float, response_tokens: float, way: str
) -> float:
    """Return the floating-point operations that scoring and training of an update need; see the top of gpu.py.

    `layers` and `head` are numbers of weights, `tokens` is the number of all real tokens of the batch. Reference,
    reward model, policy and critic read these tokens, and policy and critic also run backward. The head is needed for
    the log-probabilities of reference and policy, and only at the response tokens.
    """
    # Products in a backward pass for each one in a forward pass.
    backward = 2 if way == "full" else 1
    of_layers = 2 * layers * tokens * (4 + 2 * backward)  # four models, two of them backward
    of_head = 2 * head * response_tokens * (2 + backward)
    return of_layers + of_head


def generation_bytes(
    model, config, prompt_tokens: float, response_tokens: float, rows: int
) -> float:
    """Return the least number of bytes that sampling reads.

    Each step, which samples a token in every row, reads all weights, and the keys and values of all tokens so far.
    `prompt_tokens` and `response_tokens` are sums over the rows.
    """
    steps = response_tokens / rows
    weights = sum(p.nbytes for p in model.parameters())
    bytes_of_a_number = 2  # 16 bits
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim * bytes_of_a_number
    cache_of_a_token = config.num_hidden_layers * keys_and_values
    tokens_in_cache = prompt_tokens + response_tokens / 2  # of all rows, on average over the steps
    return steps * (weights + tokens_in_cache * cache_of_a_token)


# -- models -----------------------------------------------------------------------------------------------------------


def save_base(folder: Path, tiny: bool, dtype: torch.dtype) -> str:
    """Save a random model with the embedded model's tokenizer in `folder`, and return the folder."""
    config = GemmaConfig(**TINY) if tiny else known_config("google/gemma-2b")
    torch.manual_seed(0)
    with torch.device(PartialState().device):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    base.save_pretrained(folder)
    load_tokenizer(EMBEDDED_MODEL).save_pretrained(folder)
    return str(folder)


def build(options: ModelConfig, folder: Path) -> PPOModels:
    """Build the four models over one base, as SFT and the reward model leave them."""
    base = load_base(options)
    new_policy(base, options).save_pretrained(folder / "sft")
    new_reward_model(base, folder / "sft").save_pretrained(folder / "rm")
    return build_models(
        base, folder / "sft", folder / "rm", gradient_checkpointing=options.gradient_checkpointing
    )


def make_prompts(tokenizer, count: int, tokens: int) -> list[str]:
    """Return different texts of about `tokens` tokens: each has its number, and begins with another of the words."""
    words = "the friend of my uncle moved to the harbor and waited some days for a letter from the old town".split()
    texts = []
    for i in range(count):
        text = f"Post {i}:"
        k = i
        while len(tokenizer(text)["input_ids"]) < tokens - 4:
            text = f"{text} {words[k % len(words)]}"
            k = k + 7
        texts.append(text)
    return texts


def recompute(trainer: PPOTrainer, on: bool) -> None:
    """Let policy and critic recompute activations in the backward pass, or keep them."""
    for role in (trainer.models.policy, trainer.models.critic):
        if on:
            checkpoint_activations(role.model)
        else:
            unwrap_peft(role.model).gradient_checkpointing_disable()


def set_rows(trainer: PPOTrainer, rows: int) -> None:
    """Set how many rows go through the models in a pass."""
    trainer.state.micro_batch.now = rows
    trainer.reward.micro_batch_size = rows


# -- levers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lever:
    """Something that makes updates faster. Inside a block `with old(bench, trainer):` it is switched off."""

    name: str
    old: Callable[[Bench, PPOTrainer], AbstractContextManager]
    ways: tuple[str, ...] = ("lora", "full")  # of fine-tuning that the lever makes faster
    cuda_alone: bool = False


def peft_adapters(bench: Bench, trainer: PPOTrainer) -> AbstractContextManager:
    return mock.patch.dict(lora.WAYS, {torch.bfloat16: None, torch.float16: None})


@contextmanager
def checkpointing(bench: Bench, trainer: PPOTrainer) -> Iterator[None]:
    """Inside this block activations are recomputed and `--micro` rows go through in a pass, as without the lever."""
    recompute(trainer, on=True)
    set_rows(trainer, bench.args.micro)
    yield
    recompute(trainer, on=bench.args.checkpointing)
    set_rows(trainer, trainer.config.micro_batch_size)


def transformers_generate(bench: Bench, trainer: PPOTrainer) -> AbstractContextManager:
    return mock.patch.object(rollout, "has_plain_cache", lambda model: False)


def whole_rows(bench: Bench, trainer: PPOTrainer) -> AbstractContextManager:
    return mock.patch.object(last_layer, "has_plain_last_layer", lambda backbone: False)


LEVERS = (
    Lever("16-bit adapters", peft_adapters, ways=("lora",)),
    Lever("no checkpointing", checkpointing),
    Lever("a graph samples", transformers_generate, cuda_alone=True),
    Lever("rows aligned left, last layer at responses", whole_rows),
)


@contextmanager
def levers(bench: Bench, trainer: PPOTrainer, count: int) -> Iterator[None]:
    """Inside this block only the first `count` levers are on: those after them are switched off."""
    with ExitStack() as stack:
        for lever in LEVERS[count:]:
            stack.enter_context(lever.old(bench, trainer))
        yield


# -- measuring --------------------------------------------------------------------------------------------------------


GO_ON = 3  # status of a process after which the next one goes on


class OutOfTime(Exception):
    """No time is left for another measurement."""


class Bench:
    """The models that are loaded, and what was measured."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device(args.device)
        self.done = {line["name"] for line in read_log(args.log) if "begun" not in line}
        self.tokenizer = load_tokenizer(EMBEDDED_MODEL)
        self.loaded: tuple[tuple, PPOTrainer | None] = (), None  # a trainer, after what it is for

    def measure(
        self, name: str, work: Callable[..., dict], *given, ends_process: bool = False, **more
    ) -> None:
        """Write what `work(self, *given, **more)` returns as a line of the log, unless the log has it already.

        An error is written, too, and ends this process, because a card may be of no use after it. With `ends_process`
        a measurement that succeeds ends this process as well: it has changed what later ones would measure.
        """
        if name in self.done:
            return
        if time.time() > self.args.child:  # the deadline
            raise OutOfTime
        start = time.monotonic()
        write_line(self.args.log, {"name": name, "begun": True})
        try:
            found = work(self, *given, **more)
        except Exception as error:
            traceback.print_exc()
            write_line(
                self.args.log, {"name": name, "error": f"{type(error).__name__}: {error}"[:1000]}
            )
            raise SystemExit(1) from error
        write_line(self.args.log, {"name": name, **found, "measured_in": time.monotonic() - start})
        self.done.add(name)
        if ends_process:
            raise SystemExit(GO_ON)

    def trainer(
        self,
        way: str,
        dtype: str = "bfloat16",
        four_bits: bool = False,
        fused: bool = False,
        **sizes,
    ) -> PPOTrainer:
        """Return a trainer with all levers on: the loaded one if its arguments were the same, else a new one."""
        key = (way, dtype, four_bits, fused, *sizes.items())
        if self.loaded[0] == key:
            return self.loaded[1]
        self.unload()
        args = self.args
        sizes = {
            "batch_size": args.batch,
            "max_response_length": args.response,
            "prompt": args.prompt,
        } | sizes
        prompts = make_prompts(self.tokenizer, sizes["batch_size"], sizes.pop("prompt"))
        rates = {"policy_learning_rate": 1e-5, "critic_learning_rate": 1e-5}
        # Twice `--micro` with LoRA; full fine-tuning has no room for more rows without checkpointing.
        rows = args.micro * (2 if way == "lora" else 1)
        ppo = PPOTrainerConfig(n="5", updates=1000, micro_batch_size=rows, **sizes, **rates)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            base = save_base(folder / "model", args.tiny, getattr(torch, dtype))
            options = ModelConfig(
                model=base,
                finetune=way,
                dtype=dtype,
                load_in_4bit=four_bits,
                # All levers, whatever this card's defaults are: the benchmark switches them off itself.
                fast="lora,last_layer,graph,fused" if fused else "lora,last_layer,graph",
                gradient_checkpointing=args.checkpointing,
            )
            models = build(options, folder)
        reward = ModelReward(models.reward, ppo.micro_batch_size)
        trainer = PPOTrainer(models, self.tokenizer, prompts, reward, FixedNGram(5), ppo)
        self.loaded = key, trainer
        return trainer

    def unload(self) -> None:
        self.loaded = (), None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def start_peak(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """Return the most memory that torch held on the card since `start_peak`, in GiB, without CUDA's own.

        On a CPU it is the most that this process ever held.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved() / GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # from KiB


def updates(
    bench: Bench,
    way: str,
    on: int = len(LEVERS),
    profiled: bool = False,
    rows: int = 0,
    counts: tuple[int, int] | None = None,
    **model,
) -> dict:
    """Run updates with the first `on` levers, and return means over the updates after the warm-up.

    `counts` says how many updates warm up and how many are measured after them; default: what the options say. `rows`
    go through the models in a pass; 0: as many as the levers leave.
    """
    args = bench.args
    trainer = bench.trainer(way, **model)
    warmup, count = counts or (args.warmup, args.updates)
    set_rows(trainer, trainer.config.micro_batch_size)
    bench.start_peak()
    with levers(bench, trainer, on):
        if rows:
            set_rows(trainer, rows)
        recomputes = unwrap_peft(trainer.models.policy.model).is_activation_checkpointing
        metrics = []
        for i in range(warmup + count):
            torch.manual_seed(i)
            metrics.append(trainer.update(trainer.prompts))
        rows_a_pass = trainer.state.micro_batch.now  # fewer than asked for if memory ended
        found_in_profile = profile_update(bench, trainer) if profiled or args.profile else {}
        memory = bench.peak_gib()
    measured = metrics[-count:]
    last = measured[-1]
    mean = {}
    for name, value in last.items():
        if is_number(value):
            mean[name] = sum(row[name] for row in measured) / len(measured)
    are_finite = []  # of the warm-up, too
    for row in metrics:
        are_finite += [math.isfinite(row["value_loss"]), math.isfinite(row["policy_grad_norm"])]
    return {
        "way": way,
        "rows_a_pass": rows_a_pass,
        "checkpointing": recomputes,
        "seconds_per_update": mean["seconds"],
        "seconds_by_phase": seconds_by_phase(mean),
        "last_update": {name: last[name] for name in ("value_loss", "policy_grad_norm", "kl_k1")},
        "finite": all(are_finite),
        "skipped_steps": sum(row["skipped_steps"] for row in metrics),
        "peak_gib": memory,
        **rates(bench, trainer, way, mean),
        **found_in_profile,
    }


def is_number(value) -> bool:
    return isinstance(value, int | float)


def seconds_by_phase(row: dict) -> dict[str, float]:
    """Return a row's metrics `seconds_PHASE`, by phase."""
    prefix = "seconds_"
    found = {}
    for name, value in row.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = value
    return found


def rates(bench: Bench, trainer: PPOTrainer, way: str, mean: dict) -> dict:
    """Return the work of an update, MFU of scoring and training, and tokens and bytes of sampling in a second.

    MFU is None if the card's peak is unknown.
    """
    policy = trainer.models.policy.model
    prompts = encode_prompts(bench.tokenizer, trainer.prompts)
    config = unwrap_peft(policy).config
    prompt_tokens = sum(map(len, prompts))
    head = config.vocab_size * config.hidden_size
    shape = GemmaConfig(**TINY) if bench.args.tiny else known_config("google/gemma-2b")
    # Counted on another model of this shape, which takes no memory: weights of 4 bits cannot be counted.
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(shape).num_parameters() - head
    work = training_flops(layers, head, prompt_tokens + mean["tokens"], mean["tokens"], way)
    moved = generation_bytes(policy, config, prompt_tokens, mean["tokens"], len(prompts))
    spent = mean["seconds_scoring"] + mean["seconds_training"]
    card = torch.cuda.get_device_name() if bench.device.type == "cuda" else ""
    peak = bench.args.peak_tflops
    for name, tflops in TFLOPS.items():
        if not peak and name in card:
            peak = tflops
    return {
        "tflop": work / 1e12,
        "mfu": work / spent / (peak * 1e12) if peak else None,
        "generated_tokens_per_second": mean["tokens"] / mean["seconds_generation"],
        "generation_gb_per_second": moved / mean["seconds_generation"] / 1e9,
    }


def profile_update(bench: Bench, trainer: PPOTrainer) -> dict:
    """Return the 25 kernels that take longest in an update, and `busy`, the share of its time in which kernels run."""
    cuda = bench.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        start = bench.wait()
        row = trainer.update(trainer.prompts)
        spent = bench.wait() - start
    kernels = []
    for event in recorded.key_averages():
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        seconds = microseconds / 1e6
        kernels.append({"kernel": event.key[:160], "calls": event.count, "seconds": seconds})
    kernels.sort(key=lambda kernel: -kernel["seconds"])
    shown = {
        "busy": sum(kernel["seconds"] for kernel in kernels) / spent,
        "kernels": sum(kernel["calls"] for kernel in kernels),
        "seconds_by_phase": seconds_by_phase(row),
        "top": kernels[:25],
    }
    return {"profile": shown}


@dataclass(frozen=True)
class StaticCache(Sampling):
    """Sampling with transformers' cache of a fixed size; compiling takes longer than this script has."""

    def arguments(self) -> dict:
        return super().arguments() | {"cache_implementation": "static", "disable_compile": True}


def generation(bench: Bench, kind: type[Sampling], rows: int, graph: bool) -> dict:
    """Sample the same twice, the first time to warm up, and return seconds and rates of the second time."""
    trainer = bench.trainer("lora")
    prompts = make_prompts(bench.tokenizer, rows, bench.args.prompt)
    policy = trainer.models.policy.eval().model
    bench.start_peak()
    way = nullcontext() if graph else transformers_generate(bench, trainer)
    with way:
        for _ in range(2):
            torch.manual_seed(0)
            start = bench.wait()
            found = generate(policy, bench.tokenizer, prompts, kind(bench.args.response))
            spent = bench.wait() - start
    prompt_tokens = int(found.attention_mask[:, : found.prompt_width].sum())
    response_tokens = int(found.mask.sum())
    config = unwrap_peft(policy).config
    moved = generation_bytes(policy, config, prompt_tokens, response_tokens, rows)
    return {
        "seconds": spent,
        "tokens_per_second": response_tokens / spent,
        "gb_per_second": moved / spent / 1e9,
        "milliseconds_per_step": 1e3 * spent * rows / response_tokens,
        "peak_gib": bench.peak_gib(),
    }


# -- the log ----------------------------------------------------------------------------------------------------------


def read_log(path: Path) -> list[dict]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def write_line(path: Path, found: dict) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    without_profile = {name: value for name, value in found.items() if name != "profile"}
    print(json.dumps(without_profile), flush=True)
