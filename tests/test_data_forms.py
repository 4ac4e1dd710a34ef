"""The shapes in which people's rows come: each becomes the same pairs, answers or prompts, or stops with the mend."""

import gzip
import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pandas
import pytest
from conftest import fails

from marlhf_lite.tasks.loading import load_task
from marlhf_lite.tasks.sources import find_rows

COUNT = 12


def say(role, content):
    return {"role": role, "content": content}


def turn(name, value):
    return {"from": name, "value": value}


def user(i):
    return say("user", f"Why {i}?")


YES, NO = say("assistant", "Warm."), say("assistant", "Cold.")
# Shape -> the row with this number. Texts become `prompt`, `chosen` and `rejected` as they stand.
PAIRS = {
    "TRL": lambda i: {"prompt": f"Why {i}?", "chosen": "Warm.", "rejected": "Cold."},
    "Alpaca with pairs": lambda i: {
        "instruction": f"Why {i}?", "input": "", "output": "x", "chosen": "Warm.", "rejected": "Cold.",
    },
    "another name": lambda i: {"question": f"Why {i}?", "chosen": "Warm.", "rejected": "Cold."},
}  # fmt: skip
CHATS = {
    "TRL": lambda i: {"prompt": [user(i)], "chosen": [YES], "rejected": [NO]},
    "TRL, implicit": lambda i: {"chosen": [user(i), YES], "rejected": [user(i), NO]},
    "UltraFeedback": lambda i: {"prompt": f"Why {i}?", "chosen": [user(i), YES], "rejected": [user(i), NO]},
    "a text before messages": lambda i: {"prompt": f"Why {i}?", "chosen": [YES], "rejected": [NO]},
    "a text around which messages have more": lambda i: {
        "prompt": f"{i}?", "chosen": [user(i), YES], "rejected": [user(i), NO],
    },
    "a transcript before messages": lambda i: {
        "prompt": f"Human:  Why  {i}?\n\nAssistant:", "chosen": [user(i), YES], "rejected": [user(i), NO],
    },
    "messages before texts": lambda i: {"prompt": [user(i)], "chosen": "Warm.", "rejected": "Cold."},
    "a prompt repeated": lambda i: {"prompt": [user(i)], "chosen": [user(i), YES], "rejected": [user(i), NO]},
    "LLaMA-Factory": lambda i: {
        "conversations": [turn("human", f"Why {i}?")], "chosen": turn("gpt", "Warm."), "rejected": turn("gpt", "Cold."),
    },
    "OpenRLHF": lambda i: {"context_messages": [user(i)], "chosen": [YES], "rejected": [NO]},
    "typed parts": lambda i: {
        "prompt": [say("user", [{"type": "text", "text": "Why "}, {"type": "text", "text": f"{i}?"}])],
        "chosen": [say("assistant", [{"type": "text", "text": "Warm."}])], "rejected": [NO],
    },
}  # fmt: skip
ANSWERS = {
    "TRL": lambda i: {"prompt": f"Why {i}?", "completion": "Warm."},
    "response": lambda i: {"prompt": f"Why {i}?", "response": "Warm.", "source": "s"},
    "Alpaca": lambda i: {"instruction": f"Why {i}?", "input": " ", "output": "Warm."},
    "question, answer": lambda i: {"question": f"Why {i}?", "answer": "Warm."},
    "OpenRLHF": lambda i: {"input": f"Why {i}?", "output": "Warm."},
}
CHAT_ANSWERS = {
    "messages": lambda i: {"messages": [user(i), YES]},
    "other names of roles": lambda i: {
        "messages": [say("Human", f"Why {i}?"), say("AI ", "Warm.")]
    },
    "ShareGPT": lambda i: {"conversations": [turn("human", f"Why {i}?"), turn("gpt", "Warm.")]},
    "TRL": lambda i: {"prompt": [user(i)], "completion": [YES]},
}
PROMPTS = {
    "TRL": lambda i: {"prompt": [user(i)]},
    "verl": lambda i: {
        "data_source": "gsm8k", "prompt": [user(i)], "ability": "math", "reward_model": {"ground_truth": "72"},
    },
}  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(task):
    return [row for part in task.splits.values() for row in part]


def expected(columns, chats):
    asked = "\n\nHuman: Why {}?\n\nAssistant:" if chats else "Why {}?"
    texts = {"chosen": " Warm." if chats else "Warm.", "rejected": " Cold." if chats else "Cold."}
    return [
        {"prompt": asked.format(i)} | {name: texts[name] for name in columns} for i in range(COUNT)
    ]


SHAPES = [
    *((name, make, ("chosen", "rejected"), False) for name, make in PAIRS.items()),
    *((name, make, ("chosen", "rejected"), True) for name, make in CHATS.items()),
    *((name, make, ("chosen",), False) for name, make in ANSWERS.items()),
    *((name, make, ("chosen",), True) for name, make in CHAT_ANSWERS.items()),
    *((name, make, (), True) for name, make in PROMPTS.items()),
]


@pytest.mark.parametrize(
    ("name", "make", "columns", "chats"), SHAPES, ids=[f"{s[0]}-{len(s[2])}" for s in SHAPES]
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_shape_is_the_same_data(tmp_path, name, make, columns, chats, kind):
    rows, path = [make(i) for i in range(COUNT)], tmp_path / f"rows.{kind}"
    write(path, rows) if kind == "jsonl" else pandas.DataFrame(rows).to_parquet(path)
    task = load_task(str(path))
    assert sorted(rows_of(task), key=str) == sorted(expected(columns, chats), key=str)
    parts = {"sft": len(columns) > 0, "rm": len(columns) > 1, "ppo": True, "test": True}
    assert {part: len(rows) > 0 for part, rows in task.splits.items()} == parts and task.shape


def test_the_input_of_an_instruction_stands_below_it(tmp_path):
    rows = [{"instruction": f"Add {i}.", "input": "1 and 2", "output": "3"} for i in range(COUNT)]
    assert {row["prompt"] for row in rows_of(load_task(write(tmp_path / "a.jsonl", rows)))} == {
        f"Add {i}.\n1 and 2" for i in range(COUNT)
    }


STOPS = [  # a row -> what the error names
    (
        {"prompt": "a", "response_a": "b", "response_b": "c", "winner_model_a": 1},
        ["response_a, response_b, winner_model_a"],
    ),
    (
        {"prompt": "a", "chosen_response": "b", "rejected_response": "c"},
        [
            "columns found: prompt, chosen_response, rejected_response",
            "--columns prompt=NAME,chosen=NAME",
        ],
    ),
    ({"prompt": "a", "Chosen": "b", "Rejected": "c"}, ["--columns prompt=NAME,chosen=NAME"]),
    (
        {"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 0},
        ["better answer of each row"],
    ),
    (
        {"prompt": "a", "preferred": "b", "dispreferred": "c"},
        ["columns found: prompt, preferred, dispreferred"],
    ),
    ({"question": "a", "response_j": "b", "response_k": "c"}, ["response_j, response_k"]),
    (
        {"prompt": "a", "response": "x", "chosen_answer": "b", "rejected_answer": "c"},
        ["--columns prompt=NAME,chosen=NAME"],
    ),
    ({"text": "a"}, ["columns found: text", "--columns"]),
    ({"Prompt": "a", "chosen": "b", "rejected": "c"}, ["row 1", "--columns prompt=NAME"]),
    (
        {"messages": [{"speaker": "user", "text": "a"}]},
        ["name them role and content (its keys: speaker, text)"],
    ),
    (
        {"prompt": "Why?", "chosen": "Why? a", "rejected": "Why? b"},
        ["in 12 of 12 rows answers begin with their prompt"],
    ),
    (
        {"prompt": "Why?", "chosen": " a", "rejected": "Why? b"},
        ["in 12 of 12 rows answers begin with their prompt"],
    ),
    (
        {"prompt": "a", "chosen": "[{'role': 'user', 'content': 'x'}]", "rejected": "b"},
        ["row 1", "list of messages"],
    ),
    (
        {"prompt": "", "chosen": "b", "rejected": "c"},
        ["row 1: the prompt is empty: correct or delete the row"],
    ),
    (
        {"messages": [say("user", [{"type": "image_url", "image_url": "u"}]), YES]},
        ["row 1", "type 'image_url'"],
    ),
    ({"messages": [say("system", "a"), user(1), YES]}, ["row 1", "--chat_template FILE"]),
    (
        {"instruction": "a", "output": ["b", "c"]},
        ["row 1: 'output' is neither text nor a list of messages"],
    ),
    ({"messages": [say("user", "a")]}, ["row 1", "does not end with a message of the assistant"]),
    ({"messages": [user(1), say("tool", "Warm.")]}, ["row 1", "assistant, but of 'tool'"]),
    (
        {"prompt": "a", "response": "c", "better_response": "b"},
        ["write the better answer of each row into chosen"],
    ),
    (
        {"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 1},
        ["write the better answer"],
    ),
    ({"messages": []}, ["row 1"]),
    ({"messages": [say("user", ["a"]), YES]}, ["a role or content that is not text"]),
    ({"messages": json.dumps([user(1), YES])}, ["row 1: 'messages' is a list of messages as text"]),
    ({"Q": "a", "A": "b"}, ["completion=NAME"]),
    # Messages that would stand twice, or that nobody asked about.
    (
        {
            "prompt": [say("user", "a")],
            "chosen": [say("user", "a "), YES],
            "rejected": [say("user", "a "), NO],
        },
        ["row 1"],
    ),
    (
        {
            "prompt": [say("system", "s"), user(1)],
            "chosen": [user(1), YES],
            "rejected": [user(1), NO],
        },
        ["'chosen' begins"],
    ),
    (
        {"prompt": "Who?", "chosen": [user(1), YES], "rejected": [user(1), NO]},
        ["'chosen' begins with a message"],
    ),
    (  # a text of which the messages hold a part alone
        {"prompt": "Context: 1.\n\nWhy 1?", "chosen": [user(1), YES], "rejected": [user(1), NO]},
        [
            "row 1: 'chosen' begins",
            "put all of the prompt into the messages, or leave 'prompt' out",
        ],
    ),
    (
        {
            "prompt": "Human: Why 1?\n\nAssistant: Warm.\n\nHuman: Why?\n\nAssistant:",
            "chosen": [user(1), YES],
            "rejected": [user(1), NO],
        },
        ["row 1: 'chosen' begins"],
    ),
    ({"chosen": [YES], "rejected": [NO], "history": [user(1)]}, ["row 1", "--columns prompt=NAME"]),
    (
        {"conversation_a": [user(1), YES], "conversation_b": [user(1), NO], "winner": "a"},
        ["write the better answer"],
    ),
    (
        {"prompt": "a", "response_a": "b", "response_b": "c", "winner": "A"},
        ["write the better answer of each row"],
    ),
    (
        {"input": {"messages": [user(1)]}, "preferred_output": [YES], "non_preferred_output": [NO]},
        ["columns found: input, preferred_output, non_preferred_output"],
    ),
    ({"prompt": [user(1), YES]}, ["row 1: the last message before the answer is the assistant's"]),
]


@pytest.mark.parametrize(("row", "parts"), STOPS)
def test_what_stops_names_the_mend(tmp_path, row, parts):
    path = write(tmp_path / "rows.jsonl", [row] * COUNT)
    fails(lambda: load_task(path), path, *parts)


def test_names_of_columns_are_given(tmp_path):
    rows = [
        {"q": f"Why {i}?", "good": "Warm.", "bad": "Cold.", "prompt": "x", "lang": "en"}
        for i in range(COUNT)
    ]
    path, columns = write(tmp_path / "rows.jsonl", rows), "prompt=q, chosen=good,rejected=bad"
    task = load_task(path, columns=columns)
    assert sorted(rows_of(task), key=str) == sorted(
        expected(("chosen", "rejected"), False), key=str
    )
    assert task.unused == ("lang",)
    folder = tmp_path / "folder"
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    assert rows_of(load_task(str(folder), columns=columns)) == rows_of(task)
    fails(lambda: load_task(path, columns="prompt=qq"), "--columns prompt=qq", "did you mean q?")
    for wrong in (
        "q=prompt",
        "prompt",
        "prompt=",
        "chosen=good,chosen=bad",
        "chosen=good,rejected=good",
    ):
        fails(lambda: load_task(path, columns=wrong), "--columns")  # noqa: B023


def test_a_column_that_is_named_is_the_one_that_is_read(tmp_path):
    """Also beside a column of a shape that would be taken else, and with spaces in the option."""
    rows = [
        {"q": f"Why {i}?", "good": "Warm.", "prompt": "x", "messages": [user(0), YES]}
        for i in range(COUNT)
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    task = load_task(path, columns="prompt = q, completion = good")
    assert sorted(rows_of(task), key=str) == sorted(expected(["chosen"], False), key=str)
    assert task.unused == ("messages",)
    fails(
        lambda: load_task(path, columns="prompt=q,chosen=good"),
        "expected: prompt, chosen, rejected",
    )


def test_one_odd_row_does_not_decide_how_all_are_read(tmp_path):
    texts = [PAIRS["TRL"](i) for i in range(COUNT)]
    for odd in (CHATS["TRL"](99), {"prompt": [], "chosen": [], "rejected": []}):
        path = write(tmp_path / "rows.jsonl", [odd, *texts])
        task = load_task(path, bad_rows="drop")
        assert {row["prompt"] for row in expected((), False)} <= {
            row["prompt"] for row in rows_of(task)
        }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", (False, True)),
        ("kto_tag", ("False ", "TRUE")),
        ("label", (0, 1)),
        ("label", (0.0, 1.0)),
        ("kto_tag", ("0", "1")),
    ],
)
def test_answers_to_avoid_are_no_sft_data(tmp_path, name, values):
    rows = [ANSWERS["TRL"](i) | {name: values[i % 3 > 0]} for i in range(COUNT)]
    task = load_task(write(tmp_path / "rows.jsonl", rows))
    assert task.counts["kept"] == 8 and task.counts["labelled_false"] == 4 and task.unused == ()
    for other in ("good", 2, -1, None):
        path = write(tmp_path / "others.jsonl", [*rows, ANSWERS["TRL"](0) | {name: other}])
        fails(lambda: load_task(path), f"row {COUNT + 1}: '{name}' is {other!r}, not true or false")  # noqa: B023


def test_what_is_not_read_of_messages_is_named(tmp_path):
    better = YES | {"weight": 0, "name": None}
    rows = [{"chosen": [user(i), better], "rejected": [user(i), NO]} for i in range(COUNT)]
    task = load_task(write(tmp_path / "rows.jsonl", rows))
    assert task.counts["kept"] == COUNT and task.unused == ("weight of messages",)
    assert {(row["chosen"], row["rejected"]) for row in rows_of(task)} == {(" Warm.", " Cold.")}


@pytest.mark.parametrize("chats", [False, True])
def test_the_guide_s_line_of_pandas_makes_pairs_of_a_winner(tmp_path, chats):
    (line,) = [
        line
        for line in Path("docs/guide.md").read_text().splitlines()
        if line.startswith('rows["chosen"]')
    ]
    answers = [["Warm.", "Cold."], [[YES], [NO]]][chats]
    made = [
        {"prompt": f"Why {i}?", "a": answers[i % 2], "b": answers[1 - i % 2], "winner": "ab"[i % 2]}
        for i in range(12)
    ]
    rows = pandas.DataFrame(made)
    exec(line, {"rows": rows})
    rows[["prompt", "chosen", "rejected"]].to_parquet(tmp_path / "rows.parquet")
    task = load_task(str(tmp_path / "rows.parquet"))
    assert sorted(rows_of(task), key=str) == sorted(
        expected(("chosen", "rejected"), chats), key=str
    )


# Texts


def test_code_keeps_its_indentation(tmp_path):
    made = [say("assistant", "    return x\n"), say("assistant", "    pass")]
    rows = [{"prompt": [user(i)], "chosen": made[:1], "rejected": made[1:]} for i in range(COUNT)]
    assert {row["chosen"] for row in rows_of(load_task(write(tmp_path / "a.jsonl", rows)))} == {
        "    return x"
    }
    rows = [
        {"prompt": f"def f{i}(x):\n", "chosen": "    return x", "rejected": "    pass"}
        for i in range(COUNT)
    ]
    assert {row["chosen"] for row in rows_of(load_task(write(tmp_path / "b.jsonl", rows)))} == {
        "    return x"
    }


def test_messages_that_differ_early_are_split_where_they_do(tmp_path):
    first, other = (
        [say("assistant", "Hm."), say("user", "Go on."), YES],
        [NO, say("user", "Why?"), NO],
    )
    rows = [{"chosen": [user(i), *first], "rejected": [user(i), *other]} for i in range(COUNT)]
    (row, *_), prompts = rows_of(load_task(write(tmp_path / "a.jsonl", rows))), set()
    assert (
        row["prompt"].endswith("?\n\nAssistant:")
        and row["chosen"] == " Hm.\n\nHuman: Go on.\n\nAssistant: Warm."
    )
    # A user's turn that differs belongs to the answers; so does the assistant's before it.
    rows = [
        {"chosen": [user(i), YES, user(i), NO], "rejected": [user(i), YES, user(i + 1), NO]}
        for i in range(COUNT)
    ]
    task = load_task(write(tmp_path / "b.jsonl", rows))
    prompts = {row["prompt"] for row in rows_of(task)}
    assert prompts == {row["prompt"] for row in expected((), True)}


def test_transcripts_that_end_with_the_human_are_dropped_and_counted(tmp_path):
    """A policy that learns them speaks for the human; messages of this kind are faulty rows."""
    whole = "\n\nHuman: Why {}?\n\nAssistant: {}"
    rows = [
        {"chosen": whole.format(i, "Yes."), "rejected": whole.format(i, "No.")}
        for i in range(COUNT)
    ]
    rows[3]["rejected"] += "\n\nHuman: Go on."
    task = load_task(write(tmp_path / "pairs.jsonl", rows))
    assert task.counts["human_last"] == 1 and len(rows_of(task)) == COUNT - 1


def test_transcripts_may_have_one_line_break(tmp_path):
    starts = [f"Human: Hi {i}\nAssistant: Hello\nHuman: Why?\nAssistant:" for i in range(COUNT)]
    rows = [{"chosen": f"{start} Warm.", "rejected": f"{start} Cold."} for start in starts]
    task = load_task(write(tmp_path / "a.jsonl", rows))
    assert {row["prompt"]: row["chosen"] for row in rows_of(task)} == dict.fromkeys(
        starts, " Warm."
    )


# Files


def table(separator, quote=""):
    lines = [
        ("prompt", "chosen", "rejected"),
        *((f"Why {i}?", "Warm.", "Cold.") for i in range(COUNT)),
    ]
    return "".join(
        separator.join(f"{quote}{text}{quote}" for text in line) + "\n" for line in lines
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", table(";").encode()),
        ("b.tsv", table("\t").encode()),
        ("c.csv", table(", ").encode()),
        ("d.csv", table(", ", '"').encode()),
        ("e.csv", table("|").encode()),
        ("f.csv", table(",").encode("utf-16")),
        ("j.json", json.dumps([PAIRS["TRL"](i) for i in range(COUNT)], indent=1).encode()),
        ("g.csv.gz", gzip.compress(table(";").encode("utf-8-sig"), mtime=0)),
        ("h.csv", table(" ,").replace(" ,Warm. ,", ",Warm.,").encode()),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_tables_as_people_write_them(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    task = load_task(str(tmp_path / name))
    assert sorted(rows_of(task), key=str) == sorted(
        expected(("chosen", "rejected"), False), key=str
    )


def test_a_text_that_is_not_utf_8_says_what_to_do(tmp_path):
    (tmp_path / "a.csv").write_bytes(table(",").replace("Warm", "Wärme").encode("latin-1"))
    fails(lambda: load_task(str(tmp_path / "a.csv")), "a.csv", "not UTF-8", "iconv")


def test_names_that_stand_twice(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected, chosen\n" + "a,b,c,d\n" * COUNT)
    fails(
        lambda: load_task(str(tmp_path / "a.csv")), "a.csv", "more than one column is named chosen"
    )


def test_a_quoted_field_of_a_tsv_may_have_tabs_and_line_breaks(tmp_path):
    (tmp_path / "b.tsv").write_text(table("\t").replace("Warm.", '"Warm.\n\tTabs."'))
    assert {row["chosen"] for row in rows_of(load_task(str(tmp_path / "b.tsv")))} == {
        "Warm.\n\tTabs."
    }


def test_several_files_and_an_address(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [PAIRS["TRL"](i) for i in range(COUNT)]
    (tmp_path / "data").mkdir()
    paths = [write(tmp_path / "data" / f"part-{n}.jsonl", rows[n::2]) for n in (0, 1)]
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "data"))
    handler.func.log_message = lambda *words: None
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/part-0.jsonl"
        assert load_task(address).counts["read"] == COUNT / 2
        fails(lambda: load_task(address.replace("part-0", "none")), address[:-12], "404")
        server.shutdown()
    task = load_task(str(tmp_path / "data" / "part-*.jsonl"))
    assert sorted(rows_of(task), key=str) == sorted(
        expected(("chosen", "rejected"), False), key=str
    )
    fails(
        lambda: load_task(str(tmp_path / "data" / "none-*.jsonl")),
        "none-*.jsonl: cannot be read (FileNotFoundError",
    )
    write(tmp_path / "data" / "part-2.jsonl", [ANSWERS["TRL"](i) for i in range(COUNT)])
    fails(
        lambda: load_task(str(tmp_path / "data" / "part-*.jsonl")),
        "part-2.jsonl (prompt and completion, for SFT)",
    )
    fails(lambda: load_task(paths[0], split="train_prefs"), "--split train_prefs", "is a file")
    fails(lambda: load_task("tiny-tldr", split="train_prefs"), "--split", "embedded")


def test_splits_configurations_and_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [PAIRS["TRL"](i) for i in range(COUNT)]
    parts = {
        "train_prefs": rows,
        "test_prefs": [PAIRS["TRL"](99)],
        "train_sft": [ANSWERS["TRL"](7)],
    }
    folder = tmp_path / "prefs"
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(part) for name, part in parts.items()}
    ).save_to_disk(folder)
    task = load_task(str(folder), split="train_prefs")
    assert list(task.splits["test"]["prompt"]) == ["Why 99?"] and task.counts["read"] == COUNT + 1
    fails(lambda: load_task(str(folder)), "no split named train, found train_prefs", "--split")
    of_three = {"train": rows, "validation": [PAIRS["TRL"](98)], "test": [PAIRS["TRL"](99)]}
    usual = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(part) for name, part in of_three.items()}
    )
    usual.save_to_disk(tmp_path / "usual")
    assert (
        load_task(str(tmp_path / "usual")).unused_splits == ("validation",)
        and task.unused_splits == ()
    )
    one = tmp_path / "one"
    datasets.Dataset.from_list(rows).save_to_disk(one)
    for name, said in (
        ("split", "no split named x, found train"),
        ("dataset_config", "name"),
        ("data_dir", "data_dir"),
    ):
        fails(lambda: load_task(str(one), **{name: "x"}), f"--dataset {one} (a folder): ", said)  # noqa: B023
    two = tmp_path / "two"
    for name, part in (("a", rows), ("b", [ANSWERS["TRL"](i) for i in range(COUNT)])):
        (two / name).mkdir(parents=True)
        write(two / name / "train.jsonl", part)
    configs = "".join(f"- config_name: {n}\n  data_files: {n}/train.jsonl\n" for n in "ab")
    (two / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    fails(lambda: load_task(str(two)), "'a', 'b'", "--dataset_config")
    assert (
        load_task(str(two), dataset_config="a").counts["rm"]
        and not load_task(str(two), dataset_config="b").counts["rm"]
    )
    (two / "README.md").unlink()
    assert load_task(str(two), data_dir="a").counts["read"] == COUNT


def test_cells_of_a_folder_of_csv_stay_text(tmp_path, monkeypatch):
    """As those of one file do: pandas would read the first ones as missing, and the last as a number."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    texts = ["NA", "null", "None", "nan", "N/A", "#N/A", "True", "1e5", "007"]
    for cells in (texts, texts[-1:] * 9):
        lines = [f"Say {i},{text},no {i}" for i, text in enumerate(cells)]
        (folder / "train.csv").write_text("\n".join(["prompt,chosen,rejected", *lines]))
        found = find_rows(str(folder))
        assert [row["chosen"] for row in found.rows] == cells
        assert (found.test, found.left_out_splits, found.left_out_files) == (None, (), ())
        task = load_task(str(folder))
        assert sorted(text for part in task.splits.values() for text in part["chosen"]) == sorted(
            cells
        )


def test_columns_that_are_not_read_are_named(tmp_path):
    """Alpaca's earlier turns among them."""
    rows = [
        {"instruction": f"Do {i}", "output": "Yes.", "history": [["a", "b"]] * (i < 3), "id": i}
        for i in range(20)
    ]
    task = load_task(write(tmp_path / "a.jsonl", rows))
    assert task.unused == ("history", "id")


def test_a_folder_s_error_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", [PAIRS["TRL"](i) for i in range(COUNT)])
    (folder / "eval.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    fails(lambda: load_task(str(folder)), f"{folder}/eval.jsonl: line 2: not JSON")
    with pytest.raises(Exception) as caught:
        load_task(str(folder))
    assert "tiny-tldr" not in str(caught.value)
