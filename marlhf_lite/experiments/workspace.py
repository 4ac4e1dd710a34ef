"""What every stage shares, opened once: the run's folder, the data, the tokenizer and the base model."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import datasets
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from marlhf_lite.config.parser import flatten
from marlhf_lite.models.loading import EMBEDDED_MODEL, load_base, load_tokenizer, model_path
from marlhf_lite.tasks.loading import drop_long_prompts, load_task
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tiny_tldr.corpus import EMBEDDED
from marlhf_lite.training.logging import tracker_names
from marlhf_lite.training.rewards import text_reward
from marlhf_lite.training.rollout import Sampling
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import RunFolder, check_output_dir, is_run

ONCE = ("output_dir", "overwrite", "resume", "from_checkpoint")  # options that are not asked of the run when it goes on


@dataclass(frozen=True)
class RunContext:
    """What every stage shares."""

    options: SimpleNamespace
    run: RunFolder
    task: Task
    tokenizer: object
    load: Callable[[], PreTrainedModel]  # the base model, always the same one

    @property
    def base(self) -> PreTrainedModel:
        return self.load()

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return PartialState().is_main_process

    @property
    def limit(self) -> int:
        return self.options.data.max_response_length

    @property
    def sampling(self) -> Sampling:
        values = flatten(self.options)
        return Sampling(self.limit, values["temperature"], values["top_k"], values["top_p"])

    @property
    def test_prompts(self) -> list[str]:
        different = dict.fromkeys(self.task.splits["test"]["prompt"])  # TL;DR compares many summaries of a post
        return list(different)[: self.options.eval.eval_prompts]


def say(text: str, end: str = "\n") -> None:
    """Print, once over all processes."""
    if PartialState().is_main_process:
        print(text, end=end)


def open_context(options: SimpleNamespace, inputs: Sequence[Path] = (), exist_ok: bool = False) -> RunContext:
    """Check everything that can be checked without a model, then load tokenizer and base, then make the run's folder.

    `inputs` are folders of earlier stages, which the run must not overwrite. `exist_ok`: a run that is there already
    is opened and added to, as with `--resume`, and the base is loaded when it is first needed.
    """
    data = options.data
    _agree_on_folder(options)
    if exist_ok and not options.run.overwrite and is_run(Path(options.run.output_dir)):
        options.run.resume = options.run.output_dir
    if not options.run.resume:
        folder = Path(options.run.output_dir)
        check_output_dir(folder, options.run.overwrite, [*inputs, data.dataset, options.model.model])
    if options.model.finetune == "full" and options.model.load_in_4bit:
        raise InputError("--load_in_4bit: frozen 4-bit weights cannot train: use --finetune lora")
    if hasattr(options, "logging"):
        tracker_names(options.logging.report_to)
    model_path(options.model.model)
    task = load_task(
        data.dataset, size=data.size, seed=data.split_seed, bad_rows=data.bad_rows, streaming=data.dataset_streaming
    )
    if hasattr(options, "reward"):  # a command that trains against a reward
        text_reward(options.reward.reward, task)
    tokenizer = load_tokenizer(options.model.model)
    task, dropped = _drop_long(task, tokenizer, data.max_prompt_length)
    load = functools.cache(lambda: load_base(options.model))
    if not (exist_ok and options.run.resume):  # what is evaluated again may need no model
        load()
    if hasattr(options, "sft") and options.model.finetune == "lora":  # a command that makes adapters
        check_targets(load(), options.model.lora_target_modules)
    run = open_run(Path(options.run.output_dir), options)
    if PartialState().is_main_process:
        write_json(run.path / "data.json", task.counts | {"long_prompts": dropped})
    say(f"{task.name}: " + ", ".join(f"{part} {len(rows)}" for part, rows in task.splits.items()), end="")
    say(f"; dropped: {dropped} long prompts" + "".join(f", {v} {k}" for k, v in _dropped(task).items()))
    if options.model.model == EMBEDDED_MODEL and data.dataset not in EMBEDDED:
        say(f"note: {EMBEDDED_MODEL} has read {', '.join(EMBEDDED)} alone: on other data, scores mean little")
    return RunContext(options, run, task, tokenizer, load)


def _agree_on_folder(options: SimpleNamespace) -> None:
    """Every process writes into the run that the first one names: clocks differ."""
    if PartialState().num_processes > 1:
        options.run.output_dir = broadcast_object_list([options.run.output_dir])[0]


def open_run(path: Path, options: SimpleNamespace) -> RunFolder:
    """The run's folder: a new one, made by the main process, or with `--resume` the one that is there.

    Its config then says what the run is asked for now, such as more updates, if it is a run of the same command.
    """
    state = PartialState()
    state.wait_for_everyone()  # nobody looks for an existing run after somebody has made it
    if state.is_main_process and options.run.resume and is_run(path):
        run, now = RunFolder.open(path), flatten(options)
        if set(run.config) <= {"environment", *now}:
            run.update_config({name: value for name, value in now.items() if name not in ONCE})
    elif state.is_main_process and not (options.run.resume and path.exists()):
        RunFolder.create(path, flatten(options), overwrite=options.run.overwrite)
    state.wait_for_everyone()
    return RunFolder.open(path)


def check_targets(base: PreTrainedModel, targets: str) -> None:
    """Raises `InputError` where `--lora_target_modules` names no layer of the base."""
    try:
        found = targets == "all-linear" or any(re.fullmatch(targets, name) for name, _ in base.named_modules() if name)
    except re.error:
        found = False
    if not found:
        mend = "give all-linear, or a regular expression for whole names such as .*q_proj"
        raise InputError(f"--lora_target_modules {targets}: matches no layer: {mend}")


def _drop_long(task: Task, tokenizer, limit: int) -> tuple[Task, int]:
    kept, dropped = {}, 0
    for part, rows in task.splits.items():
        kept[part], gone = drop_long_prompts(rows, tokenizer, limit)
        dropped += gone
    counts = task.counts | {part: len(rows) for part, rows in kept.items()}
    return replace(task, splits=datasets.DatasetDict(kept), counts=counts), dropped


def _dropped(task: Task) -> dict[str, int]:
    """Why rows were dropped while reading, without the counts of what was kept."""
    return {k: v for k, v in task.counts.items() if v and k not in ("read", "kept", *task.splits)}
