"""Folders with the models that earlier stages made, found and checked before anything loads."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.utils import httpx  # the HTTP library that the hub uses

from marlhf_lite.utils.errors import InputError, one_line
from marlhf_lite.utils.shard_names import METADATA, TRAINER_SHARDS

# Option -> the command that makes its folder, peft's name for such an adapter, and its place in a run.
ADAPTERS = {
    "sft": ("sft", "CAUSAL_LM", ("sft",)),
    "rm": ("rm", "SEQ_CLS", ("rm",)),
    "policies": ("ppo", "CAUSAL_LM", ("policy", "*/policy")),
    "policy": ("ppo", "CAUSAL_LM", ("policy", "*/policy")),
}


def resolve_adapter_dir(option: str, folder: str) -> Path:
    """Return the folder that `--sft`, `--rm`, `--policy` or one of `--policies` means: itself, or one inside a run.

    It holds an adapter, or after full fine-tuning all weights. A reward model of the hub is fetched.
    Raises `InputError` if it is missing or damaged.
    """
    command, kind, inside = ADAPTERS[option]
    if not folder:
        raise InputError(
            f"--{option}: not given: make one with `marlhf {command}` and give its folder"
        )
    root = Path(folder).expanduser()
    is_hub_name = (
        folder.count("/") == 1 and not folder.startswith((".", "/", "~")) and not root.exists()
    )
    if is_hub_name and option == "rm":
        with hub_errors(f"--rm {folder}"):
            root = Path(
                huggingface_hub.snapshot_download(
                    folder, allow_patterns=["*.json", "*.safetensors", "*.bin"]
                )
            )
    for pattern in ("", *inside):
        places = [root] if not pattern else sorted(root.glob(pattern))
        places = [place for place in places if _config_of(place)]
        if len(places) > 1:
            names = ", ".join(str(place) for place in places)
            raise InputError(f"--{option} {folder}: it holds several ({names}): give one of them")
        if places:
            _check_adapter(f"--{option} {folder}", places[0], kind, command)
            return places[0]
    fix = f"give a folder that `marlhf {command}` wrote"
    if stopped := sorted(root.glob(f"{inside[0]}/checkpoint-*"), key=os.path.getmtime):
        fix = f"its run was stopped: continue it by --resume, or give {stopped[-1]}"
    elif is_hub_name:
        fix += ", and a model of the hub as --model"
    raise InputError(f"--{option} {folder}: no adapter there: {fix}")


@contextmanager
def hub_errors(source: str) -> Iterator[None]:
    """Raise `InputError` if the hub does not give, in this block, what the option `source` names."""
    try:
        yield
    # ValueError: a name that the hub forbids
    except (OSError, ValueError, httpx.HTTPError) as error:
        what = f"no such folder, and the hub does not give it ({one_line(error)})"
        raise InputError(
            f"{source}: {what}: check the name and the network, or give a local folder"
        ) from None


def is_sharded_folder(folder: str | Path) -> bool:
    """Return whether a folder is a checkpoint whose weights several processes wrote."""
    return any((Path(folder) / name / METADATA).is_file() for name in ("", TRAINER_SHARDS))


def form_of_weights(folder: Path) -> str:
    """Return what a folder holds: an adapter, a whole model, or shards of one."""
    return (
        "shards" if is_sharded_folder(folder) else "model" if is_full_model(folder) else "adapter"
    )


def is_full_model(folder: str | Path) -> bool:
    """Return whether a folder holds all weights of a model, without an adapter."""
    config = _config_of(Path(folder))
    return config is not None and config.name == "config.json"


def _config_of(place: Path) -> Path | None:
    """Return the config of the weights in a folder, if any: an adapter's, else a model's."""
    paths = (place / "adapter_config.json", place / "config.json")
    return next((path for path in paths if path.is_file()), None)


def _check_adapter(source: str, place: Path, kind: str, command: str) -> None:
    again, path, is_full = (
        f"make it again with `marlhf {command}`",
        _config_of(place),
        is_full_model(place),
    )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        made_for = (
            (config.get("architectures") or [None])[0] if is_full else config.get("task_type")
        )
    except (OSError, ValueError, AttributeError):
        raise InputError(f"{source}: its {path.name} is damaged: {again}") from None
    found = made_for
    # the names of score models all end alike, those of causal LMs do not (GPT-2)
    if is_full and made_for:
        found = "SEQ_CLS" if made_for.endswith("ForSequenceClassification") else "CAUSAL_LM"
    if found not in (None, kind):
        what = "a model" if is_full else "an adapter"
        raise InputError(
            f"{source}: {what} of another kind ({made_for}): give a folder that `marlhf {command}` wrote"
        )
    if is_sharded_folder(place):
        return
    weights = "model*" if is_full else "adapter_model.*"
    if not any(file.suffix in (".safetensors", ".bin") for file in place.glob(weights)):
        raise InputError(f"{source}: no weights ({weights.rstrip('.*')}.safetensors): {again}")


def other_base(folder: Path, model: str) -> str:
    """Return the base that an adapter was trained on if its last word differs from that of `model`, else ""."""
    path = folder / "adapter_config.json"
    base = (
        json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if path.is_file()
        else None
    )
    return base if base and Path(base).name.lower() != Path(model).name.lower() else ""
