"""Build an embedded model: a byte-fallback BPE tokenizer and a small Gemma pretrained on the text of its task.

    python data/build_models.py --task tiny-tldr

Each committed model is what this script made; arguments, versions and measurements stand in its `build.json`
(of tiny-gemma, the first one, only torch's version was kept). A task gives its documents, seeded apart from its pairs,
its sizes and a check (`TASKS`); the rest is shared. Behind its EOS a document may carry a reader's vote (0 to 9): large
bases have read much judging of texts, and a reward model needs some of that to start from. Generation stops at EOS, so
the votes are never seen again. tiny-tldr takes about half an hour on two cores with bfloat16 instructions, tiny-steps
12 minutes on one. tiny-tldr has two more sizes, which read the same text:

    python data/build_models.py --task tiny-tldr --out data/tiny-gemma-small \\
        --hidden 128 --mlp 256 --layers 3 --heads 2
    python data/build_models.py --task tiny-tldr --out data/tiny-gemma-large \\
        --hidden 256 --mlp 768 --layers 5 --heads 4 --updates 2000 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import GemmaConfig, GemmaForCausalLM, GemmaTokenizer

from marlhf_lab.corpora import tiny_code as code
from marlhf_lab.corpora import tiny_hh as hh
from marlhf_lab.corpora import tiny_steps as steps
from marlhf_lab.corpora import tiny_tldr as tldr
from marlhf_lab.corpora import tiny_webgpt as webgpt
from marlhf_lite.config.parser import read_presets
from marlhf_lite.extras.programs import TestRunner, read_problem
from marlhf_lite.tasks.templates import hh_prompt
from marlhf_lite.tasks.tiny_guess import game as guess
from marlhf_lite.tasks.tiny_hh import gold as hh_gold
from marlhf_lite.tasks.tiny_steps import gold as steps_gold
from marlhf_lite.tasks.tiny_tldr import gold as tldr_gold
from marlhf_lite.tasks.tiny_umbrella import gold as umbrella_gold
from marlhf_lite.tasks.tiny_umbrella import stories as umbrella
from marlhf_lite.tasks.tiny_webgpt import gold as webgpt_gold

OUT = Path(__file__).parent
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
SIZES = {
    "updates": 2500, "rows": 64, "vocab": 512, "hidden": 192, "mlp": 512, "layers": 4, "heads": 3, "kv_heads": 1,
    "head_dim": 64, "seed": 0, "threads": 1, "check_every": 250, "lr": 1e-3, "muon_lr": 0.02, "prompt_weight": 0.2,
    "vote_weight": 5.0, "echo": 0, "dtype": "float32",
}  # fmt: skip

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of the saved weights


# The tasks


@dataclass(frozen=True)
class Recipe:
    """What a task gives.

    `document` makes a prompt and a response, `check` measures sampled responses to the prompts, `vote` (optional) is a
    reader's verdict on a response, 0 to 9, and `sizes` are the arguments in which its model differs from `SIZES`.
    """

    document: Callable[[random.Random], tuple[str, str]]
    check: Callable[[list[str], list[str]], dict[str, float]]
    vote: Callable[[random.Random, str, str], int] | None = None
    sizes: dict[str, float] = field(default_factory=dict)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)  # for lists to copy: see `echo`
    whole: str = ""  # a pattern of what is one piece for the tokenizer


def graded(rng: random.Random, score: float) -> int:
    """A score as a reader's vote, 0 to 9, with noise of one point."""
    return min(9, max(0, round(score + rng.gauss(0, 1))))


def tldr_document(rng: random.Random) -> tuple[str, str]:
    """A post and one summary of any quality."""
    post = tldr.make_post(rng)
    quality = tldr.Quality(
        rng.uniform(0.45, 1.0), rng.choice((0.0, 0.0, 0.2, 0.5)), rng.uniform(0.0, 0.8)
    )
    return post.prompt, tldr.summary_text(tldr.make_summary(rng, post, quality))


def tldr_vote(rng: random.Random, prompt: str, response: str) -> int:
    """The gold score with noise of one point."""
    return graded(rng, tldr_gold.gold_scores([prompt], [response])[0] + 3)


def tldr_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of stated facts that are right, and share of the posts' facts that are covered."""
    reports = [tldr_gold.inspect(p, r) for p, r in zip(prompts, responses)]
    stated = sum(r["correct"] + r["wrong"] for r in reports)
    coverage = sum(r["correct"] / max(r["total"], 1) for r in reports) / len(reports)
    return {
        "fact_precision": sum(r["correct"] for r in reports) / max(stated, 1),
        "coverage": coverage,
    }


def umbrella_document(rng: random.Random) -> tuple[str, str]:
    """A forecast and a story of any length, with the decision at any place.

    In rain, it is right in half of the cases; half of the forecasts leave no doubt, so that the model tells the two
    decisions apart. Most stories are short: the link between decision and vote is learned on them first.
    """
    lines = rng.choices((0, 1, 4, 16, rng.randint(2, 15)), weights=(10, 4, 2, 1, 2))[0]
    place = rng.choice(umbrella_gold.PLACES)
    forecast = rng.choice(["", *umbrella.SURE][: rng.choice((1, None))])
    choice = umbrella.SURE.get(forecast) or rng.choice(umbrella_gold.DECISIONS)
    return umbrella.make_prompt(rng, lines, place, forecast), umbrella.make_story(
        rng, lines, place, choice
    )


def umbrella_vote(rng: random.Random, prompt: str, response: str) -> int:
    """1 for the right decision, 0 for the wrong one; the umbrella stays at home in sun and heat."""
    return int(
        ("sun." in prompt or "heat." in prompt)
        != (umbrella_gold.decision(response, "random") == "Take")
    )


def umbrella_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of stories with the asked number of lines, with one decision at its place, and with the right one."""
    asked = [re.search(r"(\d+) lines?, umbrella (\w+)", prompt) for prompt in prompts]
    places = ["random" if found[2] == "anywhere" else found[2] for found in asked]
    kept = [
        int(found[1]) == len(re.findall(r"\bAt \w+", text)) for found, text in zip(asked, responses)
    ]
    decisions = [
        umbrella_gold.decision(response, place) for response, place in zip(responses, places)
    ]
    measured = {"length_kept": kept, "decided": [choice is not None for choice in decisions]}
    measured["right"] = [choice == umbrella_gold.RIGHT for choice in decisions]
    return {name: sum(x) / len(x) for name, x in measured.items()}


def steps_document(rng: random.Random) -> tuple[str, str]:
    """A problem and its steps, with slips."""
    problem = steps.make_problem(rng)
    return problem.prompt, steps.demonstrate(rng, problem)


def steps_vote(rng: random.Random, prompt: str, response: str) -> int:
    """Right or wrong."""
    return 9 if steps.verify(prompt, response) is None else 0


def steps_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of right answers, and what the first faults are."""
    faults = [steps.verify(p, r) for p, r in zip(prompts, responses)]
    found = [fault.reason for fault in faults if fault]
    form = {
        f"fault_{reason}": found.count(reason) / len(faults)
        for reason in ("result", "begin", "operation")
    }
    return {"accuracy": sum(steps_gold.gold_scores(prompts, responses)) / len(prompts)} | form


def guess_document(rng: random.Random) -> tuple[str, str]:
    """A game of random guesses; each of the policy's turns ends with EOS."""
    prompt = guess.make_prompt(rng)
    texts = guess.random_game(rng, prompt)
    return prompt, "".join(
        text if i % 2 else f"{text}<eos>" for i, text in enumerate(texts)
    ).removesuffix("<eos>")


def guess_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of first turns that are one guess, and how evenly they are spread: the share of numbers above the half."""
    guesses = [guess.read_guess(response) for response in responses]
    clear = [number for number in guesses if number]
    high = sum(number > guess.HIGHEST / 2 for number in clear) / max(len(clear), 1)
    return {"clear": len(clear) / len(guesses), "high": high}


CODE_TESTS: dict[str, str] = {}  # the hidden tests of each prompt that was made


def code_document(rng: random.Random) -> tuple[str, str]:
    """A specification and a program, in 40 % with a bug."""
    prompt, program, CODE_TESTS[prompt] = code.document(rng)
    return prompt, program


def code_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of programs that pass all hidden tests, and of those that run at all."""
    outcomes = TestRunner("monty").run(
        responses, [read_problem(CODE_TESTS[prompt]).tests for prompt in prompts]
    )
    ran = [outcome.status == "ran" for outcome in outcomes]
    return {"passed": sum(all(o.passed) for o in outcomes) / len(ran), "ran": sum(ran) / len(ran)}


def echo(rng: random.Random, words: dict[str, tuple[str, ...]]) -> tuple[str, str]:
    """A list of words and its copy: a small model learns to copy on dense text first."""
    known = sorted({word for group in words.values() for word in group})
    listed = " ".join(rng.sample(known, rng.randint(12, 32)))
    return hh_prompt(f"Say {listed}."), f" {listed}."


def hh_document(rng: random.Random) -> tuple[str, str]:
    """A dialogue and an answer of any quality; many are short."""
    plans = rng.choices((1, 3, hh.PLANS), weights=(2, 1, 1))[0]
    dialogue = hh.make_dialogue(rng, plans, max(plans - 1, 1))
    return dialogue.prompt, hh.make_answer(rng, dialogue, hh.Quality.sample(rng))


def hh_vote(rng: random.Random, prompt: str, response: str) -> int:
    """Helpfulness in fifths with noise of one."""
    return graded(rng, 5 * hh_gold.gold_scores([prompt], [response])[0] + 4)


def hh_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of the asked-for things that are given rightly and wrongly, and other and harmful sentences an answer."""
    reports = [report for report in map(hh_gold.inspect, prompts, responses) if report["asked"]]
    shares = {
        name: sum(r[name] / r["asked"] for r in reports) / len(reports)
        for name in ("right", "wrong")
    }
    return shares | {
        name: sum(r[name] for r in reports) / len(reports) for name in ("other", "harmful")
    }


def webgpt_document(rng: random.Random) -> tuple[str, str]:
    """A question and an answer of any quality; many are short."""
    sources, facts = rng.choices(
        ((1, 1), (2, 1), (3, 2), (webgpt.SOURCES, webgpt.FACTS)), weights=(1, 1, 1, 2)
    )[0]
    question = webgpt.make_question(rng, sources, facts)
    return question.prompt, webgpt.make_answer(rng, question, webgpt.Quality.sample(rng))


def webgpt_vote(rng: random.Random, prompt: str, response: str) -> int:
    """The gold score in fifths with noise of one."""
    return graded(rng, 5 * webgpt_gold.gold_scores([prompt], [response])[0] + 4)


def webgpt_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of the statements that are supported, share of the facts that are stated, and other sentences an answer."""
    reports = list(map(webgpt_gold.inspect, prompts, responses))
    supported, facts = (sum(r[name] for r in reports) for name in ("supported", "facts"))
    stated = supported + sum(r["unsupported"] for r in reports)
    shares = {"supported": supported / max(stated, 1), "coverage": supported / facts}
    return shares | {"other": sum(r["other"] for r in reports) / len(reports)}


UMBRELLA_SIZES = {
    "updates": 800, "vocab": 640, "hidden": 64, "mlp": 192, "layers": 2, "heads": 2, "head_dim": 32, "lr": 2e-3,
    "vote_weight": 5.0,
}  # fmt: skip
STEPS_SIZES = {
    "updates": 700, "rows": 32, "vocab": 300, "hidden": 128, "mlp": 256, "layers": 3, "heads": 4, "head_dim": 32,
    "check_every": 100,
}  # fmt: skip
CODE_SIZES = {
    "updates": 1500, "rows": 32, "vocab": 400, "hidden": 128, "mlp": 320, "layers": 3, "heads": 4, "head_dim": 32,
    "check_every": 150,
}  # fmt: skip
HH_SIZES = {
    "updates": 1400, "rows": 32, "vocab": 900, "hidden": 128, "mlp": 160, "layers": 3, "heads": 3, "head_dim": 64,
    "check_every": 100, "echo": 600,
}  # fmt: skip
WEBGPT_WORDS = webgpt.OBJECTS | {"verbs": tuple(webgpt.OBJECTS)}
WEBGPT_SIZES = {
    "updates": 2000, "rows": 32, "vocab": 800, "hidden": 128, "mlp": 160, "layers": 3, "heads": 3, "head_dim": 64,
    "check_every": 100, "echo": 500,
}  # fmt: skip
GUESS_SIZES = {
    "updates": 1000, "rows": 48, "vocab": 420, "hidden": 64, "mlp": 128, "layers": 2, "heads": 4, "head_dim": 16,
    "lr": 2e-3, "check_every": 250, "dtype": "bfloat16",
}  # fmt: skip
TASKS = {
    "tiny-tldr": Recipe(tldr_document, tldr_check, tldr_vote),
    "tiny-umbrella": Recipe(umbrella_document, umbrella_check, umbrella_vote, UMBRELLA_SIZES),
    "tiny-steps": Recipe(steps_document, steps_check, steps_vote, STEPS_SIZES),
    "tiny-hh": Recipe(hh_document, hh_check, hh_vote, HH_SIZES, hh.WORDS),
    "tiny-webgpt": Recipe(
        webgpt_document, webgpt_check, webgpt_vote, WEBGPT_SIZES, WEBGPT_WORDS, r"\[[0-9]\]"
    ),
    "tiny-code": Recipe(code_document, code_check, sizes=CODE_SIZES),
    "tiny-guess": Recipe(guess_document, guess_check, sizes=GUESS_SIZES, whole=r"▁1?[0-9]"),
}


# Tokenizer, batches, model


def train_tokenizer(texts: list[str], vocab_size: int, whole: str = "") -> GemmaTokenizer:
    """BPE in Gemma's form: spaces are written as ▁, digits stand alone, bytes catch every other character.

    What matches the pattern `whole` becomes one piece.
    """
    raw = RawTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    # Only for training: no piece may span two words, so that encoding later needs no word splitter.
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Split(
                Regex("|".join(filter(None, (whole, "[0-9]", r"[^\w▁]")))), "isolated"
            ),
        ]
    )
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    byte_pieces = [f"<0x{i:02X}>" for i in range(256)]
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIALS + byte_pieces, show_progress=False
        ),
    )
    model = json.loads(raw.to_str())["model"]
    merges = [tuple(m) for m in model["merges"]]
    return GemmaTokenizer(
        vocab=model["vocab"], merges=merges, add_bos_token=True, model_max_length=1024
    )


class Stream:
    """Batches of token ids, loss weights and attention masks."""

    def __init__(self, recipe: Recipe, tokenizer, args: argparse.Namespace):
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.args = args
        self.rng = random.Random(f"{args.name}-{args.seed}")
        self.votes = tokenizer.convert_tokens_to_ids([str(i) for i in range(10)])
        self.ready: list = []
        self.made = 0

    def _document(self) -> tuple[str, str]:
        """A document of the task; during the first `echo` updates a list to copy, and later one in five."""
        self.made += 1
        share = 1.0 if self.made <= self.args.echo * self.args.rows else 0.2
        if self.recipe.words and self.rng.random() < share:
            return echo(self.rng, self.recipe.words)
        return self.recipe.document(self.rng)

    def _row(self) -> tuple[list[int], list[float]]:
        prompt, response = self._document()
        head = self.tokenizer(prompt)["input_ids"]
        tail = self.tokenizer(response, add_special_tokens=False)["input_ids"] + [
            self.tokenizer.eos_token_id
        ]
        ids = head + tail
        weights = [self.args.prompt_weight] * len(head) + [1.0] * len(tail)
        if self.recipe.vote:
            ids.append(self.votes[self.recipe.vote(self.rng, prompt, response)])
            weights.append(self.args.vote_weight)
        return ids, weights

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of like length: eight batches are made at once, sorted, cut, and handed out in random order."""
        if not self.ready:
            made = [self._row() for _ in range(8 * self.args.rows)]
            rows = self.args.rows
            made.sort(key=lambda row: len(row[0]))
            self.ready = [made[i : i + rows] for i in range(0, len(made), rows)]
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
    # faster than sdpa here, in bfloat16
    return GemmaForCausalLM._from_config(config, attn_implementation="eager")


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
    nll = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    w = weights[:, 1:].flatten()
    return (nll * w).sum() / w.sum()


def schedule(step: int, total: int, warmup: int = 100) -> float:
    """Linear warm-up, then flat, then linear to zero over the last 40 %."""
    return min((step + 1) / warmup, 1.0, (total - step) / (0.4 * total))


# Training


@torch.no_grad()
def check(
    recipe: Recipe, model, tokenizer, args: argparse.Namespace, rows: int = 64
) -> dict[str, float]:
    """The task's measurements on responses sampled to new prompts, and their mean number of tokens."""
    rng = random.Random(f"{args.name}-check-{args.seed}")
    prompts = [recipe.document(rng)[0] for _ in range(rows)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    length = read_presets(f"embedded/{args.task}", "--task").get("max_response_length", 96)
    out = model.generate(**inputs, max_new_tokens=length, do_sample=True, temperature=0.8, top_k=50)
    new = out[:, inputs["input_ids"].shape[1] :]
    measured = recipe.check(prompts, tokenizer.batch_decode(new, skip_special_tokens=True))
    tokens = (new != tokenizer.pad_token_id).sum(1).float().mean().item()
    return {name: round(value, 3) for name, value in measured.items()} | {
        "tokens": round(tokens, 1)
    }


def train(recipe: Recipe, model, tokenizer, args: argparse.Namespace) -> list[dict]:
    """Train the model and save it at each check; return the checks."""
    stream = Stream(recipe, tokenizer, args)
    optimizers = make_optimizers(model, args)
    peaks = [o.param_groups[0]["lr"] for o in optimizers]
    history = []
    start = time.time()
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
            measured = check(recipe, model, tokenizer, args)
            seconds = round(time.time() - start)
            history.append(
                {"update": step + 1, "loss": round(loss.item(), 4)}
                | measured
                | {"seconds": seconds}
            )
            print(json.dumps(history[-1]), flush=True)
            model.save_pretrained(args.out)
    return history


def parse() -> argparse.Namespace:
    """The task first: it gives the defaults of the other arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, help="default: the model's folder beside this script")
    for name, default in SIZES.items():
        parser.add_argument(
            f"--{name}", type=type(default), choices=DTYPES if name == "dtype" else None
        )
    args = parser.parse_args()
    args.name = read_presets(f"embedded/{args.task}", "--task")["model"]
    args.out = args.out or OUT / args.name
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**SIZES | TASKS[args.task].sizes | given)


def main() -> None:
    args = parse()
    recipe = TASKS[args.task]
    start = time.time()
    torch.set_num_threads(args.threads)
    rng = random.Random(f"{args.name}-tokenizer-{args.seed}")
    tokenizer = train_tokenizer(
        [a + b for a, b in (recipe.document(rng) for _ in range(4000))], args.vocab, recipe.whole
    )
    tokenizer.save_pretrained(args.out)
    model = make_model(tokenizer, args)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} pieces",
        flush=True,
    )
    history = train(recipe, model, tokenizer, args)
    model.to(DTYPES[args.dtype]).save_pretrained(args.out)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
    record = {
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "versions": {"python": platform.python_version()} | versions,
        "minutes": round((time.time() - start) / 60, 1),
        "history": history,
    }
    (args.out / "build.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
