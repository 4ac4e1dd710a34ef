"""Tokenise prompts and responses in the same way in every stage; a response ends with EOS."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from marlhf_lite.utils.moved import moved_names

__getattr__ = moved_names(__name__)


def encode_prompts(tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts, with the special tokens that the tokenizer puts first (BOS for Gemma).

    What it puts last, such as EOS, is left out: the response follows. A prompt that a chat template wrote
    (`chats.expect_chats`) has its special tokens in it, BOS among them.
    """
    if getattr(tokenizer, "expects_chats", False):
        return tokenizer(list(prompts), add_special_tokens=False, split_special_tokens=False)["input_ids"]
    plain = tokenizer(list(prompts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    first = _leading_special_tokens(tokenizer)
    return [[*first, *ids] for ids in plain]


def _leading_special_tokens(tokenizer) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    text, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next(i for i in range(len(text)) if text[i : i + len(plain)] == plain)
    return text[:start]


def encode_responses(tokenizer, responses: Sequence[str], limit: int) -> list[list[int]]:
    """Return the token ids of responses, ended by EOS; longer ones are cut to `limit` tokens and have no EOS."""
    return [(row + [tokenizer.eos_token_id])[:limit] for row in encode_behind(tokenizer, responses)]


def encode_behind(tokenizer, texts: Sequence[str], split_special_tokens: bool = True) -> list[list[int]]:
    """Return the token ids of texts that stand behind another text.

    Tokenizers such as Llama-2's put a space before each text, which would stand between prompt and response.
    """
    encode = functools.partial(tokenizer, add_special_tokens=False, split_special_tokens=split_special_tokens)
    rows = encode(list(texts))["input_ids"] if texts else []
    if not _puts_space_first(tokenizer):
        return rows
    for before in _BEFORE:
        start, wholes = encode(before)["input_ids"], encode([before + text for text in texts])["input_ids"]
        rows = [w[len(start) :] if w[: len(start)] == start else row for w, row in zip(wholes, rows, strict=True)]
    return rows


def decode_behind(tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of token ids that stand behind others, without special tokens.

    Decoders such as Llama-2's take the space off that a text begins with, which is an answer's own.
    """
    if not _takes_space_off(tokenizer):
        return tokenizer.batch_decode(rows, skip_special_tokens=True)
    start = tokenizer(_BEFORE[-1], add_special_tokens=False)["input_ids"]
    texts = tokenizer.batch_decode([[*start, *row] for row in rows], skip_special_tokens=True)
    return [text.removeprefix(tokenizer.decode(start)) for text in texts]


_BEFORE = ("\n", ":")  # texts that few answers join into one token


@functools.lru_cache
def _puts_space_first(tokenizer) -> bool:
    """Return whether a text without a space begins with one: `▁` of SentencePiece, `Ġ` of byte-level pieces."""
    return tokenizer.tokenize("a")[0][0] in "▁Ġ"


@functools.lru_cache
def _takes_space_off(tokenizer) -> bool:
    """Return whether decoding takes off the space before a word that begins a text."""
    start, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (":", ": a"))
    return tokenizer.decode(whole) == ": a" and tokenizer.decode(whole[len(start) :]) == "a"


def encode_answers(
    tokenizer, prompts: Sequence[str], answers: Sequence[str], limit: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of prompts and of their answers, as in `encode_responses`.

    What a chat template wrote is one text, with special tokens in the answer too: a tokenizer may begin a text of its
    own in another way than the same text behind a prompt.
    """
    ids = encode_prompts(tokenizer, prompts)
    if not getattr(tokenizer, "expects_chats", False):
        return ids, encode_responses(tokenizer, answers, limit)
    wholes = encode_prompts(tokenizer, [p + a for p, a in zip(prompts, answers, strict=True)])
    alone = encode_behind(tokenizer, answers, split_special_tokens=False)
    behind = [w[len(p) :] if w[: len(p)] == p else a for p, w, a in zip(ids, wholes, alone, strict=True)]
    return ids, [(row + [tokenizer.eos_token_id])[:limit] for row in behind]


def pad(rows: Sequence[Sequence[int]], value: int, left: bool) -> tuple[Tensor, Tensor]:
    """Return `(ids [B, L], mask [B, L])`, padded on one side; the mask comes from the lengths, never from the ids."""
    width = max(map(len, rows), default=0)
    gaps = [[value] * (width - len(row)) for row in rows]
    ids = [[*gap, *row] if left else [*row, *gap] for gap, row in zip(gaps, rows, strict=True)]
    positions = torch.arange(width)
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    mask = positions >= width - lengths if left else positions < lengths
    return torch.tensor(ids), mask.long()
