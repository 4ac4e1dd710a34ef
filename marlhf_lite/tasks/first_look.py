"""Refuse rows that no tokenizer and no template could read, before the libraries that take seconds are imported."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.tasks.chats import WORDS, Chat
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.messages import (
    Turns,
    check_roles,
    names_of_tool_calls,
    unwritten_tool_call,
)
from marlhf_lite.tasks.shapes import to_preferences
from marlhf_lite.tasks.sources import (
    Found,
    find_rows,
    form_of_rows,
    most_rows_have_messages,
    name_of_test,
    place_in_files,
)
from marlhf_lite.utils.jsonl import read_json


class UnloadedTemplate(Chat):
    """Takes the place of a chat template until the tokenizer is loaded: it checks roles, and joins texts.

    `text_of_template` is None if it is not known; then any role may be one that the template has, and none is refused.
    """

    def __init__(self, choice: str, text_of_template: str | None):
        self.choice = choice
        self.text_of_template = text_of_template
        self.source_of_prompt = {}

    def write(self, prompt: Turns, answers: Sequence[Turns]) -> tuple[str, list[str]]:
        """Return a prompt and answers that are empty, or equal, only if the texts of the template would be so, too.

        Raises `BadRow` for a role that the template does not have, and for a tool call if it writes none.
        """
        if self.text_of_template is not None:
            for turns in (prompt, *answers):
                check_roles(turns, self.text_of_template)
                self._check_tool_calls(turns)
        written = []
        for turns in answers:
            text = _joined_contents(turns)
            if not text:  # a message with nothing but a tool call is no empty answer
                text = "a tool call"
            written.append(text)
        return f"Human: {_joined_contents(prompt)}", written

    def _check_tool_calls(self, turns: Turns) -> None:
        """Raise `BadRow` for a call of a tool if the template does not name the key of calls, and so writes none."""
        if "tool_calls" in self.text_of_template:
            return
        for turn in turns:
            for name in names_of_tool_calls(turn):
                raise unwritten_tool_call(name)


def find_and_check_rows(
    dataset: str, *, bad_rows: str, template: str, model: str, chat_template: str, **where: str
) -> Found | None:
    """Return the rows that `load_task` would find, after a first conversion of them; None for embedded data.

    Raises `InputError` for faults of the files and columns, and for those of rows that can be found without the
    tokenizer. Data of `datasets`, which may be larger than the memory, are checked only by `load_task`.

    Args:
        bad_rows, template, where: see `load_task`.
        model, chat_template: the options of these names, which say which template will write messages.
    """
    if dataset in EMBEDDED:
        return None
    found = find_rows(dataset, **where)
    form = form_of_rows(dataset, found.rows, where)

    # 1. If a chat template will write the rows (decided as in `load_task`), an `UnloadedTemplate` takes its place.
    writer: str | Chat = template
    is_for_texts = chat_template == "text"
    if not form.has_fixed_prompts and (is_for_texts or most_rows_have_messages(found.rows, form)):
        text_of_template = _text_of_template(model, chat_template)
        has_template = text_of_template != ""  # or it is not known yet
        if has_template:
            choice = "text" if is_for_texts else "auto"
            writer = UnloadedTemplate(choice, text_of_template)

    # 2. Convert the rows for their faults alone. A list of rows was read from files here, so it is in memory already.
    if isinstance(found.rows, list):
        train_form = replace(form, convert=partial(form.convert, template=writer))
        place_of = partial(place_in_files, found.files)
        to_preferences(found.rows, dataset, bad_rows, form=train_form, place_of=place_of)
    if isinstance(found.test, list):
        convert_test = form.convert_test or form.convert  # only APPS has the former
        test_form = replace(form, convert=partial(convert_test, template=writer))
        place_of = partial(place_in_files, found.test_files)
        source = name_of_test(dataset, found)
        to_preferences(found.test, source, bad_rows, form=test_form, place_of=place_of)
    return found


def no_template_writes(model: str, chat_template: str) -> bool:
    """Return whether it is sure without the tokenizer that no chat template writes rows: then `load_task` needs none.

    `model` and `chat_template` are the options of these names. A local folder without a template in its usual places
    may still have one elsewhere, so it is not sure there.
    """
    is_embedded = model in EMBEDDED_MODELS  # these models have no template
    return chat_template == "none" or (chat_template == "auto" and is_embedded)


def _text_of_template(model: str, chat_template: str) -> str | None:
    """Return the text of the chat template that will write the rows; empty without one, None if it is not known yet.

    Embedded models have no template. The text is known if the user gives it as a file, or if the model is a local
    folder in the usual form.
    """
    is_of_tokenizer = chat_template in WORDS
    if chat_template == "none" or (is_of_tokenizer and model in EMBEDDED_MODELS):
        return ""
    if not is_of_tokenizer:
        file = Path(chat_template).expanduser()
        return file.read_text(encoding="utf-8") if file.is_file() else None
    template_file = Path(model).expanduser() / "chat_template.jinja"
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8")
    config_file = Path(model).expanduser() / "tokenizer_config.json"
    if config_file.is_file():
        source = read_json(config_file).get("chat_template") or ""
        return str(source)  # of several templates, their texts together
    return None


def _joined_contents(turns: Turns) -> str:
    return "\n".join(turn["content"] for turn in turns).strip()
