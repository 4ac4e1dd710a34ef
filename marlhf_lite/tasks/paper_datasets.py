"""The paper's four data sets as they stand on the hub: what to ask for, and how their rows become a task's.

Three of them have a loading script on their main branch, which `datasets` runs no longer. They are read from the branch
that the hub itself keeps for each data set, with its rows as Parquet, a folder a configuration. A local copy needs no
name: rows are known by their columns.
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from marlhf_lite.tasks.templates import (
    PAIRS,
    TRANSCRIPTS,
    BadRow,
    Form,
    apps_prompt,
    check_text,
    checked_pair,
    strip_citations,
    tldr_prompt,
    webgpt_prompt,
)

PARQUET_BRANCH = "refs/convert/parquet"


def tldr_row(row: dict) -> dict[str, str]:
    """A row of `openai/summarize_from_feedback`, comparisons. Its news articles (CNN/DM, no posts) are left out."""
    info = row["info"] if isinstance(row["info"], dict) else {}
    if info.get("article") and not info.get("post"):
        raise BadRow("news_article", "a news article, not a post")
    prompt = tldr_prompt(_text(row, "info", "subreddit"), _text(row, "info", "post"))
    first, second = (" " + _text(row, "summaries", i, "text").strip() for i in (0, 1))
    if row["choice"] not in (0, 1):
        raise BadRow("bad_choice", f"'choice' is {row['choice']!r}, not 0 or 1")
    return checked_pair(prompt, *((second, first) if row["choice"] else (first, second)))


def webgpt_row(row: dict) -> dict[str, str]:
    """A row of `openai/webgpt_comparisons`; the answer with the higher score is chosen, a tie teaches nothing."""
    prompt = webgpt_prompt(_text(row, "question", "full_text"))
    first, second = (" " + strip_citations(_text(row, f"answer_{i}")).strip() for i in (0, 1))
    scores = [_number(row, f"score_{i}") for i in (0, 1)]
    if scores[0] == scores[1]:
        raise BadRow("tie", "both answers have the same score")
    return checked_pair(prompt, *((first, second) if scores[0] > scores[1] else (second, first)))


def apps_row(row: dict) -> dict[str, str]:
    """A problem of `codeparrot/apps`: `chosen` is its first solution, `tests` its input_output as JSON, '' for none."""
    problem = apps_test_row(row)
    if not problem["chosen"].strip():
        raise BadRow("no_solution", "'solutions' has none")
    return problem


def apps_test_row(row: dict) -> dict[str, str]:
    """As `apps_row`, but problems without a solution stay, `chosen` empty: programs are judged by tests alone."""
    tests = _json(row, "input_output", {})
    solutions = _json(row, "solutions", [])
    starter = row["starter_code"] or ""
    check_text(starter, "starter_code")
    call_based = bool(tests.get("fn_name")) if tests else bool(starter)
    if solutions:
        check_text(solutions[0], "solutions[0]")
    return {
        "prompt": apps_prompt(_text(row, "question"), starter, call_based),
        "chosen": "\n" + solutions[0].rstrip() if solutions else "",
        "tests": row["input_output"] if tests else "",
        "difficulty": _text(row, "difficulty"),
    }


def _inner(row: dict, *path):
    """The value at `path`, one key or index a level."""
    value = row
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise BadRow("missing_column", f"no {_name(path)!r}") from None
    return value


def _name(path: tuple) -> str:
    return path[0] + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path[1:])


def _text(row: dict, *path) -> str:
    value = _inner(row, *path)
    check_text(value, _name(path))
    return value


def _number(row: dict, column: str) -> float:
    if not isinstance(row[column], int | float) or not math.isfinite(row[column]):
        raise BadRow("bad_score", f"{column!r} is {row[column]!r}, not a number")
    return row[column]


def _json(row: dict, column: str, empty: dict | list):
    """The JSON text in `column`, of the type of `empty`, which stands for a blank."""
    if not row[column]:
        return empty
    check_text(row[column], column)
    try:
        value = json.loads(row[column], parse_int=str)  # some tests have integers that are too long for int()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, type(empty)):
        raise BadRow("bad_json", f"{column!r} is not a JSON {'object' if empty == {} else 'list'}")
    return value


_SHARED = ("empty_response", "equal_pair")
TLDR = Form(("info", "summaries", "choice"), tldr_row, (*_SHARED, "news_article"))
WEBGPT = Form(
    ("question", "answer_0", "answer_1", "score_0", "score_1"), webgpt_row, (*_SHARED, "tie"), test_fraction=0.05
)
APPS = Form(
    ("question", "solutions", "input_output", "difficulty", "starter_code"),
    apps_row,
    ("no_solution",),
    convert_test=apps_test_row,
    fractions=(0.2, 0.0, 0.8),
)


@dataclass(frozen=True)
class HubData:
    """One data set: the form of its rows, and what `datasets.load_dataset` is given beside the name."""

    form: Form
    arguments: dict


def _parquet(folder: str, form: Form) -> HubData:
    return HubData(form, {"data_dir": folder, "revision": PARQUET_BRANCH, "columns": list(form.columns)})


HUB = {
    "openai/summarize_from_feedback": _parquet("comparisons", TLDR),
    "Dahoas/full-hh-rlhf": HubData(replace(PAIRS, known=_SHARED), {}),
    "openai/webgpt_comparisons": _parquet("default", WEBGPT),
    "codeparrot/apps": _parquet("all", APPS),
}


def form_of(columns: Collection[str]) -> Form:
    """The form whose columns these are, or most of them: then a message can name what is missing."""

    def share(form: Form) -> float:
        return sum(column in columns for column in form.columns) / len(form.columns)

    best = max((TLDR, WEBGPT, APPS, PAIRS, TRANSCRIPTS), key=lambda form: (share(form), len(form.columns)))
    return best if share(best) > 0.5 else PAIRS
