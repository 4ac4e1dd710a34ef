"""AdamW and the learning-rate schedule of PPO, RLOO and GRPO, and the scale of the loss in float16."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from marlhf_lite.config.method import RolloutConfig

HALF_LOSS_SCALE = 2.0**12  # multiplies the loss, and divides the gradients of the weights


def make_optimizer(
    parameters: Mapping[str, Sequence[nn.Parameter]],
    rates: Mapping[str, float],
    config: RolloutConfig,
) -> torch.optim.AdamW:
    """AdamW over the parameters of each role, with the role's learning rate; its groups carry the role's name.

    Only matrices have weight decay, as in transformers and in the released code; norms and biases have none.
    """
    groups = []
    for role, params in parameters.items():
        matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
        if config.weight_decay and vectors:
            groups.append({"params": vectors, "name": role, "lr": rates[role], "weight_decay": 0.0})
            params = matrices
        groups.append(
            {"params": params, "name": role, "lr": rates[role], "weight_decay": config.weight_decay}
        )
    return torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), fused=True)


def loss_scale(model: nn.Module) -> float:
    """Return `HALF_LOSS_SCALE` if weights are float16, or have 4 bits and are used in float16; else 1.

    Gradients of single tokens are below the smallest number of float16 and would become 0.
    """
    formats = {p.dtype for p in model.parameters()} | {
        getattr(m, "compute_dtype", None) for m in model.modules()
    }
    return HALF_LOSS_SCALE if torch.float16 in formats else 1.0


def learning_rate_share(config: RolloutConfig, update: int, total: int) -> float:
    """Return the share of the peak learning rate in `update`, counted from 0, of the `total` in which a role trains.

    It rises linearly over the warm-up, then stays, or falls to 0 after the last update, linearly or as half a cosine.
    """
    warmup = max(
        config.warmup_updates if config.warmup_updates >= 1 else config.warmup_updates * total, 1
    )
    if update + 1 < warmup:
        return (update + 1) / warmup
    done = (update + 1 - warmup) / max(total + 1 - warmup, 1)
    shares = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }
    return shares[config.rl_lr_scheduler_type]
