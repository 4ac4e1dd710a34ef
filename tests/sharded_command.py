"""`marlhf` with the weights of policy and critic spread over processes on a CPU. Not a test by itself.

usage: sharded_command.py <command> [options]
"""

import sys

import torch
from accelerate import Accelerator
from one_update import sharding

from marlhf_lite.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    sharding(Accelerator())
    sys.exit(main(sys.argv[1:]))
