"""Configs of the models of the paper's Table 5 and Appendix C.4, so that their sizes are known without the hub.

The repositories are gated; these are the public numbers of their `config.json` that a size depends on.
"""

from transformers import Gemma2Config, GemmaConfig, LlamaConfig, PretrainedConfig

_GEMMA_2B = {
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
_GEMMA_7B = {
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
}
_GEMMA_2_27B = {
    "hidden_size": 4608,
    "intermediate_size": 36_864,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 144,
}
_LLAMA_3B = {
    "vocab_size": 128_256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
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
    kind, numbers = ARCHITECTURES.get(name, (None, {}))
    return kind(**numbers, dtype="bfloat16") if kind else None
