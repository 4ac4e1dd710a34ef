"""`marlhf <command> [options]`; `accelerate launch -m marlhf_lite <command> [options]` runs the same."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from marlhf_lite.cli.commands import COMMANDS
from marlhf_lite.cli.training import check_flags
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.threads import choose_threads

PRESETS = "List settings by name, such as gemma-2b/tldr; with names, print them."
USAGE = """usage: marlhf <command> [options]

RLHF with macro actions: PPO in which runs of tokens are the actions.

{commands}

marlhf <command> --help lists a command's options.
Everything may also stand in a YAML file: marlhf run --config my.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(argv)
    except InputError as error:
        print(f"marlhf: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmarlhf: interrupted; what was recorded so far is whole", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        about = {name: command.help for name, command in COMMANDS.items()} | {"presets": PRESETS}
        lines = [f"  {name:<10} {text}" for name, text in about.items()]
        print(USAGE.format(commands="\n".join(lines)))
        return 0
    if argv[0] == "presets":
        return _presets(argv[1:])
    if argv[0] not in COMMANDS:
        raise InputError(f"unknown command {argv[0]}: choose from {', '.join([*COMMANDS, 'presets'])}")
    command = COMMANDS[argv[0]]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_NUM_THREADS", str(choose_threads()))  # before torch is loaded, which reads it once
    from marlhf_lite.config.parser import parse

    options = parse(argv[0], argv[1:], command.groups, f"{command.help}\n\nexample: {command.example}")
    check_flags(options)
    writes = "run" in command.groups
    if writes and not options.run.output_dir:
        options.run.output_dir = str(Path("runs") / f"{argv[0]}-{time.strftime('%Y%m%d-%H%M%S')}")
    start()
    command.action(options)
    if writes and os.environ.get("RANK", "0") == "0":
        print(f"records: {options.run.output_dir}")
    return 0


def _presets(names: list[str]) -> int:
    from marlhf_lite.config.parser import list_presets, preset_text

    if names and names[0] in ("-h", "--help"):
        names = []
        print(f"{PRESETS}\n\nexample: marlhf presets gemma-2b/tldr\n")
    print("\n".join(preset_text(name).rstrip("\n") for name in names) if names else list_presets())
    return 0


def start() -> None:
    """Join the other processes, if `accelerate launch` started several. And: our bars and tables speak; the libraries'
    own bars and warnings of what we do on purpose do not."""
    import warnings

    import datasets
    import transformers
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    PartialState(
        cpu=parse_flag_from_env("ACCELERATE_USE_CPU")
    )  # whoever asks first decides, and by itself looks for GPUs
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
