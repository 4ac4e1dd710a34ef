"""The paper's four data sets, in the hub's own schema: fixtures stand where the hub's Parquet branch has its files."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import pytest
from conftest import fails
from datasets import Features, Value

from marlhf_lite.tasks.loading import load_task
from marlhf_lite.tasks.paper_datasets import APPS, HUB, TLDR, WEBGPT
from marlhf_lite.tasks.shapes import to_preferences

LOAD_DATASET = datasets.load_dataset
TLDR_NAME, HH_NAME, WEBGPT_NAME, APPS_NAME = HUB
TEXT, INT = Value("string"), Value("int32")
# of a file whose articles, posts or titles are all missing, nobody could tell that they are texts
FEATURES = {
    TLDR_NAME: Features(
        {column: TEXT for column in ("worker", "batch", "split")}
        | {"info": {key: TEXT for key in ("id", "post", "title", "subreddit", "site", "article")}}
        | {"summaries": [{key: TEXT for key in ("text", "policy", "note")}]}
        | {"choice": INT, "extra": {"confidence": INT}}
    )
}


def tldr(i, choice=0, texts=None, **info):
    info = {
        "id": f"t3_{i}",
        "post": f"Post {i}.\n",
        "title": f"Title {i}",
        "subreddit": "cats",
    } | info
    texts = texts or (f" first {i} ", f" second {i}")
    return {
        "info": {"site": None, "article": None} | info,
        "summaries": [{"text": text, "policy": "sup4", "note": None} for text in texts],
        "choice": choice,
        **{"worker": "w", "batch": "batch9", "split": "train", "extra": {"confidence": None}},
    }


def article(i):
    return tldr(i, post=None, title=None, subreddit=None, site="dailymail", article="News.")


def hh(i, chosen=" Yes.", rejected=" No."):
    return {
        "prompt": f"\n\nHuman: {i}?\n\nAssistant:",
        "response": chosen,
        "chosen": chosen,
        "rejected": rejected,
    }


def webgpt(i, score_0=0.5, answers=("Paws [1][2].", "Claws [3].\n"), score_1=None):
    row = {"question": {"dataset": "eli5", "id": str(i), "full_text": f"Why {i} [4]?"}}
    for side, score in enumerate((score_0, -score_0 if score_1 is None else score_1)):
        row |= {
            f"quotes_{side}": {"title": ["t"], "extract": ["e"]},
            f"answer_{side}": answers[side],
        }
        row |= {f"tokens_{side}": {"prefix": [1, 2], "completion": [3]}, f"score_{side}": score}
    return row


def apps(i, solutions=("print(1)\n", "print(2)"), tests=None, starter_code=""):
    tests = {"inputs": ["1\n"], "outputs": ["1\n"]} if tests is None else tests
    return {
        **{"problem_id": i, "question": f"Add {i}.\n", "difficulty": "interview", "url": "u"},
        "solutions": json.dumps(solutions) if solutions else "",
        "input_output": json.dumps(tests) if tests else "",
        "starter_code": starter_code,
    }


ROWS = {
    TLDR_NAME: {
        "comparisons/train/0000.parquet": [tldr(i // 2, i % 2) for i in range(60)]
        + [tldr(99, texts=(" same", "same "))],
        "comparisons/validation/0000.parquet": [tldr(0), tldr(70), article(71), tldr(72, 1)],
        "axis/test/0000.parquet": [tldr(500)],
    },
    HH_NAME: {
        "data/train-00000-of-00001.parquet": [hh(i) for i in range(40)]
        + [hh(90, " a", " a "), hh(91, "", " b")],
        "data/test-00000-of-00001.parquet": [hh(i) for i in range(100, 110)],
    },
    WEBGPT_NAME: {
        "default/train/0000.parquet": [webgpt(i, 0.5 if i % 2 else -1) for i in range(100)]
        + [webgpt(200 + i, 0) for i in range(7)]
    },
    APPS_NAME: {
        "all/train/0000.parquet": [apps(i) for i in range(50)] + [apps(50, solutions=())],
        "all/test/0000.parquet": [apps(100), apps(101, solutions=()), apps(102, tests={})],
        "interview/train/0000.parquet": [apps(300)],
    },
}
BRANCH = {"revision": "refs/convert/parquet"}
ARGUMENTS = {
    name: BRANCH | {"data_dir": folder, "columns": columns.split()}
    for name, folder, columns in (
        (TLDR_NAME, "comparisons", "info summaries choice"),
        (WEBGPT_NAME, "default", "question answer_0 answer_1 score_0 score_1"),
        (APPS_NAME, "all", "question solutions input_output difficulty starter_code"),
    )
} | {HH_NAME: {}}
every_name = pytest.mark.parametrize("name", list(HUB))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with every data set where the hub has it."""
    root = tmp_path_factory.mktemp("hub")
    for name, files in ROWS.items():
        for file, rows in files.items():
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_list(rows, features=FEATURES.get(name)).to_parquet(
                path, batch_size=20
            )
    return root


@pytest.fixture(autouse=True)
def asked(hub, monkeypatch, tmp_path_factory):
    """What the hub was asked for; the fixture's folder answers in its place."""
    calls = []

    def load_dataset(name, *, revision=None, **arguments):
        if Path(name).is_absolute():
            return LOAD_DATASET(name, **arguments)
        calls.append((name, arguments | ({"revision": revision} if revision else {})))
        return LOAD_DATASET(str(hub / name), **arguments)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "cache")
    )
    return calls


def rows_of(task):
    return [row for split in task.splits.values() for row in split]


# What is asked for, and what becomes of it


@every_name
def test_the_hub_is_asked_for_the_right_files(name, asked):
    load_task(name)
    assert asked == [(name, ARGUMENTS[name])]


@pytest.mark.parametrize(
    ("template", "head", "space"),
    [("paper", "POST Subreddit: r/cats", ""), ("released", "POST\nSubreddit: r/cats", " ")],
)
def test_tldr(template, head, space):
    task = load_task(TLDR_NAME, template=template)
    parts = {part: len(split) for part, split in task.splits.items()}
    counts = {
        "read": 65,
        "kept": 63,
        "equal_pair": 1,
        "cnn_dm": 1,
        "beyond_size": 0,
        "prompt_in_test": 2,
    }
    assert task.counts == counts | parts
    # two rows a post
    assert parts["sft"] == 12 and {parts["rm"], parts["ppo"]} == {22, 24} and parts["test"] == 3
    assert {row["prompt"]: (row["chosen"], row["rejected"]) for row in task.splits["test"]} == {
        f"{head}\nPost {i}.\nTL;DR:{space}": tuple(
            f"{' ' * (not space)}{kind} {i}" for kind in kinds
        )
        for i, kinds in (
            (0, ("first", "second")),
            (70, ("first", "second")),
            (72, ("second", "first")),
        )
    }
    form = replace(TLDR, convert=partial(TLDR.convert, template=template))
    for row in to_preferences([tldr(1, subreddit=None), tldr(1, subreddit=" ")], "x", form=form)[0]:
        assert row["prompt"] == f"POST\nPost 1.\nTL;DR:{space}"


# News articles, which are evaluated on


@pytest.mark.parametrize(("template", "end"), [("paper", ""), ("released", " ")])
def test_news_articles_of_the_hub_are_a_part_by_name(template, end):
    task, plain = (load_task(TLDR_NAME, part=part, template=template) for part in ("cnn_dm", ""))
    space = "" if end else " "
    expected = {"chosen": f"{space}first 71", "rejected": f"{space}second 71"}
    assert task.splits["test"].to_list() == [{"prompt": f"ARTICLE\nNews.\nTL;DR:{end}"} | expected]
    assert all(
        task.splits[part].to_list() == plain.splits[part].to_list() for part in ("sft", "rm", "ppo")
    )
    assert task.counts["test"] == 1 and "cnn_dm" not in task.counts


def test_news_articles_of_a_local_file(tmp_path):
    news = [tldr(i, i % 2, post=None, article=f"News {i}.") for i in range(40, 70)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [tldr(i) for i in range(40)] + news))
    plain, task = load_task(str(path)), load_task(str(path), part="cnn_dm")
    assert (plain.counts["test"], plain.counts["cnn_dm"]) == (4, 30) and task.counts["test"] == 30
    prompts = list(task.splits["test"]["prompt"])
    assert sorted(prompts) == [f"ARTICLE\nNews {i}.\nTL;DR:" for i in range(40, 70)] != prompts
    assert task.splits["ppo"].to_list() == plain.splits["ppo"].to_list()
    assert load_task(str(path), part="cnn_dm", size=20).counts["test"] == 2


def test_hh():
    task = load_task(HH_NAME)
    counts = {
        "read": 52,
        "kept": 50,
        "equal_pair": 1,
        "empty_response": 1,
        "beyond_size": 0,
        "prompt_in_test": 0,
    }
    assert task.counts == counts | {"sft": 8, "rm": 16, "ppo": 16, "test": 10}
    assert {"prompt": hh(100)["prompt"], "chosen": " Yes.", "rejected": " No."} in list(
        task.splits["test"]
    )
    assert (
        task.splits["test"].to_list()
        == load_task(HH_NAME, template="released").splits["test"].to_list()
    )


@pytest.mark.parametrize(("template", "ties"), [("paper", 0), ("released", 7)])
def test_webgpt(template, ties):
    """The better answer is chosen; the released code keeps ties, citations of the question, and the first answer."""
    task = load_task(WEBGPT_NAME, template=template)
    assert task.counts["kept"] == 100 + ties and task.counts.get("tie", 0) == 7 - ties
    assert [task.counts[part] for part in ("sft", "rm", "ppo", "test")] == (
        [19, 38, 38, 5] if not ties else [20, 41, 41, 5]
    )
    found = {row["prompt"]: (row["chosen"], row["rejected"]) for row in rows_of(task)}
    for i in [*range(100), *range(200, 200 + ties)]:
        prompt = (
            f" Human: Why {i} [4]? Assistant:" if ties else f"\n\nHuman: Why {i}?\n\nAssistant:"
        )
        assert found[prompt] == (
            (" Paws.", " Claws.") if i % 2 or i >= 200 else (" Claws.", " Paws.")
        )


def test_apps():
    task = load_task(APPS_NAME)
    counts = {"read": 54, "kept": 53, "no_solution": 1, "beyond_size": 0, "prompt_in_test": 0}
    assert task.counts == counts | {"sft": 10, "rm": 0, "ppo": 40, "test": 3}
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})
    rows = sorted(task.splits["test"], key=lambda row: row["prompt"])
    assert [tuple(row.values()) for row in rows] == [
        (f"\nQUESTION:\nAdd {i}.\n\nUse Standard Input format\nANSWER:", *columns, "interview")
        for i, columns in (
            (100, ("\nprint(1)", tests)),
            (101, ("", tests)),
            (102, ("\nprint(1)", "")),
        )
    ]
    assert all(row["tests"] == tests for row in task.splits["ppo"])
    assert task.splits["rm"].column_names == task.splits["ppo"].column_names


@every_name
def test_a_local_copy_needs_no_name(name, hub, tmp_path):
    folder = hub / name / ARGUMENTS[name].get("data_dir", "")
    copy = load_task(str(folder))
    assert rows_of(copy) == rows_of(load_task(name)) and copy.counts == load_task(name).counts
    rows = next(iter(ROWS[name].values()))[:40]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows, features=FEATURES.get(name)).to_parquet(
        tmp_path / "rows.parquet"
    )
    one, two = (load_task(str(tmp_path / f"rows.{kind}")) for kind in ("jsonl", "parquet"))
    assert rows_of(one) == rows_of(two) and one.counts["kept"] == 40
    assert one.counts["test"] == (2 if name == WEBGPT_NAME else 4) and (one.counts["rm"] == 0) == (
        name == APPS_NAME
    )


@pytest.mark.parametrize(
    ("starter", "tests", "middle"),
    [
        ("", "", "\nUse Standard Input"),
        ("class A:\n    ", "", "\nclass A:\n    \nUse Call-Based"),
        ("class A:\n    ", '{"inputs": []}', "\nclass A:\n    \nUse Standard Input"),
        # too long for int
        ("", '{"fn_name": "f", "inputs": [[' + "9" * 5000 + "]]}", "\nUse Call-Based"),
    ],
)
def test_apps_prompt(starter, tests, middle):
    """As the script of the APPS paper puts it together, up to the line break after `ANSWER:`."""
    (row,), _ = to_preferences(
        [apps(7, starter_code=starter) | {"input_output": tests}], "x", form=APPS
    )
    assert (
        row["prompt"] + row["chosen"] == f"\nQUESTION:\nAdd 7.\n{middle} format\nANSWER:\nprint(1)"
    )
    assert row["tests"] == tests


# Faults


def without(row, *path):
    row = json.loads(json.dumps(row))
    inner = row
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return row


FAULTS = [
    (TLDR, tldr, tldr(1, subreddit=3), "not_text", "'info.subreddit' is not text but int"),
    (TLDR, tldr, without(tldr(1), "summaries", 1), "missing_column", "no 'summaries[1].text'"),
    (TLDR, tldr, without(tldr(1), "choice"), "missing_column", "no 'choice'"),
    (TLDR, tldr, tldr(1, post=None), "missing_column", "no 'info.post'"),
    (TLDR, tldr, tldr(1, choice=2), "bad_choice", "'choice' is 2, not 0 or 1"),
    (
        WEBGPT,
        webgpt,
        without(webgpt(1), "question", "full_text"),
        "missing_column",
        "no 'question.full_text'",
    ),
    (WEBGPT, webgpt, webgpt(1) | {"answer_1": 3}, "not_text", "'answer_1' is not text but int"),
    (WEBGPT, webgpt, webgpt(1) | {"score_0": None}, "bad_score", "'score_0' is None, not a number"),
    (APPS, apps, apps(1) | {"solutions": "[1"}, "bad_json", "'solutions' is not a JSON list"),
    (
        APPS,
        apps,
        apps(1) | {"input_output": "[]"},
        "bad_json",
        "'input_output' is not a JSON object",
    ),
    (APPS, apps, apps(1, solutions=[None]), "missing_column", "no 'solutions[0]'"),
    (APPS, apps, apps(1) | {"starter_code": 3}, "not_text", "'starter_code' is not text but int"),
    # Faults of the published data, which are always dropped
    (TLDR, tldr, article(1), "cnn_dm", ""),
    (TLDR, tldr, without(article(1), "info", "post"), "cnn_dm", ""),
    (TLDR, tldr, tldr(1, texts=("", " b")), "empty_response", ""),
    (WEBGPT, webgpt, webgpt(1, 0), "tie", ""),
    (WEBGPT, webgpt, webgpt(1, answers=("Paws [1].", "Paws [2].")), "equal_pair", ""),
    (APPS, apps, apps(1, solutions=()), "no_solution", ""),
]


@pytest.mark.parametrize(("form", "good", "bad", "reason", "message"), FAULTS)
def test_faulty_rows(form, good, bad, reason, message):
    if message:
        fails(
            lambda: to_preferences([good(0), bad], "hub", form=form),
            f"hub: row 2: {message}",
            "--bad_rows drop",
        )
    for bad_rows in ["drop"] if message else ["error", "drop"]:
        rows, counts = to_preferences([good(0), bad], "hub", bad_rows, form)
        assert len(rows) == 1 and counts == {"read": 2, "kept": 1, reason: 1}


@pytest.mark.parametrize(
    ("name", "column"), zip(HUB, ("choice", "rejected", "score_1", "solutions"), strict=True)
)
def test_what_a_data_set_does_not_have(name, column, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(without(row, column)) + "\n" for row in next(iter(ROWS[name].values())))
    )
    fails(lambda: load_task(str(path)), f"{path}: ", f"expected: {HUB[name][0].columns[0]}")
    fails(lambda: load_task(name, part="news"), f"--part news: {name}")
    if name != APPS_NAME:
        fails(lambda: load_task(name.split("/")[1]), f"did you mean {name}?")
