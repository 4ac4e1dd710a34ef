"""Build `data/tiny-gemma`: a byte-fallback BPE tokenizer and a small Gemma pretrained on posts with mixed summaries.

    python data/build_tiny_gemma.py

The committed model is what this script made (arguments and measurements stand in `data/tiny-gemma/build.json`). The
text comes from `marlhf_lite.tasks.tiny_tldr.corpus`, seeded apart. Behind its EOS each document carries a reader's vote
(0 to 9, the gold score with noise): large bases have read much judging of texts, and a reward model needs some of that
to start from. Generation stops at EOS, so the votes are never seen again. About half an hour on two cores with
bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import GemmaConfig, GemmaForCausalLM, GemmaTokenizer

from marlhf_lite.tasks.tiny_tldr.corpus import Quality, make_post, make_summary, summary_text
from marlhf_lite.tasks.tiny_tldr.gold import inspect

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]


def train_tokenizer(texts: list[str], vocab_size: int) -> GemmaTokenizer:
    """BPE in Gemma's form: spaces are written as ▁, digits stand alone, bytes catch every other character."""
    raw = RawTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    # Only for training: no piece may span two words, so that encoding later needs no word splitter.
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Split(Regex(r"[0-9]|[^\w▁]"), "isolated"),
        ]
    )
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_pieces = [f"<0x{i:02X}>" for i in range(256)]
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIALS + byte_pieces, show_progress=False)
    )
    model = json.loads(raw.to_str())["model"]
    merges = [tuple(m) for m in model["merges"]]
    return GemmaTokenizer(vocab=model["vocab"], merges=merges, add_bos_token=True, model_max_length=1024)


def document(rng: random.Random) -> tuple[str, str]:
    """A post and one summary of any quality."""
    post = make_post(rng)
    quality = Quality(rng.uniform(0.45, 1.0), rng.choice((0.0, 0.0, 0.2, 0.5)), rng.uniform(0.0, 0.8))
    return post.prompt, summary_text(make_summary(rng, post, quality))


def vote(rng: random.Random, prompt: str, response: str) -> int:
    """A reader's verdict on a summary, 0 to 9: the gold score with noise of one point."""
    return min(9, max(0, round(inspect(prompt, response).score + 3 + rng.gauss(0, 1))))


class Stream:
    """Batches of token ids, loss weights and attention masks."""

    def __init__(self, tokenizer, args: argparse.Namespace):
        self.tokenizer, self.rows = tokenizer, args.rows
        self.post_weight, self.vote_weight = args.post_weight, args.vote_weight
        self.rng = random.Random(f"tiny-gemma-{args.seed}")
        self.votes = tokenizer.convert_tokens_to_ids([str(i) for i in range(10)])
        self.ready: list = []

    def _row(self) -> tuple[list[int], list[float]]:
        prompt, response = document(self.rng)
        head = self.tokenizer(prompt)["input_ids"]
        tail = self.tokenizer(response, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        weights = [self.post_weight] * len(head) + [1.0] * len(tail) + [self.vote_weight]
        return head + tail + [self.votes[vote(self.rng, prompt, response)]], weights

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of like length: eight batches are made at once, sorted, cut, and handed out in random order."""
        if not self.ready:
            made = [self._row() for _ in range(8 * self.rows)]
            made.sort(key=lambda row: len(row[0]))
            self.ready = [made[i : i + self.rows] for i in range(0, len(made), self.rows)]
            self.rng.shuffle(self.ready)
        made = self.ready.pop()
        width = max(len(ids) for ids, _ in made)
        ids = torch.tensor([i + [0] * (width - len(i)) for i, _ in made])
        weights = torch.tensor([w + [0.0] * (width - len(w)) for _, w in made])
        mask = torch.tensor([[1] * len(i) + [0] * (width - len(i)) for i, _ in made])
        return ids, weights, mask


def make_model(tokenizer, args) -> GemmaForCausalLM:
    torch.manual_seed(args.seed)
    config = GemmaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GemmaForCausalLM._from_config(config, attn_implementation="eager")  # faster than sdpa here, in bfloat16


def make_optimizers(model, args) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (it needs about half the updates here), AdamW for the rest."""
    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    chosen = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(inside, lr=args.muon_lr, weight_decay=0.01)
    return [muon, torch.optim.AdamW(rest, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98))]


def loss_of(model, ids, weights, mask) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    w = weights[:, 1:].flatten()
    return (nll * w).sum() / w.sum()


@torch.no_grad()
def copy_precision(model, tokenizer, seed: int, rows: int = 64) -> tuple[float, float, float]:
    """Share of stated facts that are right, share of facts covered, and mean tokens, over sampled summaries."""
    rng = random.Random(f"tiny-gemma-check-{seed}")
    prompts = [make_post(rng).prompt for _ in range(rows)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    out = model.generate(**inputs, max_new_tokens=96, do_sample=True, temperature=0.8, top_k=50)
    new = out[:, inputs["input_ids"].shape[1] :]
    reports = [inspect(p, t) for p, t in zip(prompts, tokenizer.batch_decode(new, skip_special_tokens=True))]
    tokens = (new != tokenizer.pad_token_id).sum(1).float().mean().item()
    stated = sum(r.correct + r.wrong for r in reports)
    return sum(r.correct for r in reports) / max(stated, 1), sum(r.coverage for r in reports) / rows, tokens


def schedule(step: int, total: int, warmup: int = 100) -> float:
    """Linear warm-up, then flat, then linear to zero over the last 40 %."""
    return min((step + 1) / warmup, 1.0, (total - step) / (0.4 * total))


def train(model, tokenizer, args) -> list[dict]:
    stream, optimizers = Stream(tokenizer, args), make_optimizers(model, args)
    peaks, history, start = [o.param_groups[0]["lr"] for o in optimizers], [], time.time()
    for step in range(args.updates):
        loss = loss_of(model, *stream.batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, args.updates)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(loss.item()):
            raise SystemExit(f"loss is {loss.item()} at update {step}: lower --muon_lr or --lr")
        if (step + 1) % args.check_every == 0 or step + 1 == args.updates:
            precision, coverage, tokens = copy_precision(model, tokenizer, args.seed)
            history.append(
                {
                    "update": step + 1,
                    "loss": round(loss.item(), 4),
                    "fact_precision": round(precision, 3),
                    "coverage": round(coverage, 3),
                    "tokens": round(tokens, 1),
                    "seconds": round(time.time() - start),
                }
            )
            print(json.dumps(history[-1]), flush=True)
            model.save_pretrained(args.out)
    return history


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny-gemma")
    for name, default in {
        "updates": 2500, "rows": 64, "vocab": 512, "hidden": 192, "mlp": 512, "layers": 4, "heads": 3, "kv_heads": 1,
        "head_dim": 64, "seed": 0, "threads": 1, "check_every": 250,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"lr": 1e-3, "muon_lr": 0.02, "post_weight": 0.2, "vote_weight": 5.0}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    rng = random.Random(f"tiny-gemma-tokenizer-{args.seed}")
    tokenizer = train_tokenizer([a + b for a, b in (document(rng) for _ in range(4000))], args.vocab)
    tokenizer.save_pretrained(args.out)
    model = make_model(tokenizer, args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} pieces", flush=True)
    history = train(model, tokenizer, args)
    model.save_pretrained(args.out)
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    record = {"arguments": settings, "torch": torch.__version__, "history": history}
    (args.out / "build.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
