"""Prompt templates of the four tasks (paper, Appendix B.1 and B.2), and the checks of a task's rows.

`prompt + response` is the whole text: a response begins with the space or line break between them. `--template
released` takes the prompts of the paper's released code, which differ on TL;DR and WebGPT.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from marlhf_lite.utils.errors import InputError

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
SPACES_OF_NO_WIDTH = "\u200b\u2060\ufeff"
COLUMNS = ("prompt", "chosen", "rejected")
WITHOUT_PAIRS = (0.2, 0.0, 0.8)  # shares of sft, rm and ppo if no pairs train a reward model
# Faults of published data, and rows that a task does not use: always dropped, and counted by these names.
DROPPED = (
    "empty_response",
    "equal_pair",
    "human_last",
    "labelled_false",
    "tie",
    "no_solution",
    "cnn_dm",
    "post",
)

_CITATION = r"\[\d+(?:[ \t]*[,;–-][ \t]*\d+)*\]"
# At the start of a line the space after the citation goes, elsewhere the space before it: one space stays.
_CITATIONS = re.compile(rf"(?m:^)(?:{_CITATION}[ \t]*)+|[ \t]*{_CITATION}")
_BRACKETS = re.compile(r"[ \t]*(?:\([^()\[\]]*\)|\[[^()\[\]]*\])")
_WRITTEN_LIST = re.compile(r"\s*\[\s*\{\s*['\"](?:role|content|from|value)['\"]\s*:")


def tldr_prompt(subreddit: str, post: str, template: str = "paper") -> str:
    """Return `POST Subreddit: r/cats`, the post and `TL;DR:`, one per line; `subreddit` may have `r/` or be empty.

    With the template `released`, `Subreddit: r/cats` has a separate line, and a space follows `TL;DR:`.
    """
    name = subreddit.strip().removeprefix("r/")
    head = "POST"
    if name:
        between = "\n" if template == "released" else " "
        head += f"{between}Subreddit: r/{name}"
    return _summarize(head, post, template)


def article_prompt(article: str, template: str = "paper") -> str:
    """Return `ARTICLE`, a news article and `TL;DR:`, one per line."""
    return _summarize("ARTICLE", article, template)


def _summarize(head: str, text: str, template: str) -> str:
    """Return a text between a head and `TL;DR:`, after which `released` has a space."""
    space = " " if template == "released" else ""
    return f"{head}\n{text.strip()}\nTL;DR:{space}"


def hh_prompt(turns: str | Sequence[str]) -> str:
    """Return a dialogue as `\\n\\nHuman: … \\n\\nAssistant:`, ready for the assistant's next turn.

    `turns` alternate human, assistant, …, human; a string is one human turn.
    """
    if isinstance(turns, str):
        turns = [turns]
    prompt = ""
    for number, turn in enumerate(turns):
        mark = HUMAN if number % 2 == 0 else ASSISTANT
        prompt += f"{mark} {turn.strip()}"
    return prompt + ASSISTANT


def webgpt_prompt(question: str, template: str = "paper") -> str:
    """Return a WebGPT question as one human turn, without its citations; `released` has no line breaks around it."""
    if template == "released":
        return f" Human: {question} Assistant:"
    return hh_prompt(strip_citations(question))


def strip_citations(text: str) -> str:
    """Remove bracketed citations such as `[1]`, `[2, 3]` or `[4-6]`, and the space before them."""
    return _CITATIONS.sub("", text)


def strip_brackets(text: str) -> str:
    """Remove round and square brackets with their content and the space before, as the released code does."""
    while True:  # each pass removes the innermost ones
        shorter = _BRACKETS.sub("", text)
        if shorter == text:
            return text
        text = shorter


def apps_prompt(question: str, starter_code: str = "", call_based: bool = False) -> str:
    """Return a problem as in Hendrycks et al. (2021): question, starter code if any, input format, `ANSWER:`."""
    code = f"\n{starter_code}" if starter_code else ""
    input_format = "Call-Based" if call_based else "Standard Input"
    return f"\nQUESTION:\n{question}{code}\nUse {input_format} format\nANSWER:"


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two whole transcripts into `(prompt, chosen, rejected)`.

    The prompt is the start that both share, up to and including its last `\\n\\nAssistant:`, or, if there is none, its
    last `\\nAssistant:`. A response is the rest. Nothing is stripped: prompt + response is the transcript, to the
    character.
    Raises `BadRow` if they share no assistant turn.
    """
    shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071 (of characters)
    for mark in (ASSISTANT, ASSISTANT[1:]):
        if mark in shared:
            end = shared.rindex(mark) + len(mark)
            return shared[:end], chosen[end:], rejected[end:]
    fix = "begin both with the same prompt, or name its column by --columns prompt=NAME"
    raise BadRow("no_shared_turn", f"'chosen' and 'rejected' share no {ASSISTANT!r} turn: {fix}")


# Rows of a task


class BadRow(InputError):
    """A row that cannot be used, with the reason under which it is counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Form:
    """The columns of one kind of data set, how a row becomes a row of a `Task`, and how the paper splits the rows.

    A conversion takes a row, and as `template` the way to write its prompts: `paper`, `released`, or a chat template
    (`chats.Chat`). It raises `BadRow`.
    """

    columns: tuple[str, ...]  # every row has them
    convert: Callable[..., dict]
    # for the rows of a separate test set, if it differs
    convert_test: Callable[..., dict] | None = None
    fractions: tuple[float, float, float] = (0.2, 0.4, 0.4)  # sft, rm, ppo
    test_fraction: float = 0.1  # held out without a separate test set
    # Rows of another kind, by the name that `--part` evaluates on; `convert` drops them under that name.
    parts: Mapping[str, Callable[..., dict]] = field(default_factory=dict)
    name: str = ""  # what a run calls it; see `has_fixed_prompts`
    # columns that are used if present; a run names all others as unused
    optional: tuple[str, ...] = ()
    # name of a column in `convert` -> its name in the rows
    names: Mapping[str, str] = field(default_factory=dict)
    # columns that the user's functions take: they go along with the prompt
    columns_for_functions: tuple[str, ...] = ()
    needed_by_functions: tuple[str, ...] = ()  # those of them that every row must have

    @property
    def has_fixed_prompts(self) -> bool:
        """Whether the paper says how the prompts are written (TL;DR, WebGPT, APPS), so that no chat template does.

        These forms have no name, because a run need not say how it understood the rows of the paper's own data.
        """
        return not self.name


def check_text(value, column: str) -> None:
    """Raise `BadRow` for a value that is not text, a list of messages written as text, and text that is not UTF-8."""
    if value is None:
        raise BadRow("missing_column", f"no {column!r}")
    if not isinstance(value, str):
        raise BadRow("not_text", f"{column!r} is not text but {type(value).__name__}")
    if _WRITTEN_LIST.match(value):
        raise BadRow(
            "written_list",
            f"{column!r} is a list of messages as text: store lists, in JSON lines or Parquet",
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(
            "not_text", f"{column!r} has half a surrogate pair at character {error.start + 1}"
        ) from None


def _visible(text: str) -> str:
    """Return a text without the white space and the spaces of no width around it."""
    return text.strip().strip(SPACES_OF_NO_WIDTH).strip()


def checked_row(prompt: str, **answers: str) -> dict[str, str]:
    """Return a row of a task: a prompt and its answers `chosen` and `rejected`, if it has them.

    Raises `BadRow` if one of them is not text, if one is empty, and if the answers are equal.
    """
    row = {"prompt": prompt, **answers}
    for column, text in row.items():
        check_text(text, column)
    # The mark of the assistant's turn alone is not a prompt.
    without_mark = re.sub(r"(?:^|\n)Assistant:$", "", prompt)
    if not _visible(without_mark):
        raise BadRow("empty_prompt", "the prompt is empty")
    stripped_answers = [_visible(text) for text in answers.values()]
    if "" in stripped_answers:
        raise BadRow("empty_response", "an answer is empty")
    if len(set(stripped_answers)) < len(stripped_answers):
        raise BadRow("equal_pair", "'chosen' and 'rejected' are equal")
    return row
