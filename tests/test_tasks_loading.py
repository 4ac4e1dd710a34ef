"""Local files to rows, and any data set to a task."""

import bz2
import csv
import gzip
import json
import lzma

import datasets
import pandas
import pytest
from conftest import fails

from marlhf_lite.tasks.files import SUFFIXES, read_file
from marlhf_lite.tasks.loading import drop_long_prompts, load_task

LOAD_DATASET = datasets.load_dataset
PACKED = {".gz": gzip, ".bz2": bz2, ".xz": lzma}
ROWS = [
    {
        "prompt": "Häuser?\nTwo lines, one comma",
        "chosen": ' "quoted"',
        "rejected": " no\u2028separator",
    },
    {"prompt": "007", "chosen": "NA", "rejected": " no 🐈" + "z" * 200_000},
]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    def offline(name):
        raise ConnectionError(f"Couldn't reach the host\n(asked for {name})")

    monkeypatch.setattr(datasets, "load_dataset", offline)


def write(path, rows):
    """Write rows as the path's suffix says; return its name."""
    if ".parquet" in path.name:
        pandas.DataFrame(rows).to_parquet(path)
        return str(path)
    with getattr(PACKED.get(path.suffix), "open", open)(
        path, "wt", encoding="utf-8", newline=""
    ) as file:
        if ".jsonl" in path.name or ".ndjson" in path.name:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        elif ".json" in path.name:
            json.dump(rows, file, indent=1)
        else:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if ".tsv" in path.name else ",")
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def make(count, start=0):
    return [
        {"prompt": f"Q{i}?", "chosen": " yes", "rejected": " no"}
        for i in range(start, start + count)
    ]


# Files


@pytest.mark.parametrize(
    "name", [*(f"pairs{suffix}" for suffix in SUFFIXES), "[1] odd*?.jsonl", "PAIRS.CSV.GZ"]
)
def test_every_format_gives_the_same_rows_and_the_same_task(tmp_path, name):
    rows = ROWS + make(20)
    path = tmp_path / name
    write(path.with_name(name.lower()), rows)
    path.with_name(name.lower()).rename(path)
    assert read_file(path) == read_file(str(path)) == rows
    splits = load_task(str(path)).splits
    assert sorted((row for split in splits.values() for row in split), key=str) == sorted(
        rows, key=str
    )


def test_other_forms_of_the_same(tmp_path):
    path = tmp_path / "pairs.json"
    whole = (
        json.dumps({"version": 1, "data": ROWS}),
        "\n".join(map(json.dumps, ROWS)),
        f" {json.dumps(ROWS)}",
    )
    for text, rows in [*((text, ROWS) for text in whole), (json.dumps(ROWS[0]), ROWS[:1])]:
        path.write_text(text)
        assert read_file(path) == rows
    table = tmp_path / "pairs.csv"  # with a byte order mark
    table.write_bytes(b'\xef\xbb\xbfa,b\r\n"one\r\ntwo",x\r\n\r\ny,NA\r\n')
    assert read_file(table) == [{"a": "one\r\ntwo", "b": "x"}, {"a": "y", "b": "NA"}]


FAULTY = [
    ("a.jsonl", None, "No such file"),
    ("a.xlsx", "x", "'.xlsx'"),
    *((f"a{suffix}", b"", "") for suffix in SUFFIXES),
    *(
        (f"a{suffix}", gzip.compress(b"\n", mtime=0), "")
        for suffix in SUFFIXES
        if suffix.endswith(".gz")
    ),
    ("a.json", "[]", "no rows"),
    ("a.csv", "prompt,chosen\n", "no rows"),
    *((f"a{suffix}", b'{"a": "x"}\n{"a": "caf\xe9"}\n', "0xe9") for suffix in (".jsonl", ".json")),
    ("a.csv", b"a\nx\ncaf\xe9\n", "0xe9"),
    ("a.jsonl", '{"a": 1}\n\n{"a": 1,}\n', "line 3"),
    ("a.jsonl", '{"a": 1}\n{"a": "cut of', "line 2"),
    ("a.jsonl", '{"a": 1}\n' + "[" * 200_000, "line 2"),
    ("a.jsonl", '{"a": 1}\n[1]\n', "row 2"),
    ("a.json", '[{"a": 1},\n {"a" 2}]', "line 2"),
    ("a.csv", 'a,b\n"1\n1",2\n3\n', "row 2"),
    ("a.csv", "a,b\n1,2,3\n4,5,6\n", "row 1"),
    ("a.csv", 'a,b\n1,2\n"3,4\n5,6\n', "row 2: unexpected end of data"),
    ("a.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), "packed by gzip: end the name with .gz"),
    ("a.tsv", 'a\tb\n1\t2\n"3" 4\t5\n', "row 2: "),
    ("a.csv", "a,b\n“1”,2\n".encode("cp1252"), "iconv -f cp1252 -t utf-8"),
    ("a.jsonl", '{"a": 1}\n'.encode("utf-16-be"), "columns found: a; expected: "),
]


@pytest.mark.parametrize(("name", "content", "part"), FAULTY)
def test_faulty_files(tmp_path, capfd, name, content, part):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    fails(lambda: load_task(str(path)), f"{path}: ", part)
    assert not "".join(capfd.readouterr())


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv.bz2", ".json.xz", ".parquet"])
def test_a_name_that_says_text_where_the_content_is_none(tmp_path, suffix):
    write(tmp_path / f"a{suffix}", make(3)[:3])
    (tmp_path / f"a{suffix}").rename(tmp_path / "a.jsonl")
    fails(lambda: read_file(tmp_path / "a.jsonl"), "a.jsonl: ", "end ", f".{suffix.split('.')[-1]}")


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.gz", ".csv.gz", ".parquet"])
def test_damaged_files(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    write(path, make(2000))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:20] + bytes(20) + whole[40:-9], b'{"a": 1}\n'):
        path.write_bytes(content)
        fails(lambda: read_file(path), f"{path}: cannot be read (")


# Any data set


def test_local_file(tmp_path):
    name = write(
        tmp_path / "pairs.jsonl", [*make(40), {"prompt": "x", "chosen": "", "rejected": "y"}]
    )
    task = load_task(name)
    parts = {"sft": 7, "rm": 15, "ppo": 14, "test": 4}
    assert {part: len(split) for part, split in task.splits.items()} == parts
    unused = {"beyond_size": 0, "prompt_in_test": 0}
    assert task.counts == {"read": 41, "kept": 40, "empty_response": 1} | unused | parts
    assert task.name == name and task.splits["ppo"].column_names == ["prompt", "chosen", "rejected"]


def test_size_draws_by_seed(tmp_path):
    name = write(tmp_path / "pairs.jsonl", make(100))
    one, same, other = (load_task(name, size=20, seed=seed) for seed in (1, 1, 2))
    prompts = [
        {p for split in task.splits.values() for p in split["prompt"]}
        for task in (one, same, other)
    ]
    assert prompts[0] == prompts[1] != prompts[2] and len(prompts[0]) == 20
    assert one.counts["beyond_size"] == 80 and one.counts["kept"] == 100
    assert load_task(name, size=500).counts["beyond_size"] == 0


UNKNOWN = [
    *(
        (name, {}, name.strip("~./"))
        for name in ("missing.jsonl", "./missing", "/no/where", "a/b.csv.gz", "~/nothing")
    ),
    *(
        (name, {}, f"--dataset {name}: ")
        for name in ("qqqq", "", "a/b/c", "owner/", "x" * 5000, "owner/name")
    ),
    ("tiny-tldrr", {}, "did you mean tiny-tldr?"),
    ("owner/name", {}, "ConnectionError: Couldn't reach the host ("),
    ("tiny-tldr", {"size": 3}, "tiny-tldr: 3 rows are too few"),
    ("tiny-tldr", {"part": "cnn_dm"}, "--part cnn_dm"),
]


@pytest.mark.parametrize(("dataset", "options", "part"), UNKNOWN)
def test_what_cannot_be_loaded(dataset, options, part):
    fails(lambda: load_task(dataset, **options), part)


def test_folders(tmp_path, monkeypatch):
    def save(name, **parts):
        tables = {part: datasets.Dataset.from_list(rows) for part, rows in parts.items()}
        datasets.DatasetDict(tables).save_to_disk(tmp_path / name)
        return str(tmp_path / name)

    fails(lambda: load_task(str(tmp_path)), f"--dataset {tmp_path} (a folder): ")
    two = save("two", train=make(30), validation=make(9, 25))
    task, other, small = load_task(two), load_task(two, seed=1), load_task(two, size=20)
    test = task.splits["test"].to_list()
    # file order would favour what the publisher put first
    assert sorted(test, key=str) == make(9, 25) != test
    assert (
        other.splits["test"].to_list() != test
        and small.counts["test"] == 2
        and small.counts["beyond_size"] == 19
    )
    assert task.counts["read"] == task.counts["kept"] == 39 and task.counts["prompt_in_test"] == 5
    fails(lambda: load_task(save("none", dev=make(3))), "none (a folder): ", "train", "dev")
    bad = [{"prompt": "", "chosen": "x", "rejected": "y"}]
    fails(lambda: load_task(save("bad", train=make(30), test=bad)), "bad (test): row 1: ")
    datasets.Dataset.from_list(make(40)).save_to_disk(tmp_path / "one")
    assert load_task(str(tmp_path / "one")).counts["test"] == 4
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", make(40))
    write(tmp_path / "files" / "test.jsonl", make(6, 100))
    monkeypatch.setattr(datasets, "load_dataset", LOAD_DATASET)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task = load_task(str(tmp_path / "files"))
    assert sorted(task.splits["test"], key=str) == make(6, 100)


class Words:
    """A tokenizer of words, with one special token in front."""

    def __call__(self, texts, **unused):
        return {"input_ids": [[0, *range(len(text.split()))] for text in texts]}


def test_drop_long_prompts():
    split = datasets.Dataset.from_list([{"prompt": "word " * (1 + i % 4)} for i in range(2100)])
    short, dropped = drop_long_prompts(split, Words(), 3)
    assert (len(short), dropped) == (1050, 1050)
    assert max(len(prompt.split()) for prompt in short["prompt"]) == 2
    assert drop_long_prompts(split, Words(), 5) == (split, 0)
    assert drop_long_prompts(split.select([]), Words(), 5)[1] == 0
    fails(lambda: drop_long_prompts(split, Words(), 1), "--max_prompt_length 1: ")
