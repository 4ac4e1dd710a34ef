"""The command line: exit codes, one line for every mistake before anything loads, and whole runs on small budgets."""

import gzip
import io
import json
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
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from marlhf_lite.cli import main
from marlhf_lite.config.commands import COMMANDS, option_names
from marlhf_lite.experiments import context
from marlhf_lite.lab.corpora import make_rows
from marlhf_lite.models.loading import load_policy
from marlhf_lite.training import ppo
from marlhf_lite.training.rollout import generate
from marlhf_lite.utils.run_folder import RunFolder

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


def write_jsonl(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "pairs.jsonl", make_rows("tiny-tldr", 80, 0))


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
    monkeypatch.setattr(context, "load_base", lambda *_: pytest.fail("a model was loaded before the input was checked"))

    def run(words, *names):
        capsys.readouterr()
        before = sorted(tmp_path.rglob("*"))
        command = words[0]
        output = [] if "--output_dir" in words or command in ("fly", "generate", "export") else ["--output_dir", "out"]
        assert main([*words, *output]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith("marlhf: error: ") and shown.err.count("\n") == 1, shown.err
        assert shown.out == "" and sorted(tmp_path.rglob("*")) == before
        assert all(name in shown.err for name in names), shown.err

    return run


GOOD = {"prompt": "Q", "chosen": " yes", "rejected": " no"}
FILES = [  # name and content of a file -> what the message names besides it
    ("d.jsonl", "", "d.jsonl"),
    ("d.jsonl", json.dumps(GOOD | {"rejected": None}), "rejected"),
    ("d.jsonl", "\n".join(map(json.dumps, [GOOD, {"prompt": "Q", "chosen": " yes"}])), "row 2|rejected|--bad_rows"),
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


RUN, VLLM = "run --size 9 ", "--rollout_engine vllm --vllm_url http://localhost:1"
MISTAKES = [  # a command line; folders stand in braces -> what the message names
    ("fly", "fly"),
    ("run --fly", "--fly"),
    ("run words", "words"),
    ("run --batch-sise=3", "--batch-sise|did you mean --batch_size?"),
    ("run --update 3", "did you mean --updates?"),  # no abbreviations
    ("run --seed", "--seed"),
    ("run --ratio x", "--ratio|'x'"),
    ("run --preset mine", "--preset mine"),
    ("run --config no.yaml", "--config no.yaml"),
    ("run --n 0", "--n 0"),
    ("run --termination randomized --lengths 2,x", "--lengths 2,x"),
    ("run --updates 0", "--updates 0"),
    *((f"run --dataset {name} --size {size}", f"{name}|--size") for name, size in (("tiny-tldr", 3), ("tiny-code", 2))),
    (RUN + "--max_prompt_length 2", "--max_prompt_length 2"),
    (RUN + "--batch_size 9 --rollouts 2", "--batch_size 9"),
    (RUN + "--rm_batch_size 9 --per_device_train_batch_size 2 --sft_batch_size 8", "--rm_batch_size 9"),
    (RUN + "--report_to mars", "--report_to mars"),
    (RUN + "--finetune full --load_in_4bit", "--load_in_4bit"),
    ("run --rollout_engine vllm", "--vllm_url"),
    ("run --vllm_url http://localhost:8000", "--rollout_engine vllm"),
    *(
        (f"run --rollout_engine vllm --vllm_url {url}", f"--vllm_url {url}")
        for url in ("here", "http://me:x@h", "http://h/v1")
    ),
    (f"{RUN}{VLLM} --finetune full", "--rollout_engine vllm|--finetune lora"),
    (f"{RUN}{VLLM} --logprobs_at_temperature", "--logprobs_at_temperature"),
    ("run --part cnn_dm", "--part cnn_dm"),
    *((f"run --dataset {name}", name) for name in ("./no.jsonl", "no.csv", "nothing", "tiny_tldr")),
    ("run --model ./no/folder", "--model ./no/folder"),
    *((f"{name}", "--sft") for name in ("rm", "ppo", "dpo", "evaluate")),
    ("rm --sft nowhere", "--sft nowhere"),
    *((f"{RUN}--reward {name}", f"--reward {name}") for name in ("no_module:f", "os:no_name", "os:sep", "golden", ":")),
    (RUN + "--reward broken_reward:f", "--reward broken_reward:f|SyntaxError"),
    ("run --from_checkpoint 2", "--from_checkpoint 2"),
    ("rloo --critic_learning_rate 1", "--critic_learning_rate|did you mean --policy_learning_rate?"),
    *((f"{name} 3", name.split()[1]) for name in ("sft --updates", "rloo --lam", "grpo --whiten", "study --model")),
    ("rloo --config lam.yaml --preset paper", "--sft"),  # options of other commands may stand in files
    ("generate", "--policy"),
    ("export --policy {sft}", "--output_dir"),
    ("ppo --sft {sft}", "--rm"),
    ("ppo --sft {sft} --reward gold --dataset pairs.jsonl", "--reward gold"),
    ("rloo --sft {sft} --reward gold --num_generations 3", "--num_generations 3"),
    ("rm --sft {rm}", "--sft"),
    ("ppo --sft {sft} --rm {sft}", "--rm"),
    ("run --rm {here}", "--rm"),
    ("rm --sft half", "no weights"),
    ("run --model {sft}", "--sft"),
    ("run --model {here}", "--model|config.json"),
    *(("evaluate --sft {sft} --policies " + words, "--policies") for words in ("nowhere", "x=", "SFT=old/a")),
    ("evaluate --sft {sft} --policies old", "old/a/policy|old/b/policy"),
    ("evaluate --sft {sft} --policies old/a,old/a/policy", "second one is called a"),
    # Output folders in use
    ("run --output_dir notes", "--overwrite"),
    ("run --overwrite --output_dir notes", "--output_dir notes"),
    ("run --output_dir notes/diary.txt", "notes/diary.txt"),
    ("run --output_dir notes/diary.txt/deeper", "notes/diary.txt"),
    ("run --output_dir done", "--overwrite"),
    ("rm --overwrite --sft done --output_dir done", "done/sft"),
    ("sft --overwrite --dataset done/pairs.jsonl --output_dir done", "done/pairs.jsonl"),
    ("run --overwrite --dataset no.jsonl --output_dir done", "no.jsonl"),
]


@pytest.mark.parametrize(("words", "named"), MISTAKES)
def test_mistakes(fails, sft, rm, pairs, tmp_path, words, named):
    for name in ("half", "notes"):
        (tmp_path / name).mkdir()
    for name, text in {"broken_reward.py": "def f(:\n", "lam.yaml": "lam: 0.5\n", "notes/diary.txt": "dear"}.items():
        (tmp_path / name).write_text(text)
    RunFolder.create("done", {"seed": 1})
    for name in ("old/a/policy", "old/b/policy", "done/sft"):
        shutil.copytree(sft, tmp_path / name)
    for source, name in ((sft / "adapter_config.json", "half"), (pairs, "pairs.jsonl"), (pairs, "done/pairs.jsonl")):
        shutil.copy(source, tmp_path / name)
    fails(words.format(sft=sft, rm=rm, here=tmp_path).split(), *named.split("|"))


def test_a_model_that_cannot_be_used_leaves_no_folder(tiny, tmp_path, capsys):
    shutil.copytree(tiny.model, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{}")
    targets = [["--model", tiny.model, "--lora_target_modules", name] for name in ("q_proj", "[", "")]
    for words in (*targets, ["--model", "./broken"]):
        assert main(["sft", "--size", "20", *words, "--output_dir", "out"]) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1 and f"{' '.join(words[-2:])}: " in shown
    assert not (tmp_path / "out").exists()


# Whole runs


def check_records(run, method="MA-PPO"):
    """What a run has to leave: every file there, whole and in agreement."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["updates"] == 2 and "torch" in config["environment"]
    counts = json.loads((run / "data.json").read_text())
    assert {"read", "kept", "sft", "rm", "ppo", "test", "long_prompts"} <= set(counts)
    answers = RunFolder.open(run).samples()
    assert [row["method"] for row in answers] == ["SFT"] * 6 + [method] * 6
    assert all(1 <= row["tokens"] <= 16 for row in answers) and all(row["kl"] == 0 for row in answers[:6])
    assert [row["prompt"] for row in answers[:6]] == [row["prompt"] for row in answers[6:]]
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
        yield {"chosen": f"{start} Try the market for rope {i}.", "rejected": f"{start} No idea{'!' * (i % 3)}"}


def test_run_on_transcripts(tiny, tmp_path, capsys):
    """HH's form, gzipped, with options from a file; then over it, from its own config, with single tokens."""
    bad = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"}
    data = write_jsonl(tmp_path / "hh.jsonl.gz", [*dialogues(80), bad])
    settings = {flag[2:]: value for flag, value in zip(SMALL[::2], SMALL[1::2])}
    settings |= {"dataset": data, "model": tiny.model, "bad_rows": "drop", "output_dir": "out"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(settings))
    assert main(["run", "--config", "my.yaml"]) == 0
    run = tmp_path / "out"
    check_records(run)
    assert json.loads((run / "data.json").read_text())["no_shared_turn"] == 1
    answer = RunFolder.open(run).samples()[0]
    assert answer["prompt"].startswith("\n\nHuman: Where") and answer["prompt"].endswith(" pounds.\n\nAssistant:")
    shutil.copy(run / "config.yaml", "again.yaml")
    capsys.readouterr()
    assert main(["run", "--config", "again.yaml", "--overwrite", "--n", "1"]) == 0
    check_records(run, "PPO")
    answers = capsys.readouterr().out.split("| PPO |")[1]  # three of each method, below the table
    assert answers.count("\nSFT [") == answers.count("\nPPO [") == 3 and not (run / "ma-ppo").exists()


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
    pushed = []
    monkeypatch.setattr(type(model), "push_to_hub", lambda self, name: pushed.append(name))
    monkeypatch.setattr(PreTrainedTokenizerBase, "push_to_hub", lambda self, name: 1 / 0)
    assert main(["export", *given, "--output_dir", "other", "--push_to_hub", "me/mine"]) == 2
    assert pushed == ["me/mine"] and "--push_to_hub me/mine: " in capsys.readouterr().err


def test_demo_compares_token_and_macro(tiny, tmp_path, capsys):
    assert main(["demo", "--size", "60", "--model", tiny.model, *SMALL, "--output_dir", "out"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["methods"]
    assert [row["method"] for row in summary] == ["SFT", "PPO", "MA-PPO"] and all("gold" in row for row in summary)
    runs = [RunFolder.open(tmp_path / "out" / name) for name in ("ppo", "ma-ppo")]
    assert [run.config["n"] for run in runs] == ["1", "5"]
    token, macro = (run.metrics()[0] for run in runs)
    assert token["macro_length"] == 1 < macro["macro_length"] <= 5
    assert token["rm_score_mean"] == pytest.approx(macro["rm_score_mean"])  # the same start and the same first rollout
    assert (tmp_path / "out" / "figures" / "gold_curves.png").is_file()


def stage(name, out, *argv):
    words = [name, "--output_dir", out, *budget(name), *map(str, argv)]
    assert main(words) == 0
    return Path(out)


@pytest.fixture
def shared(tiny, pairs):
    return ["--dataset", pairs, "--model", tiny.model]


def test_a_seed_fixes_every_stage(shared, tmp_path, capsys):
    """The same weights and metrics again, whatever was drawn before; and stages of their own repeat the chain's."""
    chain = [stage("run", out, *shared, "--seed", "3") for out in ("a", "b")]
    shown = capsys.readouterr().out
    for part in ("sft 14, rm 29, ppo 29, test 8", "| MA-PPO |", "figures: ", "run folder: a"):
        assert part in shown
    for run in chain:
        check_records(tmp_path / run)
    torch.rand(7)  # another state of the global generator
    sft = stage("sft", "c", *shared, "--seed", "3")
    rm = stage("rm", "d", *shared, "--sft", "c", "--seed", "3")
    other = stage("sft", "e", *shared, "--seed", "4")
    for name, again, same in (("sft", sft, True), ("rm", rm, True), ("sft", other, False)):
        weights = [load_file(root / name / "adapter_model.safetensors") for root in (*chain, again)]
        assert same == all(torch.equal(x[k], weights[0][k]) for x in weights[1:] for k in weights[0])
    rows = [timeless(RunFolder.open(root / "ma-ppo").metrics()) for root in chain]
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
    assert Path("e/figures/rm_score_distribution.png").is_file() and not Path("e/figures/reward_curves.png").exists()
    trained, answered = Path("c/config.yaml").read_bytes(), Path("e/samples.jsonl").read_bytes()
    with monkeypatch.context() as again:  # everything is stored, so nothing is loaded
        again.setattr(context, "load_base", lambda *_: pytest.fail("a model was loaded"))
        stage("evaluate", "e", *shared, "--sft", "a", "--rm", "b/rm", "--policies", "c=c")
    answers = Path("e/samples.jsonl").read_bytes()
    assert answers and answered.startswith(answers)
    assert json.loads(Path("e/summary.json").read_text())["config"]["policies"] == "c=c"
    stage("evaluate", "c", *shared, "--sft", "a", "--rm", "b", "--policies", "c")
    assert Path("c/config.yaml").read_bytes() == trained  # a run of another command
    stage("evaluate", "e", *shared, "--sft", "a", "--rm", "b", "--eval_temperatures", "0,1", "--eval_prompts", "2")
    assert "SFT T=0.0" in capsys.readouterr().out
    stage("run", "f", *shared, "--sft", "a", "--rm", "b")  # what is given is not made again
    assert not Path("f/sft").exists() and not Path("f/rm").exists() and Path("f/ma-ppo/policy").is_dir()


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
    argv = ["ppo", *shared, "--sft", str(sft), "--rm", str(rm), *budget("ppo"), "--output_dir", "out"]
    assert main(argv) == 130
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "run folder: out"  # it is known before training begins
    assert shown.err.endswith("marlhf ppo --resume out goes on\n")
    run = RunFolder.open("out/ppo")
    assert [row["update"] for row in run.metrics()] == [1] and len(run.samples()) == 4
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (run.path / name).read_bytes().endswith(b"\n")
    assert (run.path / "critic" / "adapter_model.safetensors").is_file()
    load_policy(base, run.path / "policy")
    stage("evaluate", "e", *shared, "--sft", sft, "--policies", "stopped=out")
