"""The paper's four data sets on the hub: what to load, and how their rows become rows of a task.

Three of them have a loading script on their main branch, which `datasets` no longer runs. They come from the branch
with Parquet files that the hub keeps for each data set. The columns identify a local copy.
"""

import json
import math
from collections.abc import Collection

from marlhf_lite.tasks import shapes, templates
from marlhf_lite.tasks.templates import WITHOUT_PAIRS, BadRow, Form

PARQUET_BRANCH = "refs/convert/parquet"


def tldr_row(row: dict, template: str = "paper") -> dict[str, str]:
    """Convert a comparison of `openai/summarize_from_feedback`. Its news articles (CNN/DM) are left out."""
    if _is_article(row):
        raise BadRow("cnn_dm", "a news article, not a post")
    info = row["info"] if isinstance(row["info"], dict) else {}
    subreddit = _text(row, "info", "subreddit") if info.get("subreddit") is not None else ""
    return _comparison(row, templates.tldr_prompt(subreddit, _text(row, "info", "post"), template))


def cnn_dm_row(row: dict, template: str = "paper") -> dict[str, str]:
    """Convert a comparison as `tldr_row` does, but keep only the news articles (CNN/DM)."""
    if not _is_article(row):
        raise BadRow("post", "a post, not a news article")
    return _comparison(row, templates.article_prompt(_text(row, "info", "article"), template))


def _is_article(row: dict) -> bool:
    return (
        isinstance(row["info"], dict)
        and bool(row["info"].get("article"))
        and not row["info"].get("post")
    )


def _comparison(row: dict, prompt: str) -> dict[str, str]:
    space = "" if prompt.endswith(" ") else " "
    first, second = (space + _text(row, "summaries", i, "text").strip() for i in (0, 1))
    if row["choice"] not in (0, 1):
        raise BadRow("bad_choice", f"'choice' is {row['choice']!r}, not 0 or 1")
    chosen, rejected = (second, first) if row["choice"] else (first, second)
    return templates.checked_row(prompt, chosen=chosen, rejected=rejected)


def webgpt_row(row: dict, template: str = "paper") -> dict[str, str]:
    """Convert a row of `openai/webgpt_comparisons`: the answer with the higher score is chosen, ties are dropped.

    The template `released` keeps ties, of which it chooses `answer_0`, and removes all text in brackets.
    """
    strip = templates.strip_brackets if template == "released" else templates.strip_citations
    prompt = templates.webgpt_prompt(_text(row, "question", "full_text"), template)
    first, second = (" " + strip(_text(row, f"answer_{i}")).strip() for i in (0, 1))
    scores = [row["score_0"], row["score_1"]]
    for i, score in enumerate(scores):
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise BadRow("bad_score", f"'score_{i}' is {score!r}, not a number")
    if scores[0] == scores[1] and template == "paper":
        raise BadRow("tie", "both answers have the same score")
    chosen, rejected = (first, second) if scores[0] >= scores[1] else (second, first)
    return templates.checked_row(prompt, chosen=chosen, rejected=rejected)


def apps_row(row: dict, template: str = "paper") -> dict[str, str]:
    """Convert a problem of `codeparrot/apps`: `chosen` is its first solution, `tests` its input_output or empty."""
    problem = apps_test_row(row)
    if not problem["chosen"].strip():
        raise BadRow("no_solution", "'solutions' has none")
    return problem


def apps_test_row(row: dict, template: str = "paper") -> dict[str, str]:
    """Convert a problem as `apps_row` does, but keep those without a solution: only tests judge programs."""
    tests = _json(row, "input_output", {})
    solutions = _json(row, "solutions", [])
    starter = row["starter_code"] or ""
    templates.check_text(starter, "starter_code")
    call_based = bool(tests.get("fn_name")) if tests else bool(starter)
    if solutions:
        templates.check_text(solutions[0], "solutions[0]")
    return {
        "prompt": templates.apps_prompt(_text(row, "question"), starter, call_based),
        "chosen": "\n" + solutions[0].rstrip() if solutions else "",
        "tests": row["input_output"] if tests else "",
        "difficulty": _text(row, "difficulty"),
    }


def _text(row: dict, *path) -> str:
    """Return the text at `path`, a key or index per level. Raises `BadRow` if there is none."""
    value, name = (
        row,
        path[0] + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path[1:]),
    )
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise BadRow("missing_column", f"no {name!r}") from None
    templates.check_text(value, name)
    return value


def _json(row: dict, column: str, empty: dict | list):
    """Parse the JSON text in `column`, whose type is that of `empty`; a blank gives `empty`."""
    if not row[column]:
        return empty
    templates.check_text(row[column], column)
    try:
        # some tests have integers that are too long for int()
        value = json.loads(row[column], parse_int=str)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, type(empty)):
        raise BadRow("bad_json", f"{column!r} is not a JSON {'object' if empty == {} else 'list'}")
    return value


TLDR = Form(("info", "summaries", "choice"), tldr_row, parts={"cnn_dm": cnn_dm_row})
WEBGPT = Form(
    ("question", "answer_0", "answer_1", "score_0", "score_1"), webgpt_row, test_fraction=0.05
)
APPS = Form(
    ("question", "solutions", "input_output", "difficulty", "starter_code"),
    apps_row,
    convert_test=apps_test_row,
    fractions=WITHOUT_PAIRS,
)


def _parquet(folder: str, form: Form) -> tuple[Form, dict]:
    return form, {"data_dir": folder, "revision": PARQUET_BRANCH, "columns": list(form.columns)}


# Name of a data set on the hub -> the form of its rows, and the arguments of `datasets.load_dataset` after the name.
HUB: dict[str, tuple[Form, dict]] = {
    "openai/summarize_from_feedback": _parquet("comparisons", TLDR),
    "Dahoas/full-hh-rlhf": (shapes.PAIRS, {}),
    "openai/webgpt_comparisons": _parquet("default", WEBGPT),
    "codeparrot/apps": _parquet("all", APPS),
}


def form_of(columns: Collection[str], names: str = "") -> Form:
    """Return the form with these columns, also a form of the paper's data with most: a message names the missing."""

    def share(form: Form) -> float:
        return sum(column in columns for column in form.columns) / len(form.columns)

    best = max((TLDR, WEBGPT, APPS), key=lambda form: (share(form), len(form.columns)))
    pairs = {"chosen", "rejected"} <= set(columns)  # other pairs may have columns of the same names
    return best if share(best) > (0.99 if pairs else 0.5) else shapes.shape_of(columns, names)
