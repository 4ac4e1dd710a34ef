"""Tokenise prompts in the same way in every stage, and decode responses; `tasks.answers` tokenises known answers."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

BEFORE = ("\n", ":")  # texts that few answers join into one token


def encode_prompts(tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts, with the special tokens that the tokenizer puts first (BOS for Gemma).

    Its last ones, such as EOS, are left out: the response follows. A prompt that a chat template wrote
    (`chats.expect_chats`) contains its special tokens, also BOS.
    """
    is_written = getattr(tokenizer, "expects_chats", False)
    rows = tokenizer(list(prompts), add_special_tokens=False, split_special_tokens=not is_written)[
        "input_ids"
    ]
    first = [] if is_written else _leading_special_tokens(tokenizer)
    return [[*first, *ids] for ids in rows]


def _leading_special_tokens(tokenizer) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    text, plain = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    start = next(i for i in range(len(text)) if text[i : i + len(plain)] == plain)
    return text[:start]


def decode_continuation(tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of token ids that continue others, without special tokens.

    Decoders such as Llama-2's drop the first space of a text, which belongs to an answer.
    """
    before = BEFORE[-1] if _takes_space_off(tokenizer) else ""
    start = tokenizer(before, add_special_tokens=False)["input_ids"]
    rows = [[*start, *row] for row in rows]
    texts = tokenizer.batch_decode(
        rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return [text.removeprefix(before) for text in texts]


@functools.lru_cache
def _takes_space_off(tokenizer) -> bool:
    """Return whether decoding drops the space before the first word of a text."""
    start, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (":", ": a"))
    return tokenizer.decode(whole) == ": a" and tokenizer.decode(whole[len(start) :]) == "a"


def pad(rows: Sequence[Sequence[int]], value: int, left: bool) -> tuple[Tensor, Tensor]:
    """Return `(ids [B, L], mask [B, L])`, padded on one side; the mask comes from the lengths, never from the ids."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    padded = functools.partial(
        pad_sequence, batch_first=True, padding_side="left" if left else "right"
    )
    return padded(ids, padding_value=value), padded([torch.ones_like(row) for row in ids])
