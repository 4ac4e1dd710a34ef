"""Prompt templates of the four tasks (paper, Appendix B.1 and B.2), and the conversion of rows to a task's columns.

`prompt + response` is the whole text: a response begins with the space or line break that its prompt does not end with.
`--template released` names the prompts of the paper's released code, which differ on TL;DR and WebGPT.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from marlhf_lite.utils.errors import InputError

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
COLUMNS = ("prompt", "chosen", "rejected")

_CITATION = r"\[\d+(?:[ \t]*[,;–-][ \t]*\d+)*\]"
# At the start of a line the space after the citation goes, elsewhere the space before it: words keep one space.
_CITATIONS = re.compile(rf"(?m:^)(?:{_CITATION}[ \t]*)+|[ \t]*{_CITATION}")
_BRACKETS = re.compile(r"[ \t]*(?:\([^()\[\]]*\)|\[[^()\[\]]*\])")
_MARKS = {"user": HUMAN, "assistant": ASSISTANT}
_ROLES = {"human": "user", "gpt": "assistant"}  # other names of the same


def tldr_prompt(subreddit: str, post: str, template: str = "paper") -> str:
    """Return `POST Subreddit: r/cats`, the post and `TL;DR:`, a line each; `subreddit` may begin with `r/` or be empty.

    With the template `released`, `Subreddit: r/cats` has a line of its own, and a space follows `TL;DR:`.
    """
    name = subreddit.strip().removeprefix("r/")
    between = "\n" if template == "released" else " "
    return _summarize("POST" + (f"{between}Subreddit: r/{name}" if name else ""), post, template)


def article_prompt(article: str, template: str = "paper") -> str:
    """Return `ARTICLE`, a news article and `TL;DR:`, a line each."""
    return _summarize("ARTICLE", article, template)


def _summarize(head: str, text: str, template: str) -> str:
    return f"{head}\n{text.strip()}\nTL;DR:" + (" " if template == "released" else "")


def hh_prompt(turns: str | Sequence[str]) -> str:
    """Return a dialogue as `\\n\\nHuman: … \\n\\nAssistant:`, ready for the assistant's next turn.

    `turns` alternate human, assistant, …, human; a string is one human turn. Raises `InputError` for an even number.
    """
    turns = [turns] if isinstance(turns, str) else list(turns)
    if len(turns) % 2 == 0:
        raise InputError(f"{len(turns)} dialogue turns: give an odd number, the human's first and last")
    marks = (HUMAN, ASSISTANT)
    return "".join(f"{marks[i % 2]} {turn.strip()}" for i, turn in enumerate(turns)) + ASSISTANT


def webgpt_prompt(question: str, template: str = "paper") -> str:
    """Return a WebGPT question as one human turn, without its citations; `released` has no line breaks around it."""
    return f" Human: {question} Assistant:" if template == "released" else hh_prompt(strip_citations(question))


def strip_citations(text: str) -> str:
    """Remove bracketed citations such as `[1]`, `[2, 3]` or `[4-6]`, and the space before them."""
    return _CITATIONS.sub("", text)


def strip_brackets(text: str) -> str:
    """Remove all that stands in round or square brackets, and the space before it, as the released code does."""
    while (shorter := _BRACKETS.sub("", text)) != text:  # the innermost ones first
        text = shorter
    return text


def apps_prompt(question: str, starter_code: str = "", call_based: bool = False) -> str:
    """Return a problem as in Hendrycks et al. (2021): question, starter code if any, input format, `ANSWER:`."""
    code = f"\n{starter_code}" if starter_code else ""
    return f"\nQUESTION:\n{question}{code}\nUse {'Call-Based' if call_based else 'Standard Input'} format\nANSWER:"


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two whole transcripts into `(prompt, chosen, rejected)`.

    The prompt is what both share, up to and including the last `\\n\\nAssistant:` in it; a response is all that
    follows. Nothing is stripped: prompt + response is the transcript, to the character. Raises `BadRow` if no
    assistant turn is shared.
    """
    end = chosen.rfind(ASSISTANT)
    while end >= 0:
        prompt = chosen[: end + len(ASSISTANT)]
        if rejected.startswith(prompt):
            return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
        end = chosen.rfind(ASSISTANT, 0, len(prompt) - 1)
    fault = f"'chosen' and 'rejected' share no {ASSISTANT!r} turn: begin both with the same prompt"
    raise BadRow("no_shared_turn", fault)


# Rows to the columns of a task

Write = Callable[[Sequence[dict]], str]  # a chat template: messages → prompt, up to where the assistant's answer begins


class BadRow(InputError):
    """A row that cannot be used, with the reason under which it is counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Form:
    """The columns of one kind of data set, how a row becomes a row of a `Task`, and how the paper splits the rows.

    A conversion takes a row, and as `template` what its prompts are written by: `paper`, `released`, or a `Write` for
    chats. It raises `BadRow`.
    """

    columns: tuple[str, ...]  # every row has them; others are ignored
    convert: Callable[..., dict]
    known: tuple[str, ...] = ("empty_response",)  # faults of the published data: such rows are always dropped
    convert_test: Callable[..., dict] | None = None  # for the rows of a separate test set, where it differs
    fractions: tuple[float, float, float] = (0.2, 0.4, 0.4)  # sft, rm, ppo
    test_fraction: float = 0.1  # held out where there is no separate test set
    # Rows of another kind, by the name that `--part` evaluates on; `convert` drops them under that name.
    parts: Mapping[str, Callable[..., dict]] = field(default_factory=dict)


def to_preferences(
    rows: Iterable[dict], source: str, bad_rows: str = "error", form: Form | None = None, limit: int | None = None
) -> tuple[list[dict], Counter]:
    """Convert rows to `(rows of a task, counts)`; with `limit`, read only until there are that many.

    Without `form`, rows have the columns prompt, chosen and rejected, or chosen and rejected alone as whole transcripts
    (see `split_transcripts`), and become `{"prompt", "chosen", "rejected"}` dicts of strings. chosen and rejected may
    also be chats, lists of `{"role": "user" | "assistant", "content"}`; a prompt that is a list precedes both. White
    space at the end of a response is stripped, since the end-of-sequence token follows it; all else is kept. With the
    form `PROMPTS` rows have a prompt alone: all of them are PPO's, for a reward that needs no pairs.

    Rows with a fault that the form knows, such as a blank response, are dropped and counted by reason. Other bad rows
    raise `InputError` that names `source` and the row; with `bad_rows="drop"` they are dropped and counted:
    `missing_column`, `not_text`, `bad_chat`, `no_shared_turn`, `empty_prompt`, `equal_pair`. `counts` also has `read`
    and `kept`. Columns that all rows lack, and no row left, are always an `InputError`.
    """
    found = columns_of(rows)
    form = form or (TRANSCRIPTS if "chosen" in found and "prompt" not in found else PAIRS)
    if rows != [] and not set(form.columns) <= set(found):
        names = " ".join(", ".join(map(str, found)).split()) or "none"  # a damaged file's names may hold line breaks
        expected = ", ".join(form.columns)
        expected += " (or chosen, rejected with whole transcripts)" if "rejected" in form.columns else ""
        raise InputError(f"{source}: columns found: {names}; expected: {expected}: rename or add the missing columns")
    kept, counts = [], Counter(read=0)
    for index, row in enumerate(rows):
        counts["read"] += 1
        try:
            for column in form.columns:
                if column not in row:
                    raise BadRow("missing_column", f"no {column!r}")
            kept.append(form.convert(row))
        except BadRow as bad:
            if bad_rows == "error" and bad.reason not in form.known:
                hint = "correct or delete the row, or drop such rows with --bad_rows drop"
                raise InputError(f"{source}: row {index + 1}: {bad}: {hint}") from None
            counts[bad.reason] += 1
        if len(kept) == limit:
            break
    if not kept:
        dropped = ", ".join(f"{reason} {n}" for reason, n in counts.items() if reason != "read") or "no rows"
        raise InputError(f"{source}: no row can be used ({dropped}): give at least one whole preference pair")
    counts["kept"] = len(kept)
    return kept, counts


def columns_of(rows: Iterable[dict]) -> list[str]:
    """Return the columns that any of `rows` has."""
    known = getattr(rows, "column_names", None)
    return list(dict.fromkeys(column for row in rows for column in row)) if known is None else known


def _preference(row: dict, template: str | Write = "paper") -> dict[str, str]:
    """Convert a row of texts, with or without a prompt of its own, or of chats, which `template` may write."""
    chosen, rejected = row["chosen"], row["rejected"]
    if callable(template):
        return _written(template, _chat(row, "chosen"), _chat(row, "rejected"))
    if isinstance(chosen, list) or isinstance(rejected, list):
        chosen, rejected = (_transcript(_chat(row, side), side) for side in ("chosen", "rejected"))
    elif "prompt" in row:
        return checked_pair(row["prompt"], chosen, rejected)
    check_text(chosen, "chosen")
    check_text(rejected, "rejected")
    return checked_pair(*split_transcripts(chosen, rejected))


def _question(row: dict, template: str | Write = "paper") -> dict[str, str]:
    """Convert a prompt alone, a text or messages, which `template` may write."""
    prompt = row["prompt"]
    if callable(template):
        prompt = template(_not_empty(_messages(prompt, "prompt")))
    elif isinstance(prompt, list):
        prompt = _transcript([*_messages(prompt, "prompt"), {"role": "assistant", "content": ""}], "prompt").rstrip()
    check_prompt(prompt)
    return {"prompt": prompt}


# Chats


def _messages(value, column: str) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise BadRow("bad_chat", f"{column!r} is not a list of messages")
    for turn in value:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise BadRow("bad_chat", f"{column!r} has a message without a role and a text")
    return [{"role": _ROLES.get(turn["role"], turn["role"]), "content": turn["content"]} for turn in value]


def _chat(row: dict, side: str) -> list[dict[str, str]]:
    """Return the messages of a response, after those of a `prompt` that is a list; the last is the assistant's."""
    turns = _messages(row["prompt"], "prompt") if isinstance(row.get("prompt"), list) else []
    turns += _messages(row[side], side)
    if not turns or turns[-1]["role"] != "assistant":
        raise BadRow("bad_chat", f"{side!r} does not end with a message of the assistant")
    return turns


def _transcript(turns: list[dict[str, str]], column: str) -> str:
    """Write a chat as an HH transcript, so that one rule finds the prompt of both."""
    if turns[0]["role"] != "user" or not {turn["role"] for turn in turns} <= _MARKS.keys():
        fault = "does not begin with a user's message, or has others than a user's and an assistant's"
        raise BadRow("bad_chat", f"{column!r} {fault}")
    return "".join(f"{_MARKS[turn['role']]} {turn['content'].strip()}" for turn in turns)


def _written(write: Write, chosen: list[dict], rejected: list[dict]) -> dict[str, str]:
    """Return two chats as a pair, whose prompt is all but the last message, as the chat template writes it."""
    if chosen[:-1] != rejected[:-1] or len(chosen) == 1:
        raise BadRow("no_shared_turn", "'chosen' and 'rejected' do not share all messages but the last")
    prompt = write(_not_empty(chosen[:-1]))
    return checked_pair(prompt, chosen[-1]["content"].strip(), rejected[-1]["content"].strip())


def _not_empty(prompt: list[dict[str, str]]) -> list[dict[str, str]]:
    if not prompt or not prompt[-1]["content"].strip():
        raise BadRow("empty_prompt", "the last message before the answer is empty")
    return prompt


# Texts


def check_text(value, column: str) -> None:
    """Raise `BadRow` for a value that is not text, or that cannot be stored as text."""
    if value is None:
        raise BadRow("missing_column", f"no {column!r}")
    if not isinstance(value, str):
        raise BadRow("not_text", f"{column!r} is not text but {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("not_text", f"{column!r} has half a surrogate pair at character {error.start + 1}") from None


def check_prompt(prompt: str) -> None:
    """Raise `BadRow` for a prompt that is no text, or is empty."""
    check_text(prompt, "prompt")
    if not prompt.removesuffix(ASSISTANT).strip():
        raise BadRow("empty_prompt", "the prompt is empty")


def checked_pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    """Return a preference pair without white space at the end of its responses. Raises `BadRow` for a bad one."""
    for column, text in zip(COLUMNS, (prompt, chosen, rejected), strict=True):
        check_text(text, column)
    check_prompt(prompt)
    if not chosen.strip() or not rejected.strip():
        raise BadRow("empty_response", "a response is empty")
    if chosen.strip() == rejected.strip():
        raise BadRow("equal_pair", "'chosen' and 'rejected' are equal")
    return {"prompt": prompt, "chosen": chosen.rstrip(), "rejected": rejected.rstrip()}


PAIRS = Form(COLUMNS, _preference)
TRANSCRIPTS = Form(COLUMNS[1:], _preference)
PROMPTS = Form(COLUMNS[:1], _question, fractions=(0.0, 0.0, 1.0))
