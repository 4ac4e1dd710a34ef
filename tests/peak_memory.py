"""Peak memory of generation and of one training pass with an optimizer step, measured. Not a test by itself.

usage: peak_memory.py <job.json>; prints bytes over and above what the process held before the models.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.models.memory import bare_roles, training_pass


def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(job):
    torch.set_num_threads(1)
    options = ModelConfig(**job["model"])
    before = status("VmRSS")
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model), dtype=torch.float32)
    actors, _frozen = bare_roles(base.requires_grad_(options.finetune == "full"), options)
    groups = [{"params": trainable(role)} for role in (actors.policy, actors.critic)]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):  # the moments are there from the first step on
        training_pass(actors, job["rows"], job["prompt"], job["length"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(json.dumps({"training": status("VmHWM") - before}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
