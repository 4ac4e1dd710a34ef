"""Where sentences begin and end, by rule. nltk's own splitter learns abbreviations but needs a download.

A sentence ends at a line break, and at `.`, `!`, `?` or `…` (with the quotes and brackets that close there) before
white space, unless the full stop belongs to an abbreviation, an initial or the number of a list item, or dots leave a
sentence open that goes on in lower case. What it gets wrong: an abbreviation that does end its sentence.
"""

from __future__ import annotations

import re

ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st mt vs e.g i.e cf al approx dept est fig ltd corp vol pp ca u.s u.k jan feb mar apr jun "
    "jul aug sep sept oct nov dec".split()
)
OFTEN_LAST = frozenset("etc a.m p.m inc co".split())  # abbreviations that go on only in lower case
_END = re.compile(r"(?P<stop>[.!?…]+)[\"'”’)\]}»*_]*(?=\s)|(?P<line>[\n\r])")
_WORD = re.compile(r"[^\s(\[{\"'“‘«]+$")


def split_sentences(text: str) -> list[tuple[int, int]]:
    """(start, end) in characters of every sentence, without the white space around it, in order."""
    spans, start = [], 0
    for match in _END.finditer(text):
        if match["line"] is not None:
            spans.append((start, match.start()))
            start = match.end()
        elif not _goes_on(text, start, match):
            spans.append((start, match.end()))
            start = match.end()
    spans.append((start, len(text)))
    return [span for span in (_trim(text, *s) for s in spans) if span[0] < span[1]]


def _goes_on(text: str, start: int, match: re.Match) -> bool:
    """Is this mark inside a sentence?"""
    goes_on_low = text[match.end() :].lstrip(" \t")[:1].islower()
    if match["stop"] != ".":
        return goes_on_low and set(match["stop"]) <= set(".…")
    word = _WORD.search(text, start, match.start())
    word = word[0].lower() if word else ""
    if word.isdigit() and not text[start : match.start()].strip().removesuffix(word):
        return True  # "1. First"
    initial = len(word) == 1 and word.isalpha() and word != "i"
    return initial or word in ABBREVIATIONS or (word in OFTEN_LAST and goes_on_low)


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), start + len(part.rstrip())
