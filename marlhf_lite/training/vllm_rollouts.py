"""Rollouts by vLLM: servers load the policy's LoRA adapter and answer prompts with it.

What comes back is not taken on trust. vLLM keeps what it has read under the name of an adapter (its issue 42125), so
each adapter gets a name that none had before. An answer says which adapter gave it. And its log-probabilities must be
those of the trainer's own policy, which another adapter, another base model or another number format have not.
Token ids go there and come back: nothing is tokenised twice.
"""

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import TimeoutError as NoAnswerYet
from multiprocessing.pool import ThreadPool
from pathlib import Path
from uuid import uuid4

import torch

from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import Rollout, Sampling, end_of_text, from_tokens
from marlhf_lite.training.sampler_checks import check_sampled
from marlhf_lite.utils.errors import InputError, ServerError, one_line

try:
    import openai
except ImportError:
    raise InputError("--rollout_engine vllm: needs the package openai: pip install 'marlhf-lite[vllm]'") from None

AT_ONCE = 256  # requests under way; the servers batch them
PATIENCE = 30.0  # seconds without an answer before the servers are asked whether they are well


class VLLMEngine:
    """vLLM servers that sample with a policy's adapter. Each gets every adapter and its share of the prompts.

    Args:
        urls: addresses of the servers, such as http://localhost:8000. VLLM_API_KEY is sent, if it is set.
        folder: where adapters are written while they are in use. Servers must find it under the same path.
        retries: how often the openai client asks again where a server is busy or cannot be reached.
    """

    name = "vllm"

    def __init__(self, urls: Sequence[str], folder: str | Path, retries: int = 5):
        self.folder = Path(folder).resolve()
        how = {"api_key": os.environ.get("VLLM_API_KEY") or "none", "max_retries": retries}
        self.clients = [openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", **how) for url in urls]

    def __call__(
        self,
        model,
        tokenizer,
        prompts: Sequence[str],
        names: Sequence[str],
        sampling: Sampling,
        label: str = "policy",
    ) -> Rollout:
        """One response to each prompt, with the log-probabilities that the servers give (`sampled_logprobs`).

        The seed of a response comes from its name in `names` [B]. The adapter is called `label` and a random ending.
        Raises `ServerError` where a server does not answer, lacks the adapter, or gives what is no response.
        """
        ends, ids = end_of_text(model, tokenizer), encode_prompts(tokenizer, prompts)
        settings = _request(sampling, ends)

        def ask(row: int) -> tuple[list[int], list[float]]:
            client = self.clients[row * len(self.clients) // len(ids)]  # answers to one prompt from one server
            seed = random.Random(names[row]).getrandbits(63)
            return _ask(client, model=adapter, prompt=ids[row], seed=seed, **settings)

        with _random_state_kept(), self._adapter(model, label) as adapter:
            answers = self._all_of(ask, len(ids))
        rollout = from_tokens(tokenizer, prompts, [tokens for tokens, _ in answers], ends)
        logprobs = torch.zeros(rollout.mask.shape)
        logprobs[rollout.mask] = torch.tensor([x for _, row in answers for x in row])
        return replace(rollout, sampled_logprobs=logprobs).to(next(model.parameters()).device)

    def _all_of(self, ask: Callable, count: int) -> list[tuple[list[int], list[float]]]:
        """Answers in their order, however long they take, as long as all servers say that they are well."""
        found = []
        with ThreadPool(min(AT_ONCE, count)) as pool:  # does not wait for requests to a server that is gone
            answers = pool.imap(ask, range(count))
            while len(found) < count:
                try:
                    found.append(answers.next(PATIENCE))
                except NoAnswerYet:
                    for client in self.clients:
                        _check_health(client)
        return found

    @torch.no_grad()
    def checked(self, policy: PolicyModel, *args, **kwargs) -> Rollout:
        """As a call, for a policy outside of training: with a pass of its own that checks the log-probabilities."""
        rollout = self(policy.model, *args, **kwargs)
        check_sampled(rollout, policy(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[0], policy)
        return rollout

    def try_out(self, policy: PolicyModel, tokenizer, prompts: Sequence[str], sampling: Sampling) -> None:
        """Have each server answer the longest prompt. Raises `ServerError` for whatever would stop a run later.

        That is an adapter that is not found or has too high a rank, a prompt and a response that are too long
        together, and another base model.
        """
        ids = encode_prompts(tokenizer, prompts)
        longest = prompts[max(range(len(ids)), key=lambda row: len(ids[row]))]
        for i in range(len(self.clients)):
            alone = copy.copy(self)
            alone.clients = self.clients[i : i + 1]
            alone.checked(policy, tokenizer, [longest], ["trial"], sampling, "trial")

    @contextmanager
    def _adapter(self, model, label: str) -> Iterator[str]:
        """The name of the model's adapter, which every server has inside this block and none has afterwards."""
        name = f"{label}-{uuid4().hex[:8]}"
        place = self.folder / name
        try:
            model.save_pretrained(place)
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
    said = "it did not say why"
    try:
        try:
            client.post("/load_lora_adapter", body={"lora_name": name, "lora_path": str(place)}, cast_to=str)
        except openai.APIStatusError as error:  # also where a first try succeeded and its answer was lost
            said = one_line(error)
        if name in {model.id for model in client.models.list()}:
            return
    except openai.OpenAIError as error:
        raise _failed(client, error) from None
    fix = "it must see this folder and run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank"
    raise ServerError(f"--vllm_url {client.base_url}: it does not load the adapter {place} ({said}): {fix}")


def _ask(client: openai.OpenAI, **request) -> tuple[list[int], list[float]]:
    """A response's token ids, its end token included, and their log-probabilities."""
    try:
        answer = client.completions.create(**request)
        tokens, logprobs = answer.choices[0].token_ids, answer.choices[0].logprobs.token_logprobs
    except openai.OpenAIError as error:
        raise _failed(client, error) from None
    except (AttributeError, IndexError, TypeError, ValueError):
        answer, tokens, logprobs = None, [], []
    ends, limit = request["extra_body"]["stop_token_ids"], request["max_tokens"]
    is_whole = tokens and len(tokens) == len(logprobs) and (tokens[-1] in ends or len(tokens) == limit)
    if not is_whole or answer.model != request["model"]:
        what = f"no whole response of {request['model']} with token ids and log-probabilities"
        raise ServerError(f"--vllm_url {client.base_url}: {what}: it must be vLLM, and one that knows return_token_ids")
    return tokens, logprobs


def _failed(client: openai.OpenAI, error: Exception) -> ServerError:
    return ServerError(f"--vllm_url {client.base_url}: {one_line(error)}: see that the server runs, and its log")
