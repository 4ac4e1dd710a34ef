"""Groups of options by name: a command has some of them (`cli.COMMANDS`)."""

from dataclasses import fields

from marlhf_lite.config import options
from marlhf_lite.config.checked import Checked

GROUPS: dict[str, type[Checked]] = {
    "seed": options.SeedConfig,
    "run": options.RunConfig,
    "model": options.ModelConfig,
    "length": options.LengthConfig,
    "data": options.DataConfig,
    "sft_input": options.SFTInputConfig,
    "rm_input": options.RMInputConfig,
    "inputs": options.InputConfig,
    "reward": options.RewardConfig,
    "programs": options.ProgramConfig,
    "trainer": options.TrainerConfig,
    "sft": options.SFTStageConfig,
    "rm": options.RewardModelConfig,
    "dpo": options.DPOStageConfig,
    "macro": options.MacroConfig,
    "sampling": options.SamplingConfig,
    "ppo": options.PPOConfig,
    "rloo": options.RLOOStageConfig,
    "grpo": options.GRPOStageConfig,
    "checkpoint": options.CheckpointConfig,
    "logging": options.LoggingConfig,
    "policies": options.PolicyConfig,
    "eval": options.EvaluationConfig,
    "compare": options.CompareConfig,
    "judge": options.JudgeConfig,
    "endpoint": options.EndpointConfig,
    "generate": options.GenerateConfig,
    "export": options.ExportConfig,
    "memory": options.MemoryConfig,
    "study": options.StudyConfig,
}
OPTIONS: dict[str, object] = {f.name: f for kind in GROUPS.values() for f in fields(kind)}
