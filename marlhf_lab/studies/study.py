"""A study: methods times seeds. Each run is a few `marlhf` command lines and leaves one small result file.

The protocol is a YAML file, written before the first run; see protocols/main.yaml. All methods of a seed start from the
same SFT model and reward model, which are trained first; with `sft` or `rm` in the protocol, all seeds start from the
models in these folders. Runs that have a result are not repeated, and a study that was interrupted resumes when it is
started again. When its last planned run is stored, all results become one file.

Read it in this order: a protocol (`load_study`), its runs (`plan`), running them (`run_study`).
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
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.paper_datasets import form_of
from marlhf_lite.tasks.shapes import columns_of
from marlhf_lite.tasks.sources import find_rows
from marlhf_lite.utils.errors import InputError, did_you_mean, disk_fault, one_line
from marlhf_lite.utils.run_folder import MANIFEST, RunLock, check_writable, read_yaml
from marlhf_lite.utils.user_code import import_user_code

STUDIES = Path(str(files("marlhf_lab"))) / "studies" / "protocols"
MARLHF = [sys.executable, "-m", "marlhf_lite"]
# Command of a method -> the `marlhf` command that trains it; None: it answers with the SFT model, which is trained in
# any case. best_of_n takes the best of that model's samples.
TRAINING = {
    "ppo": "ppo",
    "rloo": "rloo",
    "grpo": "grpo",
    "dpo": "dpo",
    "sft": None,
    "best_of_n": None,
}
# Options that the study gives to each command itself. `sft` and `rm` may be keys of the protocol.
SET_BY_STUDY = {f.name for f in fields(RunConfig)} - {"seed"}
SET_BY_STUDY |= {"sft", "rm", "policies", "eval_samples", "eval_temperatures"}
KEYS_OF_PROTOCOL_NOT_OPTIONS = ("sft", "rm")
# Options that no result depends on. The number of rows per pass is one of them: the gradient is that of the whole
# batch.
RESULT_NEUTRAL = SET_BY_STUDY | {
    f.name for kind in (CheckpointConfig, LoggingConfig) for f in fields(kind)
}
RESULT_NEUTRAL |= {"per_device_train_batch_size"}
# How a model that is not embedded samples, if the protocol does not say it. The library's preset for these models has
# had its own sampling since, but a protocol means what it meant when it was written.
PAPER_SAMPLING = {"temperature": 0.8, "top_k": 50}


# The protocol


@dataclass(frozen=True)
class Study:
    """A protocol as its file says it. A key that the file leaves out has the default that stands here."""

    name: str
    # name -> {command, preset, options, samples: answers to each held-out prompt, default 1}
    methods: dict[str, dict]
    seeds: list[int]
    # Options of all methods; each command takes those that it has. `load_study` has put the options of a shared
    # `preset` in its place.
    shared: dict = field(default_factory=dict)
    # Folders of an SFT model and of a reward model that all seeds start from, as `--sft` and `--rm` take them. Without
    # them each seed trains its own.
    sft: str = ""
    rm: str = ""
    baseline: str = "SFT"  # gains are over this method
    # differences are from this method, and costs are counted up to its final RM score
    target_method: str = "PPO"
    first_prompt: int = 0  # number, from 0, of the first held-out prompt whose answers count
    # name -> methods; default: one figure with all
    figures: dict[str, list[str]] = field(default_factory=dict)
    # A gold score: the outcome is how soon training gets there (`studies.learning`), and nothing is evaluated.
    threshold: float | None = None
    window: int = 3  # updates in the mean that is compared with the threshold
    # First and last update: the outcome is the mean reward from the one to the other (`studies.mean_reward`), and
    # nothing is evaluated.
    mean_updates: list[int] = field(default_factory=list)
    # Name of a contrast -> what it compares. With a `threshold`: {ratio, margin}. The ratio [A, B] is that of the two
    # methods' updates to the threshold, A / B; [A, B, C, D] is (A / B) / (C / D). Methods are called equal if the
    # interval of their ratio is between 1 / margin and margin. With `mean_updates`: {difference, subtracted_from}.
    # The difference [A, B] is A's mean reward minus B's; if `subtracted_from` names another study, it is subtracted
    # from the same difference in that study. The first contrast is the primary outcome.
    contrasts: dict[str, dict] = field(default_factory=dict)
    # [A, B]: also report A's score minus B's at equal KL
    equal_kl: list[str] = field(default_factory=list)

    @property
    def of_curves(self) -> bool:
        """Whether the outcome is read from the training curves, so that nothing is evaluated after training."""
        return self.threshold is not None or bool(self.mean_updates)

    @property
    def reward_model(self) -> bool:
        """Whether each seed has a reward model.

        It has none if nothing is evaluated, and none if unit tests or the user's function give the reward: a function
        needs no pairs, and only loading the data would tell whether they have any. If the reward is the gold score, a
        reward model is trained all the same, and scores the answers of the evaluation.
        """
        return not self.of_curves and self.shared.get("reward", "rm") in ("rm", "gold")


# Key of a protocol -> its type; `name` is the file's own.
KEYS = {
    "methods": dict,
    "seeds": list,
    "shared": dict,
    "sft": str,
    "rm": str,
    "baseline": str,
    "target_method": str,
    "first_prompt": int,
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
    values = {}
    for key, value in read_yaml(path, str(path)).items():
        if value is not None:  # a key without a value counts as left out
            # `threshold: 1` means 1.0. To `isinstance` a bool would be an int, too.
            is_whole_number = type(value) is int
            values[key] = float(value) if KEYS.get(key) is float and is_whole_number else value
    check_keys(values, path)
    if "preset" in values.get("shared", {}):
        values["shared"] = options_over_preset(values["shared"], f"{path}: shared: preset")
    # Without methods or seeds there is nothing to run, which `plan` says.
    study = Study(path.stem, **{"methods": {}, "seeds": []} | values)
    for method_name, method in study.methods.items():
        check_method(method_name, method, f"{path}: method {method_name}")
    check_names_give_different_files(study, path)
    check_shared_options(study, path)
    check_figures(study, path)
    check_outcome(study, path)
    check_models_to_start_from(study, path)
    # The defaults, SFT and PPO, need not be methods of the study; a name that the file gives must be one.
    for key in ("baseline", "target_method"):
        if key in values and values[key] not in study.methods:
            raise InputError(
                f"{path}: {key}: no method is called {values[key]}: choose from {', '.join(study.methods)}"
            )
    return study


def check_keys(values: Mapping, path: Path) -> None:
    """Raise `InputError` for a key that a protocol does not have, or a value of another type."""
    for key, value in values.items():
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS)
            raise InputError(f"{path}: unknown key {key}: {hint}choose from {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]):
            raise InputError(
                f"{path}: {key} {value!r}: give a {KEYS[key].__name__}, as in protocols/main.yaml"
            )


def options_over_preset(shared: Mapping, source: str) -> dict:
    """Return the options of a preset with the other options of `shared` over them."""
    own = {key: value for key, value in shared.items() if key != "preset"}
    return merge([read_presets(str(shared["preset"]), source), own])


def check_method(name: str, method: object, where: str) -> None:
    """Raise `InputError` for a faulty entry of `methods`."""
    types = {"command": str, "preset": str, "options": dict, "samples": int}
    # An unknown key has no types (), of which no value is an instance.
    is_well_formed = isinstance(method, dict) and all(
        isinstance(value, types.get(key, ())) for key, value in method.items()
    )
    if not is_well_formed or method.get("command") not in TRAINING:
        what = f"give a command ({', '.join(TRAINING)}), and if needed preset, options (names and values), samples"
        raise InputError(f"{where}: {what}")
    if not isinstance(name, str):
        raise InputError(f"{where}: put its name in quotes")
    least = 2 if method["command"] == "best_of_n" else 1  # the best of one is that one
    samples = method.get("samples", 1)
    if samples < least:
        raise InputError(f"{where}: samples {samples}: give a whole number from {least} up")


def check_names_give_different_files(study: Study, path: Path) -> None:
    """Raise `InputError` if the result files of two methods would have the same name."""
    names_of_files = {run_name(name, 0) for name in study.methods}  # with the same seed, any
    if len(names_of_files) < len(study.methods):
        raise InputError(
            f"{path}: methods: two names differ only in punctuation and would share files: rename one"
        )


def check_shared_options(study: Study, path: Path) -> None:
    """Raise `InputError` for a shared option that no command has. Former names of options are accepted."""
    for key in with_todays_names(study.shared):
        if key not in OPTIONS:
            hint = did_you_mean(key, OPTIONS)
            raise InputError(
                f"{path}: shared: unknown option {key}: {hint}see marlhf <command> --help"
            )


def check_figures(study: Study, path: Path) -> None:
    """Raise `InputError` for a figure of methods that the study does not have."""
    for figure, names in study.figures.items():
        if not isinstance(names, list) or not set(names) <= set(study.methods):
            raise InputError(f"{path}: figures, {figure}: {names}: give a list of methods")


def check_outcome(study: Study, path: Path) -> None:
    """Raise `InputError` for a fault in `equal_kl`, `window`, `mean_updates` or `contrasts`."""
    pair = study.equal_kl
    if pair and (len(pair) != 2 or not set(pair) <= set(study.methods)):
        raise InputError(f"{path}: equal_kl: {pair}: give two methods, as [MA-PPO, PPO]")
    if study.window < 1:
        raise InputError(f"{path}: window {study.window}: give a whole number from 1 up")
    span = study.mean_updates
    if span:
        are_numbers = len(span) == 2 and all(isinstance(update, int) for update in span)
        if not are_numbers or not 1 <= span[0] <= span[1]:
            raise InputError(
                f"{path}: mean_updates: {span}: give the first and the last update, as [16, 30]"
            )
    for name, contrast in study.contrasts.items():
        _check_contrast(study, contrast, f"{path}: contrasts, {name}: {contrast}")


def check_models_to_start_from(study: Study, path: Path) -> None:
    """Raise `InputError` if `rm` is given and no method would read it, or if a folder of `sft` or `rm` has no model."""
    if study.rm and not study.reward_model:
        raise InputError(
            f"{path}: rm {study.rm}: this study has no reward model (its reward is computed by code): leave rm out"
        )
    for option, folder in (("sft", study.sft), ("rm", study.rm)):
        if folder:
            try:
                resolve_adapter_dir(option, folder)
            except InputError as error:
                raise InputError(f"{path}: {error}") from None


def _check_contrast(study: Study, contrast: object, where: str) -> None:
    """Raise `InputError` unless a contrast names two methods of the study, or, if it is a ratio, two or four.

    Contrasts are made from training curves, so a study with an evaluation has none.
    """
    key = "difference" if study.mean_updates else "ratio"
    numbers_of_methods = (2,) if study.mean_updates else (2, 4)
    given = contrast.get(key) if isinstance(contrast, dict) else None
    methods = given if isinstance(given, list) else []
    names_methods = len(methods) in numbers_of_methods and set(methods) <= set(study.methods)
    if not names_methods or not study.of_curves:
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
    start: str  # name of the folder with the SFT model and the reward model of this seed
    prompts: int  # held-out prompts to answer; the answers to the first `first_prompt` of them do not count

    @property
    def name(self) -> str:
        return run_name(self.method, self.seed)

    @property
    def folder(self) -> str:
        """Name of its folder. It ends with a hash of the options, so that no run resumes one that had other options."""
        return f"{self.name}-{_hash(self.options)}"


def plan(study: Study, seeds: Sequence[int] = (), only: Sequence[str] = ()) -> list[Run]:
    """List all runs of a study, seed by seed; with `seeds` those of these seeds instead, with `only` of these methods.

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
    runs = []
    for seed in seeds:
        for name in study.methods:
            if not only or name in only:
                runs.append(run_of(study, name, seed))
    if not runs:
        raise InputError(
            f"study {study.name}: nothing to run: give methods, and seeds such as [0, 1, 2]"
        )
    # A function for a reward is imported now, so that a fault in its name ends the study before anything runs.
    for reward in sorted({run.options.get("reward", "") for run in runs}):
        if ":" in reward:  # module:function
            import_user_code("reward", reward, ", ".join(REWARDS))
    return runs


def run_of(study: Study, name: str, seed: int) -> Run:
    """Return the run of a method with a seed. Raises `InputError` for an option that its commands do not take."""
    method = study.methods[name]
    command = method["command"]
    where = f"study {study.name}, method {name}"
    own = method.get("options", {})
    if "preset" in method:  # a method's own options win over its preset
        own = merge([read_presets(method["preset"], f"{where}: preset"), own])

    # 1. Which commands make the run; each is a stage.
    stages = ["sft"]
    if study.reward_model:  # without one, no option of its training belongs to the run
        stages.append("rm")
    if TRAINING[command]:
        stages.append(TRAINING[command])
    stages.append("evaluate")

    # 2. Their options: shared ones, over them those of the method. A shared option goes to the stages that know it.
    asked = with_todays_names(merge([study.shared, own])) | {"seed": seed}
    if asked.get("model", "tiny-gemma") not in EMBEDDED_MODELS:  # the default is embedded
        asked = PAPER_SAMPLING | asked
    words = {}
    known_to_a_stage = set()
    for stage in stages:
        known = option_names(COMMANDS[stage])
        words[stage] = [f"--{key}={value}" for key, value in asked.items() if key in known]
        known_to_a_stage |= known
    # Shared options are for all methods, so one that this run's stages do not know may be for another method. An option
    # of the method itself would be lost.
    lost = []
    for key, value in with_todays_names(own).items():
        if key not in known_to_a_stage:
            lost.append(f"--{key}={value}")
    try:
        refuse_options_of_the_study(study.shared | own)
        # If options would be lost, the method's command refuses them, and its message names the options that it has.
        _parse(TRAINING[command] or "evaluate", *lost)
        parsed = {stage: _parse(stage, *words[stage]) for stage in stages}
    except InputError as error:
        hint = ""
        if "preset" in method:
            hint = "; a preset with options of other commands belongs below shared"
        raise InputError(f"{where}: {error}{hint}") from None

    # 3. Does the study's outcome fit the method?
    of_training = parsed.get(TRAINING[command], {})
    _check_curve(study, name, command, of_training)
    if not study.reward_model:
        _check_rewards(study, name, command, of_training)

    # 4. What the result depends on. If the protocol names a folder with the SFT model or the reward model, this folder
    #    counts instead of the options of the training.
    start = {}
    for stage, folder in (("sft", study.sft), ("rm", study.rm)):
        if folder:
            start |= {stage: folder}
            del parsed[stage], words[stage]
        else:
            start |= parsed.get(stage, {})
    options = dict(start)
    for of_stage in parsed.values():
        options |= of_stage
    prompts = study.first_prompt + options["eval_prompts"]
    samples = method.get("samples", 1)
    # Of an option that is given twice, such as the protocol's own eval_prompts, the later one counts.
    words["evaluate"] += [f"--eval_prompts={prompts}", f"--eval_samples={samples}"]
    options |= {"command": command, "first_prompt": study.first_prompt, "samples": samples}
    return Run(
        method=name,
        command=command,
        seed=seed,
        words=words,
        options=options,
        start=f"seed{seed}-{_hash(start)}",  # methods with the same options of the start share it
        prompts=prompts,
    )


def refuse_options_of_the_study(options: Mapping) -> None:
    """Raise `InputError` if `options` have one that the study gives to the commands itself."""
    for key in (SET_BY_STUDY | {"seed"}) & set(options):
        if key in KEYS_OF_PROTOCOL_NOT_OPTIONS:
            raise InputError(f"{key}: write it beside seeds and methods: all runs start from it")
        raise InputError(f"{key}: the study sets this itself: leave it out")


def _check_rewards(study: Study, name: str, command: str, options: Mapping) -> None:
    """Raise `InputError` if a method cannot be part of this study, which has no reward model.

    Either the method reads a reward model, or the outcome is read from training curves and the method has none.
    `options` are those of its training command.
    """
    where = f"study {study.name}, method {name}"
    if study.of_curves and command not in ("ppo", "rloo", "grpo"):
        key = "threshold" if study.threshold is not None else "mean_updates"
        raise InputError(f"{where}: {key}: {command} has no curve: give ppo, rloo or grpo")
    reads_reward_model = "rm" in (options.get("reward"), options.get("critic_init"))
    if command in ("dpo", "best_of_n") or reads_reward_model:
        hint = "give ppo, rloo or grpo, with reward: gold, tests or a function, and critic_init: sft for ppo"
        raise InputError(f"{where}: no reward model is trained: {hint}")


def _check_curve(study: Study, name: str, command: str, options: Mapping) -> None:
    """Raise `InputError` if a method's curve may stop early, is too short, or has no KL although the study compares it.

    `options` are those of the method's training command.
    """
    where = f"study {study.name}, method {name}"
    if study.of_curves and options.get("kl_ceiling"):
        raise InputError(
            f"{where}: kl_ceiling: a run that stops early has no full curve to compare: leave it out"
        )
    span = study.mean_updates
    # A command without updates has no curve: `_check_rewards` refuses it.
    updates = options.get("updates", 0)
    # With passes over the prompts (`prompt_epochs`) the number of updates is known only when the data are loaded.
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
    """Return the options of a command, with all defaults, that its result depends on.

    Raises `InputError` for a faulty one.
    """
    options = parse(stage, words, COMMANDS[stage])
    # Termination rule and objective of PPO are made only to find faults in their options before anything runs.
    for options_of_ppo in options.methods.values():
        make_rule(options_of_ppo)
        if options_of_ppo.objective:
            from marlhf_lite.training.objectives import make_objective  # transformers takes seconds

            make_objective(options_of_ppo)
    if stage in ("rloo", "grpo"):
        check_groups(options.num_generations, options.batch_size)
    result_depends_on = {}
    for key, value in asdict(options).items():
        # The caller merges the options of a run's commands. An evaluation for which no reward is named has an empty
        # one, which must not replace the reward of the training.
        is_unset_reward = key == "reward" and not value
        if key not in RESULT_NEUTRAL and not is_unset_reward:
            result_depends_on[key] = value
    return result_depends_on


def _hash(options: Mapping) -> str:
    """Ten hexadecimal digits that tell options with different values apart."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:10]


def changed_option(run: Run, result: Mapping) -> str:
    """Say which option of a run has another value than in its stored result; empty if none has, else the first."""
    stored = result["options"]
    defaults = {}
    for stage in run.words:
        defaults |= {option.name: option.default for option in fields(COMMANDS[stage])}
    as_stored = json.loads(json.dumps(run.options))  # in JSON, for example, a tuple becomes a list
    for name, value in as_stored.items():
        # An option that is newer than the result had its default then. What has no default counts as unchanged.
        before = stored.get(name, defaults.get(name, value))
        if before != value:
            return f"{name} was {before}, now {value}"
    return ""


# Running it


def check_committed(path: Path) -> None:
    """Raise `InputError` if a protocol of the project is not committed as it is; for a user's own one print a note."""
    git = ["git", "--no-optional-locks", "-C", str(path.absolute().parent)]
    try:
        log, status = (
            subprocess.run([*git, *question, "--", path.name], capture_output=True, text=True)
            for question in (["log", "-1", "--format=%H"], ["status", "--porcelain"])
        )
    except OSError:  # git is not installed
        return
    # The last commit of the file, nothing if there is none; and its changes since, nothing if there are none.
    is_in_checkout = log.returncode == status.returncode == 0
    is_committed = log.stdout.strip() and not status.stdout.strip()
    if is_in_checkout and is_committed:
        return
    if is_in_checkout and path.parent == STUDIES:
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
    of_table = plan(study, [*dict.fromkeys([*study.seeds, *asked_seeds])])  # each seed once
    stored = read_results(results)
    changed = {}  # name of a stored run -> the option that differs, or an empty text
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

    `changed`: name of a run -> the option that differs, as `changed_option` says it; an empty text if none does.
    """
    for name, change in changed.items():
        if change:
            # The run's own file, or else its line in the file of the whole study.
            own_file = Path(f"{results / name}{RESULT}")
            place = own_file if own_file.is_file() else f"{results / JOINED}: {name}"
            raise InputError(
                f"{place}: {change}: delete it, or give another folder with --output_dir"
            )


def _numbers(seeds: str) -> list[int]:
    """The numbers of option `--seeds`; none for an empty text."""
    try:
        return [int(word) for word in seeds.split(",")] if seeds.strip() else []
    except ValueError:
        raise InputError(f"--seeds {seeds}: give whole numbers, comma-separated") from None


def _listing(runs: Sequence[Run], stored: Mapping, changed: Mapping[str, str]) -> str:
    """One line for each run with its state, which is done, to do, or the option that differs from a stored result.

    The last line has the number of runs. `changed`: see `refuse_changed_results`.
    """
    lines = []
    done = 0
    for run in runs:
        state = changed.get(run.name, "")
        if not state:
            state = "done" if run.name in stored else "to do"
        done += state == "done"
        lines.append(f"{run.name:<36} {run.command:<10} {state}")
    return "\n".join([*lines, f"{len(runs)} runs, {done} done"])


def _report(
    study: Study, runs: Sequence[Run], seeds: Sequence[int], results: Path, figures: Path
) -> None:
    """Print and write the study's table and figures if all results of `seeds` are there, or else how many are missing.

    Table and figures have every seed of `runs` that is complete, also one that is not among `seeds`: they replace
    earlier ones, from which no seed may vanish.
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

    if study.mean_updates:
        report = mean_reward_report
    elif study.threshold is not None:
        report = learning_report
    else:
        report = study_report
    complete = [run for run in runs if run.seed not in incomplete]
    text = report(study, [stored[run.name] for run in complete], results, figures)
    shown = ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in complete))
    print(f"\n{text}\n\nseeds: {shown}\nfigures: {figures}")


def _run_all(
    study: Study, runs: Sequence[Run], work: Path, results: Path, workers: int
) -> list[str]:
    """Make the results of these runs, `workers` at a time (0: one for each core); return the reasons of failures.

    If all runs that the protocol plans are stored then, their results become one file.
    """
    commands = Commands()
    failures = []
    # The cores that this process may use, if the system can tell.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with RunLock() as lock, ThreadPoolExecutor(workers or cores) as pool:
        lock.take(work)
        try:
            jobs = _submit(pool, study, runs, work, results, commands)
            shown = tqdm(
                as_completed(jobs), total=len(jobs), desc="runs", unit="run", mininterval=10
            )
            for job in shown:
                error = job.exception()
                # If the start of a seed fails, all its runs fail with the same error, which is reported once.
                if error and reason_of(error) not in failures:
                    failures.append(reason_of(error))
            is_complete = {run.name for run in plan(study)} <= read_results(results).keys()
            if is_complete:
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


def reason_of(error: BaseException) -> str:
    """Say in one line why a run failed."""
    if isinstance(error, InputError):
        return str(error)
    return disk_fault(error) or one_line(error)


def _submit(
    pool: ThreadPoolExecutor,
    study: Study,
    runs: Sequence[Run],
    work: Path,
    results: Path,
    commands: "Commands",
) -> list[Future]:
    """Queue all runs, seed by seed.

    The start of each seed is queued before the runs of the seed before it. So the models of a seed are trained while
    earlier runs are under way, and no run waits for them.
    """
    by_start: dict[str, list[Run]] = {}
    for run in runs:
        by_start.setdefault(run.start, []).append(run)
    jobs = []
    waiting = []  # arguments of `make_result` for each run of the seed before
    for folder, group in by_start.items():
        start = pool.submit(make_start, study, group[0], work / folder, commands)
        for earlier in waiting:
            jobs.append(pool.submit(make_result, *earlier))
        waiting = [(study, run, start, work, results, commands) for run in group]
    for last in waiting:
        jobs.append(pool.submit(make_result, *last))
    return jobs


@dataclass(frozen=True)
class Start:
    """What the runs of a seed start from: the folders of its SFT model and, if there is one, its reward model."""

    sft: Path
    rm: Path | None


def make_start(study: Study, run: Run, folder: Path, commands: "Commands") -> Start:
    """Train the SFT model of a seed, and its reward model if the study has one, unless the protocol names them."""
    log = folder.with_suffix(".log")
    sft = Path(study.sft) if study.sft else folder / "sft"
    # log.json, and accuracy.json of a reward model, are written last: a folder without it was left by an interrupted
    # study.
    if not study.sft and not (sft / "sft" / "log.json").is_file():
        shutil.rmtree(sft, ignore_errors=True)
        words = [*run.words["sft"], f"--output_dir={sft}"]
        if not _has_answers(run.options):  # then the policy starts as the base model is
            words.append("--sft_epochs=0")
        commands.run(["sft", *words], log)
    if not study.reward_model:
        return Start(sft, rm=None)
    rm = Path(study.rm) if study.rm else folder / "rm"
    if not study.rm and not (rm / "rm" / "accuracy.json").is_file():
        shutil.rmtree(rm, ignore_errors=True)
        commands.run(["rm", *run.words["rm"], f"--sft={sft}", f"--output_dir={rm}"], log)
    return Start(sft, rm)


def _has_answers(options: Mapping) -> bool:
    """Return whether the data of these options have answers that SFT can learn from, as all embedded data have."""
    if options["dataset"] in EMBEDDED:
        return True
    where = {}
    for name in ("dataset_config", "data_dir", "split", "columns"):
        where[name] = options.get(name, "")
    rows = find_rows(options["dataset"], **where).rows
    # The first fraction is the share of the rows for SFT. It is 0 if the columns hold prompts alone.
    return not rows or form_of(columns_of(rows), where["columns"]).fractions[0] > 0


def make_result(
    study: Study, run: Run, start: "Future[Start]", work: Path, results: Path, commands: "Commands"
) -> None:
    """Train and evaluate one method with one seed, and write the result.

    `start` is the future of `make_start` for this seed, which this function waits for.
    """
    models = start.result()
    folder = work / run.folder
    training = folder / "training"
    evaluation = folder / "evaluation"
    log = work / f"{run.name}.log"
    inputs = [f"--sft={models.sft}"]
    if models.rm:
        inputs.append(f"--rm={models.rm}")
    # An SFT model that the protocol names was trained elsewhere, and its folder does not count this study's prompts.
    if not study.of_curves and not study.sft:
        check_there_are_enough_prompts(run, models.sft)

    # 1. Train, from the last checkpoint if the run was interrupted. If it has begun its evaluation, training is done.
    stage = TRAINING[run.command]
    trained = training if stage else None
    if stage and not evaluation.exists():
        is_interrupted_run = (training / MANIFEST).is_file()
        place = f"--resume={training}" if is_interrupted_run else f"--output_dir={training}"
        commands.run([stage, *run.words[stage], *inputs, place], log)

    # 2. Evaluate, unless the training curve is the outcome. Without a trained policy the SFT model answers.
    if study.of_curves:
        measured = collect_result(trained, None, models.sft, models.rm)
    else:
        policies = [f"--policies=policy={training}"] if stage else []
        words = [*run.words["evaluate"], *inputs, *policies, f"--output_dir={evaluation}"]
        begin = time.perf_counter()
        commands.run(["evaluate", *words], log)
        seconds = time.perf_counter() - begin
        measured = collect_result(
            trained,
            evaluation,
            models.sft,
            models.rm,
            first_prompt=study.first_prompt,
            best=run.command == "best_of_n",
        )
        measured["seconds_evaluation"] = seconds
        measured["seconds_total"] = sum(row["seconds"] for row in measured["curve"]) + seconds

    # 3. Store it.
    result = {"study": study.name, "method": run.method, "seed": run.seed, "options": run.options}
    write_result(results / f"{run.name}{RESULT}", result | rounded(measured))


def check_there_are_enough_prompts(run: Run, sft: Path) -> None:
    """Raise `InputError` if there are fewer held-out prompts than the study asks for.

    `sft` is the folder in which `marlhf sft` has trained the seed's SFT model, and counted the data.
    """
    counts = json.loads((sft / "data.json").read_text(encoding="utf-8"))
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
        self.lock = threading.Lock()
        self.stopped = False

    def run(self, words: Sequence[str], log: Path) -> None:
        """Run one command and append what it prints to `log`. Raises `InputError` if it fails."""
        # Where `setpriv` is installed, the kernel ends the command together with this process.
        tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        # One thread, and few lines of progress bars in the log.
        calm = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_MININTERVAL": "30"}
        # With the lock, because `stop` in another thread must not miss a command that is just being started.
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
    """The last `lines` lines of a log that are not empty, indented."""
    # A progress bar returns to the start of its line with \r instead of beginning a new one.
    text = path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    filled = [line for line in text.split("\n") if line.strip()]
    return "\n".join(f"  {line}" for line in filled[-lines:]) or "  (nothing)"
