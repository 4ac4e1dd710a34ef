"""Check that texts survive tokenisation: what a policy reads of a prompt, and what a reward gets of an answer."""

import os
import re
from collections.abc import Iterator, Sequence

from marlhf_lite.tasks.answers import encode_continuation
from marlhf_lite.tasks.tokenization import decode_continuation

BATCH = 1000
SHOWN = 24  # characters to show of a text, half of them before the first one that differs


def note_on_lost_texts(tokenizer, prompts: Sequence[str], answers: Sequence[str]) -> Iterator[str]:
    """Yield a note if texts do not come back from their tokens, up to outer white space; it shows the first.

    Special tokens that a chat template wrote do not count, nor does white space around them.
    """
    texts = [*dict.fromkeys(prompts), *dict.fromkeys(answers)]
    batches = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
    if lost := [pair for batch in batches for pair in _lost(tokenizer, batch)]:
        text, back = lost[0]
        start = max(len(os.path.commonprefix([text, back])) - SHOWN // 2, 0)  # noqa: RUF071 (of characters)
        shown, came = (repr(x[start : start + SHOWN]) for x in (text, back))
        fix = "a reward gets answers as they come back: let it look for that form, or take another model"
        of_all = f"{len(lost)} of {len(texts)} texts"
        yield f"{of_all} do not come back from their tokens, first {shown} as {came}: {fix}"


def _lost(tokenizer, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the texts that do not come back, each with what does."""
    is_written = getattr(tokenizer, "expects_chats", False)
    ids = encode_continuation(tokenizer, texts, split_special_tokens=not is_written)
    special = [
        re.escape(token.content)
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
    ]
    marks = re.compile("|".join(special)) if special and is_written else None
    for text, back in zip(texts, decode_continuation(tokenizer, ids), strict=True):
        plain = marks.sub("", text) if marks else text
        one, other = (("".join(x.split()) if plain != text else x.strip()) for x in (plain, back))
        if one != other:
            yield plain.strip(), back.strip()
