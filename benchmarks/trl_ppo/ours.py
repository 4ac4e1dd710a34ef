"""PPO of marlhf_lite on a model folder and prompts, with macro actions of n tokens; run.py starts it."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from measuring import Stamps, arguments, peak_mib, write

sys.path.append(str(Path(__file__).parents[1]))
from synthetic import check_lengths, make_trainer

from marlhf_lite.config.options import ModelConfig, PPOTrainerConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.utils.run_folder import RunFolder


def options(args) -> PPOTrainerConfig:
    """Options as TRL's trainer has them: sampling without top-k, log-probabilities at the sampling temperature."""
    return PPOTrainerConfig(
        seed=args.seed,
        max_response_length=args.response,
        checkpoint_every=0,
        updates=args.updates,
        batch_size=args.batch,
        micro_batch_size=args.micro_batch,
        num_ppo_epochs=args.epochs,
        policy_learning_rate=args.learning_rate,
        critic_learning_rate=args.learning_rate,
        temperature=args.temperature,
        top_k=0,
        logprobs_at_temperature=True,
    )


def prepare(args, folder: str, stamps: Stamps) -> PPOTrainer:
    """The trainer; whenever one of its updates ends, it marks that in `stamps`."""
    torch.manual_seed(args.seed)
    model = ModelConfig(model=str(args.model), finetune=args.finetune)
    prompts = json.loads(args.prompts.read_text(encoding="utf-8"))
    run = RunFolder.create(Path(folder, "run"), {})
    trainer = make_trainer(model, prompts, FixedNGram(args.n), options(args), run=run)
    update = trainer.update

    def update_and_mark(batch):
        metrics = update(batch)
        stamps.mark()
        return metrics

    trainer.update = update_and_mark
    return trainer


def main() -> None:
    """Train, then write the record."""
    args = arguments(__doc__.splitlines()[0])
    stamps = Stamps(args.turns)
    torch.set_num_threads(args.threads)
    imported = peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        trainer = prepare(args, folder, stamps)
        trained = sum(
            p.numel()
            for role in (trainer.models.policy, trainer.models.critic)
            for p in trainable(role)
        )
        check_lengths(trainer.train(), args.response)
    write(args, stamps, imported, trained=trained, torch=torch.__version__)


if __name__ == "__main__":
    main()
