"""Rewards of texts by the names that `--reward` gives them."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence

from marlhf_lite.config.commands import StageCommand, reward_of
from marlhf_lite.tasks.prompts import RowColumns
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training.environments import Dialogues
from marlhf_lite.training.rollout import Sampler
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.user_code import import_user_code, is_user_code

KNOWN = "rm, gold, tests, all_tests"


def text_reward(kind: str, task: Task) -> Callable | None:
    """Return the function (prompts, responses) -> scores that `--reward` names; None if it names no function.

    None stands for a reward model (`rm`), an environment, or nothing. Raises `InputError` if the task has no gold score
    or no unit tests of that name, and for code that cannot be imported.
    """
    if kind in ("", "rm", "environment"):
        return None
    if kind in ("tests", "all_tests"):
        if task.tests is None:
            raise InputError(
                f"--reward {kind}: {task.name} has no unit tests: give rm, or package.module:function"
            )
        from marlhf_lite.extras.programs.rewards import TestReward

        return TestReward(task.tests, strict=kind == "all_tests")
    if kind == "gold":
        if task.gold is None:
            raise InputError(
                f"--reward gold: {task.name} has no gold score: give rm, or package.module:function"
            )
        return task.gold
    return _of_messages(import_user_code("reward", kind, KNOWN), task.source_of_prompt)


def asked_columns(options: StageCommand, sampler: Sampler) -> list[RowColumns]:
    """Return the columns of each row that custom code of `--reward` and `--environment` takes."""
    has_turns = isinstance(sampler, Dialogues)  # with `--environment`
    asked = [sampler.columns] if has_turns else []
    reward = reward_of(options)
    if is_user_code(reward):
        function = import_user_code("reward", reward, KNOWN)
        # A reward may also take the turns of a dialogue, which come from the rollout and not from the data.
        not_in_rows = ("turns",) if has_turns else ()
        # 2: the first two arguments, prompts and responses, are no columns either.
        asked.append(RowColumns(function, 2, f"--reward {reward}", not_in_rows))
    return asked


def _of_messages(function: Callable, source_of_prompt: Mapping[str, str | list[dict]]) -> Callable:
    """Return a user's reward function that gets each prompt as the data have it, instead of what a template wrote.

    `source_of_prompt` has the messages, or the text, from which a chat template has written a prompt. If it is empty,
    no template has written any, and the function itself is returned.
    """
    if not source_of_prompt:
        return function

    @functools.wraps(function)
    def call(prompts: Sequence[str], responses: Sequence[str], **columns):
        # Copies, because a function may change what it gets.
        of_data = [copy.deepcopy(source_of_prompt.get(prompt, prompt)) for prompt in prompts]
        return function(of_data, responses, **columns)

    if hasattr(function, "metrics"):  # an object that can be called may have this method, too
        call.metrics = function.metrics
    return call
