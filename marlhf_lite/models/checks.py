"""Try what a base model must be able to do before anything trains; a problem is one line."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.models.fast.last_layer import has_plain_last_layer
from marlhf_lite.models.fast.switch import levers_of_model
from marlhf_lite.models.loading import load_policy, load_score_model, new_policy, share
from marlhf_lite.models.positions import position_limit, shared_rope_limit
from marlhf_lite.models.score_heads import with_head
from marlhf_lite.utils.errors import InputError, one_line

PADS = 3  # padding tokens before a text, when a base is tried
# Mean difference in nats per token between a text alone and the same text after padding; rounding stays far below.
PADDING_GAP = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}


def check_length(base: PreTrainedModel, model: str, prompt: int, response: int) -> None:
    """Raise `InputError` if the longest prompt with the longest response has more tokens than the base can place.

    `prompt` and `response` are the lengths of both in tokens, and `model` is the name that the message shows.
    """
    limit = position_limit(base)  # None if the base has no limit
    if limit and prompt + response > limit:
        room = limit - response
        fix = f"--max_prompt_length {room}"
        if room <= 0:  # no prompt is short enough
            fix = f"a --max_response_length far below {limit}"
        what = f"{limit} positions"
        if shared_rope_limit(base):
            what = f"a RoPE that changes beyond {limit} tokens, for all texts of a batch"
        texts = f"the longest prompt has {prompt} tokens, the longest response (of all turns) {response}"
        raise InputError(f"--model {model}: it has {what}; {texts}: give {fix}")


def check_vocabulary(base: PreTrainedModel, model: str, tokenizer, ids: Iterable[int]) -> None:
    """Raise `InputError` if a token of the texts (EOS and padding included) has no embedding in the model.

    `ids` are the token ids of the texts; a tokenizer with added tokens may know more of them than the model has.
    """
    count = base.get_input_embeddings().weight.shape[0]
    last = max((tokenizer.eos_token_id, tokenizer.pad_token_id, *ids))
    if last >= count:
        token = tokenizer.convert_ids_to_tokens(last)
        fix = "call its resize_token_embeddings(len(tokenizer)), and save it"
        raise InputError(
            f"--model {model}: it has {count} embeddings, and none for the token {token} ({last}): {fix}"
        )


def check_base(options, inputs, base: PreTrainedModel) -> None:
    """Raise `InputError` if the base cannot train with these options."""
    if options.stages:
        check_trainable(
            base, options, inputs.sft, needs_head=bool({"rm", "ppo"} & set(options.stages))
        )
    trains_before_reward_is_read = len(options.stages) > 1
    if inputs.rm and trains_before_reward_is_read:
        load_score_model(base, inputs.rm)


def check_trainable(
    base: PreTrainedModel, options: ModelConfig, sft: Path | None, needs_head: bool
) -> None:
    """Raise `InputError` unless the base takes an adapter, padding before prompts, and a scalar head if needed.

    The adapter is a new one, or that of the folder `sft`. The head is needed for a reward model or a critic.
    """
    if base.device.type == "meta":  # in full fine-tuning the base has no weights to try
        return
    try:
        model = load_policy(base, sft, trainable=False) if sft else new_policy(base, options)
    except InputError:  # it says what is wrong; as a `ValueError` it would be caught below
        raise
    except (ValueError, re.error) as error:  # of peft, as for Mamba's projections
        fix = "give all-linear, or a regular expression for whole names of layers, such as .*q_proj"
        what = f"--lora_target_modules {options.lora_target_modules}: {one_line(error)}"
        raise InputError(f"{what}: {fix}") from None
    family = base.config.model_type
    roles = {"log-probabilities": PolicyModel(model.eval())}
    try:
        if needs_head:
            roles["scores"] = ScalarHeadModel(with_head(share(base), 0))
        gaps = {name: _padding_gap(role, base) for name, role in roles.items()}
    # How models fail that take other inputs, such as those that also read pictures.
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:
        raise InputError(
            f"--model {options.model}: {family} models cannot train here: {one_line(error)}"
        ) from None
    for name, gap in gaps.items():
        if math.isnan(gap):
            fix = "give weights without NaN, or another --dtype"
            raise InputError(f"--model {options.model}: its {name} are not finite: {fix}")
        if gap > PADDING_GAP[base.dtype]:
            what = f"padding before a text changes its {name} by {gap:.2f}"
            raise InputError(f"--model {options.model}: {family} models cannot train here: {what}")


@torch.no_grad()
def _padding_gap(role: PolicyModel | ScalarHeadModel, base: PreTrainedModel) -> float:
    """Return the mean difference between a role's outputs for a text alone and for the same text after padding.

    It is in nats per token for log-probabilities, and near 0 unless the model ignores the mask or the positions.
    """
    # Any eight tokens do; 10 to 17 are seldom special tokens.
    text = torch.arange(10, 18) % base.config.get_text_config().vocab_size
    alone = text[None].to(base.device)
    padded = torch.cat([text.new_ones(PADS), text])[None].to(base.device)
    mask_alone = torch.ones_like(alone)
    mask_padded = torch.ones_like(padded)
    mask_padded[:, :PADS] = 0
    if isinstance(role, PolicyModel):
        length = len(text) - 1  # nothing predicts the first token
        outputs_alone, _ = role(alone, mask_alone, length)
        outputs_padded, _ = role(padded, mask_padded, length)
    else:
        outputs_alone = role(alone, mask_alone)
        outputs_padded = role(padded, mask_padded)[:, PADS:]
    return (outputs_alone - outputs_padded).abs().mean().item()


def ways(base: PreTrainedModel, options: ModelConfig) -> dict[str, str]:
    """Return how adapters and the last layer of this base are computed under these options, for the run's record."""
    levers = levers_of_model(base)  # the choices of --fast that the base was loaded with
    if options.finetune != "lora":
        adapters = "none"
    elif "lora" not in levers or options.load_in_4bit:  # the faster way needs plain weights
        adapters = "by peft"
    elif base.dtype == torch.float32:
        adapters = "merged"
    else:
        adapters = f"added in {str(base.dtype).removeprefix('torch.')}"
    is_shortened = "last_layer" in levers and has_plain_last_layer(base.base_model)
    last_layer = "at responses" if is_shortened else "whole"
    return {"adapters": adapters, "last_layer": last_layer}
