"""A study: methods times seeds. Each run is a few `marlhf` command lines and leaves one small result file.

The protocol is a YAML file, written before the first run; see protocols/main.yaml. All methods of a seed start from the
same SFT model and reward model, which are trained first. Runs that have a result are not repeated, and a study that
was interrupted resumes when it is started again. When its last planned run is stored, all results become one file.
"""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path

from tqdm.auto import tqdm

from marlhf_lab.studies.former import with_todays_names
from marlhf_lab.studies.results import (
    JOINED,
    RESULT,
    collect_result,
    join_results,
    read_results,
    rounded,
    run_name,
    write_result,
)
from marlhf_lite.config.commands import COMMANDS, OPTIONS, option_names
from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.options import REWARDS, CheckpointConfig, LoggingConfig, RunConfig
from marlhf_lite.config.parser import merge, parse, read_presets
from marlhf_lite.experiments.inputs import check_groups
from marlhf_lite.experiments.named_rules import make_rule
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.paper_datasets import form_of
from marlhf_lite.tasks.shapes import columns_of
from marlhf_lite.tasks.sources import find_rows
from marlhf_lite.utils.errors import InputError, did_you_mean, disk_fault, one_line
from marlhf_lite.utils.run_folder import CONFIG, RunLock, check_writable, read_yaml
from marlhf_lite.utils.user_code import import_user_code

STUDIES = Path(str(files("marlhf_lab"))) / "studies" / "protocols"
MARLHF = [sys.executable, "-m", "marlhf_lite"]
# Command of a method -> the `marlhf` command that trains it. best_of_n takes the best of the SFT model's samples.
TRAINING = {
    "ppo": "ppo",
    "rloo": "rloo",
    "grpo": "grpo",
    "dpo": "dpo",
    "sft": None,
    "best_of_n": None,
}
# Options that the study gives to each command itself.
SET_BY_STUDY = {f.name for f in fields(RunConfig)} - {"seed"}
SET_BY_STUDY |= {"sft", "rm", "policies", "eval_samples", "eval_temperatures"}
# Options that no result depends on. Rows per pass are one of them: the gradient is that of the whole batch.
RESULT_NEUTRAL = SET_BY_STUDY | {
    f.name for kind in (CheckpointConfig, LoggingConfig) for f in fields(kind)
}
RESULT_NEUTRAL |= {"per_device_train_batch_size"}
# Of a model that is not embedded, if a protocol says nothing: protocols are older than the preset's own sampling.
PAPER_SAMPLING = {"temperature": 0.8, "top_k": 50}


# The protocol


@dataclass(frozen=True)
class Study:
    """A protocol."""

    name: str
    # name -> {command, preset, options, samples: answers to each held-out prompt, default 1}
    methods: dict[str, dict]
    seeds: list[int]
    # options of every method that has them; `preset` is one of them
    shared: dict = field(default_factory=dict)
    baseline: str = "SFT"  # gains are over this method
    # differences are from this method, and costs are counted up to its final RM score
    target_method: str = "PPO"
    first_prompt: int = 0  # number of the held-out prompt that the evaluation begins with
    # name -> methods; default: one figure with all
    figures: dict[str, list[str]] = field(default_factory=dict)
    # A gold score: the outcome is how soon training gets there (`studies.learning`), and nothing is evaluated.
    threshold: float | None = None
    window: int = 3  # updates in the mean that is compared with the threshold
    # First and last update: the outcome is the mean reward of these (`studies.mean_reward`); nothing is evaluated.
    mean_updates: list[int] = field(default_factory=list)
    # Name -> {ratio: [A, B] or [A, B, C, D], margin}: of updates to the threshold, A over B, over C over D; within a
    # factor of `margin` two methods are called equal. With `mean_updates` {difference: [A, B], subtracted_from}: A - B,
    # or this taken from the same difference in another study. The first is the primary outcome, others are exploration.
    contrasts: dict[str, dict] = field(default_factory=dict)
    # [A, B]: also report A's score minus B's at equal KL
    equal_kl: list[str] = field(default_factory=list)

    @property
    def of_curves(self) -> bool:
        """Whether the outcome is read from the training curves, so that nothing is evaluated after training."""
        return self.threshold is not None or bool(self.mean_updates)

    @property
    def reward_model(self) -> bool:
        """Whether each seed has a reward model: not if curves decide, or if tests or a function give the reward.

        A function needs no pairs, and only loading the data would tell whether they have any.
        """
        return not self.of_curves and self.shared.get("reward", "rm") in ("rm", "gold")


# Key of a protocol -> its type; `name` is the file's own.
KEYS = {
    "methods": dict,
    "seeds": list,
    "shared": dict,
    "baseline": str,
    "target_method": str,
    "first_prompt": int,
}
KEYS |= {
    "figures": dict,
    "threshold": float,
    "window": int,
    "mean_updates": list,
    "contrasts": dict,
    "equal_kl": list,
}


def protocol_file(name: str) -> Path:
    """The file of a study of the project, by its name, or a YAML file. Raises `InputError` if there is none."""
    known = sorted(path.stem for path in STUDIES.glob("*.yaml"))
    path = STUDIES / f"{name}.yaml" if name in known else Path(name).expanduser()
    if not path.is_file():
        raise InputError(
            f"--name {name}: no such study: choose from {', '.join(known)}, or give a YAML file"
        )
    return path


def load_study(name: str) -> Study:
    """Load a study of the project by its name, or a YAML file. Raises `InputError` for a fault in it."""
    path = protocol_file(name)
    values = read_yaml(path, str(path))
    values = {key: value for key, value in values.items() if value is not None}
    # no bool
    whole = [key for key, value in values.items() if KEYS.get(key) is float and type(value) is int]
    values |= {key: float(values[key]) for key in whole}
    for key, value in values.items():
        if key not in KEYS:
            raise InputError(
                f"{path}: unknown key {key}: {did_you_mean(str(key), KEYS)}choose from {', '.join(KEYS)}"
            )
        if not isinstance(value, KEYS[key]):
            raise InputError(
                f"{path}: {key} {value!r}: give a {KEYS[key].__name__}, as in protocols/main.yaml"
            )
    if "preset" in (shared := values.get("shared", {})):  # the other options win over it
        options = {key: value for key, value in shared.items() if key != "preset"}
        values["shared"] = merge(
            [read_presets(str(shared["preset"]), f"{path}: shared: preset"), options]
        )
    study = Study(path.stem, **{"methods": {}, "seeds": []} | values)
    _check(study, path)
    for key in ("baseline", "target_method"):
        if key in values and values[key] not in study.methods:
            raise InputError(
                f"{path}: {key}: no method is called {values[key]}: choose from {', '.join(study.methods)}"
            )
    return study


def _check(study: Study, path: Path) -> None:
    """Raise `InputError` for a faulty method, shared option or figure."""
    for name, method in study.methods.items():
        where = f"{path}: method {name}"
        keys = {"command": str, "preset": str, "options": dict, "samples": int}
        typed = isinstance(method, dict) and all(
            isinstance(method[key], keys.get(key, ())) for key in method
        )
        if not typed or method.get("command") not in TRAINING:
            what = f"give a command ({', '.join(TRAINING)}), and if needed preset, options (names and values), samples"
            raise InputError(f"{where}: {what}")
        if not isinstance(name, str):
            raise InputError(f"{where}: put its name in quotes")
        least, samples = 2 if method["command"] == "best_of_n" else 1, method.get("samples", 1)
        if samples < least:
            raise InputError(f"{where}: samples {samples}: give a whole number from {least} up")
    if len({run_name(name, 0) for name in study.methods}) < len(study.methods):
        raise InputError(
            f"{path}: methods: two names differ only in punctuation and would share files: rename one"
        )
    for key in with_todays_names(study.shared):
        if key not in OPTIONS:
            hint = did_you_mean(key, OPTIONS)
            raise InputError(
                f"{path}: shared: unknown option {key}: {hint}see marlhf <command> --help"
            )
    for figure, names in study.figures.items():
        if not isinstance(names, list) or not set(names) <= set(study.methods):
            raise InputError(f"{path}: figures, {figure}: {names}: give a list of methods")
    if study.equal_kl and (
        len(study.equal_kl) != 2 or not set(study.equal_kl) <= set(study.methods)
    ):
        raise InputError(f"{path}: equal_kl: {study.equal_kl}: give two methods, as [MA-PPO, PPO]")
    if study.window < 1:
        raise InputError(f"{path}: window {study.window}: give a whole number from 1 up")
    span = study.mean_updates
    if span and (
        len(span) != 2 or not all(isinstance(x, int) for x in span) or not 1 <= span[0] <= span[1]
    ):
        raise InputError(
            f"{path}: mean_updates: {span}: give the first and the last update, as [16, 30]"
        )
    for name, contrast in study.contrasts.items():
        _check_contrast(study, contrast, f"{path}: contrasts, {name}: {contrast}")


def _check_contrast(study: Study, contrast: dict, where: str) -> None:
    key, sizes = ("difference", (2,)) if study.mean_updates else ("ratio", (2, 4))
    named = contrast.get(key) if isinstance(contrast, dict) else None
    methods = named if isinstance(named, list) else []
    if len(methods) not in sizes or not set(methods) <= set(study.methods) or not study.of_curves:
        give = "a ratio of two or four methods, and a threshold, or a difference of two, and mean_updates"
        raise InputError(f"{where}: give {give}")


# Its runs


@dataclass(frozen=True)
class Run:
    """One method with one seed. `words` are its command lines, `options` everything that its result depends on."""

    method: str
    command: str
    seed: int
    words: dict[str, list[str]]  # `marlhf` command -> its options
    options: dict
    start: str  # folder name of the SFT model and the reward model
    prompts: int  # held-out prompts to answer; the first `first_prompt` of them are not counted

    @property
    def name(self) -> str:
        return run_name(self.method, self.seed)


def plan(study: Study, seeds: Sequence[int] = (), only: Sequence[str] = ()) -> list[Run]:
    """List all runs of a study, seed by seed.

    Raises `InputError` for a faulty option, before anything runs, and if there is nothing to run.
    """
    unknown = [name for name in only if name not in study.methods]
    if unknown:
        raise InputError(
            f"--only {unknown[0]}: no such method: choose from {', '.join(study.methods)}"
        )
    seeds = list(seeds or study.seeds)
    if len(set(seeds)) < len(seeds):
        raise InputError(f"study {study.name}: seeds {seeds}: give each once")
    runs = [
        _run(study, name, seed)
        for seed in seeds
        for name in study.methods
        if not only or name in only
    ]
    if not runs:
        raise InputError(
            f"study {study.name}: nothing to run: give methods, and seeds such as [0, 1, 2]"
        )
    for reward in sorted({run.options.get("reward", "") for run in runs}):
        if ":" in reward:
            import_user_code("reward", reward, ", ".join(REWARDS))
    return runs


def _run(study: Study, name: str, seed: int) -> Run:
    method = study.methods[name]
    command, options_of_method, samples = (
        method["command"],
        method.get("options", {}),
        method.get("samples", 1),
    )
    if "preset" in method:  # a method's own options win over its preset
        source = f"study {study.name}, method {name}: preset"
        options_of_method = merge([read_presets(method["preset"], source), options_of_method])
    reward_model = "rm" if study.reward_model else ""  # else its options do not belong to the run
    stages = [stage for stage in ("sft", reward_model, TRAINING[command], "evaluate") if stage]
    asked = with_todays_names(merge([study.shared, options_of_method])) | {"seed": seed}
    if asked.get("model", "tiny-gemma") not in EMBEDDED_MODELS:
        asked = PAPER_SAMPLING | asked
    words = {
        stage: [f"--{key}={asked[key]}" for key in asked if key in option_names(COMMANDS[stage])]
        for stage in stages
    }
    known = set().union(*(option_names(COMMANDS[stage]) for stage in stages))
    unknown = [
        f"--{key}={value}"
        for key, value in with_todays_names(options_of_method).items()
        if key not in known
    ]
    try:
        for key in (SET_BY_STUDY | {"seed"}) & set(study.shared | options_of_method):
            raise InputError(f"{key}: the study sets this itself: leave it out")
        _parse(TRAINING[command] or "evaluate", *unknown)  # raises if there is one
        parsed = {stage: _parse(stage, *words[stage]) for stage in stages}
    except InputError as error:
        hint = (
            "; a preset with options of other commands belongs below shared"
            if "preset" in method
            else ""
        )
        raise InputError(f"study {study.name}, method {name}: {error}{hint}") from None
    start = parsed["sft"] | parsed.get("rm", {})
    _check_curve(study, name, command, parsed.get(TRAINING[command], {}))
    if not study.reward_model:
        _check_rewards(study, name, command, parsed.get(TRAINING[command], {}))
    options = start | {key: value for stage in stages for key, value in parsed[stage].items()}
    prompts = study.first_prompt + options["eval_prompts"]
    words["evaluate"] += [f"--eval_prompts={prompts}", f"--eval_samples={samples}"]
    options |= {"command": command, "first_prompt": study.first_prompt, "samples": samples}
    return Run(name, command, seed, words, options, f"seed{seed}-{_hash(start)}", prompts)


def _check_rewards(study: Study, name: str, command: str, options: dict) -> None:
    """Raise `InputError` if a method needs a reward model that the study does not have, or its curve is missing."""
    where = f"study {study.name}, method {name}"
    if study.of_curves and command not in ("ppo", "rloo", "grpo"):
        key = "threshold" if study.threshold is not None else "mean_updates"
        raise InputError(f"{where}: {key}: {command} has no curve: give ppo, rloo or grpo")
    if command in ("dpo", "best_of_n") or "rm" in (
        options.get("reward"),
        options.get("critic_init"),
    ):
        hint = "give ppo, rloo or grpo, with reward: gold, tests or a function, and critic_init: sft for ppo"
        raise InputError(f"{where}: no reward model is trained: {hint}")


def _check_curve(study: Study, name: str, command: str, options: dict) -> None:
    """Raise `InputError` if a method's curve may stop early, is too short, or has no KL for the study's report."""
    where, span, updates = (
        f"study {study.name}, method {name}",
        study.mean_updates,
        options.get("updates", 0),
    )
    if study.of_curves and options.get("kl_ceiling"):
        raise InputError(
            f"{where}: kl_ceiling: a run that stops early has no full curve to compare: leave it out"
        )
    # passes: counted when data load
    if span and span[1] > updates > 0 and not options.get("prompt_epochs"):
        raise InputError(
            f"{where}: mean_updates: {span}: it has {updates} updates: end there, or raise updates"
        )
    has_kl = command == "ppo" or (command == "rloo" and options["kl_coef"])
    if name in study.equal_kl and not has_kl:
        without = " without kl_coef" if command == "rloo" else ""
        raise InputError(
            f"{where}: equal_kl: {command}{without} records no kl_k1: give methods of ppo or rloo"
        )


@functools.cache
def _parse(stage: str, *words: str) -> dict:
    """Options of a command that its result depends on. Raises `InputError` for a faulty one."""
    options = parse(stage, words, COMMANDS[stage])
    for method in options.methods.values():
        make_rule(method)
        if method.objective:
            from marlhf_lite.training.objectives import make_objective  # transformers takes seconds

            make_objective(method)
    if stage in ("rloo", "grpo"):
        check_groups(options.num_generations, options.batch_size)
    unset = ("reward", "")  # of an evaluation: training may have one
    return {
        key: value
        for key, value in asdict(options).items()
        if key not in RESULT_NEUTRAL and (key, value) != unset
    }


def _hash(options: dict) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:10]


def changed_option(run: Run, result: dict) -> str:
    """Name the first option with another value than in a stored result; empty if there is none."""
    stored, newer = (
        result["options"],
        {f.name: f.default for stage in run.words for f in fields(COMMANDS[stage])},
    )
    for name, value in json.loads(json.dumps(run.options)).items():
        before = stored.get(name, newer.get(name, value))  # a newer option had its default
        if before != value:
            return f"{name} was {before}, now {value}"
    return ""


# Running it


def check_committed(path: Path) -> None:
    """Refuse a study of the project whose protocol is not committed as it is; for a user's own file print a note."""
    git = ["git", "--no-optional-locks", "-C", str(path.absolute().parent)]
    questions = (["log", "-1", "--format=%H"], ["status", "--porcelain"])
    try:
        answers = [
            subprocess.run([*git, *q, "--", path.name], capture_output=True, text=True)
            for q in questions
        ]
    except OSError:  # no git here
        return
    commit, changes = (answer.stdout.strip() for answer in answers)
    checkout = not any(answer.returncode for answer in answers)
    if checkout and commit and not changes:
        return
    if checkout and path.parent == STUDIES:
        raise InputError(
            f"{path}: not committed, but a protocol is fixed before the first run: commit it"
        )
    print(
        f"note: {path} is not committed: nobody can check later that it was fixed before the first run: commit it"
    )


def run_study(
    name: str,
    output_dir: str = "",
    workers: int = 0,
    seeds: str = "",
    only: str = "",
    dry_run: bool = False,
) -> None:
    """Run what has no result yet, then write table and figures. The parameters are options of `marlhf study`.

    Raises `InputError` for a faulty protocol or option, before anything runs, and if a run failed.
    """
    study = load_study(name)
    asked_seeds = _numbers(seeds)
    asked_methods = [method.strip() for method in only.split(",") if method.strip()]
    runs = plan(study, asked_seeds, asked_methods)
    results = Path(output_dir or f"data/results/{study.name}")
    # The table has all seeds that are complete, also those that this call does not run.
    of_table = plan(study, [*dict.fromkeys([*study.seeds, *asked_seeds])])
    stored = read_results(results)
    changed = {}
    for run in of_table:
        if run.name in stored:
            changed[run.name] = changed_option(run, stored[run.name])
    if dry_run:
        print(_listing(runs, stored, changed))
        return
    refuse_changed_results(changed, results)
    work = Path("runs") / f"study-{study.name}"
    figures = results / "figures" if output_dir else Path("figures") / study.name
    check_writable("--output_dir", results)
    check_writable("runs of the study:", work)
    check_writable("figures:", figures)
    todo = [run for run in runs if run.name not in stored]
    if todo:
        check_committed(protocol_file(name))
    print(f"study {study.name}: {len(runs)} runs, {len(runs) - len(todo)} done already")
    failures = _run_all(study, todo, work, results, workers) if todo else []
    _report(study, of_table, asked_seeds or study.seeds, results, figures)
    if failures:
        print(*failures, sep="\n\n")
        raise InputError(
            f"{len(failures)} of {len(todo)} runs failed, see above: start the study again to continue"
        )


def refuse_changed_results(changed: Mapping[str, str], results: Path) -> None:
    """Raise `InputError` if a stored result was made with other options than the protocol has now.

    `changed`: name of a run -> the option that differs; empty if none does.
    """
    for name, what in changed.items():
        if what:
            own_file = Path(f"{results / name}{RESULT}")
            place = own_file if own_file.is_file() else f"{results / JOINED}: {name}"
            raise InputError(
                f"{place}: {what}: delete it, or give another folder with --output_dir"
            )


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(word) for word in seeds.split(",")] if seeds.strip() else []
    except ValueError:
        raise InputError(f"--seeds {seeds}: give whole numbers, comma-separated") from None


def _listing(runs: list[Run], stored: dict, changed: dict) -> str:
    states = {
        run.name: changed.get(run.name) or ("done" if run.name in stored else "to do")
        for run in runs
    }
    lines = [f"{run.name:<36} {run.command:<10} {states[run.name]}" for run in runs]
    return "\n".join([*lines, f"{len(runs)} runs, {list(states.values()).count('done')} done"])


def _report(
    study: Study, runs: list[Run], seeds: Sequence[int], results: Path, figures: Path
) -> None:
    """Print and write the study's table and figures, once all results of these seeds are there.

    They are of all seeds among `runs` that are complete, so that no planned one is lost.
    """
    stored = read_results(results)
    incomplete = {run.seed for run in runs if run.name not in stored}
    missing = [run.name for run in runs if run.seed in seeds and run.name not in stored]
    if missing:
        print(f"results: {results}; the table needs {len(missing)} more, such as {missing[0]}")
        return
    import matplotlib  # takes seconds

    matplotlib.use("Agg")  # files only: no window, no display needed
    from marlhf_lab.studies.learning import learning_report
    from marlhf_lab.studies.mean_reward import mean_reward_report
    from marlhf_lab.studies.reports import study_report

    report = (
        mean_reward_report
        if study.mean_updates
        else study_report
        if study.threshold is None
        else learning_report
    )
    complete = [run for run in runs if run.seed not in incomplete]
    text = report(study, [stored[run.name] for run in complete], results, figures)
    shown = ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in complete))
    print(f"\n{text}\n\nseeds: {shown}\nfigures: {figures}")


def _run_all(study: Study, runs: list[Run], work: Path, results: Path, workers: int) -> list[str]:
    """Run them, `workers` at a time (0: one for each core). Returns what failed."""
    commands, failures = Commands(), []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with RunLock() as lock, ThreadPoolExecutor(workers or cores) as pool:
        lock.take(work)
        try:
            jobs = _submit(pool, study, runs, work, results, commands)
            for job in tqdm(
                as_completed(jobs), total=len(jobs), desc="runs", unit="run", mininterval=10
            ):
                if (error := job.exception()) and (reason := _reason(error)) not in failures:
                    failures.append(reason)
            # the study is complete
            if {run.name for run in plan(study)} <= read_results(results).keys():
                join_results(results)
        except KeyboardInterrupt:
            print(
                "\nmarlhf: stopping: runs under way end after their step, with a checkpoint",
                file=sys.stderr,
            )
            raise
        finally:  # an interrupt, too, ends all commands
            commands.stop()
            pool.shutdown(cancel_futures=True)
    return failures


def _reason(error: BaseException) -> str:
    """Why a run failed."""
    return str(error) if isinstance(error, InputError) else disk_fault(error) or one_line(error)


def _submit(
    pool: ThreadPoolExecutor, study: Study, runs: list[Run], work: Path, *places
) -> list[Future]:
    """Queue all runs, seed by seed. Each start comes before the runs of the previous start, so no run waits for it."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.start, []).append(run)
    jobs, waiting = [], []
    for name, group in groups.items():
        start = pool.submit(make_start, group[0], work / name, places[-1], study.reward_model)
        jobs += [pool.submit(make_result, *arguments) for arguments in waiting]
        waiting = [(study, run, start, work, *places) for run in group]
    return jobs + [pool.submit(make_result, *arguments) for arguments in waiting]


def make_start(run: Run, folder: Path, commands: "Commands", reward_model: bool = True) -> Path:
    """Train the SFT model of a seed, and its reward model if asked. Returns their folder."""
    log = folder.with_suffix(".log")
    if not (folder / "sft" / "sft" / "log.json").is_file():
        shutil.rmtree(folder / "sft", ignore_errors=True)  # left by an interrupted study
        words = [*run.words["sft"], f"--output_dir={folder / 'sft'}"]
        commands.run(
            ["sft", *words, *([] if _has_answers(run.options) else ["--sft_epochs=0"])], log
        )
    if reward_model and not (folder / "rm" / "rm" / "accuracy.json").is_file():
        shutil.rmtree(folder / "rm", ignore_errors=True)
        inputs = [f"--sft={folder / 'sft'}", f"--output_dir={folder / 'rm'}"]
        commands.run(["rm", *run.words["rm"], *inputs], log)
    return folder


def _has_answers(options: dict) -> bool:
    """Return whether the data of these options have answers that SFT can learn from."""
    where = {
        name: options.get(name, "") for name in ("dataset_config", "data_dir", "split", "columns")
    }
    rows = [] if options["dataset"] in EMBEDDED else find_rows(options["dataset"], **where).rows
    return not rows or form_of(columns_of(rows), where["columns"]).fractions[0] > 0


def make_result(
    study: Study, run: Run, start, work: Path, results: Path, commands: "Commands"
) -> None:
    """Train and evaluate one method with one seed, and write the result. `start` is a future of `make_start`."""
    # other options have another folder
    models, folder = start.result(), work / f"{run.name}-{_hash(run.options)}"
    training, evaluation, log = folder / "training", folder / "evaluation", work / f"{run.name}.log"
    inputs = [f"--sft={models / 'sft'}"]
    if not study.of_curves:
        _check_prompts(run, models)
    if study.reward_model:
        inputs.append(f"--rm={models / 'rm'}")
    stage = TRAINING[run.command]
    if stage and not evaluation.exists():
        place = (
            f"--resume={training}" if (training / CONFIG).is_file() else f"--output_dir={training}"
        )
        commands.run([stage, *run.words[stage], *inputs, place], log)
    trained = training if stage else None
    if study.of_curves:
        measured = collect_result(trained, None, models)
    else:
        policies = [f"--policies=policy={training}"] if stage else []
        begin = time.perf_counter()
        commands.run(
            ["evaluate", *run.words["evaluate"], *inputs, *policies, f"--output_dir={evaluation}"],
            log,
        )
        seconds = time.perf_counter() - begin
        measured = collect_result(
            trained, evaluation, models, study.first_prompt, run.command == "best_of_n"
        )
        measured["seconds_evaluation"] = seconds
        measured["seconds_total"] = sum(row["seconds"] for row in measured["curve"]) + seconds
    result = {"study": study.name, "method": run.method, "seed": run.seed, "options": run.options}
    write_result(results / f"{run.name}{RESULT}", result | rounded(measured))


def _check_prompts(run: Run, models: Path) -> None:
    """Raise `InputError` if fewer held-out prompts are there than the study asks for."""
    counts = json.loads((models / "sft" / "data.json").read_text(encoding="utf-8"))
    there = counts.get("test_prompts", counts["test"])  # older files count rows alone
    if there < run.prompts:
        raise InputError(
            f"{run.name}: {run.prompts} held-out prompts, but only {there} exist: lower eval_prompts"
        )


class Commands:
    """`marlhf` commands in separate processes, with one thread each.

    They end with `stop`. If this process is killed, the kernel also ends them if `setpriv` is installed (Linux);
    elsewhere the command runs to its end, and no other starts.
    """

    def __init__(self) -> None:
        self.running: set[subprocess.Popen] = set()
        self.lock, self.stopped = threading.Lock(), False

    def run(self, words: Sequence[str], log: Path) -> None:
        """Run one command and append what it prints to `log`. Raises `InputError` if it fails."""
        tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        calm = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_MININTERVAL": "30"}
        with open(log, "a", encoding="utf-8") as file, self.lock:
            if self.stopped:
                raise InputError("interrupted")
            process = subprocess.Popen(
                [*tied, *MARLHF, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | calm,
                # Ctrl-C reaches only this process, which then stops the others
                start_new_session=True,
            )
            self.running.add(process)
        status = process.wait()
        self.running.discard(process)
        if status:
            raise InputError(f"marlhf {words[0]} failed; {log} ends:\n{log_end(log)}")

    def stop(self) -> None:
        """End all commands; no other starts."""
        with self.lock:
            self.stopped = True
            for process in list(self.running):  # a command that ends leaves the set
                process.terminate()


def log_end(path: Path, lines: int = 5) -> str:
    """The last lines of a log that are not empty."""
    text = path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    filled = [line for line in text.split("\n") if line.strip()]
    return "\n".join(f"  {line}" for line in filled[-lines:]) or "  (nothing)"
