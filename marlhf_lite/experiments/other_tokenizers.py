"""Reward models from elsewhere: one with another tokenizer scores texts, by its own tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from marlhf_lite.config.commands import StageCommand
from marlhf_lite.experiments.inputs import Inputs
from marlhf_lite.models.adapters import is_full_model
from marlhf_lite.models.door import has_tokenizer, read_config
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks.answers import encode_continuation
from marlhf_lite.tasks.chats import Chat, expect_chats
from marlhf_lite.tasks.shapes import write_turns
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import Rollout, from_tokens
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import run_of
from marlhf_lite.utils.user_code import named_errors


class TextReader:
    """Reads rollouts again as texts by another tokenizer; `said` is that of `Task`, `limit` its positions."""

    def __init__(self, tokenizer, said: Mapping[str, str | list[dict]], limit: int | None = None):
        self.tokenizer, self.said, self.limit = tokenizer, said, limit
        self.chat = Chat(tokenizer, "auto") if said and tokenizer.chat_template else None
        if self.chat:
            expect_chats(tokenizer)

    def prompts(self, prompts: Sequence[str]) -> list[str]:
        """Return the prompts as this tokenizer's template writes them; without one, messages become transcripts."""
        return [
            write_turns(self.said[text], self.chat or "paper") if text in self.said else text
            for text in prompts
        ]

    def __call__(self, rollout: Rollout) -> Rollout:
        """Return the same texts in other tokens; an answer that has ended also ends by this tokenizer's end token.

        Raises `InputError` for a text of too many tokens.
        """
        end = self.tokenizer.eos_token_id
        ids = encode_continuation(self.tokenizer, rollout.responses)
        ids = [
            row + [end] * (ended or not row)
            for row, ended in zip(ids, rollout.ended.tolist(), strict=True)
        ]
        read = from_tokens(self.tokenizer, self.prompts(rollout.prompts), ids, [end])
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


def reader_of(rm: Path | None, tokenizer, task: Task) -> TextReader | None:
    """Return what reads texts for a reward model; None if the model reads the policy's tokens.

    An adapter does, since its base is the policy's, and so does a model without a tokenizer.
    """
    if rm is None or not is_full_model(rm) or not has_tokenizer(rm):
        return None
    own, texts = load_tokenizer(str(rm)), list(task.splits["test"]["prompt"])
    same_template = not task.said or run_of(rm) or own.chat_template == tokenizer.chat_template
    if same_template and own.get_vocab() == tokenizer.get_vocab():
        plain = {"add_special_tokens": False, "split_special_tokens": True}
        if own(texts, **plain)["input_ids"] == tokenizer(texts, **plain)["input_ids"]:
            return None
    config = read_config(f"--rm {rm}", rm).get_text_config()
    return TextReader(own, task.said, getattr(config, "max_position_embeddings", None))


def check_reward_model(options: StageCommand, inputs: Inputs, tokenizer, task: Task) -> None:
    """Raise `InputError` for a reward model from elsewhere that cannot score these texts."""
    if (rm := inputs.rm) is None or not is_full_model(rm):
        return
    config, read = read_config(f"--rm {rm}", rm), reader_of(rm, tokenizer, task)
    if config.num_labels != 1:
        raise InputError(
            f"--rm {rm}: it gives {config.num_labels} numbers a text (num_labels): give one with 1"
        )
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
