"""AdamW and the learning-rate schedule of PPO, RLOO and GRPO, and the scale of the loss in float16."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from marlhf_lite.config.method import PPOTrainerConfig, RolloutConfig

HALF_LOSS_SCALE = 2.0**12  # multiplies the loss, and divides the gradients of the weights


def make_optimizer(
    parameters: Mapping[str, Sequence[nn.Parameter]],
    rates: Mapping[str, float],
    config: RolloutConfig,
) -> torch.optim.AdamW:
    """AdamW over the parameters of each role, with the role's learning rate; its groups carry the role's name.

    Only matrices have weight decay, as in transformers and in the released code; the vectors (norms and biases) have
    none. So a role that has both gets two groups, the vectors first, as in stored checkpoints. Without weight decay one
    group for each role is enough.
    """
    groups = []
    for role, weights in parameters.items():
        common = {"name": role, "lr": rates[role]}
        # The last group has all weights, unless the vectors get a separate group.
        in_last_group = list(weights)
        vectors = [weight for weight in weights if weight.ndim < 2]
        if config.weight_decay and vectors:
            groups.append({"params": vectors, "weight_decay": 0.0} | common)
            in_last_group = [weight for weight in weights if weight.ndim > 1]
        groups.append({"params": in_last_group, "weight_decay": config.weight_decay} | common)
    return torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), fused=True)


def loss_scale(model: nn.Module) -> float:
    """Return `HALF_LOSS_SCALE` if weights are float16, or have 4 bits and are used in float16; else 1.

    In float16 the gradients of single tokens are below the smallest number, and would become 0 without a scale.
    """
    formats_of_weights = {weight.dtype for weight in model.parameters()}
    # Layers of 4 bits say in which format they compute.
    formats_of_layers = {getattr(layer, "compute_dtype", None) for layer in model.modules()}
    if torch.float16 in formats_of_weights | formats_of_layers:
        return HALF_LOSS_SCALE
    return 1.0


def set_learning_rates(
    optimizer: torch.optim.Optimizer,
    config: PPOTrainerConfig,
    updates_done: int,
    total_updates: int,
) -> None:
    """Set the learning rates of PPO's next update: each role's schedule counts the updates in which the role moves.

    The critic counts all of them, so a critic that learns alone first has its full rate when the policy begins; the
    policy counts from the first update after `critic_warmup`, so its own warm-up is the same with and without it. It
    does not matter how many optimizer steps an update has.
    """
    peaks = {
        "policy": config.policy_learning_rate,
        "critic": config.critic_learning_rate,
    }
    for group in optimizer.param_groups:
        role = group["name"]
        updates_of_waiting = config.critic_warmup if role == "policy" else 0
        # While the policy waits, it has no gradient and its learning rate does not matter: it is that of update 0.
        updates_of_role = max(updates_done - updates_of_waiting, 0)
        share = learning_rate_share(config, updates_of_role, total_updates - updates_of_waiting)
        group["lr"] = peaks[role] * share


def learning_rate_share(config: RolloutConfig, update: int, total: int) -> float:
    """Return which share of the peak learning rate an update has.

    `update` is counted from 0, and `total` is the number of updates in which the role trains. The share rises linearly
    over the warm-up, then stays, or falls to 0 after the last update, linearly or as half a cosine.
    """
    place = update + 1  # counted from 1: the first update has a rate above 0
    warmup = config.warmup_updates
    if warmup < 1:  # a share of all updates
        warmup = warmup * total
    warmup = max(warmup, 1)  # without a warm-up the first update has the peak
    if place < warmup:
        return place / warmup

    # From 0 at the end of the warm-up to 1 after the last update, so that the last one still trains. (The inner max is
    # for a warm-up that is longer than the training.)
    decay_done = (place - warmup) / max(total + 1 - warmup, 1)
    if config.rl_lr_scheduler_type == "linear":
        return 1.0 - decay_done
    if config.rl_lr_scheduler_type == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * decay_done))
    return 1.0
