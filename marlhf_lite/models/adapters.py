"""Folders, checked before anything loads: what comes with the project, what stages made, and where a run may go."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from marlhf_lite.utils.errors import InputError

# Option -> the command that makes its folder, what peft calls such an adapter, and where in a run it may stand.
ADAPTERS = {
    "sft": ("sft", "CAUSAL_LM", ("sft",)),
    "rm": ("rm", "SEQ_CLS", ("rm",)),
    "policies": ("ppo", "CAUSAL_LM", ("policy", "*/policy")),
}
# What peft calls an adapter -> how transformers ends the class name of such a whole model.
WHOLE = {"CAUSAL_LM": "ForCausalLM", "SEQ_CLS": "ForSequenceClassification"}


def shipped(name: str) -> Path:
    """Where something that comes with the project is: in an installed package, or in the checkout's data/."""
    packed = Path(str(files("marlhf_lite"))) / "_data" / name
    return packed if packed.exists() else Path(__file__).parents[2] / "data" / name


def adapter(option: str, folder: str) -> Path:
    """The folder that `--sft`, `--rm` or one of `--policies` means: it, or the stage's folder inside a run.

    It holds an adapter, or after full fine-tuning a whole model.
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
    raise InputError(f"--{option} {folder}: no adapter there: give a folder that `marlhf {command}` wrote")


def _config_of(place: Path) -> Path | None:
    """The file that says what the weights there are: of an adapter first, for it may lie beside a model's."""
    paths = (place / "adapter_config.json", place / "config.json")
    return next((path for path in paths if path.is_file()), None)


def _check_adapter(source: str, place: Path, kind: str, command: str) -> None:
    again, path = f"make it again with `marlhf {command}`", _config_of(place)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        whole = path.name == "config.json"
        found = (config.get("architectures") or [None])[0] if whole else config.get("task_type")
    except (OSError, ValueError, AttributeError):
        raise InputError(f"{source}: its {path.name} is damaged: {again}") from None
    fits = found is None or (found.endswith(WHOLE[kind]) if whole else found == kind)
    if not fits:
        what = "a model" if whole else "an adapter"
        raise InputError(f"{source}: {what} of another kind ({found}): give a folder that `marlhf {command}` wrote")
    weights = "model*" if whole else "adapter_model.*"
    if not any(file.suffix in (".safetensors", ".bin") for file in place.glob(weights)):
        raise InputError(f"{source}: no weights ({weights.rstrip('.*')}.safetensors): {again}")
