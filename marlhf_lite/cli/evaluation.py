"""Commands that measure and compare. Heavy imports wait until a command runs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from marlhf_lite.cli.command import SHARED, Command
from marlhf_lite.cli.training import finish
from marlhf_lite.utils.errors import InputError


def _evaluate(options: SimpleNamespace) -> None:
    from marlhf_lite.experiments import pipeline, workspace
    from marlhf_lite.experiments.evaluation_report import details
    from marlhf_lite.models.adapters import adapter
    from marlhf_lite.utils.run_folder import check_writable

    sft = adapter("sft", options.inputs.sft)
    rm = adapter("rm", options.inputs.rm) if options.inputs.rm else None
    if options.eval.responses:
        check_writable("--responses", Path(options.eval.responses))
    policies = {}
    for item in filter(None, options.policies.policies.split(",")):
        name, _, folder = item.strip().rpartition("=")
        place = adapter("policies", folder)
        name = name or place.parent.name
        if name in policies or name == "SFT":
            raise InputError(f"--policies: a second one is called {name}: give each a name, as name=folder")
        policies[name] = place
    work = workspace.open_context(options, [sft, *filter(None, [rm]), *policies.values()], exist_ok=True)
    if work.is_main:
        rows = pipeline.evaluate_stage(work, policies, sft, rm)
        figures = finish(work, rows, {})
        print(f"\n{details(work.path, rows, options.eval.sizes, figures)}")


def _compare(options: SimpleNamespace) -> None:
    from marlhf_lite.evaluation.compare import compare, comparison_table

    paths = [word.strip() for word in options.compare.answers.split(",") if word.strip()]
    if len(paths) < 1:
        raise InputError("--answers: not given: name runs of `marlhf evaluate`, comma-separated")
    found = compare(paths, options.compare.baseline)
    print(comparison_table(found))
    print(f"\nbehind scores: gain over {found[0]['baseline']}, paired by prompt [95 % interval]")


def _judge(options: SimpleNamespace) -> None:
    from marlhf_lite.evaluation.judges import run_judge

    if os.environ.get("RANK", "0") == "0":  # nothing is paid for once a process
        run_judge(options)


def _study(options: SimpleNamespace) -> None:
    from marlhf_lite.experiments.study import run_study

    run_study(options.study)


def _memory(options: SimpleNamespace) -> None:
    from marlhf_lite.models.memory import estimate_memory, memory_table

    memory = estimate_memory(options)
    print(memory_table(memory, options.memory.gpu))


EVALUATION = {
    "evaluate": Command(
        "Answers, scores and intervals on held-out prompts.",
        (*SHARED, "inputs", "policies", "sampling", "eval"),
        _evaluate,
        "marlhf evaluate --sft runs/a --rm runs/b --policies MA-PPO=runs/c/ppo/policy",
    ),
    "compare": Command(
        "Stored answers of several runs side by side, paired by prompt.",
        ("compare",),
        _compare,
        "marlhf compare --answers runs/a,runs/b --baseline SFT",
    ),
    "judge": Command(
        "Win rates by a judge: gold, rm, an endpoint, a local model, or you.",
        ("judge", "endpoint", "rm_input", "model", "length", "seed"),
        _judge,
        "marlhf judge --judge_answers runs/e --judge_methods MA-PPO,PPO --judge human",
    ),
    "study": Command(
        "A grid of methods and seeds: what is not done runs, then the table and figures.",
        ("study",),
        _study,
        "marlhf study --name main --workers 2",
    ),
    "memory": Command(
        "How much memory PPO needs, from the model's config, before anything is loaded.",
        ("model", "data", "ppo", "memory"),
        _memory,
        "marlhf memory --preset lora-t4-16gb --gpu 16",
    ),
}
