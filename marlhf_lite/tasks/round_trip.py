"""Check that texts survive tokenisation: what a policy reads of a prompt, and what a reward gets of an answer."""

import os
import re
from collections.abc import Iterator, Sequence

from marlhf_lite.tasks.answers import encode_continuation
from marlhf_lite.tasks.tokenization import decode_continuation, encode_prompts

BATCH = 1000
SHOWN = 24  # characters to show of a text, half of them before the first one that differs


def note_on_lost_texts(tokenizer, prompts: Sequence[str], answers: Sequence[str]) -> Iterator[str]:
    """Yield a note if texts do not come back from their tokens, up to outer white space; it shows the first.

    Special tokens that a chat template wrote do not count, nor does white space around them.
    """
    prompts, answers, lost = list(dict.fromkeys(prompts)), list(dict.fromkeys(answers)), []
    for texts, are_answers in ((prompts, False), (answers, True)):
        for start in range(0, len(texts), BATCH):
            lost += _lost(tokenizer, texts[start : start + BATCH], are_answers)
    if lost:
        text, back, _ = lost[0]
        start = max(len(os.path.commonprefix([text, back])) - SHOWN // 2, 0)  # noqa: RUF071 (of characters)
        shown, came = (repr(x[start : start + SHOWN]) for x in (text, back))
        unknown = sum(has_unknown for *_, has_unknown in lost)
        of_them = f" ({unknown} of them with unknown tokens)" if unknown else ""
        fix = "a reward gets answers as they come back: let it look for that form, or take another model"
        of_all = f"{len(lost)} of {len(prompts) + len(answers)} texts"
        yield f"{of_all} do not come back from their tokens{of_them}, first {shown} as {came}: {fix}"


def _lost(tokenizer, texts: Sequence[str], are_answers: bool) -> list[tuple[str, str, bool]]:
    """Return the texts that do not come back, each with what does, and whether it has unknown tokens."""
    is_written = getattr(tokenizer, "expects_chats", False)
    if are_answers:
        ids = encode_continuation(tokenizer, texts, split_special_tokens=not is_written)
        backs = decode_continuation(tokenizer, ids)
    else:
        ids = encode_prompts(tokenizer, texts)
        backs = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    marks = re.compile("|".join(special)) if special and is_written else None
    lost = []
    for text, back, row in zip(texts, backs, ids, strict=True):
        plain = marks.sub("", text) if marks else text
        one, other = (("".join(x.split()) if plain != text else x.strip()) for x in (plain, back))
        if one != other:
            lost.append((plain.strip(), back.strip(), tokenizer.unk_token_id in row))
    return lost
