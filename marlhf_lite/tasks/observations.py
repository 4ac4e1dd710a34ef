"""Observations of an environment as token ids."""

import functools
from collections.abc import Sequence


def make_message(tokenizer, ids: list[int], before: Sequence[int]) -> list[int]:
    """Return the token ids between two turns of the policy if an environment says `ids`.

    If a chat template wrote the prompt, they are a message of a tool, or of the user if the template has no tools, with
    everything that the template puts around it. `before` has the last token, which may already end a turn.
    """
    if not getattr(tokenizer, "expects_chats", False):
        return ids
    head, tail = _around_messages(tokenizer, tokenizer.chat_template)
    return head[list(before) == head[:1] :] + ids + tail


@functools.lru_cache
def _around_messages(tokenizer, template: str) -> tuple[list[int], list[int]]:
    """Return token ids before and after an observation; none if the template has neither role."""
    as_tokens = {"add_special_tokens": False, "split_special_tokens": False}
    dialogue = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ANSWER"}]
    for role in ("tool", "user"):
        try:
            messages = [*dialogue, {"role": role, "content": "OBSERVATION"}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # a template may raise any
            continue
        head, mark, tail = text.partition("OBSERVATION")
        if mark and "ANSWER" in head:
            parts = (head.rpartition("ANSWER")[2], tail)
            return tuple(tokenizer(part, **as_tokens)["input_ids"] for part in parts)
    return [], []
