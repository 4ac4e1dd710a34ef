"""What each termination rule costs per response, and its share of an update.

Responses are the embedded task's summaries and its tokenizer; with --hh, the last answers of HH-RLHF pairs (a .jsonl or
.jsonl.gz file with a column `chosen`). A parser keeps what it parsed, so parsing is timed twice: `first` is a batch of
texts not seen before, `again` the same batch once more. Rules whose parser is not installed are named and left out. An
update is timed on the embedded model, or given. Prints a table and one JSON line.

    python benchmarks/termination.py --batch 64 --update_seconds 7.5
"""

import argparse
import gzip
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from marlhf_lab.corpora.tiny_tldr import Quality, make_post, make_summary, summary_text
from marlhf_lite.config.options import MacroConfig, ModelConfig, PPOTrainerConfig
from marlhf_lite.macro import FixedNGram, describe
from marlhf_lite.macro.catalogue import make_rule
from marlhf_lite.models.loading import (
    EMBEDDED_MODEL,
    build_models,
    load_base,
    load_tokenizer,
    new_policy,
    new_reward_model,
)
from marlhf_lite.tasks.answers import encode_responses
from marlhf_lite.tasks.tokenization import pad
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.utils.errors import InputError

RULES = {
    "fixed 5": {},
    "randomized": {"termination": "randomized"},
    "whole": {"termination": "whole"},
    "perplexity macro": {"termination": "perplexity", "perplexity_rule": "macro"},
    "perplexity prefix": {"termination": "perplexity", "perplexity_rule": "prefix"},
    "perplexity token": {"termination": "perplexity", "perplexity_rule": "token"},
    "sentence": {"termination": "sentence"},
    "parsing grammar": {"termination": "parsing", "parser": "grammar"},
    "parsing link": {"termination": "parsing", "parser": "link"},
    "parsing stanza": {"termination": "parsing", "parser": "stanza"},
    "parsing python": {"termination": "parsing", "parser": "python"},
}


def embedded(rng: random.Random, count: int) -> list[str]:
    """Summaries of the embedded task."""
    return [summary_text(make_summary(rng, make_post(rng), Quality(0.9, 0.1, 0.4))) for _ in range(count)]


def answers(path: str, count: int) -> list[str]:
    """Last answers of a file of dialogues."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line)["chosen"] for line in itertools.islice(lines, count)]
    return [row.rsplit("Assistant:", 1)[-1] for row in rows]


def context(tokenizer, texts: list[str], limit: int, seed: int) -> tuple[torch.Tensor, dict]:
    """mask [B,T], and what else rules are called with; log-probabilities are random."""
    ids, mask = pad(encode_responses(tokenizer, texts, limit), tokenizer.pad_token_id, left=False)
    g = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(ids.shape, generator=g)
    return mask.bool(), {"token_ids": ids, "ref_logprobs": logprobs, "tokenizer": tokenizer}


def seconds(rule, mask, more: dict) -> float:
    start = time.perf_counter()
    rule(mask, **more)
    return time.perf_counter() - start


def measure(rule, batches: list, repeats: int) -> dict[str, float]:
    """Milliseconds per response: median over batches not seen before, and over repeats of the last."""
    mask, more = batches[0]
    seconds(rule, mask, more)  # warms up
    first = statistics.median(seconds(rule, *batch) for batch in batches[1:])
    again = statistics.median(seconds(rule, *batches[-1]) for _ in range(repeats))
    row = {"first_ms": 1e3 * first / len(mask), "again_ms": 1e3 * again / len(mask)}
    row["macro_length"] = describe(rule(batches[-1][0], **batches[-1][1]))["mean_length"]
    return row | (rule.metrics() if hasattr(rule, "metrics") else {})


def time_update(batch: int, limit: int, seed: int) -> float:
    """Seconds of one update of the embedded model with so many responses: the second of two."""
    options, tokenizer = ModelConfig(), load_tokenizer(EMBEDDED_MODEL)
    base = load_base(options)
    with tempfile.TemporaryDirectory() as folder:
        sft, rm = Path(folder, "sft"), Path(folder, "rm")
        new_policy(base, options).save_pretrained(sft)
        new_reward_model(base, sft).save_pretrained(rm)
        roles = build_models(base, sft, rm)
    rng = random.Random(seed)
    trainer = PPOTrainer(
        roles,
        tokenizer,
        [make_post(rng).prompt for _ in range(2 * batch)],
        lambda rollout: torch.zeros(len(rollout)),
        FixedNGram(5),
        PPOTrainerConfig(updates=2, batch_size=batch, max_response_length=limit),
    )
    return trainer.train()[-1]["seconds"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64, help="responses in an update")
    parser.add_argument("--limit", type=int, default=96, help="longest response, in tokens")
    parser.add_argument("--batches", type=int, default=5, help="timed batches of new texts")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs on a batch that was seen")
    parser.add_argument(
        "--update_seconds", type=float, help="of an update; measured on the embedded model if not given"
    )
    parser.add_argument("--hh", default="", help="file of HH-RLHF pairs to take the responses from")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Time every rule that can be made here, then set it against an update."""
    args = parse()
    torch.set_num_threads(args.threads)
    total = args.batch * (args.batches + 1)
    texts = answers(args.hh, total) if args.hh else embedded(random.Random(args.seed), total)
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    groups = [texts[i : i + args.batch] for i in range(0, total, args.batch)]
    batches = [context(tokenizer, group, args.limit, args.seed) for group in groups if len(group) == args.batch]
    update = args.update_seconds or time_update(args.batch, args.limit, args.seed)
    print(f"an update of {args.batch} responses: {update:.2f} s\n")
    print(f"{'ms per response':18}{'first':>9}{'again':>9}{'of an update':>14}{'macro length':>14}{'fallback':>10}")
    record = {}
    for name, chosen in RULES.items():
        try:
            row = measure(make_rule(MacroConfig(**chosen), args.seed), batches, args.repeats)
        except InputError as error:
            print(f"{name:18}not here: {error}")
            continue
        row["share"] = row["first_ms"] * args.batch / 1e3 / update
        fallback = f"{row['fallback_rate']:10.1%}" if "fallback_rate" in row else ""
        print(f"{name:18}{row['first_ms']:9.3f}{row['again_ms']:9.3f}{row['share']:14.2%}", end="")
        print(f"{row['macro_length']:14.1f}{fallback}")
        record[name] = {key: round(value, 4) for key, value in row.items()}
    print(json.dumps({**vars(args), "torch": torch.__version__, "update_seconds": round(update, 3), "rules": record}))


if __name__ == "__main__":
    main()
