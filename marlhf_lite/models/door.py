"""The one door: what is read from a folder or the hub is read here, or in `models.tokenizers`, and nowhere else.

Configs, models and adapters are read here. Tokenizers have a file of their own, because a command that only looks at
data needs no PEFT, whose import takes seconds.

transformers and PEFT fill every gap without an error: a weight that a file lacks gets random numbers, a weight that the
model has no place for is dropped, a name without a tokenizer gets an empty one, and some adapters change the weights of
the base that all models share. They also run code from a model's folder if somebody (or `yes |`) agrees. Behind this
door none of it happens: what is read is what was meant, or an `InputError` says in one line what differs.
"""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import peft
import torch
import transformers
from accelerate import PartialState
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from marlhf_lite.models.tokenizers import (
    ERRORS_OF_LOADING,
    NO_CODE,
    errors_of_reading,
    json_of,
)
from marlhf_lite.utils.errors import InputError, one_line
from marlhf_lite.utils.seals import check_seal

# Starts of `init_lora_weights` in an adapter's config. To read one, PEFT takes a part off the base's weights.
STARTS_THAT_EDIT_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# PEFT's kinds that do more than add to what a layer computes for one token -> what they do.
MORE_THAN_LAYERS = {
    "XLORA": "mixes other adapters, which it would load from elsewhere",
    "POLY": "needs the number of a task beside each text",
    "LILY": "chooses its parts by the mean over all texts of a batch",
    "SHADOW": "runs a second model beside the base",
}
# The same for settings of a LoRA adapter.
SETTINGS_OF_MORE_THAN_LAYERS = {
    "alora_invocation_tokens": "acts only behind certain tokens (aLoRA)",
    "arrow_config": "mixes other adapters (Arrow), which are not in its folder",
    "monteclora_config": "draws its weights at random (MonteCLoRA)",
    "megatron_config": "names a module of Python to import (megatron_core), and none is imported",
}
# Tables of positions and of masks that old versions of transformers saved; they are computed, not read.
COMPUTED = re.compile(r"(inv_freq|masked_bias|(attn|attention)\.bias)$")
MERGE_IT = "merge it into its base (merge_and_unload), and give the result as --model"
SAMPLE = 64  # numbers of each weight that are compared


# -- configs and models -----------------------------------------------------------------------------------------------


def read_config(source: str, place: str | Path) -> PreTrainedConfig:
    """Read a model's config; `source` begins the line of an error, such as `--model NAME`."""
    with errors_of_reading(source, place):
        config = transformers.AutoConfig.from_pretrained(str(place), **NO_CODE)
    attention = config.get_text_config()._attn_implementation
    # A name with a slash is a kernel on the hub, which is code: transformers would fetch and run it.
    if "/" in str(attention):
        fix = "take attn_implementation out of its config.json"
        raise InputError(f"{source}: its config names code of the hub ({attention}): {fix}")
    return config


def read_model(source: str, kind: type, place: str | Path, **settings) -> PreTrainedModel:
    """Read a model from files that must hold all of its weights; `kind` is a class with `from_pretrained`.

    Raises `InputError` if weights are missing, have another shape, or are left over although the model has such a
    layer. Other weights that are left over, such as those of a tower for images, are named in a note.
    """
    return _complete_model(source, kind, str(place), **settings)


def empty_model(config: PreTrainedConfig, **settings) -> PreTrainedModel:
    """Return the modules of a causal LM without weights, on the meta device."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, **NO_CODE, **settings)


def model_of_weights(
    source: str, kind: type, config: PreTrainedConfig, weights: dict[str, torch.Tensor], **settings
) -> PreTrainedModel:
    """Return a model made of `weights`, by name, which must be all of its weights; `kind` is an `AutoModel...`."""
    with torch.device("meta"), errors_of_reading(source):
        family = type(kind.from_config(config, **NO_CODE))  # the class that `kind` chooses
    return _complete_model(source, family, None, config=config, state_dict=weights, **settings)


def _complete_model(source: str, kind: type, place: str | None, **settings) -> PreTrainedModel:
    """Do what `read_model` says, or with `place=None` what `model_of_weights` says: the weights are in `settings`."""
    if place is not None:
        read_config(source, place)  # raises if it names code
    shows_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        with errors_of_reading(source, place):
            if place is not None:
                _check_index(Path(place))
            # Weights of another shape come into the report, as missing ones do. Without `ignore_mismatched_sizes` they
            # would raise an error with a table of many lines.
            model, report = kind.from_pretrained(
                place,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **NO_CODE,
                **settings,
            )
    finally:
        if shows_bars:
            hf_logging.enable_progress_bar()
    _check_weights(source, model, report)
    if getattr(model, "_hf_peft_config_loaded", False):
        fix = "give them apart: the adapter as --sft or --rm, and its base as --model"
        raise InputError(f"{source}: it holds a model and an adapter of some base: {fix}")
    return without_own_sampling(model)


def _check_index(folder: Path) -> None:
    """Raise `ValueError` if the index of a large model names files outside its folder, which no hash would cover.

    `folder` may also be the name of a model on the hub: then there is no such folder, and nothing is found in it.
    """
    for index in folder.glob("*.index.json"):
        for name in set(json_of(index).get("weight_map", {}).values()):
            if Path(name).name != name:
                raise ValueError(f"{index.name} names {name}, which is outside the folder")


def _check_weights(source: str, model: PreTrainedModel, report: dict) -> None:
    """Raise `InputError` if a model and its files differ; `report` is what transformers says about loading them.

    If the files have weights that the model does not read, it is an error if these look like a part of the model. If
    not, they are named in a note.
    """
    left_over = [key for key in report["unexpected_keys"] if not COMPUTED.search(key)]
    of_another_shape = [entry[0] for entry in report["mismatched_keys"]]
    # For transformers a weight of another shape is also a missing one. Here it has its own message.
    missing = sorted(set(report["missing_keys"]) - set(of_another_shape))
    if missing:
        what = f"its files lack {_some(missing)}, which would be random"
        if left_over:
            what += f"; they have {_some(left_over)}, which {type(model).__name__} does not read"
        raise InputError(f"{source}: {what}: save the model again, with all weights")
    if of_another_shape:
        fix = "correct the config, or save the model again"
        raise InputError(
            f"{source}: its config and its weights differ in the shape of {_some(of_another_shape)}: {fix}"
        )
    # A left-over weight that has the name of one of the model's layers, but for its number, belongs to a layer that the
    # model should have: there are more layers than its config says, or one has a bias that the model lacks.
    layers = {_without_numbers(name) for name, _ in model.named_modules()}
    dropped = [key for key in left_over if _without_numbers(key.rpartition(".")[0]) in layers]
    if dropped:
        what = (
            f"its files have {_some(dropped)}, and a {type(model).__name__} of its config does not"
        )
        if all(key.endswith(".bias") for key in dropped):
            fix = (
                "take that bias out of the file (all scores lose a constant), or give another model"
            )
        else:
            fix = "correct the number of layers in its config.json"
        raise InputError(f"{source}: {what}: {fix}")
    if left_over:
        _note_once(f"{source}: not read from its files: {_some(left_over)}")


def _some(names: Iterable[str]) -> str:
    """Return the first name, and how many others there are."""
    names = sorted(names)
    others = len(names) - 1
    return f"{names[0]} and {others} other weights" if others else names[0]


def _without_numbers(name: str) -> str:
    """Return a layer's name with N for each number, so that layer 30 has the same name as layer 1."""
    return re.sub(r"\.\d+(?=\.|$)", ".N", name)


_noted: set[str] = set()


def _note_once(text: str) -> None:
    """Print a note in the main process; the roles of a run may read one folder several times."""
    if text not in _noted and PartialState().is_main_process:
        print(f"note: {text}")
    _noted.add(text)


# -- adapters ---------------------------------------------------------------------------------------------------------


def read_adapter_config(folder: str | Path) -> peft.PeftConfig:
    """Read the settings of a saved adapter.

    Raises `InputError`, with the reason, for a kind of adapter that does not work if models share one base.
    """
    check_seal(Path(folder))  # raises if a file has changed since this library wrote the folder
    fix = 'give an adapter on layers, such as LoRA with bias="none"'
    # When PEFT reads a config with such a start, it asks for what only those who trained it have. So look at the start
    # before that.
    start = json_of(Path(folder) / "adapter_config.json").get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(STARTS_THAT_EDIT_THE_BASE):
        what = f"its adapter was made by {start}, which changes weights of the base, and models share them"
        raise InputError(f"{folder}: {what}: {MERGE_IT}")
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except ERRORS_OF_LOADING as error:
        other = "give an adapter that this version of peft reads, such as LoRA"
        raise InputError(
            f"{folder}: its adapter_config.json cannot be read ({one_line(error)}): {other}"
        ) from None
    reason = MORE_THAN_LAYERS.get(config.peft_type.value, "")
    for setting, why in SETTINGS_OF_MORE_THAN_LAYERS.items():
        if getattr(config, setting, None):
            reason = why
    if (
        config.is_prompt_learning
        or config.is_adaption_prompt
        or getattr(config, "bias", "none") != "none"
    ):
        reason = "is a prompt, or changes biases of the base, which models share"
    if reason:
        raise InputError(f"{folder}: its adapter ({config.peft_type.value}) {reason}: {fix}")
    return config


def with_adapter(
    model: PreTrainedModel, config: peft.PeftConfig, folder: str | Path | None = None
) -> peft.PeftModel:
    """Put a new adapter on a model whose weights other models share.

    `folder` is the one that the settings were read from; without it they are the user's own, and PEFT's errors stay.
    Raises `InputError` if the adapter does not fit the layers, or if making it has changed a weight of the base.
    """
    # PEFT may write into a weight of the base: a few numbers of each weight, compared before and after, show it. Or it
    # may put another tensor in a weight's place: the address shows it, and it can be undone.
    shared = dict([*model.named_parameters(), *model.named_buffers()])
    storages = {name: tensor.data for name, tensor in shared.items()}
    before = _samples(shared.values())
    reason = ""
    has_new_storage = False
    try:
        with warnings.catch_warnings():
            # PEFT calls transformers by an old name, and warns if the base has another path than in the training.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            warnings.filterwarnings("ignore", ".*base_model_name_or_path. was renamed")
            made = peft.get_peft_model(model, config)
    except (ValueError, KeyError, AttributeError, TypeError, AssertionError) as error:
        if folder is None:
            raise
        reason = f"does not fit --model ({one_line(error)})"
        fix = "give the model it was trained on"
    after = _samples(shared.values())
    for name, tensor in shared.items():
        if tensor.data_ptr() != storages[name].data_ptr():
            tensor.data = storages[name]  # the models that share this weight need the old one
            has_new_storage = True
    if not reason and (has_new_storage or not _are_equal(before, after)):
        reason = f"its adapter ({config.peft_type.value}) changes weights of the base, which models share"
        fix = MERGE_IT
    if reason:
        raise InputError(f"{folder or 'adapter'}: {reason}: {fix}")
    return made


def _samples(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of a few numbers of each tensor, spread over it."""
    samples = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        stride = max(1, flat.numel() // SAMPLE)
        samples.append(flat[::stride].clone())
    return samples


def _are_equal(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def fill_adapter(
    model: peft.PeftModel,
    folder: str | Path,
    added: dict[str, torch.Tensor] | None = None,
    absent_layer: str = "",
) -> None:
    """Load the weights of a saved adapter into `model`; the base, which models share, stays unchanged.

    Args:
        folder: has the weights by PEFT's names. If the adapter is on the embedding, PEFT has also saved the embedding
            of its base, which is compared with the one of this base, and not loaded.
        added: weights that the folder does not have, by PEFT's names, such as a new head.
        absent_layer: a layer that this model does not have; the file's weights of it are left out.

    Raises:
        InputError: the file and the model do not have the same weights, in the same shapes.
    """
    with errors_of_reading(str(folder), folder):
        weights = peft.load_peft_weights(str(folder), device=str(model.device))
    check_finite(folder, weights.values())
    for name, weight in weights.items():
        if name.endswith(".score.weight") and len(weight) != 1:  # the head of a reward model
            raise InputError(f"{folder}: it gives {len(weight)} numbers a text: give one with 1")
    reason = ""  # why the adapter does not fit
    fix = "give the model it was trained on"
    try:
        # 1. Separate the copies of the base's weights, which have the base's own names, from the adapter's weights.
        #    A tied weight has several names, and the file may use any of them.
        weights_of_model = dict(model.named_parameters(remove_duplicate=False))
        copies_of_base = {}
        for name in list(weights):
            if name in weights_of_model:
                copies_of_base[name] = weights.pop(name)

        # 2. Load the adapter, if the file (without `absent_layer`, and with what is `added`) has what the model needs
        #    and nothing else.
        if absent_layer:  # the dots keep `lm_head` from matching a layer `my_lm_head`
            for name in list(weights):
                if f".{absent_layer}." in f".{name}.":
                    del weights[name]
        if added:
            weights |= added
        wanted = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
        missing = wanted - weights.keys()
        left_over = weights.keys() - wanted
        if missing:
            reason = f"{_some(missing)} is missing"
            if all(".score." in name for name in missing):
                fix = 'save it again with its head, by modules_to_save=["score"]'
        elif left_over:
            reason = f"the model has no {_some(left_over)}"
        else:
            peft.set_peft_model_state_dict(model, weights)

        # 3. Compare the copies with the base. They may have been rounded to another number format.
        for name, copy in copies_of_base.items():
            ours = weights_of_model[name].to(copy.dtype)
            if not torch.allclose(ours, copy, rtol=0.01, atol=1e-6):
                reason = "it was trained over other embeddings"
    except (RuntimeError, KeyError) as error:  # weights of other shapes
        reason = one_line(error)
    if reason:
        raise InputError(f"{folder}: does not fit --model ({reason}): {fix}")


def adapter_weight_names(folder: str | Path) -> list[str]:
    """Return the names of the weights in an adapter's folder."""
    return list(peft.load_peft_weights(str(folder), device="cpu"))


def name_of_module(model: nn.Module, wanted: nn.Module | None) -> str:
    """Return the name of a module inside a model; empty if it is not there."""
    for name, module in model.named_modules():
        if module is wanted:
            return name
    return ""


def check_finite(
    source: str | Path,
    weights: Iterable[torch.Tensor],
    fix: str = "give an earlier checkpoint, or train it again with a lower learning rate",
) -> None:
    """Raise `InputError` unless all weights, read from `source`, are finite."""
    if not all(bool(weight.isfinite().all()) for weight in weights):
        raise InputError(f"{source}: its weights are not finite (NaN, or infinite): {fix}")


def without_own_sampling(model: nn.Module) -> nn.Module:
    """Forget a model's own sampling settings; return the model. Its special tokens stay.

    Otherwise, for every setting that `generate` is not given, it would take the model's own, such as its makers' top_k.

    The output of router logits is switched off, too: TRL's SFT switches it on and saves that setting, and some mixtures
    of experts cannot generate with it.
    """
    config = model.config.get_text_config() if isinstance(model, PreTrainedModel) else None
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    own = getattr(model, "generation_config", None)
    if own is not None:
        model.generation_config = transformers.GenerationConfig(
            bos_token_id=own.bos_token_id,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
        )
    return model
