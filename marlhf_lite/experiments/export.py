"""Use a trained policy: answer a prompt, or save it as a separate model."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, set_seed

from marlhf_lite.config.commands import ExportCommand, GenerateCommand
from marlhf_lite.config.options import SamplingConfig
from marlhf_lite.experiments.context import join_processes, print_main
from marlhf_lite.experiments.manifest import check_earlier, date_of, model_contents, runs_of
from marlhf_lite.experiments.model_card import write_model_card
from marlhf_lite.experiments.other_tokenizers import check_tokenizer_beside
from marlhf_lite.experiments.samplers import open_dialogues
from marlhf_lite.models.adapters import is_full_model
from marlhf_lite.models.checks import check_length, check_merged_alike, logprobs_of_any_text
from marlhf_lite.models.door import read_config
from marlhf_lite.models.loading import load_base, load_policy
from marlhf_lite.models.merging import lost_share, merge_adapter, merged_weights, round_to
from marlhf_lite.models.positions import shared_rope_limit
from marlhf_lite.models.tied import LARGEST_LOSS
from marlhf_lite.models.tokenizers import load_tokenizer
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
    """Return a policy, its tokenizer, and what writes messages (None if the policy has learnt from plain texts).

    Raises `InputError` if base model, tokenizer or chat template differ from those that the policy was trained with. If
    the policy is in a run, they are compared with the run's manifest, else with the tokenizer beside the policy.
    """
    join_processes()
    config = replace(options, load_in_4bit=False)  # an adapter cannot be merged exactly into 4 bits
    tokenizer = load_tokenizer(config.model)
    base = load_base(config)
    runs = runs_of([folder])  # the run that the policy is in, or none
    if not runs:
        check_tokenizer_beside(folder, tokenizer, options.model, config.chat_template)
    policy = load_policy(base, folder, trainable=False)
    unfinished = note_if_unfinished(folder)
    if unfinished:
        print(f"note: {unfinished}", file=sys.stderr)  # standard output is for the answer
    writer = chat_writer(tokenizer, config.chat_template, date_of(runs))
    template = ""  # a policy of plain texts has no template to compare
    if writer:
        expect_chats(tokenizer)
        template = tokenizer.chat_template
    for run in runs:
        contents = model_contents(options, template)
        check_earlier(run, options, contents, options.accept_changed)
    return policy, tokenizer, writer


def answer_prompt(options: GenerateCommand, folder: Path, prompt: str) -> str:
    """Return a policy's answer to a prompt, which is a user's message if the policy has learnt from chats.

    With an environment the answer has one line per turn of policy and environment.
    """
    if not prompt.strip():
        raise InputError("--prompt: empty: give a text, or write it to the standard input")
    model, tokenizer, writer = open_policy(options, folder)
    if writer:
        prompt = write_turns(prompt, writer)

    # 1. Does the prompt fit, and a response after it?
    (ids,) = encode_prompts(tokenizer, [prompt])
    limit = options.max_prompt_length
    if len(ids) > limit:
        what = f"{len(ids)} tokens, more than --max_prompt_length {limit}"
        raise InputError(f"--prompt: {what}: shorten it, or raise that")
    sampler = open_dialogues(options)
    # If the limit comes from a RoPE whose angles all texts of a batch share, a single text may be longer.
    if shared_rope_limit(model) is None:
        response_tokens = longest_response(sampler, tokenizer, options.max_response_length)
        check_length(model, options.model, len(ids), response_tokens)

    # 2. Sample.
    set_seed(options.seed)
    sampling = sampling_of(options, options.max_response_length)
    with merged_adapter(model):
        rollout = sampler(model, tokenizer, [prompt], sampling)
    if rollout.turns:
        return _in_lines(rollout.turns[0])
    return rollout.responses[0].strip()


def _in_lines(turns: list[dict]) -> str:
    """Return one line per turn of policy and environment, and the sum of the rewards."""
    lines = []
    for turn in turns:
        lines.append(f"> {turn['response'].strip()}")
        observation = turn.get("observation", "").strip()
        if "observation_cut" in turn:
            observation += f" [... {turn['observation_cut']} more tokens were cut]"
        if observation:  # the last turn has none
            lines.append(observation)
    rewards = sum(turn["reward"] for turn in turns)
    lines.append(f"reward: {rewards:g}")
    return "\n".join(lines)


def _sampling_of(config: Mapping) -> dict:
    """Return the arguments of `generate` with which a run of these options sampled; empty if it did not sample."""
    if "temperature" not in config:  # SFT, for one, has no such option
        return {}
    # An option that an older run has not stored, because it is newer, had its default.
    stored = {name: config[name] for name in vars(SamplingConfig()) if name in config}
    options = SamplingConfig(**stored)
    return sampling_of(options, config["max_response_length"]).arguments()


def export_policy(options: ExportCommand, folder: Path, output: Path) -> None:
    """Save a policy and its tokenizer as a model that transformers loads.

    Its `generate` samples and stops as the run did, and its tokenizer writes chats as the run did. Raises `InputError`
    for weights that are not finite, and for a format that would round the policy's change away.
    """
    # 1. Load it in the number format in which it is saved, so that nothing is rounded before it is merged.
    saved_format = None  # an adapter is merged into its base, so the format is that of the base
    if is_full_model(folder):
        saved_format = read_config(str(folder), folder).dtype
    format_to_load = "auto" if saved_format is None else _name(saved_format)
    policy, tokenizer, _ = open_policy(replace(options, dtype=format_to_load), folder)
    runs = runs_of([folder])  # the run that the policy is in, or none
    options_of_run = runs[0].config if runs else {}

    # 2. Merge and round it.
    dtype, line = _choose_format(options, policy, options_of_run.get("dtype", ""))
    if isinstance(policy, PeftModel):
        before = logprobs_of_any_text(policy)
        format_before = policy.dtype
        model = merge_adapter(policy, dtype)
        check_merged_alike(before, format_before, model)
    else:  # a whole model
        model = round_to(policy, dtype)
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        what = f"weights that {_name(dtype)} does not hold, or NaN"
        raise InputError(f"--model {options.model}: {what}: give --dtype float32")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=end_of_text(model, tokenizer),
        **_sampling_of(options_of_run),
    )

    # 3. Save it.
    # The name of the stage's folder is the method for the card.
    stage = folder.parent if folder.name == "policy" else folder
    with atomic_folder(output) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        write_model_card(part, stage.name.upper(), {"model": options.model, **options_of_run})
        check_output_dir(output)  # once more: meanwhile another export may have written there
    print_main(line)
    print_main(f"model: {output}")


def _choose_format(
    options: ExportCommand, policy: PreTrainedModel | PeftModel, format_of_run: str
) -> tuple[torch.dtype, str]:
    """Return the number format to write, and a line about what it loses.

    It is that of `--dtype`, or with `auto` the policy's own. If that format would round away too much of what the
    policy has learnt, there are two cases. Somebody chose the format: `InputError`. Nobody did, because `--dtype` is
    `auto` or was taken over from the run (`format_of_run`, as "bfloat16"; "" without a run): it is float32.
    """
    asked = policy.dtype if options.dtype == "auto" else getattr(torch, options.dtype)

    # 1. How much of the change is lost. A whole model in its own format is not rounded again.
    is_rounded = isinstance(policy, PeftModel) or asked != policy.dtype
    if not is_rounded:
        return asked, f"number format: {_name(asked)}"
    if isinstance(policy, PeftModel):
        changes = merged_weights(policy)
    else:
        changes = _weights_before_and_after(options, policy)
    lost = lost_share(changes, asked)

    # 2. The format.
    if lost <= LARGEST_LOSS:
        line = f"number format: {_name(asked)}, which loses {lost:.2f} of the policy's change"
        return asked, line
    if options.dtype not in ("auto", format_of_run):
        fix = "give --dtype float32, or load the adapter beside its base"
        raise InputError(
            f"--dtype {options.dtype}: it would lose {lost:.2f} of the policy's change: {fix}"
        )
    why = f"{_name(asked)} would lose {lost:.2f} of the policy's change"
    return torch.float32, f"number format: float32, since {why}"


def _weights_before_and_after(
    options: ExportCommand, policy: PreTrainedModel
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each weight of the base model with that of a whole model that was trained from it."""
    # As it is saved, and with its weights: for `--finetune full` an empty model would be loaded.
    as_saved = replace(options, finetune="lora", load_in_4bit=False, dtype="auto")
    start = load_base(as_saved).state_dict()
    for name, weight in policy.state_dict().items():
        if name in start:
            yield start[name], weight


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
