"""`--sampler vllm`: sample by vLLM servers, which get the policy before every update (pip install 'marlhf-lite[vllm]').

Start servers as "Rollouts by vLLM" of docs/scaling.md shows, and name them in the environment:

VLLM_URL      addresses of the servers, comma-separated, without /v1
VLLM_API_KEY  their key, if they have one
VLLM_FOLDER   a folder that this machine and the servers see under the same path; ./vllm-adapters if it is not set

Servers load a LoRA adapter, or all weights if all are trained. Every answer is checked, because nothing else would show
that another policy gave it. vLLM caches an adapter under its name (vLLM's issue 42125), so each adapter and each folder
of weights gets a new name, and an answer must name the adapter that gave it. The run compares the log-probabilities of
the servers with those of its own policy. Prompts and responses travel as token ids, so nothing is tokenised twice.
"""

import copy
import os
import random
import re
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
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from marlhf_lite.extras.servers import BAD_ANSWER, connect
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.distributed import is_sharded, raise_on_all_ranks, whole_weights
from marlhf_lite.training.rollout import Rollout, Sampling, end_of_text, from_tokens
from marlhf_lite.training.sampler_checks import check_sampled
from marlhf_lite.utils.errors import InputError, ServerError, one_line
from marlhf_lite.utils.jsonl import apply_umask

try:
    import openai
except ImportError:
    raise InputError("needs the package openai: pip install 'marlhf-lite[vllm]'") from None

AT_ONCE = 256  # requests under way; the servers batch them
PATIENCE = 30.0  # seconds without an answer before the health of the servers is checked
RETRIES = 5  # how often the openai client asks again if a server is busy or cannot be reached
RELOAD_SECONDS = 600.0  # the time a server has to read a folder of weights


class Servers:
    """A `Sampler` of vLLM servers: each gets every adapter, or all weights, and its share of the prompts."""

    # Attributes of a `Sampler`: evaluation stores answers by the key, and the weights are taken elsewhere.
    key, remote = "vllm", True

    def __init__(self):
        self.folder = Path(os.environ.get("VLLM_FOLDER") or "vllm-adapters").resolve()
        # Whether folders of weights have the head beside an embedding that it is tied to. It becomes False if a server
        # refuses such a head.
        self.writes_head = True
        key = os.environ.get("VLLM_API_KEY", "").strip()
        self.clients = [
            connect(f"{url}/v1", key, "VLLM_API_KEY", max_retries=RETRIES) for url in addresses()
        ]

    def __call__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer,
        prompts: Sequence[str],
        sampling: Sampling,
    ) -> Rollout:
        """Return one response to each prompt, with the servers' log-probabilities in `sampled_logprobs`.

        The seed of a response comes from its name in `sampling.seed_names` [B]. If processes share the weights, all of
        them must call this. Raises `ServerError` if a server does not answer or lacks the policy.
        """
        ends = end_of_text(model, tokenizer)  # tokens that end a response
        ids = encode_prompts(tokenizer, prompts)
        settings = request_settings(sampling, ends)
        settings["vocabulary"] = model.config.get_text_config().vocab_size  # `ask` checks ids by it

        def ask_row(row: int) -> tuple[list[int], list[float]]:
            # Each server gets a run of rows, so that repetitions of a prompt find it in one server's cache.
            client = self.clients[row * len(self.clients) // len(ids)]
            seed = random.Random(sampling.seed_names[row]).getrandbits(63)
            return ask(client, model=served, prompt=ids[row], seed=seed, **settings)

        lend = self.adapter_on_servers if isinstance(model, PeftModel) else self.weights_on_servers
        # `served`, which `ask_row` uses, is the name under which the servers have the policy inside this block.
        with random_state_kept(), lend(model) as served:
            answers = self.all_of(ask_row, len(ids))
        rollout = from_tokens(tokenizer, prompts, [tokens for tokens, _ in answers], ends)
        # The mask takes the log-probabilities of all rows, one row after the other, to the places of response tokens.
        logprobs = torch.zeros(rollout.mask.shape)
        values = []
        for _, logprobs_of_row in answers:
            values += logprobs_of_row
        logprobs[rollout.mask] = torch.tensor(values)
        return replace(rollout, sampled_logprobs=logprobs).to(next(model.parameters()).device)

    def all_of(self, ask_row: Callable, count: int) -> list[tuple[list[int], list[float]]]:
        """Return `ask_row(0)` to `ask_row(count - 1)`, however long they take, as long as all servers are healthy.

        Raises `ServerError` if a server is not healthy.
        """
        arrived = []
        # At the end of its block this kind of pool drops requests that still run, as after an error. Other kinds would
        # wait for a dead server.
        with ThreadPool(min(AT_ONCE, count)) as pool:
            answers = pool.imap(ask_row, range(count))
            while len(arrived) < count:
                try:
                    arrived.append(answers.next(PATIENCE))
                except NoAnswerYet:  # the responses are long, or a server is gone
                    for client in self.clients:
                        check_health(client)
        return arrived

    def try_out(
        self, policy: PolicyModel, tokenizer, prompts: Sequence[str], sampling: Sampling
    ) -> None:
        """Let each server answer the longest prompt. Raises `ServerError` for everything that would stop a run later.

        Examples are an adapter that a server does not find or whose rank is too high, a prompt and a response that are
        too long together, and another base model. If all weights are trained, the trial has a changed embedding: a
        server that keeps its old weights, or an old head that was tied to the embedding, then gives other
        log-probabilities than the policy.
        """
        trains_all_weights = not isinstance(policy.model, PeftModel)
        for client in self.clients:
            with_one_server = copy.copy(self)
            with_one_server.clients = [client]
            with changed_embedding(policy.model) if trains_all_weights else nullcontext():
                rollout = with_one_server(policy.model, tokenizer, prompts, sampling)
                try:
                    check_sampled(rollout, policy)  # are the log-probabilities the policy's?
                except ServerError as error:
                    message = f"{client.base_url}: {error}"
                    if trains_all_weights:
                        message += ", or the server keeps old weights"
                    raise ServerError(message) from None
            # If this server has refused a head, the others do not get one either.
            self.writes_head = with_one_server.writes_head

    @contextmanager
    def adapter_on_servers(self, model: PeftModel) -> Iterator[str]:
        """Yield the name of the model's adapter; every server has it inside this block, and none afterwards."""
        place = self.folder / f"policy-{uuid4().hex[:8]}"
        try:
            model.save_pretrained(place)
            apply_umask(place)
            for client in self.clients:
                load_adapter(client, place)
            yield place.name
        finally:
            for client in self.clients:
                with suppress(openai.OpenAIError):  # a server that is gone has no adapters any more
                    once = client.with_options(max_retries=0, timeout=PATIENCE)
                    once.post("/unload_lora_adapter", body={"lora_name": place.name}, cast_to=str)
            shutil.rmtree(place, ignore_errors=True)

    @contextmanager
    def weights_on_servers(self, model: PreTrainedModel) -> Iterator[str]:
        """Yield the name of the servers' model, under which they have this model's weights inside this block."""
        place = self.folder / f"policy-{uuid4().hex[:8]}"
        try:
            if is_sharded(model):  # all processes gather the weights, and the main one sends them
                # If this fails in the main process, all processes raise the error: otherwise the others would wait.
                raise_on_all_ranks(self.send_weights, model, place)
            else:
                self.send_weights(model, place)
            yield names_of_models(self.clients[0])[0]
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def send_weights(self, model: PreTrainedModel, place: Path) -> None:
        """Write all weights to a folder, and let every server read them.

        Raises `ServerError` if the disk is full, or if a server does not read them.
        """
        weights = whole_weights(model)
        if not weights:  # in a process that only helped to gather them
            return
        try:
            save_with_head(model, place, weights, self.writes_head)
            for client in self.clients:
                reload_weights(client, place)
        except ServerError as error:
            is_tied = model.config.get_text_config().tie_word_embeddings
            refuses_head = self.writes_head and is_tied and "lm_head" in str(error)
            if not refuses_head:
                raise
            # Some of vLLM's models (Gemma 2) have no head but the embedding. Write the folder again without one.
            self.writes_head = False
            self.send_weights(model, place)


def save_with_head(
    model: PreTrainedModel, folder: Path, weights: Mapping[str, Tensor], writes_head: bool
) -> None:
    """Write config and weights of a model into a folder for vLLM.

    If a folder has no head because it is tied to the embedding, vLLM reloads the embedding and keeps the old head
    without a message. Therefore with `writes_head` the folder has the head as a separate tensor, as if it were not
    tied. `weights` is the whole state of `model` by name, also if processes share it. Raises `ServerError` if the
    folder cannot be written.
    """
    names = {module: name for name, module in model.named_modules()}
    name_of_embedding = f"{names[model.get_input_embeddings()]}.weight"
    name_of_head = f"{names[model.get_output_embeddings()]}.weight"
    written = {name: tensor.contiguous() for name, tensor in weights.items()}
    if writes_head or not model.config.get_text_config().tie_word_embeddings:
        # A tied model may have the weight under the embedding's name only. The head is a copy, because a file does not
        # take one tensor under two names.
        written[name_of_head] = written.get(name_of_head, written[name_of_embedding]).clone()
    else:
        written.pop(name_of_head, None)

    # The config says whether the file has a head, and names the class without the prefix that FSDP gives it.
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = name_of_head not in written
    config.get_text_config().tie_word_embeddings = name_of_head not in written
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = written[name_of_embedding].dtype
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
        apply_umask(folder)
        config.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise ServerError(f"{folder}: not written ({error}): free some disk space") from None


@contextmanager
def changed_embedding(model: PreTrainedModel) -> Iterator[None]:
    """Change the embedding, and a head that is tied to it, inside this block: at each trial in another way.

    A server that still has the weights of before, or of an earlier trial, then gives other log-probabilities.
    """
    weight = model.get_input_embeddings().weight
    before = weight.detach().clone()
    # Drawn by itself, so that PyTorch's random state stays. Of the 128 bits of a UUID, 63 make the largest seed.
    noise = torch.Generator().manual_seed(uuid4().int >> 65)
    factors = 1 + 0.5 * torch.randn(weight.shape[1], generator=noise)
    try:
        weight.data *= factors.to(weight)
        yield
    finally:
        weight.data.copy_(before)


def addresses() -> list[str]:
    """Return the servers' addresses in VLLM_URL, without a slash at the end."""
    urls = []
    for url in os.environ.get("VLLM_URL", "").split(","):
        if url.strip():
            urls.append(url.strip().rstrip("/"))
    fix = "export addresses such as http://localhost:8000, without /v1"
    if not urls:
        raise InputError(f"VLLM_URL: not set: {fix}")
    for url in urls:
        if not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./-]*)?", url) or url.endswith("/v1"):
            raise InputError(f"VLLM_URL {url}: not an address: {fix}")
    return urls


@contextmanager
def asking(client: openai.OpenAI) -> Iterator[None]:
    """Turn an error of the openai client inside this block into a `ServerError`."""
    try:
        yield
    except openai.OpenAIError as error:
        raise ServerError(
            f"{client.base_url}: it fails ({one_line(error)}): see that it runs, and its log"
        ) from None


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore Python's random state after this block.

    The openai client draws from it before it asks again, and a user's reward may draw from it, too.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def request_settings(sampling: Sampling, ends: Sequence[int]) -> dict:
    """Return the settings that all requests of a batch share.

    Every setting is given, so that no default of a server counts. What OpenAI's protocol lacks goes into `extra_body`.
    """
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
        "logprobs": 0,  # those of the sampled tokens, and of no others
        "extra_body": more | {"top_k": sampling.top_k, "min_tokens": sampling.min_new_tokens},
    }


def check_health(client: openai.OpenAI) -> None:
    """Raise `ServerError` if a server is not healthy: it may have taken requests that it will never answer."""
    with asking(client):  # turns an error of the client into a `ServerError`
        try:
            root = str(client.base_url).removesuffix("/v1/")
            client.with_options(timeout=PATIENCE).get(f"{root}/health", cast_to=str)
        except openai.APIStatusError as error:
            # With a lower status, such as 404, a proxy before the server does not know this address.
            if error.status_code >= 500:
                raise


def load_adapter(client: openai.OpenAI, place: Path) -> None:
    """Let a server load an adapter. Raises `ServerError` if the server does not have the adapter afterwards."""
    reason = "it did not say why"
    body = {"lora_name": place.name, "lora_path": str(place)}
    with asking(client):
        try:
            client.post("/load_lora_adapter", body=body, cast_to=str)
        # If the first try succeeds and its answer is lost, the client tries again and is refused. So what counts is not
        # the refusal, but whether the server has the adapter.
        except openai.APIStatusError as error:
            reason = one_line(error)
    if place.name not in names_of_models(client):
        fix = "it must see this folder and run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank"
        raise ServerError(
            f"{client.base_url}: it does not load the adapter {place} ({reason}): {fix}"
        )


def reload_weights(client: openai.OpenAI, place: Path) -> None:
    """Let a server take its weights from a folder, and forget what it has cached.

    Raises `ServerError` if the server reports an error or does not answer. A server that reports no error may still
    have its old weights, because it cannot be asked which weights it has: `Servers.try_out` finds such a server.
    """
    root = str(client.base_url).removesuffix("/v1/")
    # The client waits for longer than the server may take, so that the server's own message comes first. It tries only
    # once more, not RETRIES times, since each try may take this long.
    patient = client.with_options(timeout=RELOAD_SECONDS + PATIENCE, max_retries=1)
    body = {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(place)},
        "timeout": RELOAD_SECONDS,
    }
    # What the server refuses gets a message here; `asking` turns all other errors of the client into a `ServerError`.
    with asking(client):
        try:
            patient.post(f"{root}/collective_rpc", body=body, cast_to=str)
            # The cache has keys and values of the old weights.
            patient.post(f"{root}/reset_prefix_cache", cast_to=str)
        except openai.NotFoundError as error:  # such addresses exist only in development mode
            fix = "start it in development mode: VLLM_SERVER_DEV_MODE=1 vllm serve ..."
            what = f"it reloads no weights ({one_line(error)})"
            raise ServerError(f"{client.base_url}: {what}: {fix}") from None
        except openai.APIStatusError as error:
            fix = "it must see this folder and serve the same architecture: see its log"
            what = f"it does not reload {place} ({one_line(error)})"
            raise ServerError(f"{client.base_url}: {what}: {fix}") from None


def names_of_models(client: openai.OpenAI) -> list[str]:
    """Return the names of a server's model and adapters, its model first. Raises `ServerError` if there are none."""
    with asking(client), suppress(*BAD_ANSWER):
        names = [model.id for model in client.models.list()]
        if names:
            return names
    raise ServerError(f"{client.base_url}: it names no models at /v1/models: it must be vLLM")


def ask(client: openai.OpenAI, vocabulary: int, **request) -> tuple[list[int], list[float]]:
    """Return a response's token ids, all below `vocabulary`, with its end token, and their log-probabilities.

    `request` has the arguments of a completion. Raises `ServerError` if the answer has another form, as that of a
    server that is not vLLM has.
    """
    answer = None
    tokens = []
    logprobs = []
    # Errors of reading an answer of another form are suppressed: what was not read is found missing below.
    with asking(client), suppress(*BAD_ANSWER):
        answer = client.completions.create(**request)
        tokens = answer.choices[0].token_ids
        logprobs = answer.choices[0].logprobs.token_logprobs
    ends = request["extra_body"]["stop_token_ids"]
    limit = request["max_tokens"]
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
