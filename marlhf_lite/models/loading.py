"""Load policy, reference, reward model and critic: four modules over one set of frozen base weights.

The base is loaded once. `share` copies its module tree but not its parameters, and each model gets its own LoRA adapter
(and score head). No adapter is ever switched, so a model can neither lose its gradients to another nor run with the
wrong adapter. Each stage starts from a copy of a saved adapter (paper, Appendix B.2):

    SFT adapter -> policy, reference, reward model        reward adapter and head -> critic

Full fine-tuning (`finetune="full"`, as in the paper) has four separate models instead: every folder holds all weights,
and the base is an empty model that gives only family, dtype and attention.
"""

import copy
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import peft
import torch
import transformers
from accelerate import PartialState
from torch import nn
from transformers import PreTrainedModel

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.actor_critic import (
    PolicyModel,
    PPOModels,
    ScalarHeadModel,
    checkpoint_activations,
    unwrap_peft,
    without_dropout,
)
from marlhf_lite.models.adapters import is_full_model, is_sharded_folder
from marlhf_lite.models.door import (
    adapter_weight_names,
    check_finite,
    empty_model,
    fill_adapter,
    model_of_weights,
    name_of_module,
    read_adapter_config,
    read_config,
    read_model,
    with_adapter,
    without_own_sampling,
)
from marlhf_lite.models.fast.fused import use_fused_kernels
from marlhf_lite.models.fast.lora import use_merged_forward
from marlhf_lite.models.fast.switch import levers_of_choice, levers_of_model, set_levers
from marlhf_lite.models.score_heads import check_gives_one_score, ensure_classifier, with_head
from marlhf_lite.models.shards import read_metadata, read_shards
from marlhf_lite.models.tokenizers import load_tokenizer as load_tokenizer  # offered here, too
from marlhf_lite.models.tokenizers import model_path
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.seals import check_seal
from marlhf_lite.utils.shard_names import METADATA, TRAINER_SHARDS

EMBEDDED_MODEL = "tiny-gemma"
# What a model starts from: the folder or the hub name of a saved adapter or model, or one in memory.
Start = str | Path | PreTrainedModel | peft.PeftModel
# Where a checkpoint of several processes has its shards -> how the names of the model's weights begin there. PPO's are
# in the folder itself, beside the critic's; those of SFT, reward model and DPO are in a subfolder named by accelerate.
SHARDS = {"": "weights.policy.model.", TRAINER_SHARDS: "model."}


def load_base(options: ModelConfig) -> PreTrainedModel:
    """Load the causal LM with every parameter frozen, in eval mode, on this process's device.

    For full fine-tuning it is an empty model on the meta device, because no role shares weights with it. The base, and
    every model that is made from it, keeps the levers: the faster ways of computing that `--fast` has chosen.
    """
    levers = levers_of_choice(options.fast, PartialState().device.type)
    base = _load_base(options)
    set_levers(base, levers)
    return use_fused_kernels(base) if "fused" in levers else base


def _load_base(options: ModelConfig) -> PreTrainedModel:
    """Return the base of `load_base`, frozen, in the number format and with the attention that the options name."""
    source = f"--model {options.model}"
    place = model_path(options.model)
    settings = {"dtype": "auto", "attn_implementation": None}  # transformers chooses
    if options.dtype != "auto":
        settings["dtype"] = getattr(torch, options.dtype)
    if options.attn_implementation != "auto":
        settings["attn_implementation"] = options.attn_implementation
    if options.finetune == "full":
        config = read_config(source, place)
        if options.dtype == "auto":  # it means that of the files of weights, which are not read
            settings["dtype"] = config.dtype or torch.float32
        return empty_model(config, **settings).requires_grad_(False)
    if options.load_in_4bit:
        settings["quantization_config"] = _four_bits()
        settings["device_map"] = {"": PartialState().device}  # "": the whole model
    base = read_model(source, transformers.AutoModelForCausalLM, place, **settings)
    check_finite(source, base.parameters(), fix="give weights without NaN, or another --dtype")
    base.requires_grad_(False).eval()
    if options.load_in_4bit:  # it is on its device, and cannot be moved
        return base
    return base.to(PartialState().device)


def _four_bits() -> transformers.BitsAndBytesConfig:
    """Return NF4 with double quantisation, computed in bfloat16 if the GPU has it (a T4 does not)."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError("--load_in_4bit: needs the package bitsandbytes: pip install -e '.[gpu]'")
    bf16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if bf16 else torch.float16,
    )


def share(model: nn.Module) -> nn.Module:
    """Copy the module tree; its parameters and buffers stay those of the original."""
    kept = [*model.parameters(), *model.buffers()]
    # What `memo` has under an object's id counts as its copy, so `deepcopy` copies no tensor.
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


def new_policy(base: PreTrainedModel, options: ModelConfig) -> peft.PeftModel:
    """Return the trainable model that SFT starts from: the base with a new adapter.

    For full fine-tuning it is the model of `--model` with all its weights.
    """
    if options.finetune == "full":
        return _load_full_model(base, options.model, trainable=True)
    config = lora_config(options, peft.TaskType.CAUSAL_LM)
    return _with_fast_adapters(with_adapter(share(base), config))


@contextmanager
def folder_of(start: Start) -> Iterator[str | Path]:
    """Yield the folder that a model is read from. A model in memory is written to one that is deleted afterwards.

    In this way the roles of PPO get copies of a model in memory, which itself stays as it is, and it passes the same
    checks as a folder.
    """
    if isinstance(start, (str, Path)):
        yield start
        return
    in_memory = f"{type(start).__name__} in memory"
    with tempfile.TemporaryDirectory() as root:
        folder = root
        if isinstance(start, peft.PeftModel):
            if len(start.active_adapters) != 1:
                active = ", ".join(start.active_adapters)
                fix = "choose one by set_adapter"
                raise InputError(f"{in_memory}: not one adapter of it is active ({active}): {fix}")
            (name,) = start.active_adapters
            start.save_pretrained(root, selected_adapters=[name])
            if name != "default":  # PEFT gives each other name a folder of its own
                folder = str(Path(root) / name)
        else:
            start.save_pretrained(root)
        try:
            yield folder
        except InputError as error:  # the user has never seen the temporary folder
            raise InputError(str(error).replace(folder, in_memory)) from None


def load_policy(
    base: PreTrainedModel, start: Start, trainable: bool = True
) -> peft.PeftModel | PreTrainedModel:
    """Load the policy (trainable) or the reference (frozen): the base with an adapter, or a full model of its own."""
    with folder_of(start) as folder:
        if is_full_model(folder):
            return _load_full_model(base, folder, trainable)
        return _load_adapter(share(base), folder, trainable)


def new_reward_model(
    base: PreTrainedModel,
    sft: Start,
    seed: int = 0,
    head: Literal["normal", "zero"] = "normal",
) -> peft.PeftModel | PreTrainedModel:
    """Return a trainable score model that starts from the SFT adapter or model, with a new head (Appendix B.2).

    The head's weights are normal with deviation 0.1 / sqrt(width), or with `head="zero"` zero, and so are all scores.
    """
    with folder_of(sft) as folder:
        return _new_reward_model(base, folder, seed, head)


def _new_reward_model(
    base: PreTrainedModel, sft: str | Path, seed: int, head: Literal["normal", "zero"]
) -> peft.PeftModel | PreTrainedModel:
    """Do what `new_reward_model` says, from a folder: put a head on the SFT model, or on the base with its adapter."""
    if is_full_model(sft):
        classifier = with_head(_load_full_model(base, sft, trainable=True), seed, head)
        return classifier.requires_grad_(True).train()

    # 1. The settings of the new adapter: those of SFT's adapter, but for a classifier, whose head trains as a whole.
    config = _adapter_config(sft, base)
    if not hasattr(config, "modules_to_save"):
        fix = "a reward model and a critic need an adapter with modules_to_save, such as LoRA"
        raise InputError(f"{sft}: its adapter ({config.peft_type.value}) takes no head: {fix}")
    classifier = with_head(share(base), seed, head)
    # `modules_to_save` has the ends of the names of modules that train as a whole. Those of SFT train on, unless it is
    # the head over the vocabulary, which a classifier does not have.
    modules_of_classifier = [name for name, _ in classifier.named_modules()]
    trained_whole = []
    for end_of_name in config.modules_to_save or ():
        if any(name.endswith(end_of_name) for name in modules_of_classifier):
            trained_whole.append(end_of_name)
    # SFT may also have trained single tokens' rows of a layer. Those of the missing head are dropped likewise.
    tokens_by_layer = getattr(config, "trainable_token_indices", None)
    if isinstance(tokens_by_layer, dict):
        for end_of_name in list(tokens_by_layer):
            if not any(name.endswith(end_of_name) for name in modules_of_classifier):
                del tokens_by_layer[end_of_name]
    config.task_type = peft.TaskType.SEQ_CLS
    config.modules_to_save = [*trained_whole, "score"]
    config.inference_mode = False  # a saved adapter has True, which would freeze it

    # 2. Its weights: those of SFT's adapter, except on the head over the vocabulary, and those of the new score head.
    vocabulary_head = name_of_module(base, base.get_output_embeddings())
    if all(f".{vocabulary_head}." in f".{name}." for name in adapter_weight_names(sft)):
        fix = "a reward model and a critic need an adapter on layers below it"
        raise InputError(f"{sft}: its adapter is on the head alone: {fix}")
    model = _with_fast_adapters(with_adapter(classifier, config, sft))
    new_weights = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    new_head = {name: weight for name, weight in new_weights.items() if ".score." in name}
    fill_adapter(model, sft, added=new_head, absent_layer=vocabulary_head)
    return model.train()


def load_score_model(
    base: PreTrainedModel, start: Start, trainable: bool = False
) -> peft.PeftModel | PreTrainedModel:
    """Load the reward model (frozen) or the critic (trainable): an adapter or a full model, with its head."""
    with folder_of(start) as folder:
        if is_full_model(folder):
            check_gives_one_score(str(folder), read_config(str(folder), folder))
            ensure_classifier(base)  # so that transformers finds a class for every family
            return _load_full_model(
                base, folder, trainable, kind=transformers.AutoModelForSequenceClassification
            )
        # The seed does not matter: the head gets its weights from the folder.
        return _load_adapter(with_head(share(base), 0), folder, trainable)


def check_can_be_loaded(base: PreTrainedModel, folder: Path, gives_scores: bool) -> None:
    """Raise `InputError` if a saved policy, or a reward model (`gives_scores`), does not load as it was meant.

    An adapter is loaded as a test. Of a whole model only the names and shapes of the weights are read, because reading
    the weights of a large one takes minutes. Shards of several processes are checked only when a stage reads them.
    """
    if not is_full_model(folder):
        load = load_score_model if gives_scores else load_policy
        load(base, folder, trainable=False)
        return
    if is_sharded_folder(folder):
        return
    kind = transformers.AutoModelForCausalLM
    if gives_scores:
        check_gives_one_score(str(folder), read_config(str(folder), folder))
        ensure_classifier(base)  # so that transformers finds a class for every family
        kind = transformers.AutoModelForSequenceClassification
    check_seal(folder)
    read_model(str(folder), kind, folder, device_map="meta")  # names and shapes only


def check_base_is_whole(options: ModelConfig) -> None:
    """Raise `InputError` if the files of `--model` lack weights. Full fine-tuning loads these weights only later."""
    kind = transformers.AutoModelForCausalLM
    read_model(f"--model {options.model}", kind, model_path(options.model), device_map="meta")


def _load_full_model(
    base: PreTrainedModel,
    folder: str | Path,
    trainable: bool,
    kind=transformers.AutoModelForCausalLM,
) -> PreTrainedModel:
    """Load all weights of a model, in the base's dtype and attention, onto this process's device.

    `folder` may also be the name of a base model. Shards that several processes wrote are joined. `kind` is the class
    of transformers that reads it.
    """
    settings = {"dtype": base.dtype, "attn_implementation": base.config._attn_implementation}
    check_seal(Path(folder))  # raises if a file has changed since this library wrote the folder
    if is_sharded_folder(folder):
        config = read_config(str(folder), folder)
        weights = _join_shards(Path(folder))
        model = model_of_weights(str(folder), kind, config, weights, **settings)
    else:
        # A folder of weights may lack a tokenizer, which `model_path` would refuse; the name of a base is looked up.
        place = folder if is_full_model(folder) else model_path(str(folder))
        model = read_model(str(folder), kind, place, **settings)
    check_finite(folder, model.parameters())
    levers = levers_of_model(base)  # the choices of --fast
    set_levers(model, levers)
    if "fused" in levers:
        use_fused_kernels(model)
    return model.requires_grad_(trainable).train(trainable).to(PartialState().device)


def _join_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights of the model in a checkpoint, by name, on the CPU.

    Of a checkpoint of PPO these are the policy's. `folder` is one for which `is_sharded_folder` is true. Raises
    `InputError` if a part of a weight is missing or damaged.
    """
    subfolder = "" if (folder / METADATA).is_file() else TRAINER_SHARDS
    place = folder / subfolder
    prefix = SHARDS[subfolder]  # how the names of the model's weights begin there
    try:
        # The metadata say which tensors there are. `read_shards` fills empty tensors of the same shapes.
        whole = {}
        for name, entry in read_metadata(place).state_dict_metadata.items():
            if name.startswith(prefix):
                whole[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_shards(whole, place, no_dist=True)  # one process reads all parts
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    return {name.removeprefix(prefix): tensor for name, tensor in whole.items()}


def _load_adapter(model: PreTrainedModel, folder: str | Path, trainable: bool) -> peft.PeftModel:
    """Put a saved adapter on a model, in training mode if `trainable`, else frozen."""
    config = _adapter_config(folder, model)
    config.inference_mode = not trainable
    loaded = with_adapter(model, config, folder)
    fill_adapter(loaded, folder)
    return _with_fast_adapters(loaded).train(trainable)


def _with_fast_adapters(model: peft.PeftModel) -> peft.PeftModel:
    """Let the adapters be computed in fewer products if the model's levers have `lora`; returns `model`."""
    if "lora" in levers_of_model(unwrap_peft(model)):
        use_merged_forward(model)
    return model


def _adapter_config(folder: str | Path, base: PreTrainedModel) -> peft.PeftConfig:
    """Return the settings of a saved adapter. Raises `InputError` for an adapter that this base cannot take."""
    if base.device.type == "meta":
        raise InputError(
            f"{folder}: an adapter, and --finetune full takes whole models: make it again, or use lora"
        )
    return read_adapter_config(folder)


def build_models(
    base: PreTrainedModel,
    sft: Start,
    rm: Start | None,
    critic_init: str = "rm",
    gradient_checkpointing: bool | Literal["auto"] = False,
    with_reward: bool = True,
    critic_head_init: Literal["normal", "zero"] = "normal",
) -> PPOModels:
    """Load the four models from adapters or models (paper, Appendix B.2).

    Policy and reference start from `sft`, reward model and critic from `rm`. Each is a saved folder, or a model in
    memory, which is copied; to start from the base itself, give `new_policy(base, options)` as `sft`. With
    `critic_init="sft"`, or without `rm`, the critic starts from `sft` with a new head (`critic_head_init`, see
    `new_reward_model`). If the reward is a function, `with_reward=False` loads no reward model, and `rm` may still be
    the start of the critic. With `gradient_checkpointing="auto"` the trainer decides whether policy and critic
    recompute activations.
    """
    critic_starts_from_rm = rm is not None and critic_init == "rm"
    with folder_of(sft) as sft_folder:
        policy = load_policy(base, sft_folder)
        reference = load_policy(base, sft_folder, trainable=False)
        if not critic_starts_from_rm:
            critic = new_reward_model(base, sft_folder, head=critic_head_init)
    reward = None
    if rm is not None:
        with folder_of(rm) as rm_folder:
            if critic_starts_from_rm:
                critic = load_score_model(base, rm_folder, trainable=True)
            if with_reward:
                reward = ScalarHeadModel(load_score_model(base, rm_folder))
    for model in (policy, critic):
        without_dropout(model)
        if gradient_checkpointing is True:  # not "auto", which the trainer decides
            checkpoint_activations(model)
    return PPOModels(
        policy=PolicyModel(policy),
        reference=PolicyModel(reference),
        reward=reward,
        critic=ScalarHeadModel(critic),
        gradient_checkpointing=gradient_checkpointing,
    )
