"""The chat template of a tokenizer, which writes the prompts and answers of rows of messages.

As in TRL, rows of messages take the tokenizer's template if it has one, and rows of text only on request
(`--chat_template text`).
"""

import datetime
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from marlhf_lite.tasks.chat_templates import render
from marlhf_lite.tasks.messages import (
    THOUGHTS,
    check_roles,
    names_of_tool_calls,
    thought_of,
    unwritten_tool_call,
    with_calls_of,
)
from marlhf_lite.tasks.templates import BadRow
from marlhf_lite.utils.errors import InputError, one_line
from marlhf_lite.utils.interrupts import time_limit

WORDS = ("auto", "none", "text")
ANSWER = "ANSWER"  # represents any answer of the assistant
CALL = "name_of_a_tool_7f3a"  # represents the name of any tool
SECONDS = 10.0  # how long a template may take for one text


def chat_writer(tokenizer, choice: str, date: str = "") -> "Chat | None":
    """Return the writer of messages by the chat template; None without a template, or if `choice` is `none`.

    `choice` is `--chat_template`; if it is a file, the template in it becomes the tokenizer's. A template that asks for
    the time gets the start of the `date` (YYYY-MM-DD; default: today). Raises `InputError` if the file cannot be read.
    A template that cannot write a question raises it only when the first messages come, because data of text need no
    template.
    """
    is_file = choice not in WORDS
    if is_file:
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
    """Writes messages by a tokenizer's chat template, and remembers what it left out, for notes to the user."""

    def __init__(self, tokenizer, choice: str, date: str = ""):
        """Take the tokenizer, which has a chat template, and the value of `--chat_template` (`choice`).

        If `choice` is text, rows of text are written, too. `date`, as 2026-11-28, is the day for templates that write
        one; by default today.
        """
        self.tokenizer = tokenizer
        self.choice = choice
        self.day = datetime.datetime.fromisoformat(date or datetime.date.today().isoformat())
        # Number of rows in whose prompt a text is missing that the template does not write, such as the system's.
        self.left_out = 0
        # Answers (their last message) in which the template left out a text, such as a thought, until `write` put
        # it back.
        self.restored: list[str] = []
        # Number of answers whose thought stands in a key of its own and is lost: the template has no place for it.
        self.thoughts_left_out = 0
        # Written prompt -> what it was written from: the messages of the row, or its text, written as a user's message.
        self.source_of_prompt: dict[str, str | list[dict]] = {}
        # The next two are functions that run the template at their first call and keep what it gave. They are called
        # when the first messages come and not here, because data of text need no template.
        self._check_once = functools.cache(self._check_that_it_writes_a_question)
        self._end_of_turn = functools.cache(functools.partial(end_of_turn, tokenizer))

    def __call__(self, messages: Sequence[dict]) -> str:
        """Return messages as a prompt, up to the start of the assistant's answer: the same for every answer.

        Some templates end a prompt in two ways: if the answer is still to come, they write more, such as the start of a
        thought, than if the answer follows. Then the prompt ends before the first token in which the two differ, as in
        TRL.
        """
        self._check_once()
        text = self._render(messages, add_generation_prompt=True)
        try:
            with_answer = self._render([*messages, {"role": "assistant", "content": ANSWER}])
        except BadRow:  # the template cannot write an answer
            return text
        return text[: self._first_difference(text, with_answer)]

    def write(
        self, prompt: Sequence[dict], answers: Sequence[Sequence[dict]]
    ) -> tuple[str, list[str]]:
        """Return the texts of a prompt and of its answers: what the template writes after the prompt for each.

        The end of the answer's turn is left off, because tokenisation adds it. Raises `BadRow` for roles that the
        template does not have, and for tool calls that it does not write.
        """
        for turns in (prompt, *answers):
            check_roles(turns, _text_of_template(self.tokenizer.chat_template))

        # 1. The prompt, which `__call__` writes. Prompts that lack a part of the messages are counted for a note.
        prompt = [self._with_thought_under_key_of_template(turn) for turn in prompt]
        written_prompt = self(prompt)
        self.source_of_prompt[written_prompt] = list(prompt)
        if not _contains_all(written_prompt, [turn["content"] for turn in prompt]):
            self.left_out += 1
        self._check_tool_calls([], prompt)

        # 2. The answers. Texts that the template omits are put back. Answers that lack a thought, which the data keep
        #    beside the text, are counted.
        written_answers = []
        for turns in answers:
            turns = [self._with_thought_under_key_of_template(turn) for turn in turns]
            answer = self._write_answer(written_prompt, prompt, turns)
            self._check_tool_calls(prompt, turns)
            if not _contains_all(answer, [thought_of(turn) for turn in turns]):
                self.thoughts_left_out += 1
            written_answers.append(self._without_end_of_turn(answer))
        return written_prompt, written_answers

    def _with_thought_under_key_of_template(self, turn: dict) -> dict:
        """Return a message whose thought is under the key that the chat template reads.

        `THOUGHTS` has the keys by which data and templates call a thought. A template reads a key if its text has it.
        The message stays as it is if it has no thought, if the template reads no thought, and if it reads the
        message's key.
        """
        text_of_template = _text_of_template(self.tokenizer.chat_template)
        keys_in_message = [key for key in THOUGHTS if key in turn]
        keys_in_template = [key for key in THOUGHTS if key in text_of_template]
        if not keys_in_message or not keys_in_template:
            return turn
        key = keys_in_message[0]
        if key in keys_in_template:
            return turn
        renamed = dict(turn)
        renamed[keys_in_template[0]] = renamed.pop(key)
        return renamed

    def _check_tool_calls(self, before: Sequence[dict], turns: Sequence[dict]) -> None:
        """Raise `BadRow` if the template leaves out a tool call of `turns`, which follow the messages `before`.

        Without the call, the answer would be empty, or lack what it does. A name such as `add` may be a word of the
        text, too. So the template writes the messages with another name for each call, `CALL`, which no text has, and
        this name is counted.
        """
        names = []
        marked_turns = []
        for turn in turns:
            names += names_of_tool_calls(turn)
            marked_turns.append(with_calls_of(turn, CALL))
        if not names:
            return
        if self._render([*before, *marked_turns]).count(CALL) < len(names):
            raise unwritten_tool_call(names[0])

    def _write_answer(
        self, written_prompt: str, prompt: Sequence[dict], turns: Sequence[dict]
    ) -> str:
        """Return what the template writes after a prompt for the messages of an answer, with all of their texts.

        `written_prompt` is what it wrote for the messages of `prompt`, and `turns` are the messages of the answer:
        usually one, more if tools are called in between.
        """
        # 1. The template writes prompt and answer. What follows the written prompt is the answer.
        whole = self._render([*prompt, *turns])
        answer = whole[len(written_prompt) :]
        texts = [turn["content"] for turn in turns]
        if whole.startswith(written_prompt) and _contains_all(answer, texts):
            return answer

        # 2. It has read the answer's text and left out a part, such as a thought, or written the prompt in another way.
        #    So each message is written as a mark, in which there is nothing to leave out. `__call__` has found the
        #    written prompt with such a mark as the answer, so the prompt is written in the same way before these marks.
        self.restored.append(turns[-1]["content"])
        marks = [f"{ANSWER}-{number}." for number in range(len(turns))]
        marked_turns = []
        for turn, mark in zip(turns, marks, strict=True):
            marked_turns.append({**turn, "content": mark})
        answer = self._render([*prompt, *marked_turns])[len(written_prompt) :]

        # 3. The messages' texts in the place of the marks. Each mark is replaced only once, where the template wrote
        #    it, because the messages' own texts may have the same characters.
        for turn, mark in zip(turns, marks, strict=True):
            answer = answer.replace(mark, turn["content"], 1)
        return answer

    def _without_end_of_turn(self, answer: str) -> str:
        """Return the answer without the token that ends its last turn, and without what follows that token.

        If other text than special tokens and white space follows the token, it does not end the last turn, and the
        answer stays as it is.
        """
        text, end, after = answer.rpartition(self._end_of_turn())
        for token in _special_tokens(self.tokenizer, after):
            after = after.replace(token, "")
        has_end = end != "" and not after.strip()  # `end` is empty if the token is not there
        return text if has_end else answer

    def _check_that_it_writes_a_question(self) -> None:
        """Raise `InputError` if the template cannot write a short question: the template is at fault, and not a row."""
        try:
            self._render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        except BadRow as error:
            raise InputError(
                f"--chat_template {self.choice}: {error}: correct the template, or give none"
            ) from None

    def _render(self, messages: Sequence[dict], **options) -> str:
        """Return what the template writes. Raises `BadRow` if it cannot, and for a special token in a message.

        With such a token a text could end its turn and speak for the assistant.
        """
        for message in messages:
            for text in _texts_of(message):
                special_tokens = list(_special_tokens(self.tokenizer, text))
                if special_tokens:
                    raise BadRow(
                        "bad_chat", f"a message contains the special token {special_tokens[0]}"
                    )
        try:
            with time_limit(SECONDS):
                template = _dated(self.tokenizer.chat_template, self.day)
                return render(self.tokenizer, messages, template, **options)
        except Exception as error:  # a template may raise any
            raise BadRow("bad_chat", f"the chat template: {one_line(error)}") from None

    def _first_difference(self, prompt: str, whole: str) -> int:
        """Return up to which character the prompt has the same tokens as `whole`, the prompt with an answer.

        If no token differs, that is the length of the prompt.
        """
        # The usual case: the text of the answer follows that of the prompt.
        if whole.startswith(prompt):
            return len(prompt)
        as_tokens = {"add_special_tokens": False, "split_special_tokens": False}
        ids = self.tokenizer(prompt, **as_tokens)["input_ids"]
        encoded = self.tokenizer(whole, return_offsets_mapping=True, **as_tokens)
        end_of_same = 0  # characters of the tokens that are the same in both
        spans = encoded["offset_mapping"]
        for token, other, (_, end) in zip(ids, encoded["input_ids"], spans, strict=False):
            if token != other:
                return end_of_same
            end_of_same = end
        # `zip` has ended with the shorter one, and up to there the tokens are the same.
        is_whole_prompt = len(ids) <= len(encoded["input_ids"])
        return len(prompt) if is_whole_prompt else end_of_same


def _dated(template: str | None, day: datetime.datetime) -> str | None:
    """Return a template whose `strftime_now` writes this day, so that a resumed run has the prompts of its first day.

    A macro of this name at the start of the template takes the place of transformers' function, which writes today. It
    replaces each code of `strftime`, such as %d, by the text for this day. Templates without `strftime_now` stay as
    they are.
    """
    if not isinstance(template, str) or "strftime_now" not in template:
        return template
    replacements = ""
    for flag in ("-", ""):  # %-d first, which has no zero before the number
        for letter in "aAbBcdeFGhHIjmMpSTuUVwWxXyY":
            code = f"%{flag}{letter}"
            replacements += f".replace({json.dumps(code)}, {json.dumps(day.strftime(code))})"
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{replacements} }}}}{{% endmacro %}}"
    keeps_line_break = "{{ '' }}"  # jinja drops a line break after a block
    return f"{macro}{keeps_line_break}{template}"


def expect_chats(tokenizer) -> None:
    """Tell the tokenizer that a chat template wrote its texts, and make the end of the assistant's turn its EOS.

    `encode_prompts` then reads special tokens in the texts as such, and a response ends as the template ends an answer.
    Raises `InputError` if the template cannot write an answer.
    """
    tokenizer.expects_chats = True
    tokenizer.eos_token = end_of_turn(tokenizer)


def end_of_turn(tokenizer) -> str:
    """Return the first special token that the template writes after an answer; EOS if it writes none.

    Raises `InputError` if the template cannot write an answer, or leaves it out.
    """
    question = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": ANSWER}
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


def _contains_all(text: str, parts: Sequence[str]) -> bool:
    """Return whether a text contains all parts, up to white space."""
    squeezed = "".join(text.split())
    return all("".join(part.split()) in squeezed for part in parts)


def _texts_of(message: dict) -> list[str]:
    """Return the texts of a message that a template may write: its content, its thought and its tool calls."""
    texts = [message["content"]]
    if thought := thought_of(message):
        texts.append(thought)
    if calls := message.get("tool_calls"):
        texts.append(json.dumps(calls, ensure_ascii=False, default=str))
    return texts


def _text_of_template(template) -> str:
    """Return the text of a tokenizer's chat template; of several by name, their texts together; empty for None."""
    return template if isinstance(template, str) else str(template or "")


def _special_tokens(tokenizer, text: str) -> Iterator[str]:
    """Yield the special tokens of a text, in its order."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    added_tokens = tokenizer.added_tokens_decoder
    for token in ids:
        if token in added_tokens and added_tokens[token].special:
            yield tokenizer.decode(token)
