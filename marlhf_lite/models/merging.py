"""Adapters in the weights of their base: for export, and which layers share a weight with another module."""

from collections import Counter

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel


def tied_layers(model: nn.Module) -> list[LoraLayer]:
    """Return the LoRA layers whose weight another module uses too, as embedding and head do: merging changes both."""
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return [layer for layer in layers if any(users[id(p)] > 1 for p in layer.get_base_layer().parameters())]


@torch.no_grad()
def merge_adapter(model: PeftModel) -> PreTrainedModel:
    """Return the base model with the adapter in its weights, and with weights of their own where these are tied.

    Where embedding and head have become different, the config says that they are not tied.
    """
    for layer in tied_layers(model):
        base = layer.get_base_layer()
        base.weight = nn.Parameter(base.weight.clone(), requires_grad=False)
    merged = model.merge_and_unload()
    head = merged.get_output_embeddings()
    if head is not None and head.weight is not merged.get_input_embeddings().weight:
        for config in (merged.config, merged.config.get_text_config()):
            config.tie_word_embeddings = False
    return merged
