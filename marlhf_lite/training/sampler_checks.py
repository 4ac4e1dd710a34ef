"""Whether the policy that trains sampled the responses: checks of servers, and of a policy with its adapter merged."""

import math

import torch
from peft import PeftModel
from torch import Tensor, nn

from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.tied import LARGEST_LOSS
from marlhf_lite.training.distributed import sum_over_processes
from marlhf_lite.training.rollout import Rollout, is_remote, merged_adapter
from marlhf_lite.utils.errors import DifferentPolicy, InputError

# Largest mean of |log π of the server - log π of the trainer| in nats a token, by the number format of the trainer's
# pass. With SmolLM2, vLLM and transformers are 1e-5 apart in float32, and bfloat16 is 0.03 from float32; float16 rounds
# an eighth as much. An adapter that was ignored, of rank 16 with B drawn at a deviation of 0.01, was 0.055 away.
SAMPLED_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
ROUNDING = 100  # times the format's smallest step: sums of a forward pass in another order
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}  # mixed precision of accelerate -> format of the pass


def check_sampled(
    rollout: Rollout, logprobs: Tensor, model: nn.Module, accelerator=None, bound: float = 3.0
) -> dict[str, float]:
    """How far the log-probabilities that servers gave are from the policy's own [B, T]; nothing without servers.

    `sampler_difference` is the mean in nats a token, over all processes of `accelerator`, in whose precision the policy
    ran; `sampler_beyond` the share of tokens whose ratio trainer / server is above `bound` or below 1 / `bound`, since
    a mean hides tails. Raises `DifferentPolicy` where the mean is more than rounding: another policy sampled.
    """
    if rollout.sampled_logprobs is None:
        return {}
    difference, is_rounding = _sampler_difference(rollout, logprobs, model, accelerator)
    gaps = (logprobs.detach() - rollout.sampled_logprobs).abs()[rollout.mask]
    sums = {"beyond": (gaps > math.log(bound)).sum(), "tokens": rollout.mask.sum()}
    if accelerator is not None:
        sums = sum_over_processes(sums, accelerator)
    if not is_rounding:
        what = f"its log-probabilities are {difference:.4f} nats a token from the policy's: not the same model"
        dtype = str(next(model.parameters()).dtype).split(".")[1]
        raise DifferentPolicy(f"--vllm_url: {what}: serve the base of --model with --dtype {dtype}")
    return {"sampler_difference": difference, "sampler_beyond": float(sums["beyond"] / sums["tokens"])}


@torch.no_grad()
def check_servers(rollout: Rollout, policy: PolicyModel) -> None:
    """`check_sampled` outside of training, with a pass of its own; nothing if no server sampled."""
    if rollout.sampled_logprobs is not None:
        check_sampled(rollout, policy(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[0], policy)


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
    norms = {name: float(x) ** 0.5 for name, x in sum_over_processes(sums, trainer.accelerator).items()}
    rounding = ROUNDING * torch.finfo(trained.dtype).eps * norms["size"]
    if norms["error"] > max(LARGEST_LOSS * norms["change"], rounding):
        share = norms["error"] / norms["change"] if norms["change"] else math.inf
        what = f"the policy that samples is {share:.2f} of the policy's change away from the one that trains"
        fix = "give an adapter of other layers (--lora_target_modules all-linear)"
        raise InputError(f"the adapter of --sft, merged into the base: {what}: {fix}")


def _sampler_difference(rollout: Rollout, logprobs: Tensor, model: nn.Module, accelerator) -> tuple[float, bool]:
    """The mean of |log π of the sampler - log π| in nats a token, and whether it is no more than rounding."""
    gap = (logprobs.detach() - rollout.sampled_logprobs).abs()[rollout.mask].sum()
    sums, dtype = {"gap": gap, "tokens": rollout.mask.sum()}, next(model.parameters()).dtype
    ran_in = dtype
    if accelerator is not None:
        sums, ran_in = sum_over_processes(sums, accelerator), AUTOCAST.get(accelerator.mixed_precision, dtype)
    difference = float(sums["gap"] / sums["tokens"])
    # Weights are rounded, too.
    return difference, difference <= max(SAMPLED_TOLERANCE[dtype], SAMPLED_TOLERANCE[ran_in])
