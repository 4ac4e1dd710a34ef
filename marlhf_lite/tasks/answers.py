"""Tokenise known responses: answers of data, and texts that continue others; a response ends with EOS."""

import functools
from collections.abc import Sequence

from marlhf_lite.tasks.tokenization import COLON, LINE_BREAK, encode_prompts


def encode_answers(
    tokenizer, prompts: Sequence[str], answers: Sequence[str], limit: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of prompts and of their answers, which end with EOS and have at most `limit` tokens.

    If a chat template wrote the texts, prompt and answer are tokenised as a whole, because a tokenizer may begin a
    separate text differently from the same text after a prompt; special tokens count as such in the answer, too.
    """
    prompt_ids = encode_prompts(tokenizer, prompts)
    is_written_by_template = getattr(tokenizer, "expects_chats", False)
    if not is_written_by_template:
        return prompt_ids, encode_responses(tokenizer, answers, limit)
    wholes = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    ids_of_wholes = encode_prompts(tokenizer, wholes)
    # If the last token of the prompt joins the start of the answer, the answer is tokenised by itself.
    by_themselves = encode_continuation(tokenizer, answers, split_special_tokens=False)
    rows = _without_starts(ids_of_wholes, prompt_ids, otherwise=by_themselves)
    return prompt_ids, _with_end(tokenizer, rows, limit)


def encode_responses(tokenizer, responses: Sequence[str], limit: int) -> list[list[int]]:
    """Return the token ids of responses with EOS at the end; longer ones are cut to `limit` tokens, without EOS."""
    return _with_end(tokenizer, encode_continuation(tokenizer, responses), limit)


def _with_end(tokenizer, rows: Sequence[list[int]], limit: int) -> list[list[int]]:
    """Return the rows with EOS at the end, cut to `limit` tokens: a row that is cut has no EOS."""
    return [[*row, tokenizer.eos_token_id][:limit] for row in rows]


def _without_starts(
    wholes: Sequence[list[int]], starts: Sequence[list[int]], otherwise: Sequence[list[int]]
) -> list[list[int]]:
    """Return each of `wholes` without its start, or, if it does not begin with it, the row of `otherwise`."""
    rows = []
    for whole, start, other in zip(wholes, starts, otherwise, strict=True):
        begins_with_start = whole[: len(start)] == start
        if begins_with_start:
            rows.append(whole[len(start) :])
        else:
            rows.append(other)
    return rows


def encode_continuation(
    tokenizer, texts: Sequence[str], split_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of texts that continue another text.

    Tokenizers such as Llama-2's put a space before each text, which would come between prompt and response. With these,
    a text is tokenised after a colon, whose tokens are then taken off. If a token joins the colon with the start of the
    text, a line break takes its place; if a token joins that, too, the text keeps the tokens that it has by itself.
    """
    if not texts:
        return []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encoded = tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=split_special_tokens
        )
        return encoded["input_ids"]

    rows = encode(texts)
    if not _puts_space_first(tokenizer):
        return rows
    for before in (LINE_BREAK, COLON):  # if both can be taken off, the tokens after a colon stay
        (start,) = encode([before])
        wholes = encode([before + text for text in texts])
        rows = _without_starts(wholes, [start] * len(texts), otherwise=rows)
    return rows


@functools.lru_cache
def _puts_space_first(tokenizer) -> bool:
    """Return whether a text without a space begins with one: `▁` of SentencePiece, `Ġ` of byte-level pieces."""
    return tokenizer.tokenize("a")[0][0] in "▁Ġ"
