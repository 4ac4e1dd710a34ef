"""What answers prompts, by `--sampler` and `--environment`."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from marlhf_lite.config.commands import (
    GenerateCommand,
    StageCommand,
    environment_of,
    sampler_of,
)
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.loading import load_policy, new_policy
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.environments import Dialogues
from marlhf_lite.training.rollout import (
    Rollout,
    Sampler,
    Sampling,
    generate,
    is_remote,
    longest_response,
    sampling_of,
)
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.user_code import import_user_code, named_errors


class OwnSampler:
    """A user's `Sampler`: `--sampler` names its class, or a function that returns one, either without arguments.

    Errors name this option. `vllm` is a sampler of the library that is used in the same way.
    """

    def __init__(self, name: str):
        """Make the sampler. `name` is the value of `--sampler`, but not the default, generate: that is no class."""
        if name == "vllm":
            make_sampler = _vllm_servers
        else:
            known_names = "generate, vllm"  # for the error
            make_sampler = import_user_code("sampler", name, known_names)
        self.name = name
        with named_errors("sampler", name):
            self.sampler = make_sampler()
            if not callable(self.sampler):
                raise InputError(
                    f"it returned {self.sampler!r:.60}: return a Sampler (docs/scaling.md)"
                )
        # What a sampler may have beside its call (see `rollout.Sampler`): a text that says what its answers depend on,
        # whether it samples elsewhere, and a first try before anything is trained.
        self.key = getattr(self.sampler, "key", name)
        self.remote = is_remote(self.sampler)
        self.try_out = getattr(self.sampler, "try_out", None)

    def __call__(self, model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
        with named_errors("sampler", self.name):
            rollout = self.sampler(model, tokenizer, prompts, sampling)
            if not isinstance(rollout, Rollout) or len(rollout) != len(prompts):
                raise InputError(
                    f"it returned {rollout!r:.60}: return a Rollout with a response to each prompt"
                )
        return rollout

    def longest_response(self, tokenizer, new_tokens: int) -> int:
        with named_errors("sampler", self.name):
            return longest_response(self.sampler, tokenizer, new_tokens)


def _vllm_servers() -> Sampler:
    """Return the sampler of vLLM's servers. Raises `InputError` if the package openai is missing."""
    from marlhf_lite.extras.vllm import Servers

    return Servers()


def open_sampler(options: StageCommand) -> Sampler:
    """Return the sampler of a run. Raises `InputError`."""
    if sampler_of(options) == "generate":
        return open_dialogues(options)
    return OwnSampler(options.sampler)


def open_dialogues(options: StageCommand | GenerateCommand) -> Sampler:
    """Return dialogues with the environment of `--environment`, or `generate` without one. Raises `InputError`."""
    name = environment_of(options)
    if not name:
        return generate
    kind = import_user_code("environment", name, "the name of a class")
    with named_errors("environment", name):
        made = kind()
    for method in ("reset", "step"):
        function = getattr(made, method, None)
        if not callable(function):
            raise InputError(
                f"--environment {name}: it has no {method}: see Your own environment in docs/guide.md"
            )
        if inspect.iscoroutinefunction(function):
            raise InputError(
                f"--environment {name}: {method} is async, and nothing would await it: leave out async"
            )
    return Dialogues(made, name, options.max_turns, options.max_observation_length)


def try_out(
    sampler: Sampler,
    options: StageCommand,
    sft: Path | None,
    base: PreTrainedModel,
    tokenizer,
    task: Task,
) -> None:
    """Let a sampler that has a trial answer the longest prompt before training, with the policy at its start.

    Most samplers have none: then nothing is done. Whatever the trial raises ends the run, with the sampler's name.
    """
    trial = getattr(sampler, "try_out", None)
    if trial is None:
        return
    if sft:
        policy_at_start = load_policy(base, sft, trainable=False)
    else:  # SFT has not run yet
        policy_at_start = new_policy(base, options)

    prompts = list(task.splits["ppo"]["prompt"])
    if options.answers:  # held-out prompts, too, will be answered
        prompts += task.held_out(options.eval_prompts)["prompt"]
    lengths = [len(ids) for ids in encode_prompts(tokenizer, prompts)]
    longest_prompt = prompts[lengths.index(max(lengths))]

    sampling = replace(sampling_of(options, options.max_response_length), seed_names=("trial",))
    with named_errors("sampler", sampler_of(options)):
        trial(PolicyModel(policy_at_start), tokenizer, [longest_prompt], sampling)
