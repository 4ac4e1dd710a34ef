"""Judges of two responses to a prompt: scores, or a model at an endpoint (paper, section 4.1, Appendix F)."""

import json
import os
import re
from collections.abc import Callable, Sequence
from multiprocessing import TimeoutError as NoAnswerYet

from tqdm.auto import tqdm

from marlhf_lite.config.options import EndpointConfig
from marlhf_lite.evaluation.statistics import finite
from marlhf_lite.extras.judges.judgments import Judge, Judgment, NotJudged
from marlhf_lite.extras.judges.prompts import Criteria, instructions, material, parse_judgment
from marlhf_lite.extras.servers import BAD_ANSWER, connect, within
from marlhf_lite.utils.errors import InputError

try:
    import openai
except ImportError:  # EndpointJudge tells how to install it
    openai = None


class ScoreJudge(Judge):
    """The response with the higher score wins (paper, Table 1).

    `scorer`, such as gold scores or a reward model, maps (prompts, responses) to finite numbers. Its judgments are not
    reused, because the scorer may change.
    """

    ordered = False

    def __init__(self, scorer: Callable[[list[str], list[str]], Sequence[float]], name="gold"):
        self.scorer, self.name = scorer, name

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Raises `InputError` for a wrong number of scores, or for a score that is not finite."""
        x, y = finite(f"scores of judge {self.name}", self.scorer([prompt] * 2, [a, b]), count=2).tolist()
        return Judgment("tie" if x == y else "A" if x > y else "B", {"A": {"score": x}, "B": {"score": y}})


ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-f:]+\])(:[1-6]?\d{1,4})?(/[\w./~%-]*)?", re.ASCII)
PATIENCE = 600.0  # seconds for one judgment, all retries included
# Statuses that end a run, and what the user should check.
CHECKS = {401: "OPENAI_API_KEY", 402: "the account", 403: "OPENAI_API_KEY", 404: "--judge_model and --judge_url"}


class EndpointJudge(Judge):
    """A model at an OpenAI-compatible endpoint (paper, section 4.1 and Appendix F.1).

    The endpoint may be a server on your own machine: vLLM, llama.cpp and ollama speak this protocol. A setting that it
    refuses by name, such as the temperature, is left out. The openai client retries 408, 409, 429, 5xx, time-outs and
    broken connections with back-off, and honours Retry-After. The key is read from the environment and sent to the
    endpoint only; files, messages and logs do not have it.

    Raises `InputError` for options that cannot work.
    """

    def __init__(self, options: EndpointConfig, criteria: Criteria, retries: int = 5):
        if openai is None:
            raise InputError("marlhf judge: needs the package openai: pip install 'marlhf-lite[judge]'")
        if not options.judge_model.strip():
            raise InputError("--judge_model: not given: name the model that judges")
        if not ADDRESS.fullmatch(options.judge_url):  # it is stored and printed
            what = "give an address such as http://localhost:8000/v1, without user, password or query"
            raise InputError(f"--judge_url: {what}; the key comes from OPENAI_API_KEY")
        key = os.environ.get("OPENAI_API_KEY", "").strip()  # your own server may need none
        self.client = connect(options.judge_url, key, "OPENAI_API_KEY", max_retries=retries, timeout=60.0)
        self.options, self._criteria = options, criteria
        self.name, self.criteria, self.workers = options.judge_model, criteria.name, options.workers or 4
        self.request = {"model": options.judge_model, "temperature": 0.0}
        self.request |= {"max_tokens": options.judge_max_tokens} if options.judge_max_tokens else {}
        self.identity = json.dumps([options.judge_url, self.request, self._messages("p", "a", "b")])

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Raises `InputError` if the key is refused or nothing answers."""
        try:
            answer = within(PATIENCE, self._complete, prompt, a, b)
            if error := getattr(answer, "error", None):  # gateways send it with status 200
                raise NotJudged(" ".join(str(error).split())[:200])
            return parse_judgment(answer.choices[0].message.content or "", self._criteria)
        except openai.APIStatusError as error:
            status, text = error.status_code, " ".join(str(error.message).split())[:200]
            if status in CHECKS:  # without the text, which may quote the key
                raise self._end(f"HTTP {status}: check {CHECKS[status]}") from None
            raise NotJudged(f"HTTP {status}: {text}") from None
        except openai.APIConnectionError as error:
            raise self._end(f"cannot be reached ({error}): check --judge_url, and that the server runs") from None
        except NoAnswerYet:
            raise self._end(f"no whole answer within {PATIENCE:g} seconds: look at the server's log") from None
        except BAD_ANSWER:
            raise NotJudged("the answer is not a chat completion") from None

    def _complete(self, prompt: str, a: str, b: str):
        """Return the endpoint's answer. A setting that it refuses by name is left out from then on."""
        while True:
            try:
                return self.client.chat.completions.create(messages=self._messages(prompt, a, b), **self.request)
            except openai.BadRequestError as error:
                refused = [name for name in self.request if name != "model" and name in str(error.message)]
                if not refused:
                    raise
                tqdm.write(f"{self.name}: asked without {' and '.join(refused)}, because the endpoint refused it")
                self.request = {name: value for name, value in self.request.items() if name not in refused}

    def _messages(self, prompt: str, a: str, b: str) -> list[dict]:
        texts = (self._criteria, prompt, a, b)
        # One message: not every model has a system role.
        return [{"role": "user", "content": f"{instructions(*texts)}\n\n{material(*texts)}"}]

    def _end(self, what: str) -> InputError:
        return InputError(f"{self.options.judge_url}: {what}; judgments so far are kept")
