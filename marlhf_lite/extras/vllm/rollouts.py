"""Rollouts by vLLM: servers load the policy's LoRA adapter, or all of its weights, and answer prompts with it.

What comes back is not taken on trust. vLLM keeps what it has read under the name of an adapter (its issue 42125), so
each adapter, and each folder of weights, gets a name that none had before. An answer says which adapter gave it. And
its log-probabilities must be those of the trainer's own policy, which another adapter, another base model or another
number format have not. A server that keeps old weights, or a part of them, is found by a trial with changed ones.
Token ids go there and come back: nothing is tokenised twice.
"""

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing import TimeoutError as NoAnswerYet
from multiprocessing.pool import ThreadPool
from pathlib import Path
from uuid import uuid4

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor
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
PATIENCE = 30.0  # seconds without an answer before the servers are asked whether they are well
RELOAD_SECONDS = 600.0  # in which a server must have read a folder of weights


class VLLMEngine:
    """A `Sampler`: vLLM servers. Each gets every adapter, or all weights, and its share of the prompts.

    Args:
        urls: addresses of the servers, such as http://localhost:8000. VLLM_API_KEY is sent, if it is set.
        folder: where adapters and weights are written while they are in use. Servers must find it under the same path.
        retries: how often the openai client asks again where a server is busy or cannot be reached.
    """

    key, remote = "vllm", True

    def __init__(self, urls: Sequence[str], folder: str | Path, retries: int = 5):
        self.folder = Path(folder).resolve()
        self.head_apart = True  # in folders of weights; until a server has refused one
        key = os.environ.get("VLLM_API_KEY", "").strip()
        self.clients = [connect(f"{url.rstrip('/')}/v1", key, "VLLM_API_KEY", max_retries=retries) for url in urls]

    def __call__(self, model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
        """One response to each prompt, with the log-probabilities that the servers give (`sampled_logprobs`).

        The seed of a response comes from its name in `sampling.names` [B]. If processes share the weights, all of them
        must call this. Raises `ServerError` if a server does not answer, lacks the adapter, or gives no response.
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
        """Answers in their order, however long they take, as long as all servers say that they are well."""
        arrived = []
        with ThreadPool(min(AT_ONCE, count)) as pool:  # does not wait for requests to a server that is gone
            answers = pool.imap(ask, range(count))
            while len(arrived) < count:
                try:
                    arrived.append(answers.next(PATIENCE))
                except NoAnswerYet:
                    for client in self.clients:
                        _check_health(client)
        return arrived

    def try_out(self, policy: PolicyModel, tokenizer, prompts: Sequence[str], sampling: Sampling) -> None:
        """Have each server answer the longest prompt. Raises `ServerError` for whatever would stop a run later.

        That is an adapter that is not found or has too high a rank, a prompt and a response that are too long
        together, and another base model. All weights are tried out with a changed embedding: a server that keeps old
        weights, or an old head that was tied to the embedding, gives other log-probabilities.
        """
        ids = encode_prompts(tokenizer, prompts)
        longest = prompts[max(range(len(ids)), key=lambda row: len(ids[row]))]
        sampling = replace(sampling, names=("trial",))
        for client in self.clients:
            alone = copy.copy(self)
            alone.clients = [client]
            changed = nullcontext() if isinstance(policy.model, PeftModel) else _changed(policy.model)
            with _named(client), changed:
                check_servers(alone(policy.model, tokenizer, [longest], sampling), policy)
            self.head_apart = alone.head_apart

    @contextmanager
    def _adapter(self, model) -> Iterator[str]:
        """The name of the model's adapter, which every server has inside this block and none has afterwards."""
        name = f"policy-{uuid4().hex[:8]}"
        place = self.folder / name
        try:
            model.save_pretrained(place)
            apply_umask(place)
            for client in self.clients:
                _load(client, name, place)
            yield name
        finally:
            for client in self.clients:
                with suppress(openai.OpenAIError):  # a server that is gone has no adapters
                    once = client.with_options(max_retries=0, timeout=PATIENCE)
                    once.post("/unload_lora_adapter", body={"lora_name": name}, cast_to=str)
            shutil.rmtree(place, ignore_errors=True)
            with suppress(OSError):  # before a run has its folder, nothing stays of it
                self.folder.rmdir()

    @contextmanager
    def _weights(self, model: PreTrainedModel) -> Iterator[str]:
        """The name under which every server answers, all of which have the model's weights inside this block."""
        place = self.folder / f"policy-{uuid4().hex[:8]}"
        try:
            if is_sharded(model):  # all processes gather the weights, and the main one sends them
                raise_on_all_ranks(self._send, model, place)
            else:
                self._send(model, place)
            yield _served(self.clients[0])
        finally:
            shutil.rmtree(place, ignore_errors=True)
            with suppress(OSError):
                self.folder.rmdir()

    def _send(self, model: PreTrainedModel, place: Path) -> None:
        weights = whole_weights(model)
        if not weights:
            return
        try:
            self._write_and_reload(model, place, weights)
        except ServerError as error:
            is_tied = model.config.get_text_config().tie_word_embeddings
            if not (self.head_apart and is_tied and "lm_head" in str(error)):
                raise
            self.head_apart = False  # vLLM's model has none, as Gemma 2
            self._write_and_reload(model, place, weights)

    def _write_and_reload(self, model: PreTrainedModel, place: Path, weights: Mapping[str, Tensor]) -> None:
        try:
            save_untied(model, place, weights, self.head_apart)
        except (OSError, SafetensorError) as error:
            raise ServerError(f"{place}: not written ({error}): free some disk space") from None
        for client in self.clients:
            _reload(client, place)


@contextmanager
def _named(client: openai.OpenAI) -> Iterator[None]:
    """Faults inside this block say which server has them."""
    try:
        yield
    except ServerError as error:
        raise ServerError(str(error).replace("--vllm_url:", f"--vllm_url {client.base_url}:", 1)) from None


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """The openai client draws from Python's generator before it asks again; rewards may draw from it, too."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _request(sampling: Sampling, ends: Sequence[int]) -> dict:
    """What all requests of a batch share: every setting is given, so that no default of the server's slips in."""
    none = {"min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True, "stop_token_ids": list(ends)}
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,  # of the sampled tokens alone
        "extra_body": none | {"top_k": sampling.top_k, "min_tokens": sampling.min_new_tokens},
    }


def _check_health(client: openai.OpenAI) -> None:
    """Raise `ServerError` where a server is not well: it may have taken requests that it will never answer."""
    try:
        client.with_options(timeout=PATIENCE).get(f"{str(client.base_url).removesuffix('/v1/')}/health", cast_to=str)
    except (openai.APIConnectionError, openai.InternalServerError) as error:
        raise _failed(client, error) from None
    except openai.APIStatusError:  # a proxy may not know this address
        pass


def _load(client: openai.OpenAI, name: str, place: Path) -> None:
    """Have a server load an adapter. Raises `ServerError` where it does not have it afterwards."""
    reason = "it did not say why"
    try:
        try:
            client.post("/load_lora_adapter", body={"lora_name": name, "lora_path": str(place)}, cast_to=str)
        except openai.APIStatusError as error:  # also where a first try succeeded and its answer was lost
            reason = one_line(error)
        if name in _models(client):
            return
    except openai.OpenAIError as error:
        raise _failed(client, error) from None
    fix = "it must see this folder and run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank"
    raise ServerError(f"--vllm_url {client.base_url}: it does not load the adapter {place} ({reason}): {fix}")


def _reload(client: openai.OpenAI, place: Path) -> None:
    """Have a server take its weights from a folder. Raises `ServerError` where it says that it did not."""
    root = str(client.base_url).removesuffix("/v1/")
    once = client.with_options(timeout=RELOAD_SECONDS + PATIENCE, max_retries=1)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}, "timeout": RELOAD_SECONDS}
    try:
        once.post(f"{root}/collective_rpc", body=body, cast_to=str)
        once.post(f"{root}/reset_prefix_cache", cast_to=str)  # its keys and values are those of the old weights
    except openai.NotFoundError as error:
        fix = "start it in development mode, VLLM_SERVER_DEV_MODE=1 vllm serve …"
        raise ServerError(f"--vllm_url {client.base_url}: it reloads no weights ({one_line(error)}): {fix}") from None
    except openai.APITimeoutError:
        what = f"it did not reload {place} within {RELOAD_SECONDS + PATIENCE:g} seconds"
        raise ServerError(f"--vllm_url {client.base_url}: {what}: see its log") from None
    except openai.APIStatusError as error:
        fix = "it must see this folder, and serve the same architecture; see its log"
        what = f"it does not reload {place} ({one_line(error)})"
        raise ServerError(f"--vllm_url {client.base_url}: {what}: {fix}") from None
    except openai.OpenAIError as error:
        raise _failed(client, error) from None


def _served(client: openai.OpenAI) -> str:
    """The name of the model that a server was started with."""
    return _models(client)[0]


def _models(client: openai.OpenAI) -> list[str]:
    """The names of the models and adapters that a server has, at least one. Raises `ServerError` if it names none."""
    try:
        if names := [model.id for model in client.models.list()]:
            return names
    except openai.OpenAIError as error:
        raise _failed(client, error) from None
    except BAD_ANSWER:
        pass
    raise ServerError(f"--vllm_url {client.base_url}: it names no models at /v1/models: it must be vLLM")


@contextmanager
def _changed(model: PreTrainedModel) -> Iterator[None]:
    """Inside this block the model's embedding, and a head that is tied to it, are others, each time: a server may still
    have those of an earlier trial.

    Raises `ServerError` that says what keeps old weights where the log-probabilities differ.
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
    """A response's token ids, all below `vocabulary`, its end token included, and their log-probabilities."""
    try:
        answer = client.completions.create(**request)
        tokens, logprobs = answer.choices[0].token_ids, answer.choices[0].logprobs.token_logprobs
    except openai.OpenAIError as error:
        raise _failed(client, error) from None
    except BAD_ANSWER:
        answer, tokens, logprobs = None, [], []
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


def _failed(client: openai.OpenAI, error: Exception) -> ServerError:
    return ServerError(f"--vllm_url {client.base_url}: {one_line(error)}: see that the server runs, and its log")
