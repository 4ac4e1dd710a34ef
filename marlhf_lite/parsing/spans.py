"""Tokens of one response on the characters of its text: which are whose, and where macro actions begin."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class ResponseTokens:
    """Hands a response's tokens out from left to right, and keeps where macro actions begin.

    Only tokens with text are numbered: 0, 1, 2, … by their first character. A stretch of text takes the tokens that
    begin in it or in what lies before it and was not taken yet, so white space goes to what follows it, and a token
    that straddles two stretches to the first.
    """

    def __init__(self, text: str, spans: Sequence[tuple[int, int]]):
        self.text, self.count = text, len(spans)
        self._index = [i for i, (a, b) in enumerate(spans) if a < b]
        self._first = [spans[i][0] for i in self._index]
        self._begins = [False] * len(self._index)
        self._single = [False] * len(self._index)
        self.taken = 0  # tokens handed out so far

    def before(self, character: int) -> int:
        """How many tokens begin before this character."""
        return bisect_left(self._first, character)

    def begin(self, token: int) -> None:
        """A macro action begins at this token, if there is such a token."""
        if token < len(self._begins):
            self._begins[token] = True

    def take(self, end: int) -> None:
        """Hand out the tokens that begin before the character `end`."""
        self.taken = max(self.taken, self.before(end))

    def take_singly(self, end: int) -> None:
        """Hand them out with one macro action each."""
        stop = max(self.taken, self.before(end))
        self._begins[self.taken : stop] = self._single[self.taken : stop] = [True] * (stop - self.taken)
        self.taken = stop

    def bounds(self, ends: Sequence[int], end: int) -> list[int]:
        """Tokens of neighbouring stretches that end at characters `ends`, the last at `end`: their first tokens, and
        the end of the last one's."""
        inner = [max(self.taken, self.before(e)) for e in ends[:-1]]
        return [self.taken, *inner, max(self.taken, self.before(end))] if ends else [self.taken]

    def starts(self) -> list[bool]:
        """One flag a token. Tokens that nobody took, and those without text, go with the token before them: alone where
        it stands alone, else into its macro action. Tokens before all text go with the first one that has text."""
        left = len(self._single) - self.taken
        alone = self.taken > 0 and self._single[self.taken - 1]
        self._single[self.taken :] = self._begins[self.taken :] = [alone] * left
        known = dict(zip(self._index, zip(self._begins, self._single, strict=True), strict=True))
        flags, single = [], bool(self._single) and self._single[0]
        for i in range(self.count):
            begins, single = known.get(i, (single, single))
            flags.append(begins)
        if self._index and not self._single[0]:
            flags[self._index[0]] = False  # it joins what stands before all text; the first token begins in any case
        return flags
