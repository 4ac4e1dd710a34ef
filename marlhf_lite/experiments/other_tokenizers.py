"""Reward models from elsewhere: one with another tokenizer scores texts, by its own tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from marlhf_lite.config.commands import StageCommand
from marlhf_lite.experiments.inputs import Inputs
from marlhf_lite.models.adapters import is_full_model
from marlhf_lite.models.door import read_config
from marlhf_lite.models.score_heads import check_gives_one_score
from marlhf_lite.models.tokenizers import (
    has_tokenizer,
    load_tokenizer,
    read_template_and_end,
    read_tokenizer,
)
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

# What two tokenizers read to see whether they cut texts alike: words, numbers, white space, capitals, an accent.
SAMPLE_TEXT = "In 2024,  naïve Tokenizers\n\n(say 'why?') cut 12345 words:\tdon't they?"


class TextReader:
    """Turns a rollout into one with the same texts in the tokens of another tokenizer: that of a reward model.

    `source_of_prompt` is that of `Task`: for each prompt that a chat template has written, what the data have. `limit`
    is how many positions the reward model has; None if it has no limit.
    """

    def __init__(
        self, tokenizer, source_of_prompt: Mapping[str, str | list[dict]], limit: int | None = None
    ):
        self.tokenizer = tokenizer
        self.source_of_prompt = source_of_prompt
        self.limit = limit
        # Writes messages by this tokenizer's template. It stays None if the data have no messages, or if the tokenizer
        # has no template.
        self.chat: Chat | None = None
        if source_of_prompt and tokenizer.chat_template:
            self.chat = Chat(tokenizer, "auto")
        # What the template writes after the end token, such as a line break: the classifier was trained to give its
        # score at the last token of the template's text.
        self.after_end: list[int] = []
        if self.chat:
            expect_chats(tokenizer)
            self.after_end = tokenizer(text_after_end(tokenizer), add_special_tokens=False)[
                "input_ids"
            ]

    def prompts(self, prompts: Sequence[str]) -> list[str]:
        """Return the prompts as this tokenizer's template writes them; without a template, messages become transcripts.

        Prompts that the policy's template has not written stay as they are.
        """
        writer = self.chat or "paper"  # "paper": transcripts of Human: and Assistant:
        texts = []
        for prompt in prompts:
            if prompt in self.source_of_prompt:
                texts.append(write_turns(self.source_of_prompt[prompt], writer))
            else:
                texts.append(prompt)
        return texts

    def __call__(self, rollout: Rollout) -> Rollout:
        """Return a rollout of the same texts; an answer that has ended gets this tokenizer's end token.

        Raises `InputError` for a text of too many tokens.
        """
        end = self.tokenizer.eos_token_id
        closing = [end, *self.after_end]
        rows = []
        encoded = encode_continuation(self.tokenizer, rollout.responses)
        for ids, has_ended in zip(encoded, rollout.ended.tolist(), strict=True):
            if has_ended:
                ids = [*ids, *closing]
            elif not ids:  # the score is read at the last token, so there must be one
                ids = [end]
            rows.append(ids)
        prompts = self.prompts(rollout.prompts)
        # A row ends by the last token of `closing` if its answer has ended, and by the end token if it was empty.
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
    question = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": ANSWER}
    text = render(tokenizer, [question, answer], tokenizer.chat_template)
    _, _, after_answer = text.rpartition(ANSWER)
    _, _, after_end = after_answer.partition(end_of_turn(tokenizer))
    return after_end


def reader_of(rm: Path | None, tokenizer, task: Task) -> TextReader | None:
    """Return the reader that turns texts into the own tokens of the reward model in the folder `rm`, or None.

    `tokenizer` is the policy's. No reader is needed, and None is returned, if there is no reward model; if it is an
    adapter, since its base is the policy's; if it has no tokenizer; and if it can read the policy's tokens as they are.
    """
    if rm is None or not is_full_model(rm) or not has_tokenizer(rm):
        return None
    tokenizer_of_rm = load_tokenizer(str(rm), option="rm")
    is_of_a_run = bool(run_of(rm)) or (rm / SEAL).is_file()  # a copy from a run has its seal
    if _reads_the_same_tokens(tokenizer_of_rm, tokenizer, task, is_of_a_run):
        return None
    config = read_config(f"--rm {rm}", rm).get_text_config()
    return TextReader(
        tokenizer_of_rm, task.source_of_prompt, getattr(config, "max_position_embeddings", None)
    )


def _reads_the_same_tokens(
    tokenizer_of_rm, tokenizer_of_policy, task: Task, is_of_a_run: bool
) -> bool:
    """Return whether a reward model can read the tokens of the policy's tokenizer as if they were its own.

    `is_of_a_run`: whether a run of this library has trained the reward model.
    """
    # 1. What chat templates write. A reward model that was trained here has read what the policy's template writes, and
    # gives its score at the end token; one from elsewhere gives it at the last token of its own template's text.
    has_chats = bool(task.source_of_prompt)
    if has_chats and not is_of_a_run:
        if tokenizer_of_rm.chat_template != tokenizer_of_policy.chat_template:
            return False
        if tokenizer_of_rm.chat_template and text_after_end(tokenizer_of_rm):
            return False

    # 2. Both must give each token the same number, and cut real texts into the same tokens: two tokenizers with the
    # same vocabulary may cut a text in different ways.
    if tokenizer_of_rm.get_vocab() != tokenizer_of_policy.get_vocab():
        return False
    texts = list(task.splits["test"]["prompt"])
    as_plain_text = {"add_special_tokens": False, "split_special_tokens": True}
    ids = tokenizer_of_rm(texts, **as_plain_text)["input_ids"]
    return ids == tokenizer_of_policy(texts, **as_plain_text)["input_ids"]


def check_tokenizers(options: StageCommand, inputs: Inputs, tokenizer) -> None:
    """Raise `InputError` if the tokenizer in a model's folder differs from that of `--model`.

    Two kinds of models are not checked: those of earlier runs, which the manifest compares, and a whole reward model,
    which may have another tokenizer, because it reads texts by its own.
    """
    for folder in inputs.folders:
        has_own_reader = folder == inputs.rm and is_full_model(folder)
        if not has_own_reader and not run_of(folder):
            check_tokenizer_beside(folder, tokenizer, options.model, options.chat_template)


def check_tokenizer_beside(folder: Path, tokenizer, model: str, chat_template: str) -> None:
    """Raise `InputError` if the tokenizer in a model's folder differs from `tokenizer`, that of `--model`.

    Only what the model has learnt from counts: the chat template, unless `--chat_template` chooses one; the end token;
    and the meaning of token ids. Tokens that only one of the two has, such as one for padding, change nothing.
    """
    delete_it = f"delete the tokenizer's files in {folder} to use that of --model"
    if has_tokenizer(folder):
        own_tokenizer = read_tokenizer(str(folder), folder)
        own_template = own_tokenizer.chat_template
        own_end = own_tokenizer.eos_token
        _check_same_tokens(own_tokenizer, tokenizer, f"that of --model {model}", folder, delete_it)
    else:  # even if the tokenizer's own files were deleted, its settings may be there
        own_template, own_end = read_template_and_end(folder)

    # 1. The chat template, unless a file or `none` chooses one.
    is_chosen = chat_template not in ("auto", "text")
    if own_template and not is_chosen and own_template != tokenizer.chat_template:
        file = folder / "chat_template.jinja"
        fix = f"give --chat_template {file}"
        if not file.is_file():
            fix = f"write the chat_template of its tokenizer_config.json to a file, and {fix}"
        raise InputError(
            f"{folder}: its tokenizer has another chat template than --model {model}: {fix}, or none for plain text"
        )

    # 2. The end token. A chat template writes its own, so only the end of plain texts is compared.
    ends = {tokenizer.eos_token}
    if tokenizer.chat_template:
        ends.add(end_of_turn(tokenizer))
    if not own_template and own_end is not None and own_end not in ends:
        what = f"its tokenizer ends texts by {own_end}, that of --model {model} by {tokenizer.eos_token}"
        fix = "save its tokenizer in a copy of the model's folder, and give that as --model"
        raise InputError(f"{folder}: {what}: {fix}, or {delete_it}")


def _check_same_tokens(
    tokenizer_of_folder, tokenizer_of_base, that_of_base: str, folder: Path, delete_it: str
) -> None:
    """Raise `InputError` if the tokenizer in the folder of a model makes other tokens of texts than that of the base.

    A token that only one of the two tokenizers has, such as one for padding, changes nothing. In the messages "its
    tokenizer" is the one of the model in `folder`; `that_of_base` names the one of the base, and `delete_it` tells how
    to use that one instead.
    """
    # 1. A token that both have must have the same number.
    ids_of_base = tokenizer_of_base.get_vocab()
    moved_tokens = []
    for token, token_id in tokenizer_of_folder.get_vocab().items():
        if token in ids_of_base and ids_of_base[token] != token_id:
            moved_tokens.append(token)
    if moved_tokens:
        what = (
            f"its tokenizer numbers tokens otherwise than {that_of_base}, such as {moved_tokens[0]}"
        )
        raise InputError(f"{folder}: {what}: give the model it was trained on, or {delete_it}")

    # 2. Tokenizers with the same vocabulary may cut a text in different ways, or begin it with BOS or not. So both
    # tokenise a sample. For this the folder's files are read once more, in the class of the base's tokenizer: otherwise
    # transformers chooses a class by the model's config, if that is in the folder, and only the classes might differ.
    as_plain_text = {"split_special_tokens": True}
    tokenizer_in_same_class = read_tokenizer(str(folder), folder, kind=type(tokenizer_of_base))
    ids_of_sample = tokenizer_in_same_class(SAMPLE_TEXT, **as_plain_text)["input_ids"]
    if ids_of_sample != tokenizer_of_base(SAMPLE_TEXT, **as_plain_text)["input_ids"]:
        what = f"its tokenizer makes other tokens of a text than {that_of_base}"
        fix = "save its tokenizer in a copy of the model's folder, and give that as --model"
        raise InputError(f"{folder}: {what}: {fix}, or {delete_it}")


def check_reward_model(options: StageCommand, inputs: Inputs, tokenizer, task: Task) -> list[str]:
    """Raise `InputError` for a reward model from elsewhere that cannot score these texts; return notes on it.

    An adapter has the base of the policy and its tokenizer, so there is nothing to check.
    """
    rm = inputs.rm
    if rm is None or not is_full_model(rm):
        return []
    config = read_config(f"--rm {rm}", rm)
    reader = reader_of(rm, tokenizer, task)  # None if the reward model reads the policy's tokens
    check_gives_one_score(f"--rm {rm}", config)

    # 1. It must have an embedding for each token that it reads.
    known = config.get_text_config().vocab_size
    if reader:
        used = len(reader.tokenizer)
        fix = "give the tokenizer that it was trained with"
    else:
        used = len(tokenizer)
        fix = "save its own tokenizer there"
    if used > known:
        raise InputError(
            f"--rm {rm}: it has {known} tokens, and its texts have up to {used}: {fix}"
        )

    # 2. If the critic starts from it, it must read the policy's tokens, and be of the form that is trained: an adapter
    # by --finetune lora, a whole model by --finetune full.
    starts_critic = any(method.critic_init == "rm" for method in options.methods.values())
    if starts_critic and (reader or options.finetune == "lora"):
        why = "it is a whole model, and --finetune lora trains adapters"
        if reader:
            why = "it has another tokenizer"
        raise InputError(
            f"--rm {rm}: the critic cannot start from it ({why}): add --critic_init sft"
        )
    if reader is None:
        return []

    # 3. In its own tokens the longest prompt with the longest response must fit into its positions.
    prompts = [*task.splits["ppo"]["prompt"], *task.splits["test"]["prompt"]]
    with named_errors("rm", str(rm)):
        prompts = reader.prompts(prompts)
    longest_prompt = max(map(len, encode_prompts(reader.tokenizer, prompts)), default=0)
    longest_text = longest_prompt + options.max_response_length
    reader.check_length(longest_text, "lower --max_prompt_length or --max_response_length")
    return [f"--rm {rm}: it scores texts, by its own tokenizer and chat template"]
