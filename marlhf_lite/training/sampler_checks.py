"""Whether the policy that trains sampled the responses: checks of samplers, and of a policy with its adapter merged."""

import math

import torch
from peft import PeftModel
from torch import Tensor

from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.tied import LARGEST_LOSS
from marlhf_lite.training.distributed import sum_over_processes
from marlhf_lite.training.rollout import Rollout, is_remote, merged_adapter
from marlhf_lite.utils.errors import InputError, ServerError

# Largest mean of |log π of the sampler - log π of the trainer| in nats a token, by the number format of the trainer's
# pass. With SmolLM2, vLLM and transformers are 1e-5 apart in float32, and bfloat16 is 0.03 from float32; float16 rounds
# an eighth as much. An adapter that was ignored, of rank 16 with B drawn at a deviation of 0.01, was 0.055 away.
SAMPLED_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
ROUNDING = 100  # times the format's smallest step: sums of a forward pass in another order
# mixed precision of accelerate -> format of the pass
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


@torch.no_grad()
def check_sampled(
    rollout: Rollout, policy: PolicyModel, logprobs: Tensor | None = None, accelerator=None
) -> dict[str, float]:
    """How far the log-probabilities that a sampler gave are from the policy's own; {} if it gave none.

    `logprobs` [B, T] are the policy's, None: from a pass here. `sampler_difference` is the mean in nats a token, over
    all processes of `accelerator`, in whose precision the policy ran; `sampler_beyond` the share of tokens whose ratio
    policy / sampler is above 3 or below 1/3, since a mean hides tails. Raises `ServerError` if the mean is more than
    rounding: another policy sampled.
    """
    if rollout.sampled_logprobs is None:
        return {}
    if logprobs is None:
        logprobs = policy(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[0]
    gaps = (logprobs - rollout.sampled_logprobs).abs()[rollout.mask]
    sums = {"gap": gaps.sum(), "beyond": (gaps > math.log(3)).sum(), "tokens": rollout.mask.sum()}
    dtype = ran_in = next(policy.parameters()).dtype
    if accelerator is not None:
        sums, ran_in = (
            sum_over_processes(sums, accelerator),
            AUTOCAST.get(accelerator.mixed_precision, dtype),
        )
    difference, beyond = (float(sums[name] / sums["tokens"]) for name in ("gap", "beyond"))
    # weights are rounded, too
    if not difference <= max(SAMPLED_TOLERANCE[dtype], SAMPLED_TOLERANCE[ran_in]):
        what = f"the log-probabilities are {difference:.4f} nats a token from the policy's: not the same model"
        raise ServerError(
            f"{what}: sample from --model in --dtype {str(dtype).removeprefix('torch.')}"
        )
    return {"sampler_difference": difference, "sampler_beyond": beyond}


@torch.no_grad()
def check_forms(trainer, rollout: Rollout) -> None:
    """Compare the policy in the form that samples, its adapter merged, with the form that trains, on a micro-batch.

    Raises `InputError` if ‖log π_sampled − log π‖ / ‖log π − log π_ref‖ is above `LARGEST_LOSS`, and the error above
    rounding. What is not finite is left to the update; servers and policies without an adapter have one form.
    """
    policy, part = trainer.models.policy, rollout.select(slice(trainer.micro_batch_size)).trim()
    if not isinstance(policy.model, PeftModel) or is_remote(trainer.sampler):
        return
    inputs = (part.tokens, part.attention_mask, part.mask.shape[1], trainer.logprob_temperature)
    trained = policy(*inputs)[0]
    with merged_adapter(policy.model):
        sampled = policy(*inputs)[0]
    pairs = {"error": sampled - trained, "change": trained - part.ref_logprobs, "size": trained}
    sums = {name: x[part.mask].square().sum() for name, x in pairs.items()}
    norms = {
        name: float(x) ** 0.5 for name, x in sum_over_processes(sums, trainer.accelerator).items()
    }
    rounding = ROUNDING * torch.finfo(trained.dtype).eps * norms["size"]
    if norms["error"] > max(LARGEST_LOSS * norms["change"], rounding):
        share = norms["error"] / norms["change"] if norms["change"] else math.inf
        what = f"the policy that samples is {share:.2f} of the policy's change away from the one that trains"
        fix = "give an adapter of other layers (--lora_target_modules all-linear)"
        raise InputError(f"the adapter of --sft, merged into the base: {what}: {fix}")
