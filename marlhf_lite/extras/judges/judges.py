"""Judges of two responses, scores or a model at an endpoint (paper, section 4.1, Appendix F), and `marlhf judge`."""

import json
import os
import random
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import TimeoutError as NoAnswerYet
from pathlib import Path

import pandas as pd

from marlhf_lite.config.commands import JudgeCommand
from marlhf_lite.config.options import EndpointConfig
from marlhf_lite.evaluation.responses import read_responses
from marlhf_lite.evaluation.scores import name_temperatures, to_records
from marlhf_lite.evaluation.statistics import finite, win_rate
from marlhf_lite.extras.judges.judgments import (
    Comparison,
    Judge,
    Judgment,
    combine,
    file_name,
    judge_pairs,
    make_pairs,
    summary,
)
from marlhf_lite.extras.judges.prompts import (
    CRITERIA,
    Criteria,
    instructions,
    material,
    parse_judgment,
)
from marlhf_lite.extras.servers import BAD_ANSWER, connect, within
from marlhf_lite.training.rollout import said_by_policy
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.printable import printable
from marlhf_lite.utils.run_folder import RunLock, check_writable, split_paths

try:
    import openai
except ImportError:  # EndpointJudge tells how to install it
    openai = None


class ScoreJudge(Judge):
    """The response with the higher score wins (paper, Table 1).

    `scorer`, such as gold scores or a reward model, maps (prompts, responses) to finite numbers. This judge has no
    `identity`, so its stored judgments are not reused: the scorer may change.
    """

    def __init__(self, scorer: Callable[[list[str], list[str]], Sequence[float]], name="gold"):
        self.scorer, self.name = scorer, name

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Return which of two answers has the higher score; equal scores are a tie.

        Raises `InputError` if the scorer does not return two scores, or one of them is not finite.
        """
        scores = self.scorer([prompt, prompt], [a, b])
        score_a, score_b = finite(f"scores of judge {self.name}", scores, count=2).tolist()
        winner = "tie"
        if score_a != score_b:
            winner = "A" if score_a > score_b else "B"
        return Judgment(winner, {"A": {"score": score_a}, "B": {"score": score_b}})


ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-f:]+\])(:[1-6]?\d{1,4})?(/[\w./~%-]*)?", re.ASCII)
BYTES_PER_TOKEN = 3  # English has about four, so the estimate of tokens is rather too high
PATIENCE = 600.0  # seconds for one judgment, all retries included


class EndpointJudge(Judge):
    """A model at an OpenAI-compatible endpoint (paper, section 4.1 and Appendix F.1).

    The endpoint may be a server on your own machine: vLLM, llama.cpp and ollama speak this protocol. The openai client
    retries 408, 409, 429, 5xx, time-outs and broken connections with back-off, and honours Retry-After. The key is read
    from the environment and sent to the endpoint only; files, messages and logs do not have it.

    Raises `InputError` for options that cannot work.
    """

    def __init__(self, options: EndpointConfig, criteria: Criteria, retries: int = 5):
        if openai is None:
            raise InputError(
                "marlhf judge: needs the package openai: pip install 'marlhf-lite[judge]'"
            )
        if not options.judge_model.strip():
            raise InputError("--judge_model: not given: name the model that judges")
        # The address is stored and printed, so it must not have a password in it.
        if not ADDRESS.fullmatch(options.judge_url):
            what = (
                "give an address such as http://localhost:8000/v1, without user, password or query"
            )
            raise InputError(f"--judge_url: {what}; the key comes from OPENAI_API_KEY")
        key = os.environ.get("OPENAI_API_KEY", "").strip()  # your own server may need none
        self.client = connect(
            options.judge_url, key, "OPENAI_API_KEY", max_retries=retries, timeout=60.0
        )
        self.options = options
        self._full_criteria = criteria  # with the texts that requests need
        self.name = options.judge_model
        self.criteria = criteria.name  # as it stands in the rows of judgments
        self.workers = options.workers or 4  # 0 leaves the choice to us
        self.request: dict = {"model": self.name}
        # With --judge_max_tokens 0 the request is plain: some models refuse a temperature or a limit.
        if options.judge_max_tokens:
            self.request |= {"temperature": 0.0, "max_tokens": options.judge_max_tokens}
        # Everything that a verdict depends on besides the texts, which are placeholders here. A stored judgment is
        # reused only if the identity is still the same; otherwise the model is asked again.
        self.identity = json.dumps([options.judge_url, self.request, self._messages("p", "a", "b")])

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Return the endpoint's judgment on answers `a` and `b`.

        If only this request failed, the judgment is `skipped`. If all requests would fail, because the key is refused
        or nothing answers, it raises `InputError`.
        """
        ask = self.client.chat.completions.create
        messages = self._messages(prompt, a, b)
        try:
            answer = within(PATIENCE, lambda: ask(messages=messages, **self.request))
            error_of_gateway = getattr(answer, "error", None)  # some send one with status 200
            if error_of_gateway:
                return Judgment("skipped", raw=" ".join(str(error_of_gateway).split())[:200])
            return parse_judgment(answer.choices[0].message.content or "", self._full_criteria)
        except openai.APIStatusError as error:
            # Key, credit, rights or address are wrong. The server's text is left out, because it may quote the key.
            if error.status_code in (401, 402, 403, 404):
                fix = "check OPENAI_API_KEY, --judge_model and --judge_url"
                raise self._error_that_ends_run(f"HTTP {error.status_code}: {fix}") from None
            text = " ".join(str(error.message).split())[:200]
            return Judgment("skipped", raw=f"HTTP {error.status_code}: {text}")
        except openai.APIConnectionError as error:
            raise self._error_that_ends_run(
                f"cannot be reached ({error}): check --judge_url, and that the server runs"
            ) from None
        except NoAnswerYet:
            raise self._error_that_ends_run(
                f"no whole answer within {PATIENCE:g} seconds: look at the server's log"
            ) from None
        except BAD_ANSWER:
            return Judgment("skipped", raw="the answer is not a chat completion")

    def announce(self, comparisons: Sequence[Comparison]) -> None:
        """Print how many tokens will be sent and how many may come back, because the endpoint may charge for them."""
        sent = 0
        for comparison in comparisons:
            for message in self._messages(*comparison.texts):
                sent += len(message["content"].encode()) // BYTES_PER_TOKEN
        count = len(comparisons)
        limit = self.options.judge_max_tokens
        back = "and verdicts without a limit"
        if limit:
            back = f"and at most {count * limit} of verdicts"
        print(f"{self.name}: {count} requests, about {sent} tokens {back} (fewer: --size)")

    def _messages(self, prompt: str, a: str, b: str) -> list[dict]:
        texts = (self._full_criteria, prompt, a, b)
        # One message of the user, because not every model has a system role.
        return [{"role": "user", "content": f"{instructions(*texts)}\n\n{material(*texts)}"}]

    def _error_that_ends_run(self, what: str) -> InputError:
        return InputError(f"{self.options.judge_url}: {what}; judgments so far are kept")


# The command


def run_judge(options: JudgeCommand) -> tuple[list[dict], dict]:
    """Judge the answers that the options name, and print the counts.

    Return the rows of `judge_pairs` and the counts of `summary` with `win_rate`, an interval; the counts are also
    written beside the judgments. Options and answers are checked before the first request.
    """
    names = [name.strip() for name in options.judge_methods.split(",") if name.strip()]
    if len(names) != 2 or names[0] == names[1]:
        raise InputError(
            f"--judge_methods {options.judge_methods!r}: give two names, such as MA-PPO,PPO"
        )
    pairs = make_pairs(first_answers(options.judge_answers), *names)
    # Draw --size pairs (all if it is 0), and keep them in the order of the answers.
    size = min(options.size or len(pairs), len(pairs))
    drawn = random.Random(options.seed).sample(range(len(pairs)), size)
    pairs = [pairs[i] for i in sorted(drawn)]
    folder = Path(options.output_dir or "runs/judging").expanduser()
    check_writable("--output_dir", folder)
    judge = EndpointJudge(options, CRITERIA[options.judge_criteria])
    with RunLock() as lock:
        lock.take(folder)  # otherwise two processes could pay for the same pairs
        judgments = judge_pairs(judge, pairs, folder, seed=options.seed)
    counts = summary(judgments) | {"criteria": judge.criteria, "seed": options.seed}
    if counts["judged"]:  # without a verdict there is no rate
        counts["win_rate"] = win_rate([row["winner"] for row in combine(judgments)]).rate._asdict()
    name = file_name(f"{judge.name}-{names[0]}-against-{names[1]}")
    write_json(folder / f"{name}.json", counts)
    print(f"{report(counts, judgments)}\njudgments: {folder}")
    # This error comes after the counts are written and shown, because somebody has paid for them.
    missing = len(pairs) - counts["judged"]
    if missing > len(pairs) / 2:
        fix = "take another --judge_model, or a larger --judge_max_tokens for one that thinks first"
        raise InputError(f"{judge.name}: {missing} of {len(pairs)} pairs have no verdict: {fix}")
    return judgments, counts


def first_answers(places: str) -> list[dict]:
    """Return the first answer of every method to each prompt.

    `places` are folders and files, comma-separated; see `read_responses`. If the answers have several temperatures, the
    names of methods tell them, such as "SFT T=0.4". Raises `InputError` for a place without answers.
    """
    paths = split_paths(places)
    if not paths:
        raise InputError(
            "--judge_answers: not given: name folders that `marlhf evaluate` wrote, or files of answers"
        )
    answers = pd.concat([read_responses(path) for path in paths], ignore_index=True)
    first_samples = answers[answers["sample"] == 0]
    rows = to_records(name_temperatures(first_samples))
    for row in rows:
        # In a dialogue an environment spoke in between, and its words are not part of the answer.
        if row.get("turns"):
            row["response"] = said_by_policy(row["turns"])
    return rows


def report(counts: Mapping, judgments: Sequence[Mapping]) -> str:
    """Return the counts of `summary`, and its win rate if there is one, in a few lines of text.

    Below them are the texts of at most five judgments without a verdict.
    """
    first, second = counts["methods"]
    shown = ("win", "lose", "tie", "malformed", "skipped")
    numbers = ", ".join(f"{counts[name]} {name}" for name in shown)
    lines = [f"{counts['judge']}: {first} against {second}, {counts['pairs']} pairs: {numbers}"]
    if rate := counts.get("win_rate"):
        interval = f"95 % interval {rate['low']:.0%} to {rate['high']:.0%}"
        lines.append(f"win rate, ties as half: {rate['mean']:.0%}, {interval}")
    place = counts["position"]
    if place["decided"]:
        lines.append(
            f"the response shown first won {place['first_shown_share']:.0%} of {place['decided']} decisions"
        )
    reasons = []  # each of them once
    for row in judgments:
        reason = (row["winner"], row["raw"])
        if row["winner"] in ("malformed", "skipped") and reason not in reasons:
            reasons.append(reason)
    for fault, text in reasons[:5]:
        lines.append(f"{fault}: {textwrap.shorten(printable(text), 200, placeholder=' ...')}")
    return "\n".join(lines)
