"""What all stages of a run share: its options, folder, data, tokenizer, base model, reward and termination rules.

`open_context` makes them once, and checks before anything trains whatever can be checked.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import datasets
import huggingface_hub
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from transformers import PreTrainedModel

from marlhf_lite.config.commands import GenerateCommand, StageCommand
from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.evaluation.responses import HeldOutPrompts
from marlhf_lite.evaluation.sampling import generate_seeded
from marlhf_lite.experiments.data import fit_lengths, note_on_sentences, read_task
from marlhf_lite.experiments.inputs import Inputs
from marlhf_lite.experiments.manifest import check_earlier, check_resumed, contents_of, date_of, runs_of
from marlhf_lite.experiments.named_rewards import asked_columns, text_reward
from marlhf_lite.experiments.other_tokenizers import check_reward_model
from marlhf_lite.macro import TerminationRule
from marlhf_lite.macro.catalogue import make_rule
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.adapters import other_base
from marlhf_lite.models.checks import (
    check_four_bits,
    check_length,
    check_trainable,
    check_vocabulary,
    position_limit,
    ways,
)
from marlhf_lite.models.loading import (
    check_target_modules,
    is_full_model,
    load_base,
    load_policy,
    load_tokenizer,
    model_path,
    new_policy,
)
from marlhf_lite.models.shards import is_sharded_folder
from marlhf_lite.tasks.answers import encode_behind
from marlhf_lite.tasks.prompts import prompts_of
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.templates import COLUMNS
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.distributed import raise_on_all_ranks
from marlhf_lite.training.environments import Dialogues
from marlhf_lite.training.objectives import make_objective
from marlhf_lite.training.rewards import EnvironmentReward, FunctionReward
from marlhf_lite.training.rollout import Sampler, Sampling, generate, longest_response, sampling_of
from marlhf_lite.training.safeguards import count_updates
from marlhf_lite.training.trackers import tracker_names
from marlhf_lite.training.trl_trainers import split_batch
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.libraries import ignore_warnings
from marlhf_lite.utils.run_folder import RunFolder, RunLock, check_output_dir, check_writable, is_run, run_of
from marlhf_lite.utils.user_code import import_user_code, named_errors

Options = TypeVar("Options", covariant=True)  # a class of `config.commands`
FEW_STEPS = 4  # fewer in an epoch get a note: presets for cards have large batches, for large data
# Not updated in config.yaml by --resume.
OF_THE_START = ("output_dir", "overwrite", "resume", "accept_changed", "from_checkpoint")


@dataclass(frozen=True)
class RunContext(Generic[Options]):
    """What the stages of a run share."""

    options: Options
    run: RunFolder
    task: Task
    tokenizer: object
    load: Callable[[], PreTrainedModel]  # returns the base model, the same one at every call
    inputs: Inputs = field(default_factory=Inputs)
    reward: FunctionReward | EnvironmentReward | None = None  # None: the reward model
    rules: Mapping[str, TerminationRule] = field(default_factory=dict)  # of each of the command's `methods`
    resume: bool = False  # whether stages that are there go on
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
        """At most `count` held-out prompts, each once, and how policies answer them."""
        prompts = prompts_of(self.task.held_out(count))
        sampler = generate_seeded if self.sampler is generate else self.sampler
        return HeldOutPrompts(prompts, self.tokenizer, self.sampling, self.options.seed, batch_size, sampler)


def print_main(text: str) -> None:
    """Print once, not once a process."""
    if PartialState().is_main_process:
        print(text)


def start_processes() -> None:
    """Join the other processes of `accelerate launch`, and silence bars and warnings of the libraries."""
    PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))  # the first one made decides about the device
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error of the command names the file
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    ignore_warnings()


def open_context(options: StageCommand, inputs: Inputs | None = None, lock: RunLock | None = None) -> RunContext:
    """Check all that can be checked before training, load tokenizer and base model, and make the run's folder.

    `inputs` are models of earlier stages, which the run must not overwrite; `lock` keeps other processes out of it,
    where it is given. An evaluation opens a run that exists, as with `--resume`, and loads the base model when it is
    first needed. Raises `InputError` for every fault of the options, the data or the model.
    """
    start_processes()
    inputs = inputs or Inputs()

    # 1. The folder. All processes take the main one's: the default name has the time in it, and clocks differ.
    path = Path(broadcast_object_list([options.output_dir])[0])
    resume = bool(options.resume) or (not options.stages and not options.overwrite and is_run(path))
    if resume:
        check_writable("--resume" if options.resume else "--output_dir", path)
    else:
        check_output_dir(path, options.overwrite, [*inputs.folders, options.dataset, options.model])
    if lock and is_run(path):
        _take(lock, path)
    model_path(options.model)

    # 2. Termination rules, trackers, and what contradicts itself.
    rules = {name: make_rule(method, options.seed) for name, method in options.methods.items()}
    for method in options.methods.values():
        make_objective(method)
    tracker_names(options.report_to)
    _check_finetune(options, inputs)

    # 3. The data, and the reward of texts.
    tokenizer, earlier = load_tokenizer(options.model), runs_of(inputs.folders)
    own = RunFolder.open(path) if resume and is_run(path) else None
    date = broadcast_object_list([date_of([own] if own else earlier)])[0]
    sampler = open_dialogues(options)
    task, notes = read_task(options, tokenizer, inputs, asked_columns(options, sampler), date)
    if not task.chats:
        options = replace(options, chat_template="none")  # what later commands take over
    reward = _open_reward(options, task)
    needs_pairs = _needs_pairs(options, inputs)
    task, more = fit_lengths(task, tokenizer, options, _answers_read(options, inputs), needs_pairs=needs_pairs)
    _check_training(options, inputs, task)
    check_reward_model(options, inputs.rm, tokenizer, task)

    # 4. The base model.
    load = functools.cache(lambda: load_base(options))
    if options.stages or not resume:
        load()
    contents = contents_of(options, inputs, tokenizer.chat_template, task)
    changed = check_resumed(own, contents, options.accept_changed or not options.stages) if own else []
    earlier = [] if own and options.stages else earlier  # its own manifest has them
    accepted = [x for run in earlier for x in check_earlier(run, options, contents, options.accept_changed)]
    if not options.stages:
        notes += [f"{x['what']} has other content than in {path}: answers are sampled again" for x in changed]
    manifest = {"date": date, "contents": contents, "accepted": [*accepted, *changed]}
    if options.stages or not resume:
        _check_model(options, inputs, load(), tokenizer, task, sampler)
    if options.vllm_urls:
        sampler = _open_servers(options, inputs, path, load, tokenizer, task)

    # 5. The folder is made when nothing can go wrong any more.
    if lock:
        _take(lock, path)
    folder = open_run(path, asdict(options), resume=resume, overwrite=options.overwrite, manifest=manifest)
    if PartialState().is_main_process:
        if options.stages:
            folder.update_config({"versions": folder.config["versions"] | ways(load(), options)})
        different = {"test_prompts": len(task.held_out(len(task.splits["test"])))}
        write_json(folder.path / "data.json", task.counts | different)
    _print_start(options, inputs, task)
    for note in (*notes, *more, *_notes(options, inputs, task, reward)):
        print_main(f"note: {note}")
    return RunContext(options, folder, task, tokenizer, load, inputs, reward, rules, resume, sampler, manifest)


def open_dialogues(options: StageCommand | GenerateCommand) -> Sampler:
    """Return the dialogues with what `--environment` names, or `generate` without one. Raises `InputError`."""
    if not (name := options.environment):
        return generate
    if getattr(options, "vllm_urls", ()):
        raise InputError("--environment: servers do not sample in turns: leave out --rollout_engine vllm")
    kind = import_user_code("environment", name, "the name of a class")
    with named_errors("environment", name):
        made = kind()
    for method in ("reset", "step"):
        if not callable(function := getattr(made, method, None)):
            raise InputError(f"--environment {name}: it has no {method}: see Your own environment in docs/guide.md")
        if inspect.iscoroutinefunction(function):
            raise InputError(f"--environment {name}: {method} is async, and nothing would await it: leave out async")
    return Dialogues(made, name, options.max_turns, options.max_observation_length)


def _open_reward(options: StageCommand, task: Task) -> FunctionReward | EnvironmentReward | None:
    """Return the reward that `--reward` names; None for a reward model, or where none is asked for."""
    if options.environment and options.reward in ("", "environment"):
        return EnvironmentReward(options.environment)
    function = text_reward(options.reward, task)
    return FunctionReward(function, options.reward) if function else None


def _take(lock: RunLock, path: Path) -> None:
    """Lock the run's folder by the main process. Raises `InputError` in all of them where another run has it."""
    refusal = ""
    if PartialState().is_main_process:
        try:
            lock.take(path)
        except InputError as error:
            refusal = str(error)
    if refusal := broadcast_object_list([refusal])[0]:
        raise InputError(refusal)


def _check_model(
    options: StageCommand, inputs: Inputs, base: PreTrainedModel, tokenizer, task: Task, sampler: Sampler
) -> None:
    """Raise `InputError` where the base cannot train with these options, or has too few positions for these texts."""
    if "sft" in options.stages and options.finetune == "lora":
        check_target_modules(base, options.lora_target_modules)
    if options.stages:
        check_trainable(base, options, inputs.sft, needs_head=bool({"rm", "ppo"} & set(options.stages)))
    limit, response = position_limit(base), longest_response(sampler, tokenizer, options.max_response_length)
    is_long = limit and options.max_prompt_length + response > limit
    if is_long or len(tokenizer) > base.get_input_embeddings().weight.shape[0]:
        prompts = [prompt for rows in task.splits.values() for prompt in set(rows["prompt"])]
        ids = encode_prompts(tokenizer, prompts)
        check_length(base, options.model, max(map(len, ids), default=0), response)
        columns = (rows[name] for rows in task.splits.values() for name in COLUMNS[1:] if name in rows.column_names)
        answers = encode_behind(tokenizer, [*{text for column in columns for text in column}])
        check_vocabulary(base, options.model, tokenizer, {token for row in (*ids, *answers) for token in row})


def _check_finetune(options: StageCommand, inputs: Inputs) -> None:
    """Raise `InputError` where `--finetune` does not go with the weights, or with how the processes were launched."""
    check_four_bits(options)
    if options.stages and options.finetune == "lora" and inputs.sft and is_full_model(inputs.sft):
        fix = f"give it as --model, and as --sft what `marlhf sft --model {inputs.sft}` makes; or add --finetune full"
        raise InputError(f"--sft {inputs.sft}: a whole model, and no adapter: {fix}")
    # All models share one frozen base, which FSDP would spread in those that train.
    if options.stages and options.finetune == "lora" and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        fix = "launch with DDP (accelerate launch --multi_gpu), or add --finetune full"
        raise InputError(f"--finetune lora: adapters do not train under FSDP: {fix}")
    if options.trains_policy and not options.methods and inputs.sft and is_sharded_folder(inputs.sft):
        fix = f"join it by marlhf export --finetune full --policy {inputs.sft} --output_dir NEW, and give --sft NEW"
        raise InputError(f"--sft {inputs.sft}: a checkpoint by shards, from which TRL makes no reference: {fix}")


def _answers_read(options: StageCommand, inputs: Inputs) -> dict[str, tuple[str, ...]]:
    """Return the columns of answers that the command's own stages read, by part of the data.

    A whole run trains a reward model where there are pairs, whatever its reward is.
    """
    sides = {}
    if "sft" in options.stages and not inputs.sft:
        sides["sft"] = ("chosen",)
    if _needs_pairs(options, inputs) or (len(options.stages) > 1 and not inputs.rm):
        sides["rm"] = ("chosen", "rejected")
    return sides


def _needs_pairs(options: StageCommand, inputs: Inputs) -> bool:
    return "dpo" in options.stages or ("rm" in options.stages and not inputs.rm)


def _open_servers(options: StageCommand, inputs: Inputs, path: Path, load: Callable, tokenizer, task: Task) -> Sampler:
    """Return the servers of `--rollout_engine vllm`, tried out if something is trained."""
    from marlhf_lite.extras.vllm.rollouts import VLLMEngine

    engine = VLLMEngine(options.vllm_urls, path)
    if options.methods:
        first = load_policy(load(), inputs.sft, trainable=False) if inputs.sft else new_policy(load(), options)
        prompts = list(task.splits["ppo"]["prompt"])
        if options.answers:
            prompts += task.held_out(options.eval_prompts)["prompt"]
        sampling = sampling_of(options, options.max_response_length)
        if options.finetune == "lora" or PartialState().is_main_process:  # one sends weights for all
            raise_on_all_ranks(engine.try_out, PolicyModel(first), tokenizer, prompts, sampling)
        else:
            raise_on_all_ranks(lambda: None)
    return engine


def _check_training(options: StageCommand, inputs: Inputs, task: Task) -> None:
    """Raise `InputError` for what vLLM cannot serve, batches that cannot be divided, and pairs that are missing."""
    state = PartialState()
    for method in options.methods.values():
        if options.vllm_urls and method.logprobs_at_temperature and method.temperature != 1:
            fix = "leave it out, or add --temperature 1"
            raise InputError(f"--logprobs_at_temperature: vLLM gives log-probabilities at temperature 1: {fix}")
        count_updates(method, len(task.splits["ppo"]), state)
    for flag in ("sft_batch_size", "rm_batch_size", "dpo_batch_size"):
        if size := getattr(options, flag, None):
            split_batch(size, options.per_device_train_batch_size, f"--{flag}")
    if {"rloo", "grpo"} & set(options.stages):
        from marlhf_lite.extras.baselines.rloo_grpo import check_groups

        check_groups(options, state.num_processes)
    if _needs_pairs(options, inputs) and not len(task.splits["rm"]):
        functions = "train PPO with --reward package.module:function"
        hint = f"{functions}, or tests" if task.tests else f"give a file with chosen and rejected, or {functions}"
        raise InputError(f"{task.name}: it has no preference pairs for a reward model or DPO: {hint}")
    if options.stages == ("sft",) and options.sft_epochs and not len(task.splits["sft"]):
        hint = (
            "give rows with prompt and completion, or messages, or pairs; --sft_epochs 0 takes the base model as it is"
        )
        raise InputError(f"{task.name}: it has prompts alone, and no answers for SFT to learn from: {hint}")


def _print_start(options: StageCommand, inputs: Inputs, task: Task) -> None:
    if taken := [name for name in ("sft", "rm", "policies") if getattr(inputs, name)]:
        print_main(f"as --{taken[0]} has it: --model {options.model}; data: --dataset {task.name}")
    reasons = [why for why, n in task.counts.items() if n and why not in ("read", "kept", *task.splits)]
    dropped = ", ".join(f"{task.counts[why]} {why.replace('_', ' ')}" for why in reasons)
    parts = ", ".join(f"{part} {len(rows)}" for part, rows in task.splits.items())
    shape = f" (read as {task.shape})" if task.shape else ""
    print_main(f"{task.name}{shape}: {parts}; dropped: {dropped or 'none'}")
    if task.chats:
        by = (
            "were written by a chat template"
            if options.chat_template == "templated"
            else "are written by the chat template"
        )
        print_main(f"prompts and answers {by}")


def _notes(options: StageCommand, inputs: Inputs, task: Task, reward: FunctionReward | None) -> Iterator[str]:
    """What is no fault, and may still not be what was meant."""
    if options.dataset != (read := EMBEDDED_MODELS.get(options.model, options.dataset)):
        yield f"{options.model} has read only {read}: on other data, scores mean little"
    for folder in inputs.folders:  # those of runs are checked before
        if not run_of(folder) and (base := other_base(folder, options.model)):
            yield f"{folder} was trained on {base}, and --model is {options.model}: are these the same weights?"
    if getattr(options, "termination", "").startswith("sentence"):
        yield from note_on_sentences(task)
    if not options.stages and reward and task.gold:
        source = "rewards of --environment" if isinstance(reward, EnvironmentReward) else "--reward"
        yield f"{source} {reward.name}: not used: {task.name} has a gold score, and the tables show that one"
    for stage, part in (("sft", "sft"), ("rm", "rm"), ("dpo", "rm")):
        batch, rows = getattr(options, f"{stage}_batch_size", None), len(task.splits[part])
        if batch and not getattr(inputs, stage, None) and 0 < (steps := math.ceil(rows / batch)) < FEW_STEPS:
            fix = "a smaller batch makes more steps"
            yield f"--{stage}_batch_size {batch}: {rows} rows are {steps} step{'s' * (steps > 1)} an epoch: {fix}"


def open_run(
    path: Path, config: dict, resume: bool = False, overwrite: bool = False, manifest: dict | None = None
) -> RunFolder:
    """Make a run's folder in the main process, or with `resume` open the one that exists.

    Options and manifest of a resumed run are updated with the present ones, if it is a run of the same command.
    """
    state = PartialState()
    state.wait_for_everyone()  # nobody looks for an existing run after somebody has made it
    if state.is_main_process and resume and is_run(path):
        run = RunFolder.open(path)
        if set(run.config) <= {"versions", *config}:
            earlier, manifest = run.manifest["accepted"], manifest or {}
            run.manifest |= manifest | {"accepted": earlier + manifest.get("accepted", [])}
            run.update_config({name: value for name, value in config.items() if name not in OF_THE_START})
    elif state.is_main_process and not (resume and path.exists()):
        # A stage that starts over, too.
        RunFolder.create(path, config | {"resume": "", "accept_changed": False}, overwrite, manifest)
    state.wait_for_everyone()
    return RunFolder.open(path)
