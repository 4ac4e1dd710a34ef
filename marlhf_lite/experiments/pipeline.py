"""Stages of a run: SFT -> reward model -> PPO (or DPO, RLOO, GRPO) -> evaluation. Each reads folders and leaves one.

`open_context` checks the input and opens what all stages share. With `--resume`, a stage that is done is not done
again, and a stage that was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pandas as pd
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, set_seed

from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.options import MacroConfig
from marlhf_lite.config.parser import flatten
from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.evaluation.responses import evaluate_checkpoints, write_rows
from marlhf_lite.evaluation.scores import Scorers
from marlhf_lite.experiments.evaluation_report import caption, details, example_answers, pass_report
from marlhf_lite.experiments.reports import run_report
from marlhf_lite.models.actor_critic import (
    PolicyModel,
    PPOModels,
    ScalarHeadModel,
    build_models,
    checkpoint_activations,
    trainable,
)
from marlhf_lite.models.loading import (
    check_target_modules,
    load_base,
    load_policy,
    load_score_model,
    load_tokenizer,
    model_path,
    new_policy,
    new_reward_model,
)
from marlhf_lite.parsing.registry import make_rule
from marlhf_lite.tasks.loading import drop_long_prompts, load_task
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training.callbacks import LOG_POSITIONS, HeldOutTests, Recorder
from marlhf_lite.training.distributed import local_tensor
from marlhf_lite.training.dpo import dpo_row, dpo_trainer
from marlhf_lite.training.logging import make_accelerator, tracker_names
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.program_tests import with_tests
from marlhf_lite.training.reward_model import pair_accuracy, train_reward_model
from marlhf_lite.training.rewards import FunctionReward, ModelReward, text_reward
from marlhf_lite.training.rloo_grpo import SampledReward, group_row, group_trainer
from marlhf_lite.training.rollout import Rollout, Sampling, nonfinite_probabilities_refused
from marlhf_lite.training.sft import train_sft
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import SAMPLES, RunFolder, check_output_dir, is_run

Reward = Callable[[Rollout], Tensor]
OF_THE_START = ("output_dir", "overwrite", "resume", "from_checkpoint")  # not updated in config.yaml by --resume


@dataclass(frozen=True)
class RunContext:
    """Options, run folder, data, tokenizer and base model of a run."""

    options: SimpleNamespace
    run: RunFolder
    task: Task
    tokenizer: object
    load: Callable[[], PreTrainedModel]  # returns the base model, the same one at every call

    @property
    def base(self) -> PreTrainedModel:
        return self.load()

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return PartialState().is_main_process

    @property
    def limit(self) -> int:
        """The longest response, in tokens."""
        return self.options.data.max_response_length

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.limit, *(_option(self.options, name) for name in ("temperature", "top_k", "top_p")))

    @property
    def test_prompts(self) -> list[str]:
        """The held-out prompts to evaluate on, each once."""
        return list(self.task.held_out(self.options.eval.eval_prompts)["prompt"])


def _option(options: SimpleNamespace, name: str, default=None):
    """Return an option by its name, from the first group that has it."""
    return next((getattr(group, name) for group in vars(options).values() if hasattr(group, name)), default)


def print_main(text: str) -> None:
    """Print once, not once a process."""
    if PartialState().is_main_process:
        print(text)


def start_processes() -> None:
    """Join the other processes of `accelerate launch`, and silence bars and warnings of the libraries."""
    PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))  # the first one made decides about the device
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)


def open_context(options: SimpleNamespace, inputs: Iterable[Path] = (), exist_ok: bool = False) -> RunContext:
    """Check all that can be checked without a model, load tokenizer and base model, and make the run's folder.

    Args:
        inputs: folders of earlier stages, which the run must not overwrite.
        exist_ok: open a run that exists and add to it, as with `--resume`; the base is loaded when it is first needed.

    Raises:
        InputError: for every fault of the options, the data or the model.
    """
    start_processes()
    data, run = options.data, options.run
    if PartialState().num_processes > 1:  # the default name has the time in it, and clocks differ
        run.output_dir = broadcast_object_list([run.output_dir])[0]
    if exist_ok and not run.overwrite and is_run(Path(run.output_dir)):
        run.resume = run.output_dir
    if not run.resume:
        check_output_dir(Path(run.output_dir), run.overwrite, [*inputs, data.dataset, options.model.model])
    if options.model.finetune == "full" and options.model.load_in_4bit:
        raise InputError("--load_in_4bit: frozen 4-bit weights cannot train: use --finetune lora")
    tracker_names(_option(options, "report_to", ""))
    model_path(options.model.model)
    given = {name: getattr(data, name) for name in ("size", "bad_rows", "template", "part")}
    task = load_task(data.dataset, seed=data.split_seed, streaming=data.dataset_streaming, **given)
    if hasattr(options, "programs"):
        task = with_tests(task, options.programs, data.bad_rows)
    if hasattr(options, "reward"):
        text_reward(options.reward.reward, task)
    tokenizer = load_tokenizer(options.model.model)
    task = _drop_long_prompts(task, tokenizer, data.max_prompt_length)
    load = functools.cache(lambda: load_base(options.model))
    if not (exist_ok and run.resume):
        load()
    if hasattr(options, "sft") and options.model.finetune == "lora":
        check_target_modules(load(), options.model.lora_target_modules)
    folder = open_run(Path(run.output_dir), options)
    context = RunContext(options, folder, task, tokenizer, load)
    if context.is_main:
        different = {"test_prompts": len(set(task.splits["test"]["prompt"]))}
        write_json(folder.path / "data.json", task.counts | different)
    _print_start(context)
    return context


def _print_start(context: RunContext) -> None:
    options, task = context.options, context.task
    if taken := [name for name in ("sft", "rm", "policies") if _option(options, name)]:
        print_main(f"data and model as in --{taken[0]}: --dataset {task.name} --model {options.model.model}")
    not_dropped = ("read", "kept", *task.splits)
    dropped = ", ".join(
        f"{n} {why.replace('_', ' ')}" for why, n in task.counts.items() if n and why not in not_dropped
    )
    parts = ", ".join(f"{part} {len(rows)}" for part, rows in task.splits.items())
    print_main(f"{task.name}: {parts}; dropped: {dropped or 'none'}")
    model, dataset = options.model.model, options.data.dataset
    read = EMBEDDED_MODELS.get(model, dataset)
    if dataset != read:
        print_main(f"note: {model} has read only {read}: on other data, scores mean little")


def open_run(path: Path, options: SimpleNamespace) -> RunFolder:
    """Make the run's folder in the main process, or with `--resume` open the one that exists.

    The config.yaml of a resumed run is updated with the present options, if it is a run of the same command.
    """
    state = PartialState()
    state.wait_for_everyone()  # nobody looks for an existing run after somebody has made it
    if state.is_main_process and options.run.resume and is_run(path):
        run, now = RunFolder.open(path), flatten(options)
        if set(run.config) <= {"environment", *now}:
            run.update_config({name: value for name, value in now.items() if name not in OF_THE_START})
    elif state.is_main_process and not (options.run.resume and path.exists()):
        RunFolder.create(path, flatten(options), overwrite=options.run.overwrite)
    state.wait_for_everyone()
    return RunFolder.open(path)


def _drop_long_prompts(task: Task, tokenizer, limit: int) -> Task:
    kept, dropped = {}, 0
    for part, rows in task.splits.items():
        kept[part], count = drop_long_prompts(rows, tokenizer, limit)
        dropped += count
    counts = task.counts | {part: len(rows) for part, rows in kept.items()} | {"long_prompts": dropped}
    return replace(task, splits=datasets.DatasetDict(kept), counts=counts)


# SFT and reward model


def run_stage(context: RunContext, name: str, last: str, train: Callable[[Path], dict[str, object]]) -> Path:
    """Train in the folder `name`, unless `--resume` finds it done; return the folder.

    `train` gets the folder, saves the model there, and returns the contents of JSON files by name. The file `last` is
    the last of them: it marks a stage that is done.
    """
    folder = context.path / name
    if context.options.run.resume and (folder / last).is_file():
        print_main(f"{name}: done already")
        return folder
    set_seed(context.options.run.seed)  # each stage by itself: it does not depend on what ran before it
    for file, content in train(folder).items():
        if context.is_main:
            write_json(folder / file, content)
    PartialState().wait_for_everyone()  # the next stage reads these files
    return folder


def sft_stage(context: RunContext) -> Path:
    """Fine-tune a new adapter, or all weights, on the SFT part; return its folder."""
    options = context.options

    def train(folder: Path) -> dict:
        model = _to_train(new_policy(context.base, options.model), context)
        rows, seed = context.task.splits["sft"], options.run.seed
        log = train_sft(model, context.tokenizer, rows, options.sft, options.data, folder, seed, options.trainer)
        return {"log.json": log}

    return run_stage(context, "sft", "log.json", train)


def rm_stage(context: RunContext, sft: Path) -> Path:
    """Train the reward model from the SFT adapter; return its folder. Prints its accuracy on held-out pairs."""
    options, splits = context.options, context.task.splits
    if not len(splits["rm"]):
        hint = "train PPO with --reward tests, or package.module:function"
        raise InputError(f"{context.task.name}: it has no preference pairs for a reward model: {hint}")

    def train(folder: Path) -> dict:
        seed = options.run.seed
        model = _to_train(new_reward_model(context.base, sft, seed), context)
        log = train_reward_model(
            model, context.tokenizer, splits["rm"], options.rm, options.data, folder, seed, options.trainer
        )
        held_out = context.task.held_out(500)
        accuracy = pair_accuracy(ModelReward(ScalarHeadModel(model)), context.tokenizer, held_out, context.limit)
        print_main(f"reward model: {accuracy:.1%} of {len(held_out)} held-out pairs ranked as labelled")
        return {"log.json": log, "accuracy.json": {"accuracy": accuracy, "pairs": len(held_out)}}

    return run_stage(context, "rm", "accuracy.json", train)


def _to_train(model, context: RunContext):
    """Return the model, with activation checkpointing if `--gradient_checkpointing` asks for it."""
    if context.options.model.gradient_checkpointing:
        checkpoint_activations(model)
    return model


# PPO


def ppo_stage(context: RunContext, sft: Path, rm: Path | None, macro: MacroConfig, name: str) -> Path:
    """Train policy and critic; return the policy's folder. Records stand beside it, whole even when interrupted."""
    options, rule = context.options, make_rule(macro, context.options.run.seed)
    options = SimpleNamespace(**{**vars(options), "macro": macro})
    run, checkpoints = _open_stage(context, name.lower(), "update-*", options)
    models = build_models(context.base, sft, rm, options.ppo.critic_init, options.model.gradient_checkpointing)
    reward = make_reward(context, rm, models.reward)
    accelerator = make_accelerator(options.logging.report_to, run.path, name, flatten(options))
    trainer = PPOTrainer(
        models,
        context.tokenizer,
        context.task.splits["ppo"]["prompt"],
        reward,
        rule,
        options.ppo,
        macro,
        max_response_length=context.limit,
        checkpoint_config=options.checkpoint,
        logging_config=options.logging,
        seed=options.run.seed,
        run=run,
        gold=context.task.gold,
        held_out=held_out_evaluation(context, reward, options.ppo.generation_batch_size or 128),
        name=name,
        accelerator=accelerator,
    )
    try:
        trainer.train(resume=bool(checkpoints))
    finally:
        for tracker in trainer.accelerator.trackers:  # end_training would part the processes too
            tracker.finish()
        if trainer.history:
            trainer.save(run.path)
    PartialState().wait_for_everyone()
    return run.path / "policy"


def _open_stage(
    context: RunContext, name: str, pattern: str, options: SimpleNamespace
) -> tuple[RunFolder, dict[int, Path]]:
    """Return a stage's run folder, and with `--resume` its checkpoints by update; without any it starts over."""
    set_seed(options.run.seed)  # each stage by itself: it does not depend on what ran before it
    place = context.path / name
    paths = place.glob(f"checkpoints/{pattern}") if options.run.resume else []
    checkpoints = {int(re.sub(r"\D", "", path.name)): path for path in paths}
    if options.run.resume and not checkpoints:
        options = SimpleNamespace(**vars(options) | {"run": replace(options.run, resume="", overwrite=True)})
    return open_run(place, options), checkpoints


def make_reward(context: RunContext, rm: Path | None, model: ScalarHeadModel | None = None) -> Reward:
    """Return what `--reward` names as a function of a rollout; `model` is the reward model if it is loaded already."""
    kind = _option(context.options, "reward", "rm")
    function = text_reward(kind, context.task)
    if function is not None:
        return FunctionReward(function, kind)
    batch = _option(context.options, "micro_batch_size") or _option(context.options, "batch_size", 16)
    return ModelReward(model or ScalarHeadModel(load_score_model(context.base, rm)), batch)


def held_out_evaluation(context: RunContext, reward: Reward | None, batch_size: int = 128):
    """Return the test on held-out prompts that runs while training; None where there are no prompts."""
    prompts = list(context.task.held_out(context.options.logging.test_prompts)["prompt"])
    gold, seed = context.task.gold, context.options.run.seed
    given = (prompts, context.tokenizer, context.sampling, reward, gold, seed, batch_size)
    return HeldOutEvaluation(*given) if prompts else None


# Baselines: DPO, RLOO and GRPO through TRL, from the SFT adapter (Appendix C.3, Table 7). They share data, start,
# prompts, reward, sampling and records with PPO. The reference is the SFT model: TRL keeps a frozen copy of the adapter
# that it gets (a disabled adapter would be the base).


def dpo_stage(context: RunContext, sft: Path, reward: Reward | None = None) -> Path:
    """Train on the reward model's pairs; return the policy's folder. Records stand beside it.

    `reward` scores held-out tests only.
    """
    options, splits = context.options, context.task.splits
    model, run, checkpoint = _start_baseline(context, sft, "dpo")
    records = (options.checkpoint, options.run.seed, options.trainer, options.logging.report_to)
    trainer = dpo_trainer(model, context.tokenizer, splits["rm"], options.dpo, context.limit, run.path, *records)
    tests = _held_out_tests(context, sft, trainer, reward, run, "DPO")
    return _train(context, trainer, "DPO", run, checkpoint, lambda logs: dpo_row(logs, options.dpo), tests)


def rloo_stage(context: RunContext, sft: Path, reward: Reward) -> Path:
    """Train by REINFORCE with a leave-one-out baseline on PPO's prompts; return the policy's folder.

    `reward` scores a rollout, as for `PPOTrainer`. The KL penalty is PPO's: k1, in the reward.
    """
    return _group_stage(context, sft, reward, "rloo")


def grpo_stage(context: RunContext, sft: Path, reward: Reward) -> Path:
    """Like `rloo_stage`, with advantages divided by the group's deviation, and the KL penalty as k3 in the loss."""
    return _group_stage(context, sft, reward, "grpo")


def _group_stage(context: RunContext, sft: Path, reward: Reward, method: str) -> Path:
    options, group = context.options, getattr(context.options, method)
    model, run, checkpoint = _start_baseline(context, sft, method)
    function = SampledReward(reward, model, context.tokenizer, group, context.task.gold, run)
    prompts = context.task.splits["ppo"]["prompt"]
    records = (options.checkpoint, options.run.seed, options.logging.report_to)
    trainer = group_trainer(
        method, model, context.tokenizer, prompts, function, group, context.limit, run.path, *records
    )
    tests = _held_out_tests(context, sft, trainer, reward, run, method.upper())
    return _train(context, trainer, method.upper(), run, checkpoint, lambda logs: group_row(logs, method, group), tests)


def _start_baseline(context: RunContext, sft: Path, name: str) -> tuple[PeftModel, RunFolder, Path | None]:
    """Return the policy as SFT left it, the run folder, and the checkpoint to go on from, if any."""
    run, found = _open_stage(context, name, "checkpoint-*", context.options)
    whole = {update: path for update, path in found.items() if (path / LOG_POSITIONS).is_file()}
    update = context.options.checkpoint.from_checkpoint
    if update and update not in whole:
        raise InputError(f"--from_checkpoint {update}: {run.path} has {sorted(whole) or 'none'}: name one of them")
    checkpoint = whole.get(update or max(whole, default=0))
    return _to_train(load_policy(context.base, sft), context), run, checkpoint


def _held_out_tests(
    context: RunContext, sft: Path, trainer: Trainer, reward: Reward | None, run: RunFolder, name: str
) -> list[HeldOutTests]:
    every = context.options.logging.eval_every
    if not every:
        return []
    held_out = held_out_evaluation(context, reward)
    reference = PolicyModel(load_policy(context.base, sft, trainable=False))
    models = PPOModels(PolicyModel(trainer.model), reference, None, None)
    return [HeldOutTests(held_out, models, every, run, name)]


def _train(
    context: RunContext,
    trainer: Trainer,
    name: str,
    run: RunFolder,
    checkpoint: Path | None,
    translate: Callable[[dict], dict],
    callbacks: Sequence[TrainerCallback],
) -> Path:
    """Train, from `checkpoint` if there is one, and save the policy, also that of an interrupted run; its folder.

    Weights that are not finite are not saved.
    """
    if checkpoint and context.is_main:
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
        finite = all(bool(local_tensor(p).isfinite().all()) for p in trainable(trainer.model))
        if recorder.history and finite and context.is_main:
            policy_only = {"selected_adapters": ["default"]} if isinstance(trainer.model, PeftModel) else {}
            trainer.model.save_pretrained(folder, **policy_only)  # without the reference's adapter
            context.tokenizer.save_pretrained(folder)
    return folder


# Evaluation


def evaluate(context: RunContext, policies: dict[str, Path], sft: Path, rm: Path | None, examples: int = 0) -> None:
    """Evaluate SFT and policies on the held-out prompts; print and write tables, figures and some example answers."""
    if not context.is_main:
        return
    rows, options = evaluate_stage(context, policies, sft, rm), context.options.eval
    histories = {name: RunFolder.open(path.parent).metrics() for name, path in policies.items() if examples}
    figures = context.path / "figures"
    summary = run_report(context.path, rows, histories, figures, context.run.config)
    print(f"\n{caption(rows, options.eval_prompts)}\n\n{summary}\n")
    if not examples or options.temperatures or options.eval_samples > 1:
        print(f"{details(context.path, rows, options.sizes, figures)}\n")
    print(pass_report(context.path, rows, context.task) + example_answers(rows, examples), end="")
    print(f"figures: {figures}\nrun folder: {context.path}")


def make_scorers(context: RunContext, sft: Path, rm: Path | None) -> Scorers:
    """Return what scores answers in an evaluation: the SFT model for the KL, the reward model, gold if it is known."""
    return Scorers(
        lambda path: PolicyModel(load_policy(context.base, path, trainable=False)),
        sft,
        rm,
        lambda path: ScalarHeadModel(load_score_model(context.base, path)),
        context.task.gold,
    )


def evaluate_stage(context: RunContext, policies: dict[str, Path], sft: Path, rm: Path | None) -> pd.DataFrame:
    """Return scored answers of SFT and of each policy to the held-out prompts; the first ones also in samples.jsonl.

    They are stored in the run, and stored answers are used again.
    """
    options = context.options
    rows = evaluate_checkpoints(
        {"SFT": sft, **policies},
        make_scorers(context, sft, rm),
        context.tokenizer,
        context.test_prompts,
        context.path / "responses",
        context.sampling,
        temperatures=options.eval.temperatures,
        samples=options.eval.eval_samples,
        seed=options.run.seed,
        model=options.model.model,
    )
    write_rows(context.path / SAMPLES, rows[rows["sample"] == 0])
    return rows
