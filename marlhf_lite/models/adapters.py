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

# Option -> the command that makes its folder, PEFT's name for such an adapter (its task type), and the subfolders of a
# run in which it may be, as glob patterns.
ADAPTERS = {
    "sft": ("sft", "CAUSAL_LM", ("sft",)),
    "rm": ("rm", "SEQ_CLS", ("rm",)),
    "policies": ("ppo", "CAUSAL_LM", ("policy", "*/policy")),
    "policy": ("ppo", "CAUSAL_LM", ("policy", "*/policy")),
}


def resolve_adapter_dir(option: str, folder: str) -> Path:
    """Return the folder with the weights that `--sft`, `--rm`, `--policy` or one of `--policies` means.

    If `folder` is a run, that is a folder inside it, otherwise `folder` itself. It holds an adapter, or after full
    fine-tuning all weights. If `--rm` names a model on the hub, the model is fetched.
    Raises `InputError` if the weights are missing or damaged.
    """
    command, task_type, places_in_a_run = ADAPTERS[option]
    if not folder:
        raise InputError(
            f"--{option}: not given: make one with `marlhf {command}` and give its folder"
        )
    root = Path(folder).expanduser()
    is_hub_name = (  # owner/name
        folder.count("/") == 1 and not folder.startswith((".", "/", "~")) and not root.exists()
    )
    # Many reward models are published; SFT and policies must come from a stage of this library.
    if is_hub_name and option == "rm":
        with hub_errors(f"--rm {folder}"):
            files_of_a_model = ["*.json", "*.safetensors", "*.bin"]
            root = Path(huggingface_hub.snapshot_download(folder, allow_patterns=files_of_a_model))

    # The folder itself, if it holds weights, comes before its subfolders.
    candidates = [[root]]
    for pattern in places_in_a_run:
        candidates.append(sorted(root.glob(pattern)))
    for folders in candidates:
        with_weights = [place for place in folders if _config_of(place)]
        if len(with_weights) > 1:
            names = ", ".join(str(place) for place in with_weights)
            raise InputError(f"--{option} {folder}: it holds several ({names}): give one of them")
        if with_weights:
            _check_adapter(f"--{option} {folder}", with_weights[0], task_type, command)
            return with_weights[0]

    fix = f"give a folder that `marlhf {command}` wrote"
    # While they run, the trainers of SFT and reward model write such checkpoints, and the weights only at their end.
    checkpoints = sorted(root.glob(f"{places_in_a_run[0]}/checkpoint-*"), key=os.path.getmtime)
    # PEFT writes an adapter that has another name than `default` into a folder of that name. But subfolders with these
    # three names are stages of a run, which other options take.
    named = sorted(path.parent for path in root.glob("*/adapter_config.json"))
    if named and all(place.name not in ("sft", "rm", "policy") for place in named):
        fix = f"give {named[0]}"
    if checkpoints:
        fix = f"its run was stopped: continue it by --resume, or give {checkpoints[-1]}"
    elif is_hub_name:
        fix += ", and a model of the hub as --model"
    raise InputError(f"--{option} {folder}: no adapter there: {fix}")


@contextmanager
def hub_errors(source: str) -> Iterator[None]:
    """Make an error of the hub in this block an `InputError`, which begins with `source`: an option and its value."""
    try:
        yield
    # ValueError: a name that the hub forbids
    except (OSError, ValueError, httpx.HTTPError) as error:
        what = f"no such folder, and the hub does not give it ({one_line(error)})"
        raise InputError(
            f"{source}: {what}: check the name and the network, or give a local folder"
        ) from None


def is_sharded_folder(folder: str | Path) -> bool:
    """Return whether a folder is a checkpoint whose weights several processes wrote.

    PPO writes such weights into the folder itself, the trainers of SFT, reward model and DPO into a subfolder.
    """
    return any((Path(folder) / name / METADATA).is_file() for name in ("", TRAINER_SHARDS))


def form_of_weights(folder: Path) -> str:
    """Return what a folder holds: an adapter, a whole model, or shards of one."""
    if is_sharded_folder(folder):
        return "shards"
    return "model" if is_full_model(folder) else "adapter"


def is_full_model(folder: str | Path) -> bool:
    """Return whether a folder holds all weights of a model, without an adapter."""
    config = _config_of(Path(folder))
    return config is not None and config.name == "config.json"


def _config_of(place: Path) -> Path | None:
    """Return the config in a folder: that of an adapter if there is one, else that of a model, else None."""
    paths = (place / "adapter_config.json", place / "config.json")
    return next((path for path in paths if path.is_file()), None)


def _check_adapter(source: str, place: Path, task_type: str, command: str) -> None:
    """Raise `InputError`, which begins with `source`, unless a folder has weights that were made for a task.

    `place` is a folder with the config of an adapter or of a model. `task_type` is PEFT's name of the task, CAUSAL_LM
    or SEQ_CLS, and `command` is the command that makes such weights. A config that names no task is accepted.
    """
    again = f"make it again with `marlhf {command}`"
    path = _config_of(place)
    is_full = is_full_model(place)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if is_full:
            architectures = config.get("architectures") or [None]
            made_for = architectures[0]  # the name of a class of transformers
        else:
            made_for = config.get("task_type")
    except (OSError, ValueError, AttributeError):
        raise InputError(f"{source}: its {path.name} is damaged: {again}") from None
    found_task = made_for
    # The class names of score models all end alike. Those of causal LMs do not (such as GPT2LMHeadModel), so every
    # other class counts as a causal LM.
    if is_full and made_for:
        found_task = "SEQ_CLS" if made_for.endswith("ForSequenceClassification") else "CAUSAL_LM"
    if found_task not in (None, task_type):
        what = "a model" if is_full else "an adapter"
        raise InputError(
            f"{source}: {what} of another kind ({made_for}): give a folder that `marlhf {command}` wrote"
        )
    if is_sharded_folder(place):  # its weights have other names, and are checked when they are read
        return
    usual_name = "model" if is_full else "adapter_model"
    # A large model has several files; older ones are called pytorch_model.bin.
    patterns = ("model*", "pytorch_model*") if is_full else ("adapter_model.*",)
    files = [file for pattern in patterns for file in place.glob(pattern)]
    if not any(file.suffix in (".safetensors", ".bin") for file in files):
        raise InputError(f"{source}: no weights ({usual_name}.safetensors): {again}")


def other_base(folder: Path, model: str) -> str:
    """Return the base that an adapter was trained on if it differs from `model`, else "".

    Only what follows the last slash is compared, without case, because one model may be in several folders. A folder
    without an adapter, or an adapter that does not name its base, gives "".
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        return ""
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    is_other = base and Path(base).name.lower() != Path(model).name.lower()
    return base if is_other else ""
