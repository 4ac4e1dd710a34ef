"""`marlhf` with all weights spread over processes on a CPU, in all stages. Not a test by itself.

usage: sharded_command.py [STOP_AT=3] <command> [options] [+ [STOP_AT=3] <command> [options] ...]

Several commands run one after the other. With STOP_AT the last process gets SIGTERM after so many steps of SFT or
reward model.
"""

import os
import signal
import sys

import torch
from accelerate import Accelerator, PartialState
from one_update import sharding

from marlhf_lite.cli import main
from marlhf_lite.training.callbacks import ProgressBar

# Of a process that no launcher started.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
plain_start, plain_end, stop_at = Accelerator.__init__, ProgressBar.on_step_end, 0


def sharded_start(self, *args, **kwargs):
    """TRL's trainers make accelerators of their own."""
    plain_start(self, *args, **kwargs)
    sharding(self)


def end_of_step(self, args, state, control, **kwargs):
    if state.global_step == stop_at and args.process_index == args.world_size - 1:
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
        stop_at = int(command.pop(0).removeprefix("STOP_AT=")) if command[0].startswith("STOP_AT=") else 0
        status = main(command) and not stop_at
        if words:  # what the first process writes is read by the next command
            PartialState().wait_for_everyone()
    sys.exit(status)
