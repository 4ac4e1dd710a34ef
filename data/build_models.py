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
    one_piece: str = ""  # a pattern of what becomes one piece of the tokenizer


def graded(rng: random.Random, score: float) -> int:
    """A score as a reader's vote, 0 to 9, with noise of one point."""
    return min(9, max(0, round(score + rng.gauss(0, 1))))


def tldr_document(rng: random.Random) -> tuple[str, str]:
    """A post and one summary of any quality."""
    post = tldr.make_post(rng)
    quality = tldr.Quality(
        cover=rng.uniform(0.45, 1.0),
        wrong=rng.choice((0.0, 0.0, 0.2, 0.5)),
        filler=rng.uniform(0.0, 0.8),
    )
    summary = tldr.make_summary(rng, post, quality)
    return post.prompt, tldr.summary_text(summary)


def tldr_vote(rng: random.Random, prompt: str, response: str) -> int:
    """The gold score with noise of one point; 3 is added so that few are below 0."""
    (score,) = tldr_gold.gold_scores([prompt], [response])
    return graded(rng, score + 3)


def tldr_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of stated facts that are right, and share of the posts' facts that are covered."""
    correct = 0
    stated = 0
    coverage = 0.0
    for prompt, response in zip(prompts, responses):
        report = tldr_gold.inspect(prompt, response)
        correct += report["correct"]
        stated += report["correct"] + report["wrong"]
        coverage += report["correct"] / max(report["total"], 1)
    return {"fact_precision": correct / max(stated, 1), "coverage": coverage / len(prompts)}


def umbrella_document(rng: random.Random) -> tuple[str, str]:
    """A forecast and a story of any length, with the decision at any place.

    If the forecast is rain, which the empty name stands for, the decision is drawn at random and so is right in half of
    the stories. The other forecasts leave no doubt and always get the right decision, so that the model tells the two
    decisions apart. Most stories are short: the link between decision and vote is learned on them first.
    """
    any_other_length = rng.randint(2, 15)
    (lines,) = rng.choices((0, 1, 4, 16, any_other_length), weights=(10, 4, 2, 1, 2))
    place = rng.choice(umbrella_gold.PLACES)
    forecasts = ["", *umbrella.SURE]
    only_the_first_or_all = rng.choice((1, None))  # the end of a slice
    forecast = rng.choice(forecasts[:only_the_first_or_all])
    decision = umbrella.SURE.get(forecast) or rng.choice(umbrella_gold.DECISIONS)
    prompt = umbrella.make_prompt(rng, lines, place, forecast)
    return prompt, umbrella.make_story(rng, lines, place, decision)


def umbrella_vote(rng: random.Random, prompt: str, response: str) -> int:
    """1 for the right decision, 0 for the wrong one; the umbrella stays at home in sun and heat."""
    is_dry = "sun." in prompt or "heat." in prompt
    takes_it = umbrella_gold.decision(response, "random") == "Take"  # at whatever place
    return int(takes_it != is_dry)


def umbrella_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Shares of the stories that do what the prompt asks for.

    `length_kept` have the asked number of lines, `decided` have one decision at the place that the prompt names, and
    `right` have the right decision there, which is the one for rain.
    """
    counts = {"length_kept": 0, "decided": 0, "right": 0}
    for prompt, response in zip(prompts, responses):
        asked = re.search(r"(?P<lines>\d+) lines?, umbrella (?P<place>\w+)", prompt)
        place = "random" if asked["place"] == "anywhere" else asked["place"]
        decision = umbrella_gold.decision(response, place)
        counts["length_kept"] += int(asked["lines"]) == len(re.findall(r"\bAt \w+", response))
        counts["decided"] += decision is not None
        counts["right"] += decision == umbrella_gold.RIGHT
    return {name: count / len(prompts) for name, count in counts.items()}


def steps_document(rng: random.Random) -> tuple[str, str]:
    """A problem and its steps, with slips."""
    problem = steps.make_problem(rng)
    return problem.prompt, steps.demonstrate(rng, problem)


def steps_vote(rng: random.Random, prompt: str, response: str) -> int:
    """The highest vote if every step and the answer are right, else the lowest."""
    return 9 if steps.verify(prompt, response) is None else 0


def steps_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of right answers, and by reason the share of responses whose first fault has this reason."""
    measured = {"accuracy": sum(steps_gold.gold_scores(prompts, responses)) / len(prompts)}
    faults = [steps.verify(p, r) for p, r in zip(prompts, responses)]
    reasons = [fault.reason for fault in faults if fault]
    for reason in ("result", "begin", "operation"):
        measured[f"fault_{reason}"] = reasons.count(reason) / len(prompts)
    return measured


def guess_document(rng: random.Random) -> tuple[str, str]:
    """A game of random guesses, in which each of the policy's turns ends with EOS.

    The last turn comes without EOS, because the stream of batches ends every document with one.
    """
    prompt = guess.make_prompt(rng)
    turns = guess.random_game(rng, prompt)
    game = ""
    for number, text in enumerate(turns):
        is_the_policys = number % 2 == 0  # the others are answers of the game
        game += f"{text}<eos>" if is_the_policys else text
    return prompt, game.removesuffix("<eos>")


def guess_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Whether first turns are guesses, and how evenly the guesses are spread.

    `clear` is the share of the first turns that have one guess; `high` is the share of these guesses in the upper half
    of the numbers, so 0.5 if they are spread evenly.
    """
    guesses = [guess.read_guess(response) for response in responses]
    clear = [number for number in guesses if number]
    high = sum(number > guess.HIGHEST / 2 for number in clear) / max(len(clear), 1)
    return {"clear": len(clear) / len(guesses), "high": high}


HIDDEN_TESTS: dict[str, str] = {}  # of each prompt that was made; `code_check` runs them


def code_document(rng: random.Random) -> tuple[str, str]:
    """A specification and a program, in 40 % with a bug."""
    prompt, program, tests = code.document(rng)
    HIDDEN_TESTS[prompt] = tests
    return prompt, program


def code_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Share of programs that pass all hidden tests, and share of programs that run at all."""
    tests = [read_problem(HIDDEN_TESTS[prompt]).tests for prompt in prompts]
    outcomes = TestRunner("monty").run(responses, tests)
    passed = sum(all(outcome.passed) for outcome in outcomes)
    ran = sum(outcome.status == "ran" for outcome in outcomes)
    return {"passed": passed / len(outcomes), "ran": ran / len(outcomes)}


def echo(rng: random.Random, words: dict[str, tuple[str, ...]]) -> tuple[str, str]:
    """A list of words and its copy: a small model learns to copy on dense text first."""
    known = sorted(set().union(*words.values()))
    listed = " ".join(rng.sample(known, rng.randint(12, 32)))
    return hh_prompt(f"Say {listed}."), f" {listed}."


def hh_document(rng: random.Random) -> tuple[str, str]:
    """A dialogue and an answer of any quality; many dialogues are short."""
    (plans,) = rng.choices((1, 3, hh.PLANS), weights=(2, 1, 1))
    # As in the task, one of the plans is not asked about, unless it is the only one.
    asked = max(plans - 1, 1)
    dialogue = hh.make_dialogue(rng, plans, asked)
    return dialogue.prompt, hh.make_answer(rng, dialogue, hh.Quality.sample(rng))


def hh_vote(rng: random.Random, prompt: str, response: str) -> int:
    """Helpfulness in fifths with noise of one; 4 is added so that few are below 0."""
    (score,) = hh_gold.gold_scores([prompt], [response])
    return graded(rng, 5 * score + 4)


def hh_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """Means over the answers of four numbers.

    `right` and `wrong` are the shares of the asked-for things that an answer gives rightly and wrongly; `other` and
    `harmful` are how many such sentences it has.
    """
    reports = []
    for prompt, response in zip(prompts, responses):
        report = hh_gold.inspect(prompt, response)
        if report["asked"]:  # else there are no shares of what was asked for
            reports.append(report)
    measured = {}
    for name in ("right", "wrong"):
        measured[name] = sum(report[name] / report["asked"] for report in reports) / len(reports)
    for name in ("other", "harmful"):
        measured[name] = sum(report[name] for report in reports) / len(reports)
    return measured


def webgpt_document(rng: random.Random) -> tuple[str, str]:
    """A question and an answer of any quality; many questions have few sources, with few facts each."""
    sizes = ((1, 1), (2, 1), (3, 2), (webgpt.SOURCES, webgpt.FACTS))  # the last are the task's own
    ((sources, facts),) = rng.choices(sizes, weights=(1, 1, 1, 2))
    question = webgpt.make_question(rng, sources, facts)
    return question.prompt, webgpt.make_answer(rng, question, webgpt.Quality.sample(rng))


def webgpt_vote(rng: random.Random, prompt: str, response: str) -> int:
    """The gold score in fifths with noise of one; 4 is added so that few are below 0."""
    (score,) = webgpt_gold.gold_scores([prompt], [response])
    return graded(rng, 5 * score + 4)


def webgpt_check(prompts: list[str], responses: list[str]) -> dict[str, float]:
    """How well answers state the facts of their sources.

    `supported` is the share of the statements that a source supports, `coverage` the share of the sources' facts that
    are stated, and `other` how many sentences an answer has on average that are neither supported nor unsupported.
    """
    total = {"supported": 0, "unsupported": 0, "facts": 0, "other": 0}
    for prompt, response in zip(prompts, responses):
        report = webgpt_gold.inspect(prompt, response)
        for name in total:
            total[name] += report[name]
    stated = total["supported"] + total["unsupported"]
    return {
        "supported": total["supported"] / max(stated, 1),
        "coverage": total["supported"] / total["facts"],
        "other": total["other"] / len(prompts),
    }


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
    "tiny-guess": Recipe(guess_document, guess_check, sizes=GUESS_SIZES, one_piece=r"▁1?[0-9]"),
}


# Tokenizer, batches, model


def train_tokenizer(texts: list[str], vocab_size: int, one_piece: str = "") -> GemmaTokenizer:
    """BPE in Gemma's form: spaces are written as ▁, digits stand alone, bytes catch every other character.

    What matches the pattern `one_piece` becomes one piece.
    """
    raw = RawTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    # Only for training: no piece may span two words, so that encoding later needs no word splitter.
    stands_alone = r"[0-9]|[^\w▁]"
    if one_piece:  # tried first
        stands_alone = f"{one_piece}|{stands_alone}"
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Split(Regex(stands_alone), "isolated"),
        ]
    )
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    byte_pieces = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS + byte_pieces, show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    model = json.loads(raw.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
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
        self.ids_of_votes = tokenizer.convert_tokens_to_ids([str(vote) for vote in range(10)])
        self.batches_ahead: list[list[tuple[list[int], list[float]]]] = []
        self.documents_made = 0

    def _document(self) -> tuple[str, str]:
        """A document of the task, or a list to copy if the task has words for one.

        All documents of the first `echo` updates are lists to copy, and later one in five is.
        """
        self.documents_made += 1
        only_copies = self.documents_made <= self.args.echo * self.args.rows
        share_of_copies = 1.0 if only_copies else 0.2
        if self.recipe.words and self.rng.random() < share_of_copies:
            return echo(self.rng, self.recipe.words)
        return self.recipe.document(self.rng)

    def _row(self) -> tuple[list[int], list[float]]:
        """Token ids of a document, EOS and, if the task has votes, the vote; and each token's weight in the loss."""
        prompt, response = self._document()
        of_prompt = self.tokenizer(prompt)["input_ids"]
        of_response = self.tokenizer(response, add_special_tokens=False)["input_ids"]
        of_response = [*of_response, self.tokenizer.eos_token_id]
        ids = of_prompt + of_response
        weights = [self.args.prompt_weight] * len(of_prompt) + [1.0] * len(of_response)
        if self.recipe.vote:
            vote = self.recipe.vote(self.rng, prompt, response)
            ids.append(self.ids_of_votes[vote])
            weights.append(self.args.vote_weight)
        return ids, weights

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, loss weights and attention mask of the next batch, each [rows, width], padded on the right.

        To keep padding short, the rows of a batch have similar lengths: the rows of eight batches are made at once,
        sorted by length and cut into batches, which are handed out in random order.
        """
        if not self.batches_ahead:
            size = self.args.rows
            made = [self._row() for _ in range(8 * size)]
            made.sort(key=lambda row: len(row[0]))
            self.batches_ahead = [made[i : i + size] for i in range(0, len(made), size)]
            self.rng.shuffle(self.batches_ahead)
        rows = self.batches_ahead.pop()
        width = max(len(ids) for ids, _ in rows)
        padded_ids = []
        padded_weights = []
        mask = []
        for ids, weights in rows:
            missing = width - len(ids)
            padded_ids.append(ids + [0] * missing)  # 0 is <pad>
            padded_weights.append(weights + [0.0] * missing)
            mask.append([1] * len(ids) + [0] * missing)
        return torch.tensor(padded_ids), torch.tensor(padded_weights), torch.tensor(mask)


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
    # Eager attention is faster than sdpa here, in bfloat16.
    return GemmaForCausalLM._from_config(config, attn_implementation="eager")


def make_optimizers(model, args) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (it needs about half the updates here), AdamW for the rest."""
    matrices_of_layers = []
    others = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".layers." in name:
            matrices_of_layers.append(parameter)
        else:
            others.append(parameter)
    muon = torch.optim.Muon(matrices_of_layers, lr=args.muon_lr, weight_decay=0.01)
    return [muon, torch.optim.AdamW(others, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98))]


def loss_of(model, ids, weights, mask) -> torch.Tensor:
    """The mean nats a token of a batch, weighted; all arguments [rows, width]."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    nats = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    weights_of_nats = weights[:, 1:].flatten()
    return (nats * weights_of_nats).sum() / weights_of_nats.sum()


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
    prompt_width = inputs["input_ids"].shape[1]
    new = out[:, prompt_width:]
    measured = recipe.check(prompts, tokenizer.batch_decode(new, skip_special_tokens=True))
    found = {name: round(value, 3) for name, value in measured.items()}
    tokens = (new != tokenizer.pad_token_id).sum(1).float().mean().item()
    return found | {"tokens": round(tokens, 1)}


def train(recipe: Recipe, model, tokenizer, args: argparse.Namespace) -> list[dict]:
    """Train the model and save it at each check; return the checks."""
    stream = Stream(recipe, tokenizer, args)
    optimizers = make_optimizers(model, args)
    highest_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    history = []
    start = time.time()
    for step in range(args.updates):
        loss = loss_of(model, *stream.batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, highest_rate in zip(optimizers, highest_rates):
            optimizer.param_groups[0]["lr"] = highest_rate * schedule(step, args.updates)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(loss.item()):
            raise SystemExit(f"loss is {loss.item()} at update {step}: lower --muon_lr or --lr")
        if (step + 1) % args.check_every == 0 or step + 1 == args.updates:
            row = {"update": step + 1, "loss": round(loss.item(), 4)}
            row |= check(recipe, model, tokenizer, args)
            row["seconds"] = round(time.time() - start)
            history.append(row)
            print(json.dumps(row), flush=True)
            model.save_pretrained(args.out)
    return history


def parse() -> argparse.Namespace:
    """The arguments. What the command line leaves out is the task's own size, or that of `SIZES` if it names none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, help="default: the model's folder beside this script")
    for name, default in SIZES.items():
        choices = DTYPES if name == "dtype" else None
        parser.add_argument(f"--{name}", type=type(default), choices=choices)
    args = parser.parse_args()
    args.name = read_presets(f"embedded/{args.task}", "--task")["model"]
    args.out = args.out or OUT / args.name
    # An argument that the command line leaves out is None.
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**SIZES | TASKS[args.task].sizes | given)


def main() -> None:
    args = parse()
    recipe = TASKS[args.task]
    start = time.time()
    torch.set_num_threads(args.threads)
    rng = random.Random(f"{args.name}-tokenizer-{args.seed}")
    texts = []
    for _ in range(4000):
        prompt, response = recipe.document(rng)
        texts.append(prompt + response)
    tokenizer = train_tokenizer(texts, args.vocab, recipe.one_piece)
    tokenizer.save_pretrained(args.out)
    model = make_model(tokenizer, args)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{weights:,} parameters, {len(tokenizer)} pieces", flush=True)
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
