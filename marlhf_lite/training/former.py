"""Arguments that `PPOTrainer` had before its options were one object; they go on for one release."""

import warnings
from dataclasses import fields

from marlhf_lite.config.method import PPOConfig, PPOTrainerConfig


def whole_config(config: PPOConfig, former: dict) -> PPOTrainerConfig:
    """Options of PPO and former arguments as one object, with a warning. Raises `TypeError` for an unknown argument."""
    groups = {name: former.pop(f"{name}_config", None) for name in ("macro", "checkpoint", "logging")}
    options = {f.name: getattr(config, f.name) for f in fields(PPOTrainerConfig) if hasattr(config, f.name)}
    for group in filter(None, groups.values()):
        options |= {f.name: getattr(group, f.name) for f in fields(group)}
    made = PPOTrainerConfig(**options | former)
    instead = "PPOTrainer takes all options as one PPOTrainerConfig: other arguments for them end with the next release"
    warnings.warn(instead, DeprecationWarning, stacklevel=3)
    return made
