"""Stages of a run: SFT -> reward model -> PPO (or DPO, RLOO, GRPO) -> evaluation.

Each takes the context of the run and the results of earlier stages, and returns what the next stage needs. `--resume`
skips stages that are done, and continues an interrupted stage from its last checkpoint.
"""

import functools
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

from accelerate import PartialState
from peft import PeftModel
from torch import Tensor
from transformers import Trainer, set_seed

from marlhf_lite.config import commands
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.evaluation.responses import evaluate_checkpoints, write_rows
from marlhf_lite.evaluation.scores import Scorers
from marlhf_lite.experiments.context import RunContext, open_run, print_main
from marlhf_lite.experiments.data import different_pairs
from marlhf_lite.experiments.manifest import CODE, COLUMNS, check_contents, input_contents
from marlhf_lite.experiments.other_tokenizers import reader_of
from marlhf_lite.experiments.reports import (
    caption,
    differences,
    example_answers,
    pass_report,
    run_report,
)
from marlhf_lite.models.actor_critic import (
    PolicyModel,
    PPOModels,
    ScalarHeadModel,
    checkpoint_activations,
    without_dropout,
)
from marlhf_lite.models.loading import (
    build_models,
    load_policy,
    load_score_model,
    new_policy,
    new_reward_model,
)
from marlhf_lite.tasks.prompts import prompts_of
from marlhf_lite.training.callbacks import LOG_POSITIONS, Recorder
from marlhf_lite.training.checkpoint import rewind_run
from marlhf_lite.training.distributed import gathered_outside_layers
from marlhf_lite.training.logging import RunLogger
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.reward_model import pair_accuracy, train_reward_model
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Rollout, nonfinite_probabilities_refused
from marlhf_lite.training.sft import train_sft
from marlhf_lite.training.trackers import make_accelerator
from marlhf_lite.training.trl_trainers import (
    check_checkpoint,
    checkpoint_to_resume,
    save_trained,
    step_of,
    train_recorded,
    with_fewer_rows,
)
from marlhf_lite.utils.interrupts import graceful_stop
from marlhf_lite.utils.jsonl import apply_umask, read_json, write_json
from marlhf_lite.utils.run_folder import METRICS, SAMPLES, RunFolder
from marlhf_lite.utils.seals import atomic_folder, has_checkpoint, seal

Reward = Callable[[Rollout], Tensor]
Make = Callable[[RunContext, PeftModel, RunLogger], Trainer]
Translate = Callable[[dict, commands.PolicyCommand], dict]
# the last file that PPO, DPO, RLOO and GRPO write: the options that `--resume` may raise
DONE = "done.json"


# The whole run


def run_command(context: RunContext) -> None:
    """Do what the command of this context is for, and print where its result is."""
    stages, sft, rm = context.options.stages, context.inputs.sft, context.inputs.rm
    if len(stages) > 1:
        return run_all(context)
    if not stages:
        return evaluate(context, context.inputs.policies, sft, rm)
    if stages[0] in ("sft", "rm"):
        what = "adapter" if context.options.finetune == "lora" else "model"
        return print_main(
            f"{what}: {sft_stage(context) if stages[0] == 'sft' else rm_stage(context, sft)}"
        )
    if stages[0] == "ppo":
        policy = ppo_stage(context, sft, rm)
    elif stages[0] == "dpo":
        policy = dpo_stage(context, sft, make_reward(context, rm) if rm else None)
    else:
        policy = group_stage(context, sft, make_reward(context, rm))
    return print_main(f"policy: {policy}")


def run_all(context: RunContext[commands.RunCommand]) -> None:
    """Run all stages except those whose models --sft and --rm give, and evaluate all policies."""
    options, inputs = context.options, context.inputs
    judges = options.judges_with_rm and len(context.task.splits["rm"])
    trains_rm = not inputs.rm and (judges or options.reward == "rm")
    stages = (
        ["SFT"] * (not inputs.sft)
        + ["reward model"] * bool(trains_rm)
        + [*options.methods, "evaluation"]
    )
    print_main(f"stages: {', '.join(stages)}")
    sft = inputs.sft or sft_stage(context)
    rm = rm_stage(context, sft) if trains_rm else inputs.rm
    evaluate(
        context,
        {name: ppo_stage(context, sft, rm, name) for name in options.methods},
        sft,
        rm,
        trained=True,
    )


# SFT and reward model


def run_stage(
    context: RunContext, name: str, last: str, train: Callable[[Path], dict[str, object]]
) -> Path:
    """Train in the folder `name`, unless `--resume` finds it done; return the folder.

    `train` gets the folder, saves the model there, and returns the contents of JSON files by name. The last of them,
    `last`, marks a stage that is done.
    """
    folder = context.path / name
    if context.resume and (folder / last).is_file():
        print_main(f"{name}: done already")
        return folder
    set_seed(context.options.seed)  # the stage does not depend on what ran before it
    records = train(folder)
    if PartialState().is_main_process:
        apply_umask(folder)
        seal(folder)
        for file, content in records.items():
            write_json(folder / file, content)
    PartialState().wait_for_everyone()  # the next stage reads these files
    return folder


def sft_stage(context: RunContext[commands.SFTCommand]) -> Path:
    """Fine-tune a new adapter, or all weights, on the SFT part; return its folder.

    If the data are only prompts, that part is empty, and the policy starts as the base model, as with `--sft_epochs 0`.
    """
    options, tokenizer, rows = context.options, context.tokenizer, context.task.splits["sft"]

    def train(folder: Path) -> dict:
        model = _to_train(new_policy(context.base, options), options)
        if len(rows) and options.sft_epochs:
            arguments = (rows, options, options, folder, options.seed, options)
            return {"log.json": train_sft(model, tokenizer, *arguments, resume=context.resume)}
        why = "no answers to learn from" if options.sft_epochs else "--sft_epochs 0"
        print_main(f"SFT: {why}: the policy starts as the base model is")
        if PartialState().is_main_process:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return {"log.json": []}

    return run_stage(context, "sft", "log.json", train)


def rm_stage(context: RunContext[commands.RMCommand], sft: Path) -> Path:
    """Train the reward model from the SFT adapter; return its folder. Prints its accuracy on held-out pairs."""
    options, tokenizer, rows = context.options, context.tokenizer, context.task.splits["rm"]

    def train(folder: Path) -> dict:
        model = _to_train(new_reward_model(context.base, sft, options.seed), options)
        arguments = (rows, options, options, folder, options.seed, options)
        log = train_reward_model(model, tokenizer, *arguments, resume=context.resume)
        held_out = different_pairs(context.task.held_out(500), tokenizer, context.limit)
        with gathered_outside_layers(model):
            accuracy = pair_accuracy(
                ModelReward(ScalarHeadModel(model)), tokenizer, held_out, context.limit
            )
        print_main(
            f"reward model: {accuracy:.1%} of {len(held_out)} held-out pairs ranked as labelled"
        )
        return {"log.json": log, "accuracy.json": {"accuracy": accuracy, "pairs": len(held_out)}}

    return run_stage(context, "rm", "accuracy.json", train)


def _to_train(model, options: ModelConfig):
    """Return the model, with activation checkpointing if `--gradient_checkpointing` asks for it."""
    if options.gradient_checkpointing:
        checkpoint_activations(model)
    return model


# PPO, DPO, RLOO and GRPO


def ppo_stage(
    context: RunContext[commands.PPOCommand], sft: Path, rm: Path | None, name: str = "ppo"
) -> Path:
    """Train policy and critic by one of the command's `methods`; return the policy's folder.

    An interrupted stage leaves complete records. If it ends after a step, as by one Ctrl-C, it also saves the models.
    """
    options, folder = context.options.methods[name], re.sub(r"[^a-z0-9.]+", "-", name.lower())
    if policy := _trained_already(context, folder, options):
        return policy
    run, resumes = _open_stage(context, folder, options, sft, rm)
    roles = {
        name: getattr(options, name)
        for name in ("critic_init", "critic_head_init", "gradient_checkpointing")
    }
    models = build_models(context.base, sft, rm, with_reward=context.reward is None, **roles)
    reward = make_reward(context, rm, models.reward)
    trainer = PPOTrainer(
        models,
        context.tokenizer,
        prompts_of(context.task.splits["ppo"]),
        reward,
        context.rules[name],
        options,
        run=run,
        gold=context.task.gold,
        held_out=held_out_evaluation(context, reward, options.generation_batch_size or 128),
        name=name,
        accelerator=make_accelerator(options.report_to, run.path, name, asdict(options)),
        sampler=context.sampler,
    )
    try:
        with graceful_stop() as asked_to_stop:
            trainer.train(resumes, asked_to_stop)
            if trainer.history:
                trainer.save(run.path)
    finally:
        # end_training would also end the process group
        for tracker in trainer.accelerator.trackers:
            tracker.finish()
    return _mark_done(run.path, options)


def _trained_already(
    context: RunContext, name: str, options: commands.PolicyCommand
) -> Path | None:
    """Return the policy of a stage that `--resume` finds done, with or without checkpoints; None if it must train."""
    mark, policy = context.path / name / DONE, context.path / name / "policy"
    if not (
        context.resume
        and mark.is_file()
        and policy.is_dir()
        and read_json(mark) == _length(options)
    ):
        return None
    print_main(f"{name}: done already")
    return policy


def _mark_done(folder: Path, options: commands.PolicyCommand) -> Path:
    """Mark a stage as done; return the folder of its policy."""
    if PartialState().is_main_process:
        write_json(folder / DONE, _length(options))
    PartialState().wait_for_everyone()  # the next stage reads this folder
    return folder / "policy"


def _length(options: commands.PolicyCommand) -> dict[str, float | None]:
    # DPO has none
    return {name: getattr(options, name, None) for name in ("updates", "prompt_epochs")}


def _open_stage(
    context: RunContext, name: str, options: commands.PolicyCommand, sft: Path, rm: Path | None
) -> tuple[RunFolder, bool]:
    """Return a stage's run folder, and whether the stage resumes from a checkpoint; else it starts from its beginning.

    Its manifest has the models that it starts from, which may be of the same run.
    """
    set_seed(context.options.seed)  # the stage does not depend on what ran before it
    place = context.path / name
    resumes = context.resume and has_checkpoint(place)
    PartialState().wait_for_everyone()  # all have looked
    begins_again = (
        context.resume and not resumes and place.exists() and PartialState().is_main_process
    )
    if begins_again and not (place / METRICS).is_file():
        shutil.rmtree(place)
    elif begins_again:
        kept = next(
            path
            for i in count(1)
            if not (path := context.path / "stopped" / f"{name}-{i}").exists()
        )
        # a folder deeper than the stages, so that no command takes it for a result
        kept.parent.mkdir(exist_ok=True)
        place.rename(kept)
        print(
            f"{name}: it has no checkpoint and begins again; what it has recorded is kept in {kept}"
        )
    elif PartialState().is_main_process:
        (place / DONE).unlink(missing_ok=True)  # it is to be longer
    manifest = {
        **context.manifest,
        "contents": context.manifest["contents"] | input_contents(sft, rm),
    }
    if resumes:
        accept = context.options.accept_changed
        manifest["accepted"] = check_contents(RunFolder.open(place), manifest["contents"], accept)
    return open_run(place, asdict(options), resume=resumes, manifest=manifest), resumes


def make_reward(
    context: RunContext, rm: Path | None, model: ScalarHeadModel | None = None
) -> Reward:
    """Return what `--reward` names as a function of a rollout; `model` is the reward model if it is already loaded."""
    if context.reward is not None:
        return context.reward
    model = model or ScalarHeadModel(load_score_model(context.base, rm))
    batch = context.options.micro_batch_size or 16
    return ModelReward(model, batch, reader_of(rm, context.tokenizer, context.task))


def held_out_evaluation(
    context: RunContext[commands.PolicyCommand], reward: Reward | None, batch_size: int = 128
):
    """Return the test on held-out prompts that runs while training; None if there are no prompts."""
    held_out = context.held_out(context.options.test_prompts, batch_size)
    return HeldOutEvaluation(held_out, reward, context.task.gold) if held_out.prompts else None


# Baselines: DPO, RLOO and GRPO through TRL, from the SFT adapter (Appendix C.3, Table 7). They share data, start,
# prompts, reward, sampling and records with PPO. The reference is the SFT model, because TRL keeps a frozen copy of the
# adapter that it gets.


def dpo_stage(
    context: RunContext[commands.DPOCommand], sft: Path, reward: Reward | None = None
) -> Path:
    """Train on the reward model's pairs. `reward` scores held-out tests only."""
    from marlhf_lite.extras.baselines.dpo import dpo_row, dpo_trainer

    def make(context: RunContext, model: PeftModel, logger: RunLogger) -> Trainer:
        return dpo_trainer(
            model, context.tokenizer, context.task.splits["rm"], context.options, logger.run.path
        )

    train = functools.partial(_train_baseline, sft=sft, reward=reward, make=make, translate=dpo_row)
    return _within_memory(
        context, train, "per_device_train_batch_size", context.options.dpo_batch_size
    )


def group_stage(context: RunContext, sft: Path, reward: Reward) -> Path:
    """Train by RLOO or GRPO on PPO's prompts; `reward` scores a rollout, as for `PPOTrainer`.

    RLOO: REINFORCE with a leave-one-out baseline, and PPO's KL penalty: k1, in the reward. GRPO: advantages divided by
    the group's deviation, and the KL penalty as k3 in the loss.
    """
    from marlhf_lite.extras.baselines.rloo_grpo import SampledReward, group_row, group_trainer

    def make(context: RunContext, model: PeftModel, logger: RunLogger) -> Trainer:
        options, prompts = context.options, prompts_of(context.task.splits["ppo"])
        scored = SampledReward(reward, model, context.tokenizer, options, context.task.gold, logger)
        return group_trainer(model, context.tokenizer, prompts, scored, options, logger.run.path)

    train = functools.partial(
        _train_baseline, sft=sft, reward=reward, make=make, translate=group_row
    )
    return _within_memory(context, train, "micro_batch_size", context.options.batch_size)


def _within_memory(
    context: RunContext, train: Callable[[RunContext], Path], option: str, batch: int
) -> Path:
    """Return `train(context)`; if memory ends, it resumes from its last checkpoint with half the rows per pass."""

    def attempt(options: commands.PolicyCommand) -> Path:
        return train(
            replace(
                context, options=options, resume=context.resume or options is not context.options
            )
        )

    return with_fewer_rows(attempt, context.options, option, batch)


def _train_baseline(
    context: RunContext[commands.PolicyCommand],
    *,
    sft: Path,
    reward: Reward | None,
    make: Make,
    translate: Translate,
) -> Path:
    """Train, from the checkpoint if there is one, and save the policy; return its folder.

    `make` gives TRL's trainer of a model that is recorded; `translate` makes a row of metrics of its log and the
    options.
    """
    (name,) = context.options.stages
    options, is_main = context.options, PartialState().is_main_process
    if done := _trained_already(context, name, options):
        return done

    # 1. The folder, and the checkpoint to resume from.
    run, _ = _open_stage(context, name, options, sft, context.inputs.rm)
    checkpoint = checkpoint_to_resume(run.path / "checkpoints")
    step, logs = (
        (step_of(checkpoint), read_json(checkpoint / LOG_POSITIONS)) if checkpoint else (0, {})
    )

    # 2. The trainer, with our records instead of its own. Nothing is deleted before it accepts the checkpoint.
    policy, logger = (
        _to_train(load_policy(context.base, sft), options),
        RunLogger(run, name.upper()),
    )
    without_dropout(policy)
    trainer, held_out = make(context, policy, logger), None
    check_checkpoint(trainer, checkpoint)
    if is_main:
        newer = [path for path in run.path.glob("checkpoints/checkpoint-*") if step_of(path) > step]
        rewind_run(run, newer, dict.fromkeys(run.position(), 0) | logs)
    PartialState().wait_for_everyone()
    logger.history = run.metrics()
    if options.eval_every:
        reference, test = (
            load_policy(context.base, sft, trainable=False),
            held_out_evaluation(context, reward),
        )
        models = PPOModels(PolicyModel(trainer.model), PolicyModel(reference), None, None)
        held_out = test and functools.partial(test, models)

    # 3. Train and save.
    with graceful_stop() as asked_to_stop, nonfinite_probabilities_refused():
        saves = bool(options.checkpoint_every)
        of_policy = (lambda logs: translate(logs, options), held_out, options.eval_every, saves)
        weights = train_recorded(trainer, Recorder(logger, asked_to_stop, *of_policy), checkpoint)
        if is_main:
            with atomic_folder(run.path / "policy") as place:
                save_trained(trainer.model, context.tokenizer, place, weights)
    return _mark_done(run.path, options)


# Evaluation


def evaluate(
    context: RunContext[commands.EvaluatedCommand],
    policies: Mapping[str, Path],
    sft: Path,
    rm: Path | None,
    trained: bool = False,
) -> None:
    """Answer the held-out prompts with SFT and all policies, score, print and write tables and figures.

    `trained`, if this run has trained the policies, adds learning curves and some example answers. The run stores
    answers and uses them again.
    """
    if not PartialState().is_main_process:
        return
    options, figures = context.options, context.path / "figures"
    set_seed(options.seed)  # for rewards and environments that draw: answers have their own seeds
    hashes = {name: x["hash"][:12] for name, x in context.manifest["contents"].items()}
    model = [
        options.model,
        *(hashes[name] for name in ("base model", "tokenizer") if name in hashes),
    ]
    number_format = ["4 bits"] * options.load_in_4bit + [options.dtype] * (
        options.dtype != ModelConfig.dtype
    )
    gold, gold_name = (
        context.task.gold,
        getattr(context.task.tests, "name", options.part if context.task.gold else ""),
    )
    if context.reward and not gold:  # a gold score is the one shown
        gold = getattr(context.reward, "function", context.reward)
        code = [
            hashes[name]
            for name in (CODE["reward"], CODE["environment"], COLUMNS)
            if name in hashes
        ]
        gold_name = ", ".join([context.reward.name, *code])

    def load(path: Path) -> PolicyModel:
        return PolicyModel(load_policy(context.base, path, trainable=False))

    def load_rm(path: Path) -> ScalarHeadModel:
        return ScalarHeadModel(load_score_model(context.base, path))

    scorers = Scorers(
        load, sft, rm, load_rm, gold, gold_name, reader_of(rm, context.tokenizer, context.task)
    )
    rows = evaluate_checkpoints(
        {"SFT": sft, **policies},
        scorers,
        context.held_out(options.eval_prompts),
        context.path / "responses",
        temperatures=options.temperatures,
        samples=options.eval_samples,
        model=", ".join([*model, *number_format]),
    )
    write_rows(context.path / SAMPLES, rows)
    rows = rows if options.shows_sft else rows[rows["method"] != "SFT"]
    histories = (
        {name: RunFolder.open(path.parent).metrics() for name, path in policies.items()}
        if trained
        else {}
    )
    summary = run_report(context.path, rows, histories, figures, context.run.config)
    print(f"\n{caption(rows, options.eval_prompts)}\n\n{summary}\n")
    examples = example_answers(rows, (3 if options.shows_sft else 1) if trained else 0)
    print(
        pass_report(context.path, rows, context.task)
        + examples
        + differences(rows, list(histories)),
        end="",
    )
    print(f"figures: {figures}\nrun folder: {context.path}")
