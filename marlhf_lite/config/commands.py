"""The options of every command: one dataclass a command, its fields are groups of options (`config.options`).

The docstring of a command is what `--help` prints. `marlhf run` has the options of all its stages, so its class
inherits from theirs, and a stage takes the options of its own command or those of the whole run.
"""

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from marlhf_lite.config import options as o
from marlhf_lite.config.checked import Checked

# Commands that leave a run


@dataclass
class StageCommand:
    """What every command that leaves a run takes."""

    run: o.RunConfig = field(default_factory=o.RunConfig)
    model: o.ModelConfig = field(default_factory=o.ModelConfig)
    data: o.DataConfig = field(default_factory=o.DataConfig)


@dataclass
class SFTCommand(StageCommand):
    """Supervised fine-tuning of an adapter on chosen responses.

    example: marlhf sft --output_dir runs/a
    """

    sft: o.SFTStageConfig = field(default_factory=o.SFTStageConfig)
    trainer: o.TrainerConfig = field(default_factory=o.TrainerConfig)


@dataclass
class RMCommand(StageCommand):
    """Reward model from preference pairs.

    example: marlhf rm --sft runs/a --output_dir runs/b
    """

    rm: o.RewardModelConfig = field(default_factory=o.RewardModelConfig)
    inputs: o.SFTInputConfig = field(default_factory=o.SFTInputConfig)
    trainer: o.TrainerConfig = field(default_factory=o.TrainerConfig)


@dataclass
class PolicyCommand(StageCommand):
    """What every command that trains a policy takes; `sampling` says how its responses are sampled."""

    inputs: o.InputConfig = field(default_factory=o.InputConfig)
    programs: o.ProgramConfig = field(default_factory=o.ProgramConfig)
    checkpoint: o.CheckpointConfig = field(default_factory=o.CheckpointConfig)
    logging: o.LoggingConfig = field(default_factory=o.LoggingConfig)


@dataclass
class PPOCommand(PolicyCommand):
    """PPO over macro actions; --n 1 is token-level PPO.

    example: marlhf ppo --sft runs/a --rm runs/b --n 5 --output_dir runs/c
    """

    macro: o.MacroConfig = field(default_factory=o.MacroConfig)
    ppo: o.PPOConfig = field(default_factory=o.PPOConfig)
    reward: o.RewardConfig = field(default_factory=o.RewardConfig)

    @property
    def sampling(self) -> o.PPOConfig:
        return self.ppo

    @property
    def methods(self) -> dict[str, o.MacroConfig]:
        """The PPO runs of this command: names, and what a macro action is in each."""
        return {"ppo": self.macro}


@dataclass
class DPOCommand(PolicyCommand):
    """DPO on the reward model's pairs.

    example: marlhf dpo --sft runs/a --output_dir runs/d
    """

    dpo: o.DPOStageConfig = field(default_factory=o.DPOStageConfig)
    trainer: o.TrainerConfig = field(default_factory=o.TrainerConfig)
    sampling: o.SamplingConfig = field(default_factory=o.SamplingConfig)


@dataclass
class RLOOCommand(PolicyCommand):
    """RLOO: groups of responses in place of a critic.

    example: marlhf rloo --sft runs/a --rm runs/b --num_generations 4 --output_dir runs/e
    """

    rloo: o.RLOOStageConfig = field(default_factory=o.RLOOStageConfig)
    reward: o.RewardConfig = field(default_factory=o.RewardConfig)

    @property
    def sampling(self) -> o.GroupConfig:
        return self.rloo


@dataclass
class GRPOCommand(PolicyCommand):
    """GRPO: RLOO's groups, scaled by their deviation.

    example: marlhf grpo --sft runs/a --rm runs/b --output_dir runs/f
    """

    grpo: o.GRPOStageConfig = field(default_factory=o.GRPOStageConfig)
    reward: o.RewardConfig = field(default_factory=o.RewardConfig)

    @property
    def sampling(self) -> o.GroupConfig:
        return self.grpo


@dataclass
class EvaluatedCommand(StageCommand):
    """What every command takes that evaluates policies on held-out prompts."""

    eval: o.EvaluationConfig = field(default_factory=o.EvaluationConfig)


@dataclass
class EvaluateCommand(EvaluatedCommand):
    """Answers, scores and intervals on held-out prompts.

    example: marlhf evaluate --sft runs/a --rm runs/b --policies MA-PPO=runs/c
    """

    policies: o.PolicyConfig = field(default_factory=o.PolicyConfig)
    inputs: o.InputConfig = field(default_factory=o.InputConfig)
    programs: o.ProgramConfig = field(default_factory=o.ProgramConfig)
    sampling: o.SamplingConfig = field(default_factory=o.SamplingConfig)


@dataclass
class RunCommand(PPOCommand, SFTCommand, RMCommand, EvaluatedCommand):
    """All stages on your data: SFT, reward model, MA-PPO, evaluation.

    example: marlhf run --dataset pairs.jsonl --model google/gemma-2b --dtype bfloat16
    """

    @property
    def methods(self) -> dict[str, o.MacroConfig]:
        """One run, called PPO where macro actions are single tokens."""
        return {"PPO" if self.macro.token_level else "MA-PPO": self.macro}


@dataclass
class DemoCommand(RunCommand):
    """SFT, reward model, PPO and MA-PPO from one start, compared: minutes on two cores.

    To be quick it has defaults of its own: --sft_epochs 1 --rm_epochs 0.5 --updates 18 --eval_prompts 128.

    example: marlhf demo --updates 60 --seed 1
    """

    DEFAULTS: ClassVar[dict[str, float]] = {"sft_epochs": 1.0, "rm_epochs": 0.5, "updates": 18, "eval_prompts": 128}

    @property
    def methods(self) -> dict[str, o.MacroConfig]:
        """Two runs: single tokens, and macro actions."""
        return {"PPO": replace(self.macro, termination="fixed", n="1"), "MA-PPO": self.macro}


# Other commands


@dataclass
class CompareCommand:
    """Stored answers of several runs side by side, paired by prompt.

    example: marlhf compare --answers runs/a,runs/b --baseline SFT
    """

    compare: o.CompareConfig = field(default_factory=o.CompareConfig)


@dataclass
class JudgeCommand:
    """Win rates by a judge: gold, rm, an endpoint, or you.

    example: marlhf judge --judge_answers runs/e --judge_methods MA-PPO,PPO --judge human
    """

    judge: o.JudgeConfig = field(default_factory=o.JudgeConfig)
    endpoint: o.EndpointConfig = field(default_factory=o.EndpointConfig)
    rm_input: o.RMInputConfig = field(default_factory=o.RMInputConfig)
    model: o.ModelConfig = field(default_factory=o.ModelConfig)
    length: o.LengthConfig = field(default_factory=o.LengthConfig)
    seed: o.SeedConfig = field(default_factory=o.SeedConfig)


@dataclass
class GenerateCommand:
    """A policy's answer to a prompt.

    example: marlhf generate --policy runs/c --prompt "SUBREDDIT: r/tea ... TL;DR:"
    """

    generate: o.GenerateConfig = field(default_factory=o.GenerateConfig)
    sampling: o.SamplingConfig = field(default_factory=o.SamplingConfig)
    length: o.LengthConfig = field(default_factory=o.LengthConfig)
    seed: o.SeedConfig = field(default_factory=o.SeedConfig)
    model: o.ModelConfig = field(default_factory=o.ModelConfig)


@dataclass
class ExportCommand:
    """A policy as a model of its own, its adapter merged: a folder for transformers, or the hub.

    example: marlhf export --policy runs/c --output_dir my-model --push_to_hub owner/name
    """

    export: o.ExportConfig = field(default_factory=o.ExportConfig)
    model: o.ModelConfig = field(default_factory=o.ModelConfig)


@dataclass
class StudyCommand:
    """A grid of methods and seeds: what is not done runs, then the table and figures.

    example: marlhf study --name main --workers 2
    """

    study: o.StudyConfig = field(default_factory=o.StudyConfig)


@dataclass
class MemoryCommand:
    """How much memory PPO needs, from the model's config, before anything is loaded.

    example: marlhf memory --preset lora-t4-16gb --gpu 16
    """

    memory: o.MemoryConfig = field(default_factory=o.MemoryConfig)
    model: o.ModelConfig = field(default_factory=o.ModelConfig)


COMMANDS: dict[str, type] = {
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
    "study": StudyCommand,
    "memory": MemoryCommand,
}


def groups(command: type) -> dict[str, type[Checked]]:
    """Return the groups of a command by name: its own, then those that it shares with other commands."""
    kinds = {f.name: f.default_factory for f in fields(command)}
    names = [name for kind in command.__mro__ for name in vars(kind).get("__annotations__", ())]
    return {name: kinds[name] for name in names if name in kinds}


def option_names(command: type) -> set[str]:
    """Return the names of all options of a command."""
    return {f.name for kind in groups(command).values() for f in fields(kind)}


OPTIONS: set[str] = set().union(*map(option_names, COMMANDS.values()))
