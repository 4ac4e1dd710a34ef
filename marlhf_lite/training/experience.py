"""The data of an update: scored and segmented responses, the models' outputs on them, and the advantages."""

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
    # the units of GAE and losses: the macro actions, or single tokens (`--objective sae`)
    steps: MacroActions

    def __len__(self) -> int:
        return len(self.rollout)

    def select(self, rows: Tensor | slice) -> "Batch":
        """Select some of the responses."""
        return Batch(
            self.rollout.select(rows), self.macro_actions.select(rows), self.steps.select(rows)
        )


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of policy and critic on a batch, each [B, T] in float32, 0 on padding."""

    logprobs: Tensor  # log π(a_t | s_t), in nats
    entropy: Tensor  # of π(· | s_t), in nats; recorded only, without gradient
    values: Tensor  # V(s_t)

    @classmethod
    def concatenate(cls, parts: Sequence["ModelOutputs"]) -> "ModelOutputs":
        """Join those of all micro-batches."""
        return cls(
            logprobs=torch.cat([part.logprobs for part in parts]),
            entropy=torch.cat([part.entropy for part in parts]),
            values=torch.cat([part.values for part in parts]),
        )


@dataclass(frozen=True)
class Experience:
    """Outputs under the policy that sampled, and the advantages that follow from them; no gradient."""

    logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T]
    values: Tensor  # [B, T]
    advantages: Tensor  # [B, S] Â_τ of each macro action, 0 on padding
    returns: Tensor  # [B, S] Q̂_τ = Â_τ + V(ω_τ)

    def select(self, rows: Tensor | slice) -> "Experience":
        """Select those of some responses."""
        return Experience(**{name: x[rows] for name, x in vars(self).items()})

    @classmethod
    def concatenate(cls, parts: Sequence["Experience"]) -> "Experience":
        """Join those of all micro-batches."""
        return cls(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])}
        )
