"""Run MA-PPO from beginning to end with the library: python examples/ma_ppo.py [--updates 20] [--size 2000]

The algorithm itself, written out without the library, is in ma_ppo_single_file.py.
"""

import argparse
from pathlib import Path

import torch

from marlhf_lite.config.options import (
    DataConfig,
    ModelConfig,
    PPOTrainerConfig,
    RewardModelConfig,
    SFTStageConfig,
)
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_tokenizer,
    new_policy,
    new_reward_model,
)
from marlhf_lite.plotting.training import reward_curves, save
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.reward_model import train_reward_model
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.sft import train_sft

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--updates", type=int, default=20)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--size", type=int, default=2000, help="number of preference pairs")
parser.add_argument("--output_dir", type=Path, default=Path("runs/example"))
args = parser.parse_args()
torch.manual_seed(0)

# Tokenizer and base model: a Gemma of 2 million weights that comes with the package.
model_config = ModelConfig(model="tiny-gemma")
tokenizer = load_tokenizer(model_config.model)
base = load_base(model_config)

# Data: pairs (prompt, chosen, rejected), split into 20 % SFT, 40 % reward model, 40 % PPO (Appendix B.1).
task = load_task("tiny-tldr", size=args.size)
lengths = DataConfig(max_response_length=64)
sft_folder = args.output_dir / "sft"
rm_folder = args.output_dir / "rm"

# Supervised fine-tuning: a LoRA adapter learns to answer as the chosen responses do.
policy = new_policy(base, model_config)
train_sft(policy, tokenizer, task.splits["sft"], SFTStageConfig(sft_epochs=1), lengths, sft_folder)

# Reward model: from the SFT adapter, with a new head of one number, on pairs (Bradley-Terry, section 2.2).
scorer = new_reward_model(base, sft_folder)
train_reward_model(scorer, tokenizer, task.splits["rm"], RewardModelConfig(), lengths, rm_folder)

# The four models of PPO: SFT starts policy and reference, the reward model starts the critic (Appendix B.2).
models = build_models(base, sft_folder, rm_folder)

# The termination rule: a macro action is five tokens. FixedNGram(1) makes it token-level PPO.
termination = FixedNGram(5)

# The trainer. A reward is any function from a rollout to one number for each response.
trainer = PPOTrainer(
    models,
    tokenizer,
    task.splits["ppo"]["prompt"],
    reward=ModelReward(models.reward),
    termination=termination,
    config=PPOTrainerConfig(
        updates=args.updates,
        batch_size=args.batch_size,
        max_response_length=lengths.max_response_length,
    ),
    # the true score, which only an embedded task has; it is recorded, never trained on
    gold=task.gold,
)
history = trainer.train()

# Save policy and critic as adapter folders, and draw the reward over updates.
trainer.save(args.output_dir)
figure = reward_curves({"MA-PPO": [history]}, smooth=1)
print(save(figure, args.output_dir / "reward.png"))
