"""The assignment "build it yourself" (docs/homework.md): MA-PPO's `update` in the single file, and its check.

Models are Gemmas of a few hundred weights, numbers and settings are new each time, and the library computes the right
results. The check compares what a call leaves: its metrics, and the weights of policy and critic.
"""

import ast
import copy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

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
# part -> tokens in a macro action, and EPOCHS
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
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
# The learning rate of gradient descent. It is large, so that a second step finds ratios and values outside their clip
# ranges.
RATE = 0.3


def starter(whole: str) -> str:
    """Return the text of the single file with the bodies of `EMPTY` taken out; docstrings stay."""
    lines = whole.splitlines(keepends=True)
    functions = [node for node in ast.parse(whole).body if getattr(node, "name", "") in EMPTY]
    # The last function first, so that the line numbers of those before it stay right.
    for function in reversed(functions):
        docstring = function.body[0]
        # Lines are counted from 1 and items of a list from 0, so this begins with the line after the docstring.
        body_without_docstring = slice(docstring.end_lineno, function.end_lineno)
        lines[body_without_docstring] = ['    raise NotImplementedError("yours to write")\n']
    return "".join(lines)


class Setting(NamedTuple):
    """Arguments of one update; no two models share weights."""

    policy: nn.Module
    critic: nn.Module
    reference: nn.Module
    rm: nn.Module
    experience: tuple[Tensor, Tensor, Tensor]  # tokens [B, P+T], attention [B, P+T], mask [B, T]

    def logprobs(self, model: nn.Module) -> Tensor:
        """log π of the response tokens [B, T]; 0 on padding."""
        tokens, attention, mask = self.experience
        T = mask.shape[1]
        output = model(tokens, attention, position_ids=self._positions())
        logits = output.logits[:, -T - 1 : -1]  # the logits at a position predict the next token
        return logits.log_softmax(-1).gather(2, tokens[:, -T:, None])[..., 0] * mask

    def values(self) -> Tensor:
        """The critic's values of the states before the response tokens [B, T]; 0 on padding."""
        mask = self.experience[2]
        T = mask.shape[1]
        # The state before a token is read at the position before it.
        return self._scores(self.critic)[:, -T - 1 : -1] * mask

    def score(self) -> Tensor:
        """The reward model's number at the last token of each response [B]."""
        mask = self.experience[2]
        of_response = self._scores(self.rm)[:, -mask.shape[1] :]
        last_token = mask.sum(1, keepdim=True) - 1
        return of_response.gather(1, last_token)[:, 0]

    def _positions(self) -> Tensor:
        """[B, P+T] the position of each token, from 0 at the first token that is not padding."""
        attention = self.experience[1]
        return (attention.cumsum(1) - 1).clamp(min=0)

    def _scores(self, model: nn.Module) -> Tensor:
        """[B, P+T] what the model's scalar head says at each token."""
        tokens, attention, _ = self.experience
        output = model.model(tokens, attention, position_ids=self._positions())
        return model.score(output.last_hidden_state)[..., 0]


def draw_setting(draw: torch.Generator) -> Setting:
    """Return a setting with four random models, and with three responses of 1 to 7 tokens after prompts of 1 to 3."""
    kinds = (
        GemmaForCausalLM,
        GemmaForSequenceClassification,
        GemmaForCausalLM,
        GemmaForSequenceClassification,
    )
    models = [kind(GemmaConfig(**TINY, num_labels=1)) for kind in kinds]
    for model in models:
        for parameter in model.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=draw)
    shortest = int(torch.randint(1, 5, (), generator=draw))
    mask = torch.arange(7) < torch.tensor([[7], [5], [shortest]])
    in_prompt = torch.arange(3) >= torch.randint(0, 3, (3, 1), generator=draw)  # padded on the left
    attention = torch.cat([in_prompt, mask], 1).long()
    # Any token of the vocabulary of 16 but the padding token, which is 0 and stands where the attention is 0.
    tokens = torch.randint(1, 16, attention.shape, generator=draw) * attention
    return Setting(*models, (tokens, attention, mask))


def right_update(setting: Setting, n: int, epochs: int) -> dict[str, Tensor]:
    """Update the setting's policy and critic with the library, and return what the student's update must leave.

    This is a dict with the metrics by name, and with the models' `weights` after the update. n: tokens in a macro
    action; epochs: steps of gradient descent on the three responses.
    """
    mask = setting.experience[2]
    # 1. Before the first step: rewards, advantages and returns of macro actions.
    with torch.no_grad():
        old = setting.logprobs(setting.policy)
        reference = setting.logprobs(setting.reference)
        old_values = setting.values()
        score = setting.score()
        macro = FixedNGram(n)(mask)
        penalties = kl_rewards(old, reference, mask, SETTINGS["BETA"])
        rewards = macro_rewards(penalties, score, macro)
        pooled = macro_values(old_values, macro)
        advantages, returns = gae(
            rewards, pooled, macro.mask, SETTINGS["GAMMA"], SETTINGS["LAMBDA"]
        )
    # 2. Steps of gradient descent on the sum of both losses.
    learners = [*setting.policy.parameters(), *setting.critic.parameters()]
    for _ in range(epochs):
        new = setting.logprobs(setting.policy)
        loss_of_policy, _ = policy_loss(new, old, advantages, macro, clip=SETTINGS["EPSILON"])
        loss_of_values, _ = value_loss(
            setting.values(), old_values, returns, macro, clip=SETTINGS["VALUE_RANGE"]
        )
        gradients = torch.autograd.grad(
            loss_of_policy + loss_of_values, learners, allow_unused=True
        )
        for parameter, gradient in zip(learners, gradients, strict=True):
            if gradient is not None:  # None: neither loss depends on this parameter
                parameter.data -= RATE * gradient
    # 3. The metrics; the losses are those of the last step.
    metrics = {
        "score": score.mean(),
        "kl": (old - reference).sum(1).mean(),
        "tokens": mask.sum(1).float().mean(),
        "policy_loss": loss_of_policy.detach(),
        "value_loss": loss_of_values.detach(),
    }
    return metrics | weights(setting)


def weights(setting: Setting) -> dict[str, Tensor]:
    """Return all weights of each model as one vector, by a name such as `weights of policy`."""
    vectors = {}
    for name in ("policy", "critic", "reference", "rm"):
        parameters = getattr(setting, name).parameters()
        vectors[f"weights of {name}"] = nn.utils.parameters_to_vector(parameters).detach()
    return vectors


def update_fault(answers: ModuleType, n: int, epochs: int, draw: torch.Generator) -> str:
    """Return what is wrong after the student's update, or an empty text.

    answers: the student's file as a module; n: tokens in a macro action; epochs: steps of gradient descent.
    """
    setting = draw_setting(draw)
    # Both updates change the weights, so the student's gets copies of the models.
    copies = [copy.deepcopy(model) for model in setting[:4]]
    students = Setting(*copies, setting.experience)
    # The constants at the top of the student's file get other values.
    vars(answers).update(SETTINGS | {"EPOCHS": epochs})
    groups = [
        {"params": list(model.parameters()), "lr": RATE}
        for model in (students.policy, students.critic)
    ]
    optimizer = torch.optim.SGD(groups)
    right = right_update(setting, n, epochs)
    call = f"update with n = {n} and EPOCHS = {epochs}"
    try:
        metrics = answers.update(*students[:4], optimizer, students.experience, n)
        found = weights(students)
        for name in right:
            if name not in found:  # a metric
                found[name] = torch.as_tensor(metrics[name])
    except Exception as error:
        return f"{call} ends with {type(error).__name__}: {error}"
    for name, value in right.items():
        if not torch.allclose(found[name].double(), value.double(), rtol=1e-3, atol=1e-4):
            is_number = value.dim() == 0
            # Weights are too many to print.
            told = f": {value.item():.4f}, not {found[name].item():.4f}" if is_number else ""
            return f"{call} gets the {name} wrong{told}"
    return ""


def cut_fault(answers: ModuleType, draw: torch.Generator) -> str:
    """Return what is wrong with the student's macro actions, or an empty text."""
    n = int(torch.randint(1, 7, (), generator=draw))
    tokens_after_first_action = int(torch.randint(1, 7, (), generator=draw))
    # With a single macro action, a larger n would cut the response in the same way.
    length = n + tokens_after_first_action
    right = [t // n for t in range(length)]
    try:
        found = answers.macro_actions(torch.ones(2, length, dtype=torch.bool), n)
        if found.tolist() == [right, right]:
            return ""
        return f"n = {n}: two rows of {right}, not {found.tolist()}"
    except Exception as error:
        return f"macro_actions ends with {type(error).__name__}: {error}"


def gae_fault(answers: ModuleType, draw: torch.Generator) -> str:
    """Return what is wrong with the student's GAE, or an empty text."""
    rewards, values = torch.randn(2, 2, 4, generator=draw)  # of two responses of four macro actions
    vars(answers).update(SETTINGS)
    mask = torch.ones(2, 4, dtype=torch.bool)
    right = gae(rewards, values, mask, SETTINGS["GAMMA"], SETTINGS["LAMBDA"])
    try:
        results = zip(("advantages", "returns"), answers.gae(rewards, values), right, strict=True)
        for name, found, wanted in results:
            if not torch.allclose(found, wanted, atol=1e-4):
                return f"{name} of R = {rewards.tolist()}, V = {values.tolist()}: {wanted.tolist()}"
        return ""
    except Exception as error:
        return f"gae ends with {type(error).__name__}: {error}"


def grade(answers: ModuleType, cases: int = 5) -> dict[str, str]:
    """Return the last error of each part, or an empty text; `answers` is the student's file as a module.

    An update counts as wrong if it is wrong in two cases or more. In a single case, rounding may have moved a ratio
    over the bound of its clip range, although the update is right.
    """
    draw = torch.Generator()
    draw.seed()  # a random seed, so that each call draws other numbers
    checks = {
        "macro_actions": partial(cut_fault, answers, draw),
        "gae": partial(gae_fault, answers, draw),
    }
    for name, (n, epochs) in UPDATES.items():
        checks[name] = partial(update_fault, answers, n, epochs, draw)
    last_errors = {}
    for name, check in checks.items():
        results = [check() for _ in range(cases)]
        errors = [error for error in results if error]
        allowed = 1 if name in UPDATES else 0  # errors that cost no points
        last_errors[name] = errors[-1] if len(errors) > allowed else ""
    return last_errors
