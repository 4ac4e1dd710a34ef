"""The protocol of a study: a YAML file, read and checked before anything runs."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path

import yaml

from marlhf_lite.config.options import GROUPS
from marlhf_lite.utils.errors import InputError

STUDIES = Path(str(files("marlhf_lite"))) / "experiments" / "studies"
START = ("model", "data", "trainer", "sft", "rm")
COMMON = ("run", *START, "inputs", "eval")
TRAINING = (*COMMON, "checkpoint", "logging")
# Command of a method -> groups of options it takes.
COMMANDS = {
    "ppo": (*TRAINING, "reward", "macro", "ppo"),
    "rloo": (*TRAINING, "reward", "rloo"),
    "grpo": (*TRAINING, "reward", "grpo"),
    "dpo": (*TRAINING, "dpo", "sampling"),
    "sft": (*COMMON, "sampling"),  # no training
    "best_of_n": (
        *COMMON,
        "sampling",
    ),  # of the method's `samples` answers of the SFT model, the best by the reward model
}
# What a study says to each of its runs itself.
OWN = {
    "sft",
    "rm",
    "responses",
    "eval_temperatures",
    "eval_samples",
    "best_of",
    "from_checkpoint",
    *(f.name for f in fields(GROUPS["run"])),
}
# Key of a protocol -> its type, and that in words.
SHAPES = {
    "methods": (dict, "a name, a command and options for each"),
    "seeds": (list, "whole numbers, such as [0, 1, 2]"),
    "shared": (dict, "names and values of options"),
    "baseline": (str, "a method's name"),
    "goal": (str, "a method's name"),
    "first_prompt": (int, "a whole number"),
    "figures": (dict, "a list of methods for each name"),
}


@dataclass(frozen=True)
class Study:
    """A protocol."""

    name: str
    methods: dict[str, dict]  # name -> {command, options, samples: answers to each held-out prompt, 1 if not given}
    seeds: tuple[int, ...]
    shared: dict = field(default_factory=dict)
    baseline: str = "SFT"  # gains are over this method
    goal: str = "PPO"  # the method whose final RM score the others are timed to
    first_prompt: int = 0  # of the held-out prompts: where the evaluation begins
    figures: dict[str, list[str]] = field(default_factory=dict)  # name of a figure -> methods; default: one with all


def run_name(method: str, seed: int) -> str:
    """What a run's files are called."""
    return f"{re.sub(r'[^A-Za-z0-9=]+', '-', method).strip('-')}-seed{seed}"


def load_study(name: str) -> Study:
    """A study of the library by its name, or a YAML file. Raises `InputError` for a fault in it."""
    known = sorted(path.stem for path in STUDIES.glob("*.yaml"))
    path = STUDIES / f"{name}.yaml" if name in known else Path(name).expanduser()
    if not path.is_file():
        raise InputError(f"--name {name}: no such study: choose from {', '.join(known)}, or give a YAML file")
    values = _read(path)
    study = Study(path.stem, **{"methods": {}, "seeds": ()} | values)
    _check_methods(study, path)
    named = {key: [values[key]] for key in ("baseline", "goal") if key in values}
    for key, names in (named | {f"figures, {key}": names for key, names in study.figures.items()}).items():
        if not isinstance(names, list):
            raise InputError(f"{path}: {key} {names!r}: give a list of methods")
        for name in names:
            if name not in study.methods:
                raise InputError(f"{path}: {key}: no method is called {name}: there are {', '.join(study.methods)}")
    return study


def _read(path: Path) -> dict:
    """The keys that have values, each of the type it has to be."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML in UTF-8: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: no names and values: give methods, seeds and shared options")
    values = {key: value for key, value in values.items() if value is not None}
    for key, value in values.items():
        if key not in SHAPES:
            close = difflib.get_close_matches(str(key), SHAPES, n=1) or SHAPES
            raise InputError(f"{path}: unknown key {key}: did you mean {', '.join(close)}?")
        if not isinstance(value, SHAPES[key][0]):
            raise InputError(f"{path}: {key} {value!r}: give {SHAPES[key][1]}")
    return values


def _check_methods(study: Study, path: Path) -> None:
    if not study.methods:
        raise InputError(f"{path}: methods: none: give each a name, a command and its options")
    for name, method in study.methods.items():
        if not isinstance(name, str):
            raise InputError(f"{path}: method {name}: put its name in quotes")
        _check_method(f"{path}: method {name}", method)
    _check_options(f"{path}: shared", study.shared)
    names = [run_name(name, 0) for name in study.methods]
    if len(set(names)) < len(names):
        raise InputError(f"{path}: methods: two names differ in punctuation alone: their files would be the same")


def _check_method(where: str, method: dict) -> None:
    is_method = isinstance(method, dict) and set(method) <= {"command", "options", "samples"}
    if not is_method or method.get("command") not in COMMANDS:
        raise InputError(f"{where}: give a command ({', '.join(COMMANDS)}), and options and samples if it has some")
    least = 2 if method["command"] == "best_of_n" else 1
    samples, options = method.get("samples", 1), method.get("options") or {}
    if not isinstance(samples, int) or samples < least:
        raise InputError(f"{where}: samples {samples}: give a whole number from {least} up")
    if not isinstance(options, dict):
        raise InputError(f"{where}: options {options!r}: give names and values")
    _check_options(where, options)


def _check_options(where: str, options: dict) -> None:
    for name in options:
        if name in OWN:
            raise InputError(f"{where}: {name}: the study says that itself: leave it out")
