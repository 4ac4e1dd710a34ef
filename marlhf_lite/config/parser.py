"""Command line and config files to options: one set of names for flags, YAML files and presets."""

from __future__ import annotations

import argparse
import copy
import difflib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import yaml
from transformers import HfArgumentParser

from marlhf_lite.config.options import BOUNDS, GROUPS
from marlhf_lite.utils.errors import InputError

PRESETS = Path(str(files("marlhf_lite"))) / "config" / "presets"


class Formatter(argparse.RawDescriptionHelpFormatter):
    """One name an option, and its default behind the text."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=min(110, shutil.get_terminal_size().columns))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.nargs in (0, "?"):  # a switch: its value may be left out
            return action.option_strings[0]
        value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else "X"
        return f"{action.option_strings[0]} {value}"

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default not in (None, "", argparse.SUPPRESS) and action.option_strings != ["-h", "--help"]
        return f"{action.help} [%(default)s]" if shown else action.help


class Parser(HfArgumentParser):
    """transformers' dataclass parser whose errors are one line that names the option and the mend."""

    source = ""  # the file that is being read, if it is not the command line

    @staticmethod
    def _parse_dataclass_field(parser, field):
        plain = copy.copy(field)  # argparse takes every metadata entry as an argument of its own
        plain.metadata = {k: v for k, v in field.metadata.items() if k not in BOUNDS}
        HfArgumentParser._parse_dataclass_field(parser, plain)

    def error(self, message: str):
        message = re.sub(r"(--\w+)/--[\w-]+", r"\1", message)  # one of an option's two names is enough
        raise InputError(f"{self.source or self.prog}: {message}: see {self.prog} --help")

    def unknown(self, words: Sequence[str]):
        known = [s for action in self._actions for s in action.option_strings]
        word = words[0].split("=")[0]
        close = difflib.get_close_matches(word.replace("-", "_").replace("__", "--", 1), known, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"{self.prog}: unknown option {word}: {meant}see {self.prog} --help")


@dataclass
class Source:
    """Where options come from."""

    preset: str = ""
    config: str = ""


def parse(command: str, argv: Sequence[str], groups: Sequence[str], description: str) -> SimpleNamespace:
    """Options of a command, one dataclass a group, by name. Flags win over `--config`, that over `--preset`.

    Of several presets, `--preset official,gemma-2b/tldr`, later ones win. Raises `InputError` for an unknown option,
    preset or key, a wrong type, and a value out of range.
    """
    parser = _parser(command, groups, description)
    source, _ = parser.parse_known_args(argv)
    given = [*_presets(source.preset, parser, groups), *_config(source.config, parser, groups), *argv]
    parsed = parser.parse_args_into_dataclasses(given, return_remaining_strings=True, look_for_args_file=False)
    if parsed[-1]:
        parser.unknown(parsed[-1])
    options = SimpleNamespace(**dict(zip(groups, parsed, strict=False)))
    if _last(given, "--updates") > _last(given, "--prompt_epochs"):  # two names for one thing: the later one counts
        for group in vars(options).values():
            if hasattr(group, "prompt_epochs"):
                group.prompt_epochs = None
    return options


def _last(words: Sequence[str], flag: str) -> int:
    """Where a flag stands last among these words; -1 where it does not."""
    return max((i for i, word in enumerate(words) if word.split("=")[0] == flag), default=-1)


def _parser(command: str, groups: Sequence[str], description: str) -> Parser:
    kinds = [GROUPS[name] for name in groups]
    for kind in kinds:
        kind._argument_group_name = kind.__doc__.rstrip(".")
    name = f"marlhf {command}"
    parser = Parser(
        kinds,
        prog=name,
        usage=f"{name} [options]",
        description=description,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    where = parser.add_argument_group("Where options come from: flags win over --config, that over --preset")
    where.add_argument("--config", default="", help="YAML file with option names as keys.")
    named = "Named settings, comma-separated: later ones win, as in official,gemma-2b/tldr. marlhf presets lists them."
    where.add_argument("--preset", default="", help=named)
    return parser


def presets() -> list[str]:
    """Names of the presets that come with the library: those of a method or a card, then model/task by name."""
    names = (path.relative_to(PRESETS).as_posix().removesuffix(".yaml") for path in PRESETS.rglob("*.yaml"))
    return sorted(names, key=lambda name: (name.count("/"), name))


def preset_text(name: str) -> str:
    """The file of a preset. Raises `InputError` for an unknown name."""
    return _preset_file(name, f"marlhf presets {name}").read_text(encoding="utf-8")


def list_presets() -> str:
    """A table of all presets: name, model, data set, and the first line of the file, which says what it is."""
    rows = [("preset", "model", "dataset", "what it is")]
    for name in presets():
        text = preset_text(name)
        values = yaml.safe_load(text)
        about = text.partition("\n")[0].removeprefix("# ")
        rows.append((name, values.get("model", "-"), values.get("dataset", "-"), about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _preset_file(name: str, source: str) -> Path:
    if name not in presets():
        close = difflib.get_close_matches(name, presets(), n=3)
        mend = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(presets())}"
        raise InputError(f"{source}: unknown preset {name!r}: {mend}")
    return PRESETS / f"{name}.yaml"


def _presets(given: str, parser: Parser, groups: Sequence[str]) -> list[str]:
    """The flags of comma-separated presets, in their order: argparse lets the last of a flag win."""
    flags = []
    for name in given.split(",") if given else []:
        path = _preset_file(name.strip(), f"--preset {given}")
        flags += _flags(path, f"--preset {name.strip()}", parser, groups)
    return flags


def _config(path: str, parser: Parser, groups: Sequence[str]) -> list[str]:
    return _flags(path, f"--config {path}", parser, groups) if path else []


def _flags(path: str | Path, source: str, parser: Parser, groups: Sequence[str]) -> list[str]:
    """A YAML file as flags. Keys of other commands' groups are left out; keys of none are errors."""
    try:
        values = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror}): check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{source}: not YAML in UTF-8: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{source}: a {type(values).__name__}: write a line `name: value` for each option")
    flags = []
    mine = {f.name for name in groups for f in fields(GROUPS[name])}
    for key, value in values.items():
        _check_key(key, source)
        if key in mine and value is not None:
            flags.append(f"--{key}={value}")  # one word: the value may begin with a dash
    parser.source = source  # a wrong type is the file's, not the command line's
    parser.parse_known_args(flags)
    parser.source = ""
    return flags


def _check_key(key: str, source: str) -> None:
    known = [f.name for kind in GROUPS.values() for f in fields(kind)]
    if key not in (*known, "environment"):  # a run's own config.yaml can be given again
        close = difflib.get_close_matches(str(key), known, n=1)
        raise InputError(f"{source}: unknown key {key}" + (f": did you mean {close[0]}?" if close else ""))
