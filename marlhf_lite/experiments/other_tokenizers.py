"""Reward models from elsewhere: one with another tokenizer scores texts, by its own tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from marlhf_lite.config.commands import StageCommand
from marlhf_lite.experiments.inputs import Inputs
from marlhf_lite.models.adapters import is_full_model
from marlhf_lite.models.door import has_tokenizer, read_config, read_tokenizer
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.models.score_heads import check_gives_one_score
from marlhf_lite.tasks.answers import encode_continuation
from marlhf_lite.tasks.chat_templates import render
from marlhf_lite.tasks.chats import ANSWER, Chat, end_of_turn, expect_chats
from marlhf_lite.tasks.shapes import write_turns
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import Rollout, from_tokens
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import run_of
from marlhf_lite.utils.seals import SEAL
from marlhf_lite.utils.user_code import named_errors


class TextReader:
    """Reads rollouts again as texts by another tokenizer; `limit` is the number of the model's positions.

    `source_of_prompt` is that of `Task`: what the data have for each prompt that the policy's chat template wrote.
    """

    def __init__(
        self,
        tokenizer,
        source_of_prompt: Mapping[str, str | list[dict]],
        limit: int | None = None,
    ):
        self.tokenizer = tokenizer
        self.source_of_prompt = source_of_prompt
        self.limit = limit
        has_chats = bool(source_of_prompt and tokenizer.chat_template)
        self.chat = Chat(tokenizer, "auto") if has_chats else None
        # What the template writes after the end token, such as a line break: the classifier was trained to give its
        # score at the last token of the template's text.
        self.after_end: list[int] = []
        if self.chat:
            expect_chats(tokenizer)
            self.after_end = tokenizer(text_after_end(tokenizer), add_special_tokens=False)[
                "input_ids"
            ]

    def prompts(self, prompts: Sequence[str]) -> list[str]:
        """Return the prompts as this tokenizer's template writes them; without one, messages become transcripts."""
        read = []
        for prompt in prompts:
            if prompt in self.source_of_prompt:
                prompt = write_turns(self.source_of_prompt[prompt], self.chat or "paper")
            read.append(prompt)
        return read

    def __call__(self, rollout: Rollout) -> Rollout:
        """Return the same texts in other tokens; an answer that has ended also ends by this tokenizer's end token.

        Raises `InputError` for a text of too many tokens.
        """
        end = self.tokenizer.eos_token_id
        closing = [end, *self.after_end]
        rows = []
        encoded = encode_continuation(self.tokenizer, rollout.responses)
        for ids, has_ended in zip(encoded, rollout.ended.tolist(), strict=True):
            if has_ended:
                ids = [*ids, *closing]
            elif not ids:  # a score needs a token
                ids = [end]
            rows.append(ids)
        prompts = self.prompts(rollout.prompts)
        read = from_tokens(self.tokenizer, prompts, rows, ends=[end, closing[-1]])
        self.check_length(
            int(read.attention_mask.sum(1).max()), "lower --max_response_length, then resume"
        )
        return read.to(rollout.tokens.device)

    def check_length(self, tokens: int, fix: str) -> None:
        """Raise `InputError` if a text has more tokens than the reward model has positions."""
        if self.limit and tokens > self.limit:
            raise InputError(
                f"--rm: a text of {tokens} of its tokens, more than its {self.limit} positions: {fix}"
            )


def text_after_end(tokenizer) -> str:
    """Return what the chat template writes after the token that ends an answer."""
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}
    text = render(tokenizer, [question, answer], tokenizer.chat_template)
    return text.rpartition(ANSWER)[2].partition(end_of_turn(tokenizer))[2]


def reader_of(rm: Path | None, tokenizer, task: Task) -> TextReader | None:
    """Return what reads texts for a reward model; None if the model reads the policy's tokens.

    An adapter does, since its base is the policy's, and so does a model without a tokenizer.
    """
    if rm is None or not is_full_model(rm) or not has_tokenizer(rm):
        return None
    own, texts = load_tokenizer(str(rm)), list(task.splits["test"]["prompt"])
    # A reward model that was trained here gives its score at the end token, one from elsewhere at the last token of its
    # template's text.
    is_of_a_run = run_of(rm) or (rm / SEAL).is_file()
    writes_chats = bool(task.source_of_prompt and own.chat_template)
    reads_on = writes_chats and not is_of_a_run and bool(text_after_end(own))
    same_template = (
        not task.source_of_prompt or is_of_a_run or own.chat_template == tokenizer.chat_template
    )
    if same_template and not reads_on and own.get_vocab() == tokenizer.get_vocab():
        plain = {"add_special_tokens": False, "split_special_tokens": True}
        if own(texts, **plain)["input_ids"] == tokenizer(texts, **plain)["input_ids"]:
            return None
    config = read_config(f"--rm {rm}", rm).get_text_config()
    return TextReader(own, task.source_of_prompt, getattr(config, "max_position_embeddings", None))


def check_tokenizers(options: StageCommand, inputs: Inputs, tokenizer) -> None:
    """Raise `InputError` if a model was trained with another tokenizer, which is beside it, than `--model` has.

    The manifest compares models of earlier runs. A whole reward model reads texts by its own tokenizer.
    """
    for folder in inputs.folders:
        reads_texts = folder == inputs.rm and is_full_model(folder)
        if not reads_texts and not run_of(folder):
            check_tokenizer_beside(folder, tokenizer, options.model, options.chat_template)


def check_tokenizer_beside(folder: Path, tokenizer, model: str, chat_template: str) -> None:
    """Raise `InputError` if the tokenizer in a model's folder differs from that of `--model` in what it learnt.

    That is the chat template, unless `--chat_template` chooses one; the end token; and the meaning of token ids. Tokens
    that were only added, such as one for padding, change nothing.
    """
    if not has_tokenizer(folder):
        return
    own = read_tokenizer(str(folder), folder)
    ids = tokenizer.get_vocab()
    moved = [token for token, i in own.get_vocab().items() if ids.get(token, i) != i]
    delete_it = f"delete the tokenizer's files in {folder} to use that of --model"
    if moved:
        what = f"its tokenizer numbers tokens otherwise than that of --model {model}, such as {moved[0]}"
        raise InputError(f"{folder}: {what}: give the model it was trained on, or {delete_it}")
    is_chosen = chat_template not in ("auto", "text")
    if own.chat_template and not is_chosen and own.chat_template != tokenizer.chat_template:
        file = folder / "chat_template.jinja"
        fix = f"give --chat_template {file}"
        if not file.is_file():
            fix = f"write the chat_template of its tokenizer_config.json to a file, and {fix}"
        raise InputError(
            f"{folder}: its tokenizer has another chat template than --model {model}: {fix}, or none for plain text"
        )
    ends = {tokenizer.eos_token}
    if tokenizer.chat_template:
        ends.add(end_of_turn(tokenizer))
    if not own.chat_template and own.eos_token is not None and own.eos_token not in ends:
        what = f"its tokenizer ends texts by {own.eos_token}, that of --model {model} by {tokenizer.eos_token}"
        fix = "save its tokenizer in a copy of the model's folder, and give that as --model"
        raise InputError(f"{folder}: {what}: {fix}, or {delete_it}")


def check_reward_model(options: StageCommand, inputs: Inputs, tokenizer, task: Task) -> list[str]:
    """Raise `InputError` for a reward model from elsewhere that cannot score these texts; return notes on it."""
    if (rm := inputs.rm) is None or not is_full_model(rm):
        return []
    config, read = read_config(f"--rm {rm}", rm), reader_of(rm, tokenizer, task)
    check_gives_one_score(f"--rm {rm}", config)
    used, known = len(read.tokenizer if read else tokenizer), config.get_text_config().vocab_size
    if used > known:
        fix = (
            "give the tokenizer that it was trained with"
            if read
            else "save its own tokenizer there"
        )
        raise InputError(
            f"--rm {rm}: it has {known} tokens, and its texts have up to {used}: {fix}"
        )
    starts_critic = any(method.critic_init == "rm" for method in options.methods.values())
    if starts_critic and (read or options.finetune == "lora"):
        why = (
            "it has another tokenizer"
            if read
            else "it is a whole model, and --finetune lora trains adapters"
        )
        raise InputError(
            f"--rm {rm}: the critic cannot start from it ({why}): add --critic_init sft"
        )
    if read:
        with named_errors("rm", str(rm)):
            prompts = read.prompts(
                [text for part in ("ppo", "test") for text in task.splits[part]["prompt"]]
            )
        longest = (
            max(map(len, encode_prompts(read.tokenizer, prompts)), default=0)
            + options.max_response_length
        )
        read.check_length(longest, "lower --max_prompt_length or --max_response_length")
    if read:
        return [f"--rm {rm}: it scores texts, by its own tokenizer and chat template"]
    return []
