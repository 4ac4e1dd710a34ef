"""Whether the policy that trains sampled the responses: checks of samplers, and of a policy with its adapter merged."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor

from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.tied import LARGEST_LOSS
from marlhf_lite.training.distributed import sum_over_processes
from marlhf_lite.training.rollout import Rollout, Sampler, generate, merged_adapter
from marlhf_lite.utils.errors import InputError, ServerError

# Largest mean of |log π of the sampler - log π of the trainer| in nats a token, by the number format of the trainer's
# pass. With SmolLM2, vLLM and transformers are 1e-5 apart in float32, and bfloat16 is 0.03 from float32; float16 rounds
# an eighth as much. An adapter that was ignored, of rank 16 with B drawn at a deviation of 0.01, was 0.055 away.
SAMPLED_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
ROUNDING = 100  # times the format's smallest step: sums of a forward pass in another order
# mixed precision of accelerate -> format of the pass
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


UNKNOWN_POLICY = (
    "the sampler gives no log-probabilities: nothing checks that the trained policy sampled, and if another one did, "
    "training is off-policy without correction: return sampled_logprobs"
)


def is_unknown_policy(sampler: Sampler, rollout: Rollout) -> bool:
    """Whether nobody can tell which policy has sampled.

    That is so if the sampler did not draw from the model that it was given, and gave no log-probabilities to compare.
    """
    is_drawn_here = sampler is generate or getattr(sampler, "draws_from_policy", False)
    return not is_drawn_here and rollout.sampled_logprobs is None


@torch.no_grad()
def check_sampled(
    rollout: Rollout, policy: PolicyModel, logprobs: Tensor | None = None, accelerator=None
) -> dict[str, float]:
    """Metrics of how far the log-probabilities that a sampler gave are from the policy's own; {} if it gave none.

    `logprobs` [B, T] are those of the policy; if they are None, one more pass gives them. If an `accelerator` is given,
    the policy ran in its precision, and the metrics are over all of its processes:

    - `sampler_difference`: the mean of |log π of the policy − log π of the sampler|, in nats a token;
    - `sampler_beyond`: the share of tokens whose ratio policy / sampler is above 3 or below 1/3: a mean hides tails.

    Raises `ServerError` if the mean is more than rounding, because another policy has sampled then.
    """
    if rollout.sampled_logprobs is None:
        return {}
    if logprobs is None:
        width = rollout.mask.shape[1]
        logprobs, _ = policy(rollout.tokens, rollout.attention_mask, width)
    gaps = (logprobs - rollout.sampled_logprobs).abs()[rollout.mask]  # one for each token
    sums: dict[str, Any] = {
        "gap": gaps.sum(),
        "beyond": (gaps > math.log(3)).sum(),
        "tokens": rollout.mask.sum(),
    }
    format_of_weights = next(policy.parameters()).dtype
    format_of_pass = format_of_weights
    if accelerator is not None:
        sums = sum_over_processes(sums, accelerator)
        format_of_pass = AUTOCAST.get(accelerator.mixed_precision, format_of_weights)
    difference = float(sums["gap"] / sums["tokens"])
    beyond = float(sums["beyond"] / sums["tokens"])
    # Both the weights and the numbers of the pass are rounded: the coarser format decides.
    tolerance = max(SAMPLED_TOLERANCE[format_of_weights], SAMPLED_TOLERANCE[format_of_pass])
    if not difference <= tolerance:  # written so that NaN is refused, too
        what = f"the log-probabilities are {difference:.4f} nats a token from the policy's: not the same model"
        fix = f"sample from --model in --dtype {str(format_of_weights).removeprefix('torch.')}"
        raise ServerError(f"{what}: {fix}")
    return {"sampler_difference": difference, "sampler_beyond": beyond}


@torch.no_grad()
def check_merged_policy_agrees_with_trained(
    policy: PolicyModel, rollout: Rollout, temperature: float, accelerator: Accelerator
) -> None:
    """Compare the policy in the form that samples, its adapter merged, with the form that trains, on these responses.

    Raises `InputError` if ‖log π_sampled − log π‖, the error, is above `LARGEST_LOSS` times ‖log π − log π_ref‖, what
    the policy has learnt, and above rounding. Nothing is raised for numbers that are not finite, which the update
    itself finds.
    """
    if not isinstance(policy.model, PeftModel):  # without an adapter there is one form
        return
    part = rollout.trim()
    inputs = (part.tokens, part.attention_mask, part.mask.shape[1], temperature)
    trained, _ = policy(*inputs)
    with merged_adapter(policy.model):
        sampled, _ = policy(*inputs)

    sums = {
        "error": (sampled - trained)[part.mask].square().sum(),
        "change": (trained - part.ref_logprobs)[part.mask].square().sum(),
        "size": trained[part.mask].square().sum(),
    }
    sums = sum_over_processes(sums, accelerator)
    error = sums["error"] ** 0.5
    change = sums["change"] ** 0.5
    size = sums["size"] ** 0.5
    rounding = ROUNDING * torch.finfo(trained.dtype).eps * size
    if error > max(LARGEST_LOSS * change, rounding):
        share = math.inf
        if change:
            share = error / change
        what = f"the policy that samples is {share:.2f} of the policy's change away from the one that trains"
        fix = "give an adapter of other layers (--lora_target_modules all-linear)"
        raise InputError(f"the adapter of --sft, merged into the base: {what}: {fix}")
