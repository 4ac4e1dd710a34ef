"""What the embedded tasks have in common: their stored rows, the splits, and all stages on them."""

import gzip
import random

import pytest
import yaml

from marlhf_lab.corpora import MAKERS, make_rows
from marlhf_lab.corpora.__main__ import json_lines
from marlhf_lite.cli import main
from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.parser import read_presets
from marlhf_lite.tasks.embedded import EMBEDDED, STORED
from marlhf_lite.tasks.files import read_file
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.utils.run_folder import RunFolder
from marlhf_lite.utils.shipped import shipped


@pytest.mark.long
@pytest.mark.parametrize("name", MAKERS)
def test_stored_rows_are_what_the_makers_make(name):
    """Whatever the process and Python's own generator did before; fewer rows are the first ones."""
    random.seed(5)
    before = random.getstate()
    path = shipped(f"{name}.jsonl.gz")
    assert gzip.decompress(path.read_bytes()) == json_lines(name)
    assert random.getstate() == before
    assert make_rows(name, 5, 1234) == read_file(path)[:5] != make_rows(name, 5, 1235)


@pytest.mark.parametrize("name", EMBEDDED)
def test_task(name):
    task, whole = load_task(name, size=600), load_task(name)
    parts, seen = (
        {part: len(rows) for part, rows in task.splits.items()},
        [set(r["prompt"]) for r in whole.splits.values()],
    )
    programs, pairs = name == "tiny-code", name not in ("tiny-code", "tiny-guess")
    assert list(parts.values()) == ([108, 0, 432, 60] if not pairs else [108, 216, 216, 60])
    assert task.counts == {"read": 600, "kept": 600, "beyond_size": 0, "prompt_in_test": 0} | parts
    assert len(set().union(*seen)) == sum(map(len, seen))  # no prompt is in two parts
    # `with_tests` makes a gold score of unit tests
    assert task.name == name and (task.gold is None) == programs
    if name in STORED:
        rows, first = (
            {row["prompt"] for split in t.splits.values() for row in split} for t in (whole, task)
        )
        assert (
            first == {row["prompt"] for row in read_file(shipped(f"{name}.jsonl.gz"))[:600]} < rows
        )
        other = load_task(name, size=600, seed=3)  # the same rows in other parts
        assert other.splits["ppo"].to_list() != task.splits["ppo"].to_list()
        assert {row["prompt"] for split in other.splits.values() for row in split} == first


def test_every_embedded_task_has_a_model():
    for name in EMBEDDED:
        model = read_presets(f"embedded/{name}", "test")["model"]
        assert EMBEDDED_MODELS[model] == name and (shipped(model) / "build.json").is_file()


@pytest.mark.parametrize("name", ["tiny-hh", "tiny-webgpt"])
def test_all_stages_run(tmp_path, name):
    sizes = {
        "size": 40,
        "updates": 1,
        "batch_size": 4,
        "eval_prompts": 4,
        "sft_batch_size": 4,
        "rm_batch_size": 4,
    }
    words, out = [f"--{key}={value}" for key, value in sizes.items()], tmp_path / "out"
    assert main(["run", "--dataset", name, *words, f"--output_dir={out}"]) == 0
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["model"], config["max_response_length"]) == (
        name.replace("tiny-", "tiny-gemma-"),
        136,
    )
    (row,) = RunFolder.open(out / "ma-ppo").metrics()
    # pretrained: it answers rightly, and ends
    assert row["eos_rate"] > 0.5 and row["gold_mean"] > 0
