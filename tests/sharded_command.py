"""`marlhf` with all weights spread over processes on a CPU, in all stages. Not a test by itself.

usage: sharded_command.py [NAME=VALUE ...] <command> [options] [+ [NAME=VALUE ...] <command> [options] ...]

Several commands run one after the other, each with its own environment variables. With STOP_AT=3 the last process gets
SIGTERM after 3 steps of TRL's trainers. With GIVEN=1 RLOO and GRPO train on responses without random numbers.
"""

import os
import signal
import sys
from contextlib import ExitStack
from itertools import takewhile
from unittest import mock

import torch
from accelerate import Accelerator, PartialState
from one_update import sharding
from trl import GRPOTrainer, RLOOTrainer

from marlhf_lite.cli import main
from marlhf_lite.training.callbacks import Recorder

# Of a process that no launcher started.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
plain_start, plain_end = Accelerator.__init__, Recorder.on_step_end


def sharded_start(self, *args, **kwargs):
    """Make an accelerator that shares out weights: for every one, because TRL's trainers make their own."""
    plain_start(self, *args, **kwargs)
    sharding(self)


def end_of_step(self, args, state, control, **kwargs):
    """After step STOP_AT, let the last process get SIGTERM, as Slurm sends it before a job's time is over."""
    if (
        state.global_step == int(os.environ.get("STOP_AT", 0))
        and args.process_index == args.world_size - 1
    ):
        os.kill(os.getpid(), signal.SIGTERM)
    plain_end(self, args, state, control, **kwargs)


def end_of_pass(self, args, state, control, model, **kwargs):
    """After each pass of a step but the last, check that this process has its share of the gradients already.

    Otherwise it would hold all gradients whole until the step ends.
    """
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def give_responses(trainer):
    """Let a class of TRL's trainers sample, and then train on other responses, in which no number is random.

    They are the last tokens of the prompts, backwards, from two to five in each row.
    """
    sample = trainer._generate_single_turn

    def given(self, prompt_ids, *args):
        sampled = sample(self, prompt_ids, *args)
        responses = [ids[::-1][: 2 + row % 4] for row, ids in enumerate(prompt_ids)]
        # GRPO's method returns a pair, of which the second part stays.
        return responses if trainer is RLOOTrainer else (responses, sampled[1])

    return mock.patch.object(trainer, "_generate_single_turn", given)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update({name: os.environ.get(name, value) for name, value in ALONE.items()})
    Accelerator.__init__, Recorder.on_step_end = sharded_start, end_of_step
    Recorder.on_substep_end = end_of_pass
    Accelerator()
    status = 0
    words = sys.argv[1:]
    while words and not status:
        end = [*words, "+"].index("+")  # of the next command
        command = words[:end]
        words = words[end + 1 :]
        variables = [word.split("=", 1) for word in takewhile(lambda word: "=" in word, command)]
        with mock.patch.dict(os.environ, variables), ExitStack() as stack:
            if "GIVEN=1" in command:
                for trainer in (RLOOTrainer, GRPOTrainer):
                    stack.enter_context(give_responses(trainer))
            # A command that is stopped may fail.
            status = main(command[len(variables) :]) and "STOP_AT" not in os.environ
        if words:  # what the first process writes is read by the next command
            PartialState().wait_for_everyone()
    sys.exit(status)
