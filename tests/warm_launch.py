"""`accelerate launch` whose processes are forks of one that has done the large imports: each begins seconds earlier.

Reads a line of JSON from standard input for each launch: folder, environment, files for the outputs, and the words
behind `accelerate launch`; writes the exit status. It ends with its standard input.

accelerate reads the options and prepares the environment as always; in place of torchrun's agent this file starts
the processes. The package itself is not loaded here: every process imports it anew.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from contextlib import ExitStack
from unittest import mock

LARGE = (
    "accelerate.commands.launch",
    "peft.auto",
    "transformers.modeling_utils",
    "datasets",
    "trl",
    "torch.distributed.run",
)


def in_child(work, *given) -> int:
    """Call this function in a fork, and return the fork's id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(*given)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def program(args) -> None:
    """A script, or with `-m` a module."""
    sys.argv = [args.training_script, *args.training_script_args]
    if args.module:
        sys.path.insert(0, "")
        runpy.run_module(args.training_script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(args.training_script))
        runpy.run_path(args.training_script, run_name="__main__")


def alone(args) -> None:
    from accelerate.commands.launch import prepare_simple_launcher_cmd_env

    os.environ.update(prepare_simple_launcher_cmd_env(args)[1])
    program(args)


def one_of_several(args, rank: int) -> None:
    world = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": args.nproc_per_node,
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ.update(
        {name: str(value) for name, value in (world | {"MASTER_PORT": args.master_port}).items()}
    )
    program(args)


def forks(args) -> None:
    """Start the processes; where one fails, end the others, as torchrun does."""
    running, failed = (
        {in_child(one_of_several, args, rank) for rank in range(int(args.nproc_per_node))},
        False,
    )
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGTERM)
    sys.exit(int(failed))


def launch(asked: dict) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for stream, path in enumerate(asked["files"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    starts = {
        "accelerate.commands.launch.simple_launcher": alone,
        "torch.distributed.run.run": forks,
    }
    with ExitStack() as stack:
        for name, start in starts.items():
            stack.enter_context(mock.patch(name, start))
        launch_command(launch_command_parser().parse_args(asked["words"]))


if __name__ == "__main__":
    for name in LARGE:
        importlib.import_module(name)
    for line in sys.stdin:
        status = os.waitpid(in_child(launch, json.loads(line)), 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
