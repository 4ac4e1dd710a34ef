"""An OpenAI-compatible endpoint as a judge."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marlhf_lite.config.options import EndpointConfig
from marlhf_lite.evaluation.judges.connection import LIMITS, connect, find_key, request_fields
from marlhf_lite.evaluation.judges.criteria import Criteria, instructions, material, read_verdict, wording
from marlhf_lite.evaluation.judges.judge import Answer, Judge, Question
from marlhf_lite.evaluation.judges.pacing import Budget, Pace, Use, backoff, retry_after
from marlhf_lite.utils.errors import InputError

_BYTES_PER_TOKEN = 3  # English has about four: better to expect too much
_AROUND = 10  # tokens that a chat format puts around its messages
_AGAIN = (408, 409, 425, 429)  # and everything from 500 up


class _Again(Exception):
    """This try failed, the next may not. `wait`: seconds that the endpoint asks for."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class EndpointJudge(Judge):
    """Asks a model behind the chat-completions format for a JSON verdict (paper, section 4.1 and Appendix F.1).

    Args:
        options: where the endpoint is and how it may be asked.
        criteria: what is judged by.
        environ: where the key is looked up, under `options.judge_key_env`. It is sent to the endpoint and goes
            nowhere else: not to files, messages or logs.
        say: gets the line with the estimate before the first request.

    Raises:
        InputError: options that cannot work, or no key.
    """

    def __init__(
        self,
        options: EndpointConfig,
        criteria: Criteria,
        environ: Mapping[str, str] = os.environ,
        say: Callable[[str], None] = print,
    ):
        self.options, self._criteria, self.say = options, criteria, say
        self.request = request_fields(options)
        self.name, self.criteria = options.judge_model, criteria.label
        self.workers = options.judge_workers
        self.pace = Pace(options.judge_rpm)
        self.budget = Budget(
            options.judge_token_limit, options.judge_cost_limit, options.judge_price_in, options.judge_price_out
        )
        self._key = find_key(options.judge_key_env, environ)
        self._create = connect(options, self._key)
        self._answered = False

    def identity(self) -> dict:
        where = {"url": self.options.judge_url.rstrip("/"), "model": self.options.judge_model}
        how = {"request": self.request, "instructions": self.options.judge_instructions}
        return {"kind": "endpoint", **where, **how, "wording": wording(self._criteria, instructions)}

    # -- what it will cost --------------------------------------------------------------------------------------------

    def estimate(self, questions: Sequence[Question]) -> Use:
        """Tokens at most, more or less: prompts by their length, verdicts by their limit."""
        return sum(map(self._expected, questions), Use())

    def prepare(self, questions: Sequence[Question]) -> None:
        """Says what the run will need. Raises `InputError` where that passes a limit."""
        self.pace.start()
        use = self.estimate(questions)
        cost = f", at most about {self.budget.cost(use):.4g} by the prices given" if self.budget.priced else ""
        self.say(
            f"{self.name}: {len(questions)} requests, about {use.prompt} tokens of prompts and at most "
            f"{use.completion} of verdicts{cost}"
        )
        if fault := self.budget.fault(use):
            raise InputError(f"{self.name}: nothing was asked: {fault}: raise it, or compare fewer (--judge_size)")

    def interrupt(self) -> None:
        self.pace.stop()

    def _expected(self, question: Question) -> Use:
        size = sum(len(message["content"].encode()) for message in self._messages(question))
        longest = max((self.request[name] for name in LIMITS if name in self.request), default=0)
        return Use(-(-size // _BYTES_PER_TOKEN) + _AROUND, longest or self.options.judge_max_tokens)

    def _messages(self, question: Question) -> list[dict]:
        before, texts = instructions(self._criteria, question), material(self._criteria, question)
        if self.options.judge_instructions == "user":
            return [{"role": "user", "content": f"{before}\n\n{texts}"}]
        return [{"role": "system", "content": before}, {"role": "user", "content": texts}]

    # -- asking -------------------------------------------------------------------------------------------------------

    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers, `malformed` where the model's text is no verdict. Not kept where there was none after all tries.

        Raises `InputError` at once where the key is refused, nothing is there, or nothing may be spent any more.
        """
        return [self._ask(question) for question in questions]

    def _ask(self, question: Question) -> Answer:
        for tries in range(1, self.options.judge_retries + 2):
            self.pace.turn()
            try:
                return self._try(question)
            except _Again as failed:
                reason = str(failed)
                if tries <= self.options.judge_retries:
                    self._wait(tries, failed)
        return Answer("skipped", raw=f"{reason}, {tries} times", keep=False)

    def _wait(self, tries: int, failed: _Again) -> None:
        longest = self.options.judge_patience
        seconds = backoff(tries, self.options.judge_backoff, longest)
        if failed.wait is not None:
            if failed.wait > longest:
                self._end(f"{failed}, asks to wait {failed.wait:.0f} s", "run it again then, or raise --judge_patience")
            self.pace.hold(failed.wait)
            seconds = max(seconds, failed.wait)
        self.pace.sleep(seconds)

    def _try(self, question: Question) -> Answer:
        import openai

        expected = self._expected(question)
        self.budget.reserve(expected)
        spent = Use()
        try:
            response = self._create(
                model=self.options.judge_model, messages=self._messages(question), extra_body=self.request
            ).http_response
            spent = expected  # an answer that cannot be read, or never came, may have been paid for all the same
            answer, spent = self._read(response.text, expected)
            return answer
        except openai.APITimeoutError:
            spent = expected
            raise _Again(f"no answer in {self.options.judge_timeout:g} s") from None
        except openai.APIConnectionError:
            if not self._answered:
                self._end("cannot be reached", "check --judge_url, and that the endpoint runs")
            spent = expected
            raise _Again("the connection broke") from None
        except openai.APIStatusError as error:
            return self._refused(error)
        finally:
            self.budget.settle(expected, spent)

    def _read(self, text: str, expected: Use) -> tuple[Answer, Use]:
        self._answered = True
        try:
            body = json.loads(text)
            content = body["choices"][0]["message"]["content"]
        except (ValueError, KeyError, TypeError, IndexError):
            raise _Again("an answer that is cut or no chat completion") from None
        use = _use(body.get("usage"), expected)
        answer = read_verdict(self._clean(content) if isinstance(content, str) else None, self._criteria)
        cost = self.budget.cost(use)
        return replace(answer, prompt_tokens=use.prompt, completion_tokens=use.completion, cost=cost), use

    def _refused(self, error: Any) -> Answer:
        status, reason = error.status_code, f"HTTP {error.status_code}"
        if status in (401, 403):  # what it says may quote the key
            self._end(f"refuses the key ({reason})", f"check {self.options.judge_key_env or '--judge_key_env'}")
        if status == 402 or error.code == "insufficient_quota":
            self._end(f"wants to be paid first ({reason})", "top up the account")
        if status in (404, 405):
            self._end(f"knows no such model or address ({reason})", "check --judge_model and --judge_url")
        if status in _AGAIN or status >= 500:
            raise _Again(reason, retry_after(error.response.headers))
        self._answered = True
        return Answer("skipped", raw=f"{reason}: {self._clean(' '.join(str(error.message).split()))[:200]}", keep=False)

    def _end(self, what: str, mend: str) -> None:
        raise InputError(f"{self.options.judge_url} {what}: {mend}; verdicts so far are kept") from None

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


def _use(given: Any, expected: Use) -> Use:
    """What the endpoint says it used, else what was expected."""
    counts = [given.get(name) if isinstance(given, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (n if isinstance(n, int) and n >= 0 else None for n in counts)
    return Use(expected.prompt if prompt is None else prompt, expected.completion if completion is None else completion)
