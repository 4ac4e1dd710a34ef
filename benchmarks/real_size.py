"""MA-PPO at real size: the exact architecture of Gemma-2B with random bfloat16 weights, LoRA, all four roles.

On a CPU one update shows that it works in the memory there is; on a GPU, 50 give tokens per second by phase, peak
memory and the share of the card's arithmetic (--peak_tflops) that the model's own operations use.

    python benchmarks/real_size.py  # one update, about 10 GiB
    python benchmarks/real_size.py --updates 50 --batch 64 --micro 16 --response 512 --peak_tflops 989   # H200
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, GemmaConfig

from marlhf_lite.config.options import DataConfig, MacroConfig, ModelConfig, PPOConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import PPOModels, build_models
from marlhf_lite.models.loading import EMBEDDED_MODEL, load_tokenizer, new_policy, new_reward_model
from marlhf_lite.models.memory import GIB, estimate_memory
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import environment

GEMMA_2B = {
    "vocab_size": 256_000,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {"updates": 1, "batch": 8, "micro": 2, "prompt": 128, "response": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--n", default="5", help="tokens a macro action, comma-separated: 1,5 compares")
    parser.add_argument("--peak_tflops", type=float, default=0.0, help="the card's dense bfloat16 TFLOP/s")
    parser.add_argument("--out", default="", help="JSON file for the result")
    return parser.parse_args()


def random_roles(options: ModelConfig, folder: Path) -> PPOModels:
    """The four roles over one random base, their adapters made as SFT and reward model leave them."""
    device = PartialState().device
    with torch.device(device):
        config = GemmaConfig(**GEMMA_2B)
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    base = base.requires_grad_(False).eval()
    new_policy(base, options).save_pretrained(folder / "sft")
    new_reward_model(base, folder / "sft").save_pretrained(folder / "rm")
    config.save_pretrained(folder / "config")
    return build_models(base, folder / "sft", folder / "rm", gradient_checkpointing=options.gradient_checkpointing)


def prompts(tokenizer, count: int, tokens: int) -> list[str]:
    """Different texts of about `tokens` tokens."""
    words = "the friend of my uncle moved to the harbor and waited some days for a letter from the old town".split()
    texts = []
    for i in range(count):
        text, k = f"Post {i}:", i
        while len(tokenizer(text)["input_ids"]) < tokens - 4:
            text, k = f"{text} {words[k % len(words)]}", k + 7
        texts.append(text)
    return texts


def peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flops(parameters: int, row: dict, prompt: int, batch: int) -> float:
    """Of the model's matrices alone: 2 a weight and token forward, and 2 more backward, since the base is frozen."""
    tokens = batch * prompt + row["tokens"]
    forwards = 3  # generation, reference, reward model
    return 2 * parameters * tokens * (forwards + 2 * 2)  # and policy and critic, forward and backward


def measure(args: argparse.Namespace, n: int, folder: Path) -> dict:
    """Records of `updates` updates with macro actions of n tokens."""
    torch.manual_seed(0)
    options = ModelConfig(dtype="bfloat16", gradient_checkpointing=True)
    roles, tokenizer = random_roles(options, folder), load_tokenizer(EMBEDDED_MODEL)
    ppo = PPOConfig(updates=args.updates, batch_size=args.batch, micro_batch_size=args.micro)
    texts = prompts(tokenizer, args.batch, args.prompt)
    trainer = PPOTrainer(
        roles,
        tokenizer,
        texts,
        ModelReward(roles.reward, args.micro),
        FixedNGram(n),
        ppo,
        MacroConfig(n=str(n)),
        max_response_length=args.response,
    )
    rows = trainer.train()
    used = rows[min(2, len(rows) - 1) :]  # the first ones warm up
    seconds = sum(row["seconds"] for row in used) / len(used)
    size = sum(p.numel() for p in roles.reference.model.get_base_model().parameters())
    result = {
        "n": n,
        "parameters": size,
        "seconds_per_update": seconds,
        "seconds_by_phase": {k[8:]: sum(r[k] for r in used) / len(used) for k in rows[0] if k.startswith("seconds_")},
        "response_tokens_per_second": sum(row["tokens"] for row in used) / seconds / len(used),
        "peak_gib": peak_bytes() / GIB,
        "kl_at_start": rows[0]["kl_k1"],
        "policy_grad_norm": rows[-1]["policy_grad_norm"],
    }
    if args.peak_tflops:
        done = sum(flops(size, row, args.prompt, args.batch) for row in used) / len(used)
        result["mfu"] = done / seconds / (args.peak_tflops * 1e12)
    options.model = str(folder / "config")
    data = DataConfig(max_prompt_length=args.prompt, max_response_length=args.response)
    guess = estimate_memory(SimpleNamespace(model=options, ppo=ppo, data=data), gpu=torch.cuda.is_available())
    return result | {"estimated_peak_gib": guess.peak / GIB}


def main() -> None:
    args = arguments()
    results = []
    for n in map(int, args.n.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(args, n, Path(folder)))
        print(json.dumps(results[-1], indent=1), flush=True)
    if args.out:
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        write_json(
            args.out,
            {
                "device": card,
                "arguments": {k: v for k, v in vars(args).items() if k != "out"},
                "results": results,
                "environment": environment(),
            },
        )


if __name__ == "__main__":
    main()
