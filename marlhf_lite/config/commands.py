"""The options of every command: a class that inherits the groups of options that it takes (`config.options`).

`--help` prints a command's docstring. A command's options object is also one of each of its groups: a function of a
`ModelConfig` or a `PPOConfig` takes it. `marlhf run` has the options of all its stages, so its class inherits from
theirs, and a stage takes the options of its command or those of the whole run.
"""

from dataclasses import Field, fields, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import MappingProxyType
from typing import Literal

from marlhf_lite.config import method
from marlhf_lite.config import options as o
from marlhf_lite.config.checked import Checked, option


class CommandTraits:
    """What a command does; `experiments` reads these traits and never a command's class.

    stages: what it trains, in this order: sft, rm, and ppo, dpo, rloo or grpo. If empty, it evaluates, or only reads.
    answers: whether it answers held-out prompts at the end.
    own_part: the part that gets all rows of a file that no earlier run has read. If empty, the file is split.
    runs_programs: whether unit tests may judge answers.
    methods: its PPO runs, by name, each with its options.
    judges_with_rm: whether a whole run with pairs trains a reward model to judge answers even if its reward is another.
    shows_sft: whether tables of a whole run have the SFT model, as the baseline; else the first method is the baseline.
    """

    stages = ()
    answers = False
    own_part = ""
    runs_programs = False
    methods = MappingProxyType({})
    judges_with_rm = True
    shows_sft = True

    @property
    def is_evaluation(self) -> bool:
        """Whether it trains nothing, and answers held-out prompts."""
        return self.answers and not self.stages

    @property
    def is_whole_run(self) -> bool:
        """Whether it trains several stages, each from the one before."""
        return len(self.stages) > 1


# Commands that leave a run


class StageCommand(o.RunConfig, o.ModelConfig, o.DataConfig, CommandTraits):
    """What every command that leaves a run takes."""


class SFTCommand(o.SFTStageConfig, o.TrainerConfig, StageCommand):
    """Supervised fine-tuning of an adapter on chosen responses.

    example: marlhf sft --output_dir runs/a
    """

    stages = ("sft",)
    own_part = "sft"


class RMCommand(o.RewardModelConfig, o.SFTInputConfig, o.TrainerConfig, StageCommand):
    """Reward model from preference pairs.

    example: marlhf rm --sft runs/a --output_dir runs/b
    """

    stages = ("rm",)
    own_part = "rm"


class PolicyCommand(
    o.InputConfig,
    o.ProgramConfig,
    o.ResumeAtConfig,
    o.CheckpointConfig,
    o.LoggingConfig,
    StageCommand,
):
    """What every command that trains a policy takes."""

    own_part = "ppo"
    runs_programs = True


class PPOCommand(
    o.MacroConfig,
    o.PPOConfig,
    o.KeepBestConfig,
    o.EngineConfig,
    o.RewardConfig,
    o.EnvironmentConfig,
    PolicyCommand,
):
    """PPO over macro actions; --n 1 is token-level PPO.

    example: marlhf ppo --sft runs/a --rm runs/b --n 5 --output_dir runs/c
    """

    stages = ("ppo",)

    @property
    def methods(self) -> dict[str, "PPOCommand"]:
        """The PPO runs of this command: names, and the options of each."""
        return {"ppo": self}


class DPOCommand(o.DPOStageConfig, o.SamplingConfig, o.TrainerConfig, PolicyCommand):
    """DPO on the reward model's pairs.

    example: marlhf dpo --sft runs/a --output_dir runs/d
    """

    stages = ("dpo",)
    own_part = "rm"


class RLOOCommand(o.RLOOStageConfig, o.RewardConfig, PolicyCommand):
    """RLOO: groups of responses instead of a critic.

    example: marlhf rloo --sft runs/a --rm runs/b --num_generations 4 --output_dir runs/e
    """

    stages = ("rloo",)


class GRPOCommand(o.GRPOStageConfig, o.RewardConfig, PolicyCommand):
    """GRPO: RLOO's groups, scaled by their deviation.

    example: marlhf grpo --sft runs/a --rm runs/b --output_dir runs/f
    """

    stages = ("grpo",)


class EvaluatedCommand(o.EvaluationConfig, StageCommand):
    """What every command that answers held-out prompts takes."""

    answers = True


class EvaluateCommand(
    o.InputConfig,
    o.RewardConfig,
    o.EnvironmentConfig,
    o.ProgramConfig,
    o.SamplingConfig,
    o.EngineConfig,
    EvaluatedCommand,
):
    """Answers, scores and intervals on held-out prompts.

    example: marlhf evaluate --sft runs/a --rm runs/b --policies MA-PPO=runs/c
    """

    policies: str = option(
        "", "Folders of policies, comma-separated, each as name=folder; a name has no =."
    )

    own_part = "test"
    runs_programs = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # An evaluation uses a reward model, gold scores, tests or an environment whenever it has them, without being
        # asked. So only a user's function is named.
        if self.reward in o.REWARDS:
            self.reward = ""


class RunCommand(PPOCommand, SFTCommand, RMCommand, EvaluatedCommand):
    """All stages on your data: SFT, reward model, MA-PPO, evaluation.

    example: marlhf run --dataset pairs.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct
    """

    own_part = ""

    @property
    def stages(self) -> tuple[str, ...]:
        """SFT, the reward model if it gives the reward, and PPO."""
        return ("sft", "rm", "ppo") if self.reward == "rm" else ("sft", "ppo")

    @property
    def methods(self) -> dict[str, PPOCommand]:
        """One run, called PPO if macro actions are single tokens."""
        return {"PPO" if self.token_level else "MA-PPO": self}


class DemoCommand(RunCommand):
    """SFT, reward model, PPO and MA-PPO from one start, compared: minutes on two cores.

    Without --dataset and --model there is a first act, of one minute: stories in which one word decides the score. With
    ACT=1 in the environment the demo stops after it. To be quick it has its own preset: see marlhf presets demo.

    example: marlhf demo --updates 60 --seed 1
    """

    @property
    def methods(self) -> dict[str, PPOCommand]:
        """Two runs: single tokens, and macro actions."""
        return {"PPO": replace(self, termination="fixed", n="1"), "MA-PPO": self}


class FirstAct(DemoCommand):
    """First act of the demo (preset demo/umbrella): true scores as reward, and PPO with λ = 0.99 as a third run."""

    judges_with_rm = False
    shows_sft = False

    @property
    def methods(self) -> dict[str, PPOCommand]:
        """Three runs: single tokens with two lambdas, and macro actions."""
        both = super().methods
        return {"PPO": both["PPO"], "PPO λ=0.99": replace(both["PPO"], lam=0.99), "MA-PPO": self}


# Other commands


class AddedCommand(Checked):
    """A command that another package adds: an entry point of the group `marlhf_lite.commands` names its class.

    resumes: whether the same command line continues after an interruption.
    """

    resumes = False

    def run(self) -> None:
        """Do the work."""
        raise NotImplementedError


class CompareCommand(Checked):
    """Stored answers of several runs side by side, paired by prompt.

    example: marlhf compare --answers runs/a,runs/b --baseline SFT
    """

    answers: str = option(
        "", "Runs of evaluate, folders of responses, or samples.jsonl files, comma-separated."
    )
    baseline: str = option(
        "", "Method that the others are compared with. Default: SFT, else the first."
    )


class JudgeCommand(o.OutputConfig, o.EndpointConfig, o.SeedConfig):
    """Win rates by a judge: a model behind an endpoint, which may run on your own machine.

    example: marlhf judge --judge_answers runs/e --judge_methods MA-PPO,PPO --judge_model gpt-4o
    """

    judge_answers: str = option(
        "", "Folders that `marlhf evaluate` wrote, or files of answers, comma-separated."
    )
    judge_methods: str = option(
        "", "Two methods, comma-separated; NAME T=0.4 for another temperature."
    )
    size: int | None = option(
        None, "Number of rows, or of pairs to judge, drawn at random. Default: all.", least=1
    )
    judge_criteria: Literal["tldr", "hh", "webgpt"] = option(
        "tldr", "Criteria (section 4.1, Appendix F)."
    )


class GenerateCommand(
    o.TrainedPolicyConfig,
    o.AcceptConfig,
    o.EnvironmentConfig,
    o.SamplingConfig,
    o.LengthConfig,
    o.SeedConfig,
    o.ModelConfig,
):
    """A policy's answer to a prompt; with --environment, their dialogue.

    example: marlhf generate --policy runs/c --prompt "POST Subreddit: r/tea ... TL;DR:"
    """

    prompt: str = option(
        "", "Prompt to answer, in the task's own form. Default: the standard input."
    )


class ExportCommand(o.TrainedPolicyConfig, o.AcceptConfig, o.OutputConfig, o.ModelConfig):
    """A policy as a separate model, its adapter merged: a folder for transformers.

    example: marlhf export --policy runs/c --output_dir my-model
    """


class DataCommand(o.ModelConfig, o.DataConfig, o.SeedConfig, CommandTraits):
    """What a run would read: rows as tokens, counts, lengths, what is cut.

    example: marlhf data pairs.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct
    """

    rows: int = option(3, "Number of rows to show.", least=0)


class MemoryCommand(
    o.GenerationBatchConfig,
    o.RewardConfig,
    o.RewardModelConfig,
    o.SFTStageConfig,
    o.TrainerConfig,
    o.LengthConfig,
    o.ModelConfig,
):
    """How much memory SFT, reward model and PPO need, from the model's config, before anything is loaded.

    example: marlhf memory --preset gemma-2-27b/tldr --num_processes 16 --gpu 79
    """

    gpu: float = option(
        0.0, "Memory of a card in GiB, such as 14.7 for a T4; 0: no comparison.", least=0
    )
    num_processes: int = option(
        1, "Cards: FSDP2 splits --finetune full over them, DDP the batch of LoRA.", least=1
    )


# Name of a command -> its options, in the order of `marlhf --help`.
COMMANDS: dict[str, type[Checked]] = {
    "demo": DemoCommand,
    "run": RunCommand,
    "sft": SFTCommand,
    "rm": RMCommand,
    "ppo": PPOCommand,
    "dpo": DPOCommand,
    "rloo": RLOOCommand,
    "grpo": GRPOCommand,
    "evaluate": EvaluateCommand,
    "compare": CompareCommand,
    "judge": JudgeCommand,
    "generate": GenerateCommand,
    "export": ExportCommand,
    "data": DataCommand,
    "memory": MemoryCommand,
}


def command_of(options: Checked) -> str:
    """Return the name of the command whose options these are; the first act belongs to the demo."""
    name_of = {command: name for name, command in COMMANDS.items()}
    # The nearest class comes first. `FirstAct` itself has no name, and inherits from the class of the demo.
    for own_or_inherited in type(options).__mro__:
        if own_or_inherited in name_of:
            return name_of[own_or_inherited]
    raise ValueError(f"{type(options).__name__} has the options of no command")


def environment_of(options: Checked) -> str:
    """Return the value of --environment; empty for a command that does not take this option."""
    return getattr(options, "environment", "")


def reward_of(options: Checked) -> str:
    """Return the value of --reward; empty for a command that does not take this option."""
    return getattr(options, "reward", "")


def sampler_of(options: Checked) -> str:
    """Return the value of --sampler; generate, its default, for a command that does not take this option."""
    return getattr(options, "sampler", "generate")


OWN = "Options of this command"  # and of no other


def groups(command: type) -> dict[str, list[Field]]:
    """Return the options of a command by topic: its own first, then those that it shares with other commands.

    A topic is the first line of a group's docstring, as `--help` prints it.
    """
    shared_groups: list[type] = []
    for parent in command.__mro__:
        # Groups are the classes of `config.method` and `config.options`.
        is_group_of_options = parent.__module__ in (method.__name__, o.__name__)
        # Another group of the list may have all options of this one, as that of PPO has those of sampling.
        is_included = any(issubclass(group, parent) for group in shared_groups)
        if is_group_of_options and not is_included:
            shared_groups.append(parent)
    names_in_groups: set[str] = set()
    for group in shared_groups:
        names_in_groups |= option_names(group)
    by_topic = {}
    own = [option for option in fields(command) if option.name not in names_in_groups]
    if own:
        by_topic[OWN] = own
    for group in shared_groups:
        by_topic[group.__doc__.rstrip(".")] = list(fields(group))
    return by_topic


def option_names(command: type) -> set[str]:
    """Return the names of all options of a command."""
    return {option.name for option in fields(command)}


def added_commands() -> dict[str, type[AddedCommand]]:
    """Return the commands that installed packages add, by name."""
    found = {}
    for entry in entry_points(group="marlhf_lite.commands"):
        package = entry.module.partition(".")[0]
        is_installed = find_spec(package) is not None  # an entry may outlive its package
        if is_installed:
            found[entry.name] = entry.load()
    return found


# The names of the options of all commands.
OPTIONS: set[str] = set()
for _command in COMMANDS.values():
    OPTIONS |= option_names(_command)
