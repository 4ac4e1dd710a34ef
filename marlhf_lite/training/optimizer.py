"""AdamW for PPO, RLOO and GRPO, and the learning-rate schedules of all stages: none begins at 0."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from marlhf_lite.config.method import RolloutConfig

HALF_LOSS_SCALE = 2.0**12  # what gradients are multiplied by where they start, and divided by where they arrive


def make_optimizer(
    parameters: Mapping[str, Sequence[nn.Parameter]], rates: Mapping[str, float], config: RolloutConfig
) -> torch.optim.AdamW:
    """AdamW over the parameters of each role, with the role's learning rate; its groups carry the role's name.

    Weight decay is for matrices alone, as in transformers and in the released code: not for norms and biases.
    """
    groups = []
    for role, params in parameters.items():
        matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
        if config.weight_decay and vectors:
            groups.append({"params": vectors, "name": role, "lr": rates[role], "weight_decay": 0.0})
            params = matrices
        groups.append({"params": params, "name": role, "lr": rates[role], "weight_decay": config.weight_decay})
    return torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), fused=True)


def loss_scale(model: nn.Module) -> float:
    """`HALF_LOSS_SCALE` where weights are float16, or of 4 bits and computed with in float16; else 1.

    Gradients of single tokens are below the smallest number of float16, and would become 0.
    """
    formats = {p.dtype for p in model.parameters()} | {getattr(m, "compute_dtype", None) for m in model.modules()}
    return HALF_LOSS_SCALE if torch.float16 in formats else 1.0


def learning_rate_share(config: RolloutConfig, update: int, total: int) -> float:
    """The share of the peak learning rate in an update of a role, which counts from 0, of `total` in which it moves.

    It rises linearly over the warm-up and stays, or falls to 0 behind the last update, linearly or as half a cosine.
    """
    warmup = max(config.warmup_updates if config.warmup_updates >= 1 else config.warmup_updates * total, 1)
    if update + 1 < warmup:
        return (update + 1) / warmup
    done = (update + 1 - warmup) / max(total + 1 - warmup, 1)
    shares = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return shares[config.rl_lr_scheduler_type]


class WarmUpAboveZero:
    """Makes a trainer of transformers begin its warm-up above 0, as `learning_rate_share` does.

    Its own begins at 0, so that a stage of one step would train nothing. Step s of N, from 0, here has the rate of step
    s + 1 of N + 1: the warm-up ends with the peak, and the decay ends at 0 behind the last step.
    """

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The schedule of `num_training_steps`; one that the trainer was given stays."""
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        self.args.warmup_steps = warmup = self.args.get_warmup_steps(num_training_steps)
        if not warmup:
            return super().create_scheduler(num_training_steps, optimizer)
        schedule = super().create_scheduler(num_training_steps + 1, optimizer)
        later = [lambda step, rate=rate: rate(step + 1) for rate in schedule.lr_lambdas]
        self.lr_scheduler = LambdaLR(schedule.optimizer, later)
        return self.lr_scheduler
