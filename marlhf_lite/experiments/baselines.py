"""The baselines, one stage each: DPO, RLOO and GRPO through TRL, from the SFT adapter (Appendix C.3, Table 7).

They share data, start, prompts, reward, sampling and records with PPO, and with its settings the responses per update.
The reference is the SFT model: TRL keeps a frozen copy of the adapter it is given. (A disabled adapter would be the
base.) Every run checks at its first update that policy and reference start alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from peft import PeftModel
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, set_seed

from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.experiments.workspace import RunContext, open_run
from marlhf_lite.models.actor_critic import PolicyModel, PPOModels, checkpoint_activations, trainable
from marlhf_lite.models.loading import load_policy
from marlhf_lite.training.callbacks import LOG_POSITIONS, HeldOutTests, Recorder, SampledAnswers
from marlhf_lite.training.distributed import local_tensor
from marlhf_lite.training.dpo import dpo_row, dpo_trainer
from marlhf_lite.training.rloo_grpo import SampledReward, group_row, group_trainer
from marlhf_lite.training.rollout import Rollout, nonfinite_probabilities_refused
from marlhf_lite.utils.run_folder import RunFolder

Reward = Callable[[Rollout], Tensor]


def dpo_stage(work: RunContext, sft: Path, reward: Reward | None = None) -> Path:
    """Train on the reward model's pairs; the policy's folder. Records stand beside it, whole even when interrupted.

    samples.jsonl holds answers to a few PPO prompts before and after training. `reward` scores tests alone.
    """
    model, run, seed = _start(work, sft, "dpo")
    options = work.options
    trainer = dpo_trainer(
        model,
        work.tokenizer,
        work.task.splits["rm"],
        options.dpo,
        work.limit,
        run.path,
        options.checkpoint,
        seed,
        options.trainer,
        options.logging.report_to,
    )
    prompts = work.task.splits["ppo"]["prompt"][:4]
    answers = SampledAnswers(work.tokenizer, prompts, work.sampling, run, work.task.gold, seed)
    tests = _tests(work, sft, trainer, reward, run, "DPO")
    return _train(trainer, "DPO", work, run, lambda logs: dpo_row(logs, options.dpo), [answers, *tests])


def rloo_stage(work: RunContext, sft: Path, reward: Reward) -> Path:
    """REINFORCE with a leave-one-out baseline on PPO's prompts; the policy's folder. Records as `dpo_stage`'s.

    `reward` scores a rollout, as for `PPOTrainer`. The KL penalty is PPO's: k1, in the reward.
    """
    return _group_stage(work, sft, reward, "rloo")


def grpo_stage(work: RunContext, sft: Path, reward: Reward) -> Path:
    """Like `rloo_stage`, with advantages divided by the group's deviation, and the KL penalty as k3 in the loss."""
    return _group_stage(work, sft, reward, "grpo")


def _group_stage(work: RunContext, sft: Path, reward: Reward, method: str) -> Path:
    options = work.options
    group = getattr(options, method)
    model, run, seed = _start(work, sft, method)
    function = SampledReward(reward, model, work.tokenizer, group, work.task.gold, run)
    prompts = work.task.splits["ppo"]["prompt"]
    trainer = group_trainer(
        method,
        model,
        work.tokenizer,
        prompts,
        function,
        group,
        work.limit,
        run.path,
        options.checkpoint,
        seed,
        options.logging.report_to,
    )
    tests = _tests(work, sft, trainer, reward, run, method.upper())
    return _train(trainer, method.upper(), work, run, lambda logs: group_row(logs, method, group), tests)


def _start(work: RunContext, sft: Path, name: str):
    """`(policy as SFT left it, run folder, seed)`. Without a checkpoint to resume from, the run starts over."""
    options, place = work.options, work.path / name
    set_seed(options.run.seed)  # each stage by itself: it repeats whatever ran before it
    if options.run.resume and _last_checkpoint(place) is None:
        options = SimpleNamespace(**vars(options) | {"run": replace(options.run, resume="", overwrite=True)})
    run, model = open_run(place, options), load_policy(work.base, sft)
    if options.model.gradient_checkpointing:
        checkpoint_activations(model)
    return model, run, options.run.seed


def _last_checkpoint(place: Path, update: int = 0) -> Path | None:
    """The last one that was written to its end, or that of `update`."""
    found = [path.parent for path in place.glob(f"checkpoints/checkpoint-{update or '*'}/{LOG_POSITIONS}")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _tests(
    work: RunContext, sft: Path, trainer: Trainer, reward: Reward | None, run: RunFolder, name: str
) -> list[HeldOutTests]:
    logging = work.options.logging
    if not logging.eval_every:
        return []
    prompts = list(work.task.splits["test"]["prompt"])[: logging.test_prompts]
    seed = work.options.run.seed
    held_out = HeldOutEvaluation(prompts, work.tokenizer, work.sampling, reward, work.task.gold, seed)
    reference = PolicyModel(load_policy(work.base, sft, trainable=False))
    models = PPOModels(PolicyModel(trainer.model), reference, None, None)
    return [HeldOutTests(held_out, models, logging.eval_every, run, name)]


def _train(
    trainer: Trainer,
    name: str,
    work: RunContext,
    run: RunFolder,
    translate: Callable[[dict], dict],
    callbacks: list[TrainerCallback],
) -> Path:
    """Train, from the last checkpoint if asked, and save the policy, an interrupted run's too; its folder.

    Raises `InputError` where the policy comes apart; weights that are no numbers are not saved.
    """
    checkpoint = (
        _last_checkpoint(run.path, work.options.checkpoint.from_checkpoint) if work.options.run.resume else None
    )
    if checkpoint and trainer.is_world_process_zero():
        run.truncate_logs(json.loads((checkpoint / LOG_POSITIONS).read_text(encoding="utf-8")))
    recorder, folder = Recorder(name, run, translate), run.path / "policy"
    trainer.remove_callback(PrinterCallback)
    for callback in (recorder, *callbacks):
        trainer.add_callback(callback)
    try:
        with nonfinite_probabilities_refused():
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    finally:
        recorder.close()
        sound = all(bool(local_tensor(p).isfinite().all()) for p in trainable(trainer.model))
        if recorder.history and sound and trainer.is_world_process_zero():
            own = {"selected_adapters": ["default"]} if isinstance(trainer.model, PeftModel) else {}
            trainer.model.save_pretrained(folder, **own)  # without the reference's adapter
            work.tokenizer.save_pretrained(folder)
    return folder
