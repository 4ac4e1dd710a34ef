"""The four roles of an update, as modules that answer exactly what an update asks (paper, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlhf_lite.models import load_policy, load_score_model, new_reward_model


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, L] positions that count attended tokens only, so left padding shifts nothing."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


class PolicyRole(nn.Module):
    """A causal LM asked for the log-probabilities of a response. Called as a whole, so wrappers (DDP) see the pass."""

    def __init__(self, model: PeftModel):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, attention_mask: Tensor, length: int, temperature: float = 1.0):
        """`(logprobs [B, T], entropy [B, T])` of the last `length` = T tokens of `tokens` [B, L], in float32, nats."""
        logits = self.model(
            input_ids=tokens,
            attention_mask=attention_mask,
            position_ids=position_ids(attention_mask),
            logits_to_keep=length + 1,
            use_cache=False,
        ).logits[:, :-1]
        log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
        entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
        return log_p.gather(-1, tokens[:, -length:, None]).squeeze(-1), entropy


class ScoreRole(nn.Module):
    """A score model asked for its score at every position."""

    def __init__(self, model: PeftModel):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, L] scores in float32: a reward model reads the one at the last response token, a critic V(s_t) at the
        token before action t."""
        classifier = self.model.get_base_model()
        hidden = getattr(classifier, classifier.base_model_prefix)(
            input_ids=tokens,
            attention_mask=attention_mask,
            position_ids=position_ids(attention_mask),
            use_cache=False,
        ).last_hidden_state
        return classifier.score(hidden.to(classifier.score.weight.dtype)).squeeze(-1).float()


@dataclass(frozen=True)
class Roles:
    """Policy and critic train; reference and reward model are frozen. All share one base."""

    policy: PolicyRole
    reference: PolicyRole
    reward: ScoreRole | None  # None where the reward is not a model
    critic: ScoreRole


def build_roles(base: PreTrainedModel, sft: str | Path, rm: str | Path | None, critic_init: str = "rm") -> Roles:
    """Roles from saved adapters (paper, Appendix B.2): SFT starts policy and reference, the reward model the critic.

    `critic_init="sft"`, or no reward model, starts the critic from the SFT adapter with a new head.
    """
    from_rm = rm is not None and critic_init == "rm"
    critic = load_score_model(base, rm, trainable=True) if from_rm else new_reward_model(base, sft)
    return Roles(
        policy=PolicyRole(load_policy(base, sft)),
        reference=PolicyRole(load_policy(base, sft, trainable=False)),
        reward=ScoreRole(load_score_model(base, rm)) if rm is not None else None,
        critic=ScoreRole(critic),
    )


def trainable(role: nn.Module) -> list[nn.Parameter]:
    """The parameters an optimizer gets, listed explicitly. Raises `RuntimeError` where there are none."""
    parameters = [p for p in role.parameters() if p.requires_grad]
    if not parameters:
        raise RuntimeError(f"{type(role).__name__} has no trainable parameters: its adapter is frozen")
    return parameters
