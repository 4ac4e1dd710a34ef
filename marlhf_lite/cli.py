"""`marlhf <command> [options]`; `accelerate launch -m marlhf_lite <command> [options]` runs the same.

Heavy imports wait until the options and all named files are checked, so that `--help` and a wrong path answer quickly.
"""

import io
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import yaml

from marlhf_lite import __version__
from marlhf_lite.config import commands
from marlhf_lite.config.commands import COMMANDS, added_commands
from marlhf_lite.config.parser import (
    as_words,
    list_presets,
    names_of_code,
    options_that_are_given,
    parse_and_name_presets,
    preset_file,
    read_presets,
)
from marlhf_lite.experiments.inputs import check_dataset, find_inputs
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.utils.errors import InputError, disk_fault, one_line
from marlhf_lite.utils.interrupts import sigterm_as_ctrl_c
from marlhf_lite.utils.libraries import check_versions
from marlhf_lite.utils.printable import PrintableStream, open_streams, printable
from marlhf_lite.utils.run_folder import (
    RunLock,
    check_output_dir,
    is_run,
    split_paths,
    vanished_run_named,
)
from marlhf_lite.utils.surroundings import check_encoding, prepare_surroundings

PRESETS = "Named settings, such as gemma-2b/tldr: all of them, or the text of those that you name."
TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 2 bad input (one line on stderr per problem), 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # as by >&- in a shell
        fix = "give it a file, as by > /dev/null"
        print(f"marlhf: error: the standard output is closed: {fix}", file=sys.stderr)
        return 2
    open_streams()
    with sigterm_as_ctrl_c(), redirect_stdout(PrintableStream(sys.stdout)):
        code = _run_and_report(argv)
        return _exit_code_after_flush(code)


def _exit_code_after_flush(code: int) -> int:
    """Flush standard output, which may be a file on a full disk; return the exit code, 2 if that fails."""
    try:
        print(end="", flush=True)
    except OSError as error:
        # When Python ends, it writes what is left once more. That now goes to nowhere: else it would fail again, and
        # this error would be shown twice.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code:  # the command has failed, and has printed its own error
            return code
        print(f"marlhf: error: {disk_fault(error) or one_line(error)}", file=sys.stderr)
        return 2
    return code


def _run_and_report(argv: Sequence[str]) -> int:
    """Do what the words ask for; return the exit code.

    Known faults become lines on standard error; any other error keeps its traceback.
    """
    try:
        dispatch(argv)
    except KeyboardInterrupt as stop:
        print(f"\nmarlhf: interrupted{_notes_of(stop)}", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, InputError):
            fault = str(error)
        else:
            fault = disk_fault(error)  # "" if the error is not one of a full or missing disk
        if not fault:
            raise
        for line in printable(fault + _notes_of(error)).splitlines():
            print(f"marlhf: error: {line}", file=sys.stderr)
        return 2
    return 0


def _notes_of(error: BaseException) -> str:
    """Return what `run_command` has noted on an error: how to resume."""
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def dispatch(argv: Sequence[str]) -> None:
    """Do what the words ask for. Raises `InputError`; if there are several problems, it has a line for each."""
    kinds = COMMANDS | added_commands()
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(kinds))
    elif argv[0] == "--version":
        print(f"marlhf-lite {__version__}")
    elif argv[0] == "presets":
        print_presets(argv[1:])
    elif argv[0] in kinds:
        run_command(argv[0], kinds[argv[0]], argv[1:])
    else:
        raise InputError(
            f"{argv[0]}: unknown command: choose from {', '.join([*kinds, 'presets'])}"
        )


def _usage(kinds: Mapping[str, type]) -> str:
    """Return the text of `marlhf --help`: each command with the first line of its docstring."""
    lines = []
    for name, kind in kinds.items():
        first_line = kind.__doc__.partition("\n")[0]
        lines.append(f"  {name:<10} {first_line}")
    lines.append(f"  {'presets':<10} {PRESETS}")
    return TEXTS["usage"].format(commands="\n".join(lines))


def run_command(name: str, kind: type[commands.Checked], words: Sequence[str]) -> None:
    """Read the options of the command `name` from `words`, then do its work. `kind` is the class of its options.

    An error that stops a run gets a note that tells how to resume.
    """
    check_encoding(words)
    prepare_surroundings()
    # `marlhf data FILE` is short for `marlhf data --dataset FILE`.
    if kind is commands.DataCommand and words and not words[0].startswith("-"):
        words = ["--dataset", *words]
    options, presets = parse_and_name_presets(name, words, kind)
    check_versions("marlhf-lite")
    leaves_a_run = issubclass(kind, commands.StageCommand)
    if leaves_a_run and not options.output_dir:
        folder = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        options = replace(options, output_dir=str(folder))
    try:
        if kind is commands.DemoCommand:
            run_demo(options, presets, words)
        elif leaves_a_run:
            run_stages(options, presets)
        elif name in OTHERS:  # one of the library's commands that leave no run
            OTHERS[name](options)
        else:  # a command that another package has added
            options.run()
    except (Exception, KeyboardInterrupt) as error:
        # An `InputError` gets no note, because it says itself what to do.
        how_to_resume = _how_to_resume(name, options)
        if how_to_resume and not isinstance(error, InputError):
            error.add_note(how_to_resume)
        raise


def _how_to_resume(name: str, options: commands.Checked) -> str:
    """Return a sentence that tells how to continue an interrupted command; empty if nothing of its work is kept."""
    # `judge` leaves no run, and continues if the same command is given again. So does a command of another package if
    # its class says `resumes`.
    if name == "judge" or getattr(options, "resumes", False):
        return "what is done so far is kept: the same command continues"
    folder = Path(getattr(options, "output_dir", ""))
    if not (isinstance(options, commands.StageCommand) and is_run(folder)):  # no run was begun
        return ""
    words = f"marlhf {name} --resume {shlex.quote(str(folder))}"
    # Options that name a user's code must be given again: `--resume` does not take them from the folder of the run. A
    # run may come from somebody else, who would then choose which code runs here.
    code = names_of_code(vars(options))
    if code:
        words += f" {as_words(code)}"
    return f"what was recorded so far in {folder} is whole: {words} continues"


def print_presets(names: Sequence[str]) -> None:
    """Print the presets of these names, or a list of all."""
    if names and names[0] in ("-h", "--help"):
        names = []  # so that the list follows
        print(f"{PRESETS}\n\nexample: marlhf presets gemma-2b/tldr\n")
    files = [preset_file(name, f"marlhf presets {name}") for name in names]
    if not files:
        print(list_presets())
    for file in files:
        print(file.read_text(encoding="utf-8").rstrip("\n"))


# The work


def run_stages(options: commands.StageCommand, presets: Sequence[str]) -> None:
    """Check what the options name, open the run, print where it is, and train or evaluate."""
    with RunLock() as lock:
        opened = _open_and_announce(options, presets, lock)
        from marlhf_lite.experiments import pipeline

        with vanished_run_named(opened.path):
            pipeline.run_command(opened)


def _open_and_announce(options: commands.StageCommand, presets: Sequence[str], lock):
    """Check what the options name, open the run and print where it is; return its context."""
    inputs = find_inputs(options)
    from marlhf_lite.experiments import context

    opened = context.open_context(options, inputs, lock)
    for line in preset_lines(options, presets):
        context.print_main(line)
    context.print_main(f"run folder: {opened.path}")
    return opened


def run_demo(options: commands.DemoCommand, presets: Sequence[str], words: Sequence[str]) -> None:
    """Run the demo in two acts: a game with an umbrella, in a folder of the run, and then the run itself.

    `options` and `presets` are what the `words` on the command line gave. The first act is skipped if the words name
    the user's own data, models or reward, or if they resume a run that has no first act. With ACT=1 in the environment
    the demo stops after the first act, and `--resume` starts the second one.
    """
    given = options_that_are_given("demo", words, commands.DemoCommand)
    if options.resume:
        has_first_act = (Path(options.resume) / "umbrella").is_dir()
    else:
        skips_first_act = {"dataset", "model", "part", "environment", "reward", "sft", "rm"}
        has_first_act = not skips_first_act & given.keys()
    if not has_first_act:
        return run_stages(options, presets)

    def words_of_act(act: str, folder: str | Path) -> list[str]:
        """Return the user's words, then the preset of an act, no run to resume, and a folder to begin in.

        If an option is given twice, the last one counts, so these three options win over the user's words.
        """
        preset = f"demo/{act}"
        # The user's presets are kept after that of the act. The last preset that sets an option counts, too, so there
        # the user's win.
        if given.get("preset"):
            preset += f",{given['preset']}"
        return [*words, "--resume", "", "--preset", preset, "--output_dir", str(folder)]

    # `options` are those of the whole run, so of the second act. A resumed run has them already: they are stored in it.
    if not options.resume:
        of_second_act = words_of_act("summaries", options.output_dir)
        options, presets = parse_and_name_presets("demo", of_second_act, commands.DemoCommand)
    with RunLock() as lock:
        # 1. The run of the second act is opened first: what it checks is refused before anything is played. What it
        # prints is kept until that act begins.
        with redirect_stdout(io.StringIO()) as start_of_second_act:
            opened = _open_and_announce(options, presets, lock)
        from marlhf_lite.experiments import pipeline
        from marlhf_lite.experiments.context import print_main

        # 2. The first act, or what is left of it.
        folder = opened.path / "umbrella"
        folder.mkdir(exist_ok=True)  # `--resume` tells by it that the run has a first act
        if is_run(folder):
            of_first_act = ["--resume", str(folder)]
        else:
            of_first_act = words_of_act("umbrella", folder)
        print_main(f"\n{TEXTS['first act']}")
        run_stages(*parse_and_name_presets("demo", of_first_act, commands.FirstAct))
        print_main(TEXTS["after first"].format(folder=folder))
        if os.environ.get("ACT") == "1":
            return

        # 3. The second act.
        print_main(f"\n{TEXTS['second act']}\n{start_of_second_act.getvalue()}")
        with vanished_run_named(opened.path):
            pipeline.run_command(opened)
        print_main(TEXTS["after second"].format(folder=opened.path))


def preset_lines(options: commands.StageCommand, presets: Sequence[str]) -> list[str]:
    """Return lines about the presets of a run: their names, and the values that it has from the preset `pretrained`.

    A model that is not embedded gets that preset by itself, so its values are shown, unless the user has given others.
    """
    lines = []
    if presets:
        lines.append(f"presets: {', '.join(presets)}")
    if "pretrained" not in presets:
        return lines
    values = read_presets("pretrained", "--model")
    # If the user has given an option another value, it is not shown.
    taken = {name: x for name, x in values.items() if getattr(options, name, None) == x}
    if taken:
        shown = ", ".join(f"{name} {x}" for name, x in taken.items())
        lines.append(f"{options.model}: by the preset pretrained: {shown}")
    if options.finetune == "full" and any("learning_rate" in name for name in taken):
        lines.append(
            "these rates are for adapters and too high for --finetune full: give lower ones"
        )
    return lines


def _is_first_process() -> bool:
    """Return whether this is the only process, or the first of those that `accelerate launch` has started."""
    return os.environ.get("RANK", "0") == "0"


def _compare(options: commands.CompareCommand) -> None:
    from marlhf_lite.evaluation.compare import compare, comparison_note, comparison_table
    from marlhf_lite.evaluation.statistics import few_prompts

    paths = split_paths(options.answers)
    if not paths:
        raise InputError("--answers: not given: name runs of `marlhf evaluate`, comma-separated")
    rows = compare(paths, options.baseline)
    print(comparison_table(rows))
    note_on_few_prompts = few_prompts(rows[0]["prompts"])  # all rows are of the same prompts
    print(f"\n{comparison_note(rows)}{note_on_few_prompts}")


def _judge(options: commands.JudgeCommand) -> None:
    from marlhf_lite.extras.judges.judges import run_judge

    if _is_first_process():  # the endpoint costs money
        run_judge(options)


def _memory(options: commands.MemoryCommand) -> None:
    from marlhf_lite.extras.memory.estimate import memory_report

    print(memory_report(options))


def _data(options: commands.DataCommand) -> None:
    if not _is_first_process():  # a report is printed once
        return
    check_dataset(options.dataset)
    # What can be refused without a tokenizer is refused before torch and transformers are imported.
    from marlhf_lite.tasks.first_look import find_and_check_rows, no_template_writes

    found = find_and_check_rows(
        options.dataset,
        bad_rows=options.bad_rows,
        template=options.template,
        model=options.model,
        chat_template=options.chat_template,
        columns=options.columns,
        dataset_config=options.dataset_config,
        data_dir=options.data_dir,
        split=options.split,
    )
    task = None
    if no_template_writes(options.model, options.chat_template):
        from marlhf_lite.tasks.loading import load_task, options_of_rows

        # Also what only all rows together show, such as that they are too few for the parts.
        task = load_task(options.dataset, **options_of_rows(options), found=found)
    from marlhf_lite.experiments.data_report import data_report

    print(data_report(options, found, task))


def _generate(options: commands.GenerateCommand) -> None:
    policy = resolve_adapter_dir("policy", options.policy)
    if not options.prompt and sys.stdin is None:
        raise InputError("--prompt: not given, and the standard input is closed: give it")
    try:
        prompt = options.prompt or sys.stdin.read()
        prompt.encode()  # raises if Python has read bytes that are not UTF-8, as halves of surrogate pairs
    except UnicodeError:
        raise InputError("--prompt: not UTF-8: convert it, as by iconv -f latin1 -t utf8") from None
    from marlhf_lite.experiments.export import answer_prompt

    print(answer_prompt(options, policy, prompt))


def _export(options: commands.ExportCommand) -> None:
    if not options.output_dir:
        raise InputError("--output_dir: not given: name a new folder for the model")
    policy = resolve_adapter_dir("policy", options.policy)
    output = Path(options.output_dir)
    check_output_dir(output)
    from marlhf_lite.experiments.export import export_policy

    export_policy(options, policy, output)


# Commands that leave no run -> what they do with their options.
OTHERS = {
    "compare": _compare,
    "judge": _judge,
    "generate": _generate,
    "export": _export,
    "memory": _memory,
    "data": _data,
}
