"""TRL 1.12's experimental PPOTrainer on a model folder and prompts; run.py starts it with that TRL.

Set up as its documentation has it, and so that nothing but updates costs time: no evaluation, samples or saves, no
recomputing of activations, and float32, as ours (gpu.py asks for bfloat16 on a card). `--finetune lora` gives their
policy an adapter by `peft_config` (the reference is then the policy without it); the critic trains in full, since the
trainer has no option for it.
"""

import json

import torch
from datasets import Dataset
from measuring import Stamps, arguments, peak_mib, write
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import __version__ as trl_version

try:
    from trl.experimental.ppo import PPOConfig, PPOTrainer
except ModuleNotFoundError:  # later versions have none
    raise SystemExit(
        f"theirs.py: trl {trl_version} has no PPO trainer: start run.py, which installs one that has"
    ) from None


class Watch(TrainerCallback):
    """Marks the end of every update, which TRL's trainer counts as a step."""

    def __init__(self, stamps: Stamps):
        self.stamps = stamps

    def on_step_end(self, args, state, control, **kwargs):
        self.stamps.mark()


def options(args) -> PPOConfig:
    """TRL's options. They name no stop token, so every response has its full length."""
    return PPOConfig(
        output_dir=str(args.out.parent / "theirs"),
        total_episodes=args.updates * args.batch,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.batch // args.micro_batch,
        num_mini_batches=1,
        num_ppo_epochs=args.epochs,
        local_rollout_forward_batch_size=args.scored_rows or args.batch,
        response_length=args.response,
        temperature=args.temperature,
        learning_rate=args.learning_rate,
        num_sample_generations=0,
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=args.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=args.device == "cpu",
        seed=args.seed,
    )


def prepare(args, stamps: Stamps) -> PPOTrainer:
    """TRL's trainer. Policy, reference, reward model and critic have the same weights; the last two get new heads."""
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    prompts = json.loads(args.prompts.read_text(encoding="utf-8"))
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"
    )
    load = {"pretrained_model_name_or_path": args.model, "dtype": getattr(torch, args.dtype)}
    reward = AutoModelForSequenceClassification.from_pretrained(**load, num_labels=1)
    return PPOTrainer(
        options(args),
        tokenizer,
        model=AutoModelForCausalLM.from_pretrained(**load),
        ref_model=None,  # a frozen copy; with an adapter, the policy with it switched off
        reward_model=reward.requires_grad_(False).eval(),
        value_model=AutoModelForSequenceClassification.from_pretrained(**load, num_labels=1),
        train_dataset=Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]}),
        peft_config=lora if args.finetune == "lora" else None,
        callbacks=[Watch(stamps)],
    )


def main() -> None:
    """Train, then write the record."""
    args = arguments(__doc__.splitlines()[0])
    stamps = Stamps(args.turns)
    torch.set_num_threads(args.threads)
    imported = peak_mib()
    trainer = prepare(args, stamps)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    trainer.train()
    found = {"trained": trained, "trl": trl_version, "torch": torch.__version__}
    if args.device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
    write(args, stamps, imported, **found)


if __name__ == "__main__":
    main()
