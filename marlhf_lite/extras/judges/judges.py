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

    `scorer`, such as gold scores or a reward model, maps (prompts, responses) to finite numbers. Its judgments are not
    reused, because the scorer may change.
    """

    def __init__(self, scorer: Callable[[list[str], list[str]], Sequence[float]], name="gold"):
        self.scorer, self.name = scorer, name

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Raises `InputError` for a wrong number of scores, or for a score that is not finite."""
        x, y = finite(
            f"scores of judge {self.name}", self.scorer([prompt] * 2, [a, b]), count=2
        ).tolist()
        return Judgment(
            "tie" if x == y else "A" if x > y else "B", {"A": {"score": x}, "B": {"score": y}}
        )


ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-f:]+\])(:[1-6]?\d{1,4})?(/[\w./~%-]*)?", re.ASCII)
BYTES_PER_TOKEN = 3  # English has about four: the estimate is rather too high
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
        if not ADDRESS.fullmatch(options.judge_url):  # it is stored and printed
            what = (
                "give an address such as http://localhost:8000/v1, without user, password or query"
            )
            raise InputError(f"--judge_url: {what}; the key comes from OPENAI_API_KEY")
        key = os.environ.get("OPENAI_API_KEY", "").strip()  # your own server may need none
        self.client = connect(
            options.judge_url, key, "OPENAI_API_KEY", max_retries=retries, timeout=60.0
        )
        self.options, self._criteria = options, criteria
        self.name, self.criteria, self.workers = (
            options.judge_model,
            criteria.name,
            options.workers or 4,
        )
        limit = options.judge_max_tokens
        self.request = {"model": self.name} | (
            {"temperature": 0.0, "max_tokens": limit} if limit else {}
        )
        self.identity = json.dumps([options.judge_url, self.request, self._messages("p", "a", "b")])

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Raises `InputError` if the key is refused or nothing answers."""
        ask, messages = self.client.chat.completions.create, self._messages(prompt, a, b)
        try:
            answer = within(PATIENCE, lambda: ask(messages=messages, **self.request))
            if error := getattr(answer, "error", None):  # gateways send it with status 200
                return Judgment("skipped", raw=" ".join(str(error).split())[:200])
            return parse_judgment(answer.choices[0].message.content or "", self._criteria)
        except openai.APIStatusError as error:
            # without the text, which may quote the key
            if error.status_code in (401, 402, 403, 404):
                fix = "check OPENAI_API_KEY, --judge_model and --judge_url"
                raise self._end(f"HTTP {error.status_code}: {fix}") from None
            text = " ".join(str(error.message).split())[:200]
            return Judgment("skipped", raw=f"HTTP {error.status_code}: {text}")
        except openai.APIConnectionError as error:
            raise self._end(
                f"cannot be reached ({error}): check --judge_url, and that the server runs"
            ) from None
        except NoAnswerYet:
            raise self._end(
                f"no whole answer within {PATIENCE:g} seconds: look at the server's log"
            ) from None
        except BAD_ANSWER:
            return Judgment("skipped", raw="the answer is not a chat completion")

    def announce(self, comparisons: Sequence[Comparison]) -> None:
        """Print how many tokens will be sent and how many may come back, because they are paid for."""
        sent = 0
        for comparison in comparisons:
            for message in self._messages(*comparison.texts):
                sent += len(message["content"].encode()) // BYTES_PER_TOKEN
        count, limit = len(comparisons), self.options.judge_max_tokens
        back = (
            f"and at most {count * limit} of verdicts" if limit else "and verdicts without a limit"
        )
        print(f"{self.name}: {count} requests, about {sent} tokens {back} (fewer: --size)")

    def _messages(self, prompt: str, a: str, b: str) -> list[dict]:
        texts = (self._criteria, prompt, a, b)
        # One message: not every model has a system role.
        return [{"role": "user", "content": f"{instructions(*texts)}\n\n{material(*texts)}"}]

    def _end(self, what: str) -> InputError:
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
    drawn = random.Random(options.seed).sample(
        range(len(pairs)), min(options.size or len(pairs), len(pairs))
    )
    pairs = [pairs[i] for i in sorted(drawn)]
    folder = Path(options.output_dir or "runs/judging").expanduser()
    check_writable("--output_dir", folder)
    judge = EndpointJudge(options, CRITERIA[options.judge_criteria])
    with RunLock() as lock:
        lock.take(folder)  # two processes would pay for the same pairs
        judgments = judge_pairs(judge, pairs, folder, seed=options.seed)
    counts = summary(judgments) | {"criteria": judge.criteria, "seed": options.seed}
    if counts["judged"]:
        counts["win_rate"] = win_rate([row["winner"] for row in combine(judgments)]).rate._asdict()
    write_json(
        folder / f"{file_name('-'.join([judge.name, names[0], 'against', names[1]]))}.json", counts
    )
    print(f"{report(counts, judgments)}\njudgments: {folder}")
    if (missing := len(pairs) - counts["judged"]) > len(pairs) / 2:
        fix = "take another --judge_model, or a larger --judge_max_tokens for one that thinks first"
        raise InputError(f"{judge.name}: {missing} of {len(pairs)} pairs have no verdict: {fix}")
    return judgments, counts


def first_answers(places: str) -> list[dict]:
    """Return the first answer of every method to each prompt.

    `places` are folders and files, comma-separated; see `read_responses`. If there are several temperatures, the names
    of methods have them, such as "SFT T=0.4". Raises `InputError` for a place without answers.
    """
    paths = split_paths(places)
    if not paths:
        raise InputError(
            "--judge_answers: not given: name folders that `marlhf evaluate` wrote, or files of answers"
        )
    answers = pd.concat([read_responses(path) for path in paths], ignore_index=True)
    rows = to_records(name_temperatures(answers[answers["sample"] == 0]))
    for row in rows:
        if row.get(
            "turns"
        ):  # an environment spoke in between, and its words are no part of the answer
            row["response"] = said_by_policy(row["turns"])
    return rows


def report(counts: Mapping, judgments: Sequence[Mapping]) -> str:
    """Format the counts in a few lines, with reasons for missing judgments."""
    first, second = counts["methods"]
    numbers = ", ".join(
        f"{counts[name]} {name}" for name in ("win", "lose", "tie", "malformed", "skipped")
    )
    lines = [f"{counts['judge']}: {first} against {second}, {counts['pairs']} pairs: {numbers}"]
    if rate := counts.get("win_rate"):
        interval = f"95 % interval {rate['low']:.0%} to {rate['high']:.0%}"
        lines.append(f"win rate, ties as half: {rate['mean']:.0%}, {interval}")
    place = counts["position"]
    if place["decided"]:
        lines.append(
            f"the response shown first won {place['first_shown_share']:.0%} of {place['decided']} decisions"
        )
    raw = dict.fromkeys(
        (row["winner"], row["raw"])
        for row in judgments
        if row["winner"] in ("malformed", "skipped")
    )
    lines += [
        f"{word}: {textwrap.shorten(printable(text), 200, placeholder=' ...')}"
        for word, text in list(raw)[:5]
    ]
    return "\n".join(lines)
