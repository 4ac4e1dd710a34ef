"""Judges that score each response by itself, so that order is nothing to them: a gold scorer, a reward model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from marlhf_lite.evaluation.agreement import verdicts_of_scores
from marlhf_lite.evaluation.judges.judge import Answer, Judge, Question
from marlhf_lite.evaluation.statistics import finite
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import from_texts
from marlhf_lite.utils.errors import InputError

Scorer = Callable[[list[str], list[str]], Sequence[float]]
_CHOICES = {"first": "A", "second": "B", "tie": "tie"}  # without an order the first is A
_SAMPLE = 4096  # numbers of each parameter that tell it from another


class ScoreJudge(Judge):
    """The response with the higher score wins; scores at most `tie_margin` apart are a tie.

    Args:
        scorer: (prompts, responses) to a finite number each, higher is better.
        name: of the judge.
        tie_margin: in the unit of the scores.
        batch_size: pairs per call.
        content: what the scores depend on, as `fingerprint` gives it. Without it stored verdicts are never reused,
            which suits a function: it is cheap, and may have been edited.

    Calling it raises `InputError` for a wrong number of scores or one that is not finite.
    """

    ordered = False

    def __init__(
        self, scorer: Scorer, name: str = "gold", tie_margin: float = 0.0, batch_size: int = 64, content: str = ""
    ):
        self.scorer, self.name, self.tie_margin, self.batch_size = scorer, name, tie_margin, batch_size
        self.content, self.free = content, not content

    def identity(self) -> dict:
        return {"kind": "score", "name": self.name, "content": self.content, "tie_margin": self.tie_margin}

    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        prompts = [question.pair.prompt for question in questions]
        scores = self.scorer(prompts * 2, [q.a for q in questions] + [q.b for q in questions])
        numbers = finite(f"scores of {self.name}", scores)
        if len(numbers) != 2 * len(questions):
            raise InputError(f"judge {self.name}: {len(numbers)} scores for {2 * len(questions)} responses: one each")
        a, b = numbers.reshape(2, -1).tolist()
        choices = [_CHOICES[winner] for winner in verdicts_of_scores(a, b, self.tie_margin)]
        return [Answer(c, {"A": {"score": x}, "B": {"score": y}}) for c, x, y in zip(choices, a, b, strict=True)]


def reward_judge(
    reward: ModelReward, tokenizer, limit: int, tie_margin: float = 0.0, batch_size: int = 16, name: str = "rm"
) -> ScoreJudge:
    """A reward model as a judge (paper, Table 1). Responses are cut at `limit` tokens, else read with their EOS."""

    def scorer(prompts: list[str], responses: list[str]) -> list[float]:
        return reward(from_texts(tokenizer, prompts, responses, limit)).tolist()

    return ScoreJudge(scorer, name, tie_margin, batch_size, f"{fingerprint(reward.role)}/{limit}")


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """A hash of a model's parameters by a sample of each, which differs after any training step worth the name."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        flat = value.detach().flatten()
        step = max(1, flat.numel() // _SAMPLE)
        numbers = flat[::step].float().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode() + numbers.numpy().tobytes())
    return digest.hexdigest()[:16]
