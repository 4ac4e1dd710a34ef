"""Rollouts by vLLM: servers load the policy's LoRA adapter, or all of its weights, and answer prompts with it.

Every answer is checked. vLLM caches an adapter under its name (vLLM's issue 42125), so each adapter, and each folder of
weights, gets a new name, and an answer must name the adapter that gave it. Its log-probabilities must agree with the
trainer's own policy: another adapter, base model or number format would give others. A trial with changed weights finds
servers that keep old weights. Prompts and responses travel as token ids, so nothing is tokenised twice.
"""

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing import TimeoutError as NoAnswerYet
from multiprocessing.pool import ThreadPool
from pathlib import Path
from uuid import uuid4

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel

from marlhf_lite.extras.servers import BAD_ANSWER, connect
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.untied import save_untied
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.distributed import is_sharded, raise_on_all_ranks, whole_weights
from marlhf_lite.training.rollout import Rollout, Sampling, end_of_text, from_tokens
from marlhf_lite.training.sampler_checks import check_servers
from marlhf_lite.utils.errors import DifferentPolicy, InputError, ServerError, one_line
from marlhf_lite.utils.jsonl import apply_umask

try:
    import openai
except ImportError:
    raise InputError("--vllm_url: needs the package openai: pip install 'marlhf-lite[vllm]'") from None

AT_ONCE = 256  # requests under way; the servers batch them
PATIENCE = 30.0  # seconds without an answer before the health of the servers is checked
RELOAD_SECONDS = 600.0  # for a server to read a folder of weights


class VLLMEngine:
    """A `Sampler` of vLLM servers. Each server gets every adapter, or all weights, and its share of the prompts.

    Args:
        urls: addresses of the servers, such as http://localhost:8000. VLLM_API_KEY is sent if it is set.
        folder: holds adapters and weights while they are in use. Servers must find it under the same path.
        retries: how often the openai client asks again if a server is busy or cannot be reached.
    """

    key, remote = "vllm", True

    def __init__(self, urls: Sequence[str], folder: str | Path, retries: int = 5):
        self.folder = Path(folder).resolve()
        self.head_apart = True  # in folders of weights, until a server refuses it
        key = os.environ.get("VLLM_API_KEY", "").strip()
        self.clients = [connect(f"{url.rstrip('/')}/v1", key, "VLLM_API_KEY", max_retries=retries) for url in urls]

    def __call__(self, model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
        """Return one response to each prompt, with the servers' log-probabilities in `sampled_logprobs`.

        The seed of a response comes from its name in `sampling.names` [B]. If processes share the weights, all of them
        must call this method. Raises `ServerError` if a server does not answer or lacks the adapter.
        """
        ends, ids = end_of_text(model, tokenizer), encode_prompts(tokenizer, prompts)
        settings = _request(sampling, ends) | {"vocabulary": model.config.get_text_config().vocab_size}

        def ask(row: int) -> tuple[list[int], list[float]]:
            client = self.clients[row * len(self.clients) // len(ids)]  # answers to one prompt from one server
            seed = random.Random(sampling.names[row]).getrandbits(63)
            return _ask(client, model=served, prompt=ids[row], seed=seed, **settings)

        take_over = self._adapter if isinstance(model, PeftModel) else self._weights
        with _random_state_kept(), take_over(model) as served:
            answers = self._all_of(ask, len(ids))
        rollout = from_tokens(tokenizer, prompts, [tokens for tokens, _ in answers], ends)
        logprobs = torch.zeros(rollout.mask.shape)
        logprobs[rollout.mask] = torch.tensor([x for _, row in answers for x in row])
        return replace(rollout, sampled_logprobs=logprobs).to(next(model.parameters()).device)

    def _all_of(self, ask: Callable, count: int) -> list[tuple[list[int], list[float]]]:
        """Return `count` answers in order, however long they take, as long as all servers are healthy."""
        arrived = []
        with ThreadPool(min(AT_ONCE, count)) as pool:  # leaves requests to a dead server
            answers = pool.imap(ask, range(count))
            while len(arrived) < count:
                try:
                    arrived.append(answers.next(PATIENCE))
                except NoAnswerYet:
                    for client in self.clients:
                        _check_health(client)
        return arrived

    def try_out(self, policy: PolicyModel, tokenizer, prompts: Sequence[str], sampling: Sampling) -> None:
        """Let each server answer the longest prompt. Raises `ServerError` for everything that would stop a run later.

        Examples are an adapter that a server does not find or whose rank is too high, a prompt and a response that are
        too long together, and another base model. All weights are tried with a changed embedding: a server that keeps
        old weights, or an old head that was tied to the embedding, then gives other log-probabilities.
        """
        ids = encode_prompts(tokenizer, prompts)
        longest = prompts[max(range(len(ids)), key=lambda row: len(ids[row]))]
        sampling = replace(sampling, names=("trial",))
        for client in self.clients:
            alone = copy.copy(self)
            alone.clients = [client]
            changed = nullcontext() if isinstance(policy.model, PeftModel) else _changed(policy.model)
            try:
                with changed:
                    check_servers(alone(policy.model, tokenizer, [longest], sampling), policy)
            except ServerError as error:  # that of another policy lacks the address
                raise ServerError(str(error).replace("--vllm_url:", f"--vllm_url {client.base_url}:", 1)) from None
            self.head_apart = alone.head_apart

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """Yield a path that no adapter or weights had before; remove it in the end, and `folder` if it is empty."""
        place = self.folder / f"policy-{uuid4().hex[:8]}"
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
            with suppress(OSError):
                self.folder.rmdir()

    @contextmanager
    def _adapter(self, model) -> Iterator[str]:
        """Yield the name of the model's adapter; every server has it inside this block, and none afterwards."""
        with self._new_folder() as place:
            try:
                model.save_pretrained(place)
                apply_umask(place)
                for client in self.clients:
                    _load(client, place)
                yield place.name
            finally:
                for client in self.clients:
                    with suppress(openai.OpenAIError):  # a server that is gone has no adapters
                        once = client.with_options(max_retries=0, timeout=PATIENCE)
                        once.post("/unload_lora_adapter", body={"lora_name": place.name}, cast_to=str)

    @contextmanager
    def _weights(self, model: PreTrainedModel) -> Iterator[str]:
        """Yield the name under which every server answers; all have the model's weights inside this block."""
        with self._new_folder() as place:
            if is_sharded(model):  # all processes gather the weights, and the main one sends them
                raise_on_all_ranks(self._send, model, place)
            else:
                self._send(model, place)
            yield _models(self.clients[0])[0]

    def _send(self, model: PreTrainedModel, place: Path) -> None:
        weights, is_tied = whole_weights(model), model.config.get_text_config().tie_word_embeddings
        while weights:  # the other processes have none
            try:
                save_untied(model, place, weights, self.head_apart)
                for client in self.clients:
                    _reload(client, place)
                return
            except (OSError, SafetensorError) as error:
                raise ServerError(f"{place}: not written ({error}): free some disk space") from None
            except ServerError as error:
                if not (self.head_apart and is_tied and "lm_head" in str(error)):
                    raise
                self.head_apart = False  # vLLM's model has no separate head, as for Gemma 2


@contextmanager
def _asking(client: openai.OpenAI, what: str = "it fails", fix: str = "see that it runs, and its log"):
    """Turn an error of the openai client inside this block into a `ServerError`."""
    try:
        yield
    except openai.OpenAIError as error:
        raise ServerError(f"--vllm_url {client.base_url}: {what} ({one_line(error)}): {fix}") from None


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore Python's random state: the openai client draws from it before it asks again, and rewards may use it."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _request(sampling: Sampling, ends: Sequence[int]) -> dict:
    """Return the settings that all requests of a batch share; all are given, so that no default of a server counts."""
    more = {"min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True, "stop_token_ids": list(ends)}
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,  # only those of the sampled tokens
        "extra_body": more | {"top_k": sampling.top_k, "min_tokens": sampling.min_new_tokens},
    }


def _check_health(client: openai.OpenAI) -> None:
    """Raise `ServerError` if a server is not healthy: it may have taken requests that it will never answer."""
    with _asking(client):
        try:
            client.with_options(timeout=PATIENCE).get(f"{_root(client)}/health", cast_to=str)
        except openai.APIStatusError as error:
            if error.status_code >= 500:  # else a proxy does not know this address
                raise


def _root(client: openai.OpenAI) -> str:
    """Return the address of a server without the /v1 of OpenAI's routes."""
    return str(client.base_url).removesuffix("/v1/")


def _load(client: openai.OpenAI, place: Path) -> None:
    """Let a server load an adapter. Raises `ServerError` if the server does not have the adapter afterwards."""
    reason, body = "it did not say why", {"lora_name": place.name, "lora_path": str(place)}
    with _asking(client):
        try:
            client.post("/load_lora_adapter", body=body, cast_to=str)
        except openai.APIStatusError as error:  # also if a first try succeeded and its answer was lost
            reason = one_line(error)
    if place.name not in _models(client):
        fix = "it must see this folder and run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank"
        raise ServerError(f"--vllm_url {client.base_url}: it does not load the adapter {place} ({reason}): {fix}")


def _reload(client: openai.OpenAI, place: Path) -> None:
    """Let a server take its weights from a folder. Raises `ServerError` if the server reports a failure."""
    once = client.with_options(timeout=RELOAD_SECONDS + PATIENCE, max_retries=1)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}, "timeout": RELOAD_SECONDS}
    fix = "it must run in development mode (VLLM_SERVER_DEV_MODE=1) and see this folder; see its log"
    with _asking(client, f"it does not reload {place}", fix):
        once.post(f"{_root(client)}/collective_rpc", body=body, cast_to=str)
        once.post(f"{_root(client)}/reset_prefix_cache", cast_to=str)  # its keys and values are those of old weights


def _models(client: openai.OpenAI) -> list[str]:
    """Return the names of a server's model and adapters. Raises `ServerError` if there are none."""
    with _asking(client), suppress(*BAD_ANSWER):
        if names := [model.id for model in client.models.list()]:
            return names
    raise ServerError(f"--vllm_url {client.base_url}: it names no models at /v1/models: it must be vLLM")


@contextmanager
def _changed(model: PreTrainedModel) -> Iterator[None]:
    """Change the model's embedding, and a head that is tied to it, inside this block, each time in another way.

    A server may still have the weights of an earlier trial. Raises `ServerError` if log-probabilities differ.
    """
    weight, noise = model.get_input_embeddings().weight, torch.Generator().manual_seed(uuid4().int >> 65)
    before = weight.detach().clone()
    factors = 1 + 0.5 * torch.randn(weight.shape[1], generator=noise)
    try:
        weight.data *= factors.to(weight)
        yield
    except DifferentPolicy as error:
        fix = "start it in development mode (VLLM_SERVER_DEV_MODE=1) from an untied copy (marlhf export --untied)"
        raise ServerError(f"{error}, or it keeps old weights, as a tied head does: {fix}") from None
    finally:
        weight.data.copy_(before)


def _ask(client: openai.OpenAI, vocabulary: int, **request) -> tuple[list[int], list[float]]:
    """Return a response's token ids, all below `vocabulary`, with its end token, and their log-probabilities."""
    answer, tokens, logprobs = None, [], []
    with _asking(client), suppress(*BAD_ANSWER):
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
        raise ServerError(f"--vllm_url {client.base_url}: {what}: it must be vLLM, and one that knows return_token_ids")
    return tokens, logprobs
