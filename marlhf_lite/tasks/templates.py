"""Prompt templates of the four tasks, and rows of any accepted form to the columns of a task.

The templates are those of the paper's Appendix B.1 and B.2. Every prompt ends where the response begins, without white
space; a response begins with the space or line break that parts it from its prompt, so `prompt + response` is the text.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from marlhf_lite.utils.errors import InputError

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
COLUMNS = ("prompt", "chosen", "rejected")

_CITATION = r"\[\d+(?:[ \t]*[,;–-][ \t]*\d+)*\]"
# At the start of a line the space after the citation goes, elsewhere the space before it: words keep one space.
_CITATIONS = re.compile(rf"(?m:^)(?:{_CITATION}[ \t]*)+|[ \t]*{_CITATION}")
_ROLES = {"user": HUMAN, "human": HUMAN, "assistant": ASSISTANT, "gpt": ASSISTANT}


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


def apps_prompt(question: str, starter_code: str = "", call_based: bool = False) -> str:
    """A programming problem as in Hendrycks et al. (2021): question, starter code if any, input format, `ANSWER:`."""
    code = f"\n{starter_code}" if starter_code else ""
    return f"\nQUESTION:\n{question}{code}\nUse {'Call-Based' if call_based else 'Standard Input'} format\nANSWER:"


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
    raise BadRow("no_shared_turn", f"{where}: {fault}" if where else fault)


# Rows to the columns of a task


class BadRow(InputError):
    """A row that cannot be used, with the reason it is counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Form:
    """What rows of one kind look like, how each becomes a row of a `Task`, and how the paper splits them."""

    columns: tuple[str, ...]  # every row has them; others are left out
    convert: Callable[[dict], dict]  # raises BadRow
    known: tuple[str, ...] = ("empty_response",)  # faults the published data has: dropped, whatever bad_rows says
    convert_test: Callable[[dict], dict] | None = None  # for a test set apart, where it differs
    fractions: tuple[float, float, float] = (0.2, 0.4, 0.4)  # sft, rm, ppo
    test_fraction: float = 0.1  # held out where no test set is apart


def to_preferences(
    rows: Iterable[dict], source: str, bad_rows: str = "error", form: Form | None = None, limit: int | None = None
) -> tuple[list[dict], dict[str, int]]:
    """Rows to `(rows of a task, counts)`; with `limit`, reads on only until it has that many.

    Without `form`, rows have the columns prompt, chosen and rejected, or chosen and rejected alone, which are then
    transcripts (see `split_transcripts`), and become `{"prompt", "chosen", "rejected"}` dicts of strings. chosen and
    rejected may also be chats, lists of `{"role": "user" | "assistant", "content"}` (a prompt that is a list goes
    before both). White space at the end of a response is stripped, as the end-of-sequence token follows it; all else
    is kept. `marlhf_lite.tasks.paper_datasets` has the forms of the paper's data sets.

    Rows with a fault that the form knows, such as a blank response in the HH data, are dropped and counted by reason.
    Other bad rows raise `InputError` naming `source` and the row; with `bad_rows="drop"` they are dropped and counted:
    `missing_column`, `not_text`, `bad_chat`, `no_shared_turn`, `empty_prompt`, `equal_pair`. `counts` also has `read`
    and `kept`. Columns missing from all rows, and no row left, are always an `InputError`.
    """
    if bad_rows not in ("error", "drop"):
        raise InputError(f"--bad_rows {bad_rows!r}: choose error or drop")
    found = columns_of(rows)
    form = form or (PAIRS if "prompt" in found else TRANSCRIPTS)
    if rows != []:
        _check_columns(found, form, source)
    kept, counts = [], Counter(read=0)
    for index, row in enumerate(rows):
        counts["read"] += 1
        try:
            kept.append(_convert(row, form))
        except BadRow as bad:
            if bad_rows == "error" and bad.reason not in form.known:
                raise InputError(_complaint(rows, source, index, bad)) from None
            counts[bad.reason] += 1
        if len(kept) == limit:
            break
    if not kept:
        dropped = ", ".join(f"{reason} {n}" for reason, n in counts.items() if reason != "read") or "no rows"
        raise InputError(f"{source}: no row can be used ({dropped}): give at least one whole preference pair")
    return kept, dict(counts, kept=len(kept))


def columns_of(rows: Iterable[dict]) -> list[str]:
    """The columns that any of `rows` has: its `column_names`, or looked up row by row."""
    known = getattr(rows, "column_names", None)
    return list(dict.fromkeys(column for row in rows for column in row)) if known is None else known


def _check_columns(found: Sequence[str], form: Form, source: str) -> None:
    if set(form.columns) <= set(found):
        return
    names = " ".join(", ".join(map(str, found)).split())  # a damaged file's names may hold line breaks
    pairs = f"{', '.join(COLUMNS)} (or chosen, rejected with whole transcripts)"
    expected = pairs if form in (PAIRS, TRANSCRIPTS) else ", ".join(form.columns)
    raise InputError(
        f"{source}: columns found: {names or 'none'}; expected: {expected}: rename or add the missing columns"
    )


def _complaint(rows: Iterable[dict], source: str, index: int, bad: BadRow) -> str:
    place = rows.place(index) if hasattr(rows, "place") else f"row {index + 1}"
    return f"{source}: {place}: {bad}: mend or delete the row, or drop such rows with --bad_rows drop"


def _convert(row: dict, form: Form) -> dict:
    missing = [column for column in form.columns if column not in row]
    if missing:
        raise BadRow("missing_column", f"no {' and no '.join(map(repr, missing))}")
    return form.convert(row)


def _preference(row: dict) -> dict[str, str]:
    if isinstance(row["chosen"], list) or isinstance(row["rejected"], list):
        return _transcript_pair(_chat_transcripts(row))
    return checked_pair(row["prompt"], row["chosen"], row["rejected"])


def _transcript_pair(row: dict) -> dict[str, str]:
    if isinstance(row["chosen"], list) or isinstance(row["rejected"], list):
        row = _chat_transcripts(row)
    for column in ("chosen", "rejected"):
        check_text(row[column], column)
    return checked_pair(*split_transcripts(row["chosen"], row["rejected"]))


def checked_pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    """A preference pair without white space at the end of its responses. Raises `BadRow` for a blank or equal text."""
    for column, text in zip(COLUMNS, (prompt, chosen, rejected), strict=True):
        check_text(text, column)
    _check_pair(prompt, chosen, rejected)
    return {"prompt": prompt, "chosen": chosen.rstrip(), "rejected": rejected.rstrip()}


def check_text(value, column: str) -> None:
    """Raises `BadRow` for what is not text, or cannot be stored as text."""
    if not isinstance(value, str):
        raise BadRow("not_text", f"{column!r} is not text but {type(value).__name__}")
    try:
        value.encode("utf-8")  # half of a surrogate pair, as in "\ud83d", parses as JSON but cannot be stored
    except UnicodeEncodeError as error:
        raise BadRow("not_text", f"{column!r} has half a surrogate pair at character {error.start + 1}") from None


def _check_pair(prompt: str, chosen: str, rejected: str) -> None:
    if not prompt.removesuffix(ASSISTANT).strip():
        raise BadRow("empty_prompt", "the prompt is empty")
    for column, response in (("chosen", chosen), ("rejected", rejected)):
        if not response.strip():
            raise BadRow("empty_response", f"{column!r} is empty")
    if chosen.strip() == rejected.strip():
        raise BadRow("equal_pair", "'chosen' and 'rejected' are equal")


def _chat_transcripts(row: dict) -> dict[str, str]:
    """Chats as HH transcripts, so that one rule finds the prompt of both."""
    before = row.get("prompt")
    before = before if isinstance(before, list) else []
    return {column: _transcript(row[column], before, column) for column in ("chosen", "rejected")}


def _transcript(messages, before: list, column: str) -> str:
    if not isinstance(messages, list):
        raise BadRow("bad_chat", f"{column!r} is not a list of messages, the other column is")
    marks, texts = [], []
    for message in before + messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(message.get("content"), str):
            raise BadRow("bad_chat", f"{column!r} has a message that is not a user's or assistant's text")
        marks.append(_ROLES[role])
        texts.append(f"{_ROLES[role]} {message['content'].strip()}")
    if not marks or marks[0] != HUMAN or marks[-1] != ASSISTANT:
        raise BadRow("bad_chat", f"{column!r} does not go from a user's to an assistant's message")
    return "".join(texts)


PAIRS = Form(COLUMNS, _preference)
TRANSCRIPTS = Form(COLUMNS[1:], _transcript_pair)
