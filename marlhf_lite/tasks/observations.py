"""Observations of an environment as token ids."""

import functools
from collections.abc import Sequence


def make_message(tokenizer, ids: list[int], before: Sequence[int]) -> list[int]:
    """Return the token ids between two turns of the policy if an environment says `ids`.

    If a chat template wrote the prompt, `ids` are put into a message of a tool, or of the user if the template has no
    tools, with everything that the template writes around it: the end of the policy's turn, the start of the message,
    its end, and the start of the policy's next turn. `before` has the last token of the policy's turn, or is empty. If
    this token is the end of the turn already, the end is not written twice.
    """
    is_written_by_template = getattr(tokenizer, "expects_chats", False)
    if not is_written_by_template:
        return ids
    head, tail = _ids_around_observation(tokenizer, tokenizer.chat_template)
    turn_has_ended = list(before) == head[:1]
    if turn_has_ended:
        head = head[1:]
    return head + ids + tail


@functools.lru_cache
def _ids_around_observation(tokenizer, template: str) -> tuple[list[int], list[int]]:
    """Return the token ids between an answer and an observation, and those after the observation.

    Both are empty if the template writes neither a tool's message nor a second one of the user. `template` is the
    tokenizer's own; it is an argument so that a new one is not answered from the cache.
    """
    dialogue = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ANSWER"}]
    for role in ("tool", "user"):
        messages = [*dialogue, {"role": role, "content": "OBSERVATION"}]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # a template may raise any, such as for a role that it does not have
            continue
        before, observation, tail = text.partition("OBSERVATION")
        _, answer, head = before.rpartition("ANSWER")
        if observation and answer:
            ids = tokenizer([head, tail], add_special_tokens=False, split_special_tokens=False)
            return tuple(ids["input_ids"])
    return [], []
