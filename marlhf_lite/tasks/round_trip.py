"""Check that texts survive tokenisation: what a policy reads of a prompt, and what a reward gets of an answer."""

import os
import re
from collections.abc import Iterator, Sequence

from marlhf_lite.tasks.answers import encode_continuation
from marlhf_lite.tasks.tokenization import decode_continuation

BATCH = 1000
SHOWN = 24  # characters to show of a text, half of them before the first one that differs


def note_on_lost_texts(tokenizer, prompts: Sequence[str], answers: Sequence[str]) -> Iterator[str]:
    """Yield a note if some texts, once tokenised and decoded again, are other texts; it shows the first such text.

    White space around a text does not count. Nor do the special tokens that a chat template wrote, which decoding
    leaves out, and the white space between them.
    """
    texts = [*dict.fromkeys(prompts), *dict.fromkeys(answers)]  # each text once
    changed: list[tuple[str, str]] = []
    for start in range(0, len(texts), BATCH):
        changed += _texts_that_change(tokenizer, texts[start : start + BATCH])
    if not changed:
        return
    text, decoded = changed[0]
    same_characters = len(os.path.commonprefix([text, decoded]))  # noqa: RUF071 (of characters)
    start = max(same_characters - SHOWN // 2, 0)
    piece = repr(text[start : start + SHOWN])
    piece_decoded = repr(decoded[start : start + SHOWN])
    fix = (
        "a reward gets answers as they come back: let it look for that form, or take another model"
    )
    of_all = f"{len(changed)} of {len(texts)} texts"
    yield f"{of_all} do not come back from their tokens, first {piece} as {piece_decoded}: {fix}"


def _texts_that_change(tokenizer, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each text that is another one after it is tokenised and decoded, with the text that it becomes.

    The text is yielded without special tokens that a chat template wrote, because decoding leaves them out. Both are
    without white space around them.
    """
    is_written_by_template = getattr(tokenizer, "expects_chats", False)
    ids = encode_continuation(tokenizer, texts, split_special_tokens=not is_written_by_template)
    marks = _pattern_of_special_tokens(tokenizer) if is_written_by_template else None
    for text, decoded in zip(texts, decode_continuation(tokenizer, ids), strict=True):
        plain = marks.sub("", text) if marks else text
        has_marks = plain != text
        if has_marks:
            # Templates write line breaks between marks, so white space is not compared at all.
            is_same = "".join(plain.split()) == "".join(decoded.split())
        else:
            is_same = plain.strip() == decoded.strip()
        if not is_same:
            yield plain.strip(), decoded.strip()


def _pattern_of_special_tokens(tokenizer) -> re.Pattern | None:
    """Return what finds the special tokens of a tokenizer in a text; None if it has none."""
    added = tokenizer.added_tokens_decoder.values()
    special = [re.escape(token.content) for token in added if token.special]
    return re.compile("|".join(special)) if special else None
