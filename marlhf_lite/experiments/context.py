"""What all stages of a run share: its options, folder, data, tokenizer, base model, reward and termination rules.

`open_context` makes them once, and checks everything that can be checked before training.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import datasets
import huggingface_hub
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from transformers import PreTrainedModel

from marlhf_lite.config.commands import StageCommand
from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.parser import OF_THE_START
from marlhf_lite.evaluation.held_out import numbers_of_tests
from marlhf_lite.evaluation.responses import HeldOutPrompts
from marlhf_lite.evaluation.sampling import generate_seeded
from marlhf_lite.experiments.data import (
    check_texts,
    describe_files,
    describe_rows,
    fit_lengths,
    read_task,
)
from marlhf_lite.experiments.inputs import (
    Inputs,
    check_data_support,
    check_options,
    check_support,
)
from marlhf_lite.experiments.manifest import (
    check_contents,
    check_earlier,
    contents_of,
    date_of,
    runs_of,
)
from marlhf_lite.experiments.named_rewards import asked_columns, text_reward
from marlhf_lite.experiments.named_rules import make_rule
from marlhf_lite.experiments.other_tokenizers import check_reward_model, check_tokenizers
from marlhf_lite.experiments.samplers import open_sampler, try_out
from marlhf_lite.macro import TerminationRule
from marlhf_lite.models.adapters import other_base
from marlhf_lite.models.checks import check_base, ways
from marlhf_lite.models.loading import load_base, load_tokenizer
from marlhf_lite.tasks.prompts import RowColumns, prompts_of
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training.checkpoint import update_to_resume, updates_with_checkpoint
from marlhf_lite.training.distributed import raise_on_all_ranks
from marlhf_lite.training.objectives import check_objectives
from marlhf_lite.training.rewards import EnvironmentReward, FunctionReward
from marlhf_lite.training.rollout import Sampler, Sampling, generate, sampling_of
from marlhf_lite.training.safeguards import count_updates
from marlhf_lite.training.trackers import tracker_names
from marlhf_lite.training.trl_trainers import check_batches
from marlhf_lite.utils.errors import InputError, did_you_mean
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.libraries import ignore_warnings
from marlhf_lite.utils.preflight import MISSING, Preflight
from marlhf_lite.utils.progress import note_if_unfinished
from marlhf_lite.utils.run_folder import (
    RunFolder,
    RunLock,
    check_output_dir,
    check_writable,
    is_run,
    run_of,
)

Options = TypeVar("Options", covariant=True)  # a class of `config.commands`


@dataclass(frozen=True)
class RunContext(Generic[Options]):
    """What the stages of a run share."""

    options: Options
    run: RunFolder
    task: Task
    tokenizer: object
    load: Callable[[], PreTrainedModel]  # returns the same base model at every call
    inputs: Inputs = field(default_factory=Inputs)
    reward: FunctionReward | EnvironmentReward | None = None  # None: the reward model
    # Of each of the command's `methods`.
    rules: Mapping[str, TerminationRule] = field(default_factory=dict)
    resume: bool = False  # whether to continue stages that have begun
    sampler: Sampler = generate  # of responses in training
    # What the command reads now; see `experiments.manifest`.
    manifest: Mapping = field(default_factory=lambda: {"contents": {}})

    @property
    def base(self) -> PreTrainedModel:
        return self.load()

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def limit(self) -> int:
        """The longest response, in tokens."""
        return self.options.max_response_length

    @property
    def sampling(self) -> Sampling:
        return sampling_of(self.options, self.limit)

    def held_out(self, count: int, batch_size: int = 128) -> HeldOutPrompts:
        """Return at most `count` different held-out prompts, and how policies answer them."""
        prompts = prompts_of(self.task.held_out(count))
        sampler = generate_seeded if self.sampler is generate else self.sampler
        return HeldOutPrompts(
            prompts, self.tokenizer, self.sampling, self.options.seed, batch_size, sampler
        )


def print_main(text: str) -> None:
    """Print in the main process only."""
    if PartialState().is_main_process:
        print(text)


def start_processes() -> None:
    """Join the other processes of `accelerate launch`, and silence bars and warnings of the libraries."""
    # The first state made chooses the device.
    PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    datasets.disable_progress_bars()
    # The command's own error names the file.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    ignore_warnings()


def open_context(
    options: StageCommand, inputs: Inputs | None = None, lock: RunLock | None = None
) -> RunContext:
    """Check everything that can be checked before training, load tokenizer and base model, and make the run's folder.

    `inputs` are models of earlier stages; `lock`, if given, keeps other processes out of the run. An evaluation opens
    an existing run, as with `--resume`, and loads the base model at its first use.
    Raises `InputError` with one line per problem of the options, the data and the model.
    """
    start_processes()
    # All processes take the main one's folder: its default name contains the time, and clocks differ.
    path = Path(broadcast_object_list([options.output_dir])[0])
    resume = bool(options.resume) or (not options.stages and is_run(path))
    inputs = inputs or Inputs()
    preflight = Preflight()

    # 1. Termination rules, the data, and the reward of texts.
    rules = preflight.attempt(_make_rules, options)
    tokenizer = preflight.attempt(load_tokenizer, options.model)
    sampler = preflight.attempt(open_sampler, options)
    own = preflight.attempt(_open_own_run, path, resume)
    earlier = preflight.attempt(runs_of, inputs.folders)
    date = preflight.attempt(_date_for_all, own, earlier)
    columns = preflight.attempt(asked_columns, options, sampler)
    if columns is MISSING:  # the rows can be read without them, and have problems of their own
        columns = []
    preflight.attempt(check_tokenizers, options, inputs, tokenizer)
    task = notes = MISSING
    data = preflight.attempt(_read_data, options, inputs, tokenizer, earlier, date, columns)
    if data is not MISSING:
        task, notes = data
        if not task.chats:  # later commands write rows in the same way
            options = replace(options, chat_template="none")
    reward = preflight.attempt(_open_reward, options, task)

    check_options(options, preflight)
    preflight.attempt(check_support, options, inputs)
    preflight.attempt(check_data_support, options, inputs, task)
    notes_on_reward = preflight.attempt(check_reward_model, options, inputs, tokenizer, task)
    preflight.attempt(check_objectives, options.methods)
    preflight.attempt(tracker_names, options.report_to)
    preflight.attempt(check_batches, options)
    preflight.attempt(check_folder, options, path, resume, lock)
    preflight.attempt(check_updates, options, task)
    preflight.attempt(check_keep_best, options, task)
    preflight.attempt(check_resumed_updates, options, path, resume, task)
    preflight.stop_if_any_problem()

    # 2. The base model, what the run is made from, and a trial of the sampler.
    load = functools.cache(lambda: load_base(options))
    loads_at_once = options.stages or not resume
    base = preflight.attempt(load) if loads_at_once else MISSING
    made = preflight.attempt(_manifest, options, inputs, tokenizer, task, own, earlier, date)
    preflight.attempt(check_base, options, inputs, base)
    preflight.attempt(check_texts, options, base, tokenizer, task, sampler)
    preflight.stop_if_any_problem()
    manifest, changes = made
    if options.methods:
        raise_on_all_ranks(try_out, sampler, options, inputs.sft, load(), tokenizer, task)

    # 3. The folder, after all checks.
    if lock:
        _take(lock, path)
    folder = open_run(path, asdict(options), resume=resume, manifest=manifest)
    if PartialState().is_main_process and options.stages:
        versions = folder.config["versions"] | ways(load(), options)
        folder.update_config({"versions": versions})
    if PartialState().is_main_process:
        write_json(folder.path / "data.json", _counts(task))
    _print_start(options, inputs, task)
    for note in (*notes, *notes_on_reward, *changes, *_notes(options, inputs, task, reward)):
        print_main(f"note: {note}")
    return RunContext(
        options=options,
        run=folder,
        task=task,
        tokenizer=tokenizer,
        load=load,
        inputs=inputs,
        reward=reward,
        rules=rules,
        resume=resume,
        sampler=sampler,
        manifest=manifest,
    )


def _make_rules(options: StageCommand) -> dict[str, TerminationRule]:
    """Return the termination rule of each of the command's PPO runs."""
    return {name: make_rule(method, method.seed) for name, method in options.methods.items()}


def _open_own_run(path: Path, resume: bool) -> RunFolder | None:
    """Return the run that is resumed; None for a new one."""
    return RunFolder.open(path) if resume else None


def _date_for_all(own: RunFolder | None, earlier: Sequence[RunFolder]) -> str:
    """Return the date of the run, or of the earlier ones; all processes take the main one's."""
    runs = [own] if own else earlier
    return broadcast_object_list([date_of(runs)])[0]


def check_folder(options: StageCommand, path: Path, reopens: bool, lock: RunLock | None) -> None:
    """Raise `InputError` if the run's folder cannot be used, or another process works in it."""
    if reopens:
        option = "--resume" if options.resume else "--output_dir"
        check_writable(option, path)
    else:
        check_output_dir(path)
    if lock and is_run(path):
        _take(lock, path)


def check_keep_best(options: StageCommand, task: Task) -> None:
    """Raise `InputError` if the tests while training find no number of the name that `--keep_best` gives."""
    number = getattr(options, "keep_best", "")
    known = numbers_of_tests(has_gold=bool(task.gold))
    if number and number not in known:
        fix = f"{did_you_mean(number, known)}choose from {', '.join(known)}"
        raise InputError(f"--keep_best {number}: the tests have no such number: {fix}")


def stage_folder(method: str) -> str:
    """Return the name of the folder in which a PPO run of this name trains."""
    return re.sub(r"[^a-z0-9.]+", "-", method.lower())


def check_resumed_updates(options: StageCommand, path: Path, resume: bool, task: Task) -> None:
    """Raise `InputError` if stages cannot continue from their checkpoints as `--at` and `--updates` say."""
    at = getattr(options, "at", None)  # SFT and the reward model have no such option
    if not resume:
        if at is not None:
            raise InputError(f"--at {at}: no run to go back in: name it by --resume")
        return
    totals: dict[str, int | None] = {}
    for name, method in options.methods.items():
        prompts = len(task.splits["ppo"])
        totals[stage_folder(name)] = count_updates(method, prompts, PartialState())
    for stage in options.stages:
        if stage in ("rloo", "grpo"):
            totals[stage] = None if options.prompt_epochs else options.updates
        elif stage == "dpo":  # its epochs cannot be changed
            totals[stage] = None
    for folder, total in totals.items():
        checkpoints = path / folder / "checkpoints"
        if at is not None or updates_with_checkpoint(checkpoints):
            update_to_resume(checkpoints, at, total_updates=total)


def check_updates(options: StageCommand, task: Task) -> None:
    """Raise `InputError` for batches of PPO that cannot be divided, and if there are no prompts."""
    for method in options.methods.values():
        count_updates(method, len(task.splits["ppo"]), PartialState())


def _read_data(
    options: StageCommand,
    inputs: Inputs,
    tokenizer,
    earlier: Sequence[RunFolder],
    date: str,
    columns: Sequence[RowColumns],
) -> tuple[Task, list[str]]:
    """Return the data, fitted to the lengths, and notes on them; `columns` are those that custom code takes."""
    task, notes_on_rows = read_task(options, tokenizer, earlier, columns, date)
    task, notes_on_lengths = fit_lengths(
        task,
        tokenizer,
        options,
        _answers_read(options, inputs),
        needs_pairs=_needs_pairs(options, inputs),
    )
    return task, [*notes_on_rows, *notes_on_lengths]


def _manifest(
    options: StageCommand,
    inputs: Inputs,
    tokenizer,
    task: Task,
    own: RunFolder | None,
    earlier: Sequence[RunFolder],
    date: str,
) -> tuple[dict, list[str]]:
    """Return the run's manifest, compared with its earlier one and with those of earlier runs, and notes on it."""
    is_evaluation = not options.stages
    contents = contents_of(options, inputs, tokenizer.chat_template, task)
    changed = []
    if own:
        accepts = options.accept_changed or is_evaluation
        changed = check_contents(own, contents, accepts)
    accepted = []
    if not own or is_evaluation:  # else the run's own manifest has them
        for run in earlier:
            accepted += check_earlier(run, options, contents, options.accept_changed)
    manifest = {"date": date, "contents": contents, "accepted": accepted + changed}
    if not is_evaluation:
        return manifest, []
    return manifest, [
        f"{x['what']} has other content than in {x['run']}: answers are sampled again"
        for x in changed
    ]


def _open_reward(options: StageCommand, task: Task) -> FunctionReward | EnvironmentReward | None:
    """Return the reward that `--reward` names; None for a reward model, or without a reward."""
    if options.environment and options.reward in ("", "environment"):
        return EnvironmentReward(options.environment)
    function = text_reward(options.reward, task)
    return FunctionReward(function, options.reward) if function else None


def _take(lock: RunLock, path: Path) -> None:
    """Lock the run's folder by the main process. Raises `InputError` in all processes if another run has it."""

    def take() -> None:
        if PartialState().is_main_process:
            lock.take(path)

    raise_on_all_ranks(take)


def _answers_read(options: StageCommand, inputs: Inputs) -> dict[str, tuple[str, ...]]:
    """Return the columns of answers that the command's own stages read, by part of the data."""
    columns = {}
    if "sft" in options.stages and not inputs.sft:
        columns["sft"] = ("chosen",)
    # A whole run trains a reward model if there are pairs, whatever its reward.
    is_whole_run = len(options.stages) > 1
    trains_judge = is_whole_run and options.judges_with_rm and not inputs.rm
    if trains_judge or _needs_pairs(options, inputs):
        columns["rm"] = ("chosen", "rejected")
    return columns


def _needs_pairs(options: StageCommand, inputs: Inputs) -> bool:
    return "dpo" in options.stages or ("rm" in options.stages and not inputs.rm)


def _counts(task: Task) -> dict[str, int]:
    """Return how many rows the data have, and how many different prompts are held out."""
    different = task.held_out(len(task.splits["test"]))
    return task.counts | {"test_prompts": len(different)}


def _print_start(options: StageCommand, inputs: Inputs, task: Task) -> None:
    given = [name for name in ("sft", "rm", "policies") if getattr(inputs, name)]
    if given:
        had = f"--model {options.model}; data: --dataset {task.name}"
        print_main(f"as --{given[0]} has it: {had}")
    shape = f" (read as {task.shape})" if task.shape else ""
    parts, dropped = describe_rows(task)
    print_main(f"{task.name}{shape}: {parts}; dropped: {dropped}")
    for line in describe_files(task):
        print_main(line)
    if task.chats:
        print_main("prompts and answers are written by the chat template")


def _notes(
    options: StageCommand,
    inputs: Inputs,
    task: Task,
    reward: FunctionReward | EnvironmentReward | None,
) -> Iterator[str]:
    """Yield notes on valid options that may differ from what the user meant."""
    trained_on = EMBEDDED_MODELS.get(options.model, options.dataset)
    if trained_on != options.dataset:
        yield f"{options.model} was trained on {trained_on} only: on other data, scores mean little"
    for folder in inputs.folders:
        unfinished = note_if_unfinished(folder)
        if unfinished:
            yield unfinished
    for folder in inputs.folders:
        if run_of(folder):  # folders of runs are checked before
            continue
        base = other_base(folder, options.model)
        if base:
            question = "are these the same weights?"
            yield f"{folder} was trained on {base}, and --model is {options.model}: {question}"
    if not options.stages and reward and task.gold:
        is_environment = isinstance(reward, EnvironmentReward)
        source = "rewards of --environment" if is_environment else "--reward"
        shown = f"{task.name} has a gold score, and the tables show that one"
        yield f"{source} {reward.name}: not used: {shown}"


def open_run(
    path: Path, config: dict, resume: bool = False, manifest: dict | None = None
) -> RunFolder:
    """Make a run's folder in the main process, or with `resume` open the existing one.

    Options and manifest of a resumed run of the same command are updated with the present ones.
    """
    state = PartialState()
    state.wait_for_everyone()  # no process looks for an existing run after another has made it
    if state.is_main_process and resume:
        _update_run(RunFolder.open(path), config, manifest or {})
    elif state.is_main_process:
        started = config | {"resume": "", "accept_changed": False}
        if "at" in started:
            started["at"] = None
        RunFolder.create(path, started, manifest)
    state.wait_for_everyone()
    return RunFolder.open(path)


def _update_run(run: RunFolder, config: dict, manifest: dict) -> None:
    """Update a resumed run, if the same command has made it."""
    is_same_command = set(run.config) <= {"versions", *config}
    if not is_same_command:
        return
    accepted = run.manifest["accepted"] + manifest.get("accepted", [])
    run.manifest |= manifest | {"accepted": accepted}
    run.update_config({name: x for name, x in config.items() if name not in OF_THE_START})
