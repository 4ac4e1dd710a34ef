"""The command line: exit codes, one line for every mistake before anything loads, and whole runs on small budgets."""

import gzip
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from small_runs import timeless
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from marlhf_lite.cli import main
from marlhf_lite.config.commands import COMMANDS, option_names
from marlhf_lite.experiments import context, samplers
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import load_policy, load_score_model
from marlhf_lite.training import ppo
from marlhf_lite.training.rollout import generate
from marlhf_lite.utils.errors import disk_fault
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.run_folder import RunFolder, RunLock
from marlhf_lite.utils.shipped import shipped

SMALL = (
    "--sft_epochs 0.2 --sft_batch_size 4 --rm_epochs 0.2 --rm_batch_size 8 --lora_r 4 --updates 2 --batch_size 8 "
    "--micro_batch_size 8 --eval_prompts 6 --max_response_length 16"
).split()


def budget(command):
    """Those of the small settings that a command takes."""
    known = option_names(COMMANDS[command])
    return [word for pair in zip(SMALL[::2], SMALL[1::2]) if pair[0][2:] in known for word in pair]


@pytest.fixture(autouse=True)
def tidy(monkeypatch, tmp_path):
    """A folder to work in, and nothing left behind in the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")


# Exit codes and mistakes


AT_ONCE = """
import sys
from marlhf_lite.cli import main
for status, words in ((0, ""), (0, "--version"), (0, "presets"), (0, "ppo --help"), (2, "run --dataset nowhere.jsonl"),
                      (2, "run --config nowhere.yaml"), (2, "ppo --sft nowhere"), (2, "run --resume nowhere"),
                      (2, "export --policy nowhere --output_dir x")):
    try:
        found = main(words.split())
    except SystemExit as end:
        found = end.code
    assert found == status, words
    assert not {"torch", "transformers", "datasets", "matplotlib"} & set(sys.modules), words
"""


def test_help_and_missing_files_need_no_heavy_imports():
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in [*COMMANDS, "presets"])
    assert all(line.startswith("marlhf: error: ") for line in done.stderr.splitlines())


@pytest.fixture
def fails(capsys, tmp_path, monkeypatch):
    """Runs a command that must fail: exit code 2, one line that names what is wrong, no model loaded, no file left."""
    monkeypatch.setattr(
        context,
        "load_base",
        lambda *_: pytest.fail("a model was loaded before the input was checked"),
    )

    def run(words, *names):
        capsys.readouterr()
        before = sorted(tmp_path.rglob("*"))
        own = {"--output_dir", "--resume", "fly", "generate", "export"} & set(words)
        assert main([*words, *([] if own else ["--output_dir", "out"])]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith("marlhf: error: ") and shown.err.count("\n") == 1, shown.err
        assert shown.out == "" and sorted(tmp_path.rglob("*")) == before
        assert all(name in shown.err for name in names), shown.err

    return run


GOOD = {"prompt": "Q", "chosen": " yes", "rejected": " no"}
FILES = [  # name and content of a file -> what the message names besides it
    ("d.jsonl", "", "d.jsonl"),
    ("d.jsonl", json.dumps(GOOD | {"rejected": None}), "rejected"),
    (
        "d.jsonl",
        "\n".join(map(json.dumps, [GOOD, {"prompt": "Q", "chosen": " yes"}])),
        "row 2|rejected|--bad_rows",
    ),
    ("d.jsonl", "\n".join(json.dumps(GOOD | {"prompt": f"Q{i}"}) for i in range(3)), "3 rows"),
    ("d.jsonl", "\n".join([json.dumps(GOOD)] * 9), "1 different prompts"),
    ("d.txt", json.dumps(GOOD), ".jsonl"),
    ("d.jsonl.gz", "no archive", "d.jsonl.gz"),
    ("my.yaml", "updats: 3\n", "updats|did you mean updates?"),
    ("my.yaml", "1: 3\n", "unknown key 1"),
    ("my.yaml", "seed: 1.5\n", "--seed|'1.5'"),
    ("my.yaml", "cliprange: {a: 1}\n", "--cliprange"),
    ("my.yaml", "whiten: perhaps\n", "--whiten|perhaps"),
    ("my.yaml", "updates: 0\n", "--updates 0"),
    ("my.yaml", "- seed\n- 3\n", "a list"),
    ("my.yaml", "a: b: c\n", "not YAML"),
]


@pytest.mark.parametrize(("name", "content", "named"), FILES)
def test_bad_files(fails, tmp_path, name, content, named):
    (tmp_path / name).write_text(content)
    option = "--config" if name.endswith("yaml") else "--dataset"
    fails(["run", option, f"./{name}"], name, *named.split("|"))


def test_a_model_that_cannot_be_used_leaves_no_folder(tiny, tmp_path, capsys):
    shutil.copytree(tiny.model, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{}")
    targets = [
        ["--model", tiny.model, "--lora_target_modules", name] for name in ("q_proj", "[", "")
    ]
    for words in (*targets, ["--model", "./broken"]):
        assert main(["sft", "--size", "20", *words, "--output_dir", "out"]) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1 and f"{' '.join(words[-2:])}: " in shown
    assert not (tmp_path / "out").exists()


# Whole runs


def check_records(run, method="MA-PPO"):
    """What a run has to leave: every file there, whole and in agreement."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["updates"] == 2 and "torch" in config["versions"]
    counts = json.loads((run / "data.json").read_text())
    assert {"read", "kept", "sft", "rm", "ppo", "test", "long_prompts"} <= set(counts)
    answers = RunFolder.open(run).samples()
    assert [row["method"] for row in answers] == ["SFT"] * 6 + [method] * 6
    assert all(1 <= row["tokens"] <= 16 for row in answers) and all(
        row["kl"] == 0 for row in answers[:6]
    )
    assert [row["prompt"] for row in answers[:6]] == [row["prompt"] for row in answers[6:]]
    (run / "new").touch()
    modes = {file.stat().st_mode for file in (run / "new", *run.rglob("*.safetensors"))}
    assert len(modes) == 1, "weights have the mode of any new file"
    trained = RunFolder.open(run / method.lower())
    assert [row["update"] for row in trained.metrics()] == [1, 2]
    assert len(trained.samples()) == 4  # of the first update
    assert trained.config["n"] == {"PPO": "1", "MA-PPO": "5"}[method]
    summary = json.loads((run / "summary.json").read_text())
    assert [row["method"] for row in summary["methods"]] == ["SFT", method]
    assert f"| {method} |" in (run / "table.md").read_text()
    for name in ("reward_curves", "l2_norms", "rm_score_distribution"):
        with Image.open(run / "figures" / f"{name}.png") as image:
            assert min(image.size) > 200
    for folder in ("sft", "rm", f"{method.lower()}/policy", f"{method.lower()}/critic"):
        assert (run / folder / "adapter_model.safetensors").is_file(), folder
    return summary


def dialogues(count):
    """Small talk in the form of the HH data: two transcripts that part at the last assistant turn."""
    for i in range(count):
        start = f"\n\nHuman: Where do I buy rope {i}?\n\nAssistant: How much?\n\nHuman: {i} pounds.\n\nAssistant:"
        yield {
            "chosen": f"{start} Try the market for rope {i}.",
            "rejected": f"{start} No idea{'!' * (i % 3)}",
        }


def test_run_on_transcripts(tiny, tmp_path, capsys):
    """HH's form, gzipped, with options from a file; then from the run's own config, with single tokens."""
    bad = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"}
    lines = [json.dumps(row) + "\n" for row in (*dialogues(80), bad)]
    (tmp_path / "hh.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    settings = {flag[2:]: value for flag, value in zip(SMALL[::2], SMALL[1::2])}
    settings |= {
        "dataset": "hh.jsonl.gz",
        "model": tiny.model,
        "bad_rows": "drop",
        "output_dir": "out",
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(settings))
    assert main(["run", "--config", "my.yaml"]) == 0
    run = tmp_path / "out"
    check_records(run)
    assert json.loads((run / "data.json").read_text())["no_shared_turn"] == 1
    answer = RunFolder.open(run).samples()[0]
    assert answer["prompt"].startswith("\n\nHuman: Where") and answer["prompt"].endswith(
        " pounds.\n\nAssistant:"
    )
    shutil.copy(run / "config.yaml", "again.yaml")
    capsys.readouterr()
    assert main(["run", "--config", "again.yaml", "--output_dir", "again", "--n", "1"]) == 0
    check_records(tmp_path / "again", "PPO")
    answers = capsys.readouterr().out.split("| PPO |")[1]  # three of each method, below the table
    assert answers.count("\nSFT [") == answers.count("\nPPO [") == 3


def test_a_policy_answers_a_prompt_and_becomes_a_model(
    tiny, base, sft, tmp_path, capsys, monkeypatch
):
    """The exported model is the base with the adapter added in, and answers as the policy does."""
    prompt = "SUBREDDIT: r/tea\nPOST: I bought tea.\nTL;DR:"
    given = ["--policy", str(sft), "--model", tiny.model]
    words = ["generate", *given, "--max_response_length", "8", "--seed", "3"]
    assert main([*words, "--prompt", prompt]) == 0
    answer = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
    assert main(words) == 0 and capsys.readouterr().out == answer and len(answer) > 1
    assert main([*words, "--prompt", " "]) == 2 and "--prompt: empty" in capsys.readouterr().err
    assert main([*words, "--prompt", prompt, "--max_prompt_length", "2"]) == 2
    assert "more than --max_prompt_length 2" in capsys.readouterr().err
    assert main(["export", *given, "--output_dir", "mine"]) == 0
    assert "model: mine" in capsys.readouterr().out
    model, policy = (
        AutoModelForCausalLM.from_pretrained("mine"),
        load_policy(base, sft, trainable=False),
    )
    tokens = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(model(tokens).logits, policy(tokens).logits, rtol=1e-4, atol=1e-4)


def test_demo_compares_token_and_macro(tiny, tmp_path, capsys):
    assert main(["demo", "--size", "60", "--model", tiny.model, *SMALL, "--output_dir", "out"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["methods"]
    assert [row["method"] for row in summary] == ["SFT", "PPO", "MA-PPO"] and all(
        "gold" in row for row in summary
    )
    runs = [RunFolder.open(tmp_path / "out" / name) for name in ("ppo", "ma-ppo")]
    assert [run.config["n"] for run in runs] == ["1", "5"]
    token, macro = (run.metrics()[0] for run in runs)
    assert token["macro_length"] == 1 < macro["macro_length"] <= 5
    # the same start and the same first rollout
    assert token["score_mean"] == pytest.approx(macro["score_mean"])
    assert (tmp_path / "out" / "figures" / "gold_curves.png").is_file()


def test_demo_has_two_acts_and_the_second_can_wait(tmp_path, capsys, monkeypatch):
    """Without data and models of its own; in small."""
    monkeypatch.setenv("ACT", "1")
    assert main(["demo", "--size", "60", *SMALL, "--output_dir", "out"]) == 0
    first, out = tmp_path / "out" / "umbrella", tmp_path / "out"
    arms = json.loads((first / "summary.json").read_text())["methods"]
    assert [row["method"] for row in arms] == [
        "PPO",
        "PPO λ=0.99",
        "MA-PPO",
    ] and "gold_gain" in arms[2]
    configs = [RunFolder.open(first / name).config for name in ("ppo", "ppo-0.99", "ma-ppo")]
    assert [(c["n"], c["lam"]) for c in configs] == [("1", 0.95), ("1", 0.99), ("5", 0.95)]
    assert (first / "figures" / "reward_curves.png").is_file() and not (first / "rm").exists()
    shown = capsys.readouterr().out
    for method in ("PPO λ=0.99 ", "MA-PPO "):
        assert re.search(
            rf"{method}(scored \d|scored the same as|could not be told apart from)", shown
        )
    assert (
        "One seed: a demonstration" in shown
        and "tiny-tldr" not in shown
        and not (out / "sft").exists()
    )
    monkeypatch.delenv("ACT")
    assert main(["demo", "--resume", "out"]) == 0
    again, _, second = capsys.readouterr().out.partition("Act 2 of 2")
    assert again.count("done already") == 4 and "MA-PPO update" not in again
    assert "tiny-tldr" in second and re.search(
        "MA-PPO (scored|could not be told apart from)", second
    )
    methods = json.loads((out / "summary.json").read_text())["methods"]
    assert [row["method"] for row in methods] == ["SFT", "PPO", "MA-PPO"]
    assert [len(RunFolder.open(out / name).metrics()) for name in ("ppo", "ma-ppo")] == [2, 2]


def stage(name, out, *argv):
    words = [name, "--output_dir", out, *budget(name), *map(str, argv)]
    assert main(words) == 0
    return Path(out)


@pytest.fixture
def shared(tiny, pairs):
    return ["--dataset", str(pairs), "--model", tiny.model]


def test_a_seed_fixes_every_stage(shared, tmp_path, capsys):
    """Stages of their own repeat the weights and metrics of the chain, whatever was drawn before."""
    chain = stage("run", "a", *shared, "--seed", "3")
    shown = capsys.readouterr().out
    for part in (
        "(read as pairs): sft 14, rm 17, ppo 29, test 8; dropped: 12 equal after cut",
        "| MA-PPO |",
        "figures: ",
        "run folder: a",
    ):
        assert part in shown
    check_records(tmp_path / chain)
    torch.rand(7)  # another state of the global generator
    sft = stage("sft", "c", *shared, "--seed", "3")
    rm = stage("rm", "d", *shared, "--sft", "c", "--seed", "3")
    ppo = stage("ppo", "b", *shared, "--sft", "c", "--rm", "d", "--seed", "3")
    other = stage("sft", "e", *shared, "--seed", "4")
    for name, again, same in (("sft", sft, True), ("rm", rm, True), ("sft", other, False)):
        ours, theirs = (
            load_file(root / name / "adapter_model.safetensors") for root in (chain, again)
        )
        assert same == all(torch.equal(ours[key], theirs[key]) for key in ours)
    rows = [timeless(RunFolder.open(path).metrics()) for path in (chain / "ma-ppo", ppo / "ppo")]
    assert rows[0] == rows[1]


def test_stages_one_after_the_other(shared, tmp_path, capsys, monkeypatch):
    """Each command's folder is what the next one takes, as a run or as the adapter inside it."""
    stage("sft", "a", *shared, "--lora_target_modules", ".*[qv]_proj")
    assert "adapter: a/sft" in capsys.readouterr().out
    stage("rm", "b", *shared, "--sft", "a")
    stage("ppo", "c", *shared, "--sft", "a/sft", "--rm", "b", "--n", "inf")
    assert RunFolder.open("c/ppo").metrics()[0]["macro_actions"] == 1
    names = "c=c,d=c/ppo,c/ppo/policy"
    stage("evaluate", "e", *shared, "--sft", "a", "--rm", "b/rm", "--policies", names)
    summary = json.loads(Path("e/summary.json").read_text())["methods"]
    assert [row["method"] for row in summary] == ["SFT", "c", "d", "ppo"]
    assert summary[1] | {"method": ""} == summary[2] | {"method": ""} == summary[3] | {"method": ""}
    assert (
        Path("e/figures/rm_score_distribution.png").is_file()
        and not Path("e/figures/reward_curves.png").exists()
    )
    trained, answered = Path("c/config.yaml").read_bytes(), Path("e/samples.jsonl").read_bytes()
    with monkeypatch.context() as again:  # everything is stored, so nothing is loaded
        again.setattr(context, "load_base", lambda *_: pytest.fail("a model was loaded"))
        stage("evaluate", "e", *shared, "--sft", "a", "--rm", "b/rm", "--policies", "c=c")
    answers = Path("e/samples.jsonl").read_bytes()
    assert answers and answered.startswith(answers)
    assert json.loads(Path("e/summary.json").read_text())["config"]["policies"] == "c=c"
    # the run of another command is not written to
    words = ["evaluate", "--output_dir", "c", *shared, "--sft", "a", "--rm", "b", "--policies", "c"]
    assert main(words) == 2
    assert Path("c/config.yaml").read_bytes() == trained
    stage(
        "evaluate",
        "e",
        *shared,
        "--sft",
        "a",
        "--rm",
        "b",
        "--eval_temperatures",
        "0,1",
        "--eval_prompts",
        "2",
    )
    assert "SFT T=0.0" in capsys.readouterr().out
    stage("run", "f", *shared, "--sft", "a", "--rm", "b")  # what is given is not made again
    assert (
        not Path("f/sft").exists()
        and not Path("f/rm").exists()
        and Path("f/ma-ppo/policy").is_dir()
    )


@pytest.mark.parametrize("reward", ["rm", "brevity:short"])
def test_the_reward_model_is_loaded_where_it_is_the_reward(
    shared, base, sft, rm, reward, tmp_path, monkeypatch
):
    """The critic starts from it, with its head, in both cases."""
    (tmp_path / "brevity.py").write_text(
        "def short(prompts, responses):\n    return [-len(r) for r in responses]\n"
    )
    trained = []

    def keep(self, *_, **__):
        trained.append(self.models)
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo.PPOTrainer, "train", keep)
    argv = [
        "ppo",
        *shared,
        "--sft",
        str(sft),
        "--rm",
        str(rm),
        "--reward",
        reward,
        "--output_dir",
        "out",
    ]
    assert main(argv) == 130
    assert (trained[0].reward is not None) == (reward == "rm")
    ours, theirs = (
        model.state_dict() for model in (trained[0].critic.model, load_score_model(base, rm))
    )
    assert ours.keys() == theirs.keys() and all(
        torch.equal(x, theirs[name]) for name, x in ours.items()
    )


def test_interrupt_leaves_whole_records(tiny, base, shared, sft, rm, monkeypatch, capsys):
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args)

    interrupted.draws_from_policy = True
    monkeypatch.setattr(samplers, "generate", interrupted)
    argv = [
        "ppo",
        *shared,
        "--sft",
        str(sft),
        "--rm",
        str(rm),
        *budget("ppo"),
        "--output_dir",
        "out",
    ]
    assert main(argv) == 130
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "run folder: out"  # it is known before training begins
    said = "out is whole: marlhf ppo --resume out continues"
    assert shown.err.endswith(f"{said}\n")
    run = RunFolder.open("out/ppo")
    assert [row["update"] for row in run.metrics()] == [1] and len(run.samples()) == 4
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (run.path / name).read_bytes().endswith(b"\n")

    # A resume keeps what is there, and one that finds another process in the run changes nothing.
    before = {path.name: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with RunLock() as lock:
        lock.take(Path("out"))
        assert main(["ppo", "--resume", "out"]) == 2
        assert "marlhf: error: out: another process works in it" in capsys.readouterr().err
    calls.append(None)  # no interrupt any more
    assert main(["ppo", "--resume", "out"]) == 0
    assert (
        "begins again; what it has recorded is kept in out/stopped/ppo-1" in capsys.readouterr().out
    )
    kept = Path("out/stopped/ppo-1")
    assert {path.name: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before
    assert [row["update"] for row in RunFolder.open("out/ppo").metrics()] == [1, 2]

    # What is kept is in nobody's way: later commands and a study's report find one policy and one record.
    assert resolve_adapter_dir("policies", "out") == Path("out/ppo/policy")
    assert [path.parent.name for path in Path("out").glob("*/metrics.jsonl")] == ["ppo"]


# Prompts without answers


@pytest.fixture
def prompts(tmp_path):
    """Prompts, and a reward of one's own, in the folder of the test."""
    sys.modules.pop("words", None)  # another test's
    (tmp_path / "words.py").write_text(
        "def few(prompts, responses):\n    return [-len(r) for r in responses]\n"
    )
    append_lines(tmp_path / "prompts.jsonl", [{"prompt": f"Tell of {i} cats."} for i in range(40)])


def test_ppo_starts_from_the_base_model(prompts, capsys):
    sizes = "--batch_size 4 --updates 1 --max_response_length 6 --eval_prompts 2 --output_dir out"
    assert main(f"run --dataset prompts.jsonl --reward words:few {sizes}".split()) == 0
    printed = capsys.readouterr().out
    assert "the policy starts as the base model is" in printed and "| words:few |" in printed
    rows = json.loads(Path("out/data.json").read_text())
    assert (rows["sft"], rows["rm"], rows["ppo"], rows["test"]) == (0, 0, 36, 4)
    adapter = load_file("out/sft/adapter_model.safetensors")
    assert all(not weight.any() for name, weight in adapter.items() if "lora_B" in name)
    (row,) = RunFolder.open("out/ma-ppo").metrics()
    assert abs(row["kl_k1"]) < 1e-5 and row["score_mean"] < 0


def test_a_minimum_length_from_training_to_the_exported_model_and_a_critic_of_zero(prompts):
    """Nearly every token ends a response of this model, were it not for the minimum; a control without it is short."""
    model = AutoModelForCausalLM.from_pretrained(shipped("tiny-gemma"))
    model.generation_config.eos_token_id = list(range(40, model.config.vocab_size))
    model.save_pretrained("ending")
    AutoTokenizer.from_pretrained(shipped("tiny-gemma")).save_pretrained("ending")
    sizes = "--model ending --batch_size 4 --updates 1 --max_response_length 6 --eval_prompts 2 --output_dir out"
    least = "--min_response_length 6 --critic_head_init zero"
    assert main(f"run --dataset prompts.jsonl --reward words:few {sizes} {least}".split()) == 0
    (row,) = RunFolder.open("out/ma-ppo").metrics()
    assert row["response_length"] == 6 and row["eos_rate"] == 0 and row["value_noise"] == 0
    assert {answer["tokens"] for answer in RunFolder.open("out").samples()} == {6}
    free = "evaluate --sft out --max_response_length 6 --eval_prompts 2 --output_dir free"
    assert main(free.split()) == 0
    assert max(answer["tokens"] for answer in RunFolder.open("free").samples()) < 6
    assert main("export --policy out/ma-ppo/policy --model ending --output_dir mine".split()) == 0
    assert GenerationConfig.from_pretrained("mine").min_new_tokens == 6
    for folder in ("mine", "out/ma-ppo/policy", "out/ma-ppo/critic", "out/sft"):
        card = Path(folder, "README.md").read_text()
        assert "base_model: ending" in card and str(Path.cwd()) not in card, folder
    assert "# MA-PPO of ending" in Path("mine/README.md").read_text()


def test_a_first_batch_without_any_reward_leaves_a_critic_of_zero_and_the_policy_as_they_are(
    prompts,
):
    """As tests are where no program passes yet: there is nothing to learn, and that is no fault."""
    Path("words.py").write_text("def few(prompts, responses):\n    return [0.0] * len(responses)\n")
    sizes = "--batch_size 4 --updates 2 --max_response_length 6 --eval_prompts 2 --output_dir out"
    words = f"run --dataset prompts.jsonl --reward words:few --critic_head_init zero {sizes}"
    assert main(words.split()) == 0
    rows = RunFolder.open("out/ma-ppo").metrics()
    assert [row["value_loss"] for row in rows] == [0, 0] and [
        row["advantage_rms"] for row in rows
    ] == [0, 0]


def test_an_evaluation_scores_by_one_s_own_function(prompts, capsys):
    """With --reward, and not without; a function that was edited scores the stored answers again."""
    stage("sft", "out", "--dataset", "prompts.jsonl", "--sft_epochs", "0")

    def scores(*words):
        sys.modules.pop("words", None)  # as in a new process
        stage("evaluate", "e", "--sft", "out", *words)
        rows = RunFolder.open("e").samples()
        assert not any("gold" in row for row in rows)  # only a true score is called so
        return [(row.get("words:few"), len(row["response"])) for row in rows]

    few = scores("--reward", "words:few")
    assert [score for score, _ in few] == [-length for _, length in few] and len(few) == 4
    assert "| method | words:few | KL (nats) |" in Path("e/table.md").read_text()
    Path("words.py").write_text(
        "def few(prompts, responses):\n    return [2 * len(r) for r in responses]\n"
    )
    assert scores("--reward", "words:few") == [(2 * length, length) for _, length in few]
    assert scores("--reward", "rm") == scores() == [(None, length) for _, length in few]
    assert len(list(Path("e/responses").iterdir())) == 1
    scores("--dtype", "bfloat16")  # other weights, other answers
    assert len(list(Path("e/responses").iterdir())) == 2
    assert "note: --reward" not in capsys.readouterr().out
    stage("sft", "gold", "--size", "40")
    stage("evaluate", "f", "--sft", "gold", "--reward", "words:few")
    assert (
        "note: --reward words:few: not used: tiny-tldr has a gold score" in capsys.readouterr().out
    )


def test_an_evaluation_by_a_reward_that_draws_is_the_same_for_one_seed(prompts):
    words = "def drawn(prompts, responses):\n    return [random.random() for _ in responses]\n"
    Path("words.py").write_text(f"import random\n\n\n{words}")
    stage("sft", "out", "--dataset", "prompts.jsonl", "--sft_epochs", "0")
    drawn = []
    for folder in ("first", "again"):
        random.seed()
        stage("evaluate", folder, "--sft", "out", "--reward", "words:drawn")
        drawn.append([row["words:drawn"] for row in RunFolder.open(folder).samples()])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 1


# A full disk


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "x/y"), RuntimeError("PytorchStreamWriter: x")]
)
def test_a_full_disk_is_one_line_wherever_it_shows(tiny, shared, sft, monkeypatch, capsys, error):
    """What a library raises about it, also as the cause of another error; a model is not left half."""

    def full(self, place, *args, **kwargs):
        Path(place).mkdir(parents=True, exist_ok=True)
        (Path(place) / "half").touch()
        raise ValueError("cannot save") from error

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    export = ["export", "--model", tiny.model, "--policy", str(sft), "--output_dir", "model"]
    for argv, again in (
        (["sft", *shared, *budget("sft"), "--output_dir", "out"], True),
        (export, False),
    ):
        assert main(argv) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("marlhf: error: ") and "free some disk space" in last
        assert ("marlhf sft --resume out continues" in last) == again
    assert not Path("model").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(buffered):
    """Python writes a short text only when it ends. A reader that ends, such as `head`, is no error."""
    words, environment = (
        [sys.executable, "-m", "marlhf_lite", "presets"],
        {**os.environ, "PYTHONUNBUFFERED": buffered},
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, env=environment, text=True
        )
    assert (
        done.returncode == 2
        and done.stderr.endswith("free some disk space\n")
        and done.stderr.count("\n") == 1
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, env=environment, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_errors_are_not_taken_for_a_full_disk():
    assert (
        disk_fault(ValueError("no space here"))
        == disk_fault(FileNotFoundError(2, "No such file", "x"))
        == ""
    )
    assert disk_fault(RuntimeError("I/O error: File too large (os error 27)")).endswith(
        "takes larger files"
    )
    # at an import, on a full disk
    no_folder = FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
    assert disk_fault(no_folder).endswith("free some disk space")
    assert disk_fault(OSError(36, "File name too long", "x" * 300)).endswith(
        "choose a shorter name"
    )
    assert disk_fault(PermissionError(13, "Permission denied", "runs/x")).startswith(
        "runs/x: not written"
    )
