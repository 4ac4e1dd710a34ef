"""The stages, chained: SFT -> reward model -> PPO -> evaluation. Each stage reads folders and leaves a folder."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import datasets
from transformers import PreTrainedModel, set_seed

from marlhf_lite.config import MacroOptions
from marlhf_lite.errors import InputError
from marlhf_lite.evaluation.answers import answer
from marlhf_lite.folders import check_output
from marlhf_lite.models import (
    EMBEDDED_MODEL,
    load_base,
    load_policy,
    load_score_model,
    load_tokenizer,
    model_path,
    new_policy,
    new_reward_model,
)
from marlhf_lite.records import RunFolder, write_json
from marlhf_lite.rewards import FunctionReward, ModelReward
from marlhf_lite.roles import PolicyRole, ScoreRole, build_roles
from marlhf_lite.rollouts import Sampling
from marlhf_lite.rules import make_rule
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.loading import drop_long_prompts, load_task
from marlhf_lite.tasks.split import Task
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.reward_model import pair_accuracy, train_reward_model
from marlhf_lite.training.sft import train_sft


@dataclass(frozen=True)
class Workspace:
    """What every stage shares: the run's folder, the data, the tokenizer and the one base model."""

    options: SimpleNamespace
    run: RunFolder
    task: Task
    tokenizer: object
    base: PreTrainedModel

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def limit(self) -> int:
        return self.options.data.max_response_length

    @property
    def sampling(self) -> Sampling:
        ppo = self.options.ppo
        return Sampling(self.limit, ppo.temperature, ppo.top_k, ppo.top_p)

    @property
    def test_prompts(self) -> list[str]:
        return list(self.task.splits["test"]["prompt"][: self.options.eval.eval_prompts])


def flat(options: SimpleNamespace) -> dict:
    """Every option by its name: what config.yaml holds, and what `--config` takes back."""
    return {key: value for group in vars(options).values() for key, value in asdict(group).items()}


def open_workspace(options: SimpleNamespace, inputs: Sequence[Path] = ()) -> Workspace:
    """Check everything that can be checked without a model, then load tokenizer and base, then make the run's folder.

    `inputs` are folders of earlier stages, which the run must not overwrite.
    """
    data = options.data
    check_output(options.run, [*inputs, data.dataset, options.model.model])
    model_path(options.model.model)
    task = load_task(data.dataset, size=data.size, seed=data.split_seed, bad_rows=data.bad_rows)
    if hasattr(options, "macro"):  # a command that trains against a reward
        text_reward(options.inputs.reward, task)
    tokenizer = load_tokenizer(options.model.model)
    task, dropped = _drop_long(task, tokenizer, data.max_prompt_length)
    base = load_base(options.model)
    if hasattr(options, "sft"):  # a command that makes adapters
        check_targets(base, options.model.lora_targets)
    run = RunFolder.create(options.run.output_dir, flat(options), overwrite=options.run.overwrite)
    write_json(run.path / "data.json", task.counts | {"long_prompts": dropped})
    print(f"{task.name}: " + ", ".join(f"{part} {len(rows)}" for part, rows in task.splits.items()), end="")
    print(f"; dropped: {dropped} long prompts" + "".join(f", {v} {k}" for k, v in _dropped(task).items()))
    if options.model.model == EMBEDDED_MODEL and data.dataset not in EMBEDDED:
        print(f"note: {EMBEDDED_MODEL} has read {', '.join(EMBEDDED)} alone: on other data, scores mean little")
    return Workspace(options, run, task, tokenizer, base)


def check_targets(base: PreTrainedModel, targets: str) -> None:
    """Raises `InputError` where `--lora_targets` names no layer of the base."""
    try:
        found = targets == "all-linear" or any(re.fullmatch(targets, name) for name, _ in base.named_modules() if name)
    except re.error:
        found = False
    if not found:
        mend = "give all-linear, or a regular expression for whole names such as .*q_proj"
        raise InputError(f"--lora_targets {targets}: matches no layer: {mend}")


def _drop_long(task: Task, tokenizer, limit: int) -> tuple[Task, int]:
    kept, dropped = {}, 0
    for part, rows in task.splits.items():
        kept[part], gone = drop_long_prompts(rows, tokenizer, limit)
        dropped += gone
    counts = task.counts | {part: len(rows) for part, rows in kept.items()}
    return replace(task, splits=datasets.DatasetDict(kept), counts=counts), dropped


def _dropped(task: Task) -> dict[str, int]:
    """Why rows were dropped while reading, without the counts of what was kept."""
    return {k: v for k, v in task.counts.items() if v and k not in ("read", "kept", *task.splits)}


def sft_stage(work: Workspace) -> Path:
    """Fine-tune a fresh adapter; its folder."""
    seed, out = work.options.run.seed, work.path / "sft"
    set_seed(seed)  # each stage by itself: it repeats whatever ran before it
    model = new_policy(work.base, work.options.model)
    log = train_sft(model, work.tokenizer, work.task.splits["sft"], work.options.sft, work.options.data, out, seed)
    write_json(out / "log.json", log)
    return out


def rm_stage(work: Workspace, sft: Path) -> Path:
    """Train the reward model from the SFT adapter; its folder. Prints and stores accuracy on held-out pairs."""
    seed, out = work.options.run.seed, work.path / "rm"
    set_seed(seed)
    model = new_reward_model(work.base, sft, seed)
    rows = work.task.splits
    log = train_reward_model(model, work.tokenizer, rows["rm"], work.options.rm, work.options.data, out, seed)
    held_out = rows["test"].select(range(min(500, len(rows["test"]))))
    accuracy = pair_accuracy(ModelReward(ScoreRole(model)), work.tokenizer, held_out, work.limit)
    write_json(out / "log.json", log)
    write_json(out / "accuracy.json", {"accuracy": accuracy, "pairs": len(held_out)})
    print(f"reward model: {accuracy:.1%} of {len(held_out)} held-out pairs ranked as labelled")
    return out


def ppo_stage(work: Workspace, sft: Path, rm: Path | None, how: MacroOptions, name: str) -> Path:
    """Train policy and critic; the policy's adapter folder. Records stand beside it, whole even when interrupted."""
    options, rule = work.options, make_rule(how, work.options.run.seed)
    options = SimpleNamespace(**{**vars(options), "macro": how})
    set_seed(options.run.seed)
    run = RunFolder.create(work.path / name.lower(), flat(options), overwrite=options.run.overwrite)
    trainer = PPOTrainer(
        build_roles(work.base, sft, rm, options.ppo.critic_init),
        work.tokenizer,
        work.task.splits["ppo"]["prompt"],
        make_reward(work, rm),
        rule,
        how,
        options.ppo,
        max_response_length=work.limit,
        seed=options.run.seed,
        run=run,
        gold=work.task.gold,
        name=name,
    )
    try:
        trainer.train()
    finally:
        if trainer.history:
            trainer.save(run.path)
    return run.path / "policy"


def make_reward(work: Workspace, rm: Path | None):
    """What `--reward` names, as a function of a rollout."""
    kind = work.options.inputs.reward
    function = text_reward(kind, work.task)
    if function is None:
        return ModelReward(ScoreRole(load_score_model(work.base, rm)), work.options.ppo.micro_batch_size)
    return FunctionReward(function, kind)


def text_reward(kind: str, task: Task) -> Callable | None:
    """The function of texts that `--reward` names; None for rm. Raises `InputError` where there is none."""
    if kind == "rm":
        return None
    if kind != "gold":
        return import_function(kind)
    if task.gold is None:
        raise InputError(f"--reward gold: {task.name} has no known truth: give rm, or package.module:function")
    return task.gold


def import_function(name: str) -> Callable:
    """`package.module:function` as the function itself, from the current folder too. Raises `InputError` if not."""
    mend = "give rm, gold, or package.module:function"
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"--reward {name}: unknown: {mend}")
    if os.getcwd() not in sys.path:  # `marlhf` itself does not look there, `python -m` does
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"--reward {name}: cannot be imported ({reason}): {mend}") from None
    if not callable(function):
        raise InputError(f"--reward {name}: a {type(function).__name__}, not a function: {mend}")
    return function


def evaluate_stage(work: Workspace, policies: dict[str, Path], sft: Path, rm: Path | None) -> list[dict]:
    """Answers of SFT and of each policy to the held-out prompts, scored; also written to samples.jsonl."""
    reference = PolicyRole(load_policy(work.base, sft, trainable=False))
    reward = ModelReward(ScoreRole(load_score_model(work.base, rm))) if rm else None
    rows: list[dict] = []
    for name, folder in {"SFT": sft, **policies}.items():
        policy = reference if name == "SFT" else PolicyRole(load_policy(work.base, folder, trainable=False))
        rows += answer(
            policy,
            reference,
            work.tokenizer,
            work.test_prompts,
            work.sampling,
            reward,
            work.task.gold,
            name=name,
            seed=work.options.run.seed,
            batch_size=work.options.eval.eval_batch_size,
        )
    work.run.log_samples(rows)
    return rows
