"""A study: methods times seeds, each run in a process of its own, each leaving one small result file.

The protocol is a YAML file, fixed before the first run. All methods of a seed start from the same SFT and reward
adapters, which are made first and shared between studies. What is done is not done again, so a study that was
interrupted goes on when it is started again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace

from marlhf_lite.config.options import GROUPS, StudyConfig
from marlhf_lite.config.parser import parse
from marlhf_lite.experiments.results import read_result
from marlhf_lite.experiments.study_pool import Job, execute, log_end
from marlhf_lite.experiments.study_protocol import COMMANDS, OWN, START, Study, load_study, run_name
from marlhf_lite.parsing.registry import make_rule
from marlhf_lite.utils.errors import InputError

FREE = OWN - {"seed"} | {f.name for group in ("checkpoint", "logging") for f in fields(GROUPS[group])}
# ^ no result depends on these
# Options by the names that results stored before a renaming hold.
RENAMED = {
    "attn_implementation": "attention",
    "cliprange": "clip",
    "cliprange_value": "value_clip",
    "dataset_streaming": "streaming",
    "loss_type": "grpo_loss",
    "lora_target_modules": "lora_targets",
    "lr_scheduler_type": "sft_lr_scheduler",
    "num_generations": "group_size",
    "num_mini_batches": "minibatches",
    "num_ppo_epochs": "ppo_epochs",
    "per_device_train_batch_size": "sft_micro_batch_size",
    "warmup_ratio": "sft_warmup_ratio",
}

STARTS = Path("runs/starts")  # SFT and reward adapters, which all studies share


@dataclass(frozen=True)
class Run:
    """One method with one seed. `words` are its command line, `options` all that its result depends on."""

    method: str
    command: str
    seed: int
    words: tuple[str, ...]
    options: dict
    start: str  # names the SFT and reward adapters

    @property
    def name(self) -> str:
        return run_name(self.method, self.seed)


def plan(study: Study, seeds: Sequence[int] = (), only: Sequence[str] = ()) -> list[Run]:
    """All runs of a study, seed by seed. Raises `InputError` for a faulty option, and where there is nothing to run."""
    unknown = [name for name in only if name not in study.methods]
    if unknown:
        raise InputError(f"--only {unknown[0]}: no such method: choose from {', '.join(study.methods)}")
    seeds = list(seeds or study.seeds)
    twice = [seed for i, seed in enumerate(seeds) if seed in seeds[:i]]
    if twice:
        raise InputError(f"study {study.name}: seed {twice[0]} twice: give each once")
    runs = [_run(study, name, seed) for seed in seeds for name in study.methods if not only or name in only]
    if not runs:
        raise InputError(f"study {study.name}: no seeds: write `seeds: [0, 1, 2]`, or give --seeds")
    return runs


def _run(study: Study, name: str, seed: int) -> Run:
    method = study.methods[name]
    command, own = method["command"], method.get("options") or {}
    known = {f.name for group in COMMANDS[command] for f in fields(GROUPS[group])}
    everywhere = {f.name for kind in GROUPS.values() for f in fields(kind)}
    taken = {key: v for key, v in study.shared.items() if key in known or key not in everywhere}
    words = tuple(f"--{key}={value}" for key, value in (taken | own | {"seed": seed}).items())
    try:
        options = run_options(command, words)
    except InputError as error:
        raise InputError(f"study {study.name}, method {name}: {error}") from None
    depends = {k: v for group in vars(options).values() for k, v in asdict(group).items() if k not in FREE}
    depends |= {"command": command, "first_prompt": study.first_prompt, "samples": method.get("samples", 1)}
    start = {k: depends[k] for k in ["seed", *(f.name for group in START for f in fields(GROUPS[group]))]}
    return Run(name, command, seed, words, depends, f"seed{seed}-{_hash(start)}")


def run_options(command: str, words: Sequence[str]) -> SimpleNamespace:
    """The options of a method, by group. Raises `InputError` before anything loads."""
    options = parse(command, words, COMMANDS[command], command)
    if hasattr(options, "macro"):
        make_rule(options.macro)
    if command in ("rloo", "grpo"):
        from marlhf_lite.training.rloo_grpo import check_groups  # trl takes seconds

        check_groups(getattr(options, command))
    return options


def _hash(values: dict) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def difference(run: Run, result: dict) -> str:
    """The first option that a stored result had otherwise; empty if there is none."""
    for name, value in json.loads(json.dumps(run.options)).items():
        stored = result["options"]
        # An option that is newer than the result had today's default.
        then = stored.get(name, stored.get(RENAMED.get(name), value))
        if then != value:
            return f"{name} was {then}, now {value}"
    return ""


def run_study(options: StudyConfig) -> None:
    """`marlhf study`: run what is not done, then write the table and figures. Raises `InputError` if runs failed."""
    study = load_study(options.name)
    seeds = _numbers(options.seeds)
    runs = plan(study, seeds, [name.strip() for name in options.only.split(",") if name.strip()])
    results = Path(options.results or f"data/results/{study.name}")
    stored = {run.name: read_result(results / f"{run.name}.json") for run in runs}
    changed = {run.name: difference(run, stored[run.name]) for run in runs if stored[run.name]}
    changed = {name: what for name, what in changed.items() if what}
    if options.dry_run:
        print(_listing(runs, stored, changed, STARTS))
        return
    if changed:
        name, what = next(iter(changed.items()))
        raise InputError(
            f"{results / name}.json: {what}: delete it to run it again, or give another folder with --results"
        )
    todo = [run for run in runs if stored[run.name] is None]
    print(f"study {study.name}: {len(runs)} runs, {len(runs) - len(todo)} done already")
    work = Path(f"runs/study-{study.name}")
    failed, lost = execute(_jobs(study, todo, STARTS, work, results), options.workers)
    for job in failed:
        print(f"\n{job.name} failed; {job.log} ends:\n{log_end(job.log)}")
    whole = {run.name: read_result(results / f"{run.name}.json") for run in plan(study, seeds)}
    if all(whole.values()):
        from marlhf_lite.experiments.study_report import study_report  # pictures take seconds

        figures = Path(f"figures/{study.name}")
        print(f"\n{study_report(study, list(whole.values()), results, figures)}\n\nfigures: {figures}")
    else:
        missing = [name for name, result in whole.items() if result is None]
        print(f"results: {results}; the table needs {len(missing)} more, such as {missing[0]}")
    if failed:
        more = f" and {len(lost)} could not begin" if lost else ""
        raise InputError(f"{len(failed)} failed{more}, see above: the rest is kept; start the study again to go on")


def _jobs(study: Study, runs: list[Run], starts: Path, work: Path, results: Path) -> list[Job]:
    """The runs, and before them the starts that are not there yet."""
    jobs: list[Job] = []
    first: dict[str, Job | None] = {}
    for run in runs:
        folder, log = starts / run.start, starts / f"{run.start}.log"
        spec = {"command": run.command, "words": run.words, "start": str(folder)}
        if run.start not in first:
            is_made = (folder / "rm" / "accuracy.json").is_file()
            first[run.start] = None if is_made else Job(f"start-{run.start}", spec, log)
    for run in runs:
        folder = work / f"{run.name}-{_hash(run.options)}"  # with other options, nothing there is taken up
        about = {"study": study.name, "method": run.method, "seed": run.seed, "options": run.options}
        spec = {"command": run.command, "words": run.words, "start": str(starts / run.start), "folder": str(folder)}
        spec |= {"result": str(results / f"{run.name}.json"), "about": about}
        jobs.append(Job(run.name, spec, work / f"{run.name}.log", first[run.start]))
    return [job for job in first.values() if job] + jobs


def _listing(runs: list[Run], stored: dict, changed: dict, starts: Path) -> str:
    lines = []
    for run in runs:
        state = "to do" if stored[run.name] is None else "done"
        lines.append(f"{run.name:<36} {run.command:<10} {changed.get(run.name, state)}")
    open_starts = {run.start for run in runs if not (starts / run.start / "rm" / "accuracy.json").is_file()}
    done = sum(line.endswith(" done") for line in lines)
    return "\n".join([*lines, f"{len(runs)} runs, {done} done; SFT and reward model to make first: {len(open_starts)}"])


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(word) for word in seeds.split(",")] if seeds.strip() else []
    except ValueError:
        raise InputError(f"--seeds {seeds}: give whole numbers, comma-separated") from None
