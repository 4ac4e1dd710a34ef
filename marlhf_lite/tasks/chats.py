"""Preference pairs whose texts are lists of messages, and the chat template that writes them as prompts.

As in TRL, rows of messages take the tokenizer's template where it has one, and rows of text never do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from marlhf_lite.tasks.templates import BadRow, Form, checked_pair
from marlhf_lite.utils.errors import InputError, one_line

Write = Callable[[Sequence[dict]], str]  # messages → prompt, up to where the assistant's answer begins


def chat_writer(tokenizer, choice: str) -> Write | None:
    """Return what writes messages as a prompt; None where there is no template, or `choice` is `none`.

    `choice` is `--chat_template`; a file's template becomes the tokenizer's own. Raises `InputError` where the file
    cannot be read, or the template cannot write a question.
    """
    if choice not in ("auto", "none"):
        try:
            tokenizer.chat_template = Path(choice).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = f"cannot be read ({type(error).__name__}): give auto, none, or the file of a Jinja template"
            raise InputError(f"--chat_template {choice}: {reason}") from None
    if choice == "none" or tokenizer.chat_template is None:
        return None
    try:
        _write([{"role": "user", "content": "Hi"}], tokenizer)
    except BadRow as error:
        raise InputError(f"--chat_template {choice}: {error}: correct the template, or give none") from None
    return partial(_write, tokenizer=tokenizer)


def _write(messages: Sequence[dict], tokenizer) -> str:
    for message in messages:  # or a text could end its turn and speak for the assistant
        ids = tokenizer(message["content"], add_special_tokens=False, split_special_tokens=False)["input_ids"]
        if special := [i for i in ids if _is_special(tokenizer, i)]:
            raise BadRow("bad_chat", f"a message holds the special token {tokenizer.decode(special[0])}")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise what it likes
        raise BadRow("bad_chat", f"the chat template: {one_line(error)}") from None


def expect_chats(tokenizer) -> None:
    """Tell the tokenizer that templates wrote its prompts, and let a response end with what ends the assistant's turn.

    See `encode_prompts`. The end of a turn is the first special token behind the answer, else EOS as it is.
    """
    tokenizer.expects_chats = True
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ANSWER"}
    behind = tokenizer.apply_chat_template([question, answer], tokenize=False).rpartition("ANSWER")[2]
    ids = tokenizer(behind, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    if ends := [i for i in ids if _is_special(tokenizer, i)]:
        tokenizer.eos_token = tokenizer.decode(ends[0])


def _is_special(tokenizer, token: int) -> bool:
    return token in tokenizer.added_tokens_decoder and tokenizer.added_tokens_decoder[token].special


def has_chats(rows) -> bool:
    """Return whether the first row's responses are lists of messages, or its prompt where it has no responses."""
    first = next(iter(rows), {})
    return isinstance(first.get("chosen", first.get("prompt")), list)


def chat_form(form: Form, write: Write) -> Form:
    """Return the form for rows of messages: chosen and rejected are whole, or follow a `prompt` that is a list too."""
    convert = _pair if "chosen" in form.columns else _question
    return replace(form, convert=partial(convert, write=write), chats=True)


def _question(row: dict, write: Write) -> dict[str, str]:
    prompt = row["prompt"] if isinstance(row["prompt"], list) else [None]
    return {"prompt": write(_not_empty(_messages([*prompt, {"role": "assistant", "content": ""}], [], "prompt")[:-1]))}


def _pair(row: dict, write: Write) -> dict[str, str]:
    before = row["prompt"] if isinstance(row.get("prompt"), list) else []
    (*prompt, chosen), (*other, rejected) = (_messages(row[side], before, side) for side in ("chosen", "rejected"))
    if prompt != other or not prompt:
        raise BadRow("no_shared_turn", "'chosen' and 'rejected' do not share all messages but the last")
    return checked_pair(write(_not_empty(prompt)), chosen["content"].strip(), rejected["content"].strip())


def _not_empty(prompt: list[dict[str, str]]) -> list[dict[str, str]]:
    if not prompt or not prompt[-1]["content"].strip():
        raise BadRow("empty_prompt", "the last message before the answer is empty")
    return prompt


def _messages(value, before: list, column: str) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise BadRow("bad_chat", f"{column!r} is not a list of messages")
    turns = [*before, *value]
    if not all(isinstance(turn, dict) and isinstance(turn.get("content"), str) and turn.get("role") for turn in turns):
        raise BadRow("bad_chat", f"{column!r} has a message without a role and a text")
    if not turns or turns[-1]["role"] != "assistant":
        raise BadRow("bad_chat", f"{column!r} does not end with a message of the assistant")
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]
