"""What policy and critic say about a batch of responses, and the advantages that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of policy and critic on a batch, each [B, T] in float32, 0 on padding."""

    logprobs: Tensor  # log π(a_t | s_t), in nats
    entropy: Tensor  # of π(· | s_t), in nats; recorded only, without gradient
    values: Tensor  # V(s_t)


@dataclass(frozen=True)
class OldOutputs:
    """Outputs under the policy that sampled, and the advantages that follow from them; no gradient."""

    logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T]
    values: Tensor  # [B, T]
    advantages: Tensor  # [B, S] Â_τ of each macro action, 0 on padding
    returns: Tensor  # [B, S] Q̂_τ = Â_τ + V(ω_τ)

    def select(self, rows: Tensor) -> OldOutputs:
        """Those of some responses."""
        return OldOutputs(*(x[rows] for x in vars(self).values()))

    @classmethod
    def concatenate(cls, parts: Sequence[OldOutputs]) -> OldOutputs:
        """Those of all micro-batches as one."""
        return cls(*(torch.cat(tensors) for tensors in zip(*(vars(part).values() for part in parts), strict=True)))
