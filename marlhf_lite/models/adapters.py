"""Folders of adapters that earlier stages made, found and checked before anything loads."""

import json
import os
from pathlib import Path

from marlhf_lite.models.shard_names import METADATA, TRAINER_SHARDS
from marlhf_lite.utils.errors import InputError, one_line

# Option -> the command that makes its folder, what peft calls such an adapter, and where in a run it may stand.
ADAPTERS = {
    "sft": ("sft", "CAUSAL_LM", ("sft",)),
    "rm": ("rm", "SEQ_CLS", ("rm",)),
    "policies": ("ppo", "CAUSAL_LM", ("policy", "*/policy")),
    "policy": ("ppo", "CAUSAL_LM", ("policy", "*/policy")),
}
# What peft calls an adapter -> how transformers names its tables of such models with all weights, and most of these.
FULL_MODEL = {
    "CAUSAL_LM": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "ForCausalLM"),
    "SEQ_CLS": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "ForSequenceClassification"),
}


def resolve_adapter_dir(option: str, folder: str) -> Path:
    """Return the folder that `--sft`, `--rm`, `--policy` or one of `--policies` means: it, or a folder inside a run.

    It holds an adapter, or after full fine-tuning all weights. A reward model may be one of the hub, which is fetched.
    Raises `InputError` where it is missing or damaged.
    """
    command, kind, inside = ADAPTERS[option]
    if not folder:
        raise InputError(f"--{option}: not given: make one with `marlhf {command}` and give its folder")
    root = Path(folder).expanduser()
    is_hub_name = folder.count("/") == 1 and not folder.startswith((".", "/", "~")) and not root.exists()
    if is_hub_name and option == "rm":
        root = _fetch(folder)
    for pattern in ("", *inside):
        places = [root] if not pattern else sorted(root.glob(pattern))
        places = [place for place in places if _config_of(place)]
        if len(places) > 1:
            names = ", ".join(str(place) for place in places)
            raise InputError(f"--{option} {folder}: it holds several ({names}): name one of them")
        if places:
            _check_adapter(f"--{option} {folder}", places[0], kind, command)
            return places[0]
    fix = f"give a folder that `marlhf {command}` wrote"
    if stopped := sorted(root.glob(f"{inside[0]}/checkpoint-*"), key=os.path.getmtime):
        fix = f"its run was stopped: go on with it by --resume, or give {stopped[-1]}"
    elif is_hub_name:
        fix += ", and a model of the hub as --model"
    raise InputError(f"--{option} {folder}: no adapter there: {fix}")


def _fetch(name: str) -> Path:
    """Return the folder with a reward model of the hub, from its cache or from the hub."""
    import huggingface_hub  # only for names of the hub
    from huggingface_hub.utils import httpx

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except (OSError, ValueError, httpx.HTTPError) as error:
        fix = "check the name and the network, or give a folder"
        raise InputError(
            f"--rm {name}: no such folder, and the hub does not give it ({one_line(error)}): {fix}"
        ) from None


def is_sharded_folder(folder: str | Path) -> bool:
    """Return whether a folder is a checkpoint with weights that several processes wrote."""
    return any((Path(folder) / name / METADATA).is_file() for name in ("", TRAINER_SHARDS))


def form_of_weights(folder: Path) -> str:
    """Return whether a folder holds an adapter, a whole model, or a checkpoint of one by shards."""
    is_adapter = (folder / "adapter_config.json").is_file()
    return "shards" if is_sharded_folder(folder) else "adapter" if is_adapter else "model"


def _config_of(place: Path) -> Path | None:
    """Return the config of the weights in a folder: an adapter's first, which may stand beside a model's."""
    paths = (place / "adapter_config.json", place / "config.json")
    return next((path for path in paths if path.is_file()), None)


def _check_adapter(source: str, place: Path, kind: str, command: str) -> None:
    again, path = f"make it again with `marlhf {command}`", _config_of(place)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        is_full_model = path.name == "config.json"
        made_for = (config.get("architectures") or [None])[0] if is_full_model else config.get("task_type")
    except (OSError, ValueError, AttributeError):
        raise InputError(f"{source}: its {path.name} is damaged: {again}") from None
    if not (made_for is None or (_is_model_for(kind, made_for) if is_full_model else made_for == kind)):
        what = "a model" if is_full_model else "an adapter"
        raise InputError(f"{source}: {what} of another kind ({made_for}): give a folder that `marlhf {command}` wrote")
    weights = "model*" if is_full_model else "adapter_model.*"
    if is_sharded_folder(place):  # its shards are joined when it is loaded
        return
    if not any(file.suffix in (".safetensors", ".bin") for file in place.glob(weights)):
        raise InputError(f"{source}: no weights ({weights.rstrip('.*')}.safetensors): {again}")


def _is_model_for(kind: str, name: str) -> bool:
    """Return whether a class of this name is a model of that kind, by its name or by transformers' tables."""
    table, ending = FULL_MODEL[kind]
    if name.endswith(ending):
        return True
    from transformers.models.auto import modeling_auto  # for families with names of their own, such as GPT-2

    return name in getattr(modeling_auto, table).values()


def other_base(folder: Path, model: str) -> str:
    """Return the base that an adapter names as its own where that is another than `model` by its last word; else ""."""
    path = folder / "adapter_config.json"
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path") if path.is_file() else None
    return base if base and Path(base).name.lower() != Path(model).name.lower() else ""
