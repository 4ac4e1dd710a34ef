"""`marlhf` with all weights spread over processes on a CPU, in all stages. Not a test by itself.

usage: sharded_command.py [NAME=VALUE ...] <command> [options] [+ [NAME=VALUE ...] <command> [options] ...]

Several commands run one after the other, each with its own environment variables. With STOP_AT=3 the last process gets
SIGTERM after 3 steps of SFT, reward model or DPO.
"""

import os
import signal
import sys
from itertools import takewhile
from unittest import mock

import torch
from accelerate import Accelerator, PartialState
from one_update import sharding

from marlhf_lite.cli import main
from marlhf_lite.training.callbacks import ProgressBar

# Of a process that no launcher started.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
plain_start, plain_end = Accelerator.__init__, ProgressBar.on_step_end


def sharded_start(self, *args, **kwargs):
    """TRL's trainers make accelerators of their own."""
    plain_start(self, *args, **kwargs)
    sharding(self)


def end_of_step(self, args, state, control, **kwargs):
    if state.global_step == int(os.environ.get("STOP_AT", 0)) and args.process_index == args.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    plain_end(self, args, state, control, **kwargs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update({name: os.environ.get(name, value) for name, value in ALONE.items()})
    Accelerator.__init__, ProgressBar.on_step_end = sharded_start, end_of_step
    Accelerator()
    status, words = 0, sys.argv[1:]
    while words and not status:
        command, words = words[: [*words, "+"].index("+")], words[[*words, "+"].index("+") + 1 :]
        variables = [word.split("=", 1) for word in takewhile(lambda word: "=" in word, command)]
        with mock.patch.dict(os.environ, variables):
            status = main(command[len(variables) :]) and "STOP_AT" not in os.environ
        if words:  # what the first process writes is read by the next command
            PartialState().wait_for_everyone()
    sys.exit(status)
