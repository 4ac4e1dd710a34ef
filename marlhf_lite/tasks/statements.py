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
    for text, slot in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        expression += re.escape(text)
        if slot:
            expression += rf"(?P<{slot}>\w+)"
    return re.compile(expression)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text without their end marks."""
    return [part.strip() for part in re.split(r"[.!?\n]+", text) if part.strip()]
