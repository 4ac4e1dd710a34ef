"""Tokenise prompts and responses in the same way in every stage; a response ends with EOS."""

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
    ids = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
    return [(row + [tokenizer.eos_token_id])[:limit] for row in ids]


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
    alone = encode_prompts(tokenizer, answers)
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
