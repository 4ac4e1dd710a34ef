"""Rewards: anything that gives each response of a rollout one number."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from marlhf_lite.config.options import RolloutConfig
from marlhf_lite.models.actor_critic import ScalarHeadModel
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training.program_tests import TestReward
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError


class ModelReward:
    """A reward model's score at the last response token, read on the very tokens that were sampled."""

    def __init__(self, model: ScalarHeadModel, micro_batch_size: int = 64):
        self.model, self.micro_batch_size = model, micro_batch_size

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores, float32."""
        self.model.eval()
        device, scores = next(self.model.parameters()).device, []
        for rows in torch.arange(len(rollout)).split(self.micro_batch_size):
            part = rollout.select(rows).trim()
            per_token = self.model(part.tokens.to(device), part.attention_mask.to(device))
            scores.append(part.at_last_token(per_token))
        return torch.cat(scores)


class FunctionReward:
    """Any function of texts: `function(prompts, responses) -> scores`. It must return one finite number each."""

    def __init__(self, function: Callable[[list[str], list[str]], Sequence[float]], name: str = ""):
        self.function, self.name = function, name or getattr(function, "__name__", "reward")

    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores, float32.

        Raises `InputError` where the function raises, or returns a wrong number of scores or one that is not finite.
        """
        scores = self._call(rollout)
        if len(scores) != len(rollout):
            raise InputError(f"reward {self.name}: {len(scores)} scores for {len(rollout)} responses: return one each")
        wrong = next((i for i, score in enumerate(scores) if not _is_finite(score)), None)
        if wrong is not None:
            raise InputError(f"reward {self.name}: score {scores[wrong]} for response {wrong}: return a finite number")
        return torch.tensor([float(s) for s in scores], dtype=torch.float32, device=rollout.tokens.device)

    def metrics(self) -> dict[str, float]:
        """Return what the function tells of the last responses, where it has metrics."""
        return getattr(self.function, "metrics", dict)()

    def _call(self, rollout: Rollout) -> list:
        try:
            scores = self.function(rollout.prompts, rollout.responses)
            if isinstance(scores, Iterable):
                return list(scores)  # the body of a generator runs here
        except Exception as error:  # a user's function may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(f"reward {self.name}: raised {reason}: fix it, then go on with --resume") from error
        raise InputError(f"reward {self.name}: returned {scores!r}: return one number a response")


def _is_finite(score) -> bool:
    """Whether it is a number that float32 can hold."""
    try:
        return not isinstance(score, str) and abs(float(score)) <= torch.finfo(torch.float32).max
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def check_scores(rollout: Rollout) -> None:
    """Raises `InputError` where a reward gave something else than one finite score a response."""
    scores = rollout.scores
    if scores.shape != (len(rollout),):
        raise InputError(f"scores: expected shape ({len(rollout)},), got {tuple(scores.shape)}")
    if not scores.isfinite().all():
        wrong = int((~scores.isfinite()).nonzero()[0])
        raise InputError(f"scores: {scores[wrong].item()} for response {wrong}: rewards must be finite numbers")


def shape_scores(rollout: Rollout, config: RolloutConfig) -> Tensor:
    """[B] the scores that are trained on, float32: clipped, less a penalty for responses without EOS."""
    scores = rollout.scores.float()
    # The released code clips the reward model's score to ±2.5; 0 leaves it as it is.
    if config.score_clip:
        scores = scores.clamp(-config.score_clip, config.score_clip)
    return scores - config.missing_eos_penalty * (~rollout.ended).float()


# -- rewards by name --------------------------------------------------------------------------------------------------


def text_reward(kind: str, task: Task) -> Callable | None:
    """The function of texts that `--reward` names; None for rm. Raises `InputError` where there is none."""
    if kind == "rm":
        return None
    if kind in ("tests", "all_tests"):
        if task.tests is None:
            raise InputError(f"--reward {kind}: {task.name} has no unit tests: give rm, or package.module:function")
        return TestReward(task.tests, strict=kind == "all_tests")
    if kind != "gold":
        return import_function(kind)
    if task.gold is None:
        raise InputError(f"--reward gold: {task.name} has no gold score: give rm, or package.module:function")
    return task.gold


def import_function(name: str) -> Callable:
    """The function that `package.module:function` names, from the current folder too. Raises `InputError` if not."""
    fix = "give rm, gold, tests, all_tests, or package.module:function"
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"--reward {name}: unknown: {fix}")
    if os.getcwd() not in sys.path:  # `marlhf` itself does not look there, `python -m` does
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"--reward {name}: cannot be imported ({reason}): {fix}") from None
    if not callable(function):
        raise InputError(f"--reward {name}: a {type(function).__name__}, not a function: {fix}")
    return function
