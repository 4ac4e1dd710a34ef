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
    subreddit = ""
    info = row["info"]
    has_subreddit = isinstance(info, dict) and info.get("subreddit") is not None
    if has_subreddit:
        subreddit = _text(row, "info", "subreddit")
    post = _text(row, "info", "post")
    return _comparison(row, templates.tldr_prompt(subreddit, post, template))


def cnn_dm_row(row: dict, template: str = "paper") -> dict[str, str]:
    """Convert a comparison as `tldr_row` does, but keep only the news articles (CNN/DM)."""
    if not _is_article(row):
        raise BadRow("post", "a post, not a news article")
    return _comparison(row, templates.article_prompt(_text(row, "info", "article"), template))


def _is_article(row: dict) -> bool:
    info = row["info"]
    return isinstance(info, dict) and bool(info.get("article")) and not info.get("post")


def _comparison(row: dict, prompt: str) -> dict[str, str]:
    """Return the prompt with the summary that people chose, and the other one. Raises `BadRow`."""
    space = "" if prompt.endswith(" ") else " "  # one between prompt and summary
    summaries = [space + _text(row, "summaries", i, "text").strip() for i in (0, 1)]
    choice = row["choice"]
    if choice not in (0, 1):
        raise BadRow("bad_choice", f"'choice' is {choice!r}, not 0 or 1")
    chosen = summaries[int(choice)]
    rejected = summaries[1 - int(choice)]
    return templates.checked_row(prompt, chosen=chosen, rejected=rejected)


def webgpt_row(row: dict, template: str = "paper") -> dict[str, str]:
    """Convert a row of `openai/webgpt_comparisons`: the answer with the higher score is chosen, ties are dropped.

    The template `released` keeps ties, of which it chooses `answer_0`, and removes all text in brackets.
    """
    strip = templates.strip_brackets if template == "released" else templates.strip_citations
    prompt = templates.webgpt_prompt(_text(row, "question", "full_text"), template)
    answers = [" " + strip(_text(row, f"answer_{i}")).strip() for i in (0, 1)]
    scores = [row["score_0"], row["score_1"]]
    for i, score in enumerate(scores):
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise BadRow("bad_score", f"'score_{i}' is {score!r}, not a number")
    if scores[0] == scores[1] and template == "paper":
        raise BadRow("tie", "both answers have the same score")
    if scores[0] < scores[1]:
        answers.reverse()
    chosen, rejected = answers
    return templates.checked_row(prompt, chosen=chosen, rejected=rejected)


def apps_row(row: dict, template: str = "paper") -> dict[str, str]:
    """Convert a problem of `codeparrot/apps`: `chosen` is its first solution, and `tests` its column `input_output`.

    `tests` is empty if the problem has none. Raises `BadRow` for a problem without a solution.
    """
    problem = apps_test_row(row)
    if not problem["chosen"].strip():
        raise BadRow("no_solution", "'solutions' has none")
    return problem


def apps_test_row(row: dict, template: str = "paper") -> dict[str, str]:
    """Convert a problem as `apps_row` does, but also one without a solution: the test set needs only the tests."""
    tests = _json(row, "input_output", dict)
    solutions = _json(row, "solutions", list)
    starter_code = row["starter_code"] or ""
    templates.check_text(starter_code, "starter_code")
    # Tests that name a function call it; other tests write to the standard input. If there are no tests, starter code
    # shows that a function is called, because it has the head of that function.
    is_call_based = bool(tests.get("fn_name")) if tests else bool(starter_code)
    solution = ""
    if solutions:
        templates.check_text(solutions[0], "solutions[0]")
        solution = "\n" + solutions[0].rstrip()
    return {
        "prompt": templates.apps_prompt(_text(row, "question"), starter_code, is_call_based),
        "chosen": solution,
        "tests": row["input_output"] if tests else "",
        "difficulty": _text(row, "difficulty"),
    }


def _text(row: dict, *path: str | int) -> str:
    """Return the text at `path`, a key or index per level. Raises `BadRow` if there is none."""
    name = ""  # such as summaries[0].text
    for key in path:
        if isinstance(key, int):
            name += f"[{key}]"
        else:
            name += f".{key}"
    name = name.removeprefix(".")
    value = row
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise BadRow("missing_column", f"no {name!r}") from None
    templates.check_text(value, name)
    return value


def _json(row: dict, column: str, kind: type[dict] | type[list]):
    """Return the dict or list (`kind`) that is the JSON text in `column`; an empty one if there is no text.

    Integers in it are returned as text. Raises `BadRow` for other text.
    """
    if not row[column]:
        return kind()
    templates.check_text(row[column], column)
    try:
        # Some problems' tests have integers with more digits than `int` takes, so that `json.loads` would fail. As text
        # they do no harm: only the name of the function and the first solution are taken from the value.
        value = json.loads(row[column], parse_int=str)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        what = "object" if kind is dict else "list"
        raise BadRow("bad_json", f"{column!r} is not a JSON {what}")
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
    """Return an entry of `HUB`: the columns of the form in this folder of the branch with Parquet files."""
    return form, {"data_dir": folder, "revision": PARQUET_BRANCH, "columns": list(form.columns)}


# Name of a data set on the hub -> the form of its rows, and the arguments of `datasets.load_dataset` after the name.
HUB: dict[str, tuple[Form, dict]] = {
    "openai/summarize_from_feedback": _parquet("comparisons", TLDR),
    "Dahoas/full-hh-rlhf": (shapes.PAIRS, {}),
    "openai/webgpt_comparisons": _parquet("default", WEBGPT),
    "codeparrot/apps": _parquet("all", APPS),
}


def form_of(columns: Collection[str], user_columns: str = "") -> Form:
    """Return the form of rows with these columns; `user_columns` is the value of `--columns`.

    A form of the paper's data is taken if more than half of its columns are there, so that a message names the missing
    ones. Rows with chosen and rejected answers may have some of these names by chance, so they need all of them.
    """

    def share(form: Form) -> float:
        return sum(column in columns for column in form.columns) / len(form.columns)

    best = max((WEBGPT, APPS, TLDR), key=share)  # of equal shares the first
    has_pairs = {"chosen", "rejected"} <= set(columns)
    is_of_the_paper = share(best) == 1 if has_pairs else share(best) > 0.5
    if is_of_the_paper:
        return best
    return shapes.shape_of(columns, user_columns)
