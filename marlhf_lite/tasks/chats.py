"""The chat template of a tokenizer, which writes the prompts and answers of rows of messages.

As in TRL, rows of messages take the tokenizer's template if it has one, and rows of text only on request
(`--chat_template text`).
"""

import datetime
import functools
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from marlhf_lite.tasks.chat_templates import render
from marlhf_lite.tasks.messages import THOUGHTS, check_roles, names_of_tool_calls, thought_of
from marlhf_lite.tasks.templates import BadRow
from marlhf_lite.utils.errors import InputError, one_line
from marlhf_lite.utils.interrupts import time_limit

WORDS = ("auto", "none", "text")
ANSWER = "ANSWER"  # represents any answer of the assistant
SECONDS = 10.0  # that a template may take for one text


def chat_writer(tokenizer, choice: str, date: str = "") -> "Chat | None":
    """Return the writer of messages by the chat template; None without a template, or if `choice` is `none`.

    `choice` is `--chat_template`; a file's template becomes the tokenizer's. A template that asks for the time gets the
    start of the `date` (YYYY-MM-DD; default: today). Raises `InputError` if the file cannot be read, and at the first
    messages if the template cannot write a question: data of text need none.
    """
    if choice not in WORDS:
        try:
            tokenizer.chat_template = Path(choice).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = f"give {', '.join(WORDS)}, or the file of a Jinja template"
            raise InputError(
                f"--chat_template {choice}: cannot be read ({type(error).__name__}): {hint}"
            ) from None
    if choice == "text" and tokenizer.chat_template is None:
        raise InputError(
            "--chat_template text: the tokenizer has no chat template: give a file, or leave it out"
        )
    if choice == "none" or tokenizer.chat_template is None:
        return None
    return Chat(tokenizer, choice, date)


class Chat:
    """Writes messages by a tokenizer's chat template."""

    def __init__(self, tokenizer, choice: str, date: str = ""):
        self.tokenizer, self.choice = tokenizer, choice
        self.day = datetime.datetime.fromisoformat(date or datetime.date.today().isoformat())
        self.left_out = 0  # rows of whose prompt the template omits a text, such as the system's
        # answers of which the template omits a text, such as a thought
        self.restored: list[str] = []
        # answers whose thought, which the data keep beside the text, the template does not write
        self.thoughts_left_out = 0
        # prompt that the template wrote -> the messages of the data, or the text that became a user's message
        self.source_of_prompt: dict[str, str | list[dict]] = {}
        self._check = functools.cache(self._try_out)
        self._end = functools.cache(functools.partial(end_of_turn, tokenizer))

    def __call__(self, messages: Sequence[dict]) -> str:
        """Return messages as a prompt, up to the start of the assistant's answer: the same for every answer.

        If the template writes more at the end of a prompt without an answer, such as the start of a thought, the prompt
        ends at the first token that differs, as in TRL.
        """
        self._check()
        text = self._render(messages, add_generation_prompt=True)
        with suppress(BadRow):  # a template that writes no answers
            start = self._first_difference(
                text, self._render([*messages, {"role": "assistant", "content": ANSWER}])
            )
            text = text[:start]
        return text

    def write(
        self, prompt: Sequence[dict], answers: Sequence[Sequence[dict]]
    ) -> tuple[str, list[str]]:
        """Return the prompt and its answers: what the template writes after the prompt, without the end of the turn.

        Raises `BadRow` for roles that the template does not have, and for tool calls that it does not write.
        """
        for turns in (prompt, *answers):
            check_roles(turns, _source(self.tokenizer.chat_template))
        prompt = [self._with_thought_by_its_name(turn) for turn in prompt]
        text = self(prompt)
        self.source_of_prompt[text] = list(prompt)
        self.left_out += not _holds(text, prompt)
        _check_tool_calls(text, prompt)
        written = []
        for turns in answers:
            turns = [self._with_thought_by_its_name(turn) for turn in turns]
            answer = self._write_answer(text, prompt, turns)
            _check_tool_calls(answer, turns)
            if not _holds(answer, [{"content": thought_of(turn)} for turn in turns]):
                self.thoughts_left_out += 1
            written.append(self._without_end(answer))
        return text, written

    def _with_thought_by_its_name(self, turn: dict) -> dict:
        """Return the message with its thought under the name that the template reads, which may not be the data's."""
        source = _source(self.tokenizer.chat_template)
        own = next((key for key in THOUGHTS if key in turn), None)
        read = next((key for key in THOUGHTS if key in source), None)
        if own is None or read is None or own in source:
            return turn
        renamed = {key: value for key, value in turn.items() if key != own}
        return renamed | {read: turn[own]}

    def _write_answer(self, text: str, prompt: Sequence[dict], turns: Sequence[dict]) -> str:
        """Return what the template writes after the prompt, with texts of the answer that the template omits."""
        whole = self._render([*prompt, *turns])
        if whole.startswith(text) and _holds(whole[len(text) :], turns):
            return whole[len(text) :]
        self.restored.append(turns[-1]["content"])
        marks = [f"{ANSWER}-{i}." for i in range(len(turns))]
        whole = self._render(
            [*prompt, *({**turn, "content": mark} for turn, mark in zip(turns, marks, strict=True))]
        )
        for turn, mark in zip(turns, marks, strict=True):
            whole = whole[: len(text)] + whole[len(text) :].replace(mark, turn["content"], 1)
        return whole[len(text) :]

    def _without_end(self, answer: str) -> str:
        """Return the answer without the end of its last turn, if only special tokens and white space follow it."""
        text, end, after = answer.rpartition(self._end())
        for token in _special_tokens(self.tokenizer, after):
            after = after.replace(token, "")
        return text if end and not after.strip() else answer

    def _try_out(self) -> None:
        try:
            self._render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        except BadRow as error:
            raise InputError(
                f"--chat_template {self.choice}: {error}: correct the template, or give none"
            ) from None

    def _render(self, messages: Sequence[dict], **options) -> str:
        for message in messages:  # or a text could end its turn and speak for the assistant
            for text in _texts_of(message):
                if special := next(_special_tokens(self.tokenizer, text), None):
                    raise BadRow("bad_chat", f"a message contains the special token {special}")
        try:
            with time_limit(SECONDS):
                template = _dated(self.tokenizer.chat_template, self.day)
                return render(self.tokenizer, messages, template, **options)
        except Exception as error:  # a template may raise any
            raise BadRow("bad_chat", f"the chat template: {one_line(error)}") from None

    def _first_difference(self, prompt: str, whole: str) -> int:
        """Return how many characters of the prompt are before the first token that differs; all if none does."""
        if whole.startswith(prompt):
            return len(prompt)
        as_tokens = {"add_special_tokens": False, "split_special_tokens": False}
        ids = self.tokenizer(prompt, **as_tokens)["input_ids"]
        encoded = self.tokenizer(whole, return_offsets_mapping=True, **as_tokens)
        same = 0
        for token, other in zip(ids, encoded["input_ids"], strict=False):
            if token != other:
                break
            same += 1
        if same == len(ids):
            return len(prompt)
        return encoded["offset_mapping"][same - 1][1] if same else 0


def _dated(template: str | None, day: datetime.datetime) -> str | None:
    """Return a template whose `strftime_now` writes this day: a macro, since transformers passes no functions on."""
    if not isinstance(template, str) or "strftime_now" not in template:
        return template
    codes = [f"%{flag}{letter}" for flag in ("-", "") for letter in "aAbBcdeFGhHIjmMpSTuUVwWxXyY"]
    chain = "".join(
        f".replace({json.dumps(code)}, {json.dumps(day.strftime(code))})" for code in codes
    )
    return f"{{% macro strftime_now(format) %}}{{{{ format{chain} }}}}{{% endmacro %}}{{{{ '' }}}}{template}"


def expect_chats(tokenizer) -> None:
    """Tell the tokenizer that templates wrote its texts, and let the end of the assistant's turn end a response.

    See `encode_prompts`. Raises `InputError` if the template cannot write an answer.
    """
    tokenizer.expects_chats = True
    tokenizer.eos_token = end_of_turn(tokenizer)


def end_of_turn(tokenizer) -> str:
    """Return the first special token that the template writes after an answer, else EOS. Raises `InputError`."""
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}
    try:
        with time_limit(SECONDS):
            text = render(tokenizer, [question, answer], tokenizer.chat_template)
    except Exception as error:  # a template may raise any
        fix = "correct the template, or give none"
        raise InputError(
            f"--chat_template: cannot write an answer ({one_line(error)}): {fix}"
        ) from None
    _, mark, after = text.rpartition(ANSWER)
    if not mark:
        raise InputError(
            "--chat_template: omits the assistant's answer: correct the template, or give none"
        )
    return next(_special_tokens(tokenizer, after), tokenizer.eos_token)


def _holds(text: str, turns: Sequence[dict]) -> bool:
    """Return whether a text contains all messages, up to white space."""
    squeezed = "".join(text.split())
    return all("".join(turn["content"].split()) in squeezed for turn in turns)


def _texts_of(message: dict) -> list[str]:
    """Return the texts of a message that a template may write: its content, its thought and its tool calls."""
    texts = [message["content"]]
    if thought := thought_of(message):
        texts.append(thought)
    if calls := message.get("tool_calls"):
        texts.append(json.dumps(calls, ensure_ascii=False, default=str))
    return texts


def _check_tool_calls(written: str, turns: Sequence[dict]) -> None:
    """Raise `BadRow` if the template leaves out a tool call: the answer would be empty, or lack what it does."""
    for turn in turns:
        for name in names_of_tool_calls(turn):
            if name not in written:
                fix = "give a template that writes tool calls, or write them into the content"
                raise BadRow(
                    "tool_calls",
                    f"a call of the tool {name!r}, which the chat template leaves out: {fix}",
                )


def _source(template) -> str:
    """Return the text of a chat template, or of all of several."""
    return template if isinstance(template, str) else str(template or "")


def _special_tokens(tokenizer, text: str) -> Iterable[str]:
    """Yield the special tokens of a text, in its order."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    known = tokenizer.added_tokens_decoder
    return (tokenizer.decode(i) for i in ids if i in known and known[i].special)
