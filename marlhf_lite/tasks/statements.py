"""Sentences with open slots, which generated tasks write and read back."""

import re

SLOT = re.compile(r"\{(\w+)\}")


def slots(template: str) -> tuple[str, ...]:
    """Return the names of the open slots of a template, left to right."""
    return tuple(SLOT.findall(template))


def pattern(template: str) -> re.Pattern:
    """Return a pattern with a named group for each slot, such as `(?P<food>\\w+)`, each one word."""
    pieces = SLOT.split(template)  # text and slot names by turns
    expression = ""
    for number, piece in enumerate(pieces):
        is_slot = number % 2 == 1
        if is_slot:
            expression += rf"(?P<{piece}>\w+)"
        else:
            expression += re.escape(piece)
    return re.compile(expression)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text without their end marks."""
    return [part.strip() for part in re.split(r"[.!?\n]+", text) if part.strip()]
