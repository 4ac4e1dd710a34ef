"""Merge adapters into the weights of their base, for export, and measure how much of the change rounding loses."""

import warnings
from collections.abc import Iterable, Iterator

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlhf_lite.models.actor_critic import unwrap_peft
from marlhf_lite.models.tied import PEFT_CANNOT_MERGE, tied_layers
from marlhf_lite.utils.errors import InputError, one_line


def lost_share(changes: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> float:
    """Return ‖round(W) − W‖ / ‖W − W₀‖ over all pairs (W₀, W), the weights before and after training.

    `round` rounds to `dtype`. The share is 0 if nothing has changed, and about 1 if every change is smaller than the
    rounding, which then loses it.
    """
    lost = changed = 0.0
    for before, after in changes:
        lost += float((after.to(dtype).float() - after.float()).square().sum())
        changed += float((after.float() - before.float()).square().sum())
    return (lost / changed) ** 0.5 if changed else 0.0


@torch.no_grad()
def merged_weights(model: PeftModel) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each weight that an adapter changes, before and after merging in float32; the model stays unchanged.

    Only one layer is merged at a time, so that a second copy of the whole model is never needed.
    """
    for layer in _layers_with_adapters(model):
        weights = list(layer.get_base_layer().parameters(recurse=False))
        before = [weight.data for weight in weights]
        _merge_in_float32(layer)
        # Some kinds, such as adapters of norms, merge by swapping the base layer for another: so it is asked for again.
        merged = list(layer.get_base_layer().parameters(recurse=False))
        after = [weight.data.clone() for weight in merged]  # PEFT undoes the merging in place
        # Undo the merging. PEFT's `unmerge` swaps such a layer back. Some kinds do not undo the rest, and others do so
        # only up to rounding, so the weights from before are put back as well, and nothing counts as merged.
        if layer.merged:
            with warnings.catch_warnings(action="ignore"):
                layer.unmerge()
        for weight, old in zip(weights, before, strict=True):
            weight.data = old
        layer.merged_adapters.clear()
        yield from zip(before, after, strict=True)
    # A module of `modules_to_save` has no adapter: PEFT keeps the original and trains a copy of it as a whole.
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save[module.active_adapters[0]]
            yield from zip(module.original_module.parameters(), trained.parameters(), strict=True)


@torch.no_grad()
def merge_adapter(model: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the base model with the adapter in its weights; adapted weights that are tied become separate.

    Weights and adapters are added in float32, then rounded to `dtype`. If embedding and head have become different, the
    config says that they are not tied. `model` cannot be used afterwards. Raises `InputError` if PEFT cannot merge such
    an adapter.
    """
    # Embedding and head may be one weight. An adapter on one of them must not change the other.
    for layer in tied_layers(model):
        base = layer.get_base_layer()
        base.weight = nn.Parameter(base.weight.clone(), requires_grad=False)
    # Some adapters repeat layers, and each repetition has the weights of the layer that it repeats. In the merged model
    # they are layers like all others, so each gets a copy. Weights that the family itself ties to the head stay tied.
    tied_by_family = set(unwrap_peft(model).get_output_embeddings().parameters())
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight in seen and weight not in tied_by_family:
                setattr(module, name, nn.Parameter(weight.clone(), requires_grad=False))
            seen.add(weight)
    # PEFT would add in the weights' own format, in which a small change may vanish.
    for layer in _layers_with_adapters(model):
        _merge_in_float32(layer)
        round_to(layer.get_base_layer(), dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        merged = model.merge_and_unload()  # what is left to do: to take PEFT's layers out
    round_to(merged, dtype)
    head = merged.get_output_embeddings()
    if head is not None and head.weight is not merged.get_input_embeddings().weight:
        # If the config said that they are tied, loading the saved model would drop the head.
        for config in (merged.config, merged.config.get_text_config()):
            config.tie_word_embeddings = False
    return merged


def round_to(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Round all weights to a number format; return the model. Buffers, such as tables of positions, keep theirs."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def _layers_with_adapters(model: PeftModel) -> list[BaseTunerLayer]:
    """Return the layers that PEFT has put into the model and whose adapters can be merged."""
    layers = []
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and hasattr(module, "merge"):
            layers.append(module)
    return layers


def _merge_in_float32(layer: BaseTunerLayer) -> None:
    """Let PEFT add the adapter to float32 copies of the layer's weights, which replace them.

    Raises `InputError` if PEFT cannot merge such an adapter.
    """
    for weight in layer.get_base_layer().parameters(recurse=False):
        weight.data = weight.data.to(torch.float32, copy=True)
    try:
        layer.merge()
    except PEFT_CANNOT_MERGE as error:
        fix = "load it beside its base by PEFT, as its model card says"
        raise InputError(
            f"the adapter: cannot be merged into its base ({one_line(error)}): {fix}"
        ) from None
