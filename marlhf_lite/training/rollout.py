"""Prompts to responses: sampling, and the `Rollout` that the rest of an update works on."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from marlhf_lite.config.method import PPOConfig, SamplingConfig
from marlhf_lite.models.actor_critic import unwrap_peft
from marlhf_lite.models.fast.decoding import decode, has_plain_cache
from marlhf_lite.models.fast.switch import levers_of_model
from marlhf_lite.models.tied import PEFT_CANNOT_MERGE, tied_layers
from marlhf_lite.tasks.padding import pad
from marlhf_lite.tasks.tokenization import decode_continuation, encode_prompts
from marlhf_lite.training.distributed import is_sharded
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.less_memory import in_batches
from marlhf_lite.utils.random_states import random_states, set_random_states

MERGED_SHARE = 1 / 8  # of a GPU's memory, which copies with a merged adapter may take


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. `temperature` 0 is greedy; `top_k` 0 turns top-k off (transformers' default is 50).

    Before `min_new_tokens` tokens no end token is drawn, as if it had no probability. Log-probabilities of the policy
    ignore this, as they ignore top-k and top-p: they are over all tokens, the end token among them.
    """

    max_new_tokens: int
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    min_new_tokens: int = 0
    #: [B] a name for each response, which a sampler may take as a seed for that response alone
    seed_names: tuple[str, ...] = ()

    def of_turn(self, turn: int, rows: Sequence[int]) -> "Sampling":
        """How turn number `turn` is drawn in these dialogues of the batch: here, as every other turn."""
        return self

    def arguments(self) -> dict:
        """Arguments of transformers' `generate`; the four models have no other settings."""
        common: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "use_cache": True}
        if self.min_new_tokens:
            common["min_new_tokens"] = self.min_new_tokens
        if self.temperature == 0:
            return common | {"do_sample": False}
        return common | {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


@dataclass(frozen=True)
class Rollout:
    """B prompts with their responses. L = P + T: prompts padded on the left to P, responses on the right to T."""

    prompts: list[str]  #: each a `Prompt` with its row, if a reward takes columns
    responses: list[str]  #: without special tokens
    tokens: Tensor  #: [B, L] token ids
    attention_mask: Tensor  #: [B, L] 1 on tokens
    #: [B, T] True on the policy's own tokens, the generated EOS included; from lengths, never from ids. If an
    #: environment answers in between (`environments`), its tokens are holes: the models read them, nobody chose them.
    mask: Tensor
    ended: Tensor  #: [B] True if the response ends with EOS, or if the environment ended it
    sampled_logprobs: Tensor | None = None  #: [B, T] log π of the sampled tokens at temperature 1
    # `PPOTrainer.score` gives a rollout these two; nothing reads them before.
    ref_logprobs: Tensor = None  # type: ignore[assignment]  #: [B, T] log π_ref, in nats
    scores: Tensor = None  # type: ignore[assignment]  #: [B] the reward of each response, as it was given
    gold: Tensor | None = None  #: [B] true scores, if they are known; never trained on
    # : [B, K] of an environment, a number for each turn; 0 on padding
    turn_rewards: Tensor | None = None
    turns: list[list[dict]] | None = None  #: what was said in each, see `environments.Dialogue`

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt_width(self) -> int:
        """The width P of the prompts."""
        return self.tokens.shape[1] - self.mask.shape[1]

    @property
    def response_ids(self) -> Tensor:
        """[B, T] response tokens, padding included."""
        return self.tokens[:, self.prompt_width :]

    @property
    def lengths(self) -> Tensor:
        """[B] the policy's own tokens, EOS included."""
        return self.mask.sum(1)

    @property
    def ends(self) -> Tensor:
        """[B] number of columns up to the policy's last token, included."""
        places = torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device) * self.mask
        return torch.nn.functional.pad(places, (1, 0)).amax(1)

    def select(self, rows: slice | Tensor) -> "Rollout":
        """Select some of the responses; T stays, so that the same index selects from [B, S] tensors.

        A slice gives views of the tensors, and waits for no device.
        """
        if isinstance(rows, slice):
            row_numbers = [*range(len(self))[rows]]
        else:
            row_numbers = rows.tolist()
        selected: dict[str, Any] = {}
        for name, x in vars(self).items():
            if x is None:
                selected[name] = None
            elif not isinstance(x, Tensor):  # a list of texts or turns
                selected[name] = [x[number] for number in row_numbers]
            elif isinstance(rows, slice):
                selected[name] = x[rows]
            else:
                selected[name] = x[rows.to(x.device)]
        return Rollout(**selected)

    def copy(self) -> "Rollout":
        """The same rollout in new lists and tensors, for a user's function, which may change them."""
        # A tensor as an index copies what it selects; a slice would not.
        return self.select(torch.arange(len(self)))

    def of_the_policy_alone(self) -> "Rollout":
        """The rollout of what the policy said: its own tokens, and its texts, a line for each turn.

        Rewards read this, because the words of an environment are no part of the answer and must not earn its score.
        What the environment said stays in `turns`. Without an environment, this is the rollout itself.
        """
        if self.turns is None:
            return self
        # A stable sort of 0 (the policy's tokens) before 1 (all others) moves the policy's tokens to the left, in their
        # order. The mask hides the others.
        order = (~self.mask).to(torch.int8).argsort(dim=1, stable=True)
        mask = self.mask.gather(1, order)
        prompts = self.tokens[:, : self.prompt_width]
        prompt_mask = self.attention_mask[:, : self.prompt_width]
        by_token = {}
        for name in ("sampled_logprobs", "ref_logprobs"):
            values = getattr(self, name)
            if values is not None:
                by_token[name] = values.gather(1, order)
        return replace(
            self,
            responses=[said_by_policy(turns) for turns in self.turns],
            tokens=torch.cat([prompts, self.response_ids.gather(1, order)], dim=1),
            attention_mask=torch.cat([prompt_mask, mask.to(prompt_mask.dtype)], dim=1),
            mask=mask,
            **by_token,
        )

    def to(self, device) -> "Rollout":
        """The same rollout on another device."""
        moved: dict[str, Any] = {}
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                moved[name] = x.to(device)
        return replace(self, **moved)

    def trim(self) -> "Rollout":
        """The rollout without columns that are padding in every row.

        A result [B, T'] that is computed from it, such as log-probabilities, is padded to this rollout's T by `widen`.
        """
        if not len(self):
            return self
        # The longest prompt and the longest response of these rows. Both come together, so the CPU waits once.
        prompt_lengths = self.attention_mask[:, : self.prompt_width].sum(1)
        response_width = self.ends.max().clamp(min=1)
        longest_prompt, width = torch.stack([prompt_lengths.max(), response_width]).tolist()

        # Prompts are padded on the left, responses on the right.
        start = self.prompt_width - longest_prompt
        columns = slice(start, self.prompt_width + width)
        narrow: dict[str, Any] = {
            "tokens": self.tokens[:, columns],
            "attention_mask": self.attention_mask[:, columns],
        }
        for name in ("mask", "sampled_logprobs", "ref_logprobs"):  # one column for each token
            x = getattr(self, name)
            if x is not None:
                narrow[name] = x[:, :width]
        return replace(self, **narrow)

    def widen(self, x: Tensor) -> Tensor:
        """Pad a result [B, T'] of the trimmed rollout with zeros to [B, T]."""
        return torch.nn.functional.pad(x, (0, self.mask.shape[1] - x.shape[1]))

    def sort_by_length(self) -> "Rollout":
        """Sort the rows by tokens, so that micro-batches hold rows of similar length and little padding."""
        return self.select(self.attention_mask.sum(1).argsort(stable=True))

    def at_last_token(self, scores: Tensor) -> Tensor:
        """Read scores [B, L] at the last of the policy's tokens, which is EOS if there is one: [B]."""
        last = self.prompt_width + (self.ends - 1).clamp(min=0)
        return scores.gather(1, last[:, None].to(scores.device)).squeeze(1)

    def before_tokens(self, scores: Tensor) -> Tensor:
        """Read scores [B, L] at the token before each response token, which gives V(s_t): [B, T]."""
        return scores[:, self.prompt_width - 1 : -1]


def said_by_policy(turns: Sequence[Mapping]) -> str:
    """Return the policy's texts of these turns, one line for each; `turns` are those of a `Dialogue`."""
    return "\n".join(turn["response"] for turn in turns)


class Sampler(Protocol):
    """What answers prompts: `generate`, `Dialogues` with an environment, or your own (`--sampler`).

    If it gives `Rollout.sampled_logprobs`, they are compared with the policy's. It raises `ServerError` if something
    fails that may work again later; the run then writes a checkpoint. It may have:

    - `key`: text that says what its answers depend on, besides policy and sampling; evaluation stores them by it.
    - `remote`: if True, it takes the policy's weights elsewhere. It then gets all prompts at once, and a model whose
      adapter is not merged and whose weights are not gathered.
    - `draws_from_policy`: if True, it draws from the very model that it is given, as `generate` does. If a sampler
      neither has this nor gives log-probabilities, a note says that nothing checks which policy has sampled.
    - `try_out(policy, tokenizer, prompts, sampling)`, called before training with the longest prompt.
    - `longest_response(tokenizer, max_new_tokens)`: the most tokens of a response, if more than `max_new_tokens`.
    """

    def __call__(self, model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
        """Sample one response to each prompt."""


def is_remote(sampler: Sampler) -> bool:
    """Whether servers sample."""
    return getattr(sampler, "remote", False)


def longest_response(sampler: Sampler, tokenizer, new_tokens: int) -> int:
    """The most tokens after a prompt if the policy says at most `new_tokens` at a time.

    It is more than `new_tokens` if the sampler lets the policy speak in turns.
    """
    method_of_sampler = getattr(sampler, "longest_response", None)
    if method_of_sampler is None:
        return new_tokens
    return method_of_sampler(tokenizer, new_tokens)


def sampling_of(options: SamplingConfig, max_response_length: int) -> Sampling:
    """The sampling that a command's options ask for."""
    return Sampling(
        max_new_tokens=max_response_length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_new_tokens=options.min_response_length,
    )


# -- prompts ----------------------------------------------------------------------------------------------------------


def prompt_stream(prompts: Sequence[str], seed: int) -> Iterator[str]:
    """Prompts without end, in an order drawn by `seed`: all of them before any comes again."""
    order = random.Random(seed)
    while True:
        yield from order.sample(list(prompts), len(prompts))


def prompt_batches(
    prompts: Sequence[str], config: PPOConfig, accelerator: Accelerator, seed: int
) -> Iterator[list[str]]:
    """Yield, for one update after another, the prompts that this process answers: its share of the batch.

    Each prompt is in the list as often as it is answered (`config.rollouts`), one copy after the other.
    """
    stream = prompt_stream(prompts, seed)
    different_prompts = config.batch_size // config.rollouts
    while True:
        batch = list(islice(stream, different_prompts))
        prompts_of_process = batch[accelerator.process_index :: accelerator.num_processes]
        repeated: list[str] = []
        for prompt in prompts_of_process:
            repeated.extend([prompt] * config.rollouts)
        yield repeated


# -- sampling ---------------------------------------------------------------------------------------------------------


def end_of_text(model, tokenizer) -> list[int]:
    """Ids that end a response: the tokenizer's EOS and what the model's generation config adds to it."""
    ends = {tokenizer.eos_token_id}
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        ids = generation_config.eos_token_id  # a number, a list of them, or None
        if not isinstance(ids, list):
            ids = [ids]
        ends.update(ids)
    return sorted(ends - {None})


def response_mask(response_ids: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`(mask [B, T], ended [B])`: tokens up to and including the first end token of each row, all if there is none."""
    # A token is valid if no end comes before it, so the first end itself is.
    is_end = torch.isin(response_ids, torch.tensor(list(ends), device=response_ids.device))
    before = is_end.long().cumsum(1) - is_end.long()
    return before == 0, is_end.any(1)


def generate(model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
    """Sample one response to each prompt (`prompts` may repeat). Uses torch's global random state."""
    # Left padding: every response begins in the same column.
    ids, attention_mask = pad(encode_prompts(tokenizer, prompts), tokenizer.pad_token_id, left=True)
    tokens, mask, ended = sample(model, tokenizer, ids, attention_mask, sampling)
    return _make_rollout(
        tokenizer,
        prompts,
        tokens=tokens,
        prompt_mask=attention_mask.to(tokens.device),
        mask=mask,
        ended=ended,
    )


def sample(
    model, tokenizer, ids: Tensor, attention_mask: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue token ids [B, P], padded on the left, by T tokens or fewer.

    Returns the tokens [B, P+T], the mask of the new ones [B, T], and whether a row has ended [B]. Transformers'
    `generate` samples; on a GPU a CUDA graph does, if `--fast graph` was asked for and model and sampling allow it (see
    `decoding`).
    """
    device = next(model.parameters()).device
    ends = end_of_text(model, tokenizer)
    pad_id = tokenizer.pad_token_id
    ids = ids.to(device)
    attention_mask = attention_mask.to(device)

    # The graph draws tokens as `Sampling` itself says: a subclass may draw in another way.
    is_plain_sampling = type(sampling) is Sampling and not sampling.min_new_tokens
    is_graph_asked_for = device.type == "cuda" and "graph" in levers_of_model(unwrap_peft(model))
    can_use_graph = is_graph_asked_for and is_plain_sampling and not is_sharded(model)
    if can_use_graph and has_plain_cache(unwrap_peft(model)):
        tokens = decode(unwrap_peft(model), ids, attention_mask, sampling, ends, pad_id)
        mask, ended = response_mask(tokens[:, ids.shape[1] :], ends)
        width = int(mask.any(0).sum())  # columns in which a row still has a token
        return tokens[:, : ids.shape[1] + width], mask[:, :width], ended
    # `generate` keeps no gradients anyway. Inference mode also leaves out torch's bookkeeping, which takes time on a
    # CPU; but what FSDP2 gathers in this mode could not be used in training.
    uses_inference_mode = device.type == "cpu" and not is_sharded(model)
    with torch.inference_mode(uses_inference_mode):
        tokens = model.generate(
            input_ids=ids,
            attention_mask=attention_mask,
            pad_token_id=pad_id,
            eos_token_id=ends,
            # If processes shard the model, they gather each layer together. So one whose rows have all ended makes
            # passes until those of all have.
            synced_gpus=is_sharded(model),
            **sampling.arguments(),
        )
    # A tensor made in inference mode may not be kept by a pass with gradients, but its copy may.
    tokens = tokens.clone()
    return tokens, *response_mask(tokens[:, ids.shape[1] :], ends)


def generate_in_batches(
    sampler: Sampler, size: int, model, tokenizer, prompts: Sequence[str], sampling: Sampling
) -> tuple[Rollout, int]:
    """Sample a response to each prompt, `size` prompts at a time (0: all at once); return the rollout and the size.

    A model on this machine samples with its adapter merged, which takes half the time; servers get all prompts at once.
    Each time that memory ends, the size is halved, and the batch that did not fit is sampled again from the random
    states that it began with. The size that is returned is the one that fitted. Raises `InputError` if memory does not
    hold one response, or if the policy's probabilities are not finite.
    """

    def sample_rows(rows: slice) -> Rollout:
        states = random_states()
        sampling_of_rows = replace(sampling, seed_names=sampling.seed_names[rows])
        try:
            return sampler(model, tokenizer, prompts[rows], sampling_of_rows)
        except RuntimeError as error:
            if should_reduce_batch_size(error):  # memory has ended: `in_batches` tries fewer
                set_random_states(states)
            raise

    takes_all_at_once = is_remote(sampler) or size == 0
    if takes_all_at_once:
        size = len(prompts)
    adapter_merged = nullcontext() if is_remote(sampler) else merged_adapter(model)
    with adapter_merged, nonfinite_probabilities_refused():
        parts, size = in_batches(
            sample_rows,
            len(prompts),
            size,
            # Processes that shard the weights gather each layer together: none can begin again by itself.
            no_process_waits=not is_sharded(model),
        )
    if len(parts) == 1:
        return parts[0], size
    return concatenate(parts, tokenizer.pad_token_id), size


@contextmanager
def merged_adapter(model: nn.Module) -> Iterator[None]:
    """Merge a LoRA adapter into copies of the base weights inside this block: sampling then takes half the time.

    After the block the weights are the very same tensors as before. The probabilities of samples may differ in the last
    digits. An adapter stays beside the weight of its layer if the weight is tied, that is, used by another module, too.
    Nothing at all is merged if

    - some weights have 16 bits, which would round most of a small change away, or are sharded or quantised;
    - the copies would be too large;
    - PEFT cannot merge one of the adapters, such as a bias on a layer without one.
    """
    # 1. The layers with an adapter, except those whose weights another module uses, too.
    tied = tied_layers(model)
    layers = []
    weights: dict[nn.Parameter, None] = {}  # a set that keeps the order
    for module in model.modules():
        if isinstance(module, LoraLayer) and module not in tied:
            layers.append(module)
            weights |= dict.fromkeys(module.get_base_layer().parameters())

    # 2. Can they be merged?
    if not weights or is_sharded(model) or not _can_merge(list(weights)):
        yield
        return

    # 3. Merge, and put everything back.
    # `merge` adds the adapter to the weights in place, and subtracting it again would round: so it gets copies.
    originals = [weight.data for weight in weights]

    def put_back() -> None:
        for weight, original in zip(weights, originals, strict=True):
            weight.data = original
        for layer in layers:
            layer.merged_adapters.clear()

    try:
        with torch.no_grad():
            for weight in weights:
                weight.data = weight.data.clone()
            try:
                for layer in layers:
                    layer.merge()
            except PEFT_CANNOT_MERGE:  # the block then runs with the adapters beside the weights
                put_back()
        yield
    finally:
        put_back()


def _can_merge(weights: Sequence[nn.Parameter]) -> bool:
    """Whether all are float32 and whole (4-bit and sharded weights are not), and copies of them are small enough."""
    for weight in weights:
        if weight.dtype != torch.float32 or hasattr(weight, "full_tensor"):
            return False
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    return size <= _most_bytes_of_copies(weights[0].device)


def _most_bytes_of_copies(device: torch.device) -> int:
    """Bytes that copies with a merged adapter may take: a share of a GPU's memory, or 1 GiB on another device."""
    if device.type != "cuda":
        return 2**30
    return int(torch.cuda.get_device_properties(device).total_memory * MERGED_SHARE)


@contextmanager
def nonfinite_probabilities_refused() -> Iterator[None]:
    """Raises `InputError` if torch, about to draw a token, finds that the policy's probabilities are not finite.

    CUDA finds it as a "device-side assert", which does not say what failed, and after which this process cannot use the
    GPU any more.
    """
    fix = "start again with a lower learning rate"
    try:
        yield
    except RuntimeError as error:
        if "probability tensor" in str(error):
            raise InputError(f"the policy's probabilities are not finite: {fix}") from error
        if "device-side assert" in str(error):
            likely = "most likely the policy's probabilities are not finite"
            other_faults = (
                "CUDA_LAUNCH_BLOCKING=1 shows the place if it is another fault, "
                "such as a token id that is too high"
            )
            raise InputError(
                f"a check on the GPU failed, {likely}: {fix}; {other_faults}"
            ) from error
        raise


# -- rollouts of given texts ------------------------------------------------------------------------------------------


def concatenate(parts: Sequence[Rollout], pad_token_id: int) -> Rollout:
    """Unscored rollouts as one, padded to their widest prompts and responses."""
    # The turns of dialogues and their rewards: all parts have them, or none.
    turns: list[list[dict]] = []
    rewards: list[Tensor] = []
    prompts: list[str] = []
    responses: list[str] = []
    tokens: list[Tensor] = []
    attention_masks: list[Tensor] = []
    masks: list[Tensor] = []
    prompt_width = max(part.prompt_width for part in parts)
    response_width = max(part.mask.shape[1] for part in parts)
    pad_columns = torch.nn.functional.pad
    for part in parts:
        missing_of_prompts = prompt_width - part.prompt_width
        missing_of_responses = response_width - part.mask.shape[1]
        both_sides = (missing_of_prompts, missing_of_responses)  # prompts are padded on the left
        prompts += part.prompts
        responses += part.responses
        tokens.append(pad_columns(part.tokens, both_sides, value=pad_token_id))
        attention_masks.append(pad_columns(part.attention_mask, both_sides, value=0))
        masks.append(pad_columns(part.mask, (0, missing_of_responses), value=False))
        turns += part.turns or []
        if part.turn_rewards is not None:
            rewards += [*part.turn_rewards]
    return Rollout(
        prompts=prompts,
        responses=responses,
        tokens=torch.cat(tokens),
        attention_mask=torch.cat(attention_masks),
        mask=torch.cat(masks),
        ended=torch.cat([part.ended for part in parts]),
        turns=turns or None,
        turn_rewards=pad_sequence(rewards, batch_first=True) if rewards else None,
    )


def from_texts(tokenizer, prompts: Sequence[str], responses: Sequence[str], limit: int) -> Rollout:
    """A rollout of given responses instead of sampled ones; each ends with EOS unless it is cut at `limit` tokens."""
    from marlhf_lite.tasks.answers import encode_answers  # no update of PPO needs it

    _, ids = encode_answers(tokenizer, prompts, responses, limit)
    return from_tokens(tokenizer, prompts, ids, [tokenizer.eos_token_id])


def from_tokens(
    tokenizer, prompts: Sequence[str], response_ids: Sequence[Sequence[int]], ends: Sequence[int]
) -> Rollout:
    """A rollout of given response tokens; a response has ended if its last token is one of `ends`."""
    encoded = encode_prompts(tokenizer, prompts)
    prompt_tokens, prompt_mask = pad(encoded, tokenizer.pad_token_id, left=True)
    response_tokens, mask = pad(response_ids, tokenizer.pad_token_id, left=False)
    ended = [len(ids) > 0 and int(ids[-1]) in ends for ids in response_ids]
    return _make_rollout(
        tokenizer,
        prompts,
        tokens=torch.cat([prompt_tokens, response_tokens], 1),
        prompt_mask=prompt_mask,
        mask=mask.bool(),
        ended=torch.tensor(ended),
    )


def _make_rollout(
    tokenizer,
    prompts: Sequence[str],
    *,
    tokens: Tensor,
    prompt_mask: Tensor,
    mask: Tensor,
    ended: Tensor,
) -> Rollout:
    """A rollout of these tokens, with the texts of the responses."""
    # Lengths and tokens come from the device as one tensor, so that the CPU waits once.
    response_tokens = tokens[:, prompt_mask.shape[1] :]
    lengths = mask.sum(1, keepdim=True)
    rows = torch.cat([lengths, response_tokens], 1).tolist()
    ids_of_responses = []
    for length, *ids in rows:
        ids_of_responses.append(ids[:length])
    return Rollout(
        prompts=list(prompts),
        responses=decode_continuation(tokenizer, ids_of_responses),
        tokens=tokens,
        attention_mask=torch.cat([prompt_mask, mask.long()], 1),
        mask=mask,
        ended=ended,
    )
