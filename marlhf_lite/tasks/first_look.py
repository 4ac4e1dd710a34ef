"""Refuse rows that no tokenizer and no template could read, before the libraries that take seconds are imported."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from marlhf_lite.tasks.chats import Chat
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.messages import Turns
from marlhf_lite.tasks.shapes import to_preferences
from marlhf_lite.tasks.sources import (
    Found,
    find_rows,
    form_of_rows,
    has_chats,
    name_of_test,
    place_in_files,
)


class AnyTemplate(Chat):
    """Takes the place of a chat template that is not loaded yet: it accepts all messages, and joins their texts."""

    def __init__(self, choice: str):
        self.choice = choice
        self.said = {}

    def write(self, prompt: Turns, answers: Sequence[Turns]) -> tuple[str, list[str]]:
        return _joined(prompt), [_joined(turns) or "a tool call" for turns in answers]


def find_and_check_rows(
    dataset: str, *, bad_rows: str, template: str, chat_template: str, **where: str
) -> Found | None:
    """Return the rows that `load_task` would find, after a first conversion of them; None for embedded data.

    Raises `InputError` for faults of the files, of the columns and of rows, whatever the template will be. Data of
    `datasets`, which may be larger than the memory, are checked by `load_task` only.
    """
    if dataset in EMBEDDED:
        return None
    found = find_rows(dataset, **where)
    form = form_of_rows(dataset, found.rows, where)
    writer: str | Chat = template
    if form.name and (chat_template == "text" or has_chats(found.rows, form)):
        writer = AnyTemplate("text" if chat_template == "text" else "auto")
    for rows, source, files in (
        (found.rows, dataset, found.files),
        (found.test, name_of_test(dataset, found), found.test_files),
    ):
        if isinstance(rows, list):
            convert = form.convert if rows is found.rows else form.convert_test or form.convert
            checked = replace(form, convert=partial(convert, template=writer))
            to_preferences(rows, source, bad_rows, checked, partial(place_in_files, files))
    return found


def _joined(turns: Turns) -> str:
    return "\n".join(turn["content"] for turn in turns).strip()
