"""Tokens of a response on the characters of its text, and the tokens where macro actions begin."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache

UNFINISHED = "\ufffd"  # what decoders write for bytes that are not a whole character
PATIENCE = 8  # tokens to wait for the rest of a character


class TokenText:
    """Read token ids of one tokenizer (anything with ``decode(ids, skip_special_tokens=...)``) back into text.

    The text is never tokenised again, since that may give other tokens than the sampled ones. Each token is decoded
    together with the one before it, as decoders drop spaces and join word pieces by context; what it adds is its text.
    Pairs of tokens are cached, so that a response costs about one look-up a token.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._decode = lru_cache(65536)(self._decode_now)

    def __call__(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """Return `(text, spans)`: for each token its (start, end) in characters, in order and without gaps.

        Special tokens have no text (start = end). Tokens that share a character have the same span.
        """
        text, spans, kept, done = "", [], 0, 0  # ids[kept:done] is the context of what comes next
        for i in range(len(ids)):
            joined = self._decode(tuple(ids[kept : i + 1]))
            if joined.endswith(UNFINISHED) and i + 1 < len(ids) and i - done < PATIENCE:
                continue
            before = self._decode(tuple(ids[kept:done]))
            added = (
                joined[len(before) :]
                if joined.startswith(before)
                else self._decode(tuple(ids[done : i + 1]))
            )
            spans += [(len(text), len(text) + len(added))] * (i + 1 - done)
            text += added
            # a token without text is no context: keep the one before it
            if added or i + 1 - kept > PATIENCE:
                kept = done
            done = i + 1
        return text, spans

    def _decode_now(self, ids: tuple[int, ...]) -> str:
        if not ids:
            return ""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class ResponseTokens:
    """The tokens of one response. Only those with text are numbered: 0, 1, 2, … by their first character."""

    def __init__(self, text: str, spans: Sequence[tuple[int, int]]):
        self.text, self.count = text, len(spans)
        self._has_text = [start < end for start, end in spans]
        self._first = [start for start, end in spans if start < end]

    def before(self, character: int) -> int:
        """Return how many tokens begin before this character: a token that straddles two words is the first one's."""
        return bisect_left(self._first, character)

    def starts(self, pieces: Iterable[tuple[int, str]]) -> list[bool]:
        """Return a flag for each token: does a macro action begin there?

        Args:
            pieces: neighbouring runs of numbered tokens from token 0 on, as `(end, kind)`. A run of kind `begin` is a
                macro action, `join` belongs to the macro action before it, `single` has a macro action a token.

        Tokens after the last piece, and those without text, go with the token before them: alone if that one is
        single, else into its macro action. Tokens before all text go with the first one that has text.
        """
        kinds: list[str] = []  # of the numbered tokens
        for end, kind in pieces:
            inside = "single" if kind == "single" else "join"
            kinds += [kind, *[inside] * (end - len(kinds) - 1)] if end > len(kinds) else []
        # The tokens before all text, and the first with text, are one macro action, which always begins.
        other = first = "single" if kinds[:1] == ["single"] else "join"
        remaining, flags = iter([first, *kinds[1:]]), []
        for has_text in self._has_text:
            kind = next(remaining, other) if has_text else other
            other = "single" if kind == "single" else "join"
            flags.append(kind != "join")
        return flags
