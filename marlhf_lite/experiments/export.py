"""Use a trained policy: answer a prompt, or save it as a separate model."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, set_seed

from marlhf_lite.config.commands import ExportCommand, GenerateCommand
from marlhf_lite.config.options import SamplingConfig
from marlhf_lite.experiments.context import print_main, start_processes
from marlhf_lite.experiments.manifest import check_earlier, date_of, model_contents, runs_of
from marlhf_lite.experiments.model_card import write_model_card
from marlhf_lite.experiments.other_tokenizers import check_tokenizer_beside
from marlhf_lite.experiments.samplers import open_dialogues
from marlhf_lite.models.adapters import is_full_model
from marlhf_lite.models.checks import check_length
from marlhf_lite.models.door import read_config
from marlhf_lite.models.loading import load_base, load_policy, load_tokenizer
from marlhf_lite.models.merging import lost_share, merge_adapter, merged_weights, round_to
from marlhf_lite.models.positions import shared_rope_limit
from marlhf_lite.models.tied import LARGEST_LOSS
from marlhf_lite.tasks.chats import Chat, chat_writer, expect_chats
from marlhf_lite.tasks.shapes import write_turns
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import end_of_text, longest_response, merged_adapter, sampling_of
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.progress import note_if_unfinished
from marlhf_lite.utils.run_folder import check_output_dir
from marlhf_lite.utils.seals import atomic_folder


def open_policy(
    options: GenerateCommand | ExportCommand, folder: Path
) -> tuple[PreTrainedModel | PeftModel, object, Chat | None]:
    """Return a policy, its tokenizer, and what writes messages (None if the policy has learnt from plain texts)."""
    start_processes()
    config = replace(options, load_in_4bit=False)  # 4-bit weights cannot take up an adapter exactly
    tokenizer, base = load_tokenizer(config.model), load_base(config)
    runs = runs_of([folder])
    if not runs:
        check_tokenizer_beside(folder, tokenizer, options.model, config.chat_template)
    policy = load_policy(base, folder, trainable=False)
    unfinished = note_if_unfinished(folder)
    if unfinished:
        print(f"note: {unfinished}", file=sys.stderr)  # beside an answer, which may go to a file
    if write := chat_writer(tokenizer, config.chat_template, date_of(runs)):
        expect_chats(tokenizer)
    for run in runs:
        contents = model_contents(options, tokenizer.chat_template if write else "")
        check_earlier(run, options, contents, options.accept_changed)
    return policy, tokenizer, write


def answer_prompt(options: GenerateCommand, folder: Path, prompt: str) -> str:
    """Return a policy's answer to a prompt, which is a user's message if the policy has learnt from chats.

    With an environment the answer has one line per turn of policy and environment.
    """
    if not prompt.strip():
        raise InputError("--prompt: empty: give a text, or write it to the standard input")
    model, tokenizer, write = open_policy(options, folder)
    if write:
        prompt = write_turns(prompt, write)
    tokens, limit = len(encode_prompts(tokenizer, [prompt])[0]), options.max_prompt_length
    if tokens > limit:
        raise InputError(
            f"--prompt: {tokens} tokens, more than --max_prompt_length {limit}: shorten it, or raise that"
        )
    sampler = open_dialogues(options)
    if not shared_rope_limit(model):  # a batch of one text
        check_length(
            model,
            options.model,
            tokens,
            longest_response(sampler, tokenizer, options.max_response_length),
        )
    set_seed(options.seed)
    with merged_adapter(model):
        rollout = sampler(
            model, tokenizer, [prompt], sampling_of(options, options.max_response_length)
        )
    return _in_lines(rollout.turns[0]) if rollout.turns else rollout.responses[0].strip()


def _in_lines(turns: list[dict]) -> str:
    """Return one line per turn of policy and environment, and the sum of the rewards."""
    lines = []
    for turn in turns:
        cut = (
            f" [... {turn['observation_cut']} more tokens were cut]"
            if "observation_cut" in turn
            else ""
        )
        lines += [f"> {turn['response'].strip()}", turn.get("observation", "").strip() + cut]
    return "\n".join([*filter(None, lines), f"reward: {sum(turn['reward'] for turn in turns):g}"])


def _sampling_of(config: Mapping) -> dict:
    """Return the arguments of `generate` with which a run of these options sampled; empty if it never sampled."""
    if "temperature" not in config:
        return {}
    options = SamplingConfig(
        **{name: config[name] for name in vars(SamplingConfig()) if name in config}
    )
    return sampling_of(options, config["max_response_length"]).arguments()


def export_policy(options: ExportCommand, folder: Path, output: Path) -> None:
    """Save a policy and its tokenizer as a model that transformers loads.

    Its `generate` samples and stops as the run did, and its tokenizer writes chats as the run did. Raises `InputError`
    for weights that are not finite, and for a format that would round the policy's change away.
    """
    # In the format in which it is saved: nothing is rounded before it is merged.
    saved = read_config(str(folder), folder).dtype if is_full_model(folder) else None
    in_saved_format = replace(options, dtype="auto")
    if saved is not None:
        in_saved_format = replace(options, dtype=_name(saved))
    policy, tokenizer, _ = open_policy(in_saved_format, folder)
    run = next(iter(runs_of([folder])), None)
    config = run.config if run else {}
    dtype, line = _choose_format(options, policy, config.get("dtype", ""))
    model = (
        merge_adapter(policy, dtype) if isinstance(policy, PeftModel) else round_to(policy, dtype)
    )
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        what = f"weights that {_name(dtype)} does not hold, or NaN"
        raise InputError(f"--model {options.model}: {what}: give --dtype float32")
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    ids["eos_token_id"] = end_of_text(model, tokenizer)
    model.generation_config = GenerationConfig(**ids, **_sampling_of(config))
    with atomic_folder(output) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        stage = folder.parent if folder.name == "policy" else folder
        write_model_card(part, stage.name.upper(), {"model": options.model, **config})
        check_output_dir(output)  # another export may have ended first
    print_main(line)
    print_main(f"model: {output}")


def _choose_format(
    options: ExportCommand, policy: PreTrainedModel | PeftModel, of_run: str
) -> tuple[torch.dtype, str]:
    """Return the number format to write, and a line about what it loses; `of_run` is the format of the policy's run.

    If that one is too coarse for what the policy has learnt, the format is float32. Raises `InputError` if another
    format was asked for that is too coarse.
    """
    asked = policy.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    if isinstance(policy, PeftModel):
        changes = merged_weights(policy)
    elif asked != policy.dtype:  # weights of a whole model are rounded here alone
        start = load_base(
            replace(options, finetune="lora", load_in_4bit=False, dtype="auto")
        ).state_dict()
        changes = (
            (start[name], weight) for name, weight in policy.state_dict().items() if name in start
        )
    else:
        return asked, f"number format: {_name(asked)}"
    lost = lost_share(changes, asked)
    if lost <= LARGEST_LOSS:
        return (
            asked,
            f"number format: {_name(asked)}, which loses {lost:.2f} of the policy's change",
        )
    if options.dtype not in ("auto", of_run):
        fix = "give --dtype float32, or load the adapter beside its base"
        raise InputError(
            f"--dtype {options.dtype}: it would lose {lost:.2f} of the policy's change: {fix}"
        )
    return (
        torch.float32,
        f"number format: float32, since {_name(asked)} would lose {lost:.2f} of the policy's change",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
