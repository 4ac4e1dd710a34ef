"""The assignment "build it yourself" (docs/homework.md): MA-PPO's `update` in the single file, and its check.

Models are Gemmas of a few hundred weights, numbers and settings are new each time, and the library computes the right
results. The check compares what a call leaves: its metrics, and the weights of policy and critic.
"""

import ast
import copy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM, GemmaForSequenceClassification

from marlhf_lite.macro import (
    FixedNGram,
    gae,
    kl_rewards,
    macro_rewards,
    macro_values,
    policy_loss,
    value_loss,
)

WHOLE = Path(__file__).resolve().parents[1] / "examples" / "ma_ppo_single_file.py"
EMPTY = ("macro_actions", "gae", "update")  # what the student writes
POINTS = {"macro_actions": 2, "gae": 4, "PPO": 4, "MA-PPO": 6, "several steps": 4}
# tokens in a macro action, EPOCHS
UPDATES = {"PPO": (1, 1), "MA-PPO": (3, 1), "several steps": (3, 4)}
SETTINGS = {
    "BETA": 0.3,
    "GAMMA": 0.9,
    "LAMBDA": 0.8,
    "EPSILON": 0.1,
    "VALUE_RANGE": 0.1,
    "MAX_GRAD_NORM": 1e6,
}
TINY = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "head_dim": 4,
}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
# of gradient descent: large, so that a second step finds ratios and values outside their clip
# ranges
RATE = 0.3


def starter(whole: str) -> str:
    """Return the text of the single file with the bodies of `EMPTY` taken out; docstrings stay."""
    lines = whole.splitlines(keepends=True)
    functions = [node for node in ast.parse(whole).body if getattr(node, "name", "") in EMPTY]
    for node in sorted(functions, key=lambda node: -node.lineno):
        lines[node.body[0].end_lineno : node.end_lineno] = [
            '    raise NotImplementedError("yours to write")\n'
        ]
    return "".join(lines)


class Setting(NamedTuple):
    """Arguments of one update; no two models share weights."""

    policy: nn.Module
    critic: nn.Module
    reference: nn.Module
    rm: nn.Module
    experience: tuple[Tensor, Tensor, Tensor]  # tokens [B, P+T], attention [B, P+T], mask [B, T]

    def logprobs(self, model: nn.Module) -> Tensor:
        """log π of the response tokens [B, T]."""
        tokens, _, mask = self.experience
        logits = self._asked(model).logits[:, -mask.shape[1] - 1 : -1]
        return logits.log_softmax(-1).gather(2, tokens[:, -mask.shape[1] :, None])[..., 0] * mask

    def values(self) -> Tensor:
        """The critic's values before the response tokens [B, T]."""
        return (
            self._scores(self.critic)[:, -self.experience[2].shape[1] - 1 : -1] * self.experience[2]
        )

    def score(self) -> Tensor:
        """The reward model's number at the last token of each response [B]."""
        mask = self.experience[2]
        return self._scores(self.rm)[:, -mask.shape[1] :].gather(1, mask.sum(1, keepdim=True) - 1)[
            :, 0
        ]

    def _asked(self, model: nn.Module) -> Any:
        tokens, attention, _ = self.experience
        return model(tokens, attention, position_ids=(attention.cumsum(1) - 1).clamp(min=0))

    def _scores(self, model: nn.Module) -> Tensor:
        tokens, attention, _ = self.experience
        places = (attention.cumsum(1) - 1).clamp(min=0)
        return model.score(model.model(tokens, attention, position_ids=places).last_hidden_state)[
            ..., 0
        ]


def draw_setting(draw: torch.Generator) -> Setting:
    """Four models, and three responses of 1 to 7 tokens after prompts of 1 to 3."""
    kinds = (
        GemmaForCausalLM,
        GemmaForSequenceClassification,
        GemmaForCausalLM,
        GemmaForSequenceClassification,
    )
    models = [kind(GemmaConfig(**TINY, num_labels=1)) for kind in kinds]
    for parameter in (p for model in models for p in model.parameters()):
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=draw)
    mask = torch.arange(7) < torch.tensor(
        [[7], [5], [int(torch.randint(1, 5, (), generator=draw))]]
    )
    asked = torch.arange(3) >= torch.randint(0, 3, (3, 1), generator=draw)
    attention = torch.cat([asked, mask], 1).long()
    tokens = torch.randint(1, 16, attention.shape, generator=draw) * attention
    return Setting(*models, (tokens, attention, mask))


def right_update(one: Setting, n: int, epochs: int) -> dict[str, Tensor]:
    """Update policy and critic of a setting; return what the student's update must leave."""
    mask, (beta, gamma, lam, epsilon, limit, _) = one.experience[2], SETTINGS.values()
    with torch.no_grad():
        old, ref, old_values, score = (
            one.logprobs(one.policy),
            one.logprobs(one.reference),
            one.values(),
            one.score(),
        )
        macro = FixedNGram(n)(mask)
        rewards = macro_rewards(kl_rewards(old, ref, mask, beta), score, macro)
        advantages, returns = gae(rewards, macro_values(old_values, macro), macro.mask, gamma, lam)
    learners = [*one.policy.parameters(), *one.critic.parameters()]
    for _ in range(epochs):
        policy, _ = policy_loss(one.logprobs(one.policy), old, advantages, macro, clip=epsilon)
        value, _ = value_loss(one.values(), old_values, returns, macro, clip=limit)
        slopes = torch.autograd.grad(policy + value, learners, allow_unused=True)
        for parameter, slope in zip(learners, slopes, strict=True):
            parameter.data -= 0 if slope is None else RATE * slope
    means = {
        "score": score.mean(),
        "kl": (old - ref).sum(1).mean(),
        "tokens": mask.sum(1).float().mean(),
    }
    return means | {"policy_loss": policy.detach(), "value_loss": value.detach()} | weights(one)


def weights(one: Setting) -> dict[str, Tensor]:
    """All weights of each model, as one vector."""
    models = ("policy", "critic", "reference", "rm")
    return {
        f"weights of {x}": nn.utils.parameters_to_vector(getattr(one, x).parameters()).detach()
        for x in models
    }


def update_fault(answers: ModuleType, n: int, epochs: int, draw: torch.Generator) -> str:
    """Return what is wrong after the student's update, or an empty text."""
    one = draw_setting(draw)
    mine = Setting(*(copy.deepcopy(model) for model in one[:4]), one.experience)
    vars(answers).update(SETTINGS | {"EPOCHS": epochs})
    optimizer = torch.optim.SGD(
        [{"params": [*x.parameters()], "lr": RATE} for x in (mine.policy, mine.critic)]
    )
    right, call = right_update(one, n, epochs), f"update with n = {n} and EPOCHS = {epochs}"
    try:
        metrics = answers.update(*mine[:4], optimizer, mine.experience, n)
        found = {
            name: torch.as_tensor(metrics[name]) for name in right if " " not in name
        } | weights(mine)
    except Exception as error:
        return f"{call} ends with {type(error).__name__}: {error}"
    for name, value in right.items():
        if not torch.allclose(found[name].double(), value.double(), rtol=1e-3, atol=1e-4):
            told = f": {value.item():.4f}, not {found[name].item():.4f}" if value.dim() == 0 else ""
            return f"{call} gets the {name} wrong{told}"
    return ""


def cut_fault(answers: ModuleType, draw: torch.Generator) -> str:
    """Return what is wrong with the student's macro actions, or an empty text."""
    n, more = (int(torch.randint(1, 7, (), generator=draw)) for _ in range(2))
    length = n + more  # more than one macro action, or another n would cut alike
    right = [t // n for t in range(length)]
    try:
        found = answers.macro_actions(torch.ones(2, length, dtype=torch.bool), n)
        return (
            ""
            if found.tolist() == [right] * 2
            else f"n = {n}: two rows of {right}, not {found.tolist()}"
        )
    except Exception as error:
        return f"macro_actions ends with {type(error).__name__}: {error}"


def gae_fault(answers: ModuleType, draw: torch.Generator) -> str:
    """Return what is wrong with the student's GAE, or an empty text."""
    rewards, values = torch.randn(2, 2, 4, generator=draw)
    vars(answers).update(SETTINGS)
    right = gae(
        rewards, values, torch.ones(2, 4, dtype=torch.bool), SETTINGS["GAMMA"], SETTINGS["LAMBDA"]
    )
    try:
        for name, found, wanted in zip(
            ("advantages", "returns"), answers.gae(rewards, values), right, strict=True
        ):
            if not torch.allclose(found, wanted, atol=1e-4):
                return f"{name} of R = {rewards.tolist()}, V = {values.tolist()}: {wanted.tolist()}"
        return ""
    except Exception as error:
        return f"gae ends with {type(error).__name__}: {error}"


def grade(answers: ModuleType, cases: int = 5) -> dict[str, str]:
    """Return the last error of each part, or an empty text; `answers` is the student's file as a module.

    An update is wrong in two cases at least: in one, rounding may move a ratio over the bound of its clip range.
    """
    draw = torch.Generator()
    draw.seed()
    checks = {
        "macro_actions": partial(cut_fault, answers, draw),
        "gae": partial(gae_fault, answers, draw),
    }
    checks |= {
        name: partial(update_fault, answers, *sizes, draw) for name, sizes in UPDATES.items()
    }
    found = {
        name: [fault for _ in range(cases) if (fault := check())] for name, check in checks.items()
    }
    return {
        name: faults[-1] if len(faults) > (name in UPDATES) else ""
        for name, faults in found.items()
    }
