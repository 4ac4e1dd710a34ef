"""Find layers that share a weight with another module: merging an adapter would change both."""

from collections import Counter

from peft.tuners.lora import LoraLayer
from torch import nn

# How PEFT refuses to merge an adapter, such as a bias into a layer without one.
PEFT_CANNOT_MERGE = (RuntimeError, NotImplementedError, ValueError)
LARGEST_LOSS = 0.05  # largest share of the policy's change that rounding or merging may lose


def tied_layers(model: nn.Module) -> list[LoraLayer]:
    """Return the LoRA layers whose weight another module also uses, as embedding and head do."""
    users_of_weight = Counter()
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            users_of_weight[id(weight)] += 1
    tied = []
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        if any(users_of_weight[id(weight)] > 1 for weight in module.get_base_layer().parameters()):
            tied.append(module)
    return tied
