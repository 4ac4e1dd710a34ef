"""The stages, chained: SFT -> reward model -> PPO -> evaluation. Each stage reads folders and leaves a folder."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import datasets
from transformers import PreTrainedModel

from marlhf_lite.config import MacroOptions
from marlhf_lite.errors import InputError
from marlhf_lite.evaluation.answers import answer
from marlhf_lite.models import load_base, load_policy, load_score_model, load_tokenizer, new_policy, new_reward_model
from marlhf_lite.records import RunFolder, write_json
from marlhf_lite.rewards import FunctionReward, ModelReward
from marlhf_lite.roles import PolicyRole, ScoreRole, build_roles
from marlhf_lite.rollouts import Sampling
from marlhf_lite.rules import make_rule
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


def open_workspace(options: SimpleNamespace) -> Workspace:
    """Check everything that can be checked without a model, then load tokenizer and base."""
    task = load_task(
        options.data.dataset,
        size=options.data.size,
        seed=options.data.split_seed,
        bad_rows=options.data.bad_rows,
    )
    tokenizer = load_tokenizer(options.model.model)
    task, dropped = _drop_long(task, tokenizer, options.data.max_prompt_length)
    run = RunFolder.create(options.run.output_dir, flat(options), overwrite=options.run.overwrite)
    write_json(run.path / "data.json", task.counts | {"long_prompts": dropped})
    print(f"{task.name}: " + ", ".join(f"{part} {len(rows)}" for part, rows in task.splits.items()), end="")
    print(f"; dropped: {dropped} long prompts" + "".join(f", {v} {k}" for k, v in _dropped(task).items()))
    return Workspace(options, run, task, tokenizer, load_base(options.model))


def _drop_long(task: Task, tokenizer, limit: int) -> tuple[Task, int]:
    kept, dropped = {}, 0
    for part, rows in task.splits.items():
        kept[part], gone = drop_long_prompts(rows, tokenizer, limit)
        dropped += gone
    return replace(task, splits=datasets.DatasetDict(kept)), dropped


def _dropped(task: Task) -> dict[str, int]:
    """Why rows were dropped while reading, without the counts of what was kept."""
    return {k: v for k, v in task.counts.items() if v and k not in ("read", "kept", *task.splits)}


def adapter(option: str, folder: str, stage: str) -> Path:
    """The adapter folder that `--sft` or `--rm` means: it, or the stage's folder inside a run."""
    if not folder:
        raise InputError(f"--{option}: not given: make one with `marlhf {stage}` and give its folder")
    for place in (Path(folder), Path(folder) / stage):
        if (place / "adapter_config.json").is_file():
            return place
    raise InputError(f"--{option} {folder}: no adapter there: give a folder that `marlhf {stage}` wrote")


def sft_stage(work: Workspace) -> Path:
    """Fine-tune a fresh adapter; its folder."""
    seed, out = work.options.run.seed, work.path / "sft"
    model = new_policy(work.base, work.options.model)
    log = train_sft(model, work.tokenizer, work.task.splits["sft"], work.options.sft, work.options.data, out, seed)
    write_json(out / "log.json", log)
    return out


def rm_stage(work: Workspace, sft: Path) -> Path:
    """Train the reward model from the SFT adapter; its folder. Prints and stores accuracy on held-out pairs."""
    seed, out = work.options.run.seed, work.path / "rm"
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
    if kind == "rm":
        return ModelReward(ScoreRole(load_score_model(work.base, rm)), work.options.ppo.micro_batch_size)
    if kind == "gold":
        if work.task.gold is None:
            raise InputError(f"--reward gold: {work.task.name} has no known truth: only embedded tasks do")
        return FunctionReward(work.task.gold, "gold")
    return FunctionReward(import_function(kind), kind)


def import_function(name: str):
    """`package.module:function` as the function itself. Raises `InputError` where there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--reward {name}: {error}: give rm, gold, or package.module:function") from None


def evaluate_stage(work: Workspace, policies: dict[str, Path], sft: Path, rm: Path | None) -> list[dict]:
    """Answers of SFT and of each policy to the held-out prompts, scored; also written to answers.jsonl."""
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
