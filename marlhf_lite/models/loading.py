"""Load policy, reference, reward model and critic: four modules over one set of frozen base weights.

The base is loaded once. `share` copies its module tree but not its parameters, and each model gets a LoRA adapter (and
a score head) of its own. No adapter is ever switched, so a model can neither lose its gradients to another nor run with
the wrong adapter. Each stage starts from a copy of a saved adapter (paper, Appendix B.2):

    SFT adapter -> policy, reference, reward model        reward adapter and head -> critic

Full fine-tuning (`finetune="full"`, as in the paper) has four separate models instead: every folder holds all weights,
and the base is an empty model that gives only family, dtype and attention.
"""

import copy
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal

import huggingface_hub
import peft
import torch
import transformers
from accelerate import PartialState
from huggingface_hub.utils import httpx  # the HTTP library that the hub uses
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.actor_critic import (
    PolicyModel,
    PPOModels,
    ScalarHeadModel,
    checkpoint_activations,
    without_dropout,
)
from marlhf_lite.models.adapters import is_sharded_folder
from marlhf_lite.models.lora import use_merged_forward
from marlhf_lite.models.score_heads import ensure_classifier, with_head
from marlhf_lite.models.shards import join_model
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.seals import check_seal
from marlhf_lite.utils.shipped import shipped

EMBEDDED_MODEL = "tiny-gemma"
NO_CODE = {"trust_remote_code": False}  # without it transformers asks on standard input, where `yes |` says y
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def model_path(name: str) -> str:
    """Return the path of a model: of an embedded one, of a local folder, or a name on the hub as it is.

    Raises `InputError` for a folder without a config or without weights, and for a path that does not exist.
    """
    if name in EMBEDDED_MODELS:
        return str(shipped(name))
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return str(folder)
    if folder.is_file():  # such as one in GGUF form
        raise InputError(f"--model {name}: a file: give a folder with config.json, as save_pretrained writes it")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        known = ", ".join(EMBEDDED_MODELS)
        raise InputError(f"--model {name}: no such folder: give {known}, a folder, or a hub name (owner/name)")
    _check_hub(name)
    return name


def model_folder(name: str) -> Path:
    """Return the folder with the files of a model: of one on the hub its snapshot, which is named by its commit."""
    path = model_path(name)
    return Path(path) if Path(path).is_dir() else Path(huggingface_hub.hf_hub_download(path, "config.json")).parent


def _check_hub(name: str) -> None:
    """Ask the hub once for a model that is not in its cache: transformers would ask for a minute."""
    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"))
    except (OSError, ValueError, httpx.HTTPError) as error:  # ValueError: no name that the hub allows
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"--model {name}: not in the hub's cache, and the hub does not give it ({reason}): check the name and the "
            f"network, or give a local folder"
        ) from None


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        hint = "save one there"
        if (folder / "adapter_config.json").is_file():
            hint = "it holds an adapter: give it as --sft or --rm, and its base as --model"
        elif any(folder.glob("*.gguf")):
            hint = "it holds a GGUF file: load that with transformers, and give a folder that save_pretrained wrote"
        raise InputError(f"--model {folder}: no config.json: {hint}")
    if not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would make up an empty one
        raise InputError(f"--model {folder}: no tokenizer ({TOKENIZERS[0]}): save the tokenizer there too")


def load_tokenizer(name: str):
    """Load the model's tokenizer. Text such as "<eos>" in data stays text; it never becomes the special token.

    Without a pad token it gets EOS as one, which is safe: masks come from lengths.
    """
    tokenizer = _load(transformers.AutoTokenizer, name)
    if tokenizer.eos_token_id is None:
        raise InputError(f"--model {name}: its tokenizer has no EOS token: set eos_token in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.split_special_tokens = True  # set here, not when it is read: a saved copy keeps its own way
    return tokenizer


def load_base(options: ModelConfig) -> PreTrainedModel:
    """Load the causal LM with every parameter frozen, in eval mode, on this process's device.

    Full fine-tuning gets an empty one on the meta device, since no model shares weights with it. With
    `--fused_kernels` the models that are made from it have them, too.
    """
    base = _load_base(options)
    return use_fused_kernels(base) if options.fused_kernels else base


def use_fused_kernels(model: PreTrainedModel) -> PreTrainedModel:
    """Let norms, gated units and rotary embeddings of `model` run as kernels of liger-kernel; returns `model`.

    Raises `InputError` if there is no GPU, no liger-kernel, or no kernel for the family.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        raise InputError("--fused_kernels: needs a GPU and the package liger-kernel: pip install -e '.[gpu]'")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    if (family := model.config.model_type) not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(f"--fused_kernels: liger-kernel has none for {family} models: leave it out")
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})  # losses are ours
    model.has_fused_kernels = True
    return model


def _load_base(options: ModelConfig) -> PreTrainedModel:
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    settings = {
        "dtype": dtype,
        "attn_implementation": None if options.attn_implementation == "auto" else options.attn_implementation,
    }
    if options.finetune == "full":
        config = _load(transformers.AutoConfig, options.model)
        settings["dtype"] = config.dtype or torch.float32 if dtype == "auto" else dtype
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, **NO_CODE, **settings).requires_grad_(False)
    if options.load_in_4bit:
        settings |= {"quantization_config": _four_bits(), "device_map": {"": PartialState().device}}
        return _load(transformers.AutoModelForCausalLM, options.model, **settings).requires_grad_(False).eval()
    base = _load(transformers.AutoModelForCausalLM, options.model, **settings)
    return base.requires_grad_(False).eval().to(PartialState().device)


def _four_bits() -> transformers.BitsAndBytesConfig:
    """Return NF4 with double quantisation, computed in bfloat16 where the GPU has it (a T4 has not)."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError("--load_in_4bit: needs the package bitsandbytes: pip install -e '.[gpu]'")
    bf16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if bf16 else torch.float16,
    )


def _load(kind, name: str, path: str = "", **kwargs):
    path = path or model_path(name)
    quiet = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        loaded = kind.from_pretrained(path, **NO_CODE, **kwargs)
    except (OSError, ValueError, ImportError, EOFError, UnpicklingError, SafetensorError) as error:
        reason, fix = " ".join(str(error).split())[:200], "check the name, or give a local folder"
        if "trust_remote_code" in str(error):
            reason, fix = "it needs code from its own files, which never runs", "choose one that transformers knows"
        raise InputError(f"--model {name}: cannot be loaded ({reason}): {fix}") from None
    finally:
        if quiet:
            hf_logging.enable_progress_bar()
    return without_own_sampling(loaded)


def without_own_sampling(model: nn.Module) -> nn.Module:
    """Forget how a model's makers sample, for that would slip into what `generate` is not told; returns the model.

    Nor does it give the logits of its router, with which some mixtures of experts cannot generate: TRL's SFT asks for
    them, and saves that.
    """
    config = model.config.get_text_config() if isinstance(model, PreTrainedModel) else None
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    if config := getattr(model, "generation_config", None):
        ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = transformers.GenerationConfig(**ids)
    return model


def share(model: nn.Module) -> nn.Module:
    """Copy the module tree but not its parameters and buffers, which stay the original's."""
    kept = [*model.parameters(), *model.buffers()]
    return without_own_sampling(copy.deepcopy(model, memo={id(tensor): tensor for tensor in kept}))


def lora_config(options: ModelConfig, task: peft.TaskType) -> peft.LoraConfig:
    """Return the LoRA settings for the layers of `--lora_target_modules`; a score model also trains its head."""
    return peft.LoraConfig(
        task_type=task,
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=0.0,
        target_modules=options.lora_target_modules,
        modules_to_save=["score"] if task == peft.TaskType.SEQ_CLS else None,
    )


def check_target_modules(base: PreTrainedModel, targets: str) -> None:
    """Raise `InputError` where `--lora_target_modules` names no layer of the base."""
    try:
        layers = [name for name, _ in base.named_modules() if name]
        matches = targets == "all-linear" or any(re.fullmatch(targets, name) for name in layers)
    except re.error:
        matches = False
    if not matches:
        hint = "give all-linear, or a regular expression for whole names such as .*q_proj"
        raise InputError(f"--lora_target_modules {targets}: matches no layer: {hint}")


def new_policy(base: PreTrainedModel, options: ModelConfig) -> peft.PeftModel:
    """Return the base with a new adapter, or for full fine-tuning all its weights, to train: where SFT starts."""
    if options.finetune == "full":
        return _load_full_model(base, options.model, trainable=True)
    return use_merged_forward(peft.get_peft_model(share(base), lora_config(options, peft.TaskType.CAUSAL_LM)))


def load_policy(base: PreTrainedModel, adapter: str | Path, trainable: bool = True) -> peft.PeftModel:
    """Load the policy (trainable) or the reference (frozen): the base with a saved adapter, or a full saved model."""
    if is_full_model(adapter):
        return _load_full_model(base, adapter, trainable)
    return _load_adapter(share(base), adapter, trainable)


def new_reward_model(
    base: PreTrainedModel, sft: str | Path, seed: int = 0, head: Literal["normal", "zero"] = "normal"
) -> peft.PeftModel:
    """Return a trainable score model that starts from the SFT adapter or model, with a new head (Appendix B.2).

    The head's weights are normal with deviation 0.1 / sqrt(width), or with `head="zero"` zero, and so are all scores.
    """
    if is_full_model(sft):
        return with_head(_load_full_model(base, sft, trainable=True), seed, head).requires_grad_(True).train()
    config = _adapter_config(sft, base)
    classifier = with_head(share(base), seed, head)
    names = [name for name, _ in classifier.named_modules()]
    # What SFT trained as a whole trains on, but for a head over the vocabulary: a classifier has none.
    whole = [name for name in config.modules_to_save or () if any(place.endswith(name) for place in names)]
    config.task_type, config.modules_to_save, config.inference_mode = peft.TaskType.SEQ_CLS, [*whole, "score"], False
    try:
        model = use_merged_forward(peft.get_peft_model(classifier, config))
    except ValueError:  # of peft
        fix = "a reward model and a critic need an adapter on layers below it"
        raise InputError(f"{sft}: its adapter is on the head alone: {fix}") from None
    _load_weights(model, sft, {k: v for k, v in peft.get_peft_model_state_dict(model).items() if ".score." in k})
    return model.train()


def load_score_model(base: PreTrainedModel, adapter: str | Path, trainable: bool = False) -> peft.PeftModel:
    """Load the reward model (frozen) or the critic (trainable): a saved adapter or full model, with its head."""
    if is_full_model(adapter):
        ensure_classifier(base)
        return _load_full_model(base, adapter, trainable, kind=transformers.AutoModelForSequenceClassification)
    return _load_adapter(with_head(share(base), 0), adapter, trainable)


def is_full_model(folder: str | Path) -> bool:
    """Return whether a folder holds all weights of a model, not an adapter."""
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / "adapter_config.json").is_file()


def _load_full_model(
    base: PreTrainedModel, folder: str | Path, trainable: bool, kind=transformers.AutoModelForCausalLM
) -> PreTrainedModel:
    """Load all weights of a model, in the base's dtype and attention; a checkpoint of several processes is joined."""
    settings = {"dtype": base.dtype, "attn_implementation": base.config._attn_implementation}
    if is_sharded_folder(folder):
        config, weights = transformers.AutoConfig.from_pretrained(folder, **NO_CODE), join_model(Path(folder))
        check_seal(Path(folder))  # after what names the shard
        with torch.device("meta"):
            family = type(kind.from_config(config, **NO_CODE))
        model = without_own_sampling(family.from_pretrained(None, config=config, state_dict=weights, **settings))
    else:
        check_seal(Path(folder))
        place = str(folder) if is_full_model(folder) else ""  # a stage's folder; it needs no tokenizer of its own
        model = _load(kind, str(folder), place, **settings)
    _check_finite(folder, model.parameters())
    model = use_fused_kernels(model) if hasattr(base, "has_fused_kernels") else model
    return model.requires_grad_(trainable).train(trainable).to(PartialState().device)


def _check_finite(folder: str | Path, weights: Iterable[torch.Tensor]) -> None:
    """Raise `InputError` if weights that are saved in a folder are not all finite."""
    if not all(bool(weight.isfinite().all()) for weight in weights):
        fix = "give an earlier checkpoint, or train it again with a lower learning rate"
        raise InputError(f"{folder}: its weights are not finite (NaN, or infinite): {fix}")


def _device(model: nn.Module) -> str:
    return str(next(model.parameters()).device)


def _adapter_config(folder: str | Path, base: PreTrainedModel) -> peft.PeftConfig:
    """Return the settings of a saved adapter. Raises `InputError` for one that this base cannot take."""
    if not (Path(folder) / "adapter_config.json").is_file():
        raise InputError(f"{folder}: no adapter_config.json: give a folder that `marlhf sft` or `marlhf rm` wrote")
    check_seal(Path(folder))
    if base.device.type == "meta":
        raise InputError(f"{folder}: an adapter, and --finetune full takes whole models: make it again, or use lora")
    config = peft.PeftConfig.from_pretrained(str(folder))
    if config.is_prompt_learning:
        raise InputError(
            f"{folder}: its adapter is a prompt ({config.peft_type.value}): give one on layers, such as LoRA"
        )
    if (biases := getattr(config, "bias", "none")) != "none":
        fix = 'train one with bias="none"'
        raise InputError(
            f"{folder}: its adapter changes biases of the base (bias={biases!r}), which models share: {fix}"
        )
    return config


def _load_adapter(model: PreTrainedModel, folder: str | Path, trainable: bool) -> peft.PeftModel:
    config = _adapter_config(folder, model)
    config.inference_mode = not trainable
    loaded = peft.get_peft_model(model, config)
    _load_weights(loaded, folder)
    return use_merged_forward(loaded).train(trainable)


def _load_weights(model: peft.PeftModel, folder: str | Path, more: dict[str, torch.Tensor] | None = None) -> None:
    """Load the weights of a saved adapter, and `more`; the base, which others share, stays as it is.

    An adapter of the embedding is saved with the base's embedding, which is not loaded. Raises `InputError` where the
    adapter is another model's.
    """
    places, reason = dict(model.named_parameters()), ""  # a tied one once
    try:
        weights = peft.load_peft_weights(str(folder), device=_device(model))
        _check_finite(folder, weights.values())
        copies = {name: weights.pop(name) for name in list(weights) if name in places}
        missing = peft.set_peft_model_state_dict(model, weights | (more or {})).missing_keys
        if lost := [name for name in missing if ".default" in name and name in places]:
            reason = f"{lost[0]} is missing"
        # The copies may be rounded to another number format.
        if not all(torch.allclose(places[name].to(x.dtype), x, rtol=0.01, atol=1e-6) for name, x in copies.items()):
            reason = "it was trained over other embeddings"
    except (RuntimeError, KeyError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
    if reason:
        raise InputError(f"{folder}: does not fit --model ({reason}): give the model it was trained on")


def build_models(
    base: PreTrainedModel,
    sft: str | Path,
    rm: str | Path | None,
    critic_init: str = "rm",
    gradient_checkpointing: bool | Literal["auto"] = False,
    with_reward: bool = True,
    critic_head_init: Literal["normal", "zero"] = "normal",
) -> PPOModels:
    """Load the four models from saved adapters or models (paper, Appendix B.2).

    Policy and reference start from the folder `sft`, reward model and critic from `rm`. With `critic_init="sft"`, or
    without a reward model, the critic starts from SFT with a new head (`critic_head_init`, see `new_reward_model`).
    Without `with_reward`, where the reward is a function, the reward model itself is not loaded. With
    `gradient_checkpointing="auto"` the trainer decides whether policy and critic recompute activations.
    """
    from_rm = rm is not None and critic_init == "rm"
    critic = (
        load_score_model(base, rm, trainable=True) if from_rm else new_reward_model(base, sft, head=critic_head_init)
    )
    policy = load_policy(base, sft)
    for model in (policy, critic):
        without_dropout(model)
        if gradient_checkpointing is True:
            checkpoint_activations(model)
    return PPOModels(
        policy=PolicyModel(policy),
        reference=PolicyModel(load_policy(base, sft, trainable=False)),
        reward=ScalarHeadModel(load_score_model(base, rm)) if rm is not None and with_reward else None,
        critic=ScalarHeadModel(critic),
        gradient_checkpointing=gradient_checkpointing,
    )
