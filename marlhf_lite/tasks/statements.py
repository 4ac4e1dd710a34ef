"""Sentences with open slots, written and read back, which generated tasks share."""

import re

SLOT = re.compile(r"\{(\w+)\}")


def slots(template: str) -> tuple[str, ...]:
    """Names of the open slots of a template, left to right."""
    return tuple(SLOT.findall(template))


def pattern(template: str) -> re.Pattern:
    """A pattern with a group of its own name for each slot, such as `(?P<food>\\w+)`, each one word."""
    pieces = SLOT.split(template)  # text and slot names by turns
    return re.compile("".join(rf"(?P<{p}>\w+)" if i % 2 else re.escape(p) for i, p in enumerate(pieces)))


def sentences(text: str) -> list[str]:
    """The sentences of a text without their end marks."""
    return [part.strip() for part in re.split(r"[.!?\n]+", text) if part.strip()]
