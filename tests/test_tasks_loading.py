"""Local files to rows, and any data set to a task."""

import csv
import gzip
import json
import os

import datasets
import pandas
import pytest

from marlhf_lite.config.embedded import EMBEDDED_DEFAULTS
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.loading import READERS, SUFFIXES, drop_long_prompts, load_task, read_file
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.shipped import shipped

LOAD_DATASET = datasets.load_dataset
ROWS = [
    {"prompt": "Häuser?\nTwo lines, one comma", "chosen": ' "quoted"', "rejected": " no\u2028separator"},
    {"prompt": "007", "chosen": "NA", "rejected": " no 🐈"},
]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    def local_files_alone(name, *args, **kwargs):
        assert name in READERS.values(), f"went to the hub for {name}"
        return LOAD_DATASET(name, *args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", local_files_alone)


def write_any(path, rows):
    """Write rows as the path's suffix says."""
    if ".parquet" in path.name:
        pandas.DataFrame(rows).to_parquet(path)
        return path
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        if ".jsonl" in path.name:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        elif ".json" in path.name:
            json.dump(rows, file, indent=1)
        else:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


def make(count, start=0):
    return [{"prompt": f"Q{i}?", "chosen": " yes", "rejected": " no"} for i in range(start, start + count)]


def write(path, rows):
    return str(write_any(path, rows))


def fails(run, *parts):
    """Check the message of one line, and return it."""
    with pytest.raises(InputError) as caught:
        run()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


def file_fails(path, content, *parts):
    """Check the message about a file with this content; it begins with the file's name."""
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert fails(lambda: read_file(path), *parts).startswith(f"{path}: ")


# Files


@pytest.mark.parametrize("name", [*(f"pairs{suffix}" for suffix in SUFFIXES), "[1] odd*?.jsonl"])
def test_round_trip_in_order(tmp_path, name):
    path = write_any(tmp_path / name, ROWS * 20)
    assert read_file(path) == read_file(str(path)) == ROWS * 20


def test_other_forms_of_the_same(tmp_path):
    path = write_any(tmp_path / "pairs.jsonl", ROWS)
    path.rename(tmp_path / "PAIRS.JSONL")
    assert read_file(tmp_path / "PAIRS.JSONL") == ROWS
    path = tmp_path / "pairs.json"
    for text in (json.dumps({"version": 1, "data": ROWS}), "\n".join(map(json.dumps, ROWS)), f" {json.dumps(ROWS)}"):
        path.write_text(text)
        rows = read_file(path)
        assert rows == ROWS and rows.place(1) == "row 2"


def test_values_that_are_missing_or_of_several_types_are_kept(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"a": "x"}\n{"a": 3}\n{"b": ["y"]}\n{"a": ["z"]}\n')
    assert [row["a"] for row in read_file(path)] == ["x", 3, None, ["z"]]


def test_places_are_lines(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert read_file(path).place(1) == "line 3"
    table = tmp_path / "pairs.csv"
    table.write_bytes(b'\xef\xbb\xbfa,b\r\n"one\r\ntwo",x\r\n\r\ny,' + b"z" * 200_000 + b"\r\n")  # a byte order mark
    rows = read_file(table)
    assert rows[0] == {"a": "one\r\ntwo", "b": "x"} and len(rows[1]["b"]) == 200_000
    assert [rows.place(0), rows.place(1)] == ["line 2", "line 5"]


def test_no_such_file(tmp_path):
    file_fails(tmp_path / "none.jsonl", None, "no such file", "check the path")
    file_fails(tmp_path, None, "directory", "name one file")
    file_fails(tmp_path / "pairs.xlsx", "x", "unknown extension '.xlsx'", *SUFFIXES)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_without_rows(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    file_fails(path, b"", "the file is empty")
    if suffix.endswith(".gz"):
        file_fails(path, gzip.compress(b"\n"), "the file holds no rows")


@pytest.mark.parametrize(("name", "text"), [("a.json", "[]"), ("b.csv", "prompt,chosen\n"), ("c.json", '{"data": []}')])
def test_no_rows(tmp_path, name, text):
    file_fails(tmp_path / name, text, "holds no rows")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".jsonl.gz", ".csv.gz"])
def test_not_utf8(tmp_path, suffix):
    data = b'{"a": "x"}\n{"a": "caf\xe9"}\n'
    content = gzip.compress(data) if suffix.endswith(".gz") else data
    file_fails(tmp_path / f"pairs{suffix}", content, "line 2", "not UTF-8 (byte 0xe9)", "save the file as UTF-8")


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.gz", ".csv.gz", ".parquet"])
def test_damaged_files(tmp_path, suffix):
    path = write_any(tmp_path / f"pairs{suffix}", ROWS * 50)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:20] + bytes(20) + whole[40:-9], b'{"a": 1}\n'):
        file_fails(path, content, "cannot be read (", "check that it is whole")


FAULTY = [
    ("a.jsonl", '{"a": 1}\n\n{"a": 1,}\n', "line 3: invalid JSON (", "correct or delete the line"),
    ("a.jsonl", '{"a": 1}\n{"a": "cut of', "line 2: invalid JSON (Unterminated string"),
    ("a.jsonl", '{"a": 1}\n' + "[" * 200_000, "line 2: invalid JSON ("),
    ("a.jsonl", '{"a": 1}\n{"a": "\\ud83d"}\n', "line 2: invalid JSON (", "surrogates"),
    ("a.jsonl", '{"a": 1}\n[1]\n', 'line 2: not an object such as {"prompt": ...}'),
    ("a.jsonl", '{"a": 1}\n"x"\n', "line 2: not an object"),
    ("a.json", '[{"a": 1},\n {"a" 2}]', "line 2: invalid JSON ("),
    ("a.csv", 'a,b\n"1\n1",2\n3\n', "line 4: 1 fields where the header has 2", "double quotes"),
    ("a.csv", "a,b\n1,2,3\n", "line 2: 3 fields"),
    ("a.csv", 'a,b\n1,2\n"3,4\n5,6\n', "line 3: not CSV", "correct the double quotes"),
    ("a.csv", "a,a\n1,2\n", "repeated in ['a', 'a']: name every column once"),
    ("a.csv", "a,\n1,2\n", "empty or repeated"),
    ("a.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), "line 1: not UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "parts"), [(name, content, parts) for name, content, *parts in FAULTY])
def test_faulty_files(tmp_path, capfd, name, content, parts):
    file_fails(tmp_path / name, content, *parts)
    assert not "".join(capfd.readouterr())  # datasets logs nothing beside our line


# Any data set


CHOICES = ("tiny-tldr", "local file", "name on the hub")


def load_fails(dataset, *parts, **options):
    fails(lambda: load_task(dataset, **options), *parts)


def test_every_embedded_task_has_a_model_and_loads_by_its_name():
    assert set(EMBEDDED) == set(EMBEDDED_DEFAULTS)
    for name in EMBEDDED:
        task = load_task(name, size=40, seed=3)
        assert task.name == name and task.counts["kept"] == 40
        assert task.gold is not None or all(task.splits["test"]["tests"])  # `with_tests` makes a gold score of these
        assert (shipped(EMBEDDED_DEFAULTS[name]["model"]) / "build.json").is_file()


def test_embedded_name():
    task = load_task("tiny-tldr", size=60, seed=3)
    assert task.counts["kept"] == 60 and len(task.splits["test"]) == 6
    row = task.splits["test"][0]
    assert task.gold([row["prompt"]], [row["chosen"]])[0] > -10


def test_local_file(tmp_path):
    name = write(tmp_path / "pairs.jsonl", [*make(40), {"prompt": "x", "chosen": "", "rejected": "y"}])
    task = load_task(name)
    parts = {"sft": 7, "rm": 15, "ppo": 14, "test": 4}
    assert {part: len(split) for part, split in task.splits.items()} == parts
    unused = {"beyond_size": 0, "prompt_in_test": 0}
    assert task.counts == {"read": 41, "kept": 40, "empty_response": 1} | unused | parts
    assert task.name == name and task.gold is None
    assert task.splits["ppo"].column_names == ["prompt", "chosen", "rejected"]


def test_size_draws_by_seed(tmp_path):
    name = write(tmp_path / "pairs.jsonl", make(100))
    one, same, other = (load_task(name, size=20, seed=seed) for seed in (1, 1, 2))
    prompts = [{p for split in task.splits.values() for p in split["prompt"]} for task in (one, same, other)]
    assert prompts[0] == prompts[1] != prompts[2] and len(prompts[0]) == 20
    assert one.counts["beyond_size"] == 80 and one.counts["kept"] == 100
    assert load_task(name, size=500).counts["beyond_size"] == 0
    load_fails(name, "--size 0: give a number of rows", size=0)
    load_fails(name, f"{name}: 3 rows are too few", "give at least 4", size=3)


def test_bad_rows(tmp_path):
    bad = [{"prompt": "", "chosen": "x", "rejected": "y"}, {"prompt": "a", "chosen": 3, "rejected": "y"}]
    name = write(tmp_path / "pairs.jsonl", [*make(20), *bad])
    load_fails(name, f"{name}: line 21: the prompt is empty")
    task = load_task(name, bad_rows="drop")
    assert task.counts["empty_prompt"] == task.counts["not_text"] == 1 and task.counts["test"] == 2


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/where", "~/no_such_thing_here", "a/b.csv.gz"])
def test_missing_file(name):
    load_fails(name, "no such file")


@pytest.mark.parametrize("name", ["qqqq", "", "a/b/c", "owner/", "x" * 5000])
def test_unknown_names(name):
    load_fails(name, f"--dataset {name}: unknown: give an embedded corpus", *CHOICES)


def test_a_name_that_is_nearly_right(tmp_path):
    load_fails("tiny-tldrr", "--dataset tiny-tldrr: unknown: did you mean tiny-tldr?", *CHOICES)
    (tmp_path / "pairs.txt").write_text("x")
    load_fails(str(tmp_path / "pairs.txt"), "unknown extension '.txt'")


def test_hub_failure(monkeypatch, tmp_path):
    def offline(name):
        raise ConnectionError("Couldn't reach the host\n(offline)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    reason = "ConnectionError: Couldn't reach the host ("
    load_fails("owner/name", "--dataset owner/name: cannot be loaded", reason, *CHOICES)
    load_fails(str(tmp_path), f"--dataset {tmp_path} (a folder): cannot be loaded", reason)


def test_hub_splits(monkeypatch):
    hub = {
        "owner/two": {"train": make(30), "validation": make(9, 25)},
        "owner/none": {"dev": make(3)},
        "owner/bad": {"train": make(30), "test": [{"prompt": "", "chosen": "x", "rejected": "y"}]},
    }

    def load(name):
        return datasets.DatasetDict({part: datasets.Dataset.from_list(rows) for part, rows in hub[name].items()})

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = load_task("owner/two")
    test = task.splits["test"].to_list()
    assert sorted(test, key=str) == make(9, 25) != test  # file order would favour what the publisher put first
    assert load_task("owner/two", seed=1).splits["test"].to_list() != test
    assert task.counts["read"] == task.counts["kept"] == 39 and task.counts["prompt_in_test"] == 5
    small = load_task("owner/two", size=20)
    assert small.counts["test"] == 2 and small.counts["beyond_size"] == 19
    load_fails("owner/none", "no split named train, found dev")
    load_fails("owner/bad", "owner/bad (test): row 1: the prompt is empty")


def test_folders(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list(make(40))
    rows.save_to_disk(tmp_path / "one")
    assert load_task(str(tmp_path / "one")).counts["test"] == 4
    both = datasets.DatasetDict({"train": rows, "test": datasets.Dataset.from_list(make(6, 100))})
    both.save_to_disk(tmp_path / "two")
    (tmp_path / "three").mkdir()
    write(tmp_path / "three" / "train.jsonl", make(40))
    write(tmp_path / "three" / "test.jsonl", make(6, 100))
    monkeypatch.setattr(datasets, "load_dataset", LOAD_DATASET)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("two", "three"):
        task = load_task(str(tmp_path / name))
        assert task.counts["read"] == 46 and sorted(task.splits["test"], key=str) == make(6, 100)


class Words:
    """A tokenizer of words, with one special token in front."""

    def __call__(self, texts):
        return {"input_ids": [[0, *range(len(text.split()))] for text in texts]}


def test_drop_long_prompts():
    rows = [{"prompt": "word " * (1 + i % 4)} for i in range(2100)]
    split = datasets.Dataset.from_list(rows)
    short, dropped = drop_long_prompts(split, Words(), 3)
    assert (len(short), dropped) == (1050, 1050)
    assert max(len(prompt.split()) for prompt in short["prompt"]) == 2
    assert drop_long_prompts(split, Words(), 5) == (split, 0)
    assert drop_long_prompts(split.select([]), Words(), 5)[1] == 0
    fails(lambda: drop_long_prompts(split, Words(), 1), "--max_prompt_length 1: all 2100 prompts are longer: raise it")


@pytest.mark.skipif("MARLHF_HH_SAMPLE" not in os.environ, reason="MARLHF_HH_SAMPLE names no file")
def test_hh_sample():
    task = load_task(os.environ["MARLHF_HH_SAMPLE"])
    assert task.counts["read"] == 519 and task.counts["empty_response"] == 3 and task.counts["kept"] == 516
    whole = {(row["chosen"].rstrip(), row["rejected"].rstrip()) for row in read_file(os.environ["MARLHF_HH_SAMPLE"])}
    for row in (row for split in task.splits.values() for row in split):
        assert (row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]) in whole
        assert row["prompt"].endswith("\n\nAssistant:") and row["chosen"].startswith(" ")
