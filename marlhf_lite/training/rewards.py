"""Rewards: functions that give each response of a rollout one number."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from marlhf_lite.config.method import RolloutConfig
from marlhf_lite.models.actor_critic import ScalarHeadModel
from marlhf_lite.tasks.prompts import RowColumns
from marlhf_lite.training.distributed import is_sharded
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError, one_line
from marlhf_lite.utils.less_memory import in_batches


class ModelReward:
    """A reward model's score at the last response token, read on the very tokens that were sampled.

    `micro_batch_size` responses are scored at a time; if memory ends, half as many from then on. A model with another
    tokenizer scores the rollout that `read` makes of a rollout.
    """

    def __init__(
        self, model: ScalarHeadModel, micro_batch_size: int = 64, read: Callable | None = None
    ):
        self.model, self.micro_batch_size, self.read = model, micro_batch_size, read

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores, float32."""
        self.model.eval()
        rollout = self.read(rollout) if self.read else rollout
        scores, self.micro_batch_size = in_batches(
            partial(self._score_rows, rollout),
            len(rollout),
            self.micro_batch_size,
            alone=not is_sharded(self.model),
        )
        return torch.cat(scores)

    def _score_rows(self, rollout: Rollout, rows: slice) -> Tensor:
        part, device = rollout.select(rows).trim(), next(self.model.parameters()).device
        # Only scores from the earliest end on are read.
        inputs = (
            part.tokens.to(device),
            part.attention_mask.to(device),
            part.mask.shape[1] - int(part.ends.min()),
        )
        return part.at_last_token(self.model(*inputs))


class FunctionReward:
    """Any function of texts: `function(prompts, responses) -> scores`, one finite number each.

    Its further arguments name other columns of the rows, which it gets as lists; `**row` stands for all of them.
    If an environment answers in between, a response is what the policy said, a line for each turn, and an argument
    `turns` gets the turns of each dialogue: a list of dicts with the policy's `response`, the environment's
    `observation`, if there is one, and `reward`.
    """

    def __init__(self, function: Callable[[list[str], list[str]], Sequence[float]], name: str = ""):
        self.function, self.name = function, name or getattr(function, "__name__", "reward")

    def __call__(self, rollout: Rollout) -> Sequence[float]:
        """Call the function on copies of the texts. Raises `InputError` if it raises."""
        rollout = rollout.of_the_policy_alone()
        not_in_rows = () if rollout.turns is None else ("turns",)
        asked = RowColumns(self.function, 2, f"reward {self.name}", not_in_rows)
        columns = asked.arguments(rollout.prompts)
        if asked.takes_beside_row:
            columns["turns"] = copy.deepcopy(rollout.turns or [])
        try:
            scores = self.function([*map(str, rollout.prompts)], list(rollout.responses), **columns)
            return list(scores) if isinstance(scores, Iterator) else scores  # a generator runs here
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            reason = one_line(error)
            raise InputError(
                f"reward {self.name}: raised {reason}: fix it, then continue by --resume"
            ) from error

    def metrics(self) -> dict[str, float]:
        """Return the function's own metrics of the last responses, if it has any."""
        return getattr(self.function, "metrics", dict)()


@dataclass(frozen=True)
class EnvironmentReward:
    """The environment's rewards: PPO trains on those of the turns, and their sum is the score of a response."""

    name: str = "environment"

    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores."""
        if rollout.turn_rewards is None:
            raise InputError(f"reward {self.name}: no environment has answered these prompts")
        return rollout.turn_rewards.sum(1)


def score_responses(
    reward: Callable[[Rollout], Tensor | Sequence[float]], rollout: Rollout
) -> Tensor:
    """[B] scores in float32, on the rollout's device. Raises `InputError` unless they are B finite numbers."""
    return checked_scores(reward, rollout).float().to(rollout.tokens.device)


def checked_scores(
    reward: Callable[[Rollout], Tensor | Sequence[float]], rollout: Rollout
) -> Tensor:
    """[B] scores as the reward gives them, numbers in float64. Raises as `score_responses`.

    The reward gets a copy of the rollout, which it may sort or change, with the words of the policy alone.
    """
    scores, count = reward(rollout.of_the_policy_alone().copy()), len(rollout)
    source, fix = (
        f"reward {getattr(reward, 'name', '')}".strip(),
        "return one finite number per response, in a list",
    )
    try:
        if not isinstance(scores, Tensor):
            values = scores.tolist() if hasattr(scores, "tolist") else scores  # of numpy or pandas
            scores = torch.tensor(values, dtype=torch.float64)
        wrong = (~scores.float().isfinite()).nonzero()
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{source}: returned {scores!r:.200} ({error}): {fix}") from None
    if scores.shape != (count,):
        raise InputError(
            f"{source}: returned scores of shape {tuple(scores.shape)} for {count} responses: {fix}"
        )
    if len(wrong):
        row = int(wrong[0, 0])
        raise InputError(f"{source}: scores[{row}] is {scores[row].item()}: {fix}")
    return scores.detach()


def scores_for_training(rollout: Rollout, config: RolloutConfig) -> Tensor:
    """The scores for training, [B], or [B, K] of turns, float32, clipped to ±`score_clip` (released code: 2.5)."""
    scores = rollout.scores if rollout.turn_rewards is None else rollout.turn_rewards
    scores = scores.float()
    if not config.score_clip:
        return scores
    return scores.clamp(-config.score_clip, config.score_clip)
