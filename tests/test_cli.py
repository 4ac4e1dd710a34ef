"""The command line: exit codes, one line for every mistake before anything loads, and whole runs on small budgets."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib import pyplot as plt
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import marlhf_lite
from marlhf_lite.cli import COMMANDS, main
from marlhf_lite.config.groups import GROUPS
from marlhf_lite.config.parser import parse
from marlhf_lite.experiments import pipeline
from marlhf_lite.lab.corpora.tiny_tldr import make_pairs
from marlhf_lite.models import loading as models
from marlhf_lite.models.loading import load_policy
from marlhf_lite.training import ppo
from marlhf_lite.training.rollout import generate
from marlhf_lite.utils.run_folder import RunFolder

SMALL = (
    "--sft_epochs 0.2 --sft_batch_size 4 --rm_epochs 0.2 --rm_batch_size 8 --lora_r 4 --updates 2 --batch_size 8 "
    "--micro_batch_size 8 --eval_prompts 6 --max_response_length 16"
).split()


def budget(*groups):
    """Those of the small settings that a command with these groups takes."""
    known = {name for group in groups for name in GROUPS[group].__dataclass_fields__}
    pairs = zip(SMALL[::2], SMALL[1::2])
    return [word for flag, value in pairs if flag[2:] in known for word in (flag, value)]


@pytest.fixture(autouse=True)
def tidy(monkeypatch, tmp_path):
    """A folder to work in, and nothing left behind in the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")
    yield
    plt.close("all")


def write_jsonl(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def dialogues(count):
    """Small talk in the form of the HH data: two transcripts that part at the last assistant turn."""
    things = "tea bread paint glue soap rope seeds bricks".split()
    rows = []
    for i in range(count):
        thing = f"{things[i % 8]} number {i}"
        start = f"\n\nHuman: Where do I buy {thing}?\n\nAssistant: How much?\n\nHuman: {i + 1} pounds.\n\nAssistant:"
        rows.append({"chosen": f"{start} Try the market for {thing}.", "rejected": f"{start} No idea{'!' * (i % 3)}"})
    return rows


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "pairs.jsonl", make_pairs(80, 0))


# Exit codes and help


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_usage(argv, capsys):
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and command.help in shown for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: marlhf {name} [options]" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_use_real_options(name):
    """Every flag of the example in a command's help is one of its options."""
    _, command, *words = COMMANDS[name].example.split()
    known = {f for group in COMMANDS[name].groups for f in GROUPS[group].__dataclass_fields__}
    assert command == name
    assert {word[2:] for word in words if word.startswith("--")} <= known | {"preset", "config"}


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        ([], 0),
        (["--version"], 0),
        (["presets"], 0),
        (["ppo", "--help"], 0),
        (["run", "--dataset", "nowhere.jsonl"], 2),
        (["run", "--config", "nowhere.yaml"], 2),
        (["ppo", "--sft", "nowhere"], 2),
        (["evaluate", "--sft", "nowhere"], 2),
        (["run", "--resume", "nowhere"], 2),
        (["generate", "--policy", "nowhere"], 2),
        (["export", "--policy", "nowhere", "--output_dir", "x"], 2),
    ],
)
def test_help_and_missing_files_need_no_heavy_imports(argv, status):
    """So they answer at once: torch and transformers take seconds to import."""
    code = f"""
import sys
from marlhf_lite.cli import main
try:
    status = main({argv})
except SystemExit as end:
    status = end.code
assert status == {status}, status
assert not {{'torch', 'transformers', 'datasets', 'matplotlib'}} & set(sys.modules)"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"marlhf-lite {marlhf_lite.__version__}\n"


def test_exit_code_of_the_process():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "marlhf_lite", "run", "--updats", "3"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    expected = "marlhf: error: marlhf run: unknown option --updats: did you mean --updates? see marlhf run --help\n"
    assert done.stderr == expected


SFT = object()  # in a command line: the folder of an SFT adapter


# Mistakes, each one line, before a model is loaded and before the run's folder is made


@pytest.fixture
def no_model(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr(models, "load_base", refuse)
    monkeypatch.setattr(pipeline, "load_base", refuse)


@pytest.fixture
def fails(no_model, capsys, tmp_path):
    """Runs a command that must fail: exit code 2, one line that holds the parts, nothing on disk."""

    def run(*argv, parts=(), output="out"):
        capsys.readouterr()
        before = sorted(tmp_path.rglob("*"))
        where = ["--output_dir", output] if output else []
        assert main([*map(str, argv), *where]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith("marlhf: error: ") and shown.err.count("\n") == 1, shown.err
        assert shown.err.endswith("\n") and ": " in shown.err[len("marlhf: error: ") :]
        assert shown.out == ""
        for part in parts:
            assert part in shown.err, shown.err
        assert sorted(tmp_path.rglob("*")) == before
        return shown.err

    return run


GOOD = {"prompt": "Q", "chosen": " yes", "rejected": " no"}
HALF = {"prompt": "Q", "chosen": " yes"}
THREE = [GOOD | {"prompt": f"Q{i}"} for i in range(3)]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


BAD_DATA = {
    "empty": (b"", "d.jsonl", ["d.jsonl: the file holds no rows", "give at least one"]),
    "missing column": (lines(HALF), "d.jsonl", ["d.jsonl", "columns found: prompt, chosen", "rejected"]),
    "one row lacks it": (lines(GOOD, HALF), "d.jsonl", ["row 2", "no 'rejected'", "--bad_rows drop"]),
    "cut gzip": (gzip.compress(lines(*[GOOD] * 50))[:-12], "d.jsonl.gz", ["d.jsonl.gz", "cannot be read", "whole"]),
    "unknown kind": (lines(GOOD), "d.txt", ["d.txt", "unknown extension", ".jsonl"]),
    "too few": (lines(*THREE), "d.jsonl", ["d.jsonl: 3 rows are too few", "at least 4"]),
    "same prompt": (lines(*[GOOD] * 9), "d.jsonl", ["d.jsonl: 9 rows have 1 different prompts", "give at least 4"]),
}


@pytest.mark.parametrize("case", BAD_DATA)
@pytest.mark.parametrize("command", ["run", "sft"])
def test_bad_data(fails, tmp_path, command, case):
    content, name, parts = BAD_DATA[case]
    (tmp_path / name).write_bytes(content)
    fails(command, "--dataset", f"./{name}", parts=[name, *parts])


@pytest.mark.parametrize("command", ["run", "sft"])
def test_a_part_that_the_data_set_lacks(command, fails):
    fails(command, "--part", "cnn_dm", parts=["--part cnn_dm: tiny-tldr has no such part"])


@pytest.mark.parametrize("name", ["./no.jsonl", "no.csv", "nothing", "tiny_tldr", ""])
def test_missing_dataset(fails, name):
    fails("run", "--dataset", name, parts=[name.removeprefix("./")])


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["fly"], ["unknown command fly", "choose from demo, run"]),
        (["run", "--fly"], ["unknown option --fly", "--help"]),
        (["run", "--preset", "mine"], ["--preset mine", "paper, released"]),
        (["run", "--config", "no.yaml"], ["--config no.yaml", "check the path"]),
        (["run", "--n", "0"], ["--n 0", "from 1 up, or inf"]),
        (["ppo", "--sft", SFT, "--reward", "gold", "--n", "-1"], ["--n -1", "from 1 up, or inf"]),
        (["demo", "--n", "2.5"], ["--n 2.5"]),
        (["run", "--termination", "randomized", "--lengths", "2,x"], ["--lengths 2,x"]),
        (["run", "--updates", "0"], ["--updates 0", "at least 1"]),
        (["run", "--size", "3"], ["--size 3", "give at least 4"]),
        (["run", "--size", "0"], ["--size 0"]),
        (["run", "--size", "9", "--max_prompt_length", "2"], ["--max_prompt_length 2", "prompts are longer: raise it"]),
        (["run", "--model", "no_folder"], ["--model no_folder", "no such folder"]),
        (["run", "--model", "./no/folder"], ["--model ./no/folder", "no such folder"]),
        (["rm"], ["--sft: not given", "marlhf sft"]),
        (["ppo"], ["--sft: not given", "marlhf sft"]),
        (["evaluate"], ["--sft: not given", "marlhf sft"]),
        (["rm", "--sft", "nowhere"], ["--sft nowhere", "no adapter there", "marlhf sft"]),
        (["run", "--size", "9", "--reward", "no_module:f"], ["--reward no_module:f", "No module named"]),
        (["run", "--size", "9", "--reward", "os:no_name"], ["--reward os:no_name", "no_name", "package.module"]),
        (["run", "--size", "9", "--reward", "os:sep"], ["--reward os:sep", "not a function"]),
        (["run", "--size", "9", "--reward", "golden"], ["--reward golden", "rm, gold"]),
        (["run", "--size", "9", "--reward", ":"], ["--reward :"]),
        (["ppo", "--from_checkpoint", "2"], ["--from_checkpoint 2: only a run that goes on has one", "--resume"]),
        (["run", "--from_checkpoint", "2"], ["--from_checkpoint 2", "--resume"]),
        (["rloo", "--critic_learning_rate", "1"], ["--critic_learning_rate", "did you mean --policy_learning_rate?"]),
        (["generate"], ["--policy: not given", "marlhf ppo"]),
        (["export", "--policy", SFT], ["--output_dir: not given"]),
    ],
)
def test_bad_options(fails, sft, tmp_path, argv, parts):
    (tmp_path / "FILE").touch()
    argv = [sft if word is SFT else word for word in argv]
    fails(*argv, parts=parts, output=None if argv[0] in ("fly", "generate", "export") else "out")


def test_options_of_other_commands_may_stand_in_files(fails, tmp_path):
    """One file serves several commands; what is wrong here is something else."""
    (tmp_path / "my.yaml").write_text("lam: 0.5\n")
    fails("rloo", "--config", "my.yaml", "--preset", "paper", parts=["--sft: not given"])


def test_model_folders(fails, tiny, sft, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    fails("run", "--model", bare, parts=[f"--model {bare}", "no config.json"])
    shutil.copy(f"{tiny.model}/config.json", bare)
    fails("run", "--model", bare, parts=[f"--model {bare}", "no weights", "model.safetensors"])
    fails("run", "--model", sft, parts=["holds an adapter", "--sft"])


def test_gold_needs_a_known_truth(fails, pairs, sft):
    parts = ["--reward gold", "no gold score"]
    fails("run", "--dataset", pairs, "--reward", "gold", parts=parts)
    fails("ppo", "--sft", sft, "--dataset", pairs, "--reward", "gold", parts=parts)


def test_a_reward_that_breaks_on_import(fails, tmp_path):
    (tmp_path / "broken_reward.py").write_text("def f(:\n")
    fails("run", "--size", "9", "--reward", "broken_reward:f", parts=["--reward broken_reward:f", "SyntaxError"])


def test_adapters(fails, sft, rm, tmp_path):
    fails("ppo", "--sft", sft, parts=["--rm: not given", "marlhf rm"])
    fails("rm", "--sft", rm, parts=[f"--sft {rm}", "another kind", "marlhf sft"])
    fails("ppo", "--sft", sft, "--rm", sft, parts=[f"--rm {sft}", "another kind", "marlhf rm"])
    fails("run", "--rm", tmp_path, parts=[f"--rm {tmp_path}", "no adapter there"])
    half = tmp_path / "half"
    half.mkdir()
    shutil.copy(sft / "adapter_config.json", half)
    fails("rm", "--sft", half, parts=["no weights"])
    (half / "adapter_config.json").write_text("{")
    fails("rm", "--sft", half, parts=["adapter_config.json is damaged"])


def test_policies(fails, sft, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(sft, tmp_path / "run" / name / "policy")
    evaluate = ("evaluate", "--sft", sft, "--policies")
    fails(*evaluate, "nowhere", parts=["--policies nowhere", "marlhf ppo"])
    fails(*evaluate, "x=", parts=["--policies: not given"])
    fails(*evaluate, "run", parts=["--policies run", "several", "run/a/policy", "run/b/policy"])
    fails(*evaluate, "run/a,run/a/policy", parts=["a second one is called a", "name=folder"])
    fails(*evaluate, "SFT=run/a", parts=["a second one is called SFT"])


def test_output_folder_in_use(fails, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    fails("run", output="notes", parts=["--output_dir notes exists already", "--overwrite"])
    fails("run", "--overwrite", output="notes", parts=["--output_dir notes holds something that is not a run"])
    fails("run", output="notes/diary.txt", parts=["--output_dir notes/diary.txt", "is a file"])
    fails("run", output="notes/diary.txt/deeper", parts=["is a file"])
    RunFolder.create("old", {"seed": 1})
    fails("run", output="old", parts=["--output_dir old exists already", "--overwrite"])


def test_overwrite_spares_what_the_run_needs(fails, sft, tmp_path):
    RunFolder.create("a", {})
    shutil.copytree(sft, tmp_path / "a" / "sft")
    write_jsonl(tmp_path / "a" / "pairs.jsonl", make_pairs(10, 0))
    fails("rm", "--sft", "a", "--overwrite", output="a", parts=["--output_dir a", "would remove a/sft"])
    fails("sft", "--dataset", "a/pairs.jsonl", "--overwrite", output="a", parts=["would remove a/pairs.jsonl"])


def test_an_overwritten_run_stays_when_the_new_one_cannot_start(fails, tmp_path):
    RunFolder.create("a", {"seed": 1})
    fails("run", "--dataset", "no.jsonl", "--overwrite", output="a", parts=["no.jsonl"])
    assert RunFolder.open("a").config["seed"] == 1


def test_a_model_that_does_not_load_leaves_no_folder(tiny, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(tiny.model, broken)
    (broken / "config.json").write_text("{}")
    assert main(["sft", "--size", "20", "--model", str(broken), "--output_dir", "out"]) == 2
    assert f"--model {broken}: cannot be loaded" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("targets", ["q_proj", "[", ""])
def test_lora_targets_that_match_nothing_leave_no_folder(tiny, tmp_path, capsys, targets):
    argv = ["sft", "--size", "20", "--model", tiny.model, "--lora_target_modules", targets, "--output_dir", "out"]
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and f"--lora_target_modules {targets}: matches no layer" in shown
    assert not (tmp_path / "out").exists()


# Whole runs


def check_records(run, figures, method="MA-PPO"):
    """What a run has to leave: every file there, whole and in agreement."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["updates"] == 2 and "torch" in config["environment"]
    counts = json.loads((run / "data.json").read_text())
    assert {"read", "kept", "sft", "rm", "ppo", "test", "long_prompts"} <= set(counts)
    answers = RunFolder.open(run).samples()
    assert {row["method"] for row in answers} == {"SFT", method}
    assert len(answers) == 12 and all(1 <= row["tokens"] <= 16 for row in answers)
    assert [row["prompt"] for row in answers[:6]] == [row["prompt"] for row in answers[6:]]
    assert all(row["kl"] == 0 for row in answers[:6])
    trained = RunFolder.open(run / method.lower())
    assert [row["update"] for row in trained.metrics()] == [1, 2]
    assert len(trained.samples()) == 4  # of the first update
    assert trained.config["n"] == "5"
    summary = json.loads((run / "summary.json").read_text())
    assert [row["method"] for row in summary["methods"]] == ["SFT", method]
    assert summary["methods"][1]["rm_score_gain"]["level"] == 0.95
    table = (run / "table.md").read_text()
    assert table.count("\n") == 4 and f"| {method} |" in table
    for name in ("reward_curves", "l2_norms", "rm_score_distribution"):
        with Image.open(figures / f"{name}.png") as image:
            image.load()
            assert min(image.size) > 200
    for folder in ("sft", "rm", f"{method.lower()}/policy", f"{method.lower()}/critic"):
        assert (run / folder / "adapter_model.safetensors").is_file(), folder
    return summary


def test_run_on_a_file_with_the_embedded_model(pairs, tmp_path, capsys):
    assert main(["run", "--dataset", pairs, *SMALL, "--output_dir", "out"]) == 0
    shown = capsys.readouterr().out
    check_records(tmp_path / "out", tmp_path / "out" / "figures")
    counts = json.loads((tmp_path / "out" / "data.json").read_text())
    assert counts["kept"] == 80 and sum(counts[part] for part in ("sft", "rm", "ppo", "test")) == 80
    for part in (
        "sft 14, rm 29, ppo 29, test 8",
        "held-out pairs ranked",
        "| MA-PPO |",
        "figures: ",
        "run folder: out",
    ):
        assert part in shown


def test_a_notebook_shows_no_path_of_the_machine(tiny, tmp_path, capsys):
    """The command line says where its run is; `open_context`, which notebooks call, does not."""
    words = ["--size", "20", "--model", tiny.model, "--output_dir", str(tmp_path / "out")]
    pipeline.open_context(parse("sft", words, COMMANDS["sft"].groups, "about"))
    shown = capsys.readouterr().out
    assert shown.startswith("tiny-tldr: sft ") and str(tmp_path) not in shown


def test_run_on_transcripts(tiny, tmp_path):
    """HH's form, gzipped, with options from a file; then again over it, from its own config."""
    bad = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"}
    data = write_jsonl(tmp_path / "hh.jsonl.gz", [*dialogues(80), bad])
    settings = {flag[2:]: value for flag, value in zip(SMALL[::2], SMALL[1::2])}
    settings |= {"dataset": data, "model": tiny.model, "bad_rows": "drop", "output_dir": "out"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(settings))
    assert main(["run", "--config", "my.yaml"]) == 0
    run = tmp_path / "out"
    first = check_records(run, run / "figures")
    assert json.loads((run / "data.json").read_text())["no_shared_turn"] == 1
    answer = RunFolder.open(run).samples()[0]
    assert answer["prompt"].startswith("\n\nHuman: Where") and answer["prompt"].endswith(" pounds.\n\nAssistant:")
    shutil.copy(run / "config.yaml", "again.yaml")
    assert main(["run", "--config", "again.yaml", "--overwrite"]) == 0
    second = check_records(run, run / "figures")
    assert second["methods"] == first["methods"]  # the same seed gives the same numbers


def test_run_with_n_1_is_called_ppo_and_ends_with_three_answers(tiny, tmp_path, capsys):
    assert main(["run", "--size", "60", "--model", tiny.model, "--n", "1", *SMALL, "--output_dir", "out"]) == 0
    shown = capsys.readouterr()
    assert "| PPO |" in shown.out and "MA-PPO" not in shown.out + shown.err and "PPO:" in shown.err
    assert (tmp_path / "out" / "ppo" / "policy").is_dir()
    first = [row for row in RunFolder.open("out").samples() if row["method"] == "PPO"][:3]
    after_table = shown.out.split("| PPO |")[1]
    assert after_table.count("\nprompt: ") == 3 and after_table.count("\nSFT [") == after_table.count("\nPPO [") == 3
    for row in first:
        assert " ".join(row["prompt"].split())[-40:] in after_table


def test_stages_take_over_data_and_model(tiny, pairs, sft, tmp_path, capsys):
    """`--sft` of a run on other data: the next stage trains on that, and says so; a contradiction is refused."""
    stage("sft", "a", "--dataset", pairs, "--model", tiny.model)
    capsys.readouterr()
    stage("rm", "b", "--sft", "a")
    shown = capsys.readouterr().out
    assert f"data and model as in --sft: --dataset {pairs} --model {tiny.model}" in shown
    config = RunFolder.open("b").config
    assert (config["dataset"], config["model"]) == (pairs, tiny.model)
    assert main(["ppo", "--sft", "a", "--rm", "b", "--dataset", "tiny-tldr", "--output_dir", "c"]) == 2
    assert "--dataset tiny-tldr: --sft a was made with" in capsys.readouterr().err and not Path("c").exists()


def test_a_policy_answers_a_prompt_and_becomes_a_model(tiny, base, sft, tmp_path, capsys, monkeypatch):
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
    model, policy = AutoModelForCausalLM.from_pretrained("mine"), load_policy(base, sft, trainable=False)
    tokens = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(model(tokens).logits, policy(tokens).logits, rtol=1e-4, atol=1e-4)
    assert main(["export", *given, "--output_dir", "mine"]) == 2 and "exists already" in capsys.readouterr().err
    pushed = []
    monkeypatch.setattr(type(model), "push_to_hub", lambda self, name: pushed.append(name))
    monkeypatch.setattr(PreTrainedTokenizerBase, "push_to_hub", lambda self, name: 1 / 0)
    assert main(["export", *given, "--output_dir", "other", "--push_to_hub", "me/mine"]) == 2
    assert pushed == ["me/mine"] and "--push_to_hub me/mine: failed (division by zero)" in capsys.readouterr().err


def test_demo_compares_token_and_macro(tiny, tmp_path, capsys):
    assert main(["demo", "--size", "60", "--model", tiny.model, *SMALL, "--output_dir", "out"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["method"] for row in summary["methods"]] == ["SFT", "PPO", "MA-PPO"]
    assert all("gold" in row for row in summary["methods"])
    assert [RunFolder.open(tmp_path / "out" / name).config["n"] for name in ("ppo", "ma-ppo")] == ["1", "5"]
    lengths = [RunFolder.open(tmp_path / "out" / name).metrics()[0]["macro_length"] for name in ("ppo", "ma-ppo")]
    assert lengths[0] == 1 < lengths[1] <= 5
    starts = [RunFolder.open(tmp_path / "out" / name).metrics()[0]["rm_score_mean"] for name in ("ppo", "ma-ppo")]
    assert starts[0] == pytest.approx(starts[1])  # the same start and the same first rollout
    assert (tmp_path / "out" / "figures" / "gold_curves.png").is_file()
    assert "updates to PPO's final RM score" in capsys.readouterr().out


def stage(name, out, *argv):
    words = [name, "--output_dir", out, *budget(*COMMANDS[name].groups), *map(str, argv)]
    assert main(words) == 0
    return Path(out)


@pytest.fixture
def shared(tiny, pairs):
    return ["--dataset", pairs, "--model", tiny.model]


def test_a_seed_fixes_every_stage(shared, tmp_path):
    """The same weights and metrics again, whatever was drawn before; and stages of their own repeat the chain's."""
    chain = [stage("run", out, *shared, "--seed", "3") for out in ("a", "b")]
    torch.rand(7)  # another state of the global generator
    sft = stage("sft", "c", *shared, "--seed", "3")
    rm = stage("rm", "d", *shared, "--sft", "c", "--seed", "3")
    other = stage("sft", "e", *shared, "--seed", "4")
    for name, again in (("sft", sft), ("rm", rm)):
        weights = [load_file(root / name / "adapter_model.safetensors") for root in (*chain, again)]
        assert all(torch.equal(x[k], weights[0][k]) for x in weights[1:] for k in weights[0])
    first = load_file(other / "sft" / "adapter_model.safetensors")
    assert not all(torch.equal(first[k], w) for k, w in load_file(sft / "sft" / "adapter_model.safetensors").items())
    rows = [[strip(row) for row in RunFolder.open(root / "ma-ppo").metrics()] for root in chain]
    assert rows[0] == rows[1]


def strip(row):
    """Without what a clock says."""
    return {key: value for key, value in row.items() if "second" not in key}


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
    assert Path("e/figures/rm_score_distribution.png").is_file() and not Path("e/figures/reward_curves.png").exists()
    trained, answered = Path("c/config.yaml").read_bytes(), Path("e/samples.jsonl").read_bytes()
    with monkeypatch.context() as again:  # everything is stored, so nothing is loaded
        again.setattr(pipeline, "load_base", lambda *_: pytest.fail("a model was loaded"))
        stage("evaluate", "e", *shared, "--sft", "a", "--rm", "b/rm", "--policies", "c=c")
    answers = Path("e/samples.jsonl").read_bytes()
    assert answers and answered.startswith(answers)
    config = RunFolder.open("e").config
    assert (config["policies"], config["resume"]) == ("c=c", "")
    assert json.loads(Path("e/summary.json").read_text())["config"]["policies"] == "c=c"
    stage("evaluate", "c", *shared, "--sft", "a", "--rm", "b", "--policies", "c")
    assert Path("c/config.yaml").read_bytes() == trained  # a run of another command
    capsys.readouterr()
    stage("evaluate", "e", *shared, "--sft", "a", "--rm", "b", "--eval_temperatures", "0,1", "--eval_prompts", "2")
    shown = capsys.readouterr().out
    assert "behind scores: gain over SFT T=0.0, at every temperature [95 % interval]" in shown
    stage("run", "f", *shared, "--sft", "a", "--rm", "b")  # what is given is not made again
    assert not Path("f/sft").exists() and not Path("f/rm").exists() and Path("f/ma-ppo/policy").is_dir()
    stage("evaluate", "g", *shared, "--sft", "a")
    assert [row["method"] for row in json.loads(Path("g/summary.json").read_text())["methods"]] == ["SFT"]


def test_ones_own_reward(shared, sft, tmp_path):
    """A function from a file in the current folder, without a reward model."""
    (tmp_path / "length_reward.py").write_text(
        "def short(prompts, responses):\n    return [-len(r) for r in responses]\n"
    )
    stage("ppo", "c", *shared, "--sft", sft, "--reward", "length_reward:short")
    assert all(row["rm_score_mean"] < 0 for row in RunFolder.open("c/ppo").metrics())


def test_interrupt_leaves_whole_records_and_adapters(tiny, base, shared, sft, rm, monkeypatch, capsys):
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args)

    monkeypatch.setattr(ppo, "generate", interrupted)
    argv = ["ppo", *shared, "--sft", str(sft), "--rm", str(rm), *budget("ppo", "data"), "--output_dir", "out"]
    assert main(argv) == 130
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "run folder: out"  # it is known before training begins
    assert shown.err.endswith(
        "marlhf: interrupted; what was recorded so far in out is whole: marlhf ppo --resume out goes on\n"
    )
    run = RunFolder.open("out/ppo")
    assert [row["update"] for row in run.metrics()] == [1] and len(run.samples()) == 4
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (run.path / name).read_bytes().endswith(b"\n")
    assert (run.path / "critic" / "adapter_model.safetensors").is_file()
    load_policy(base, run.path / "policy")
    stage("evaluate", "e", *shared, "--sft", sft, "--policies", "stopped=out")


@pytest.mark.skipif("MARLHF_HH_SAMPLE" not in os.environ, reason="MARLHF_HH_SAMPLE names no file of the HH data")
def test_run_on_the_real_hh_data(tmp_path):
    data = os.environ["MARLHF_HH_SAMPLE"]
    assert main(["run", "--dataset", data, "--size", "120", *SMALL, "--output_dir", "out"]) == 0
    check_records(tmp_path / "out", tmp_path / "out" / "figures")
