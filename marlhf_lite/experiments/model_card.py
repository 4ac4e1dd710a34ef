"""The README.md beside a trained model: what it was made of, in the form that the model hub reads.

A card is there to be shared, so it has no path of this machine: of a local folder or file it tells the name alone.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import yaml
from accelerate import PartialState

from marlhf_lite.utils.run_folder import environment

CARD = "README.md"
# Options that say how a policy was trained, in the order in which the card lists those that a run has.
OF_METHOD = (
    "objective",
    "termination",
    "n",
    "lam",
    "kl_coef",
    "updates",
    "batch_size",
    "policy_learning_rate",
    "critic_learning_rate",
    "sft_learning_rate",
    "sft_epochs",
    "rm_learning_rate",
    "rm_epochs",
    "temperature",
    "max_response_length",
    "finetune",
    "lora_r",
)
HOW_TO_LOAD = {
    "peft": "Load it with `peft.AutoPeftModel.from_pretrained`, or put it beside its base with `PeftModel`.",
    "transformers": "Load it with transformers' `from_pretrained`.",
}


def write_model_card(folder: Path, method: str, options: Mapping) -> None:
    """Write the card of the model in a folder, in place of one that PEFT has made; in the main process only.

    Args:
        method: what was trained, such as PPO, MA-PPO, SFT or a reward model.
        options: those of the run, by name.
    """
    if PartialState().is_main_process:
        text = model_card(method, options, is_adapter=(folder / "adapter_config.json").is_file())
        (folder / CARD).write_text(text, encoding="utf-8")


def model_card(method: str, options: Mapping, is_adapter: bool) -> str:
    """Return the text of a card; the arguments are those of `write_model_card`."""
    base = public_name(options.get("model", ""))
    data = public_name(options.get("dataset", ""))
    library = "peft" if is_adapter else "transformers"
    head = {"base_model": base, "library_name": library, "tags": ["marlhf-lite", "rlhf"]}
    if is_on_hub(options.get("dataset", "")):
        head["datasets"] = [data]
    # Only the person who shares the model can state its licence, which depends on those of base and data.
    head["license"] = "unknown"

    made_by = environment()
    commit = made_by["git_commit"] or "unknown"
    if made_by["git_dirty"]:
        commit += ", with changes"
    facts = {
        "base model": base,
        "data": data,
        "method": method,
        "reward": _reward_of(options),
        "seed": options.get("seed", "unknown"),
        "code": f"marlhf_lite {made_by['marlhf_lite']}, commit {commit}",
        "versions": ", ".join(
            f"{name} {made_by[name]}" for name in ("torch", "transformers", "peft")
        ),
        "date": made_by["date"][:10],
        "licence": "not stated yet: see the licences of base model and data, then set `license` above",
    }
    lines = ["---", yaml.safe_dump(head, sort_keys=False).rstrip(), "---", ""]
    what = "adapter" if is_adapter else "model"
    lines += [
        f"# {method} of {base}",
        "",
        f"This {what} was trained on {data} with marlhf_lite.",
        "",
    ]
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", "Options:", ""]
    for name in OF_METHOD:
        value = options.get(name)
        if value is not None and value != "":
            lines.append(f"* `--{name} {value}`")
    return "\n".join([*lines, "", HOW_TO_LOAD[library], ""])


def public_name(place: str) -> str:
    """Return the name of a model or data set: that on the hub, else the last part of its path or address."""
    if is_on_hub(place):
        return place
    path = urlsplit(place).path if "://" in place else place
    return PurePosixPath(path.replace("\\", "/")).name or "unknown"


def is_on_hub(place: str) -> bool:
    """Return whether this is a name such as owner/name, and no folder or file of this machine."""
    parts = place.split("/")
    looks_like_path = "://" in place or place.startswith((".", "~", "/")) or "\\" in place
    return len(parts) == 2 and all(parts) and not looks_like_path and not Path(place).exists()


def _reward_of(options: Mapping) -> str:
    reward = options.get("reward", "")
    if reward == "rm":
        return "a reward model"
    if reward in ("environment", "") and options.get("environment"):
        return f"of the environment {options['environment']}"
    return reward or "none"
