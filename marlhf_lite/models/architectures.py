"""Configs of the models of the paper's Table 5 and Appendix C.4, so that their sizes are known without the hub.

The repositories are gated; these are the public numbers of their `config.json` that a size depends on.
"""

from transformers import Gemma2Config, GemmaConfig, LlamaConfig, PretrainedConfig

_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_GEMMA_2B = (2048, 16_384, 18, 8, 1, 256, 256_000)
_GEMMA_7B = (3072, 24_576, 28, 16, 16, 256, 256_000)
_GEMMA_2_27B = (4608, 36_864, 46, 32, 16, 128, 256_000)
_LLAMA_3B = (3072, 8192, 28, 24, 8, 128, 128_256)
ARCHITECTURES = {
    "google/gemma-2b": (GemmaConfig, _GEMMA_2B),
    "google/gemma-7b": (GemmaConfig, _GEMMA_7B),
    "google/gemma-2-27b": (Gemma2Config, _GEMMA_2_27B),
    "google/codegemma-1.1-2b": (GemmaConfig, _GEMMA_2B),
    "google/codegemma-1.1-7b-it": (GemmaConfig, _GEMMA_7B),
    "meta-llama/Llama-3.2-3B": (LlamaConfig, _LLAMA_3B),
}


def known_config(name: str) -> PretrainedConfig | None:
    """Return the config of one of the paper's models by its name on the hub, in bfloat16 as they are saved, or None."""
    kind, numbers = ARCHITECTURES.get(name, (None, ()))
    sizes = dict(zip(_NAMES, numbers, strict=False))
    return kind(**sizes, tie_word_embeddings=True, dtype="bfloat16") if kind else None
