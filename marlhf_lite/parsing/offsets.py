"""Token ids back to text, with the characters that each token stands for.

Decoded text is never tokenised again: that may give other tokens than the ones that were sampled. Instead each token is
decoded together with the one before it, since decoders drop a space at the start, join word pieces and so on by
context; what it adds is its text. Tokens that hold a character's bytes in parts are decoded as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

UNFINISHED = "\ufffd"  # what decoders write for bytes that are not a whole character
PATIENCE = 8  # tokens to wait for a character to be finished; a stray byte never is


class TokenText:
    """Reads responses of one tokenizer (anything with ``decode(ids, skip_special_tokens=...)``).

    Pairs of tokens are cached, so that a response costs about one look-up a token: linear in its length.
    """

    def __init__(self, tokenizer, cache: int = 65536):
        self.tokenizer = tokenizer
        self._decode = lru_cache(cache)(self._decode_now)

    def __call__(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """``(text, spans)``: for each token its (start, end) in characters of the text, in order and without gaps.

        Special tokens have no text: start = end. Tokens that share characters have the same span.
        """
        text, spans, kept, done = "", [], 0, 0  # ids[kept:done] is the context of what comes next
        for i in range(len(ids)):
            whole = self._decode(tuple(ids[kept : i + 1]))
            if whole.endswith(UNFINISHED) and i + 1 < len(ids) and i - done < PATIENCE:
                continue
            before = self._decode(tuple(ids[kept:done]))
            added = whole[len(before) :] if whole.startswith(before) else self._decode(tuple(ids[done : i + 1]))
            spans += [(len(text), len(text) + len(added))] * (i + 1 - done)
            text += added
            if added or i + 1 - kept > PATIENCE:  # a token without text is no context: keep the one before it
                kept = done
            done = i + 1
        return text, spans

    def _decode_now(self, ids: tuple[int, ...]) -> str:
        if not ids:
            return ""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
