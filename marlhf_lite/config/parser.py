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
COMMON = frozenset(
    "model dataset size columns finetune dtype output_dir resume seed max_prompt_length max_response_length sft rm "
    "policy reward environment termination n objective updates batch_size micro_batch_size policy_learning_rate "
    "kl_coef temperature".split()
)
TYPES = {str: "TEXT", int: "INT", float: "FLOAT"}
YES = ("yes", "true", "t", "y", "1")
NO = ("no", "false", "f", "n", "0")


def names_of_options(*groups_of_options: type) -> list[str]:
    """Return the names of the options in these groups, in order."""
    names = []
    for group in groups_of_options:
        names.extend(option.name for option in fields(group))
    return names


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
# Options that a command takes over from the run that made such a model, if it does not give them itself.
INHERITED = names_of_options(o.DataConfig, o.EnvironmentConfig, o.ModelConfig)
# Inherited options that may not differ: other rows would mix the parts of the split, another model has other weights.
# Loading the data shows whether --template changes the rows (`experiments.data`): most data sets do not use it.
MUST_MATCH = ("size", "model", "finetune")
# Options that say which rows are read. If a command reads other rows than a run, the run's data options do not count.
ROW_SOURCE = ("dataset", "dataset_config", "data_dir", "split")
# The data options; limits of lengths, which that class has as well, count for all rows.
_LENGTHS = names_of_options(o.LengthConfig)
DATA = [name for name in names_of_options(o.DataConfig) if name not in _LENGTHS]
# A policy keeps the shape of its adapter: two policies may differ, but a command cannot ask for another shape.
ADAPTER = ("lora_r", "lora_alpha", "lora_target_modules")


class OptionParser(argparse.ArgumentParser):
    """The options of a command; an error is one line that names the option and the fix.

    `name` is the command's, `command` its class of options, and `shows_all` whether --help lists every option.
    """

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
        for topic, options in groups(command).items():
            group = self.add_argument_group(topic)
            for option in options:
                help_text = option.metadata["help"]
                if option.default not in (None, ""):
                    help_text += f" [{option.default}]"
                is_listed = (
                    shows_all
                    or topic == OWN
                    or option.name in COMMON
                    or option.name.startswith(f"{name}_")  # as sft_epochs of marlhf sft
                )
                if not is_listed:
                    help_text = argparse.SUPPRESS
                how_to_read = _arguments_of_argparse(types[option.name])
                group.add_argument(f"--{option.name}", help=help_text, **how_to_read)
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
        """Return the options that these words give, by name and with their types.

        A dash in the name of an option counts as an underscore.
        Raises `InputError` with a line for each unknown option.
        """

        def with_underscores(option: re.Match) -> str:
            return "--" + option[0].removeprefix("--").replace("-", "_")

        words = [re.sub(r"^--[\w-]+", with_underscores, word) for word in words]
        known, unknown = self.parse_known_args(words)
        all_flags: list[str] = []
        for action in self._actions:
            all_flags.extend(action.option_strings)
        problems = []
        for number, word in enumerate(unknown):
            # What follows an unknown option may be its value: it is no second problem.
            is_a_problem = number == 0 or word.startswith("--")
            if is_a_problem:
                name = word.partition("=")[0]
                fix = f"{did_you_mean(name, all_flags)}see {self.prog} --help"
                problems.append(InputError(f"{name}: no option of {self.prog}: {fix}"))
        raise_all(problems)
        # argparse sets an option that is not given to None.
        return {name: value for name, value in vars(known).items() if value is not None}

    def read_values(self, values: dict, source: str) -> dict:
        """Return the options among `values` that the command has, with their types.

        Options of other commands are left out, because one file may serve several commands. Raises `InputError`, which
        begins with `source`, for a name that no command has, and for a wrong type or a number out of bounds.
        """
        of_this_command = {action.dest for action in self._actions}
        known = of_this_command
        # A file for a command that another package added is for it alone, and shares no options with ours.
        if not issubclass(self.command, AddedCommand):
            known = of_this_command | OPTIONS
        for key in values:
            # The config.yaml of a run also has `versions`, which is no option.
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
            self.make(typed)  # only because this checks the numbers
        except InputError as error:
            raise_all([InputError(f"{source}: {line}") for line in str(error).splitlines()])
        return typed

    def read_presets(self, names: str, source: str) -> dict:
        """Return the options of presets that the command has; `names` are comma-separated, later ones win."""
        if not names:
            return {}
        return self.read_values(read_presets(names, source), source)

    def read_given(self, flags: dict, stored: dict | None = None) -> dict:
        """Return the options that the user gives, with those of the run that is resumed (`stored`), if there is one.

        Flags win over the file of --config, the file over `stored`, and `stored` over --preset.
        """
        from_presets = self.read_presets(flags.get("preset", ""), f"--preset {flags.get('preset')}")
        from_file = {}
        if "config" in flags:
            source = f"--config {flags['config']}"
            path = Path(flags["config"]).expanduser()
            values = read_yaml(path, source)
            from_file = self.read_values(values, source)
            # The file may be the config.yaml of a run, or a copy of one, which still has its `versions`. The run may
            # come from somebody else, so its record must not choose which code runs here.
            is_record_of_a_run = "versions" in values or run_of(path.parent) is not None
            if is_record_of_a_run:
                check_code_is_named_anew(from_file, flags, source)
        return merge([from_presets, stored or {}, from_file, flags])

    def make(self, values: dict):
        """Return the command's options object, with defaults for what is not among `values`.

        Options of other commands among them are left out. Raises `InputError` for numbers out of bounds.
        """
        names = option_names(self.command) & values.keys()
        return self.command(**{name: values[name] for name in names})


def to_bool(word: str) -> bool:
    """Return what a word says of an option that is on or off."""
    if word.lower() in YES:
        return True
    if word.lower() in NO:
        return False
    raise argparse.ArgumentTypeError(f"{word} is neither true nor false")


def bool_or_auto(word: str) -> bool | str:
    """Return what a word says of an option that is on, off, or decided by the run: a bool or `auto`."""
    if word == "auto":
        return word
    return to_bool(word)


def _arguments_of_argparse(type_hint) -> dict:
    """Return the arguments of `add_argument` by which argparse reads a value of an option of this type.

    A flag of an option that is on or off needs no value: alone it means on.
    """
    if typing.get_origin(type_hint) is typing.Literal:
        return {"choices": typing.get_args(type_hint)}
    if type_hint is bool:
        return {"type": to_bool, "nargs": "?", "const": True, "metavar": "BOOL"}
    parts_of_union = typing.get_args(type_hint)
    if bool in parts_of_union:  # bool | Literal["auto"]
        return {"type": bool_or_auto, "nargs": "?", "const": True, "metavar": "BOOL"}
    # Of `int | None` the first: None is what an option is that nobody gives.
    kind = parts_of_union[0] if parts_of_union else type_hint
    return {"type": kind, "metavar": TYPES[kind]}


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
    # 1. The words of the command. `--help` prints the options and ends the program here.
    words = list(argv)
    shows_all = "--help_all" in words
    if shows_all:
        words[words.index("--help_all")] = "--help"
    parser = OptionParser(name, command, shows_all)
    flags = parser.read_flags(words)
    named_presets = [word.strip() for word in flags.get("preset", "").split(",") if word]

    # 2. A resumed run keeps its own options. Only some of them may change, and the user's code must be named again.
    resume = flags.get("resume", "")
    if resume:
        source = f"--resume {resume}"
        stored = parser.read_values(_read_resumed_run(name, resume, flags), source)
        check_code_is_named_anew(stored, parser.read_given(flags), source)
        options = parser.make(parser.read_given(flags, stored) | {"output_dir": resume})
        _check_unchanged(options, parser.make(stored))
        return options, named_presets

    # 3. A new run: what the user gives wins over earlier runs, and these over the presets that nobody asked for.
    given = parser.read_given(flags)
    inherited = _inherit(parser, given)
    automatic_presets = _automatic_presets(name, command, inherited | given)
    of_automatic_presets = parser.read_presets(",".join(automatic_presets), f"marlhf {name}")
    options = parser.make(merge([of_automatic_presets, inherited, given]))
    return options, [*automatic_presets, *named_presets]


def options_that_are_given(name: str, argv: Sequence[str], command: type[Command]) -> dict:
    """Return the options that flags, the file of --config and named presets give to `marlhf <name>`."""
    parser = OptionParser(name, command)
    return parser.read_given(parser.read_flags(argv))


def _automatic_presets(name: str, command: type, values: dict) -> list[str]:
    """Return the presets that a command takes unasked; later ones win.

    These are the one with the command's own name, `pretrained` for a model that is not embedded, and that of an
    embedded data set. `values` are the options that the user or earlier runs give.
    """
    options = option_names(command)
    all_presets = presets()
    preset_of_data = f"embedded/{values.get('dataset', o.DataConfig.dataset)}"
    has_embedded_data = "dataset" in options and preset_of_data in all_presets
    model = o.ModelConfig.model
    if has_embedded_data:  # its preset names the model that goes with it
        model = read_presets(preset_of_data, "--dataset").get("model", model)
    model = values.get("model", model)
    found = []
    if name in all_presets:
        found.append(name)
    if "model" in options and model not in EMBEDDED_MODELS:
        found.append("pretrained")
    if has_embedded_data:
        found.append(preset_of_data)
    return found


def merge(layers: Sequence[dict]) -> dict:
    """Merge dicts of options; if several have the same option, the value of the latest layer counts.

    There is one exception. Two options set the number of updates, `updates` and `prompt_epochs`, and if a command has
    both, it goes by `prompt_epochs`. So if a later layer gives `updates` alone, `prompt_epochs` of earlier layers is
    removed: otherwise it would still decide the number.
    """
    values: dict = {}
    for layer in layers:
        if "updates" in layer and "prompt_epochs" not in layer:
            values.pop("prompt_epochs", None)
        values |= layer
    return values


# Earlier runs


def _read_resumed_run(command: str, folder: str, flags: dict) -> dict:
    """Return the options of the run that `--resume` names, without those that belong to one start (`OF_THE_START`).

    Raises `InputError` if it is not a run of this command.
    """
    run = RunFolder.open(folder)
    made_by = run.manifest["command"]  # empty in runs of version 1.0
    if made_by and made_by != command:
        resume = f"marlhf {made_by} --resume {shlex.quote(folder)}"
        raise InputError(f"--resume {folder}: a run of marlhf {made_by}: give {resume}")
    is_folder_of_a_stage = (Path(folder) / "checkpoints").is_dir()
    if is_folder_of_a_stage:
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


def _check_unchanged(options: StageCommand, options_at_start: StageCommand) -> None:
    """Raise `InputError` if an option that changes results has another value than when the resumed run was started.

    An option that the run has not stored, because it is newer, had its default.
    """
    for name, value in asdict(options).items():
        value_at_start = getattr(options_at_start, name)
        if name not in MAY_CHANGE and value_at_start != value:
            then = f"the run was started with {value_at_start}"
            raise InputError(f"--{name} {value}: {then}: leave it out, or start another run")


def _inherit(parser: OptionParser, given: dict) -> dict:
    """Return the data and model options that a command takes over from the runs which made its models.

    `given` are the options that the user gives. They say which models the command takes, and they are not returned. If
    the user gives other data, the data options of those runs do not count. Raises `InputError` if such a run
    contradicts another one or `given`, or if it names code that the user has not named again.
    """
    # 1. The runs. Their order matters: the first one with an option decides it, and the others have to agree.
    runs = []
    for option, folder in _input_runs(given):
        runs.append((option, folder, RunFolder.open(folder).config))
    has_policies = any(option == "policies" for option, _, _ in runs)
    user_names_rows = any(name in given for name in ROW_SOURCE)
    # Unless the user names the rows, policies are evaluated on the prompts of their own run, so it comes first.
    if not user_names_rows:
        of_policies = [run for run in runs if run[0] == "policies"]
        of_others = [run for run in runs if run[0] != "policies"]
        runs = [*of_policies, *of_others]

    known = dict(given)  # the options that are decided so far
    for option, folder, config in runs:
        # 2. The options of this run. If a run that read data has not stored `size`, it had the default.
        source = f"--{option} {folder}"
        stored = {name: config[name] for name in INHERITED if name in config}
        of_run = parser.read_values(stored, f"{folder}/{CONFIG}")
        is_on_data = "dataset" in of_run
        if is_on_data:
            of_run = {"size": o.DataConfig.size} | of_run

        # 3. If it read other rows than those that are decided, its data options do not count. Only the user may decide
        # that, and policies may for an SFT or reward model. Otherwise two runs contradict each other.
        known_rows = {name: known[name] for name in ROW_SOURCE if name in known}
        reads_other_rows = bool(known_rows) and not same_data(of_run | known_rows, of_run)
        if reads_other_rows:
            must_agree = option == "policies" or not has_policies
            if must_agree and not user_names_rows:
                made = f"made with --dataset {of_run.get('dataset')}, but another run with --dataset {known['dataset']}"
                raise InputError(f"{source}: {made}: give the data of this command by --dataset")
            of_run = {name: value for name, value in of_run.items() if name not in DATA}
        check_code_is_named_anew(of_run, given, source)

        # 4. Take over what is not known yet, and compare the rest if it may not differ.
        for name, value in of_run.items():
            # The policy keeps the shape of the adapter that it starts from. A reward model's may have another shape.
            asks_for_shape = name in ADAPTER and option != "rm" and name in given
            may_not_differ = name in MUST_MATCH or asks_for_shape
            if may_not_differ and name in known and known[name] != value:
                this = _as_flag(name, value)
                other = _as_flag(name, known[name])
                fix = f"another run has {other}: train one of them again"
                if name in given:
                    fix = f"this command has {other}: give {this}"
                raise InputError(f"{source}: made with {this}, but {fix}")
            known.setdefault(name, value)
    return {name: value for name, value in known.items() if name not in given}


def _as_flag(name: str, value: object) -> str:
    """Return an option and its value as words for a message; None means that it is not given."""
    if value is None:
        return f"no --{name}"
    return f"--{name} {value}"


def names_of_code(values: Mapping) -> dict[str, str]:
    """Return the options among `values` that name Python code outside this library, as package.module:name.

    Code that one of the library's own presets names, such as the environment of tiny-guess, belongs to the library.
    """
    found = {}
    for option in CODE_OPTIONS:
        value = values.get(option)
        if value and is_user_code(value) and not _is_in_a_preset(option, value):
            found[option] = value
    return found


def _is_in_a_preset(option: str, value: str) -> bool:
    """Return whether one of the library's presets has this value of an option."""
    return any(read_presets(name, name).get(option) == value for name in presets())


def as_words(values: Mapping[str, str]) -> str:
    """Return options as words that a shell reads as they are."""
    return " ".join(f"--{option} {shlex.quote(value)}" for option, value in values.items())


def check_code_is_named_anew(recorded: Mapping, given: Mapping, source: str) -> None:
    """Raise `InputError` if the record of a run names code in an option that the user has not given in this command.

    Importing such a name runs the code. A run that was downloaded must not choose what runs here.
    """
    missing = {}
    for option, value in names_of_code(recorded).items():
        if option not in given:
            missing[option] = value
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise InputError(f"{source}: the run used {as_words(missing)}: give {them}")


def same_data(one: dict, other: dict) -> bool:
    """Return whether the options of two commands name the same rows; a path may be written in several ways."""

    def real_path(values: dict) -> str:
        # Names of embedded data and of the hub become paths, too: these do not exist, but equal names give equal paths.
        return os.path.realpath(os.path.expanduser(str(values.get("dataset", ""))))

    if real_path(one) != real_path(other):
        return False
    parts_inside = ("dataset_config", "data_dir", "split")
    return all(one.get(name, "") == other.get(name, "") for name in parts_inside)


def _input_runs(values: dict) -> Iterator[tuple[str, Path]]:
    """Yield (option, folder of a run) for each model among `values` that a run made.

    The option, such as --sft, names the run itself, or a folder in it. A model from elsewhere has no run.
    """
    for option in INPUTS:
        value = values.get(option)
        if not value:
            continue
        folders = [value]
        if option == "policies":
            folders = [folder for _, folder in named_folders(value)]
        for folder in folders:
            run = run_of(Path(folder).expanduser())
            if run is not None:
                yield option, run


def named_folders(policies: str) -> list[tuple[str, str]]:
    """Return the name (empty if none is given) and the folder of each policy in `--policies`.

    A name has no "=": the text after the first one is the folder.
    """
    named = []
    for item in split_paths(policies):
        name, equals, folder = item.partition("=")
        if equals:
            named.append((name, folder))
        else:
            named.append(("", item))
    return named


# Presets


def presets() -> list[str]:
    """Return the names of the presets that come with the library: methods and cards first, then model/task."""
    names = []
    for path in PRESETS.rglob("*.yaml"):
        names.append(path.relative_to(PRESETS).as_posix().removesuffix(".yaml"))
    return sorted(names, key=lambda name: (name.count("/"), name))


def preset_file(name: str, source: str) -> Path:
    """Return the file of a preset. Raises `InputError` that begins with `source` for an unknown name."""
    if name not in presets():
        hint = did_you_mean(name, presets()).rstrip() or f"choose from {', '.join(presets())}"
        raise InputError(f"{source}: unknown preset {name!r}: {hint}")
    return PRESETS / f"{name}.yaml"


def read_presets(names: str, source: str) -> dict:
    """Return the options of presets, comma-separated; later ones win. Raises `InputError` that begins with `source`."""
    files_of_presets = [preset_file(name.strip(), source) for name in names.split(",")]
    return merge([read_yaml(file, source) for file in files_of_presets])


def list_presets() -> str:
    """Return a table of all presets: name, model, data set, and the first line of the file."""
    rows = [("preset", "model", "dataset", "what it is")]
    for name in presets():
        text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        first_line = text.partition("\n")[0].removeprefix("# ")
        rows.append((name, values.get("model", "-"), values.get("dataset", "-"), first_line))
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(len(cell) for cell in column))
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
