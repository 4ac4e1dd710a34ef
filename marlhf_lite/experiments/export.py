"""Use of a trained policy: answer a prompt, or save it as a model of its own."""

import shutil
from dataclasses import replace
from pathlib import Path

from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, set_seed

from marlhf_lite.config.commands import ExportCommand, GenerateCommand
from marlhf_lite.config.options import SamplingConfig
from marlhf_lite.experiments.context import open_dialogues, print_main, start_processes
from marlhf_lite.models.checks import check_length
from marlhf_lite.models.loading import load_base, load_policy, load_tokenizer
from marlhf_lite.models.merging import merge_adapter
from marlhf_lite.models.untied import save_untied
from marlhf_lite.tasks.chats import Chat, chat_writer, expect_chats
from marlhf_lite.tasks.shapes import write_text
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import end_of_text, longest_response, sampling_of
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import share_weights
from marlhf_lite.utils.run_folder import RunFolder, run_of


def merged_policy(
    options: GenerateCommand | ExportCommand, folder: Path | None
) -> tuple[PreTrainedModel, object, Chat | None]:
    """Load a policy, without a folder the base, and merge its adapter into the base weights.

    Return the model, its tokenizer, and what writes messages where the policy has learnt from chats.
    """
    start_processes()
    config = replace(options, load_in_4bit=False)  # 4-bit weights cannot take up an adapter exactly
    tokenizer, base = load_tokenizer(config.model), load_base(config)
    policy = load_policy(base, folder, trainable=False) if folder else base
    if write := chat_writer(tokenizer, config.chat_template):
        expect_chats(tokenizer)
    return (merge_adapter(policy) if isinstance(policy, PeftModel) else policy), tokenizer, write


def answer_prompt(options: GenerateCommand, folder: Path, prompt: str) -> str:
    """Return a policy's answer to a prompt, which is a user's message where the policy has learnt from chats.

    With an environment the answer has a line for each turn of policy and environment.
    """
    if not prompt.strip():
        raise InputError("--prompt: empty: give a text, or write it to the standard input")
    model, tokenizer, write = merged_policy(options, folder)
    if write:
        prompt = write_text(prompt, write)
    tokens, limit = len(encode_prompts(tokenizer, [prompt])[0]), options.max_prompt_length
    if tokens > limit:
        raise InputError(f"--prompt: {tokens} tokens, more than --max_prompt_length {limit}: shorten it, or raise that")
    sampler = open_dialogues(options)
    check_length(model, options.model, tokens, longest_response(sampler, tokenizer, options.max_response_length))
    set_seed(options.seed)
    rollout = sampler(model, tokenizer, [prompt], sampling_of(options, options.max_response_length))
    return _in_lines(rollout.turns[0]) if rollout.turns else rollout.responses[0].strip()


def _in_lines(turns: list[dict]) -> str:
    """Return a line for each turn of policy and environment, and the sum of the rewards."""
    lines = []
    for turn in turns:
        cut = f" [... {turn['observation_cut']} more tokens were cut]" if "observation_cut" in turn else ""
        lines += [f"> {turn['response'].strip()}", turn.get("observation", "").strip() + cut]
    return "\n".join([*filter(None, lines), f"reward: {sum(turn['reward'] for turn in turns):g}"])


def _sampling_of(folder: Path) -> dict:
    """Arguments of `generate` by which the run of a policy sampled; none where it is in no run that sampled."""
    run = run_of(folder)
    config = RunFolder.open(run).config if run else {}
    if "temperature" not in config:
        return {}
    options = SamplingConfig(**{name: config[name] for name in vars(SamplingConfig()) if name in config})
    return sampling_of(options, config["max_response_length"]).arguments()


def export_policy(options: ExportCommand, folder: Path | None, output: Path) -> None:
    """Save a policy (without a folder: the base) and its tokenizer as a model that transformers loads.

    It is pushed to the hub if asked. Its `generate` samples and stops as the run did, and its tokenizer writes chats
    as the run did.
    """
    model, tokenizer, _ = merged_policy(options, folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    ids["eos_token_id"] = end_of_text(model, tokenizer)
    model.generation_config = GenerationConfig(**ids, **(_sampling_of(folder) if folder else {}))
    try:
        if options.untied:
            save_untied(model, output, model.state_dict())
        else:
            model.save_pretrained(output)
            share_weights(output)
        tokenizer.save_pretrained(output)
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)  # it was empty
        raise
    print_main(f"model: {output}")
    if name := options.push_to_hub:
        try:
            for part in (model, tokenizer):
                part.push_to_hub(name)
        except Exception as error:  # no network, no login, no right: the hub has many classes of errors
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"--push_to_hub {name}: failed ({reason}): log in with `hf auth login`") from None
        print_main(f"pushed to: https://huggingface.co/{name}")
