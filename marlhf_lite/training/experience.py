"""What an update works on: scored and segmented responses, what the models say of them, and what follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf_lite.macro import MacroActions
from marlhf_lite.training.rollout import Rollout


@dataclass(frozen=True)
class Batch:
    """B scored responses with their segmentation."""

    rollout: Rollout
    macro_actions: MacroActions
    steps: MacroActions  # what GAE and the losses count: the macro actions, or single tokens (`--objective sae`)

    def __len__(self) -> int:
        return len(self.rollout)

    def select(self, rows: Tensor | slice) -> "Batch":
        """Some of the responses."""
        return Batch(self.rollout.select(rows), self.macro_actions.select(rows), self.steps.select(rows))


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of policy and critic on a batch, each [B, T] in float32, 0 on padding."""

    logprobs: Tensor  # log π(a_t | s_t), in nats
    entropy: Tensor  # of π(· | s_t), in nats; recorded only, without gradient
    values: Tensor  # V(s_t)


@dataclass(frozen=True)
class Experience:
    """Outputs under the policy that sampled, and the advantages that follow from them; no gradient."""

    logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T]
    values: Tensor  # [B, T]
    advantages: Tensor  # [B, S] Â_τ of each macro action, 0 on padding
    returns: Tensor  # [B, S] Q̂_τ = Â_τ + V(ω_τ)

    def select(self, rows: Tensor | slice) -> "Experience":
        """Those of some responses."""
        return Experience(**{name: x[rows] for name, x in vars(self).items()})

    @classmethod
    def concatenate(cls, parts: Sequence["Experience"]) -> "Experience":
        """Those of all micro-batches as one."""
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})
