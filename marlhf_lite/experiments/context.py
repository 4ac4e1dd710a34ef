"""What all stages of a run share: its options, folder, data, tokenizer, base model, reward and termination rules.

`open_context` makes them once, and checks everything that can be checked before training.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from marlhf_lite.config.commands import StageCommand, command_of, environment_of, reward_of
from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.method import KeepBestConfig, LoggingConfig
from marlhf_lite.config.parser import OF_THE_START
from marlhf_lite.evaluation.held_out import numbers_of_tests
from marlhf_lite.evaluation.responses import HeldOutPrompts
from marlhf_lite.evaluation.sampling import generate_seeded
from marlhf_lite.experiments.data import (
    ANSWER_COLUMNS,
    describe_files,
    describe_rows,
    fit_lengths,
    read_task,
    texts_of_column,
)
from marlhf_lite.experiments.inputs import (
    Inputs,
    check_data_support,
    check_groups_are_whole,
    check_methods_differ,
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
from marlhf_lite.models.checks import check_base, check_length, check_vocabulary, ways
from marlhf_lite.models.fast.switch import levers_of_choice
from marlhf_lite.models.loading import load_base, load_policy, new_policy
from marlhf_lite.models.positions import position_limit
from marlhf_lite.models.tokenizers import load_tokenizer
from marlhf_lite.tasks.answers import encode_continuation
from marlhf_lite.tasks.prompts import RowColumns, prompts_of
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.checkpoint import update_to_resume, updates_with_checkpoint
from marlhf_lite.training.distributed import raise_on_all_ranks
from marlhf_lite.training.objectives import check_objectives
from marlhf_lite.training.rewards import EnvironmentReward, FunctionReward
from marlhf_lite.training.rollout import (
    Sampler,
    Sampling,
    generate,
    longest_response,
    sampling_of,
)
from marlhf_lite.training.safeguards import count_updates
from marlhf_lite.training.trackers import tracker_names
from marlhf_lite.training.trl_trainers import check_adapter
from marlhf_lite.training.trl_trainers import check_batches as check_batches_of_trl
from marlhf_lite.utils.errors import InputError, did_you_mean
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.preflight import PartIsMissing, ProblemList
from marlhf_lite.utils.progress import note_if_unfinished
from marlhf_lite.utils.quiet import silence_libraries
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
    # Loads the base model at the first call, and returns it at every call.
    load: Callable[[], PreTrainedModel]
    inputs: Inputs = field(default_factory=Inputs)
    reward: FunctionReward | EnvironmentReward | None = None  # None: the reward model
    # The termination rule of each of the command's `methods`, by the name of the method.
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
        # By `generate_seeded` a response is the same in any batch; other samplers draw in their own way.
        sampler = generate_seeded if self.sampler is generate else self.sampler
        return HeldOutPrompts(
            prompts, self.tokenizer, self.sampling, self.options.seed, batch_size, sampler
        )


def print_main(text: str) -> None:
    """Print in the main process only."""
    if PartialState().is_main_process:
        print(text)


def join_processes() -> None:
    """Join the other processes of `accelerate launch`, and silence bars and warnings of the libraries."""
    # All later states are this one, so the first that is made chooses the device.
    PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    silence_libraries()


def open_context(
    options: StageCommand, inputs: Inputs | None = None, lock: RunLock | None = None
) -> RunContext:
    """Check everything that can be checked before training, load tokenizer and base model, and make the run's folder.

    `inputs` are models of earlier stages; `lock`, if given, keeps other processes out of the run. An evaluation opens
    an existing run, as with `--resume`, and loads the base model at its first use.
    Raises `InputError` with one line per problem of the options, the data and the model.
    """
    join_processes()
    # All processes take the main one's folder: its default name contains the time, and clocks differ.
    path = Path(broadcast_object_list([options.output_dir])[0])
    # If an evaluation finds a run in its folder, it continues that run: stored answers are used again.
    reopens = bool(options.resume) or (options.is_evaluation and is_run(path))
    plan = PlannedRun(options, path, inputs or Inputs(), lock, reopens)

    # 1. Everything but the base model: steps and checks, each of which may find a problem.
    problems = ProblemList()
    for step in STEPS_WITHOUT_THE_MODEL:
        with problems.collect():
            step(plan)
    problems.stop_if_any_problem()

    # 2. The base model and what the run is made from.
    for step in STEPS_WITH_THE_MODEL:
        with problems.collect():
            step(plan)
    problems.stop_if_any_problem()
    # The sampler's trial, if the command has PPO runs. It needs all parts, so it comes after the other checks.
    if plan.options.methods:
        raise_on_all_ranks(
            try_out,
            plan.sampler,
            plan.options,
            plan.inputs.sft,
            plan.load_base(),
            plan.tokenizer,
            plan.task,
        )

    # 3. The folder, after all checks.
    return _begin(plan)


@dataclass
class PlannedRun:
    """A run before it begins: what was asked for, and the parts of it that have been made so far.

    A part that could not be made stays unset. If a step reads it, `PartIsMissing` ends that step without an error of
    its own, since the problem of the part is known already.
    """

    options: StageCommand
    path: Path
    inputs: Inputs
    lock: RunLock | None
    reopens: bool  # --resume, or an evaluation that has begun

    rules: dict[str, TerminationRule] = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    sampler: Sampler = field(init=False)
    own_run: RunFolder | None = field(init=False)  # the run itself, if it is reopened
    earlier_runs: list[RunFolder] = field(init=False)  # the runs that its models come from
    date: str = field(init=False)  # that chat templates see as today
    columns: list[RowColumns] = field(init=False)  # that custom code takes of each row
    task: Task = field(init=False)
    notes_on_data: list[str] = field(init=False)
    notes_on_reward: list[str] = field(init=False)
    reward: FunctionReward | EnvironmentReward | None = field(init=False)
    load_base: Callable[[], PreTrainedModel] = field(init=False)
    base: PreTrainedModel = field(init=False)
    manifest: dict = field(init=False)
    notes_on_changes: list[str] = field(init=False)

    def __getattr__(self, name: str):
        # Python calls this only if the attribute is not set.
        if name in self.__dataclass_fields__:
            raise PartIsMissing(name)
        raise AttributeError(name)


# The steps, in the order in which their problems are shown


def make_rules(plan: PlannedRun) -> None:
    """Make the termination rule of each of the command's PPO runs."""
    plan.rules = {
        name: make_rule(method, method.seed) for name, method in plan.options.methods.items()
    }


def make_tokenizer(plan: PlannedRun) -> None:
    plan.tokenizer = load_tokenizer(plan.options.model)


def make_sampler(plan: PlannedRun) -> None:
    plan.sampler = open_sampler(plan.options)


def open_own_run(plan: PlannedRun) -> None:
    plan.own_run = RunFolder.open(plan.path) if plan.reopens else None


def open_earlier_runs(plan: PlannedRun) -> None:
    plan.earlier_runs = runs_of(plan.inputs.folders)


def choose_date(plan: PlannedRun) -> None:
    """Choose the date that chat templates see as today.

    That is the date of the run if it is reopened, else of the first earlier run, else today. All processes take the
    date of the main process, because clocks differ.
    """
    runs = [plan.own_run] if plan.own_run else plan.earlier_runs
    plan.date = broadcast_object_list([date_of(runs)])[0]


def find_columns(plan: PlannedRun) -> None:
    """Ask custom code which columns of a row it takes."""
    # If the next line raises, the columns are these: the rows are read without any, and their own problems are found.
    plan.columns = []
    plan.columns = asked_columns(plan.options, plan.sampler)


def check_all_tokenizers(plan: PlannedRun) -> None:
    check_tokenizers(plan.options, plan.inputs, plan.tokenizer)


def read_data(plan: PlannedRun) -> None:
    """Read the data; drop prompts that are too long, and pairs that `--max_response_length` makes equal."""
    task, notes_on_rows = read_task(
        plan.options, plan.tokenizer, plan.earlier_runs, plan.columns, plan.date
    )
    task, notes_on_lengths = fit_lengths(
        task,
        plan.tokenizer,
        plan.options,
        _answers_that_stages_read(plan.options, plan.inputs),
        needs_pairs=_needs_pairs(plan.options, plan.inputs),
    )
    plan.task = task
    plan.notes_on_data = [*notes_on_rows, *notes_on_lengths]
    # No template has written this data. The run stores this option, and commands that take its models inherit it, so no
    # template writes their prompts either, even if their rows are messages.
    if not task.chats:
        plan.options = replace(plan.options, chat_template="none")


def make_reward(plan: PlannedRun) -> None:
    """Make the reward that `--reward` names; None for a reward model, or without a reward."""
    name = reward_of(plan.options)
    environment = environment_of(plan.options)
    # In an evaluation the name is empty: it takes the rewards of its environment without being asked.
    if environment and name in ("", "environment"):
        plan.reward = EnvironmentReward(environment)
        return
    function = text_reward(name, plan.task)
    plan.reward = FunctionReward(function, name) if function else None


def check_methods(plan: PlannedRun) -> None:
    check_methods_differ(plan.options)


def check_groups(plan: PlannedRun) -> None:
    check_groups_are_whole(plan.options)


def check_what_goes_together(plan: PlannedRun) -> None:
    check_support(plan.options, plan.inputs)


def check_data_for_stages(plan: PlannedRun) -> None:
    check_data_support(plan.options, plan.inputs, plan.task)


def check_judge(plan: PlannedRun) -> None:
    plan.notes_on_reward = check_reward_model(plan.options, plan.inputs, plan.tokenizer, plan.task)


def check_equations(plan: PlannedRun) -> None:
    check_objectives(plan.options.methods)


def check_levers(plan: PlannedRun) -> None:
    """Raise `InputError` for a lever that `--fast` does not know: names are the same on every device."""
    levers_of_choice(plan.options.fast, "cpu")


def check_trackers(plan: PlannedRun) -> None:
    if isinstance(plan.options, LoggingConfig):
        tracker_names(plan.options.report_to)


def check_batches(plan: PlannedRun) -> None:
    check_batches_of_trl(plan.options)


def check_folder(plan: PlannedRun) -> None:
    """Raise `InputError` if the run's folder cannot be used, or another process works in it.

    An evaluation never opens a run that trained something: it would write over that run's samples.
    """
    path = plan.path
    if plan.reopens:
        option = "--resume" if plan.options.resume else "--output_dir"
        if plan.options.is_evaluation and not RunFolder.open(path).is_evaluation:
            what = "a run that trained, which an evaluation would write over"
            raise InputError(f"{option} {path}: {what}: choose another --output_dir")
        check_writable(option, path)
    else:
        check_output_dir(path)
    # Locking makes a folder that is missing, so a new run is locked only after all checks (`_begin`).
    if plan.lock and is_run(path):
        _lock_in_main_process(plan.lock, path)


def check_updates(plan: PlannedRun) -> None:
    """Raise `InputError` if the updates of a PPO run cannot be counted: see `count_updates`.

    That is so if the batch cannot be divided, or if there are no prompts.
    """
    for method in plan.options.methods.values():
        count_updates(method, len(plan.task.splits["ppo"]), PartialState())


def check_keep_best(plan: PlannedRun) -> None:
    """Raise `InputError` if `--keep_best` names a number that the tests on held-out prompts do not give."""
    if not isinstance(plan.options, KeepBestConfig):  # a command without this option
        return
    asked_name = plan.options.keep_best
    known_names = numbers_of_tests(has_gold=bool(plan.task.gold))
    if asked_name and asked_name not in known_names:
        fix = f"{did_you_mean(asked_name, known_names)}choose from {', '.join(known_names)}"
        raise InputError(f"--keep_best {asked_name}: the tests have no such number: {fix}")


def check_resumed_updates(plan: PlannedRun) -> None:
    """Raise `InputError` if stages cannot continue from their checkpoints as `--at` and `--updates` say.

    `--at` needs `--resume`, and a checkpoint of that update in each stage that trains a policy. A stage whose
    checkpoint is beyond `--updates` cannot continue.
    """
    options = plan.options
    at = getattr(options, "at", None)  # SFT and the reward model have no such option
    if not plan.reopens:
        if at is not None:
            raise InputError(f"--at {at}: no run to go back in: name it by --resume")
        return
    # 1. How many updates each stage will have in all, by the name of its folder; None: this is not known here.
    total_updates: dict[str, int | None] = {}
    for name, method in options.methods.items():
        prompts = len(plan.task.splits["ppo"])
        total_updates[stage_folder(name)] = count_updates(method, prompts, PartialState())
    for stage in options.stages:
        if stage in ("rloo", "grpo"):
            # With --prompt_epochs TRL computes the number of updates itself.
            total_updates[stage] = None if options.prompt_epochs else options.updates
        elif stage == "dpo":  # a resumed run cannot change its epochs, so there is nothing to check
            total_updates[stage] = None

    # 2. The checkpoint from which each stage continues; `update_to_resume` raises if there is a problem.
    for folder, total in total_updates.items():
        checkpoints = plan.path / folder / "checkpoints"
        # A stage without a checkpoint begins again. That is a problem only if `--at` asks for a checkpoint.
        if at is not None or updates_with_checkpoint(checkpoints):
            update_to_resume(checkpoints, at, total_updates=total)


def stage_folder(method: str) -> str:
    """Return the name of the folder in which a PPO run of this name trains."""
    return re.sub(r"[^a-z0-9.]+", "-", method.lower())


STEPS_WITHOUT_THE_MODEL = [
    make_rules,
    make_tokenizer,
    make_sampler,
    open_own_run,
    open_earlier_runs,
    choose_date,
    find_columns,
    check_all_tokenizers,
    read_data,
    make_reward,
    check_methods,
    check_groups,
    check_what_goes_together,
    check_data_for_stages,
    check_judge,
    check_equations,
    check_levers,
    check_trackers,
    check_batches,
    check_folder,
    check_updates,
    check_keep_best,
    check_resumed_updates,
]


def load_base_model(plan: PlannedRun) -> None:
    """Load the base model, which all stages share.

    An evaluation that is opened again may have all answers already, so it loads the model at its first use. Then
    `plan.base` stays unset, and the checks that read it are left out.
    """
    options = plan.options
    plan.load_base = functools.cache(lambda: load_base(options))
    if options.stages or not plan.reopens:
        plan.base = plan.load_base()


def make_manifest(plan: PlannedRun) -> None:
    """Make the run's manifest, with what the command reads by its content, and notes on what has changed.

    Raises `InputError` if content has changed, and the change is not accepted: since the run itself began, or since an
    earlier run that made one of its models has read it.
    """
    options = plan.options
    contents = contents_of(options, plan.inputs, plan.tokenizer.chat_template, plan.task)

    # 1. Differences to the run's own manifest, if it is opened again. An evaluation accepts them: it trains nothing,
    # and answers again what has changed.
    changed_in_own_run = []
    if plan.own_run:
        accepts = options.accept_changed or options.is_evaluation
        changed_in_own_run = check_contents(plan.own_run, contents, accepts)

    # 2. Differences to the runs that the models come from. A training run that is opened again has compared these when
    # it began, and its own manifest has what was accepted. An evaluation compares them each time, since it has accepted
    # whatever differs from its own manifest.
    changed_since_earlier_runs = []
    if not plan.own_run or options.is_evaluation:
        for run in plan.earlier_runs:
            changed_since_earlier_runs += check_earlier(
                run, options, contents, options.accept_changed
            )

    plan.manifest = {
        "command": command_of(options),
        "date": plan.date,
        "contents": contents,
        "accepted": changed_since_earlier_runs + changed_in_own_run,
    }
    plan.notes_on_changes = []
    if options.is_evaluation:
        for entry in changed_in_own_run:
            what = f"{entry['what']} has other content than in {entry['run']}"
            plan.notes_on_changes.append(f"{what}: answers are sampled again")


def check_base_model(plan: PlannedRun) -> None:
    """Raise `InputError` if the base, or a model that starts from it, cannot do what the command asks for."""
    options = plan.options
    sft = plan.inputs.sft
    check_base(options, plan.inputs, plan.base)
    # TRL trains these stages, and it cannot train every kind of adapter.
    is_trained_by_trl = bool({"sft", "dpo", "rloo", "grpo"} & set(options.stages))
    if is_trained_by_trl and options.finetune == "lora":
        if sft:
            start = load_policy(plan.base, sft)
        else:
            start = new_policy(plan.base, options)
        check_adapter(start)


def check_texts(plan: PlannedRun) -> None:
    """Raise `InputError` if the base has too few positions or embeddings for the texts of the task.

    To tokenise all texts takes long. It is left out if even the longest text that the options allow fits, and if the
    base has an embedding for each token that the tokenizer knows.
    """
    options = plan.options
    base = plan.base
    tokenizer = plan.tokenizer
    task = plan.task
    positions = position_limit(base)  # None: the base has no limit
    response_tokens = longest_response(plan.sampler, tokenizer, options.max_response_length)
    longest_allowed = options.max_prompt_length + response_tokens
    may_be_too_long = positions is not None and longest_allowed > positions
    embeddings = base.get_input_embeddings().weight.shape[0]
    if not may_be_too_long and len(tokenizer) <= embeddings:
        return

    prompts = dict.fromkeys(texts_of_column(task, "prompt"))  # each once
    ids_of_prompts = encode_prompts(tokenizer, list(prompts))
    longest_prompt = max(map(len, ids_of_prompts), default=0)
    check_length(base, options.model, longest_prompt, response_tokens)

    answers: set[str] = set()
    for name in ANSWER_COLUMNS:
        answers.update(texts_of_column(task, name))
    tokens: set[int] = set()
    for ids in (*ids_of_prompts, *encode_continuation(tokenizer, list(answers))):
        tokens.update(ids)
    check_vocabulary(base, options.model, tokenizer, tokens)


STEPS_WITH_THE_MODEL = [
    load_base_model,
    make_manifest,
    check_base_model,
    check_texts,
]


def _begin(plan: PlannedRun) -> RunContext:
    """Make or open the run's folder, and print what it reads."""
    options = plan.options
    if plan.lock:  # a run that is reopened is locked already: then this does nothing
        _lock_in_main_process(plan.lock, plan.path)
    folder = open_run(plan.path, asdict(options), resume=plan.reopens, manifest=plan.manifest)
    if PartialState().is_main_process:
        if options.stages:
            # The run's record also tells how adapters and the last layer were computed.
            versions = folder.config.get("versions", {}) | ways(plan.load_base(), options)
            folder.update_config({"versions": versions})
        write_json(folder.path / "data.json", _counts(plan.task))
    _print_start(options, plan.inputs, plan.task)
    notes = [*plan.notes_on_data, *plan.notes_on_reward, *plan.notes_on_changes]
    notes += _notes_on_options(options, plan.inputs, plan.task, plan.reward)
    for note in notes:
        print_main(f"note: {note}")
    return RunContext(
        options=options,
        run=folder,
        task=plan.task,
        tokenizer=plan.tokenizer,
        load=plan.load_base,
        inputs=plan.inputs,
        reward=plan.reward,
        rules=plan.rules,
        resume=plan.reopens,
        sampler=plan.sampler,
        manifest=plan.manifest,
    )


def _lock_in_main_process(lock: RunLock, path: Path) -> None:
    """Lock the run's folder. Raises `InputError` in all processes if another run has it."""

    def take() -> None:
        if PartialState().is_main_process:
            lock.take(path)

    raise_on_all_ranks(take)


def _answers_that_stages_read(options: StageCommand, inputs: Inputs) -> dict[str, tuple[str, ...]]:
    """Return the columns of answers that the command's own stages read, by part of the data."""
    columns = {}
    # With --sft or --rm that model is trained already, and its stage reads nothing.
    if "sft" in options.stages and not inputs.sft:
        columns["sft"] = ("chosen",)
    # Even if its reward is another one, a whole run trains a reward model if there are pairs: it judges the answers.
    trains_judge = options.is_whole_run and options.judges_with_rm and not inputs.rm
    if trains_judge or _needs_pairs(options, inputs):
        columns["rm"] = ("chosen", "rejected")
    return columns


def _needs_pairs(options: StageCommand, inputs: Inputs) -> bool:
    """Return whether a stage learns from pairs and from nothing else."""
    return "dpo" in options.stages or ("rm" in options.stages and not inputs.rm)


def _counts(task: Task) -> dict[str, int]:
    """Return how many rows the data have, and how many different prompts are held out."""
    different_prompts = task.held_out(len(task.splits["test"]))
    return task.counts | {"test_prompts": len(different_prompts)}


def _print_start(options: StageCommand, inputs: Inputs, task: Task) -> None:
    """Print the model and data that an earlier run decided, and how the rows were read."""
    # Model and data options are taken over from the runs of these models. The line names the first of them.
    options_with_models = [name for name in ("sft", "rm", "policies") if getattr(inputs, name)]
    if options_with_models:
        model_and_data = f"--model {options.model}; data: --dataset {task.name}"
        print_main(f"as --{options_with_models[0]} has it: {model_and_data}")
    shape = f" (read as {task.shape})" if task.shape else ""
    parts, dropped = describe_rows(task)
    print_main(f"{task.name}{shape}: {parts}; dropped: {dropped}")
    for line in describe_files(task):
        print_main(line)
    if task.chats:
        print_main("prompts and answers are written by the chat template")


def _notes_on_options(
    options: StageCommand,
    inputs: Inputs,
    task: Task,
    reward: FunctionReward | EnvironmentReward | None,
) -> Iterator[str]:
    """Yield notes on valid options that may differ from what the user meant."""
    # An embedded model was trained on one data set. Of any other model nothing is known: it is taken to be trained on
    # the data of this run, so that no note is made.
    trained_on = EMBEDDED_MODELS.get(options.model, options.dataset)
    if trained_on != options.dataset:
        yield f"{options.model} was trained on {trained_on} only: on other data, scores mean little"
    for folder in inputs.folders:
        unfinished = note_if_unfinished(folder)
        if unfinished:
            yield unfinished
    for folder in inputs.folders:
        if run_of(folder):  # its base was compared already, by the manifest of that run
            continue
        base = other_base(folder, options.model)
        if base:
            question = "are these the same weights?"
            yield f"{folder} was trained on {base}, and --model is {options.model}: {question}"
    if options.is_evaluation and reward and task.gold:
        is_environment = isinstance(reward, EnvironmentReward)
        source = "rewards of --environment" if is_environment else "--reward"
        shown = f"{task.name} has a gold score, and the tables show that one"
        yield f"{source} {reward.name}: not used: {shown}"


def open_run(
    path: Path, config: dict, resume: bool = False, manifest: dict | None = None
) -> RunFolder:
    """Make a run's folder in the main process, or with `resume` open the existing one.

    Options and manifest of a resumed run are updated with the present ones.
    """
    state = PartialState()
    state.wait_for_everyone()  # no process looks for an existing run after another has made it
    if state.is_main_process and resume:
        _update_run(RunFolder.open(path), config, manifest or {})
    elif state.is_main_process:
        # These options are of this one command: a run that is resumed later must not take them over.
        options_to_keep = config | {"resume": "", "accept_changed": False}
        if "at" in options_to_keep:
            options_to_keep["at"] = None
        RunFolder.create(path, options_to_keep, manifest)
    state.wait_for_everyone()
    return RunFolder.open(path)


def _update_run(run: RunFolder, config: dict, manifest: dict) -> None:
    """Write the present options and manifest into a resumed run; what was accepted before stays on record."""
    accepted = run.manifest["accepted"] + manifest.get("accepted", [])
    run.manifest |= manifest | {"accepted": accepted}
    run.update_config({name: x for name, x in config.items() if name not in OF_THE_START})
