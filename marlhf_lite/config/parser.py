"""Command line, `--config` files, presets and earlier runs to options: they all use one set of names.

Precedence, highest first:

1. flags;
2. files: `--config`, then the config.yaml of the run that `--resume` names;
3. presets: those of `--preset` (of several, later ones win), then data and model of the runs that `--sft`, `--rm`,
   `--policies` or `--policy` name, then those that a command takes unasked: `embedded/<data set>`, `pretrained` for a
   model that is not embedded, and `demo` for that command. A run names its presets in its first lines;
4. the defaults of the command's class.
"""

import argparse
import inspect
import os
import re
import shutil
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import yaml

from marlhf_lite.config import options as o
from marlhf_lite.config.commands import (
    OPTIONS,
    OWN,
    AddedCommand,
    StageCommand,
    groups,
    option_names,
)
from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.utils.errors import InputError, did_you_mean, raise_all
from marlhf_lite.utils.run_folder import CONFIG, RunFolder, read_yaml, run_of, split_paths

Command = TypeVar("Command")
PRESETS = Path(str(files("marlhf_lite"))) / "config" / "presets"
# What `--help` lists besides the options that only this command has; `--help_all` lists all.
COMMON = "model dataset size columns finetune dtype output_dir resume seed max_prompt_length max_response_length sft rm"
COMMON += " policy reward environment termination n objective updates batch_size micro_batch_size"
COMMON += " policy_learning_rate kl_coef temperature"
TYPES = {str: "TEXT", int: "INT", float: "FLOAT"}
TRUTH = dict.fromkeys("yes true t y 1".split(), True) | dict.fromkeys(
    "no false f n 0".split(), False
)
# Options that `--resume` may change: how long a run is, what it leaves, what fits into memory and what samples.
# They do not change what it computes (rows a pass change it by rounding, and another sampler, or another number of
# responses at a time, draws other responses).
OF_THE_START = {"output_dir", "resume", "at", "accept_changed"}  # of one command and not of its run
MAY_CHANGE = {*OF_THE_START, "updates", "prompt_epochs"}
MAY_CHANGE |= {"micro_batch_size", "per_device_train_batch_size", "generation_batch_size"}
MAY_CHANGE |= {
    f.name for kind in (o.CheckpointConfig, o.EngineConfig, o.LoggingConfig) for f in fields(kind)
}
# Options that name models which an earlier run made.
INPUTS = ("sft", "rm", "policies", "policy")
INHERITED = [
    f.name for kind in (o.DataConfig, o.EnvironmentConfig, o.ModelConfig) for f in fields(kind)
]
# Inherited options that may not differ: other rows would mix the parts of the split, another model has other weights.
# Loading the data shows whether --template changes the rows (`experiments.data`): most data sets do not use it.
MUST_MATCH = ("size", "model", "finetune")
# Options that say which rows are read. If a command reads other rows than a run, the run's data options do not count.
ROW_SOURCE = ("dataset", "dataset_config", "data_dir", "split")
DATA = [
    f.name for f in fields(o.DataConfig) if f.name not in {f.name for f in fields(o.LengthConfig)}
]
# A policy keeps the shape of its adapter: two policies may differ, but a command cannot ask for another shape.
ADAPTER = ("lora_r", "lora_alpha", "lora_target_modules")


class OptionParser(argparse.ArgumentParser):
    """The options of a command; an error is one line that names the option and the fix."""

    def __init__(self, name: str, command: type, shows_all: bool = False):
        width = min(110, shutil.get_terminal_size().columns)
        super().__init__(
            prog=f"marlhf {name}",
            usage=f"marlhf {name} [options]",
            description=inspect.cleandoc(command.__doc__),
            epilog=f"marlhf {name} --help_all lists all options.",
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=30, width=width
            ),
            allow_abbrev=False,
        )
        self.command, types, by_group = command, typing.get_type_hints(command), groups(command)
        shown = {*COMMON.split(), *(f.name for f in by_group.get(OWN, ()))}
        for title, options in by_group.items():
            group = self.add_argument_group(title)
            for f in options:
                text = f.metadata["help"] + ("" if f.default in (None, "") else f" [{f.default}]")
                is_shown = shows_all or f.name in shown or f.name.startswith(f"{name}_")
                reading = _reading(types[f.name])
                group.add_argument(
                    f"--{f.name}", help=text if is_shown else argparse.SUPPRESS, **reading
                )
        sources = self.add_argument_group(
            "Where options come from: flags win over --config, which wins over --preset"
        )
        sources.add_argument(
            "--config", metavar="FILE", help="YAML file with option names as keys."
        )
        if not issubclass(command, AddedCommand):
            text = "Named settings, comma-separated; later ones win, as in released,gemma-2b/tldr. See marlhf presets."
            sources.add_argument("--preset", metavar="TEXT", help=text)

    def error(self, message: str):
        raise InputError(f"{message.removeprefix('argument ')}: see {self.prog} --help")

    def read_flags(self, words: Sequence[str]) -> dict:
        """Return the options that these words give, by name and with their types; dashes in a name are underscores.

        Raises `InputError`.
        """
        words = [
            re.sub(r"^--[\w-]+", lambda flag: f"--{flag[0][2:].replace('-', '_')}", word)
            for word in words
        ]
        known, unknown = self.parse_known_args(words)
        flags, errors = [flag for action in self._actions for flag in action.option_strings], []
        for word in unknown[:1] + [word for word in unknown[1:] if word.startswith("--")]:
            word = word.partition("=")[0]
            hint = did_you_mean(word, flags)
            errors.append(
                InputError(f"{word}: no option of {self.prog}: {hint}see {self.prog} --help")
            )
        raise_all(errors)
        return {name: value for name, value in vars(known).items() if value is not None}

    def read_values(self, values: dict, source: str) -> dict:
        """Return the options among `values` that the command has, with their types. `source` is for errors.

        Options of other commands are left out: one file serves several commands.
        """
        mine = {action.dest for action in self._actions}
        known = mine if issubclass(self.command, AddedCommand) else mine | OPTIONS
        for key in values:
            if key not in known and key != "versions":  # which the config.yaml of a run has
                hint = did_you_mean(str(key), known).rstrip()
                raise InputError(
                    f"{source}: unknown key {key}: {hint or f'see {self.prog} --help'}"
                )
        # One word a flag, since a value may begin with a dash.
        flags = [
            f"--{key}={value}" for key, value in values.items() if key in mine and value is not None
        ]
        try:
            typed = self.read_flags(flags)
            self.make(typed)
        except InputError as error:
            raise_all([InputError(f"{source}: {line}") for line in str(error).splitlines()])
        return typed

    def read_presets(self, names: str, source: str) -> dict:
        """Return the options of presets that the command has; comma-separated, later ones win."""
        return self.read_values(read_presets(names, source), source) if names else {}

    def read_given(self, flags: dict, stored: dict | None = None) -> dict:
        """Return what flags, the file of --config, the resumed run (`stored`) and --preset give, in this order."""
        source = f"--config {flags.get('config')}"
        values = read_yaml(Path(flags["config"]).expanduser(), source) if "config" in flags else {}
        named = self.read_presets(flags.get("preset", ""), f"--preset {flags.get('preset')}")
        return merge([named, stored or {}, self.read_values(values, source), flags])

    def make(self, values: dict):
        """Return the command's options object; raises `InputError` for numbers out of bounds."""
        return self.command(
            **{name: values[name] for name in option_names(self.command) & values.keys()}
        )


def to_bool(word: str) -> bool:
    """Return what a word says of an option that is on or off."""
    if (value := TRUTH.get(word.lower())) is None:
        raise argparse.ArgumentTypeError(f"{word} is neither true nor false")
    return value


def bool_or_auto(word: str) -> bool | str:
    """Return what a word says of an option that is on, off, or decided by the run."""
    return word if word == "auto" else to_bool(word)


def _reading(hint) -> dict:
    """Return the arguments by which argparse reads a value of this type."""
    kinds = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": kinds}
    if bool in kinds:
        kind = to_bool if hint is bool else bool_or_auto
        return {"type": kind, "nargs": "?", "const": True, "metavar": "BOOL"}
    return {"type": kinds[0], "metavar": TYPES[kinds[0]]}


def parse(name: str, argv: Sequence[str], command: type[Command]) -> Command:
    """Return the options of `marlhf <name>` as an object of `command`, a class of `config.commands`.

    Raises `InputError` for an unknown option, preset or key, a wrong type, a value out of bounds, and if an option
    contradicts the run that a model comes from or that is resumed.
    """
    return parse_and_name_presets(name, argv, command)[0]


def parse_and_name_presets(
    name: str, argv: Sequence[str], command: type[Command]
) -> tuple[Command, list[str]]:
    """Return the options as `parse` does, and the names of the presets that they come from; later ones win."""
    parser = OptionParser(name, command, shows_all="--help_all" in argv)
    flags = parser.read_flags(["--help" if word == "--help_all" else word for word in argv])
    named = [word.strip() for word in flags.get("preset", "").split(",") if word]
    if resume := flags.get("resume", ""):
        stored = parser.read_values(_resumed_config(resume, flags), f"--resume {resume}")
        options = parser.make(parser.read_given(flags, stored) | {"output_dir": resume})
        _check_unchanged(options, parser.make(stored))
        return options, named
    asked = parser.read_given(flags)
    inherited = _inherit(parser, asked)
    automatic = _automatic_presets(name, command, inherited | asked)
    brought = parser.read_presets(",".join(automatic), f"marlhf {name}")
    return parser.make(merge([brought, inherited, asked])), [*automatic, *named]


def given(name: str, argv: Sequence[str], command: type[Command]) -> dict:
    """Return the options that flags, the file of --config and named presets give to `marlhf <name>`."""
    parser = OptionParser(name, command)
    return parser.read_given(parser.read_flags(argv))


def _automatic_presets(name: str, command: type, values: dict) -> list[str]:
    """Return the presets that a command takes unasked: its own, that of other models, that of an embedded data set."""
    names, known = option_names(command), presets()
    embedded = f"embedded/{values.get('dataset', o.DataConfig.dataset)}"
    embedded = embedded if "dataset" in names and embedded in known else ""
    brought = read_presets(embedded, "--dataset") if embedded else {}
    model = values.get("model", brought.get("model", o.ModelConfig.model))
    pretrained = "pretrained" if "model" in names and model not in EMBEDDED_MODELS else ""
    return [preset for preset in (name if name in known else "", pretrained, embedded) if preset]


def merge(layers: Sequence[dict]) -> dict:
    """Merge options; later layers win.

    Of `updates` and `prompt_epochs`, which set one number, the later one counts.
    """
    values: dict = {}
    for layer in layers:
        if "updates" in layer and "prompt_epochs" not in layer:
            values.pop("prompt_epochs", None)
        values |= layer
    return values


# Earlier runs


def _resumed_config(folder: str, flags: dict) -> dict:
    """Return the options of the run that `--resume` names. Raises `InputError` if it is not a run."""
    config = RunFolder.open(folder).config
    if (Path(folder) / "checkpoints").is_dir():
        raise InputError(f"--resume {folder}: the folder of one stage: give the run that it is in")
    if "output_dir" in flags:
        raise InputError(
            "--output_dir: a resumed run stays in its folder: leave it out, or leave out --resume"
        )
    return {name: value for name, value in config.items() if name not in OF_THE_START}


def _check_unchanged(options: StageCommand, started: StageCommand) -> None:
    """Raise `InputError` if an option that changes results differs from that of the resumed run.

    An option that the run has not stored, because it is newer, had its default.
    """
    for name, value in asdict(options).items():
        if name not in MAY_CHANGE and getattr(started, name) != value:
            then = f"the run was started with {getattr(started, name)}"
            raise InputError(f"--{name} {value}: {then}: leave it out, or start another run")


def _inherit(parser: OptionParser, values: dict) -> dict:
    """Return data and model options of the runs that a command's models come from, if `values` do not have them.

    If the command has its own data, theirs do not count. Raises `InputError` if such a run contradicts another one, or
    `values`.
    """
    known, has_own_rows = dict(values), bool(set(ROW_SOURCE) & values.keys())
    runs = [(option, run, RunFolder.open(run).config) for option, run in _input_runs(values)]
    has_policies = any(option == "policies" for option, *_ in runs)
    if not has_own_rows:
        # policies are evaluated on their own prompts
        runs.sort(key=lambda item: item[0] != "policies")
    for option, run, config in runs:
        theirs = parser.read_values(
            {k: config[k] for k in INHERITED if k in config}, f"{run}/{CONFIG}"
        )
        if "dataset" in theirs:  # an option that a run on data has not stored had its default
            theirs = {
                name: getattr(o.DataConfig, name) for name in MUST_MATCH if name in DATA
            } | theirs
        rows = {name: known[name] for name in ROW_SOURCE if name in known}
        if rows and not same_data(theirs | rows, theirs):
            if not has_own_rows and (option == "policies" or not has_policies):
                made = f"made with --dataset {theirs.get('dataset')}, but another run with --dataset {known['dataset']}"
                raise InputError(
                    f"--{option} {run}: {made}: give the data of this command by --dataset"
                )
            theirs = {name: value for name, value in theirs.items() if name not in DATA}
        for name, value in theirs.items():
            is_asked = name in ADAPTER and option != "rm" and name in values
            if (name in MUST_MATCH or is_asked) and known.get(name, value) != value:
                this, other = (
                    f"no --{name}" if x is None else f"--{name} {x}" for x in (value, known[name])
                )
                fix = f"this command has {other}: give {this}"
                fix = fix if name in values else f"another run has {other}: train one of them again"
                raise InputError(f"--{option} {run}: made with {this}, but {fix}")
            known.setdefault(name, value)
    return {name: value for name, value in known.items() if name not in values}


def same_data(one: dict, other: dict) -> bool:
    """Return whether the options of two commands name the same rows; a path may be written in several ways."""

    def key(values: dict) -> list[str]:
        place = os.path.realpath(os.path.expanduser(str(values.get("dataset", ""))))
        return [place, *(values.get(part, "") for part in ROW_SOURCE[1:])]

    return key(one) == key(other)


def _input_runs(values: dict) -> Iterator[tuple[str, Path]]:
    """Yield the options that name adapters, each with the run that the adapter is in, or is, if any."""
    for option in filter(values.get, INPUTS):
        folders = values[option]
        for folder in (
            [folder for _, folder in named_folders(folders)] if option == "policies" else [folders]
        ):
            if run := run_of(Path(folder).expanduser()):
                yield option, run


def named_folders(policies: str) -> list[tuple[str, str]]:
    """Return the name (empty if none is given) and the folder of each policy in `--policies`.

    A name has no "=": the text after the first one is the folder.
    """
    return [
        tuple(item.split("=", 1)) if "=" in item else ("", item) for item in split_paths(policies)
    ]


# Presets


def presets() -> list[str]:
    """Return the names of the presets that come with the library: methods and cards first, then model/task."""
    names = (
        path.relative_to(PRESETS).as_posix().removesuffix(".yaml")
        for path in PRESETS.rglob("*.yaml")
    )
    return sorted(names, key=lambda name: (name.count("/"), name))


def preset_file(name: str, source: str) -> Path:
    """Return the file of a preset. Raises `InputError` that begins with `source` for an unknown name."""
    if name not in presets():
        hint = did_you_mean(name, presets()).rstrip() or f"choose from {', '.join(presets())}"
        raise InputError(f"{source}: unknown preset {name!r}: {hint}")
    return PRESETS / f"{name}.yaml"


def read_presets(names: str, source: str) -> dict:
    """Return the options of presets, comma-separated; later ones win. Raises `InputError` that begins with `source`."""
    return merge(
        [read_yaml(preset_file(name.strip(), source), source) for name in names.split(",")]
    )


def list_presets() -> str:
    """Return a table of all presets: name, model, data set, and the first line of the file."""
    rows = [("preset", "model", "dataset", "what it is")]
    for name in presets():
        text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
        values, about = yaml.safe_load(text), text.partition("\n")[0].removeprefix("# ")
        rows.append((name, values.get("model", "-"), values.get("dataset", "-"), about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
