"""The baselines, one stage each: DPO, RLOO and GRPO through TRL, from the SFT adapter (Appendix C.3, Table 7).

They share data, start, prompts, reward, sampling and records with PPO, and with its settings the responses per update.
The reference is the SFT model: TRL keeps a frozen copy of the adapter it is given. (A disabled adapter would be the
base.) Every run checks at its first update that policy and reference start alike.
"""

from __future__ import annotations

import json
import math
import time
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
from marlhf_lite.training.distributed import local
from marlhf_lite.training.dpo import Answers, dpo_row, dpo_trainer
from marlhf_lite.training.learner import sampling
from marlhf_lite.training.logging import SAMPLE_EVERY
from marlhf_lite.training.rloo_grpo import SampledReward, group_row, group_trainer
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.training.sft import Bar
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import RunFolder

Reward = Callable[[Rollout], Tensor]
START_GAP = 0.5  # nats a response: beyond this at the first update, policy and reference did not start alike
SHOWN = ("rm_score_mean", "gold_mean", "kl_k1", "kl_k3", "accuracy")
POSITION = "logs.json"  # written last into a checkpoint: how long each log was


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
    answers = Answers(work.tokenizer, prompts, work.sampling, run, work.task.gold, seed)
    tests = _tests(work, sft, trainer, reward, run)
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
    function = SampledReward(
        reward, model, work.tokenizer, group, group.num_generations, work.task.gold, run, SAMPLE_EVERY
    )
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
    tests = _tests(work, sft, trainer, reward, run)
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
    found = [path.parent for path in place.glob(f"checkpoints/checkpoint-{update or '*'}/{POSITION}")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _tests(work: RunContext, sft: Path, trainer: Trainer, reward: Reward | None, run: RunFolder) -> list[Tests]:
    logging = work.options.logging
    if not logging.eval_every:
        return []
    prompts = list(work.task.splits["test"]["prompt"])[: logging.test_prompts]
    accelerator, seed = trainer.accelerator, work.options.run.seed
    held_out = HeldOutEvaluation(prompts, work.tokenizer, work.sampling, reward, work.task.gold, accelerator, seed)
    reference = PolicyModel(load_policy(work.base, sft, trainable=False))
    return [Tests(held_out, PPOModels(PolicyModel(trainer.model), reference, None, None), logging.eval_every, run)]


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
        run.truncate_logs(json.loads((checkpoint / POSITION).read_text(encoding="utf-8")))
    recorder, folder = Recorder(name, run, translate), run.path / "policy"
    trainer.remove_callback(PrinterCallback)
    for callback in (recorder, *callbacks):
        trainer.add_callback(callback)
    try:
        with sampling():
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    finally:
        recorder.close()
        sound = all(bool(local(p).isfinite().all()) for p in trainable(trainer.model))
        if recorder.history and sound and trainer.is_world_process_zero():
            own = {"selected_adapters": ["default"]} if isinstance(trainer.model, PeftModel) else {}
            trainer.model.save_pretrained(folder, **own)  # without the reference's adapter
            work.tokenizer.save_pretrained(folder)
    return folder


class Recorder(Bar):
    """One progress bar with ETA, and a row an update in metrics.jsonl, under PPO's names.

    `translate` makes a row of TRL's log; `tokens` in it are those generated in this update.
    """

    def __init__(self, name: str, run: RunFolder, translate: Callable[[dict], dict]):
        super().__init__(name)
        self.run, self.translate, self.history = run, translate, run.metrics()

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.bar.update(state.global_step)

    def close(self) -> None:
        """What is said after a failure stands on a line of its own."""
        if hasattr(self, "bar"):
            self.bar.close()

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs:  # the summary at the end
            return
        seconds = time.perf_counter() - self.start
        row = {"update": state.global_step} | self.translate(logs)
        row["generated_tokens"] = row["tokens"] + (self.history[-1]["generated_tokens"] if self.history else 0)
        row |= {"tokens_per_second": row["tokens"] / seconds, "seconds": seconds}
        self.history.append(row)
        if state.is_world_process_zero:
            self.run.log_metrics(row)
        self.bar.set_postfix({k: f"{row[k]:.2f}" for k in SHOWN if k in row}, refresh=False)
        _check_start(row)
        if not all(math.isfinite(row.get(name, 0.0)) for name in ("policy_loss", "policy_grad_norm")):
            # TRL has stepped already: there are no weights to go on with.
            raise InputError(
                f"{self.name}: loss or gradient of update {row['update']} is not finite: start again with a lower "
                "learning rate, or --dtype float32"
            )

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            write_json(Path(args.output_dir) / f"checkpoint-{state.global_step}" / POSITION, self.run.position())


def _check_start(row: dict) -> None:
    """The first row is of the model as it started, which is the reference."""
    names = ("kl_k1", "kl_k3", "log_ratio_chosen", "log_ratio_rejected")
    gap = max((abs(row[name]) for name in names if name in row), default=0.0)
    if row["update"] == 1 and gap > START_GAP:
        raise RuntimeError(
            f"log-ratio to the reference is {gap:.2f} nats a response before any step: the policy does not start from "
            "the reference"
        )


class Tests(TrainerCallback):
    """Tests on held-out prompts every so many updates and at the last, in tests.jsonl; no update's seconds hold any."""

    def __init__(self, test: HeldOutEvaluation, roles: PPOModels, every: int, run: RunFolder):
        self.test, self.roles, self.every, self.run = test, roles, every, run

    def on_log(self, args, state, control, logs=None, **kwargs):
        update = state.global_step
        if "loss" in logs and (update % self.every == 0 or update == state.max_steps):
            scores = self.test(self.roles)
            if state.is_world_process_zero:
                self.run.log_tests({"update": update} | scores)
