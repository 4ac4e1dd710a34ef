"""Rewards: anything that gives each response of a rollout one number."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from marlhf_lite.models.actor_critic import ScalarHeadModel
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError


class ModelReward:
    """A reward model's score at the last response token, read on the very tokens that were sampled."""

    def __init__(self, role: ScalarHeadModel, micro_batch_size: int = 64):
        self.role, self.micro_batch_size = role, micro_batch_size

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores, float32."""
        self.role.eval()
        device, scores = next(self.role.parameters()).device, []
        for rows in torch.arange(len(rollout)).split(self.micro_batch_size):
            part = rollout.select(rows).trim()
            everywhere = self.role(part.tokens.to(device), part.attention_mask.to(device))
            scores.append(part.at_last_token(everywhere))
        return torch.cat(scores)


class FunctionReward:
    """Any function of texts: `function(prompts, responses) -> scores`. It must return one finite number each."""

    def __init__(self, function: Callable[[list[str], list[str]], Sequence[float]], name: str = ""):
        self.function, self.name = function, name or getattr(function, "__name__", "reward")

    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores, float32. Raises `InputError` where the function raises, or returns a wrong number of scores or
        one that is not a finite number."""
        scores = self._call(rollout)
        if len(scores) != len(rollout):
            raise InputError(f"reward {self.name}: {len(scores)} scores for {len(rollout)} responses: return one each")
        bad = next((i for i, s in enumerate(scores) if not _finite(s)), None)
        if bad is not None:
            raise InputError(f"reward {self.name}: score {scores[bad]} for response {bad}: return a finite number")
        return torch.tensor([float(s) for s in scores], dtype=torch.float32, device=rollout.tokens.device)

    def _call(self, rollout: Rollout) -> list:
        try:
            given = self.function(rollout.prompts, rollout.responses)
            if isinstance(given, Iterable):
                return list(given)  # of a generator, the body runs here
        except Exception as error:  # anybody's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(f"reward {self.name}: raised {reason}: mend it, then go on with --resume") from error
        raise InputError(f"reward {self.name}: returned {given!r}: return one number a response")


def _finite(score) -> bool:
    """Is it a number that float32 can hold?"""
    try:
        return not isinstance(score, str) and abs(float(score)) <= torch.finfo(torch.float32).max
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def text_reward(kind: str, task: Task) -> Callable | None:
    """The function of texts that `--reward` names; None for rm. Raises `InputError` where there is none."""
    if kind == "rm":
        return None
    if kind != "gold":
        return import_function(kind)
    if task.gold is None:
        raise InputError(f"--reward gold: {task.name} has no known truth: give rm, or package.module:function")
    return task.gold


def import_function(name: str) -> Callable:
    """`package.module:function` as the function itself, from the current folder too. Raises `InputError` if not."""
    mend = "give rm, gold, or package.module:function"
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"--reward {name}: unknown: {mend}")
    if os.getcwd() not in sys.path:  # `marlhf` itself does not look there, `python -m` does
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"--reward {name}: cannot be imported ({reason}): {mend}") from None
    if not callable(function):
        raise InputError(f"--reward {name}: a {type(function).__name__}, not a function: {mend}")
    return function
