"""Every option in one place. A field's `help` is what `marlhf <command> --help` prints.

Presets (`presets/`) and `--config` files hold the same names; flags win over files, files over presets.
"""

from marlhf_lite.config.baselines import DPOStageConfig, GroupConfig
from marlhf_lite.config.evaluation import CompareConfig, EvaluationConfig, SweepConfig
from marlhf_lite.config.judging import EndpointConfig, JudgeConfig
from marlhf_lite.config.option import option
from marlhf_lite.config.ppo import KeepOptions, PPOConfig
from marlhf_lite.config.shared import DataConfig, InputConfig, MemoryConfig, ModelConfig, PolicyConfig, RunConfig
from marlhf_lite.config.study import StudyConfig
from marlhf_lite.config.training import MacroConfig, RewardModelConfig, SFTStageConfig

GROUPS = {
    "run": RunConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "inputs": InputConfig,
    "sft": SFTStageConfig,
    "rm": RewardModelConfig,
    "macro": MacroConfig,
    "ppo": PPOConfig,
    "keep": KeepOptions,
    "dpo": DPOStageConfig,
    "group": GroupConfig,
    "policies": PolicyConfig,
    "eval": EvaluationConfig,
    "sweep": SweepConfig,
    "compare": CompareConfig,
    "judge": JudgeConfig,
    "endpoint": EndpointConfig,
    "memory": MemoryConfig,
    "study": StudyConfig,
}
__all__ = ["GROUPS", "option", *sorted(kind.__name__ for kind in GROUPS.values())]
