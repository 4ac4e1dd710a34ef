"""Reward models from elsewhere: one with another tokenizer scores texts, by its own tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers
from torch import Tensor

from marlhf_lite.config.commands import StageCommand
from marlhf_lite.experiments.inputs import Inputs
from marlhf_lite.models.loading import TOKENIZERS, is_full_model, load_tokenizer
from marlhf_lite.tasks.answers import encode_continuation
from marlhf_lite.tasks.chats import Chat, expect_chats
from marlhf_lite.tasks.shapes import write_turns
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Rollout, from_tokens
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.preflight import check
from marlhf_lite.utils.run_folder import run_of


class TextReader:
    """Reads rollouts again as texts by another tokenizer; `said` is that of `Task`, `limit` its positions."""

    def __init__(self, tokenizer, said: Mapping[str, str | list[dict]], limit: int | None = None):
        self.tokenizer, self.said, self.limit = tokenizer, said, limit
        self.chat = Chat(tokenizer, "auto") if said and tokenizer.chat_template else None
        if self.chat:
            expect_chats(tokenizer)

    def prompts(self, prompts: Sequence[str]) -> list[str]:
        """Return the prompts as this tokenizer's template writes them; without one messages are transcripts."""
        return [write_turns(self.said[text], self.chat or "paper") if text in self.said else text for text in prompts]

    def __call__(self, rollout: Rollout) -> Rollout:
        """Return the same texts in other tokens; an answer that has ended ends by this tokenizer's end, too.

        Raises `InputError` for a text of too many tokens.
        """
        end = self.tokenizer.eos_token_id
        ids = encode_continuation(self.tokenizer, rollout.responses)
        ids = [row + [end] * (ended or not row) for row, ended in zip(ids, rollout.ended.tolist(), strict=True)]
        read = from_tokens(self.tokenizer, self.prompts(rollout.prompts), ids, [end])
        if self.limit and (longest := int(read.attention_mask.sum(1).max())) > self.limit:
            fix = "lower --max_response_length, then go on with --resume"
            raise InputError(f"--rm: a text of {longest} of its tokens, more than its {self.limit} positions: {fix}")
        return read.to(rollout.tokens.device)


@dataclass(frozen=True)
class TextModelReward:
    """A reward model that scores texts."""

    reward: ModelReward
    read: TextReader

    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores, float32."""
        return self.reward(self.read(rollout))


def reader_of(rm: Path | None, tokenizer, task: Task) -> TextReader | None:
    """Return what reads texts for a reward model; None where it has the policy's tokens.

    An adapter has, for its base is the policy's, and so has a model without a tokenizer.
    """
    if rm is None or not is_full_model(rm) or not any((rm / name).is_file() for name in TOKENIZERS):
        return None
    own = load_tokenizer(str(rm))
    other_template = task.said and not run_of(rm) and own.chat_template != tokenizer.chat_template
    if other_template or not _same(own, tokenizer, task.splits["test"]["prompt"]):
        config = transformers.AutoConfig.from_pretrained(rm).get_text_config()
        return TextReader(own, task.said, getattr(config, "max_position_embeddings", None))
    return None


def _same(one, other, texts: Sequence[str]) -> bool:
    """Whether two tokenizers have the same tokens, and give the same ones for these texts."""
    if one.get_vocab() != other.get_vocab():
        return False
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    first, second = (tokenizer(list(texts), **plain)["input_ids"] for tokenizer in (one, other))
    return first == second


@check
def check_reward_model(options: StageCommand, inputs: Inputs, tokenizer, task: Task) -> None:
    """Raise `InputError` for a reward model from elsewhere that cannot score these texts."""
    if (rm := inputs.rm) is None or not is_full_model(rm):
        return
    config = transformers.AutoConfig.from_pretrained(rm)
    if config.num_labels != 1:
        raise InputError(f"--rm {rm}: it gives {config.num_labels} numbers a text (num_labels): give one with 1")
    read = reader_of(rm, tokenizer, task)
    used, known = len(read.tokenizer if read else tokenizer), config.get_text_config().vocab_size
    if used > known:
        fix = "save its own tokenizer there" if read is None else "give the tokenizer that it was trained with"
        raise InputError(f"--rm {rm}: it has {known} tokens, and its texts have up to {used}: {fix}")
    if read is None:
        return
    if any(getattr(method, "critic_init", "") == "rm" for method in options.methods.values()):
        raise InputError(
            f"--rm {rm}: the critic cannot start from it, for it has another tokenizer: add --critic_init sft"
        )
    try:
        prompts = read.prompts([text for part in ("ppo", "test") for text in task.splits[part]["prompt"]])
        longest = max(map(len, encode_prompts(read.tokenizer, prompts)), default=0) + options.max_response_length
    except InputError as error:
        raise InputError(f"--rm {rm}: its tokenizer cannot write the prompts ({error}): give another model") from None
    if read.limit and longest > read.limit:
        fix = "lower --max_prompt_length or --max_response_length"
        raise InputError(f"--rm {rm}: texts of some {longest} tokens, more than its {read.limit} positions: {fix}")
