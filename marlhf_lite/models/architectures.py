"""Configs of models of the paper and of Llama-3.1-8B, which give their sizes without the hub."""

from pathlib import Path

import yaml
from transformers import AutoConfig, PretrainedConfig

ARCHITECTURES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def known_config(name: str) -> PretrainedConfig | None:
    """Return the config of one of the paper's models by its name on the hub, in bfloat16 as saved; None for others."""
    sizes = ARCHITECTURES.get(name)
    if not sizes:
        return None
    return AutoConfig.for_model(**{"tie_word_embeddings": True, "dtype": "bfloat16"} | sizes)
