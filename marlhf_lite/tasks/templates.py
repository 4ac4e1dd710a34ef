"""Prompt templates of the open-ended tasks, and rows of any accepted form to preference pairs.

The templates are those of the paper's Appendix B.1 and B.2. Every prompt ends where the response begins, without white
space; a response begins with the space or line break that parts it from its prompt, so `prompt + response` is the text.
"""

import re
from collections import Counter
from collections.abc import Sequence

from marlhf_lite.errors import InputError

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
COLUMNS = ("prompt", "chosen", "rejected")

_CITATION = r"\[\d+(?:[ \t]*[,;–-][ \t]*\d+)*\]"
# At the start of a line the space after the citation goes, elsewhere the space before it: words keep one space.
_CITATIONS = re.compile(rf"(?m:^)(?:{_CITATION}[ \t]*)+|[ \t]*{_CITATION}")
_ROLES = {"user": HUMAN, "human": HUMAN, "assistant": ASSISTANT, "gpt": ASSISTANT}
_ALWAYS_DROPPED = ("empty_response",)


def tldr_prompt(subreddit: str, post: str) -> str:
    """`POST Subreddit: r/cats`, the post and `TL;DR:`, a line each. `subreddit` is given with or without `r/`."""
    return f"POST Subreddit: r/{subreddit.strip().removeprefix('r/')}\n{post.strip()}\nTL;DR:"


def hh_prompt(turns: str | Sequence[str]) -> str:
    """A dialogue as `\\n\\nHuman: … \\n\\nAssistant:`, ready for the assistant's next turn.

    `turns` alternate human, assistant, …, human; a string is a single human turn. Raises `InputError` where the last
    turn is not the human's (an even number of turns).
    """
    turns = [turns] if isinstance(turns, str) else list(turns)
    if len(turns) % 2 == 0:
        raise InputError(f"{len(turns)} dialogue turns: give an odd number, the human's first and last")
    marks = (HUMAN, ASSISTANT)
    return "".join(f"{marks[i % 2]} {turn.strip()}" for i, turn in enumerate(turns)) + ASSISTANT


def webgpt_prompt(question: str) -> str:
    """A WebGPT question as one human turn, its bracketed citations stripped."""
    return hh_prompt(strip_citations(question))


def strip_citations(text: str) -> str:
    """`text` without bracketed citations such as `[1]`, `[2, 3]` or `[4-6]`, and without the space before them."""
    return _CITATIONS.sub("", text)


def split_transcripts(chosen: str, rejected: str, where: str = "") -> tuple[str, str, str]:
    """Two whole transcripts to `(prompt, chosen, rejected)`.

    The prompt is what both share, up to and with the last `\\n\\nAssistant:` in it; a response is all that follows,
    later turns included where the dialogues part early. Nothing is stripped: prompt + response is the transcript, to
    the character. Raises `InputError`, which begins with `where` (file and row), if no assistant turn is shared.
    """
    end = chosen.rfind(ASSISTANT)
    while end >= 0:
        prompt = chosen[: end + len(ASSISTANT)]
        if rejected.startswith(prompt):
            return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
        end = chosen.rfind(ASSISTANT, 0, end + len(ASSISTANT) - 1)
    fault = f"'chosen' and 'rejected' share no {ASSISTANT!r} turn: begin both with the same prompt"
    raise _BadRow("no_shared_turn", f"{where}: {fault}" if where else fault)


class _BadRow(InputError):
    """A row that cannot be used, with the reason it is counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def to_preferences(rows: Sequence[dict], source: str, bad_rows: str = "error") -> tuple[list[dict], dict[str, int]]:
    """Rows to `({"prompt", "chosen", "rejected"} dicts of strings, counts)`.

    Rows have the columns prompt, chosen and rejected, or chosen and rejected alone, which are then transcripts (see
    `split_transcripts`). chosen and rejected may also be chats, lists of `{"role": "user" | "assistant", "content"}`
    (a prompt that is a list goes before both). Other columns are left out. White space at the end of a response is
    stripped, as the end-of-sequence token follows it; all else is kept.

    Rows with a blank response, known in the HH data, are dropped and counted as `empty_response`. Other bad rows raise
    `InputError` naming `source` and the row; with `bad_rows="drop"` they are dropped and counted by reason:
    `missing_column`, `not_text`, `bad_chat`, `no_shared_turn`, `empty_prompt`, `equal_pair`. `counts` also has `read`
    and `kept`. Columns missing from all rows, and no row left, are always an `InputError`.
    """
    if bad_rows not in ("error", "drop"):
        raise InputError(f"--bad_rows {bad_rows!r}: choose error or drop")
    columns = _check_columns(rows, source)
    place = getattr(rows, "place", lambda index: f"row {index + 1}")
    kept, counts = [], Counter(read=len(rows))
    for index, row in enumerate(rows):
        try:
            kept.append(_preference(row, columns))
        except _BadRow as bad:
            if bad_rows == "error" and bad.reason not in _ALWAYS_DROPPED:
                raise InputError(
                    f"{source}: {place(index)}: {bad}: mend or delete the row, or drop such rows with --bad_rows drop"
                ) from None
            counts[bad.reason] += 1
    if not kept:
        dropped = ", ".join(f"{reason} {n}" for reason, n in counts.items() if reason != "read") or "no rows"
        raise InputError(f"{source}: no row can be used ({dropped}): give at least one whole preference pair")
    counts["kept"] = len(kept)
    return kept, dict(counts)


def _check_columns(rows: Sequence[dict], source: str) -> tuple[str, ...]:
    """The columns to read: the prompt is left out where no row has one."""
    found = dict.fromkeys(column for row in rows for column in row)
    if rows and not {"chosen", "rejected"} <= found.keys():
        names = " ".join(", ".join(map(str, found)).split())  # a damaged file's names may hold line breaks
        raise InputError(
            f"{source}: columns found: {names or 'none'}; expected: prompt, chosen, rejected (or "
            f"chosen, rejected with whole transcripts): rename or add the missing columns"
        )
    return COLUMNS if "prompt" in found else COLUMNS[1:]


def _preference(row: dict, columns: tuple[str, ...]) -> dict[str, str]:
    missing = [column for column in columns if column not in row]
    if missing:
        raise _BadRow("missing_column", f"no {' and no '.join(map(repr, missing))}")
    if isinstance(row["chosen"], list) or isinstance(row["rejected"], list):
        columns, row = COLUMNS[1:], _chat_transcripts(row)
    for column in columns:
        _check_text(row[column], column)
    if "prompt" in columns:
        prompt, chosen, rejected = (row[column] for column in COLUMNS)
    else:
        prompt, chosen, rejected = split_transcripts(row["chosen"], row["rejected"])
    _check_pair(prompt, chosen, rejected)
    return {"prompt": prompt, "chosen": chosen.rstrip(), "rejected": rejected.rstrip()}


def _check_text(value, column: str) -> None:
    if not isinstance(value, str):
        raise _BadRow("not_text", f"{column!r} is not text but {type(value).__name__}")
    try:
        value.encode("utf-8")  # half of a surrogate pair, as in "\ud83d", parses as JSON but cannot be stored
    except UnicodeEncodeError as error:
        raise _BadRow("not_text", f"{column!r} has half a surrogate pair at character {error.start + 1}") from None


def _check_pair(prompt: str, chosen: str, rejected: str) -> None:
    if not prompt.removesuffix(ASSISTANT).strip():
        raise _BadRow("empty_prompt", "the prompt is empty")
    for column, response in (("chosen", chosen), ("rejected", rejected)):
        if not response.strip():
            raise _BadRow("empty_response", f"{column!r} is empty")
    if chosen.strip() == rejected.strip():
        raise _BadRow("equal_pair", "'chosen' and 'rejected' are equal")


def _chat_transcripts(row: dict) -> dict[str, str]:
    """Chats as HH transcripts, so that one rule finds the prompt of both."""
    before = row.get("prompt")
    before = before if isinstance(before, list) else []
    return {column: _transcript(row[column], before, column) for column in ("chosen", "rejected")}


def _transcript(messages, before: list, column: str) -> str:
    if not isinstance(messages, list):
        raise _BadRow("bad_chat", f"{column!r} is not a list of messages, the other column is")
    marks, texts = [], []
    for message in before + messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(message.get("content"), str):
            raise _BadRow("bad_chat", f"{column!r} has a message that is not a user's or assistant's text")
        marks.append(_ROLES[role])
        texts.append(f"{_ROLES[role]} {message['content'].strip()}")
    if not marks or marks[0] != HUMAN or marks[-1] != ASSISTANT:
        raise _BadRow("bad_chat", f"{column!r} does not go from a user's to an assistant's message")
    return "".join(texts)
