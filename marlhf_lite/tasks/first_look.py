"""Refuse rows that no tokenizer and no template could read, before the libraries that take seconds are imported."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.tasks.chats import WORDS, Chat
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.messages import Turns, check_roles
from marlhf_lite.tasks.shapes import to_preferences
from marlhf_lite.tasks.sources import (
    Found,
    find_rows,
    form_of_rows,
    has_chats,
    name_of_test,
    place_in_files,
)
from marlhf_lite.utils.jsonl import read_json


class UnloadedTemplate(Chat):
    """Takes the place of a chat template until the tokenizer is loaded: it checks roles, and joins texts.

    `source` is the text of the template; None if it is not known, and then every role may be one of its own.
    """

    def __init__(self, choice: str, source: str | None):
        self.choice = choice
        self.source = source
        self.said = {}

    def write(self, prompt: Turns, answers: Sequence[Turns]) -> tuple[str, list[str]]:
        if self.source is not None:
            for turns in (prompt, *answers):
                check_roles(turns, self.source)
        asked = f"Human: {_joined(prompt)}"
        return asked, [_joined(turns) or "a tool call" for turns in answers]


def find_and_check_rows(
    dataset: str, *, bad_rows: str, template: str, model: str, chat_template: str, **where: str
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
        source = _source_of_template(model, chat_template)
        if source != "":
            writer = UnloadedTemplate("text" if chat_template == "text" else "auto", source)
    for rows, source, files in (
        (found.rows, dataset, found.files),
        (found.test, name_of_test(dataset, found), found.test_files),
    ):
        if isinstance(rows, list):
            convert = form.convert if rows is found.rows else form.convert_test or form.convert
            checked = replace(form, convert=partial(convert, template=writer))
            to_preferences(rows, source, bad_rows, checked, partial(place_in_files, files))
    return found


def _source_of_template(model: str, chat_template: str) -> str | None:
    """Return the text of the chat template that will write the rows; empty without one, None if it is not known yet.

    It is known of embedded models, which have none, of a file, and of a local folder in the usual form.
    """
    if chat_template == "none" or (chat_template in WORDS and model in EMBEDDED_MODELS):
        return ""
    if chat_template not in WORDS:
        file = Path(chat_template).expanduser()
        return file.read_text(encoding="utf-8") if file.is_file() else None
    folder = Path(model).expanduser()
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if (folder / "tokenizer_config.json").is_file():
        source = read_json(folder / "tokenizer_config.json").get("chat_template") or ""
        return source if isinstance(source, str) else str(source)
    return None


def _joined(turns: Turns) -> str:
    return "\n".join(turn["content"] for turn in turns).strip()
