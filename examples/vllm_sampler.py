"""Sample by vLLM servers, which load the policy's LoRA adapter before every update (pip install 'marlhf-lite[vllm]').

With this file in the current folder, and servers as in "Rollouts by vLLM" of docs/scaling.md:
VLLM_URL=http://localhost:8000 marlhf run --sampler vllm_sampler:Servers

VLLM_URL      addresses of the servers, comma-separated, without /v1
VLLM_API_KEY  their key, if they have one
VLLM_FOLDER   a folder that the servers see under the same path; ./vllm-adapters if it is not set

Every answer is checked. vLLM caches an adapter under its name (vLLM's issue 42125), so each adapter gets a new name,
and an answer must name the adapter that gave it. The run compares the log-probabilities with those of its own policy.
Prompts and responses travel as token ids, so nothing is tokenised twice.
"""

import copy
import os
import random
import re
import shutil
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import TimeoutError as NoAnswerYet
from multiprocessing.pool import ThreadPool
from pathlib import Path
from uuid import uuid4

import openai
import torch
from peft import PeftModel

from marlhf_lite.extras.servers import BAD_ANSWER, connect
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import end_of_text, from_tokens
from marlhf_lite.training.sampler_checks import check_sampled
from marlhf_lite.utils.errors import InputError, ServerError, one_line
from marlhf_lite.utils.jsonl import apply_umask

AT_ONCE = 256  # requests under way; the servers batch them
PATIENCE = 30.0  # seconds without an answer before the health of the servers is checked
RETRIES = 5  # how often the openai client asks again if a server is busy or cannot be reached


class Servers:
    """A `Sampler` of vLLM servers: each gets every adapter, and its share of the prompts."""

    key, remote = "vllm", True

    def __init__(self):
        self.folder = Path(os.environ.get("VLLM_FOLDER") or "vllm-adapters").resolve()
        key = os.environ.get("VLLM_API_KEY", "").strip()
        self.clients = [
            connect(f"{url}/v1", key, "VLLM_API_KEY", max_retries=RETRIES) for url in addresses()
        ]

    def __call__(self, model, tokenizer, prompts, sampling):
        """Return one response to each prompt, with the servers' log-probabilities in `sampled_logprobs`.

        The seed of a response comes from its name in `sampling.names` [B]. Raises `ServerError` if a server does not
        answer or lacks the adapter.
        """
        ends, ids = end_of_text(model, tokenizer), encode_prompts(tokenizer, prompts)
        settings = request(sampling, ends) | {
            "vocabulary": model.config.get_text_config().vocab_size
        }

        def ask_row(row):
            # answers to one prompt from one server
            client = self.clients[row * len(self.clients) // len(ids)]
            seed = random.Random(sampling.names[row]).getrandbits(63)
            return ask(client, model=served, prompt=ids[row], seed=seed, **settings)

        with random_state_kept(), self.adapter(model) as served:
            answers = self.all_of(ask_row, len(ids))
        rollout = from_tokens(tokenizer, prompts, [tokens for tokens, _ in answers], ends)
        logprobs = torch.zeros(rollout.mask.shape)
        logprobs[rollout.mask] = torch.tensor([x for _, row in answers for x in row])
        return replace(rollout, sampled_logprobs=logprobs).to(next(model.parameters()).device)

    def all_of(self, ask_row, count):
        """Return `count` answers in order, however long they take, as long as all servers are healthy."""
        arrived = []
        with ThreadPool(min(AT_ONCE, count)) as pool:  # leaves requests to a dead server
            answers = pool.imap(ask_row, range(count))
            while len(arrived) < count:
                try:
                    arrived.append(answers.next(PATIENCE))
                except NoAnswerYet:
                    for client in self.clients:
                        check_health(client)
        return arrived

    def try_out(self, policy, tokenizer, prompts, sampling):
        """Let each server answer the longest prompt. Raises `ServerError` for everything that would stop a run later.

        Examples are an adapter that a server does not find or whose rank is too high, a prompt and a response that are
        too long together, and another base model.
        """
        for client in self.clients:
            alone = copy.copy(self)
            alone.clients = [client]
            rollout = alone(policy.model, tokenizer, prompts, sampling)
            try:
                check_sampled(rollout, policy)
            except ServerError as error:
                raise ServerError(f"{client.base_url}: {error}") from None

    @contextmanager
    def adapter(self, model):
        """Yield the name of the model's adapter; every server has it inside this block, and none afterwards."""
        if not isinstance(model, PeftModel):
            raise InputError("servers take adapters: use --finetune lora")
        place = self.folder / f"policy-{uuid4().hex[:8]}"
        try:
            model.save_pretrained(place)
            apply_umask(place)
            for client in self.clients:
                load(client, place)
            yield place.name
        finally:
            for client in self.clients:
                with suppress(openai.OpenAIError):  # a server that is gone has no adapters
                    once = client.with_options(max_retries=0, timeout=PATIENCE)
                    once.post("/unload_lora_adapter", body={"lora_name": place.name}, cast_to=str)
            shutil.rmtree(place, ignore_errors=True)


def addresses():
    """Return the servers' addresses in VLLM_URL, without a slash at the end."""
    urls = [
        url.strip().rstrip("/") for url in os.environ.get("VLLM_URL", "").split(",") if url.strip()
    ]
    fix = "export addresses such as http://localhost:8000, without /v1"
    if not urls:
        raise InputError(f"VLLM_URL: not set: {fix}")
    for url in urls:
        if not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./-]*)?", url) or url.endswith("/v1"):
            raise InputError(f"VLLM_URL {url}: not an address: {fix}")
    return urls


@contextmanager
def asking(client):
    """Turn an error of the openai client inside this block into a `ServerError`."""
    try:
        yield
    except openai.OpenAIError as error:
        raise ServerError(
            f"{client.base_url}: it fails ({one_line(error)}): see that it runs, and its log"
        ) from None


@contextmanager
def random_state_kept():
    """Restore Python's random state: the openai client draws from it before it asks again, and rewards may use it."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def request(sampling, ends):
    """Return the settings that all requests of a batch share; all are given, so that no default of a server counts."""
    more = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "stop_token_ids": list(ends),
    }
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,  # only those of the sampled tokens
        "extra_body": more | {"top_k": sampling.top_k, "min_tokens": sampling.min_new_tokens},
    }


def check_health(client):
    """Raise `ServerError` if a server is not healthy: it may have taken requests that it will never answer."""
    with asking(client):
        try:
            root = str(client.base_url).removesuffix("/v1/")
            client.with_options(timeout=PATIENCE).get(f"{root}/health", cast_to=str)
        except openai.APIStatusError as error:
            if error.status_code >= 500:  # else a proxy does not know this address
                raise


def load(client, place):
    """Let a server load an adapter. Raises `ServerError` if the server does not have the adapter afterwards."""
    reason, body = "it did not say why", {"lora_name": place.name, "lora_path": str(place)}
    with asking(client):
        try:
            client.post("/load_lora_adapter", body=body, cast_to=str)
        # also if a first try succeeded and its answer was lost
        except openai.APIStatusError as error:
            reason = one_line(error)
    if place.name not in models(client):
        fix = "it must see this folder and run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank"
        raise ServerError(
            f"{client.base_url}: it does not load the adapter {place} ({reason}): {fix}"
        )


def models(client):
    """Return the names of a server's model and adapters. Raises `ServerError` if there are none."""
    with asking(client), suppress(*BAD_ANSWER):
        if names := [model.id for model in client.models.list()]:
            return names
    raise ServerError(f"{client.base_url}: it names no models at /v1/models: it must be vLLM")


def ask(client, vocabulary, **request):
    """Return a response's token ids, all below `vocabulary`, with its end token, and their log-probabilities."""
    answer, tokens, logprobs = None, [], []
    with asking(client), suppress(*BAD_ANSWER):
        answer = client.completions.create(**request)
        tokens, logprobs = answer.choices[0].token_ids, answer.choices[0].logprobs.token_logprobs
    ends, limit = request["extra_body"]["stop_token_ids"], request["max_tokens"]
    is_whole = (
        isinstance(tokens, list)
        and isinstance(logprobs, list)
        and 0 < len(tokens) == len(logprobs) <= limit
        and all(type(token) is int and 0 <= token < vocabulary for token in tokens)
        and all(type(x) in (int, float) and abs(x) < 1e9 for x in logprobs)  # not NaN, not infinite
        and (tokens[-1] in ends or len(tokens) == limit)
    )
    if not is_whole or answer.model != request["model"]:
        what = f"no whole response of {request['model']} with ids of its vocabulary and finite log-probabilities"
        raise ServerError(
            f"{client.base_url}: {what}: it must be vLLM, and one that knows return_token_ids"
        )
    return tokens, logprobs
