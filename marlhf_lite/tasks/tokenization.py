"""Prompts as token ids, in the same way in every stage, and responses back as texts; `tasks.answers` has known answers.

Token ids are lists of numbers here, so that what only reads data needs no torch; `tasks.padding` makes tensors of them.
"""

import functools
from collections.abc import Sequence

# Put before a text that is tokenised or decoded by itself, so that the tokenizer does not treat it as the start of all
# text. Few tokens join a colon, or a line break, with what follows.
COLON = ":"
LINE_BREAK = "\n"


def encode_prompts(tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts, with the special tokens that the tokenizer puts first (BOS for Gemma).

    Its last ones, such as EOS, are left out: the response follows. A prompt that a chat template wrote
    (`chats.expect_chats`) contains its special tokens, also BOS.
    """
    is_written_by_template = getattr(tokenizer, "expects_chats", False)
    # In other prompts, a special token such as <eos> is text that somebody typed, and is split into its characters.
    encoded = tokenizer(
        list(prompts), add_special_tokens=False, split_special_tokens=not is_written_by_template
    )
    if is_written_by_template:
        return encoded["input_ids"]
    first = _leading_special_tokens(tokenizer)
    return [[*first, *ids] for ids in encoded["input_ids"]]


def _leading_special_tokens(tokenizer) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text: those before the tokens of the text itself."""
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(whole)):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    raise ValueError("the tokenizer splits a text differently with special tokens around it")


def decode_continuation(tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of token ids that continue others, without special tokens.

    Decoders such as Llama-2's drop the space before the first word of a text. An answer begins with that space, so here
    it is decoded after a colon, which is then taken off again.
    """
    before = COLON if _drops_first_space(tokenizer) else ""
    start = tokenizer(before, add_special_tokens=False)["input_ids"]
    texts = tokenizer.batch_decode(
        [[*start, *row] for row in rows],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    return [text.removeprefix(before) for text in texts]


@functools.lru_cache
def _drops_first_space(tokenizer) -> bool:
    """Return whether decoding drops the space before the first word of a text, and keeps it after a colon."""
    colon = tokenizer(COLON, add_special_tokens=False)["input_ids"]
    colon_and_word = tokenizer(f"{COLON} a", add_special_tokens=False)["input_ids"]
    is_kept_after_colon = tokenizer.decode(colon_and_word) == f"{COLON} a"
    return is_kept_after_colon and tokenizer.decode(colon_and_word[len(colon) :]) == "a"
