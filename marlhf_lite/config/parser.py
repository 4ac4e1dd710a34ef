"""Command line, `--config` files, presets and earlier runs to options: they all use one set of names.

Precedence, highest first:

1. flags;
2. files: `--config`, then the config.yaml of the run that `--resume` names, apart from names of code;
3. presets: those of `--preset` (of several, later ones win), then data and model of the runs that `--sft`, `--rm`,
   `--policies` or `--policy` name, then those that a command takes unasked: `embedded/<data set>`, `pretrained` for a
   model that is not embedded, and `demo` for that command. A run names its presets in its first lines;
4. the defaults of the command's class.
"""

import argparse
import inspect
import os
import re
import shlex
import shutil
import typing
from collections.abc import Iterator, Mapping, Sequence
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
from marlhf_lite.utils.user_code import is_user_code

Command = TypeVar("Command")
PRESETS = Path(str(files("marlhf_lite"))) / "config" / "presets"
# What `--help` lists besides the options that only this command has; `--help_all` lists all.
COMMON = (
    "model dataset size columns finetune dtype output_dir resume seed max_prompt_length max_response_length sft rm "
    "policy reward environment termination n objective updates batch_size micro_batch_size policy_learning_rate "
    "kl_coef temperature"
)
TYPES = {str: "TEXT", int: "INT", float: "FLOAT"}
YES = ("yes", "true", "t", "y", "1")
NO = ("no", "false", "f", "n", "0")


def names_of_options(*groups_of_options: type) -> list[str]:
    """Return the names of the options in these groups, in order."""
    return [f.name for group in groups_of_options for f in fields(group)]


# Options that `--resume` may change: how long a run is, what it leaves, what fits into memory and what samples.
# They do not change what it computes (rows a pass change it by rounding, and another sampler, or another number of
# responses at a time, draws other responses).
OF_THE_START = {"output_dir", "resume", "at", "accept_changed"}  # of one command and not of its run
MAY_CHANGE = {*OF_THE_START, "updates", "prompt_epochs"}
# A run that was copied finds its models and data elsewhere: the manifest's hashes tell whether they are the same.
MAY_CHANGE |= {"sft", "rm", "policies", "model", "dataset", "chat_template"}
MAY_CHANGE |= {"micro_batch_size", "per_device_train_batch_size", "generation_batch_size"}
MAY_CHANGE |= {*names_of_options(o.CheckpointConfig, o.EngineConfig, o.LoggingConfig)}
# Options whose value may name Python code, which is imported and run. They come from the words of the command, or from
# a file that the user wrote, never from the record of a run: a run may be somebody else's.
CODE_OPTIONS = ("reward", "environment", "objective", "termination", "sampler")
# Options that name models which an earlier run made.
INPUTS = ("sft", "rm", "policies", "policy")
INHERITED = names_of_options(o.DataConfig, o.EnvironmentConfig, o.ModelConfig)
# Inherited options that may not differ: other rows would mix the parts of the split, another model has other weights.
# Loading the data shows whether --template changes the rows (`experiments.data`): most data sets do not use it.
MUST_MATCH = ("size", "model", "finetune")
# Options that say which rows are read. If a command reads other rows than a run, the run's data options do not count.
ROW_SOURCE = ("dataset", "dataset_config", "data_dir", "split")
DATA = [
    name for name in names_of_options(o.DataConfig) if name not in names_of_options(o.LengthConfig)
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
        self.command = command
        types = typing.get_type_hints(command)
        options_by_topic = groups(command)
        always_shown = {*COMMON.split(), *(f.name for f in options_by_topic.get(OWN, ()))}
        for topic, options in options_by_topic.items():
            group = self.add_argument_group(topic)
            for f in options:
                help_text = f.metadata["help"]
                if f.default not in (None, ""):
                    help_text += f" [{f.default}]"
                # as sft_epochs of marlhf sft
                has_name_of_command = f.name.startswith(f"{name}_")
                if not (shows_all or f.name in always_shown or has_name_of_command):
                    help_text = argparse.SUPPRESS
                how_to_read = _arguments_of_argparse(types[f.name])
                group.add_argument(f"--{f.name}", help=help_text, **how_to_read)
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

        Raises `InputError` with a line for each unknown option.
        """

        def with_underscores(option: re.Match) -> str:
            return "--" + option[0].removeprefix("--").replace("-", "_")

        words = [re.sub(r"^--[\w-]+", with_underscores, word) for word in words]
        known, unknown = self.parse_known_args(words)
        # what follows an unknown option may be its value: it is no second problem
        faulty = unknown[:1] + [word for word in unknown[1:] if word.startswith("--")]
        all_flags = [flag for action in self._actions for flag in action.option_strings]
        problems = []
        for word in faulty:
            name = word.partition("=")[0]
            hint = did_you_mean(name, all_flags)
            fix = f"{hint}see {self.prog} --help"
            problems.append(InputError(f"{name}: no option of {self.prog}: {fix}"))
        raise_all(problems)
        return {name: value for name, value in vars(known).items() if value is not None}

    def read_values(self, values: dict, source: str) -> dict:
        """Return the options among `values` that the command has, with their types. `source` is for errors.

        Options of other commands are left out: one file serves several commands.
        """
        of_this_command = {action.dest for action in self._actions}
        known = of_this_command
        if not issubclass(self.command, AddedCommand):
            known = of_this_command | OPTIONS
        for key in values:
            # the config.yaml of a run has its versions
            if key not in known and key != "versions":
                fix = did_you_mean(str(key), known).rstrip() or f"see {self.prog} --help"
                raise InputError(f"{source}: unknown key {key}: {fix}")
        # One word for a flag and its value, since a value may begin with a dash.
        flags = []
        for key, value in values.items():
            if key in of_this_command and value is not None:
                flags.append(f"--{key}={value}")
        try:
            typed = self.read_flags(flags)
            self.make(typed)
        except InputError as error:
            raise_all([InputError(f"{source}: {line}") for line in str(error).splitlines()])
        return typed

    def read_presets(self, names: str, source: str) -> dict:
        """Return the options of presets that the command has; comma-separated, later ones win."""
        if not names:
            return {}
        return self.read_values(read_presets(names, source), source)

    def read_given(self, flags: dict, stored: dict | None = None) -> dict:
        """Return what flags, the file of --config, the resumed run (`stored`) and --preset give, in this order."""
        source = f"--config {flags.get('config')}"
        named = self.read_presets(flags.get("preset", ""), f"--preset {flags.get('preset')}")
        from_file = {}
        if "config" in flags:
            path = Path(flags["config"]).expanduser()
            values = read_yaml(path, source)
            from_file = self.read_values(values, source)
            # "versions" also gives away a copy of a run's config.yaml
            if "versions" in values or run_of(path.parent):
                check_code_is_named_anew(from_file, flags, source)
        return merge([named, stored or {}, from_file, flags])

    def make(self, values: dict):
        """Return the command's options object; raises `InputError` for numbers out of bounds."""
        return self.command(
            **{name: values[name] for name in option_names(self.command) & values.keys()}
        )


def to_bool(word: str) -> bool:
    """Return what a word says of an option that is on or off."""
    if word.lower() in YES:
        return True
    if word.lower() in NO:
        return False
    raise argparse.ArgumentTypeError(f"{word} is neither true nor false")


def bool_or_auto(word: str) -> bool | str:
    """Return what a word says of an option that is on, off, or decided by the run."""
    return word if word == "auto" else to_bool(word)


def _arguments_of_argparse(hint) -> dict:
    """Return the arguments by which argparse reads a value of this type."""
    kinds = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": kinds}
    if hint is bool:
        return {"type": to_bool, "nargs": "?", "const": True, "metavar": "BOOL"}
    if bool in kinds:
        return {"type": bool_or_auto, "nargs": "?", "const": True, "metavar": "BOOL"}
    # of `int | None` the first: None is what an option is that nobody gives
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
    words = ["--help" if word == "--help_all" else word for word in argv]
    flags = parser.read_flags(words)
    named_presets = [word.strip() for word in flags.get("preset", "").split(",") if word]
    resume = flags.get("resume", "")
    if resume:
        source = f"--resume {resume}"
        stored = parser.read_values(_read_resumed_run(name, resume, flags), source)
        check_code_is_named_anew(stored, parser.read_given(flags), source)
        options = parser.make(parser.read_given(flags, stored) | {"output_dir": resume})
        _check_unchanged(options, parser.make(stored))
        return options, named_presets
    asked = parser.read_given(flags)
    inherited = _inherit(parser, asked)
    automatic_presets = _automatic_presets(name, command, inherited | asked)
    brought = parser.read_presets(",".join(automatic_presets), f"marlhf {name}")
    options = parser.make(merge([brought, inherited, asked]))
    return options, [*automatic_presets, *named_presets]


def options_that_are_given(name: str, argv: Sequence[str], command: type[Command]) -> dict:
    """Return the options that flags, the file of --config and named presets give to `marlhf <name>`."""
    parser = OptionParser(name, command)
    return parser.read_given(parser.read_flags(argv))


def _automatic_presets(name: str, command: type, values: dict) -> list[str]:
    """Return the presets that a command takes unasked: its own, that of other models, that of an embedded data set."""
    options = option_names(command)
    all_presets = presets()
    found = []
    if name in all_presets:
        found.append(name)
    of_data = f"embedded/{values.get('dataset', o.DataConfig.dataset)}"
    is_embedded = "dataset" in options and of_data in all_presets
    # an embedded data set brings its model along
    brought = read_presets(of_data, "--dataset") if is_embedded else {}
    model = values.get("model", brought.get("model", o.ModelConfig.model))
    if "model" in options and model not in EMBEDDED_MODELS:
        found.append("pretrained")
    if is_embedded:
        found.append(of_data)
    return found


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


def _read_resumed_run(command: str, folder: str, flags: dict) -> dict:
    """Return the options of the run that `--resume` names. Raises `InputError` if it is not a run of this command."""
    run = RunFolder.open(folder)
    made_by = run.manifest["command"]  # empty in runs of version 1.0
    if made_by and made_by != command:
        resume = f"marlhf {made_by} --resume {shlex.quote(folder)}"
        raise InputError(f"--resume {folder}: a run of marlhf {made_by}: give {resume}")
    if (Path(folder) / "checkpoints").is_dir():
        raise InputError(f"--resume {folder}: the folder of one stage: give the run that it is in")
    if "output_dir" in flags:
        raise InputError(
            "--output_dir: a resumed run stays in its folder: leave it out, or leave out --resume"
        )
    stored = {name: value for name, value in run.config.items() if name not in OF_THE_START}
    # A run of version 1.0 has an option for what is a lever of --fast today.
    if stored.pop("fused_kernels", False):
        stored["fast"] = "fused"
    return stored


def _check_unchanged(options: StageCommand, started: StageCommand) -> None:
    """Raise `InputError` if an option that changes results differs from that of the resumed run.

    An option that the run has not stored, because it is newer, had its default.
    """
    for name, value in asdict(options).items():
        value_at_start = getattr(started, name)
        if name not in MAY_CHANGE and value_at_start != value:
            then = f"the run was started with {value_at_start}"
            raise InputError(f"--{name} {value}: {then}: leave it out, or start another run")


def _inherit(parser: OptionParser, values: dict) -> dict:
    """Return data and model options of the runs that a command's models come from, if `values` do not have them.

    If the command has its own data, theirs do not count. Raises `InputError` if such a run contradicts another one, or
    `values`.
    """
    known = dict(values)
    has_own_rows = bool(set(ROW_SOURCE) & values.keys())
    runs = [(option, run, RunFolder.open(run).config) for option, run in _input_runs(values)]
    has_policies = any(option == "policies" for option, *_ in runs)
    if not has_own_rows:
        # policies are evaluated on their own prompts: their run decides first
        runs.sort(key=lambda item: item[0] != "policies")
    for option, run, config in runs:
        source = f"--{option} {run}"
        stored = {name: config[name] for name in INHERITED if name in config}
        theirs = parser.read_values(stored, f"{run}/{CONFIG}")
        if "dataset" in theirs:  # an option that a run on data has not stored had its default
            defaults = {name: getattr(o.DataConfig, name) for name in MUST_MATCH if name in DATA}
            theirs = defaults | theirs
        known_rows = {name: known[name] for name in ROW_SOURCE if name in known}
        if known_rows and not same_data(theirs | known_rows, theirs):
            # Other rows are meant if the command names them, or if policies do.
            must_agree = option == "policies" or not has_policies
            if must_agree and not has_own_rows:
                made = f"made with --dataset {theirs.get('dataset')}, but another run with --dataset {known['dataset']}"
                raise InputError(f"{source}: {made}: give the data of this command by --dataset")
            theirs = {name: value for name, value in theirs.items() if name not in DATA}
        check_code_is_named_anew(theirs, values, source)
        for name, value in theirs.items():
            # a reward model's adapter is its own
            asks_for_shape = name in ADAPTER and option != "rm" and name in values
            if (name in MUST_MATCH or asks_for_shape) and known.get(name, value) != value:
                this = _as_flag(name, value)
                other = _as_flag(name, known[name])
                fix = f"another run has {other}: train one of them again"
                if name in values:
                    fix = f"this command has {other}: give {this}"
                raise InputError(f"{source}: made with {this}, but {fix}")
            known.setdefault(name, value)
    return {name: value for name, value in known.items() if name not in values}


def _as_flag(name: str, value: object) -> str:
    return f"no --{name}" if value is None else f"--{name} {value}"


def names_of_code(values: Mapping) -> dict[str, str]:
    """Return the options among `values` that name Python code outside this library, as package.module:name.

    What one of the library's own presets names, such as the environment of tiny-guess, is the library's.
    """
    found = {}
    for option in CODE_OPTIONS:
        value = values.get(option)
        if value and is_user_code(value) and not _is_in_a_preset(option, value):
            found[option] = value
    return found


def _is_in_a_preset(option: str, value: str) -> bool:
    return any(read_presets(name, name).get(option) == value for name in presets())


def as_words(values: Mapping[str, str]) -> str:
    """Return options as words that a shell reads as they are."""
    return " ".join(f"--{option} {shlex.quote(value)}" for option, value in values.items())


def check_code_is_named_anew(recorded: Mapping, given: Mapping, source: str) -> None:
    """Raise `InputError` if the record of a run names code and the user has not given that option himself.

    Importing such a name runs the code. A run that was downloaded must not choose what runs here.
    """
    code = names_of_code(recorded)
    missing = {option: value for option, value in code.items() if option not in given}
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise InputError(f"{source}: the run used {as_words(missing)}: give {them}")


def same_data(one: dict, other: dict) -> bool:
    """Return whether the options of two commands name the same rows; a path may be written in several ways."""

    def key(values: dict) -> list[str]:
        place = os.path.realpath(os.path.expanduser(str(values.get("dataset", ""))))
        return [place, *(values.get(part, "") for part in ROW_SOURCE[1:])]

    return key(one) == key(other)


def _input_runs(values: dict) -> Iterator[tuple[str, Path]]:
    """Yield the options that name adapters, each with the run that the adapter is in, or is, if any."""
    for option in INPUTS:
        value = values.get(option)
        if not value:
            continue
        folders = [value]
        if option == "policies":
            folders = [folder for _, folder in named_folders(value)]
        for folder in folders:
            run = run_of(Path(folder).expanduser())
            if run:
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
        values = yaml.safe_load(text)
        first_line = text.partition("\n")[0].removeprefix("# ")
        rows.append((name, values.get("model", "-"), values.get("dataset", "-"), first_line))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
