"""What all stages of a run share: its options, folder, data, tokenizer, base model, reward and termination rules.

`open_context` makes them once, and checks everything that can be checked before training.
"""

import functools
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
from marlhf_lite.evaluation.responses import HeldOutPrompts
from marlhf_lite.evaluation.sampling import generate_seeded
from marlhf_lite.experiments import other_tokenizers  # noqa: F401 - it registers a check
from marlhf_lite.experiments.data import describe_rows, fit_lengths, read_task
from marlhf_lite.experiments.inputs import Inputs
from marlhf_lite.experiments.manifest import (
    check_contents,
    check_earlier,
    contents_of,
    date_of,
    runs_of,
)
from marlhf_lite.experiments.named_rewards import asked_columns, text_reward
from marlhf_lite.experiments.samplers import open_sampler, try_out
from marlhf_lite.macro import TerminationRule
from marlhf_lite.macro.catalogue import make_rule
from marlhf_lite.models.adapters import other_base
from marlhf_lite.models.checks import ways
from marlhf_lite.models.loading import load_base, load_tokenizer
from marlhf_lite.tasks.prompts import prompts_of
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training import objectives, trackers, trl_trainers  # noqa: F401 - they register checks
from marlhf_lite.training.distributed import raise_on_all_ranks
from marlhf_lite.training.rewards import EnvironmentReward, FunctionReward
from marlhf_lite.training.rollout import Sampler, Sampling, generate, sampling_of
from marlhf_lite.training.safeguards import count_updates
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.libraries import ignore_warnings
from marlhf_lite.utils.preflight import Preflight, check
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
    # of each of the command's `methods`
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
    # the first state made chooses the device
    PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    datasets.disable_progress_bars()
    # the command's own error names the file
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
    run = Preflight(
        options=options, inputs=inputs or Inputs(), path=path, reopens=resume, lock=lock
    )

    # 1. Termination rules, the data, and the reward of texts.
    run.learn(
        rules=lambda options: {name: make_rule(o, o.seed) for name, o in options.methods.items()}
    )
    run.learn(tokenizer=lambda options: load_tokenizer(options.model), sampler=open_sampler)
    run.learn(own=lambda path, reopens: RunFolder.open(path) if reopens else None)
    run.learn(earlier=lambda inputs: runs_of(inputs.folders))
    run.learn(
        date=lambda own, earlier: broadcast_object_list([date_of([own] if own else earlier)])[0]
    )
    run.learn(asked=asked_columns, data=_read_data, task=lambda data: data[0], reward=_open_reward)
    # Later commands write rows in the same way.
    run.learn(
        options=lambda options, task: (
            options if task.chats else replace(options, chat_template="none")
        )
    )
    run.check()
    options, inputs, task, reward = (
        run.facts[name] for name in ("options", "inputs", "task", "reward")
    )

    # 2. The base model, what the run is made from, and a trial of the sampler.
    load = functools.cache(lambda: load_base(options))
    if options.stages or not resume:
        run.learn(base=load)
    run.learn(made=_manifest)
    run.check()
    manifest, changes = run.facts["made"]
    tokenizer, rules, sampler = (run.facts[name] for name in ("tokenizer", "rules", "sampler"))
    if options.methods:
        raise_on_all_ranks(try_out, sampler, options, inputs.sft, load(), tokenizer, task)

    # 3. The folder, after all checks.
    if lock:
        _take(lock, path)
    folder = open_run(path, asdict(options), resume=resume, manifest=manifest)
    if PartialState().is_main_process:
        if options.stages:
            folder.update_config({"versions": folder.config["versions"] | ways(load(), options)})
        different = {"test_prompts": len(task.held_out(len(task.splits["test"])))}
        write_json(folder.path / "data.json", task.counts | different)
    _print_start(options, inputs, task)
    for note in (*run.facts["data"][1], *changes, *_notes(options, inputs, task, reward)):
        print_main(f"note: {note}")
    return RunContext(
        options, folder, task, tokenizer, load, inputs, reward, rules, resume, sampler, manifest
    )


@check
def check_folder(options: StageCommand, path: Path, reopens: bool, lock: RunLock | None) -> None:
    """Raise `InputError` if the run's folder cannot be used, or another process works in it."""
    if reopens:
        check_writable("--resume" if options.resume else "--output_dir", path)
    else:
        check_output_dir(path)
    if lock and is_run(path):
        _take(lock, path)


@check
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
    asked: Sequence = (),
) -> tuple[Task, list[str]]:
    """Return the data, fitted to the lengths, and notes on them; for `asked` see `read_task`."""
    task, notes = read_task(options, tokenizer, earlier, asked, date)
    needs_pairs = _needs_pairs(options, inputs)
    task, more = fit_lengths(
        task, tokenizer, options, _answers_read(options, inputs), needs_pairs=needs_pairs
    )
    return task, [*notes, *more]


def _manifest(
    options: StageCommand,
    inputs: Inputs,
    tokenizer,
    task: Task,
    own: RunFolder | None,
    earlier: Sequence,
    date: str,
) -> tuple[dict, list[str]]:
    """Return the run's manifest, compared with its earlier one and with those of earlier runs, and notes on it."""
    contents = contents_of(options, inputs, tokenizer.chat_template, task)
    changed = (
        check_contents(own, contents, options.accept_changed or not options.stages) if own else []
    )
    earlier = [] if own and options.stages else earlier  # the run's own manifest has them
    accepted = [
        x for run in earlier for x in check_earlier(run, options, contents, options.accept_changed)
    ]
    notes = [
        f"{x['what']} has other content than in {x['run']}: answers are sampled again"
        for x in changed
    ]
    return {
        "date": date,
        "contents": contents,
        "accepted": [*accepted, *changed],
    }, [] if options.stages else notes


def _open_reward(options: StageCommand, task: Task) -> FunctionReward | EnvironmentReward | None:
    """Return the reward that `--reward` names; None for a reward model, or without a reward."""
    if options.environment and options.reward in ("", "environment"):
        return EnvironmentReward(options.environment)
    function = text_reward(options.reward, task)
    return FunctionReward(function, options.reward) if function else None


def _take(lock: RunLock, path: Path) -> None:
    """Lock the run's folder by the main process. Raises `InputError` in all processes if another run has it."""
    raise_on_all_ranks(lambda: lock.take(path) if PartialState().is_main_process else None)


def _answers_read(options: StageCommand, inputs: Inputs) -> dict[str, tuple[str, ...]]:
    """Return the columns of answers that the command's own stages read, by part of the data.

    A whole run trains a reward model if there are pairs, whatever its reward.
    """
    sides = {}
    if "sft" in options.stages and not inputs.sft:
        sides["sft"] = ("chosen",)
    if _needs_pairs(options, inputs) or (
        len(options.stages) > 1 and options.judges_with_rm and not inputs.rm
    ):
        sides["rm"] = ("chosen", "rejected")
    return sides


def _needs_pairs(options: StageCommand, inputs: Inputs) -> bool:
    return "dpo" in options.stages or ("rm" in options.stages and not inputs.rm)


def _print_start(options: StageCommand, inputs: Inputs, task: Task) -> None:
    if taken := [name for name in ("sft", "rm", "policies") if getattr(inputs, name)]:
        print_main(f"as --{taken[0]} has it: --model {options.model}; data: --dataset {task.name}")
    shape = f" (read as {task.shape})" if task.shape else ""
    print_main(f"{task.name}{shape}: {'; dropped: '.join(describe_rows(task))}")
    if task.chats:
        print_main("prompts and answers are written by the chat template")


def _notes(
    options: StageCommand, inputs: Inputs, task: Task, reward: FunctionReward | None
) -> Iterator[str]:
    """Yield notes on valid options that may differ from what the user meant."""
    if options.dataset != (read := EMBEDDED_MODELS.get(options.model, options.dataset)):
        yield f"{options.model} was trained on {read} only: on other data, scores mean little"
    for folder in inputs.folders:  # folders of runs are checked before
        if not run_of(folder) and (base := other_base(folder, options.model)):
            yield f"{folder} was trained on {base}, and --model is {options.model}: are these the same weights?"
    if not options.stages and reward and task.gold:
        source = "rewards of --environment" if isinstance(reward, EnvironmentReward) else "--reward"
        yield f"{source} {reward.name}: not used: {task.name} has a gold score, and the tables show that one"


def open_run(
    path: Path, config: dict, resume: bool = False, manifest: dict | None = None
) -> RunFolder:
    """Make a run's folder in the main process, or with `resume` open the existing one.

    Options and manifest of a resumed run of the same command are updated with the present ones.
    """
    state = PartialState()
    state.wait_for_everyone()  # no process looks for an existing run after another has made it
    if state.is_main_process and resume:
        run = RunFolder.open(path)
        if set(run.config) <= {"versions", *config}:
            earlier, manifest = run.manifest["accepted"], manifest or {}
            run.manifest |= manifest | {"accepted": earlier + manifest.get("accepted", [])}
            run.update_config(
                {name: value for name, value in config.items() if name not in OF_THE_START}
            )
    elif state.is_main_process:
        RunFolder.create(path, config | {"resume": "", "accept_changed": False}, manifest)
    state.wait_for_everyone()
    return RunFolder.open(path)
