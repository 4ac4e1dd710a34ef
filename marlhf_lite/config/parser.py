"""Command line, `--config` files, presets and earlier runs to options: they all use one set of names.

Precedence, highest first: flags, `--config`, the run that `--resume` names, `--preset` (of several, later ones win),
the runs that `--sft`, `--rm`, `--policies` or `--policy` come from, whose data and model the command takes over, what
an embedded data set brings along (`config.embedded`), and the command's own `DEFAULTS`.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import inspect
import re
import shutil
import typing
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import yaml
from trl import TrlParser

from marlhf_lite.config.checked import BOUNDS
from marlhf_lite.config.commands import OPTIONS, groups
from marlhf_lite.config.embedded import EMBEDDED_DEFAULTS
from marlhf_lite.config.options import CheckpointConfig, DataConfig, LoggingConfig, ModelConfig
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import CONFIG, RunFolder, is_run

Command = TypeVar("Command")
PRESETS = Path(str(files("marlhf_lite"))) / "config" / "presets"
TYPES = {str: "TEXT", int: "INT", float: "FLOAT", bool: "BOOL"}
# Options that `--resume` may change: how long a run is, what it leaves behind and what fits into memory. They do not
# change what it computes (a micro-batch changes it by rounding).
MAY_CHANGE = {"output_dir", "overwrite", "resume", "updates", "prompt_epochs", "micro_batch_size"} | {
    f.name for kind in (CheckpointConfig, LoggingConfig) for f in fields(kind)
}
# Options by which a command names models that an earlier run made.
INPUTS = ("sft", "rm", "policies", "policy")
INHERITED = [f.name for kind in (DataConfig, ModelConfig) for f in fields(kind)]
# Inherited options that may not differ: other rows would mix the parts of the split, another model has other weights.
SAME = ("dataset", "size", "split_seed", "model", "finetune")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Each option once, with its type before its help and its default behind it."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=min(110, shutil.get_terminal_size().columns))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.nargs == 0:
            return ", ".join(action.option_strings)
        return f"{action.option_strings[0]} {self._format_args(action, action.metavar)}"

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default not in (None, "", argparse.SUPPRESS)
        return f"{action.help} [{action.default}]" if shown else action.help


class OptionParser(TrlParser):
    """TRL's parser of dataclasses; its errors are one line that names the option and the fix."""

    @staticmethod
    def _parse_dataclass_field(parser, field):
        kinds = [kind for kind in (field.type, *typing.get_args(field.type)) if kind in TYPES]
        metavar = {"metavar": TYPES[kinds[0]]} if kinds else {}  # argparse shows choices by itself
        plain = copy.copy(field)  # argparse takes every metadata entry as an argument of its own, bounds too
        plain.metadata = {k: v for k, v in field.metadata.items() if k not in BOUNDS} | metavar
        TrlParser._parse_dataclass_field(parser, plain)

    def error(self, message: str):
        message = re.sub(r"(--\w+)/--[\w-]+", r"\1", message)  # one of an option's two names is enough
        raise InputError(f"{self.prog}: {message}: see {self.prog} --help")

    def read_flags(self, words: Sequence[str]) -> dict:
        """Return the options that these words give, by name and with their types. Raises `InputError`."""
        blank = argparse.Namespace(**{action.dest: None for action in self._actions})  # no defaults are filled in
        known, unknown = self.parse_known_args(words, blank)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            word = unknown[0].split("=")[0]
            hint = did_you_mean(word.replace("-", "_").replace("__", "--", 1), flags)
            raise InputError(f"{self.prog}: unknown option {word}: {hint}see {self.prog} --help")
        return {name: value for name, value in vars(known).items() if value is not None}

    def read_values(self, values: dict, source: str) -> dict:
        """Return the options among `values` that the command has, with their types. `source` is for errors.

        Options of other commands are left out: one file serves several commands.
        """
        for key in values:
            if key not in OPTIONS and key != "environment":  # which the config.yaml of a run has
                hint = did_you_mean(str(key), OPTIONS).rstrip()
                raise InputError(f"{source}: unknown key {key}: {hint or 'see marlhf <command> --help'}")
        mine = {action.dest for action in self._actions}
        # One word a flag, since a value may begin with a dash.
        flags = [f"--{key}={value}" for key, value in values.items() if key in mine and value is not None]
        try:
            typed = self.read_flags(flags)
            self.make(typed)
        except InputError as error:
            raise InputError(f"{source}: {str(error).removeprefix(f'{self.prog}: ')}") from None
        return typed

    def make(self, values: dict) -> list:
        """Make the options objects from values by name. Raises `InputError` for a number out of bounds."""
        return [
            kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values}) for kind in self.dataclass_types
        ]


def parse(name: str, argv: Sequence[str], command: type[Command]) -> Command:
    """Return the options of `marlhf <name>` as an object of `command`, a class of `config.commands`.

    Raises `InputError` for an unknown option, preset or key, a wrong type, a value out of bounds, and where an option
    contradicts the run that a model comes from or that goes on.
    """
    parser = _make_parser(name, command)
    flags = parser.read_flags(argv)
    layers, resume = [], flags.get("resume", "")
    for preset in map(str.strip, flags["preset"].split(",") if "preset" in flags else []):
        file = preset_file(preset, f"--preset {flags['preset']}")
        layers.append(parser.read_values(read_yaml(file, f"--preset {preset}"), f"--preset {preset}"))
    if resume:
        layers.append(parser.read_values(_resumed_config(resume, flags), f"--resume {resume}"))
    if "config" in flags:
        source = f"--config {flags['config']}"
        layers.append(parser.read_values(read_yaml(Path(flags["config"]).expanduser(), source), source))
    values = _merge([*layers, flags])
    if not resume:
        values = _inherit(parser, values) | values
        values = getattr(command, "DEFAULTS", {}) | EMBEDDED_DEFAULTS.get(values.get("dataset"), {}) | values
    options = command(**dict(zip(groups(command), parser.make(values), strict=False)))
    if resume:
        options.run.output_dir, options.run.overwrite = resume, False
        _check_unchanged(options)
    return options


def flatten(options) -> dict:
    """Return all options of a command by name: what config.yaml stores and `--config` reads."""
    return {name: value for group in asdict(options).values() for name, value in group.items()}


def _make_parser(name: str, command: type) -> OptionParser:
    kinds = list(groups(command).values())
    for kind in kinds:
        kind._argument_group_name = kind.__doc__.rstrip(".")
    parser = OptionParser(
        kinds,
        prog=f"marlhf {name}",
        usage=f"marlhf {name} [options]",
        description=inspect.cleandoc(command.__doc__),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    sources = parser.add_argument_group("Where options come from: flags win over --config, that over --preset")
    sources.add_argument("--config", metavar="FILE", help="YAML file with option names as keys.")
    named = "Named settings, comma-separated; later ones win, as in released,gemma-2b/tldr. See marlhf presets."
    sources.add_argument("--preset", metavar="TEXT", help=named)
    return parser


def _merge(layers: Sequence[dict]) -> dict:
    """Merge options; later layers win. Of `updates` and `prompt_epochs`, which set one number, the later one counts."""
    values: dict = {}
    for layer in layers:
        if "updates" in layer and "prompt_epochs" not in layer:
            values.pop("prompt_epochs", None)
        values |= layer
    return values


def read_yaml(path: Path, source: str) -> dict:
    """Read names and values from a YAML file. Raises `InputError` that begins with `source`."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror}): check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{source}: not YAML in UTF-8: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{source}: a {type(values).__name__}: write a line `name: value` for each option")
    return values


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is nearest to a word; empty where none is near."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}? " if close else ""


# Earlier runs


def _resumed_config(folder: str, flags: dict) -> dict:
    """Return the options of the run that `--resume` names. Raises `InputError` where that is no run."""
    config = RunFolder.open(folder).config
    if (Path(folder) / "checkpoints").is_dir():
        raise InputError(f"--resume {folder}: the folder of one stage: give the run that it stands in")
    taken = [f"--{name}" for name in ("output_dir", "overwrite") if name in flags]
    if taken:
        raise InputError(f"{taken[0]}: a run that goes on stays in its folder: leave it out, or leave out --resume")
    return {name: value for name, value in config.items() if name not in ("output_dir", "overwrite", "resume")}


def _check_unchanged(options) -> None:
    """Raise `InputError` where an option that changes results differs from that of the run that goes on."""
    started = RunFolder.open(options.run.resume).config
    for name, value in flatten(options).items():
        if name not in MAY_CHANGE and name in started and started[name] != value:
            then = started[name]
            raise InputError(f"--{name} {value}: the run was started with {then}: leave it out, or start another run")


def _inherit(parser: OptionParser, values: dict) -> dict:
    """Return data and model options of the runs that a command's models come from.

    Raises `InputError` where two such runs, or a run and `values`, contradict each other.
    """
    found: dict = {}
    origin: dict[str, str] = {}
    for option in INPUTS:
        given = str(values.get(option) or "")
        folders = [folder for _, folder in named_folders(given)] if option == "policies" else [given]
        for folder in filter(None, folders):
            run = _run_of(Path(folder).expanduser())
            config = RunFolder.open(run).config if run else {}
            mine = parser.read_values({k: config[k] for k in INHERITED if k in config}, f"{run}/{CONFIG}")
            for name, value in mine.items():
                if name in SAME and found.get(name, value) != value:
                    made = f"made with --{name} {value}, but {origin[name]} with {found[name]}"
                    raise InputError(f"--{option} {run}: {made}: give runs that belong together")
                found.setdefault(name, value)
                origin.setdefault(name, f"--{option} {run}")
    for name in SAME:
        if name in found and values.get(name, found[name]) != found[name]:
            made = f"{origin[name]} was made with {found[name]}"
            raise InputError(f"--{name} {values[name]}: {made}: leave it out, or give another run")
    return found


def named_folders(policies: str) -> list[tuple[str, str]]:
    """Return the name (empty where none is given) and the folder of each policy in `--policies`.

    A name holds no "=": what follows the first one is the folder.
    """
    items = [item.strip() for item in policies.split(",") if item.strip()]
    return [tuple(item.split("=", 1)) if "=" in item else ("", item) for item in items]


def _run_of(folder: Path) -> Path | None:
    """Return the run that an adapter's folder stands in, or is; None where there is none."""
    return next((place for place in (folder, *folder.parents[:2]) if is_run(place)), None)


# Presets


def presets() -> list[str]:
    """Return the names of the presets that come with the library: methods and cards first, then model/task."""
    names = (path.relative_to(PRESETS).as_posix().removesuffix(".yaml") for path in PRESETS.rglob("*.yaml"))
    return sorted(names, key=lambda name: (name.count("/"), name))


def preset_file(name: str, source: str) -> Path:
    """Return the file of a preset. Raises `InputError` that begins with `source` for an unknown name."""
    if name not in presets():
        hint = did_you_mean(name, presets()).rstrip() or f"choose from {', '.join(presets())}"
        raise InputError(f"{source}: unknown preset {name!r}: {hint}")
    return PRESETS / f"{name}.yaml"


def preset_text(name: str) -> str:
    """Return the text of a preset. Raises `InputError` for an unknown name."""
    return preset_file(name, f"marlhf presets {name}").read_text(encoding="utf-8")


def list_presets() -> str:
    """Return a table of all presets: name, model, data set, and the first line of the file, which says what it is."""
    rows = [("preset", "model", "dataset", "what it is")]
    for name in presets():
        text = preset_text(name)
        values = yaml.safe_load(text)
        about = text.partition("\n")[0].removeprefix("# ")
        rows.append((name, values.get("model", "-"), values.get("dataset", "-"), about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
