"""The stages, chained: SFT -> reward model -> PPO -> evaluation. Each stage reads folders and leaves a folder.

With `--resume`, a stage that is done is not done again, and PPO goes on from its last checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
from accelerate import PartialState
from transformers import set_seed

from marlhf_lite.config.options import MacroConfig
from marlhf_lite.config.parser import flatten
from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.evaluation.responses import evaluate_checkpoints, write_rows
from marlhf_lite.evaluation.scores import Scorers
from marlhf_lite.experiments.workspace import RunContext, open_run, say
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel, build_models, checkpoint_activations
from marlhf_lite.models.loading import load_policy, load_score_model, new_policy, new_reward_model
from marlhf_lite.parsing.registry import make_rule
from marlhf_lite.training.logging import make_accelerator
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.reward_model import pair_accuracy, train_reward_model
from marlhf_lite.training.rewards import FunctionReward, ModelReward, text_reward
from marlhf_lite.training.sft import train_sft
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import SAMPLES


def sft_stage(work: RunContext) -> Path:
    """Fine-tune a fresh adapter (or all weights); its folder."""
    seed, out = work.options.run.seed, work.path / "sft"
    if _is_done(work, out / "log.json"):
        return out
    set_seed(seed)  # each stage by itself: it repeats whatever ran before it
    model = _saving_memory(new_policy(work.base, work.options.model), work)
    log = train_sft(
        model,
        work.tokenizer,
        work.task.splits["sft"],
        work.options.sft,
        work.options.data,
        out,
        seed,
        work.options.trainer,
    )
    _write(out / "log.json", log)
    return out


def rm_stage(work: RunContext, sft: Path) -> Path:
    """Train the reward model from the SFT adapter; its folder. Prints and stores accuracy on held-out pairs."""
    seed, out = work.options.run.seed, work.path / "rm"
    if _is_done(work, out / "accuracy.json"):
        return out
    if not len(work.task.splits["rm"]):
        mend = "train PPO with --reward package.module:function"
        raise InputError(f"{work.task.name}: it has no preference pairs for a reward model: {mend}")
    set_seed(seed)
    model = _saving_memory(new_reward_model(work.base, sft, seed), work)
    rows = work.task.splits
    options = work.options
    log = train_reward_model(model, work.tokenizer, rows["rm"], options.rm, options.data, out, seed, options.trainer)
    held_out = rows["test"].select(range(min(500, len(rows["test"]))))
    accuracy = pair_accuracy(ModelReward(ScalarHeadModel(model)), work.tokenizer, held_out, work.limit)
    _write(out / "log.json", log)
    _write(out / "accuracy.json", {"accuracy": accuracy, "pairs": len(held_out)})
    say(f"reward model: {accuracy:.1%} of {len(held_out)} held-out pairs ranked as labelled")
    return out


def _is_done(work: RunContext, mark: Path) -> bool:
    done = bool(work.options.run.resume) and mark.is_file()
    if done:
        say(f"{mark.parent.name}: done already")
    return done


def _saving_memory(model, work: RunContext):
    if work.options.model.gradient_checkpointing:
        checkpoint_activations(model)
    return model


def _write(path: Path, obj) -> None:
    """The main process writes, and the others wait: next they read what stands beside it."""
    if PartialState().is_main_process:
        write_json(path, obj)
    PartialState().wait_for_everyone()


def ppo_stage(work: RunContext, sft: Path, rm: Path | None, how: MacroConfig, name: str) -> Path:
    """Train policy and critic; the policy's folder. Records stand beside it, whole even when interrupted."""
    options, rule = work.options, make_rule(how, work.options.run.seed)
    options = SimpleNamespace(**{**vars(options), "macro": how})
    set_seed(options.run.seed)
    place = work.path / name.lower()
    if options.run.resume and place.exists() and not any(place.glob("checkpoints/update-*")):
        options.run = replace(options.run, resume="", overwrite=True)  # it had not come to its first checkpoint
    run = open_run(place, options)
    models = build_models(work.base, sft, rm, options.ppo.critic_init, options.model.gradient_checkpointing)
    reward = make_reward(work, rm, models.reward)
    accelerator = make_accelerator(options.logging.report_to, run.path, name, flatten(options))
    batch = options.ppo.generation_batch_size or 128
    prompts = work.task.splits["test"]["prompt"][: options.logging.test_prompts]
    seed = options.run.seed
    held_out = HeldOutEvaluation(prompts, work.tokenizer, work.sampling, reward, work.task.gold, seed, batch)
    trainer = PPOTrainer(
        models,
        work.tokenizer,
        work.task.splits["ppo"]["prompt"],
        reward,
        rule,
        options.ppo,
        how,
        checkpoint_config=options.checkpoint,
        logging_config=options.logging,
        max_response_length=work.limit,
        seed=options.run.seed,
        run=run,
        gold=work.task.gold,
        held_out=held_out if prompts else None,
        name=name,
        accelerator=accelerator,
    )
    try:
        trainer.train(resume=any(place.glob("checkpoints/update-*")))
    finally:
        for tracker in trainer.accelerator.trackers:  # end_training would part the processes too
            tracker.finish()
        if trainer.history:
            trainer.save(run.path)
    PartialState().wait_for_everyone()
    return run.path / "policy"


def make_reward(work: RunContext, rm: Path | None, role: ScalarHeadModel | None = None):
    """What `--reward` names, as a function of a rollout; `role` is the reward model where it is loaded already."""
    kind = work.options.reward.reward if hasattr(work.options, "reward") else "rm"
    function = text_reward(kind, work.task)
    if function is None:
        values = flatten(work.options)
        batch = values.get("micro_batch_size") or values.get("batch_size") or 16
        return ModelReward(role or ScalarHeadModel(load_score_model(work.base, rm)), batch)
    return FunctionReward(function, kind)


def make_scorers(work: RunContext, sft: Path, rm: Path | None) -> Scorers:
    """Who scores answers in an evaluation: the SFT model for the KL, the reward model, and gold where it is known."""
    return Scorers(
        lambda path: PolicyModel(load_policy(work.base, path, trainable=False)),
        sft,
        rm,
        lambda path: ScalarHeadModel(load_score_model(work.base, path)),
        work.task.gold,
    )


def evaluate_stage(work: RunContext, policies: dict[str, Path], sft: Path, rm: Path | None) -> pd.DataFrame:
    """Answers of SFT and of each policy to the held-out prompts, scored; the first of each also in samples.jsonl.

    They are stored beside the run unless `--responses` says where, and what is stored is not generated again.
    """
    options = work.options
    rows = evaluate_checkpoints(
        {"SFT": sft, **policies},
        make_scorers(work, sft, rm),
        work.tokenizer,
        work.test_prompts,
        Path(options.eval.responses or work.path / "responses"),
        work.sampling,
        temperatures=options.eval.temperatures,
        samples=options.eval.eval_samples,
        seed=options.run.seed,
        model=options.model.model,
    )
    write_rows(work.path / SAMPLES, rows[rows["sample"] == 0])
    return rows
