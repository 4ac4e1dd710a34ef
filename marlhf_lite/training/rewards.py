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

    `micro_batch_size` responses are scored at a time; if memory ends, half as many from then on. If the model has
    another tokenizer than the policy, `read` turns a rollout into one of the same texts in that tokenizer's tokens.
    """

    def __init__(
        self,
        model: ScalarHeadModel,
        micro_batch_size: int = 64,
        read: Callable[[Rollout], Rollout] | None = None,
    ):
        self.model = model
        self.micro_batch_size = micro_batch_size
        self.read = read

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores, float32."""
        self.model.eval()
        if self.read:
            rollout = self.read(rollout)
        scores, self.micro_batch_size = in_batches(
            partial(self._score_rows, rollout),
            len(rollout),
            self.micro_batch_size,
            # Processes that shard the model gather each layer together: none can begin again by itself.
            no_process_waits=not is_sharded(self.model),
        )
        return torch.cat(scores)

    def _score_rows(self, rollout: Rollout, rows: slice) -> Tensor:
        device = next(self.model.parameters()).device
        part = rollout.select(rows).trim()
        # A response is scored at its end, so the scores from the earliest end on are enough.
        columns_after_earliest_end = part.mask.shape[1] - int(part.ends.min())
        scores = self.model(
            part.tokens.to(device), part.attention_mask.to(device), columns_after_earliest_end
        )
        return part.at_last_token(scores)


class FunctionReward:
    """Any function of texts: `function(prompts, responses) -> scores`, one finite number each.

    Its further arguments name other columns of the rows, which it gets as lists; `**row` stands for all of them.
    If an environment answers in between, a response is what the policy said, a line for each turn, and an argument
    `turns` gets the turns of each dialogue: a list of dicts with the policy's `response`, the environment's
    `observation`, if there is one, and `reward`.
    """

    def __init__(self, function: Callable[[list[str], list[str]], Sequence[float]], name: str = ""):
        self.function = function
        self.name = name or getattr(function, "__name__", "reward")

    def __call__(self, rollout: Rollout) -> Sequence[float]:
        """Return the function's scores of the responses. Raises `InputError` if the function raises.

        It gets copies of the lists, which it may change. The scores are checked by the caller.
        """
        # 1. The policy's own words: what an environment said in between must not earn its score.
        rollout = rollout.of_the_policy_alone()

        # 2. What the function takes beside prompts and responses, its first two arguments: columns of the rows, and
        #    `turns` if there are dialogues. (If there are none, `turns` is the name of a column like any other.)
        turns = rollout.turns  # None without an environment
        columns = RowColumns(
            self.function,
            2,
            f"reward {self.name}",
            () if turns is None else ("turns",),
        )
        arguments = columns.arguments(rollout.prompts)
        if turns is not None and "turns" in columns.takes_beside_row:
            arguments["turns"] = copy.deepcopy(turns)

        # 3. Call it.
        # A prompt is a text that carries its row; the function gets the text alone.
        prompts = [str(prompt) for prompt in rollout.prompts]
        try:
            scores = self.function(prompts, list(rollout.responses), **arguments)
            if isinstance(scores, Iterator):  # a generator runs here, so that its errors are caught
                return list(scores)
            return scores
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            reason = one_line(error)
            raise InputError(
                f"reward {self.name}: raised {reason}: fix it, then continue by --resume"
            ) from error

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last responses by the function's own `metrics()`; {} if it has no such method."""
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
    scores = reward(rollout.of_the_policy_alone().copy())
    source = f"reward {getattr(reward, 'name', '')}".strip()
    fix = "return one finite number per response, in a list"
    try:
        if not isinstance(scores, Tensor):
            numbers = scores
            if hasattr(scores, "tolist"):  # an array of numpy, a series of pandas
                numbers = scores.tolist()
            scores = torch.tensor(numbers, dtype=torch.float64)
        rows_not_finite = (~scores.float().isfinite()).nonzero()
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{source}: returned {scores!r:.200} ({error}): {fix}") from None
    if scores.shape != (len(rollout),):
        what = f"returned scores of shape {tuple(scores.shape)} for {len(rollout)} responses"
        raise InputError(f"{source}: {what}: {fix}")
    if len(rows_not_finite):
        row = int(rows_not_finite[0, 0])
        raise InputError(f"{source}: scores[{row}] is {scores[row].item()}: {fix}")
    return scores.detach()


def scores_for_training(rollout: Rollout, config: RolloutConfig) -> Tensor:
    """The scores for training, [B], or [B, K] of turns, float32, clipped to ±`score_clip` (released code: 2.5)."""
    scores = rollout.scores if rollout.turn_rewards is None else rollout.turn_rewards
    scores = scores.float()
    if not config.score_clip:
        return scores
    return scores.clamp(-config.score_clip, config.score_clip)
