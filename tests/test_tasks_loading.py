import json
import os

import datasets
import pytest

from marlhf_lite.tasks.loading import drop_long_prompts, load_task
from marlhf_lite.utils.errors import InputError

LOAD_DATASET = datasets.load_dataset


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    def refuse(name, *args, **kwargs):
        raise AssertionError(f"went to the hub for {name}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)


def make(count, start=0):
    return [{"prompt": f"Q{i}?", "chosen": " yes", "rejected": " no"} for i in range(start, start + count)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fails(dataset, *parts, **options):
    with pytest.raises(InputError) as caught:
        load_task(dataset, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


CHOICES = ("tiny-tldr", "local file", "name on the hub")


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
    fails(name, "--size 0: give a number of rows", size=0)
    fails(name, f"{name}: 3 rows are too few", "give at least 4", size=3)


def test_bad_rows_and_test_fraction(tmp_path):
    name = write(tmp_path / "pairs.jsonl", [*make(20), {"prompt": "", "chosen": "x", "rejected": "y"}])
    fails(name, f"{name}: line 21: the prompt is empty")
    task = load_task(name, bad_rows="drop", test_fraction=5)
    assert task.counts["empty_prompt"] == 1 and task.counts["test"] == 5


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/where", "~/no_such_thing_here", "a/b.csv.gz"])
def test_missing_file(name):
    fails(name, "no such file")


def test_existing_file_of_unknown_kind(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("x")
    fails(str(path), "unknown extension '.txt'")


def test_unknown_word_suggests_the_closest():
    fails("tiny-tldrr", "--dataset tiny-tldrr: unknown: did you mean tiny-tldr?", *CHOICES)
    fails("qqqq", "--dataset qqqq: unknown: give an embedded corpus", *CHOICES)
    fails("", "unknown", *CHOICES)
    fails("a/b/c", "unknown", *CHOICES)
    fails("owner/", "unknown", *CHOICES)
    fails("x" * 5000, "unknown", *CHOICES)


def test_hub_failure(monkeypatch):
    def offline(name):
        raise ConnectionError("Couldn't reach the host\n(offline)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    fails(
        "owner/name", "--dataset owner/name: cannot be loaded", "ConnectionError: Couldn't reach the host (", *CHOICES
    )


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
    assert task.splits["test"].to_list() == make(9, 25)
    assert task.counts["read"] == task.counts["kept"] == 39 and task.counts["prompt_in_test"] == 5
    small = load_task("owner/two", size=20)
    assert small.counts["test"] == 2 and small.counts["beyond_size"] == 19
    fails("owner/none", "no split named train, found dev")
    fails("owner/bad", "owner/bad (test): row 1: the prompt is empty")


def test_folder_saved_to_disk(tmp_path):
    rows = datasets.Dataset.from_list(make(40))
    rows.save_to_disk(tmp_path / "one")
    assert load_task(str(tmp_path / "one")).counts["test"] == 4
    both = datasets.DatasetDict({"train": rows, "test": datasets.Dataset.from_list(make(6, 100))})
    both.save_to_disk(tmp_path / "two")
    assert load_task(str(tmp_path / "two")).splits["test"].to_list() == make(6, 100)


def test_folder_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", LOAD_DATASET)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", make(40))
    write(folder / "test.jsonl", make(6, 100))
    task = load_task(str(folder))
    assert task.counts["read"] == 46 and task.splits["test"].to_list() == make(6, 100)


def test_folder_without_data(tmp_path, monkeypatch):
    def nothing(name):
        raise FileNotFoundError("no data files")

    monkeypatch.setattr(datasets, "load_dataset", nothing)
    fails(str(tmp_path), f"--dataset {tmp_path} (a folder): cannot be loaded", "no data files")


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
    with pytest.raises(InputError, match="--max_prompt_length 1: all 2100 prompts are longer: raise it"):
        drop_long_prompts(split, Words(), 1)


@pytest.mark.skipif("MARLHF_HH_SAMPLE" not in os.environ, reason="MARLHF_HH_SAMPLE names no file")
def test_hh_sample():
    task = load_task(os.environ["MARLHF_HH_SAMPLE"])
    assert task.counts["kept"] == 516 and sum(len(split) for split in task.splits.values()) == 516
