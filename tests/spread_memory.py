"""What an update allocates in one of 16 processes under FSDP2, in bfloat16. Not a test by itself.

usage: spread_memory.py <folder of a config> ...; prints for each the peak bytes of the passes and of Adam's step, over
and above what was there before. The other processes are not there: torch's backend "fake" returns at once.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from one_update import sharding
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from marlhf_lite.config.options import PPOTrainerConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import PolicyModel, PPOModels, ScalarHeadModel
from marlhf_lite.models.loading import with_head
from marlhf_lite.training.memory_limit import longest_rollout
from marlhf_lite.training.ppo import PPOTrainer

CARDS, ROWS, PROMPT, RESPONSE = 16, 2, 8, 8


def peak(work):
    """The most bytes that were allocated by `work()` and not yet freed at any time, and what it returns."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = work()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = most = 0
    # An event is an allocation, or a release, which has negative bytes.
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, result


def peaks_of(folder):
    """Peak bytes of the passes and of Adam's step in a second update, when Adam's moments are there.

    The update has two micro-batches, so that the passes of the second one add to gradients that are there.
    """
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    policy, reference = (PolicyModel(copy.deepcopy(base)) for _ in range(2))
    critic = ScalarHeadModel(with_head(base, 0)).requires_grad_(True)
    models = PPOModels(policy, reference.requires_grad_(False), None, critic)
    sizes = {
        "batch_size": 2 * ROWS * CARDS,
        "micro_batch_size": ROWS,
        "max_response_length": RESPONSE,
    }
    accelerator = sharding(Accelerator(), "bf16")
    trainer = PPOTrainer(
        models, None, ["a"], None, None, PPOTrainerConfig(**sizes), accelerator=accelerator
    )
    rollout = longest_rollout(2 * ROWS, PROMPT, RESPONSE, token=5, device="cpu")
    batch = trainer.objective.batch(rollout, FixedNGram(1)(rollout.mask))
    for _ in range(2):  # the second update's peaks stay
        passes, _ = peak(lambda: trainer.forward_backward(batch, trainer.objective.counts(batch)))
        step, _ = peak(trainer.optimizer.step)
        trainer.optimizer.zero_grad(set_to_none=True)
    return passes, step


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(CARDS),
        "ACCELERATE_USE_CPU": "true",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # never used
    dist.init_process_group("fake", rank=0, world_size=CARDS, store=FakeStore())
    for folder in sys.argv[1:]:
        print(*peaks_of(folder))
