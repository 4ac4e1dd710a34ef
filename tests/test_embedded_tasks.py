"""What the embedded dialogues and questions have in common: their splits, and all stages on them."""

import pytest
import yaml

from marlhf_lite.cli import main
from marlhf_lite.lab.corpora import tiny_hh as hh
from marlhf_lite.lab.corpora import tiny_webgpt as webgpt
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder

both = pytest.mark.parametrize(
    ("name", "corpus", "load"),
    [("tiny-hh", hh, hh.load_tiny_hh), ("tiny-webgpt", webgpt, webgpt.load_tiny_webgpt)],
    ids=("hh", "webgpt"),
)


@both
def test_task(name, corpus, load):
    task = load(600, 1234)
    assert list(map(len, task.splits.values())) == [108, 216, 216, 60] and task.gold is corpus.gold_scores
    assert corpus.make_pairs(20, 3)[:5] == corpus.make_pairs(5, 3) != corpus.make_pairs(5, 4)
    with pytest.raises(InputError, match=r"^--part news: "):
        load(600, 1234, "news")


@both
def test_all_stages_run(tmp_path, name, corpus, load):
    sizes = {"size": 40, "updates": 1, "batch_size": 4, "eval_prompts": 4, "sft_batch_size": 4, "rm_batch_size": 4}
    words, out = [f"--{key}={value}" for key, value in sizes.items()], tmp_path / "out"
    assert main(["run", "--dataset", name, *words, f"--output_dir={out}"]) == 0
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["model"], config["max_response_length"]) == (name.replace("tiny-", "tiny-gemma-"), 136)
    (row,) = RunFolder.open(out / "ma-ppo").metrics()
    assert row["eos_rate"] > 0.5 and row["gold_mean"] > 0  # pretrained: it answers rightly, and ends
