"""SFT, reward model and DPO on given numbers of rows: run alone, or by several processes. Not a test by itself.

usage: one_epoch.py <folder>; it holds jobs.pt: the model and its folders, the rows, and the numbers of rows.
"""

import sys
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator

from marlhf_lite.config.commands import DPOCommand
from marlhf_lite.config.options import (
    LengthConfig,
    ModelConfig,
    RewardModelConfig,
    SFTStageConfig,
    TrainerConfig,
)
from marlhf_lite.extras.baselines.dpo import dpo_trainer
from marlhf_lite.models.loading import (
    load_base,
    load_policy,
    load_tokenizer,
    new_policy,
    new_reward_model,
)
from marlhf_lite.training.reward_model import train_reward_model
from marlhf_lite.training.sft import train_sft

BATCH = 4
LENGTHS = LengthConfig(max_response_length=6)


def train(stage, rows, job, folder):
    """Train one epoch of a stage; return its log, a row per step, and the trained weights by name.

    `stage` is "sft", "dpo", or "rm-" and a value of `--rm_loss`.
    """
    base = load_base(ModelConfig(model=job["model"]))
    tokenizer = load_tokenizer(job["model"])
    torch.manual_seed(0)
    # Passes of two rows: one process makes two of them for each step of four rows.
    how = TrainerConfig(per_device_train_batch_size=2, warmup_ratio=0.0)
    if stage == "sft":
        model = new_policy(base, ModelConfig(lora_r=2))
        config = SFTStageConfig(sft_epochs=1, sft_batch_size=BATCH)
        log = train_sft(model, tokenizer, rows, config, LENGTHS, folder, trainer_config=how)
    elif stage.startswith("rm"):
        model = new_reward_model(base, Path(job["sft"]), 0)
        rm_loss = stage.removeprefix("rm-")
        config = RewardModelConfig(rm_epochs=1, rm_batch_size=BATCH, rm_loss=rm_loss)
        log = train_reward_model(
            model, tokenizer, rows, config, LENGTHS, folder, trainer_config=how
        )
    else:
        model = load_policy(base, Path(job["sft"]))
        config = DPOCommand(dpo_batch_size=BATCH, dpo_epochs=1, **vars(how), **vars(LENGTHS))
        trainer = dpo_trainer(model, tokenizer, rows, config, folder)
        trainer.train()
        log = [row for row in trainer.state.log_history if "loss" in row]
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return log, weights


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator()
    job = torch.load(folder / "jobs.pt", weights_only=True)
    results = {}
    for stage in job["stages"]:
        for count in job["counts"]:
            rows = datasets.Dataset.from_list(job["rows"][:count])
            place = folder / f"{stage}-{count}-{accelerator.num_processes}"
            results[stage, count] = train(stage, rows, job, place)
    if accelerator.is_main_process:
        torch.save(results, folder / f"epochs-{accelerator.num_processes}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
