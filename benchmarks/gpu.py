"""What can only be seen on a GPU, in one command of at most 9 minutes without a network: `make gpu`.

Tests of kernels, autocast and checkpointing on the card; PPO and MA-PPO on the architecture of Gemma-2B with random
bfloat16 weights, with LoRA and with full fine-tuning, sampled by transformers and by a vLLM server on the same card:
tokens a second, seconds by phase, the share of the card's arithmetic, and peak memory against `marlhf memory`; how far
the server's log-probabilities are from the trainer's; a 4-bit base; the launch files with one process. All goes into
one JSON file.

    python benchmarks/gpu.py --vllm ../vllm-venv/bin/vllm  # one card of 80 GB; without --vllm, vLLM is left out
    python benchmarks/gpu.py --device cpu --tiny           # every part on a tiny model, to test this script
    python benchmarks/gpu.py --device cpu --parts update --updates 1 --batch 8 --micro 2  # Gemma-2B, about 10 GiB
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, GemmaConfig

from marlhf_lite.config.commands import MemoryCommand
from marlhf_lite.config.options import ModelConfig, PPOTrainerConfig
from marlhf_lite.extras.memory.estimate import GIB, estimate_memory
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import PPOModels
from marlhf_lite.models.architectures import known_config
from marlhf_lite.models.loading import (
    EMBEDDED_MODEL,
    build_models,
    load_base,
    load_tokenizer,
    new_policy,
    new_reward_model,
)
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import generate
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import environment

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "marlhf_lite" / "config" / "accelerate"
TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "A10": 125, "L40": 181, "L4": 121, "T4": 65}  # dense, 16 bits
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
WAYS = ("lora", "full")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short responses, to test this script")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, comma-separated")
    for name, default in {"updates": 4, "batch": 64, "micro": 8, "prompt": 256, "response": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", default=",".join(WAYS), help="ways of fine-tuning, comma-separated")
    parser.add_argument("--vllm", default=shutil.which("vllm") or "", help="the vllm program, of another environment")
    parser.add_argument("--vllm_share", type=float, default=0.2, help="share of the card's memory for the server")
    parser.add_argument("--port", type=int, default=8017, help="of the server")
    parser.add_argument("--n", default="1,5", help="tokens a macro action, comma-separated; 1 is PPO")
    parser.add_argument("--peak_tflops", type=float, default=0.0, help="the card's dense 16-bit TFLOP/s, if unknown")
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit; later parts are left out")
    parser.add_argument("--out", default="", help="JSON file; default data/results/gpu/CARD.json")
    args = parser.parse_args(argv)
    if args.tiny:
        args.updates, args.batch, args.micro, args.prompt, args.response = 2, 4, 2, 16, 8
    args.deadline = time.monotonic() + args.seconds
    return args


# The model


def model_folder(args: argparse.Namespace, folder: Path) -> Path:
    """Save a random model in bfloat16 with a tokenizer, and return its folder."""
    config = GemmaConfig(**TINY) if args.tiny else known_config("google/gemma-2b")
    with torch.device(PartialState().device):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    base.save_pretrained(folder / "model")
    load_tokenizer(EMBEDDED_MODEL).save_pretrained(folder / "model")
    return folder / "model"


def build(options: ModelConfig, folder: Path) -> PPOModels:
    """Build the four models over one base, as SFT and the reward model leave them."""
    base = load_base(options)
    new_policy(base, options).save_pretrained(folder / "sft")
    new_reward_model(base, folder / "sft").save_pretrained(folder / "rm")
    return build_models(base, folder / "sft", folder / "rm", gradient_checkpointing=options.gradient_checkpointing)


def make_prompts(tokenizer, count: int, tokens: int) -> list[str]:
    """Return different texts of about `tokens` tokens."""
    words = "the friend of my uncle moved to the harbor and waited some days for a letter from the old town".split()
    texts = []
    for i in range(count):
        text, k = f"Post {i}:", i
        while len(tokenizer(text)["input_ids"]) < tokens - 4:
            text, k = f"{text} {words[k % len(words)]}", k + 7
        texts.append(text)
    return texts


def reset_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Return the most bytes on the card since `reset_peak`, CUDA's own left out; on a CPU of the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flops(parameters: int, row: dict, args: argparse.Namespace, way: str, engine: str) -> float:
    """Return the operations of an update's matrix products with the base's weights.

    Two a weight and token forward (sampling, reference, reward model, policy, critic), and two backward for policy and
    critic, or four where all weights train. Checkpointing's second forward pass is not counted, nor what a server does.
    """
    tokens = args.batch * args.prompt + row["tokens"]
    forward, backward = 5 - (engine == "vllm"), 2 * (1 + (way == "full"))
    return 2 * parameters * tokens * (forward + backward)


def measure(
    args: argparse.Namespace, n: int, way: str = "lora", load_in_4bit: bool = False, engine: str = "transformers"
) -> dict:
    """Run updates with macro actions of n tokens and return means over all but the first, which warms up."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ModelConfig(
            model=str(model_folder(args, folder)),
            finetune=way,
            dtype="bfloat16",
            gradient_checkpointing=True,
            load_in_4bit=load_in_4bit,
        )
        with server(args, options, folder) if engine == "vllm" else nullcontext() as servers:
            reset_peak()
            models, tokenizer = build(options, folder), load_tokenizer(EMBEDDED_MODEL)
            rows = run_trainer(args, n, models, tokenizer, servers)
        lengths = {"max_prompt_length": args.prompt, "max_response_length": args.response}
        sizes = {"batch_size": args.batch, "micro_batch_size": args.micro} | lengths
        gpu = torch.cuda.get_device_properties(0).total_memory / GIB if args.device == "cuda" else 0.0
        estimate = estimate_memory(MemoryCommand(**sizes, **asdict(options), gpu=gpu), gpu=False)
    used = rows[1:] or rows
    seconds = sum(row["seconds"] for row in used) / len(used)
    weights = sum(p.numel() for name, p in models.reference.named_parameters() if "lora_" not in name)
    result = {
        "n": n,
        "way": way,
        "engine": engine,
        "parameters": weights,
        "seconds_per_update": seconds,
        "seconds_by_phase": {k[8:]: sum(r[k] for r in used) / len(used) for k in rows[0] if k.startswith("seconds_")},
        "response_tokens_per_second": sum(row["tokens"] for row in used) / seconds / len(used),
        "peak_gib": peak_bytes() / GIB,
        "estimated_peak_gib": estimate.peak / GIB,
        "kl_at_start": rows[0]["kl_k1"],
        "policy_grad_norm": rows[-1]["policy_grad_norm"],
    }
    result |= {name: max(row[name] for row in rows) for name in rows[0] if name.startswith("sampler_")}
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = args.peak_tflops or next((value for name, value in TFLOPS.items() if name in card), 0)
    if peak:
        done = sum(flops(weights, row, args, way, engine) for row in used) / len(used)
        result["mfu"] = done / seconds / (peak * 1e12)
    return result


def run_trainer(args: argparse.Namespace, n: int, models: PPOModels, tokenizer, servers) -> list[dict]:
    """Run the updates and return their metrics."""
    rates = {"policy_learning_rate": 1e-5, "critic_learning_rate": 1e-5}
    sizes = {"updates": args.updates, "batch_size": args.batch, "micro_batch_size": args.micro}
    ppo = PPOTrainerConfig(n=str(n), max_response_length=args.response, **sizes, **rates)
    trainer = PPOTrainer(
        models,
        tokenizer,
        make_prompts(tokenizer, args.batch, args.prompt),
        ModelReward(models.reward, args.micro),
        FixedNGram(n),
        ppo,
        sampler=servers or generate,
    )
    if servers:
        trainer.sampler.try_out(models.policy, tokenizer, trainer.prompts, trainer.sampling)
    return trainer.train()


@contextmanager
def server(args: argparse.Namespace, options: ModelConfig, folder: Path) -> Iterator[Callable]:
    """A vLLM server on the same device that takes adapters, or with full fine-tuning all weights."""
    from marlhf_lite.extras.vllm.rollouts import VLLMEngine

    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    takes = ["--max-model-len", str(args.prompt + args.response + 16), "--enforce-eager"]
    if options.finetune == "full":
        env |= {"VLLM_SERVER_DEV_MODE": "1"}
    else:
        env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        takes += ["--enable-lora", "--max-lora-rank", "16"]
    if args.device == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        takes += ["--gpu-memory-utilization", str(args.vllm_share)]
    words = [args.vllm, "serve", options.model, "--host", "127.0.0.1", "--port", str(args.port), "--dtype", "bfloat16"]
    url, log = f"http://127.0.0.1:{args.port}", folder / "server.log"
    with open(log, "wb") as file:
        process = subprocess.Popen([*words, *takes], env=env, stdout=file, stderr=file)
    try:
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > args.deadline:
                raise RuntimeError(f"the server does not run: {log.read_text(errors='replace')[-800:]}")
            time.sleep(1)
        yield VLLMEngine([url], folder / "sent")
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


# The parts


def run_tests(args: argparse.Namespace) -> dict:
    """Run the tests of kernels, autocast and checkpointing, which take the card where there is one."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "tests/test_on_card.py",
    ]
    done = run(args, command)
    lines = done.stdout.strip().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": done.returncode, "summary": lines[-1] if lines else done.stderr[-300:], "failures": failures}


def run(args: argparse.Namespace, command: list[str]) -> subprocess.CompletedProcess:
    """Run a command in the checkout; the status is 124 where the time limit ended it."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if args.device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": ""}
    left = max(args.deadline - time.monotonic(), 1)
    command = ["timeout", "--kill-after=10", str(left), *command]  # it ends the processes of a launcher, too
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def run_updates(args: argparse.Namespace) -> dict:
    """Measure PPO and MA-PPO by each way of fine-tuning, sampled by transformers."""
    return measure_all(args, map(int, args.n.split(",")), "transformers")


def run_vllm(args: argparse.Namespace) -> dict:
    """Measure MA-PPO by each way of fine-tuning, sampled by a server; its start does not count."""
    if not args.vllm:
        return {"left_out": "no vllm: install it in an environment of its own, and name it by --vllm"}
    return measure_all(args, [int(args.n.split(",")[-1])], "vllm")


def measure_all(args: argparse.Namespace, sizes: Iterable[int], engine: str) -> dict:
    """Measure all combinations; one that fails is recorded and does not cost the others' results."""
    cases, runs, failures, left_out = itertools.product(args.ways.split(","), sizes), [], [], []
    for way, n in cases:
        if time.monotonic() > args.deadline:
            left_out.append(f"{way}, n={n}: no time was left")
            continue
        try:
            runs.append(measure(args, n, way, engine=engine))
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{way}, n={n}: {type(error).__name__}: {error}"[:1000])
    return {"runs": runs, "failures": failures, "cases_left_out": left_out, "status": len(failures)}


def run_launch_files(args: argparse.Namespace) -> dict:
    """Run SFT and PPO through both launch files with one process: LoRA by DDP, all weights by FSDP2."""
    small = ["--size", "60", "--max_response_length", "16"]
    update = ["--updates", "1", "--batch_size", "4", "--micro_batch_size", "2"]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, finetune in (("ddp", "lora"), ("fsdp2", "full")):
            launched = [
                *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / f"{name}.yaml")),
                *("--num_processes", "1", *(["--cpu"] if args.device == "cpu" else []), "-m", "marlhf_lite"),
            ]
            given = [*small, "--finetune", finetune]
            sft, ppo = (f"{folder}/{name}-{stage}" for stage in ("sft", "ppo"))
            stages = [
                [*launched, "sft", *given, "--sft_epochs", "1", "--output_dir", sft],
                [*launched, "ppo", *given, *update, "--sft", sft, "--reward", "gold", "--output_dir", ppo],
            ]
            start = time.monotonic()
            for command in stages:
                done = run(args, command)
                if done.returncode:
                    break
            error = (done.stderr or done.stdout).strip().splitlines()[-3:] if done.returncode else []
            error += ["the time limit ended it"] if done.returncode == 124 else []
            found[name] = {"status": done.returncode, "seconds": time.monotonic() - start, "error": error}
    return found


def run_four_bits(args: argparse.Namespace) -> dict:
    """Measure one update over a 4-bit base, where bitsandbytes is installed, on a card."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {"left_out": "bitsandbytes is not installed: pip install -e '.[gpu]'"}
    if args.device == "cpu":
        return {"left_out": "what they save shows on a card alone; tests/test_four_bits.py runs one here"}
    return measure(argparse.Namespace(**vars(args) | {"updates": 2}), 5, load_in_4bit=True)


PARTS: dict[str, Callable[[argparse.Namespace], dict]] = {
    "tests": run_tests,
    "update": run_updates,
    "vllm": run_vllm,
    "four_bits": run_four_bits,
    "launch": run_launch_files,
}


def describe_device(args: argparse.Namespace) -> dict:
    if args.device == "cpu":
        return {"name": "CPU", "threads": torch.get_num_threads()}
    card = torch.cuda.get_device_properties(0)
    found = {"name": card.name, "gib": card.total_memory / GIB, "capability": f"{card.major}.{card.minor}"}
    return found | {"cuda": torch.version.cuda, "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False)}


def main(argv: list[str] | None = None) -> int:
    """Run the parts and write the record after each; a part that fails is recorded. Status 1 where one failed."""
    args = arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("make gpu: no CUDA device here, so there is nothing to measure")
        return 0
    if args.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    device = describe_device(args)
    name = re.sub(r"\W+", "_", device["name"]).strip("_").lower()
    out = Path(args.out or ROOT / "data" / "results" / "gpu" / f"{name}.json")
    shown = {key: value for key, value in vars(args).items() if key not in ("out", "deadline")}
    record = {"device": device, "environment": environment(), "arguments": shown, "parts": {}}
    failed = False
    for part in args.parts.split(","):
        start = time.monotonic()
        if start > args.deadline:
            record["parts"][part] = {"left_out": "no time was left"}
        else:
            result = run_part(part, args)
            failed |= "error" in result or any(value.get("status") for value in (result, *dicts(result)))
            record["parts"][part] = result | {"seconds": time.monotonic() - start}
        print(json.dumps({part: record["parts"][part]}, indent=1), flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, record)
    print(f"written to {out}")
    return int(failed)


def run_part(part: str, args: argparse.Namespace) -> dict:
    """Run a part and return its results, or its error: one part must not cost the others' results."""
    try:
        return PARTS[part](args)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def dicts(result: dict) -> list[dict]:
    return [value for value in result.values() if isinstance(value, dict)]


if __name__ == "__main__":
    sys.exit(main())
