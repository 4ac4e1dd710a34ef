"""Commands that train. Heavy imports wait until a command runs, so that --help answers at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from marlhf_lite.cli.command import SHARED, Command
from marlhf_lite.utils.errors import InputError

STAGES = ("inputs", "reward", "trainer", "sft", "rm", "macro", "ppo", "checkpoint", "logging", "eval")


def check_flags(options: SimpleNamespace) -> None:
    """Raises `InputError` where a flag would do nothing."""
    if hasattr(options, "checkpoint") and options.checkpoint.from_checkpoint and not options.run.resume:
        number, hint = options.checkpoint.from_checkpoint, "add --resume with the run's folder, or leave it out"
        raise InputError(f"--from_checkpoint {number}: only a run that goes on has one: {hint}")


def _sft(options: SimpleNamespace) -> None:
    from marlhf_lite.experiments import pipeline, workspace

    workspace.say(f"adapter: {pipeline.sft_stage(workspace.open_context(options))}")


def _rm(options: SimpleNamespace) -> None:
    from marlhf_lite.experiments import pipeline, workspace
    from marlhf_lite.models.adapters import adapter

    sft = adapter("sft", options.sft_input.sft)
    workspace.say(f"adapter: {pipeline.rm_stage(workspace.open_context(options, [sft]), sft)}")


def _ppo(options: SimpleNamespace) -> None:
    from marlhf_lite.experiments import pipeline, workspace
    from marlhf_lite.models.adapters import adapter
    from marlhf_lite.parsing.registry import make_rule

    make_rule(options.macro)  # a bad rule is named before anything loads
    sft = adapter("sft", options.inputs.sft)
    wants_rm = options.reward.reward == "rm" or options.inputs.rm
    rm = adapter("rm", options.inputs.rm) if wants_rm else None
    work = workspace.open_context(options, [sft, *filter(None, [rm])])
    workspace.say(f"adapter: {pipeline.ppo_stage(work, sft, rm, options.macro, 'ppo')}")


def _dpo(options: SimpleNamespace) -> None:
    from marlhf_lite.experiments import pipeline, workspace
    from marlhf_lite.experiments.baselines import dpo_stage
    from marlhf_lite.models.adapters import adapter

    sft = adapter("sft", options.inputs.sft)
    rm = adapter("rm", options.inputs.rm) if options.inputs.rm else None  # scores tests alone
    work = workspace.open_context(options, [sft, *filter(None, [rm])])
    reward = pipeline.make_reward(work, rm) if rm else None
    workspace.say(f"adapter: {dpo_stage(work, sft, reward)}")


def _rloo(options: SimpleNamespace) -> None:
    _group(options, "rloo")


def _grpo(options: SimpleNamespace) -> None:
    _group(options, "grpo")


def _group(options: SimpleNamespace, method: str) -> None:
    from marlhf_lite.experiments import baselines, pipeline, workspace
    from marlhf_lite.models.adapters import adapter
    from marlhf_lite.training.rloo_grpo import check_groups

    check_groups(getattr(options, method))  # said before anything loads
    sft = adapter("sft", options.inputs.sft)
    rm = adapter("rm", options.inputs.rm) if options.reward.reward == "rm" else None
    work = workspace.open_context(options, [sft, *filter(None, [rm])])
    workspace.say(f"adapter: {getattr(baselines, f'{method}_stage')(work, sft, pipeline.make_reward(work, rm))}")


def _chain(options: SimpleNamespace, methods: dict) -> None:
    """All stages but those that `--sft` and `--rm` hand in; `methods` are names and macro options of the PPO runs."""
    from marlhf_lite.experiments import pipeline, workspace
    from marlhf_lite.models.adapters import adapter
    from marlhf_lite.parsing.registry import make_rule
    from marlhf_lite.utils.run_folder import RunFolder

    for how in methods.values():
        make_rule(how)
    given = {"sft": options.inputs.sft, "rm": options.inputs.rm}
    made = {name: adapter(name, folder) for name, folder in given.items() if folder}
    work = workspace.open_context(options, list(made.values()))
    sft = made.get("sft") or pipeline.sft_stage(work)
    rm = made.get("rm") or pipeline.rm_stage(work, sft)
    policies = {name: pipeline.ppo_stage(work, sft, rm, how, name) for name, how in methods.items()}
    if work.is_main:
        rows = pipeline.evaluate_stage(work, policies, sft, rm)
        finish(work, rows, {name: RunFolder.open(path.parent).metrics() for name, path in policies.items()})


def finish(work, rows, histories: dict) -> Path:
    """Write and print the table of the answers `rows` (a DataFrame); the folder of the figures."""
    from marlhf_lite.evaluation.scores import name_temperatures
    from marlhf_lite.experiments.reports import run_report

    figures = work.path / "figures"
    text = run_report(work.path, rows, histories, figures, work.run.config)
    count, asked = len(work.test_prompts), work.options.eval.eval_prompts
    prompts = f"{count} held-out prompts" + f" ({asked} asked for: the task has no more)" * (count < asked)
    base = name_temperatures(rows)["method"].iloc[0]  # SFT, with its temperature where there are several
    always = ", at every temperature" * (rows["temperature"].nunique() > 1)
    print(f"\n{prompts}; behind scores: gain over {base}{always} [95 % interval]\n\n{text}\n")
    print(f"figures: {figures}")
    return figures


def _run(options: SimpleNamespace) -> None:
    _chain(options, {"MA-PPO": options.macro})


def _demo(options: SimpleNamespace) -> None:
    _chain(options, {"PPO": replace(options.macro, termination="fixed", n="1"), "MA-PPO": options.macro})


TRAINING = {
    "demo": Command(
        "SFT, reward model, PPO and MA-PPO from one start, compared: minutes on two cores.",
        (*SHARED, *STAGES),
        _demo,
        "marlhf demo --updates 60 --seed 1",
    ),
    "run": Command(
        "All stages on your data: SFT, reward model, MA-PPO, evaluation.",
        (*SHARED, *STAGES),
        _run,
        "marlhf run --dataset pairs.jsonl --model google/gemma-2b --dtype bfloat16",
    ),
    "sft": Command(
        "Supervised fine-tuning of an adapter on chosen responses.",
        (*SHARED, "trainer", "sft"),
        _sft,
        "marlhf sft --output_dir runs/a",
    ),
    "rm": Command(
        "Reward model from preference pairs.",
        (*SHARED, "sft_input", "trainer", "rm"),
        _rm,
        "marlhf rm --sft runs/a --output_dir runs/b",
    ),
    "ppo": Command(
        "PPO over macro actions; --n 1 is token-level PPO.",
        (*SHARED, "inputs", "reward", "macro", "ppo", "checkpoint", "logging"),
        _ppo,
        "marlhf ppo --sft runs/a --rm runs/b --n 5 --output_dir runs/c",
    ),
    "dpo": Command(
        "DPO on the reward model's pairs.",
        (*SHARED, "inputs", "trainer", "dpo", "sampling", "checkpoint", "logging"),
        _dpo,
        "marlhf dpo --sft runs/a --output_dir runs/d",
    ),
    "rloo": Command(
        "RLOO: groups of responses in place of a critic.",
        (*SHARED, "inputs", "reward", "rloo", "checkpoint", "logging"),
        _rloo,
        "marlhf rloo --sft runs/a --rm runs/b --num_generations 4 --output_dir runs/e",
    ),
    "grpo": Command(
        "GRPO: RLOO's groups, scaled by their deviation.",
        (*SHARED, "inputs", "reward", "grpo", "checkpoint", "logging"),
        _grpo,
        "marlhf grpo --sft runs/a --rm runs/b --output_dir runs/f",
    ),
}
