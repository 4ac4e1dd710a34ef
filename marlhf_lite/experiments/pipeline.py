"""Stages of a run: SFT -> reward model -> PPO (or DPO, RLOO, GRPO) -> evaluation.

Each takes the context of the run and the results of earlier stages, and returns what the next stage needs. `--resume`
skips stages that are done, and continues an interrupted stage from its last checkpoint.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
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
from marlhf_lite.experiments.context import RunContext, open_run, print_main, stage_folder
from marlhf_lite.experiments.data import different_pairs
from marlhf_lite.experiments.manifest import CODE, COLUMNS, check_contents, input_contents
from marlhf_lite.experiments.model_card import write_model_card
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
from marlhf_lite.utils.progress import DONE, write_update_of_weights
from marlhf_lite.utils.run_folder import METRICS, SAMPLES, RunFolder
from marlhf_lite.utils.seals import atomic_folder, has_checkpoint, seal
from marlhf_lite.utils.user_code import is_user_code

Reward = Callable[[Rollout], Tensor]
MakeTrainer = Callable[[RunContext, PeftModel, RunLogger], Trainer]
Translate = Callable[[dict, commands.PolicyCommand], dict]


# The whole run


def run_command(context: RunContext) -> None:
    """Do what the command of this context is for, and print where its result is."""
    stages = context.options.stages
    sft = context.inputs.sft
    rm = context.inputs.rm
    if context.options.is_evaluation:
        evaluate(context, context.inputs.policies, sft, rm)
    elif context.options.is_whole_run:
        run_all(context)
    elif stages == ("sft",):
        _print_model(context, sft_stage(context))
    elif stages == ("rm",):
        _print_model(context, rm_stage(context, sft))
    elif stages == ("ppo",):
        print_main(f"policy: {ppo_stage(context, sft, rm)}")
    elif stages == ("dpo",):
        # DPO learns from pairs. A reward is of use to its tests on held-out prompts only.
        reward = make_reward(context, rm) if rm else None
        print_main(f"policy: {dpo_stage(context, sft, reward)}")
    else:
        print_main(f"policy: {group_stage(context, sft, make_reward(context, rm))}")


def _print_model(context: RunContext, folder: Path) -> None:
    """Print where a trained model is."""
    what = "adapter" if context.options.finetune == "lora" else "model"
    print_main(f"{what}: {folder}")


def run_all(context: RunContext[commands.RunCommand]) -> None:
    """Run all stages except those whose models --sft and --rm give, and evaluate all policies."""
    options = context.options
    sft = context.inputs.sft
    rm = context.inputs.rm
    # A reward model is trained for the reward, or, given pairs, to judge the answers beside another reward.
    can_judge = options.judges_with_rm and len(context.task.splits["rm"]) > 0
    trains_rm = rm is None and (can_judge or options.reward == "rm")

    stages = [*options.methods, "evaluation"]
    if trains_rm:
        stages.insert(0, "reward model")
    if sft is None:
        stages.insert(0, "SFT")
    print_main(f"stages: {', '.join(stages)}")

    if sft is None:
        sft = sft_stage(context)
    if trains_rm:
        rm = rm_stage(context, sft)
    policies = {name: ppo_stage(context, sft, rm, name) for name in options.methods}
    evaluate(context, policies, sft, rm, trained=True)


# SFT and reward model


@contextmanager
def _stage(context: RunContext, folder: Path) -> Iterator[dict[str, object]]:
    """Give a block that trains a model into `folder` an empty dict for its records, as `records["log.json"] = rows`.

    After the block each record is written to the folder as a JSON file, in the order in which the block has set them.
    So if the last of these files exists, the stage is done (`_is_done`).
    """
    set_seed(context.options.seed)  # the stage does not depend on what ran before it
    records: dict[str, object] = {}
    yield records
    if PartialState().is_main_process:
        apply_umask(folder)
        seal(folder)  # not the records, which are no part of the model
        for file, content in records.items():
            write_json(folder / file, content)
    PartialState().wait_for_everyone()  # the next stage reads these files


def _is_done(context: RunContext, last_record: Path) -> bool:
    """Return whether `--resume` finds a stage done: its last record is there."""
    if not (context.resume and last_record.is_file()):
        return False
    print_main(f"{last_record.parent.name}: done already")
    return True


def sft_stage(context: RunContext[commands.SFTCommand]) -> Path:
    """Fine-tune a new adapter, or all weights, on the SFT part; return its folder.

    If the data are only prompts, that part is empty, and the policy starts as the base model, as with `--sft_epochs 0`.
    """
    options = context.options
    rows = context.task.splits["sft"]
    folder = context.path / "sft"
    if _is_done(context, folder / "log.json"):
        return folder
    with _stage(context, folder) as records:
        model = _with_checkpointing(new_policy(context.base, options), options)
        if len(rows) and options.sft_epochs:
            # A command's options are of each of the three kinds that this takes (`config.commands`).
            records["log.json"] = train_sft(
                model,
                context.tokenizer,
                rows,
                config=options,
                lengths=options,
                output=folder,
                seed=options.seed,
                trainer_config=options,
                resume=context.resume,
            )
        else:
            why = "no answers to learn from" if options.sft_epochs else "--sft_epochs 0"
            print_main(f"SFT: {why}: the policy starts as the base model is")
            if PartialState().is_main_process:
                model.save_pretrained(folder)
                context.tokenizer.save_pretrained(folder)
            records["log.json"] = []
    write_model_card(folder, "SFT", asdict(options))
    return folder


def rm_stage(context: RunContext[commands.RMCommand], sft: Path) -> Path:
    """Train the reward model from the SFT adapter; return its folder. Prints its accuracy on held-out pairs."""
    options = context.options
    folder = context.path / "rm"
    if _is_done(context, folder / "accuracy.json"):
        return folder
    with _stage(context, folder) as records:
        model = _with_checkpointing(new_reward_model(context.base, sft, options.seed), options)
        # A command's options are of each of the three kinds that this takes (`config.commands`).
        records["log.json"] = train_reward_model(
            model,
            context.tokenizer,
            context.task.splits["rm"],
            config=options,
            lengths=options,
            output=folder,
            seed=options.seed,
            trainer_config=options,
            resume=context.resume,
        )
        pairs = different_pairs(context.task.held_out(500), context.tokenizer, context.limit)
        with gathered_outside_layers(model):  # FSDP2 may have split the model over processes
            reward = ModelReward(ScalarHeadModel(model))
            accuracy = pair_accuracy(reward, context.tokenizer, pairs, context.limit)
        ranked = f"{accuracy:.1%} of {len(pairs)} held-out pairs"
        print_main(f"reward model: {ranked} ranked as labelled")
        records["accuracy.json"] = {"accuracy": accuracy, "pairs": len(pairs)}
    write_model_card(folder, "reward model", asdict(options))
    return folder


def _with_checkpointing(model, options: ModelConfig):
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
    The stage then ends by an exception (`graceful_stop`), so that it is not marked as done.
    """
    options = context.options.methods[name]
    folder = stage_folder(name)
    policy = _trained_already(context, folder, options)
    if policy:
        return policy
    run, resumes = _open_stage(context, folder, options, sft, rm)
    models = build_models(
        context.base,
        sft,
        rm,
        with_reward=context.reward is None,
        critic_init=options.critic_init,
        critic_head_init=options.critic_head_init,
        gradient_checkpointing=options.gradient_checkpointing,
    )
    reward = make_reward(context, rm, models.reward)
    trainer = PPOTrainer(
        models,
        context.tokenizer,
        prompts=prompts_of(context.task.splits["ppo"]),
        reward=reward,
        termination=context.rules[name],
        config=options,
        run=run,
        gold=context.task.gold,
        # An option of 0 gives no number: then it is the default of `held_out_evaluation`.
        held_out=held_out_evaluation(context, reward, options.generation_batch_size or 128),
        name=name,
        accelerator=make_accelerator(options.report_to, run.path, name, asdict(options)),
        sampler=context.sampler,
    )
    try:
        with graceful_stop() as asked_to_stop:
            trainer.train(resumes, asked_to_stop, at=options.at)
            if trainer.history:  # at least one update was made
                trainer.save(run.path)
    finally:
        # Not by accelerate's `end_training`, which would also end the process group.
        for tracker in trainer.accelerator.trackers:
            tracker.finish()
    write_model_card(run.path / "policy", name, asdict(options))
    write_model_card(run.path / "critic", f"critic of {name}", asdict(options))
    return _mark_done(run.path, options)


def _trained_already(
    context: RunContext, name: str, options: commands.PolicyCommand
) -> Path | None:
    """Return the policy's folder if a resumed run has completed this stage, with or without checkpoints; else None."""
    # `--at` goes back: what came after that update is trained again.
    if not context.resume or options.at is not None:
        return None
    # The mark is the last file that a stage writes. If the options now ask for another length, it must train on.
    mark = context.path / name / DONE
    policy = context.path / name / "policy"
    is_whole = mark.is_file() and policy.is_dir()
    if not is_whole or read_json(mark) != _length_of_stage(options):
        return None
    print_main(f"{name}: done already")
    return policy


def _mark_done(folder: Path, options: commands.PolicyCommand) -> Path:
    """Write the mark by which `--resume` finds a stage done: how long it was. Return the folder of its policy."""
    if PartialState().is_main_process:
        write_json(folder / DONE, _length_of_stage(options))
    PartialState().wait_for_everyone()  # the next stage reads this folder
    return folder / "policy"


def _length_of_stage(options: commands.PolicyCommand) -> dict[str, float | None]:
    """Return the two options that say how long a stage is; None for one that it does not have. DPO has neither."""
    return {
        "updates": getattr(options, "updates", None),
        "prompt_epochs": getattr(options, "prompt_epochs", None),
    }


def _open_stage(
    context: RunContext, name: str, options: commands.PolicyCommand, sft: Path, rm: Path | None
) -> tuple[RunFolder, bool]:
    """Return the run folder of the stage `name`, and whether the stage resumes from a checkpoint.

    Without a checkpoint the stage starts from its beginning. Its manifest has the models `sft` and `rm` that it starts
    from, which the same run may have trained.
    """
    set_seed(context.options.seed)  # the stage does not depend on what ran before it
    place = context.path / name
    resumes = context.resume and has_checkpoint(place)
    PartialState().wait_for_everyone()  # until all have looked for a checkpoint nothing is moved
    if PartialState().is_main_process:
        if context.resume and not resumes:
            _put_away_what_is_left(place, context.path / "stopped")
        else:
            # A stage that was done gets here if it is to be longer, or to go back (`--at`): it is not done now.
            (place / DONE).unlink(missing_ok=True)
    # The stage's own manifest: what the command reads, and the models that it starts from. A stage that is resumed
    # compares it with what it had read before.
    contents = context.manifest["contents"] | input_contents(sft, rm)
    manifest = {**context.manifest, "contents": contents}
    if resumes:
        accept = context.options.accept_changed
        manifest["accepted"] = check_contents(RunFolder.open(place), contents, accept)
    return open_run(place, asdict(options), resume=resumes, manifest=manifest), resumes


def _put_away_what_is_left(place: Path, stopped: Path) -> None:
    """Delete the folder `place`, which a stage without a checkpoint has left.

    If the stage has recorded updates there, move it into the folder `stopped` instead.
    """
    if not place.exists():
        return
    if not (place / METRICS).is_file():
        shutil.rmtree(place)
        return
    # In `stopped` it is one folder deeper than the stages, so that no command takes it for a result.
    stopped.mkdir(exist_ok=True)
    number = 1
    while (stopped / f"{place.name}-{number}").exists():
        number += 1
    kept = stopped / f"{place.name}-{number}"
    place.rename(kept)
    why = "it has no checkpoint and begins again"
    print(f"{place.name}: {why}; what it has recorded is kept in {kept}")


def make_reward(
    context: RunContext, rm: Path | None, model: ScalarHeadModel | None = None
) -> Reward:
    """Return what `--reward` names as a function of a rollout; `model` is the reward model if it is already loaded."""
    if context.reward is not None:
        return context.reward
    model = model or ScalarHeadModel(load_score_model(context.base, rm))
    # How many responses are scored at a time: 16, the default of --micro_batch_size, if that is 0 (as many as fit), or
    # if the command has no such option, as DPO, whose reward scores held-out answers only.
    rows = getattr(context.options, "micro_batch_size", 0) or 16
    return ModelReward(model, rows, reader_of(rm, context.tokenizer, context.task))


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
    """Train by DPO on the reward model's pairs; return the policy's folder. `reward` scores held-out answers only."""
    from marlhf_lite.extras.baselines.dpo import dpo_row, dpo_trainer

    # If memory ends, both functions are called again, with a context whose options have fewer rows per pass.
    def make_trainer(context: RunContext, model: PeftModel, logger: RunLogger) -> Trainer:
        pairs = context.task.splits["rm"]
        return dpo_trainer(model, context.tokenizer, pairs, context.options, logger.run.path)

    def train(context: RunContext) -> Path:
        return _train_baseline(
            context, sft=sft, reward=reward, make_trainer=make_trainer, translate=dpo_row
        )

    return _within_memory(
        context, train, "per_device_train_batch_size", context.options.dpo_batch_size
    )


def group_stage(context: RunContext, sft: Path, reward: Reward) -> Path:
    """Train by RLOO or GRPO on PPO's prompts; return the policy's folder.

    `reward` scores a rollout, as for `PPOTrainer`.
    RLOO: REINFORCE with a leave-one-out baseline, and PPO's KL penalty: k1, in the reward. GRPO: advantages divided by
    the group's deviation, and the KL penalty as k3 in the loss.
    """
    from marlhf_lite.extras.baselines.rloo_grpo import SampledReward, group_row, group_trainer

    # If memory ends, both functions are called again, with a context whose options have fewer rows per pass.
    def make_trainer(context: RunContext, model: PeftModel, logger: RunLogger) -> Trainer:
        options = context.options
        prompts = prompts_of(context.task.splits["ppo"])
        scored = SampledReward(reward, model, context.tokenizer, options, context.task.gold, logger)
        return group_trainer(model, context.tokenizer, prompts, scored, options, logger.run.path)

    def train(context: RunContext) -> Path:
        return _train_baseline(
            context, sft=sft, reward=reward, make_trainer=make_trainer, translate=group_row
        )

    return _within_memory(context, train, "micro_batch_size", context.options.batch_size)


def _within_memory(
    context: RunContext, train: Callable[[RunContext], Path], option: str, rows_per_step: int
) -> Path:
    """Return `train(context)`; if memory ends, it resumes from its last checkpoint with half the rows per pass.

    `option` names the option with the rows per pass, and `rows_per_step` is the number of rows in an optimizer step.
    """

    def attempt(options: commands.PolicyCommand) -> Path:
        # The first attempt has the options as they are; each later one has fewer rows per pass.
        is_later_attempt = getattr(options, option) != getattr(context.options, option)
        resume = context.resume or is_later_attempt
        return train(replace(context, options=options, resume=resume))

    return with_fewer_rows(attempt, context.options, option, rows_per_step)


def _train_baseline(
    context: RunContext[commands.PolicyCommand],
    *,
    sft: Path,
    reward: Reward | None,
    make_trainer: MakeTrainer,
    translate: Translate,
) -> Path:
    """Train by a trainer of TRL, from the checkpoint if there is one, and save the policy; return its folder.

    Args:
        reward: scores held-out answers; None without a reward model.
        make_trainer: makes TRL's trainer from a context, the policy to train, and the logger that records its updates.
        translate: makes a row of metrics, under PPO's names, from a row of TRL's log and the options.
    """
    options = context.options
    (name,) = options.stages  # dpo, rloo or grpo
    trained = _trained_already(context, name, options)
    if trained:
        return trained

    # 1. The folder, and the checkpoint to resume from.
    run, _ = _open_stage(context, name, options, sft, context.inputs.rm)
    checkpoint = checkpoint_to_resume(run.path / "checkpoints", options.at)

    # 2. The trainer, with our records instead of its own. Nothing is deleted before it accepts the checkpoint.
    policy = _with_checkpointing(load_policy(context.base, sft), options)
    without_dropout(policy)
    logger = RunLogger(run, name.upper())
    trainer = make_trainer(context, policy, logger)
    check_checkpoint(trainer, checkpoint)
    if PartialState().is_main_process:
        _rewind_to(checkpoint, run)
    PartialState().wait_for_everyone()
    logger.history = run.metrics()  # the updates before the checkpoint
    held_out = _held_out_of_baseline(context, trainer, sft, reward)

    # 3. Train and save. If a signal has stopped the training, the block ends with `Stopped`, and the stage is not done.
    with graceful_stop() as asked_to_stop, nonfinite_probabilities_refused():
        recorder = Recorder(
            logger,
            asked_to_stop,
            translate=lambda logs: translate(logs, options),
            held_out=held_out,
            every=options.eval_every,
            saves=options.checkpoint_every > 0,
        )
        # None, unless FSDP2 shards the weights.
        whole_weights = train_recorded(trainer, recorder, checkpoint)
        if PartialState().is_main_process:
            with atomic_folder(run.path / "policy") as place:
                save_trained(trainer.model, context.tokenizer, place, whole_weights)
                write_update_of_weights(place, trainer.state.global_step)
    write_model_card(run.path / "policy", name.upper(), asdict(options))
    return _mark_done(run.path, options)


def _rewind_to(checkpoint: Path | None, run: RunFolder) -> None:
    """Delete the checkpoints that are newer than this one, and cut the logs of the run back to it.

    If it is None, the stage starts from its beginning: all checkpoints are deleted, and the logs become empty.
    """
    step = 0
    positions = dict.fromkeys(run.position(), 0)  # how many bytes of each log stay
    if checkpoint:
        step = step_of(checkpoint)
        positions |= read_json(checkpoint / LOG_POSITIONS)
    checkpoints = run.path.glob("checkpoints/checkpoint-*")
    newer = [path for path in checkpoints if step_of(path) > step]
    rewind_run(run, newer, positions)


def _held_out_of_baseline(
    context: RunContext[commands.PolicyCommand], trainer: Trainer, sft: Path, reward: Reward | None
) -> Callable[[], dict[str, float]] | None:
    """Return the test of the trainer's policy on held-out prompts; None if none is asked for, or without prompts."""
    if not context.options.eval_every:
        return None
    reference = load_policy(context.base, sft, trainable=False)
    test = held_out_evaluation(context, reward)
    if test is None:
        return None
    models = PPOModels(
        policy=PolicyModel(trainer.model),
        reference=PolicyModel(reference),
        reward=None,
        critic=None,
    )
    return lambda: test(models)


# Evaluation


def evaluate(
    context: RunContext[commands.EvaluatedCommand],
    policies: Mapping[str, Path],
    sft: Path,
    rm: Path | None,
    trained: bool = False,
) -> None:
    """Answer the held-out prompts with the SFT model and all policies, score the answers, print and write the results.

    If this run has trained the policies (`trained`), learning curves and some example answers are added. The run stores
    its answers, and an evaluation that is opened again uses them.
    """
    if not PartialState().is_main_process:  # the others have nothing to do
        return
    options = context.options
    set_seed(
        options.seed
    )  # for rewards and environments that draw random numbers: answers have seeds of their own
    scorers = Scorers(
        lambda path: PolicyModel(load_policy(context.base, path, trainable=False)),
        sft,
        rm,
        lambda path: ScalarHeadModel(load_score_model(context.base, path)),
        read=reader_of(rm, context.tokenizer, context.task),
        **_scores_by_code(context),
    )
    rows = evaluate_checkpoints(
        {"SFT": sft, **policies},
        scorers,
        context.held_out(options.eval_prompts),
        context.path / "responses",
        temperatures=options.temperatures,
        samples=options.eval_samples,
        model=_name_of_model(context),
    )
    write_rows(context.path / SAMPLES, rows)
    if not options.shows_sft:
        rows = rows[rows["method"] != "SFT"]

    histories = {}
    examples = 0  # the number of prompts whose answers are printed
    if trained:
        examples = 3 if options.shows_sft else 1  # one in the first act of the demo
        for name, policy in policies.items():
            histories[name] = RunFolder.open(policy.parent).metrics()
    figures = context.path / "figures"
    summary = run_report(context.path, rows, histories, figures, context.run.config)
    print(f"\n{caption(rows, options.eval_prompts)}\n\n{summary}\n")
    print(pass_report(context.path, rows, context.task), end="")
    print(example_answers(rows, examples), end="")
    print(differences(rows, list(histories)), end="")
    print(f"figures: {figures}\nrun folder: {context.path}")


def _scores_by_code(context: RunContext[commands.EvaluatedCommand]) -> dict:
    """Return the arguments of `Scorers` for what tables show beside the score of the reward model.

    That is the gold score if the task has one, and what `--reward` names. A reward of the task itself (gold, tests, an
    environment) is not shown beside the gold score, which says the same.
    """
    task = context.task
    scores = {}
    if task.gold:
        # Stored gold scores are of use only if the same tests, or the same part of the gold score, made them.
        scores = {
            "gold": task.gold,
            "gold_name": getattr(task.tests, "name", context.options.part),
        }
    reward_is_users_own = is_user_code(commands.reward_of(context.options))
    if context.reward and (reward_is_users_own or not task.gold):
        # Stored scores are of use only if the reward's code, and the columns that it reads, are the same.
        hashes = _hashes_of_contents(context, CODE["reward"], CODE["environment"], COLUMNS)
        scores |= {
            "reward": context.reward,
            "reward_version": ", ".join([context.reward.name, *hashes]),
        }
    return scores


def _name_of_model(context: RunContext) -> str:
    """Return what stored answers depend on, besides their policy: the base model and its number format."""
    options = context.options
    parts = [options.model, *_hashes_of_contents(context, "base model", "tokenizer")]
    if options.load_in_4bit:
        parts.append("4 bits")
    if options.dtype != ModelConfig.dtype:
        parts.append(options.dtype)
    return ", ".join(parts)


def _hashes_of_contents(context: RunContext, *names: str) -> list[str]:
    """Return the first digits of the hash of each of these contents that the run reads."""
    contents = context.manifest["contents"]
    return [contents[name]["hash"][:12] for name in names if name in contents]
