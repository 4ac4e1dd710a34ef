"""Folders of adapters that earlier stages made, found and checked before anything loads."""

import json
import os
from pathlib import Path

from marlhf_lite.utils.errors import InputError

# Option -> the command that makes its folder, what peft calls such an adapter, and where in a run it may stand.
ADAPTERS = {
    "sft": ("sft", "CAUSAL_LM", ("sft",)),
    "rm": ("rm", "SEQ_CLS", ("rm",)),
    "policies": ("ppo", "CAUSAL_LM", ("policy", "*/policy")),
    "policy": ("ppo", "CAUSAL_LM", ("policy", "*/policy")),
}
# What peft calls an adapter -> the end of the class name of a model with all weights.
FULL_MODEL = {"CAUSAL_LM": "ForCausalLM", "SEQ_CLS": "ForSequenceClassification"}


def resolve_adapter_dir(option: str, folder: str) -> Path:
    """Return the folder that `--sft`, `--rm`, `--policy` or one of `--policies` means: it, or a folder inside a run.

    It holds an adapter, or after full fine-tuning all weights. Raises `InputError` where it is missing or damaged.
    """
    command, kind, inside = ADAPTERS[option]
    if not folder:
        raise InputError(f"--{option}: not given: make one with `marlhf {command}` and give its folder")
    root = Path(folder).expanduser()
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
    raise InputError(f"--{option} {folder}: no adapter there: {fix}")


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
    fits = made_for is None or (made_for.endswith(FULL_MODEL[kind]) if is_full_model else made_for == kind)
    if not fits:
        what = "a model" if is_full_model else "an adapter"
        raise InputError(f"{source}: {what} of another kind ({made_for}): give a folder that `marlhf {command}` wrote")
    weights = "model*" if is_full_model else "adapter_model.*"
    if any(place.glob("**/*.distcp")):  # a checkpoint, whose shards are joined when it is loaded
        return
    if not any(file.suffix in (".safetensors", ".bin") for file in place.glob(weights)):
        raise InputError(f"{source}: no weights ({weights.rstrip('.*')}.safetensors): {again}")


def other_base(folder: Path, model: str) -> str:
    """Return the base that an adapter names as its own where that is another than `model` by its last word; else ""."""
    path = folder / "adapter_config.json"
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path") if path.is_file() else None
    return base if base and Path(base).name.lower() != Path(model).name.lower() else ""
