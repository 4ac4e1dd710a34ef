"""The chat template of a tokenizer, which writes the prompts of rows of messages.

As in TRL, rows of messages take the tokenizer's template where it has one, and rows of text never do.
"""

import functools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from marlhf_lite.tasks.templates import BadRow, Write
from marlhf_lite.utils.errors import InputError, one_line


def chat_writer(tokenizer, choice: str) -> Write | None:
    """Return what writes messages as a prompt; None where there is no template, or `choice` is `none`.

    `choice` is `--chat_template`; a file's template becomes the tokenizer's own. Raises `InputError` where the file
    cannot be read, and at the first messages, where the template cannot write a question: data of text need none.
    """
    if choice not in ("auto", "none"):
        try:
            tokenizer.chat_template = Path(choice).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = f"cannot be read ({type(error).__name__}): give auto, none, or the file of a Jinja template"
            raise InputError(f"--chat_template {choice}: {reason}") from None
    if choice == "none" or tokenizer.chat_template is None:
        return None
    check = functools.cache(partial(_check, tokenizer, choice))

    def write(messages: Sequence[dict]) -> str:
        check()
        return _write(messages, tokenizer)

    return write


def _check(tokenizer, choice: str) -> None:
    try:
        _write([{"role": "user", "content": "Hi"}], tokenizer)
    except BadRow as error:
        raise InputError(f"--chat_template {choice}: {error}: correct the template, or give none") from None


def _write(messages: Sequence[dict], tokenizer) -> str:
    for message in messages:  # or a text could end its turn and speak for the assistant
        if special := _special(tokenizer, message["content"]):
            raise BadRow("bad_chat", f"a message holds the special token {special}")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise what it likes
        raise BadRow("bad_chat", f"the chat template: {one_line(error)}") from None


def expect_chats(tokenizer) -> None:
    """Tell the tokenizer that templates wrote its prompts, and let a response end with what ends the assistant's turn.

    See `encode_prompts`. The end of a turn is the first special token behind the answer, else EOS as it is. Raises
    `InputError` where the template cannot write an answer.
    """
    tokenizer.expects_chats = True
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ANSWER"}
    try:
        text = tokenizer.apply_chat_template([question, answer], tokenize=False)
    except Exception as error:  # a template may raise what it likes
        fix = "correct the template, or give none"
        raise InputError(f"--chat_template: cannot write an answer ({one_line(error)}): {fix}") from None
    _, found, behind = text.rpartition("ANSWER")
    if not found:
        raise InputError("--chat_template: leaves the assistant's answer out: correct the template, or give none")
    tokenizer.eos_token = _special(tokenizer, behind) or tokenizer.eos_token


def _special(tokenizer, text: str) -> str | None:
    """Return the first special token in the text."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    known = tokenizer.added_tokens_decoder
    return next((tokenizer.decode(i) for i in ids if i in known and known[i].special), None)
