"""Try what a base model must be able to do before anything trains; a problem is one line."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.models.adapters import is_full_model
from marlhf_lite.models.fast.last_layer import has_plain_last_layer
from marlhf_lite.models.fast.switch import levers_of_model
from marlhf_lite.models.loading import (
    check_base_is_whole,
    check_can_be_loaded,
    load_policy,
    new_policy,
    new_reward_model,
    share,
)
from marlhf_lite.models.positions import position_limit, shared_rope_limit
from marlhf_lite.models.score_heads import with_head
from marlhf_lite.utils.errors import InputError, one_line

OTHERS = 3  # other tokens around a text, when a base is tried
# Mean difference in nats per token between a text alone and among other tokens, or before and after an adapter is
# merged; rounding stays far below.
LARGEST_GAP = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}


def check_length(base: PreTrainedModel, model: str, prompt: int, response: int) -> None:
    """Raise `InputError` if the longest prompt and the longest response together have more tokens than the base takes.

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
    if last >= count:  # embeddings are numbered from 0
        token = tokenizer.convert_ids_to_tokens(last)
        fix = "call its resize_token_embeddings(len(tokenizer)), and save it"
        raise InputError(
            f"--model {model}: it has {count} embeddings, and none for the token {token} ({last}): {fix}"
        )


def check_base(options, inputs, base: PreTrainedModel) -> None:
    """Raise `InputError` if the base cannot train with these options, or models of `inputs` do not go with it."""
    if options.stages:
        check_trainable(
            base, options, inputs.sft, needs_head=bool({"rm", "ppo"} & set(options.stages))
        )
    # 1. Try every model that the command names, although stages read it later, so that a fault costs no training. For
    #    full fine-tuning `base` has no weights, so the files of `--model` have not been read yet.
    starts_from_base = "sft" in options.stages and not inputs.sft
    if starts_from_base and options.finetune == "full":
        check_base_is_whole(options)
    for policy in (inputs.sft, *inputs.policies.values()):
        if policy:
            check_can_be_loaded(base, policy, gives_scores=False)
    if inputs.rm:
        check_can_be_loaded(base, inputs.rm, gives_scores=True)

    # 2. Try to put a head on SFT's adapter if a reward model or a critic starts from it: not every kind takes one.
    is_start_of_score_model = "rm" in options.stages
    for method in options.methods.values():  # runs of PPO, each with a critic
        is_start_of_score_model |= method.critic_init == "sft" or not inputs.rm
    if inputs.sft and is_start_of_score_model and not is_full_model(inputs.sft):
        new_reward_model(base, inputs.sft)  # raises if it cannot


def check_trainable(
    base: PreTrainedModel, options: ModelConfig, sft: Path | None, needs_head: bool
) -> None:
    """Raise `InputError` unless the base takes an adapter, padding before prompts, and a scalar head if one is needed.

    The adapter is a new one, or that of the folder `sft`. A reward model or a critic needs the head (`needs_head`).
    """
    if base.device.type == "meta":  # in full fine-tuning the base has no weights to try
        return
    try:
        model = load_policy(base, sft, trainable=False) if sft else new_policy(base, options)
    except InputError:  # it says what is wrong; as a `ValueError` it would be caught below
        raise
    except (ValueError, re.error) as error:  # PEFT refuses some layers, such as Mamba's projections
        fix = "give all-linear, or a regular expression for whole names of layers, such as .*q_proj"
        what = f"--lora_target_modules {options.lora_target_modules}: {one_line(error)}"
        raise InputError(f"{what}: {fix}") from None
    family = base.config.model_type
    roles = {"log-probabilities": PolicyModel(model.eval())}
    try:
        if needs_head:
            roles["scores"] = ScalarHeadModel(with_head(share(base), 0))  # seed 0: any would do
        gaps = {}  # a sentence on what changes -> by how much
        for name, role in roles.items():
            gaps[f"padding before a text changes its {name}"] = _gap(role, base, before=OTHERS)
            gaps[f"tokens after a text change its {name}"] = _gap(role, base, after=OTHERS)
    # How models fail that take other inputs, such as those that also read pictures.
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:
        raise InputError(
            f"--model {options.model}: {family} models cannot train here: {one_line(error)}"
        ) from None
    for what, gap in gaps.items():
        if math.isnan(gap):
            outputs = what.rpartition(" its ")[2]  # "log-probabilities" or "scores"
            fix = "give weights without NaN, or another --dtype"
            raise InputError(f"--model {options.model}: its {outputs} are not finite: {fix}")
        if gap > LARGEST_GAP[base.dtype]:
            raise InputError(
                f"--model {options.model}: {family} models cannot train here: {what} by {gap:.2f}"
            )


@torch.no_grad()
def _gap(
    role: PolicyModel | ScalarHeadModel, base: PreTrainedModel, before: int = 0, after: int = 0
) -> float:
    """Return the mean difference between a role's outputs for a text alone and for the same text among other tokens.

    `before` is the number of padding tokens before the text, `after` that of other tokens after it. The difference is
    in nats per token for log-probabilities. It is near 0 unless the model ignores the mask or the positions, or reads
    what follows, as one that fills gaps in texts does.
    """
    text = _any_text(base)
    alone = text[None].to(base.device)
    # All the other tokens are token 1; the mask hides those before the text.
    among_others = torch.cat([text.new_ones(before), text, text.new_ones(after)])[None]
    among_others = among_others.to(base.device)
    mask_alone = torch.ones_like(alone)
    mask = torch.ones_like(among_others)
    mask[:, :before] = 0
    if isinstance(role, PolicyModel):
        length = len(text) - 1  # nothing predicts the first token
        outputs_alone, _ = role(alone, mask_alone, length)
        outputs, _ = role(among_others, mask, length + after)
        outputs = outputs[:, :length]  # those of the text
    else:
        outputs_alone = role(alone, mask_alone)
        outputs = role(among_others, mask)[:, before : before + len(text)]
    return (outputs_alone - outputs).abs().mean().item()


def _any_text(model: PreTrainedModel) -> torch.Tensor:
    """Return eight tokens, on the CPU: 10 to 17, which are seldom special ones."""
    return torch.arange(10, 18) % model.config.get_text_config().vocab_size


@torch.no_grad()
def logprobs_of_any_text(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    """Return the log-probabilities of the same few tokens, to compare two forms of one model."""
    text = _any_text(model)[None].to(model.device)
    logprobs, _ = PolicyModel(model.eval())(text, torch.ones_like(text), text.shape[1] - 1)
    return logprobs


def check_merged_alike(
    before: torch.Tensor, format_before: torch.dtype, merged: PreTrainedModel
) -> None:
    """Raise `InputError` if `merged`, a model with its adapter merged, gives other log-probabilities than `before`.

    `before` are those of `logprobs_of_any_text` before the merging, computed in the number format `format_before`. The
    coarser of the two models' formats decides how much rounding may change.
    PEFT has more than forty kinds of adapters, and not all that it merges without an error are merged rightly.
    """
    gap = (before - logprobs_of_any_text(merged)).abs().mean().item()
    if gap > max(LARGEST_GAP[format_before], LARGEST_GAP[merged.dtype]):
        what = f"merged into its base it changes log-probabilities by {gap:.2f}"
        fix = "load it beside its base by PEFT, as its model card says"
        raise InputError(f"the adapter: {what}: {fix}")


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
