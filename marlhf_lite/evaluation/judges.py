"""Judges: which of two responses to a prompt is better? (paper, section 4.1, Appendix F)

Stored scores, a reward model, a local causal LM, a model behind an endpoint, a person; and the command `marlhf judge`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pandas as pd
import torch

from marlhf_lite.config.options import EndpointConfig
from marlhf_lite.evaluation.agreement import win_rate
from marlhf_lite.evaluation.judge_prompts import (
    CRITERIA,
    Criteria,
    instructions,
    letter_prompt,
    material,
    parse_judgment,
)
from marlhf_lite.evaluation.judgments import (
    Comparison,
    Judge,
    Judgment,
    NotJudged,
    StopJudging,
    combine,
    draw_pairs,
    file_name,
    judge_pairs,
    make_pairs,
    summary,
)
from marlhf_lite.evaluation.responses import fingerprint, read_responses, restore
from marlhf_lite.evaluation.scores import name_temperatures, to_records
from marlhf_lite.evaluation.statistics import finite
from marlhf_lite.models.actor_critic import ScalarHeadModel
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import load_base, load_score_model, load_tokenizer
from marlhf_lite.tasks.tokenization import encode_responses
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import CONFIG, RunFolder, check_writable


def by_score(name: str, a: float, b: float) -> Judgment:
    """The judgment that the higher score wins."""
    return Judgment("tie" if a == b else "A" if a > b else "B", {"A": {name: a}, "B": {name: b}})


class ScoreJudge(Judge):
    """The response with the higher score wins: a gold scorer, or a reward model (paper, Table 1).

    `scorer` maps (prompts, responses) to a finite number each. Its judgments are never reused: it may be edited.
    """

    ordered = False

    def __init__(self, scorer: Callable[[list[str], list[str]], Sequence[float]], name="gold"):
        self.scorer, self.name = scorer, name

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Raises `InputError` for a wrong number of scores, or one that is not finite."""
        scores = finite(f"scores of {self.name}", self.scorer([prompt] * 2, [a, b])).tolist()
        if len(scores) != 2:
            raise InputError(f"judge {self.name}: {len(scores)} scores for 2 responses: return one each")
        first, second = scores
        return by_score("score", first, second)


def stored_judge(rows: Sequence[Mapping], column: str, name: str) -> ScoreJudge:
    """A judge by the scores that are stored with the answers, in the column `gold` or `rm_score`."""
    scores = {(row["prompt"], row["response"]): row[column] for row in rows}
    return ScoreJudge(lambda prompts, responses: [scores[key] for key in zip(prompts, responses, strict=True)], name)


def score_answers(reward: ModelReward, tokenizer, rows: Sequence[Mapping], limit: int) -> list[dict]:
    """The same answers with `rm_score`, a reward model's score at the last token of each.

    An answer is scored on the very tokens that were sampled, if they are stored: one that was cut has no EOS. Other
    answers are cut at `limit` tokens, or end with EOS.
    """
    ids = encode_responses(tokenizer, [row["response"] for row in rows], limit)
    sampled = [{"token_ids": tokens, "ended": True} | dict(row) for row, tokens in zip(rows, ids, strict=True)]
    scores = reward(restore(tokenizer, sampled)).tolist()
    return [dict(row) | {"rm_score": score} for row, score in zip(rows, scores, strict=True)]


@torch.no_grad()
def hash_weights(model: torch.nn.Module) -> str:
    """A hash of a sample of every parameter, which differs after any training step."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.flatten()
        digest.update(flat[:: max(1, flat.numel() // 4096)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class LocalJudge(Judge):
    """A causal LM on this machine: the likelier next token, "A" or "B", names the winner.

    Small models lean towards one letter. With both orders `combine` takes the mean of each response's log-probability,
    in which a constant lean cancels. Raises `InputError` where A and B are not one token each.
    """

    def __init__(self, model, tokenizer, criteria: Criteria, name: str = "local"):
        self.model, self.tokenizer, self._criteria = model.eval(), tokenizer, criteria
        self.name, self.criteria = name, criteria.name
        space = "" if tokenizer.chat_template else " "  # a chat begins its turn without a space
        a, b = (tokenizer(space + letter, add_special_tokens=False)["input_ids"] for letter in "AB")
        if a[:-1] != b[:-1] or a[-1] == b[-1]:
            raise InputError("local judge: its tokenizer has no single token for A and for B: take another model")
        self.lead, self.letters = a[:-1], [a[-1], b[-1]]  # tokens before the letter, and the letters
        example = letter_prompt(criteria, "p", "a", "b")
        self.identity = json.dumps([hash_weights(model), example, tokenizer.chat_template])

    @torch.no_grad()
    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """A judgment with `logprob` of both letters, in nats; skipped where the texts are too long for the model."""
        ids = self._encode(letter_prompt(self._criteria, prompt, a, b))
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if room and len(ids) > room:
            return Judgment("skipped", raw=f"{len(ids)} tokens, the model takes {room}")
        tokens = torch.tensor([ids], device=next(self.model.parameters()).device)
        logits = self.model(input_ids=tokens, logits_to_keep=1, use_cache=False).logits[0, -1]
        x, y = logits.float().log_softmax(-1)[self.letters].tolist()
        return by_score("logprob", x, y)

    def _encode(self, text: str) -> list[int]:
        """Token ids up to the position of the letter."""
        if not self.tokenizer.chat_template:
            return self.tokenizer(text)["input_ids"] + self.lead
        chat = [{"role": "user", "content": text}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        # The template has written all special tokens.
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
        return ids + self.lead


# Statuses that end a run, and what the user should check.
CHECKS = {401: "--judge_key_env", 402: "the account", 403: "--judge_key_env", 404: "--judge_model and --judge_url"}


class EndpointJudge(Judge):
    """A model behind an OpenAI-compatible endpoint (paper, section 4.1 and Appendix F.1).

    The openai client retries 408, 409, 429, 5xx, time-outs and broken connections with back-off, and honours
    Retry-After. The key is read from the environment and sent to the endpoint; it is in no file, message or log.
    Raises `InputError` for options that cannot work.
    """

    def __init__(self, options: EndpointConfig, criteria: Criteria, retries: int = 5):
        try:
            import openai
        except ImportError:
            raise InputError("--judge endpoint needs the openai package: pip install 'marlhf-lite[judge]'") from None
        if not options.judge_model.strip():
            raise InputError("--judge_model: not given: name the model that the endpoint is to judge with")
        url = options.judge_url
        if not url.startswith(("http://", "https://")) or "@" in url or "?" in url:  # the URL is stored and printed
            what = "give an address such as http://localhost:8000/v1, without user, password or query"
            raise InputError(f"--judge_url: {what}; the key comes from --judge_key_env")
        self._key = os.environ.get(options.judge_key_env, "").strip()
        if options.judge_key_env and not (self._key and self._key.isascii() and self._key.isprintable()):
            raise InputError(
                f"--judge_key_env {options.judge_key_env}: not set, or not a key: export the endpoint's key"
            )
        self.options, self._criteria = options, criteria
        self.name, self.criteria, self.workers = options.judge_model, criteria.name, options.workers or 4
        self.request = {"model": options.judge_model, "temperature": 0.0}
        self.request |= {"max_tokens": options.judge_max_tokens} if options.judge_max_tokens else {}
        self.identity = json.dumps([url, self.request, self._messages("p", "a", "b")])
        connection = {"base_url": url, "max_retries": retries, "timeout": 60.0}
        try:
            _ = urlsplit(url).port  # raises for a port that cannot be
            self.client = openai.OpenAI(api_key=self._key or "none", **connection)
        except Exception:
            raise InputError(f"--judge_url {url}: not an address: give one such as http://localhost:8000/v1") from None

    def prepare(self, comparisons: Sequence[Comparison]) -> None:
        """Print an estimate of the tokens: three bytes each in prompts (English has about four), and the limit of
        verdicts."""
        messages = [message for each in comparisons for message in self._messages(*each.texts)]
        prompts = sum(len(message["content"].encode()) // 3 + 5 for message in messages)
        requests, verdicts = len(comparisons), len(comparisons) * (self.options.judge_max_tokens or 400)
        about = f"about {prompts} tokens of prompts and at most {verdicts} of verdicts"
        print(f"{self.name}: {requests} requests, {about} (fewer pairs: --size)")

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Raises `InputError` where the key is refused or nothing answers."""
        import openai

        try:
            answer = self.client.chat.completions.create(messages=self._messages(prompt, a, b), **self.request)
            return parse_judgment(self._without_key(answer.choices[0].message.content or ""), self._criteria)
        except openai.APIStatusError as error:
            status, text = error.status_code, self._without_key(" ".join(str(error.message).split()))[:200]
            if status in CHECKS:  # without the text, which may quote the key
                raise self._end(f"HTTP {status}: check {CHECKS[status]}") from None
            raise NotJudged(f"HTTP {status}: {text}") from None
        except openai.APIConnectionError as error:
            raise self._end(f"cannot be reached ({error}): check --judge_url, and that the server runs") from None
        except (ValueError, TypeError, AttributeError, IndexError):
            raise NotJudged("the answer is not a chat completion") from None

    def _messages(self, prompt: str, a: str, b: str) -> list[dict]:
        texts = (self._criteria, prompt, a, b)
        return [{"role": "system", "content": instructions(*texts)}, {"role": "user", "content": material(*texts)}]

    def _end(self, what: str) -> InputError:
        return InputError(f"{self.options.judge_url}: {what}; judgments so far are kept")

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


KEYS = {"1": "A", "2": "B", "t": "tie", "s": "skipped"}


class HumanJudge(Judge):
    """A person in a terminal, who sees neither names nor ids. Each annotator has a file and an order of their own.

    `ask` reads a line and `show` writes one.
    """

    progress_bar = False

    def __init__(self, annotator: str, criteria: Criteria, ask=input, show=print):
        self.name, self.criteria, self.seed_name = f"human-{annotator}", criteria.name, annotator
        self._criteria, self.ask, self.show = criteria, ask, show
        self.identity = json.dumps([self.name, criteria.question()])

    def prepare(self, comparisons: Sequence[Comparison]) -> None:
        self.show(f"{wrap(self._criteria.question())}\n\n{len(comparisons)} pairs. Type a letter, then Enter.")

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Raises `StopJudging` at q and at the end of the input."""
        titles = (self._criteria.prompt, f"{self._criteria.response} 1", f"{self._criteria.response} 2")
        for title, text in zip(titles, (prompt, a, b), strict=True):
            self.show(f"\n{title}\n{'-' * len(title)}\n{wrap(text)}")
        while True:
            try:
                key = self.ask("\nbetter: 1 or 2, t: tie, s: skip, q: stop and go on later > ").strip().lower()
            except EOFError:
                raise StopJudging from None
            if key == "q":
                raise StopJudging
            if key in KEYS:
                return Judgment(KEYS[key])


def printable(text: str) -> str:
    """Text without characters that could control a terminal or turn the reading direction."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def wrap(text: str) -> str:
    """Printable text, wrapped at words to the width of the terminal."""
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width) for line in printable(text.strip()).splitlines())


# The command `marlhf judge`


def run_judge(options: SimpleNamespace) -> tuple[list[dict], dict]:
    """Judge what the options name (groups judge, endpoint, rm_input, model, length, seed) and print the counts.

    Returns the rows of `judge_pairs` and the counts of `summary` with `win_rate`, an interval; the counts are written
    beside the judgments. Everything is checked before a model is loaded or anything is paid for.
    """
    chosen, seed = options.judge, options.seed.seed
    names = [name.strip() for name in chosen.judge_methods.split(",") if name.strip()]
    if len(names) != 2:
        raise InputError(f"--judge_methods {chosen.judge_methods!r}: give two names, such as MA-PPO,PPO")
    rows, first, second = find_answers(chosen.judge_answers, *names)
    pairs = draw_pairs(make_pairs(rows, first, second), chosen.size, seed)
    folder = Path(chosen.output_dir or "runs/judging").expanduser()
    check_writable("--output_dir", folder)
    judge = make_judge(options, [row for row in rows if row["method"] in (first, second)])
    if identical := sum(pair.first == pair.second for pair in pairs):
        print(f"{identical} of {len(pairs)} pairs are the same text twice: ties, without asking")
    judgments = judge_pairs(judge, pairs, folder, chosen.judge_order, seed)
    counts = summary(judgments) | {"criteria": judge.criteria, "order": chosen.judge_order, "seed": seed}
    if counts["judged"]:
        counts["win_rate"] = win_rate([row["winner"] for row in combine(judgments)]).rate._asdict()
    if judgments:  # else the counts of an earlier sitting stay
        write_json(folder / f"{file_name(f'{judge.name}-{first}-against-{second}')}.json", counts)
        print(f"{report(counts, judgments)}\njudgments: {folder}")
    if counts["pairs"] < len(pairs):
        print(f"{judge.name}: {counts['pairs']} of {len(pairs)} pairs so far: the same command goes on")
    return judgments, counts


def find_answers(places: str, *methods: str) -> tuple:
    """`(rows, name of each method among the rows)`: the first answer of every method to each prompt.

    `places` are folders and files, comma-separated; see `read_responses`. Where there are several temperatures, methods
    are named with theirs, such as "SFT T=0.4"; a method that is asked for without one is taken at the training
    temperature, which the config of the evaluation holds. Raises `InputError` for a place without answers.
    """
    paths = [Path(part.strip()).expanduser() for part in places.split(",") if part.strip()]
    if not paths:
        raise InputError("--judge_answers: not given: name folders that `marlhf evaluate` wrote, or files of answers")
    answers = pd.concat([read_responses(path) for path in paths], ignore_index=True)
    rows = to_records(name_temperatures(answers[answers["sample"] == 0]))
    folders = [path if path.is_dir() else path.parent for path in paths]
    training = [RunFolder.open(folder).config.get("temperature") for folder in folders if (folder / CONFIG).is_file()]
    there = {row["method"] for row in rows}
    found = [next((n for n in (m, *(f"{m} T={t}" for t in training)) if n in there), m) for m in methods]
    return rows, *found


def make_judge(options: SimpleNamespace, rows: Sequence[Mapping]) -> Judge:
    """The judge that `--judge` names, for these answers. Raises `InputError` where the judge lacks something."""
    criteria, has_gold = CRITERIA[options.judge.judge_criteria], all(row.get("gold") is not None for row in rows)
    kind, model = options.judge.judge, options.model
    if kind == "auto":
        kind = "gold" if has_gold else "rm"
    if kind == "gold" and not has_gold:
        raise InputError("--judge gold: the answers have no gold score, for their task has no known truth: take rm")
    if kind == "gold":
        return stored_judge(rows, "gold", "gold")
    if kind == "rm":
        return stored_judge(_with_rm_scores(options, rows), "rm_score", "rm")
    if kind == "local":
        base, tokenizer = load_base(model), load_tokenizer(model.model)
        return LocalJudge(base, tokenizer, criteria, f"local-{Path(model.model).name}")
    return EndpointJudge(options.endpoint, criteria) if kind == "endpoint" else HumanJudge("annotator-1", criteria)


def _with_rm_scores(options: SimpleNamespace, rows: Sequence[Mapping]) -> Sequence[Mapping]:
    """The answers with scores of the reward model in `--rm`; by default of the one that has scored all of them."""
    scored_by = {row.get("rm") if row.get("rm_score") is not None else None for row in rows}
    stored = len(scored_by) == 1 and None not in scored_by
    folder = resolve_adapter_dir("rm", options.rm_input.rm) if options.rm_input.rm or not stored else None
    if stored and (folder is None or scored_by == {fingerprint(folder)}):
        return rows
    reward = ModelReward(ScalarHeadModel(load_score_model(load_base(options.model), folder)))
    return score_answers(reward, load_tokenizer(options.model.model), rows, options.length.max_response_length)


def report(counts: Mapping, judgments: Sequence[Mapping]) -> str:
    """The counts in a few lines, and why judgments are missing."""
    first, second = counts["methods"]
    numbers = ", ".join(f"{counts[name]} {name}" for name in ("win", "lose", "tie", "malformed", "skipped"))
    lines = [f"{counts['judge']}: {first} against {second}, {counts['pairs']} pairs: {numbers}"]
    if "win_rate" in counts:
        rate = counts["win_rate"]
        lines.append(
            f"win rate, ties as half: {rate['mean']:.0%}, 95 % interval {rate['low']:.0%} to {rate['high']:.0%}"
        )
    place = counts["position"]
    if place["decided"]:
        lines.append(f"the response shown first won {place['first_shown_share']:.0%} of {place['decided']} decisions")
    if place["both_orders"]:
        lines.append(f"both orders agree on {place['consistency']:.0%} of {place['both_orders']} pairs")
    for word in ("skipped", "malformed"):
        raw = dict.fromkeys(row["raw"] for row in judgments if row["winner"] == word and row["raw"])
        lines += [f"{word}: {textwrap.shorten(printable(text), 200, placeholder=' ...')}" for text in list(raw)[:3]]
    return "\n".join(lines)
