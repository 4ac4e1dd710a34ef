"""Tokenise known responses: answers of data, and texts that continue others; a response ends with EOS."""

import functools
from collections.abc import Sequence

from marlhf_lite.tasks.tokenization import BEFORE, encode_prompts


def encode_answers(
    tokenizer, prompts: Sequence[str], answers: Sequence[str], limit: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of prompts and of their answers, as in `encode_responses`.

    Texts of a chat template are tokenised as a whole, with special tokens also in the answer: a tokenizer may begin a
    separate text differently from the same text after a prompt.
    """
    ids = encode_prompts(tokenizer, prompts)
    if not getattr(tokenizer, "expects_chats", False):
        return ids, encode_responses(tokenizer, answers, limit)
    wholes = encode_prompts(tokenizer, [p + a for p, a in zip(prompts, answers, strict=True)])
    alone = encode_continuation(tokenizer, answers, split_special_tokens=False)
    after = [
        w[len(p) :] if w[: len(p)] == p else a for p, w, a in zip(ids, wholes, alone, strict=True)
    ]
    return ids, [(row + [tokenizer.eos_token_id])[:limit] for row in after]


def encode_responses(tokenizer, responses: Sequence[str], limit: int) -> list[list[int]]:
    """Return the token ids of responses with EOS at the end; longer ones are cut to `limit` tokens, without EOS."""
    return [
        (row + [tokenizer.eos_token_id])[:limit]
        for row in encode_continuation(tokenizer, responses)
    ]


def encode_continuation(
    tokenizer, texts: Sequence[str], split_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of texts that continue another text.

    Tokenizers such as Llama-2's put a space before each text, which would come between prompt and response.
    """
    encode = functools.partial(
        tokenizer, add_special_tokens=False, split_special_tokens=split_special_tokens
    )
    rows = encode(list(texts))["input_ids"] if texts else []
    if not _puts_space_first(tokenizer):
        return rows
    for before in BEFORE:
        start, wholes = (
            encode(before)["input_ids"],
            encode([before + text for text in texts])["input_ids"],
        )
        rows = [
            w[len(start) :] if w[: len(start)] == start else row
            for w, row in zip(wholes, rows, strict=True)
        ]
    return rows


@functools.lru_cache
def _puts_space_first(tokenizer) -> bool:
    """Return whether a text without a space begins with one: `▁` of SentencePiece, `Ġ` of byte-level pieces."""
    return tokenizer.tokenize("a")[0][0] in "▁Ġ"
