"""Configs of the models of the paper's Table 5 and Appendix C.4, which give their sizes without the hub."""

from pathlib import Path

import yaml
from transformers import AutoConfig, PretrainedConfig

ARCHITECTURES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def known_config(name: str) -> PretrainedConfig | None:
    """Return the config of one of the paper's models by its name on the hub, in bfloat16 as saved; None for others."""
    sizes = ARCHITECTURES.get(name)
    return (
        AutoConfig.for_model(**sizes, tie_word_embeddings=True, dtype="bfloat16") if sizes else None
    )
