"""Save a model with embedding and output head apart, as vLLM needs it to take new weights while it runs.

If embeddings are tied, vLLM 0.32 silently reloads the embedding and keeps the old head unless the file holds the head.
Its Gemma 2 is an exception: the embedding is its head, and it refuses a file that holds another.
"""

import copy
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from marlhf_lite.utils.jsonl import apply_umask


def save_untied(model: PreTrainedModel, folder: Path, weights: Mapping[str, Tensor], head_apart: bool = True) -> None:
    """Write config and weights so that embedding and head are two tensors.

    Args:
        weights: the whole state of `model` by name, also if `model` is sharded.
        head_apart: False leaves out a head that is tied to the embedding, as transformers does.
    """
    names = {module: name for name, module in model.named_modules()}
    embedding, head = (
        f"{names[part]}.weight" for part in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    if head_apart or not model.config.get_text_config().tie_word_embeddings:
        whole[head] = whole.get(head, whole[embedding]).clone()
    else:
        whole.pop(head, None)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    apply_umask(folder)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = head not in whole
    config.architectures, config.dtype = [type(model).__name__.removeprefix("FSDP")], whole[embedding].dtype
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
