"""`marlhf <command> [options]`; `accelerate launch -m marlhf_lite <command> [options]` runs the same.

Heavy imports wait until the options and all named files are checked, so that `--help` and a wrong path answer at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from marlhf_lite import __version__
from marlhf_lite.utils.errors import InputError

if TYPE_CHECKING:
    from marlhf_lite.experiments.pipeline import RunContext

PRESETS = "Named settings, such as gemma-2b/tldr: a list, or with names their text."
USAGE = """usage: marlhf <command> [options]

RLHF with macro actions: PPO in which runs of tokens are the actions.

{commands}

marlhf <command> --help lists a command's options, marlhf --version prints the version.
Options may also stand in a YAML file: marlhf run --config my.yaml
"""


@dataclass(frozen=True)
class Command:
    """A command: its help line, the groups of options it takes (see `config.options`), its function, an example.

    `action` gets the options and the folders of the models that they name, by option: sft and rm.
    """

    help: str
    groups: tuple[str, ...]
    action: Callable[[SimpleNamespace, dict[str, Path]], None]
    example: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("-h", "--help"):
            about = {name: command.help for name, command in COMMANDS.items()} | {"presets": PRESETS}
            print(USAGE.format(commands="\n".join(f"  {name:<10} {text}" for name, text in about.items())))
        elif argv[0] == "--version":
            print(f"marlhf-lite {__version__}")
        elif argv[0] == "presets":
            print_presets(argv[1:])
        elif argv[0] in COMMANDS:
            return run_command(argv[0], argv[1:])
        else:
            raise InputError(f"unknown command {argv[0]}: choose from {', '.join([*COMMANDS, 'presets'])}")
    except InputError as error:
        print(f"marlhf: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmarlhf: interrupted", file=sys.stderr)
        return 130
    return 0


def run_command(name: str, words: Sequence[str]) -> int:
    """Read the options, check every named file, then import what is heavy and do the work; the exit code."""
    from marlhf_lite.config.parser import parse
    from marlhf_lite.utils.threads import choose_threads

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_NUM_THREADS", str(choose_threads()))  # before torch is imported, which reads it once
    command = COMMANDS[name]
    options = parse(name, words, command.groups, f"{command.help}\n\nexample: {command.example}")
    if hasattr(options, "run") and not options.run.output_dir:
        options.run.output_dir = str(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    folders = check_inputs(name, options)
    try:
        command.action(options, folders)
    except KeyboardInterrupt:
        print(f"\nmarlhf: interrupted{_how_to_go_on(name, options)}", file=sys.stderr)
        return 130
    return 0


def _how_to_go_on(name: str, options: SimpleNamespace) -> str:
    from marlhf_lite.utils.run_folder import is_run

    if not hasattr(options, "run") or not is_run(Path(options.run.output_dir)):
        return ""
    folder = options.run.output_dir
    again = f": marlhf {name} --resume {folder} goes on" if hasattr(options, "checkpoint") else ""
    return f"; what was recorded so far in {folder} is whole{again}"


def check_inputs(name: str, options: SimpleNamespace) -> dict[str, Path]:
    """Check the files and folders that options name, without heavy imports.

    Returns the folders of the models that --sft and --rm name. Raises `InputError` where one is needed and missing.
    """
    from marlhf_lite.config.parser import flatten
    from marlhf_lite.models.adapters import resolve_adapter_dir

    values, folders = flatten(options), {}
    if values.get("from_checkpoint") and not values["resume"]:
        number, hint = values["from_checkpoint"], "add --resume with the run's folder, or leave it out"
        raise InputError(f"--from_checkpoint {number}: only a run that goes on has one: {hint}")
    trains_all = name in ("run", "demo")  # which make the models that are not given
    needs_rm = values.get("reward") == "rm"
    if values.get("sft") or ("sft" in values and not trains_all):
        folders["sft"] = resolve_adapter_dir("sft", values["sft"])
    if values.get("rm") or (needs_rm and not trains_all):
        folders["rm"] = resolve_adapter_dir("rm", values["rm"])
    _check_dataset(values.get("dataset", ""))
    return folders


def _check_dataset(dataset: str) -> None:
    looks_local = dataset.startswith(("/", ".", "~")) or dataset.endswith(
        (".jsonl", ".json", ".csv", ".parquet", ".gz")
    )
    if looks_local and not os.path.exists(os.path.expanduser(dataset)):
        raise InputError(f"--dataset {dataset}: no such file: check the path (relative paths start at {Path.cwd()})")


def print_presets(names: Sequence[str]) -> None:
    """Print the presets of these names, or the list of all."""
    from marlhf_lite.config.parser import list_presets, preset_text

    if names and names[0] in ("-h", "--help"):
        names = []
        print(f"{PRESETS}\n\nexample: marlhf presets gemma-2b/tldr\n")
    print("\n".join(preset_text(name).rstrip("\n") for name in names) if names else list_presets())


# Training


def _open(options: SimpleNamespace, inputs: Iterable[Path] = (), exist_ok: bool = False) -> RunContext:
    """Open the run and say where it is: a notebook, which has its own place for it, does not."""
    from marlhf_lite.experiments import pipeline

    context = pipeline.open_context(options, inputs, exist_ok)
    pipeline.print_main(f"run folder: {context.path}")
    return context


def _sft(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.experiments import pipeline

    pipeline.print_main(f"adapter: {pipeline.sft_stage(_open(options))}")


def _rm(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.experiments import pipeline

    context = _open(options, folders.values())
    pipeline.print_main(f"adapter: {pipeline.rm_stage(context, folders['sft'])}")


def _ppo(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.experiments import pipeline
    from marlhf_lite.parsing.registry import make_rule

    make_rule(options.macro)  # a bad rule is reported before anything loads
    context = _open(options, folders.values())
    policy = pipeline.ppo_stage(context, folders["sft"], folders.get("rm"), options.macro, "ppo")
    pipeline.print_main(f"policy: {policy}")


def _dpo(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.experiments import pipeline

    context = _open(options, folders.values())
    reward = pipeline.make_reward(context, folders["rm"]) if "rm" in folders else None  # scores held-out tests only
    pipeline.print_main(f"policy: {pipeline.dpo_stage(context, folders['sft'], reward)}")


def _groups(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.experiments import pipeline
    from marlhf_lite.training.rloo_grpo import check_groups

    check_groups(options.rloo if hasattr(options, "rloo") else options.grpo)
    stage = pipeline.rloo_stage if hasattr(options, "rloo") else pipeline.grpo_stage
    context = _open(options, folders.values())
    policy = stage(context, folders["sft"], pipeline.make_reward(context, folders.get("rm")))
    pipeline.print_main(f"policy: {policy}")


def _run(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    token_level = options.macro.termination == "fixed" and options.macro.n == "1"
    _train_all(options, folders, {"PPO" if token_level else "MA-PPO": options.macro})


def _demo(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    _train_all(options, folders, {"PPO": replace(options.macro, termination="fixed", n="1"), "MA-PPO": options.macro})


def _train_all(options: SimpleNamespace, folders: dict[str, Path], methods: dict) -> None:
    """Run all stages but those that --sft and --rm hand in; `methods` are names and macro options of the PPO runs."""
    from marlhf_lite.experiments import pipeline
    from marlhf_lite.parsing.registry import make_rule

    for macro in methods.values():
        make_rule(macro)
    context = _open(options, folders.values())
    sft = folders.get("sft") or pipeline.sft_stage(context)
    rm = folders.get("rm")
    if rm is None and (len(context.task.splits["rm"]) or options.reward.reward == "rm"):
        rm = pipeline.rm_stage(context, sft)
    policies = {name: pipeline.ppo_stage(context, sft, rm, macro, name) for name, macro in methods.items()}
    pipeline.evaluate(context, policies, sft, rm, examples=3)


# Measuring and comparing


def _evaluate(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.config.parser import named_folders
    from marlhf_lite.models.adapters import resolve_adapter_dir

    policies: dict[str, Path] = {}
    for name, folder in named_folders(options.policies.policies):
        place = resolve_adapter_dir("policies", folder)
        name = name or place.parent.name
        if name in policies or name == "SFT":
            raise InputError(f"--policies: a second one is called {name}: give each a name, as name=folder")
        policies[name] = place
    from marlhf_lite.experiments import pipeline

    context = _open(options, [*folders.values(), *policies.values()], exist_ok=True)
    pipeline.evaluate(context, policies, folders["sft"], folders.get("rm"))


def _compare(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.evaluation.compare import compare, comparison_table

    paths = [word.strip() for word in options.compare.answers.split(",") if word.strip()]
    if not paths:
        raise InputError("--answers: not given: name runs of `marlhf evaluate`, comma-separated")
    rows = compare(paths, options.compare.baseline)
    print(comparison_table(rows))
    print(f"\nbehind scores: gain over {rows[0]['baseline']}, paired by prompt [95 % interval]")


def _judge(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.evaluation.judge_answers import run_judge

    if os.environ.get("RANK", "0") == "0":  # an endpoint is paid once, not once a process
        run_judge(options)


def _study(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.lab.studies.study import run_study

    run_study(options.study)


def _memory(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.models.memory import estimate_memory, memory_table

    sizes = SimpleNamespace(model=options.model, data=options.memory, ppo=options.memory)
    print(memory_table(estimate_memory(sizes), options.memory.gpu))


# Using a policy


def _generate(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.models.adapters import resolve_adapter_dir

    policy = resolve_adapter_dir("policy", options.generate.policy)
    prompt = options.generate.prompt or sys.stdin.read()
    from marlhf_lite.experiments.export import answer_prompt

    print(answer_prompt(options, policy, prompt))


def _export(options: SimpleNamespace, folders: dict[str, Path]) -> None:
    from marlhf_lite.models.adapters import resolve_adapter_dir
    from marlhf_lite.utils.run_folder import check_output_dir

    if not options.export.output_dir:
        raise InputError("--output_dir: not given: name a new folder for the model")
    policy, folder = resolve_adapter_dir("policy", options.export.policy), Path(options.export.output_dir)
    check_output_dir(folder)
    from marlhf_lite.experiments.export import export_policy

    export_policy(options, policy, folder)


SHARED = ("run", "model", "data")
RECORDS = ("checkpoint", "logging")
ALL_STAGES = ("macro", "ppo", "reward", "programs", "inputs", "sft", "rm", "trainer", "eval", *RECORDS, *SHARED)

COMMANDS = {
    "demo": Command(
        "SFT, reward model, PPO and MA-PPO from one start, compared: minutes on two cores.",
        ALL_STAGES,
        _demo,
        "marlhf demo --updates 60 --seed 1",
    ),
    "run": Command(
        "All stages on your data: SFT, reward model, MA-PPO, evaluation.",
        ALL_STAGES,
        _run,
        "marlhf run --dataset pairs.jsonl --model google/gemma-2b --dtype bfloat16",
    ),
    "sft": Command(
        "Supervised fine-tuning of an adapter on chosen responses.",
        ("sft", "trainer", *SHARED),
        _sft,
        "marlhf sft --output_dir runs/a",
    ),
    "rm": Command(
        "Reward model from preference pairs.",
        ("rm", "sft_input", "trainer", *SHARED),
        _rm,
        "marlhf rm --sft runs/a --output_dir runs/b",
    ),
    "ppo": Command(
        "PPO over macro actions; --n 1 is token-level PPO.",
        ("inputs", "macro", "ppo", "reward", "programs", *RECORDS, *SHARED),
        _ppo,
        "marlhf ppo --sft runs/a --rm runs/b --n 5 --output_dir runs/c",
    ),
    "dpo": Command(
        "DPO on the reward model's pairs.",
        ("dpo", "inputs", "programs", "trainer", "sampling", *RECORDS, *SHARED),
        _dpo,
        "marlhf dpo --sft runs/a --output_dir runs/d",
    ),
    "rloo": Command(
        "RLOO: groups of responses in place of a critic.",
        ("rloo", "inputs", "reward", "programs", *RECORDS, *SHARED),
        _groups,
        "marlhf rloo --sft runs/a --rm runs/b --num_generations 4 --output_dir runs/e",
    ),
    "grpo": Command(
        "GRPO: RLOO's groups, scaled by their deviation.",
        ("grpo", "inputs", "reward", "programs", *RECORDS, *SHARED),
        _groups,
        "marlhf grpo --sft runs/a --rm runs/b --output_dir runs/f",
    ),
    "evaluate": Command(
        "Answers, scores and intervals on held-out prompts.",
        ("policies", "inputs", "programs", "eval", "sampling", *SHARED),
        _evaluate,
        "marlhf evaluate --sft runs/a --rm runs/b --policies MA-PPO=runs/c",
    ),
    "compare": Command(
        "Stored answers of several runs side by side, paired by prompt.",
        ("compare",),
        _compare,
        "marlhf compare --answers runs/a,runs/b --baseline SFT",
    ),
    "judge": Command(
        "Win rates by a judge: gold, rm, an endpoint, or you.",
        ("judge", "endpoint", "rm_input", "model", "length", "seed"),
        _judge,
        "marlhf judge --judge_answers runs/e --judge_methods MA-PPO,PPO --judge human",
    ),
    "generate": Command(
        "A policy's answer to a prompt.",
        ("generate", "sampling", "length", "seed", "model"),
        _generate,
        'marlhf generate --policy runs/c --prompt "SUBREDDIT: r/tea ... TL;DR:"',
    ),
    "export": Command(
        "A policy as a model of its own, its adapter merged: a folder for transformers, or the hub.",
        ("export", "model"),
        _export,
        "marlhf export --policy runs/c --output_dir my-model --push_to_hub owner/name",
    ),
    "study": Command(
        "A grid of methods and seeds: what is not done runs, then the table and figures.",
        ("study",),
        _study,
        "marlhf study --name main --workers 2",
    ),
    "memory": Command(
        "How much memory PPO needs, from the model's config, before anything is loaded.",
        ("memory", "model"),
        _memory,
        "marlhf memory --preset lora-t4-16gb --gpu 16",
    ),
}
