"""Tokens of a response on the characters of its text, and the tokens where macro actions begin."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache

UNFINISHED = "\ufffd"  # what decoders write for bytes that are not a whole character
PATIENCE = 8  # tokens to wait for the rest of a character


class TokenText:
    """Read token ids of one tokenizer (anything with ``decode(ids, skip_special_tokens=...)``) back into text.

    The text is never tokenised again, since that may give other tokens than the sampled ones. Each token is decoded
    together with the one before it, because decoders drop spaces and join word pieces by context. What the token adds
    to the text of the one before it is its own text. The texts of pairs of tokens are cached, so reading a response
    takes about one look-up per token.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._decode = lru_cache(65536)(self._decode_now)

    def __call__(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """Return `(text, spans)`: for each token its (start, end) in characters, in order and without gaps.

        Special tokens have no text (start = end). Tokens that share a character have the same span.
        """
        text = ""
        spans = []
        done = 0  # the spans are those of ids[:done]
        context = 0  # ids[context:done] are decoded together with the next tokens
        for end in range(1, len(ids) + 1):
            with_context = self._decode(tuple(ids[context:end]))
            # A character may consist of several tokens: wait for the rest of it. But stop waiting at the end of the
            # response, and after PATIENCE tokens, since these bytes may be no character at all.
            may_be_completed = end < len(ids) and end - done <= PATIENCE
            if with_context.endswith(UNFINISHED) and may_be_completed:
                continue
            text_of_context = self._decode(tuple(ids[context:done]))
            if with_context.startswith(text_of_context):
                added = with_context[len(text_of_context) :]
            else:  # the context is written in another way with these tokens after it
                added = self._decode(tuple(ids[done:end]))
            # All tokens that were waited for have the same span.
            span = (len(text), len(text) + len(added))
            spans += [span] * (end - done)
            text += added
            # A token without text is no context for the next one, so the context stays where it was. But it may not
            # grow for ever.
            if added or end - context > PATIENCE:
                context = done
            done = end
        return text, spans

    def _decode_now(self, ids: tuple[int, ...]) -> str:
        if not ids:
            return ""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class ResponseTokens:
    """The tokens of one response. Only tokens with text are numbered: 0, 1, 2, … in the order of the text."""

    def __init__(self, text: str, spans: Sequence[tuple[int, int]]):
        self.text = text
        self.count = len(spans)
        self._has_text = [start < end for start, end in spans]
        self._first_characters = [start for start, end in spans if start < end]

    def count_before(self, character: int) -> int:
        """Return how many numbered tokens begin before this character of the text.

        If a word ends there, this is also the number of the first token after the word: a token that straddles two
        words belongs to the first one.
        """
        return bisect_left(self._first_characters, character)

    def starts(self, pieces: Iterable[tuple[int, str]]) -> list[bool]:
        """Return for each token, those without text included, whether a macro action begins there.

        Args:
            pieces: neighbouring runs of numbered tokens from token 0 on, as `(end, kind)`. A run of kind `begin` is a
                macro action, one of kind `join` belongs to the macro action before it, and in one of kind `single`
                each token is a macro action.

        Tokens after the last piece, and tokens without text, go with the token before them. If that token is of kind
        `single`, each of them is a macro action, too; otherwise they join its macro action. Tokens without text at the
        beginning of a response go with the first token that has text.

        The first flag need not be true: a response always begins a macro action (`MacroActions.from_starts`).
        """
        # 1. The kind of each numbered token: the first one of a run has the kind of the run, the others follow it.
        kinds: list[str] = []
        for end, kind_of_run in pieces:
            length = end - len(kinds)
            if length > 0:
                kinds.append(kind_of_run)
                kinds.extend([_kind_after(kind_of_run)] * (length - 1))
        # If tokens without text stand at the beginning, the first token with text goes on with their macro action. If
        # there are none, it becomes the first token of the response, whose flag need not be true.
        if kinds:
            kinds[0] = _kind_after(kinds[0])

        # 2. The kind of every token.
        flags = []
        number = 0  # of the next token with text
        before = kinds[0] if kinds else "join"  # the kind of the token before this one
        for has_text in self._has_text:
            kind = _kind_after(before)
            if has_text and number < len(kinds):
                kind = kinds[number]
            number += has_text
            flags.append(kind != "join")
            before = kind
        return flags


def _kind_after(kind: str) -> str:
    """Return the kind of a token that goes with the token before it, which is of this kind."""
    return "single" if kind == "single" else "join"
