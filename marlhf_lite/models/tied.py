"""Find layers that share a weight with another module: merging an adapter would change both."""

from collections import Counter

from peft.tuners.lora import LoraLayer
from torch import nn

LARGEST_LOSS = 0.05  # largest share of the policy's change that rounding or merging may lose


def tied_layers(model: nn.Module) -> list[LoraLayer]:
    """Return the LoRA layers whose weight another module also uses, as embedding and head do."""
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return [
        layer
        for layer in layers
        if any(users[id(p)] > 1 for p in layer.get_base_layer().parameters())
    ]
