"""Runs that are killed with SIGKILL and resumed end bit by bit as if they had not been."""

import itertools
import json
import os
import random
import signal
import sys
import time

import pytest
from small_runs import (
    early_letters,
    halted,
    noisy,
    run_child,
    same_checkpoints,
    start,
    timeless,
    wait,
)
from transformers.trainer_callback import CallbackHandler

from marlhf_lite.cli import main
from marlhf_lite.macro import RandomizedNGram
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.utils import interrupts
from marlhf_lite.utils.run_folder import RunFolder

CASES = {
    "one step, a reward that draws": {"reward": FunctionReward(noisy)},
    "several steps on random macro actions, whitened": {
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "whiten": True,
        "termination": RandomizedNGram((1, 2, 3), repeats=1, seed=5),
        "sigma": "position",
    },
    "critic warm-up, tests, a noisy reward, few checkpoints": {
        "critic_warmup": 3,
        "eval_every": 2,
        "test_prompts": ["b", "And then?"],
        "gold": early_letters,
        "reward": FunctionReward(noisy),
        "rollouts": 2,
        "micro_batch_size": 0,
        "checkpoint_every": 2,
    },
}
FILES = ["samples.jsonl", "tests.jsonl"]


def assert_same(one, other):
    """Everything that two runs left behind, but for times."""
    rows = [RunFolder.open(path).metrics() for path in (one, other)]
    assert timeless(rows[0]) == timeless(rows[1])
    assert [row["update"] for row in rows[0]] == list(range(1, len(rows[0]) + 1))
    names = [*FILES, *(f"{name}/adapter_model.safetensors" for name in ("policy", "critic"))]
    for path in checkpoints(one):
        assert same_checkpoints(path, other / path.relative_to(one))
    assert len(checkpoints(one)) > 1
    for name in names:
        here, there = one / name, other / name
        assert here.exists() == there.exists(), name
        assert not here.exists() or here.read_bytes() == there.read_bytes(), name


def lines(path):
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def checkpoints(path):
    return sorted(path.glob("checkpoints/update-*"))


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture
def folders(tiny, sft, rm):
    return tiny.model, str(sft), str(rm)


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_like_one_that_was_not(name, folders, tmp_path):
    """Killed twice within a save (at any of its steps) and once while training; each start finds other seeds."""
    changes, draw = CASES[name] | {"updates": 6}, random.Random(name)
    whole, path = tmp_path / "whole", tmp_path / "killed"
    plain = start(run_child, whole, folders, changes)
    saved = []
    for halt in (
        draw.randint(1, 3),
        draw.randint(4, 7),
        0,
    ):  # one at the start, two or three in a save
        process, done = (
            start(run_child, path, folders, changes, draw.randint(1, 99), halt),
            lines(path),
        )
        assert wait(process, halted(path).exists if halt else lambda done=done: lines(path) > done)
        time.sleep(0 if halt else draw.uniform(0, 0.05))
        kill(process)
        halted(path).unlink(missing_ok=True)
        saved.append(checkpoints(path))
    assert len(saved[0]) == 0 < len(saved[1])
    last = start(run_child, path, folders, changes, 99)
    for process in (plain, last):
        wait(process)
        assert process.exitcode == 0
    assert_same(whole, path)


# -- the command line -------------------------------------------------------------------------------------------------

SMALL = (
    "--sft_epochs 0.5 --sft_batch_size 4 --rm_epochs 0.2 --rm_batch_size 8 --lora_r 4 --updates 3 --batch_size 4 "
    "--micro_batch_size 4 --eval_prompts 4 --max_response_length 16 --checkpoint_every 1 --reward my_reward:score"
).split()
# a run does not pass on what it used of code
OWN_CODE = ("--reward", "my_reward:score")
REWARD = """
from pathlib import Path

def score(prompts, responses):
    fuse = Path("fuse")
    if fuse.exists():
        left = int(fuse.read_text()) - 1
        fuse.write_text(str(left)) if left else fuse.unlink()
        if not left:
            raise ConnectionError("the judge is away")
    return [float(len(r)) for r in responses]
"""


@pytest.fixture
def signals():
    """SIGINT and SIGHUP do what they do in a terminal; a shell's background job ignores the one, nohup the other."""
    usual = {signal.SIGINT: signal.default_int_handler, interrupts.HANGUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a reward that breaks where the number in a file called fuse has come down to 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    (tmp_path / "my_reward.py").write_text(REWARD)
    return tmp_path


def stopped(monkeypatch, number, words, step):
    """Exit code of a command that gets a real signal when its step or update of this number begins."""
    steps = itertools.count(1)

    def signalled():
        if next(steps) == step:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        before_each_step(patch, signalled)
        return main(words)


def before_each_step(patch, act):
    """Call `act` before each update of PPO and each step of TRL's trainers."""
    update, begin = PPOTrainer.update, CallbackHandler.on_step_begin

    def updated(self, *args):
        act()
        return update(self, *args)

    def begun(self, *args):
        act()
        return begin(self, *args)

    patch.setattr(PPOTrainer, "update", updated)
    patch.setattr(CallbackHandler, "on_step_begin", begun)


def test_a_run_that_gets_sigterm_or_ctrl_c_ends_behind_the_step_and_goes_on(
    signals, tiny, here, pairs, capfd, monkeypatch
):
    """In SFT, in the reward model, in PPO: a checkpoint is there each time, and the end is the uninterrupted one."""
    words = [
        "run",
        "--dataset",
        str(pairs),
        "--model",
        tiny.model,
        *SMALL,
        "--checkpoint_every",
        "10",
        "--rm_epochs",
        "0.5",
    ]
    words.append("--output_dir")
    assert main([*words, "whole"]) == 0
    whole, path = here / "whole", here / "stopped"
    logs = [json.loads((whole / stage / "log.json").read_text()) for stage in ("sft", "rm")]
    assert min(map(len, logs)) > 1
    again = ["run", "--resume", "stopped", *OWN_CODE]
    stops = [
        (signal.SIGTERM, [*words, "stopped"], 1, "sft/checkpoint-1"),
        # the rest of SFT, and one step of the reward model
        (signal.SIGINT, again, len(logs[0]), "rm/checkpoint-1"),
        (interrupts.HANGUP, again, len(logs[1]), "ma-ppo/checkpoints/update-000001.pt"),
    ]
    for number, command, step, checkpoint in stops:
        assert stopped(monkeypatch, number, command, step) == 130
        assert (path / checkpoint).exists()
        assert capfd.readouterr().err.endswith(
            "marlhf run --resume stopped --reward my_reward:score continues\n"
        )
    assert (path / "ma-ppo" / "policy" / "adapter_model.safetensors").is_file() and lines(
        path / "ma-ppo"
    ) == 1
    assert main(again) == 0
    for stage in ("sft", "rm", "ma-ppo/policy", "ma-ppo/critic"):
        file = f"{stage}/adapter_model.safetensors"
        assert (path / file).read_bytes() == (whole / file).read_bytes(), stage
    assert timeless(RunFolder.open(path / "ma-ppo").metrics()) == timeless(
        RunFolder.open(whole / "ma-ppo").metrics()
    )
    assert not [*path.glob("*/checkpoint-*")]  # of stages that are done
    for kept, log in zip(("sft", "rm"), logs, strict=True):
        losses = [row["loss"] for row in json.loads((path / kept / "log.json").read_text())]
        assert losses == [row["loss"] for row in log]
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(interrupts.HANGUP) == signal.SIG_DFL


def test_a_second_ctrl_c_stops_at_once(signals, monkeypatch):
    """But not one that follows the first at once: a launcher sends it to its processes once more."""
    now = iter([10.0, 11.0, 13.0])
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: next(now))
    with pytest.raises(KeyboardInterrupt) as caught, interrupts.graceful_stop() as asked:
        assert not asked()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert asked()
        os.kill(os.getpid(), signal.SIGTERM)  # never counts as a second Ctrl-C
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")
    assert not isinstance(caught.value, interrupts.Stopped)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_broken_run_is_resumed_stage_by_stage(tiny, here, pairs, capsys):
    """Broken in the first update, then in the third: what is done is not done again, and the end is the same."""
    shared = ["run", "--dataset", str(pairs), "--model", tiny.model, *SMALL, "--output_dir"]
    assert main([*shared, "whole"]) == 0
    whole, path = here / "whole", here / "broken"
    for fuse, words in ((1, [*shared, "broken"]), (3, ["run", "--resume", "broken", *OWN_CODE])):
        (here / "fuse").write_text(str(fuse))
        assert main(words) == 2
        shown = capsys.readouterr()
        assert "my_reward:score: raised ConnectionError: the judge is away" in shown.err
        assert "continue by --resume" in shown.err and lines(path / "ma-ppo") == fuse - 1
    stages = [path / name / "adapter_model.safetensors" for name in ("sft", "rm")]
    times = [file.stat().st_mtime_ns for file in stages]
    assert main(["run", "--resume=broken", *OWN_CODE]) == 0
    shown = capsys.readouterr().out
    assert "sft: done already" in shown and "rm: done already" in shown
    assert [file.stat().st_mtime_ns for file in stages] == times
    assert_same(whole / "ma-ppo", path / "ma-ppo")
    assert (path / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    tables = [
        json.loads((place / "summary.json").read_text())["methods"] for place in (whole, path)
    ]
    assert tables[0] == tables[1]
    rows = RunFolder.open(path / "ma-ppo").metrics()
    assert (
        main(["run", "--resume", "broken", *OWN_CODE, "--updates", "4", "--micro_batch_size", "2"])
        == 0
    )
    longer = RunFolder.open(path / "ma-ppo").metrics()
    assert longer[:3] == rows and len(longer) == 4
    before = RunFolder.open(whole).config
    # the config says how long the run is now, and nothing of how it went on
    for place in (path, path / "ma-ppo"):
        config = RunFolder.open(place).config
        changed = {name for name in before if config[name] != before[name]} - {
            "versions",
            "output_dir",
        }
        assert changed == {"updates", "micro_batch_size"} and (
            config["updates"],
            config["micro_batch_size"],
        ) == (4, 2)


STEPS = (
    "--updates 2 --batch_size 4 --max_response_length 4 --size 24 --reward my_reward:score".split()
)
# Each makes few steps, and those with epochs end in the middle of one.
LAST = {
    "sft": "--sft_epochs 0.75 --sft_batch_size 4 --size 80".split(),
    "rm": "--rm_epochs 0.75 --rm_batch_size 4 --size 80".split(),
    "dpo": "--dpo_epochs 0.75 --dpo_batch_size 4 --size 80 --eval_every 1 --test_prompts 2".split(),
} | {method: [*STEPS, "--eval_every", "1"] for method in ("rloo", "grpo", "ppo")}


def own_code(method):
    return OWN_CODE if "my_reward:score" in LAST[method] else ()


@pytest.mark.parametrize("method", LAST)
def test_a_run_that_is_stopped_behind_its_last_step_only_finishes(
    method, tiny, sft, here, pairs, monkeypatch
):
    """It makes no step more, and ends as one that was not stopped."""
    words = [method, "--dataset", str(pairs), "--model", tiny.model, *LAST[method]]
    words += [] if method == "sft" else ["--sft", str(sft)]
    assert main([*words, "--output_dir", "whole"]) == 0
    trained, log = (
        here / "whole" / method,
        "log.json" if method in ("sft", "rm") else "metrics.jsonl",
    )
    text = (trained / log).read_text()
    last = len(json.loads(text)) if log == "log.json" else text.count("\n")
    assert stopped(monkeypatch, signal.SIGTERM, [*words, "--output_dir", "stopped"], last) == 130
    before_each_step(monkeypatch, lambda: pytest.fail("a step more begins"))
    assert main([method, "--resume", "stopped", *own_code(method)]) == 0
    for path in trained.rglob("*"):
        other = here / "stopped" / path.relative_to(here / "whole")
        if path.name in ("adapter_model.safetensors", "tests.jsonl", "accuracy.json"):
            assert path.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("method", ["ppo", "rloo", "dpo"])
def test_a_finished_run_without_checkpoints_is_known_as_finished(
    method, tiny, sft, here, pairs, monkeypatch, capsys
):
    """And one that is to be longer is not: it begins again, and is not finished where it is stopped then."""
    words = [method, f"--dataset={pairs}", f"--model={tiny.model}", f"--sft={sft}", *LAST[method]]
    assert main([*words, "--checkpoint_every", "0", "--output_dir", "out"]) == 0
    folder = here / "out" / method
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda: pytest.fail("it trains again"))
        assert main([method, "--resume", "out", *own_code(method)]) == 0
    shown = capsys.readouterr().out
    assert f"{method}: done already" in shown and f"policy: out/{method}/policy" in shown
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    if method == "dpo":  # its length cannot change
        return
    again = [method, "--resume", "out", *OWN_CODE, "--updates", "3"]
    # the policy of one update is saved
    assert stopped(monkeypatch, signal.SIGTERM, again, 1) == 130
    assert (
        f"begins again; what it has recorded is kept in out/stopped/{method}-1"
        in capsys.readouterr().out
    )
    assert (folder / "policy").is_dir() and lines(folder) == 1
    assert main([method, "--resume", "out", *OWN_CODE]) == 0 and lines(folder) == 3
    assert "done already" not in capsys.readouterr().out


def test_a_longer_run_that_went_back_to_a_checkpoint_and_broke_goes_on(tiny, sft, here, pairs):
    words = ["ppo", "--dataset", str(pairs), "--model", tiny.model, "--sft", str(sft), *LAST["ppo"]]
    assert main([*words, "--checkpoint_every", "1", "--output_dir", "out"]) == 0
    policy = here / "out" / "ppo" / "policy" / "adapter_model.safetensors"
    whole = policy.read_bytes()
    # the user deletes a damaged one
    (here / "out" / "ppo" / "checkpoints" / "update-000002.pt").unlink()
    (here / "fuse").write_text("1")
    resumed = ["ppo", "--resume", "out", *OWN_CODE, "--updates"]
    assert main([*resumed, "3"]) == 2
    policy.write_bytes(b"of update 1")
    assert main([*resumed, "2"]) == 0 and policy.read_bytes() == whole


def test_going_back_and_what_readers_say_of_a_run_that_has_not_finished(
    tiny, sft, here, pairs, monkeypatch, capsys
):
    """A finished run is made longer, stopped, and shortened; each reader of its policy tells how far it came."""
    words = ["ppo", "--dataset", str(pairs), "--model", tiny.model, "--sft", str(sft), *LAST["ppo"]]
    assert main([*words, "--checkpoint_every", "1", "--output_dir", "out"]) == 0
    stage = here / "out" / "ppo"
    policy = (stage / "policy" / "adapter_model.safetensors").read_bytes()
    readers = [
        ["export", "--policy", "out", "--model", tiny.model, "--output_dir", "model"],
        ["generate", "--policy", "out", "--model", tiny.model, "--prompt", "a"],
        [
            "evaluate",
            *words[1:7],
            "--policies",
            "p=out",
            "--output_dir",
            "e",
            "--eval_prompts",
            "2",
        ],
        [*words[:5], "--sft", "out/ppo/policy", *words[7:], "--output_dir", "next"],
    ]

    def said(words):
        assert main(words) == 0
        shown = capsys.readouterr()
        return shown.out + shown.err

    assert "not finished" not in said(readers[0])

    # It is killed after its third update: the weights beside it are still those of the second.
    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "save", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            main(["ppo", "--resume", "out", *OWN_CODE, "--updates", "3"])
    for number, reader in enumerate(readers):
        if reader[0] == "export":
            reader[-1] = f"model-{number}"
        assert "note: " in (line := said(reader)) and "update 2 of 3, not finished" in line

    # It has made three: two are fewer, unless it goes back.
    before = (stage / "metrics.jsonl").read_bytes()
    resumed = ["ppo", "--resume", "out", *OWN_CODE]
    assert main([*resumed, "--updates", "2"]) == 2
    assert "--updates 2: the run has made 3 already" in capsys.readouterr().err
    assert main([*resumed, "--at", "1"]) == 2
    assert "--at 1: out/ppo/checkpoints has no checkpoint of that update: choose from 2, 3" in (
        capsys.readouterr().err
    )
    assert (stage / "metrics.jsonl").read_bytes() == before
    assert main([*resumed, "--updates", "2", "--at", "2"]) == 0
    assert (stage / "policy" / "adapter_model.safetensors").read_bytes() == policy
    assert lines(stage) == 2 and RunFolder.open("out").config["updates"] == 2
    assert "not finished" not in said(readers[1])


def test_at_needs_a_run_to_go_back_in(sft, here, capsys):
    assert main(["ppo", "--at", "2", "--sft", str(sft), "--reward", "gold"]) == 2
    assert "--at 2: no run to go back in: name it by --resume" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["rloo", "dpo"])
def test_baselines_go_back_too(method, tiny, sft, here, pairs, capsys):
    words = [method, f"--dataset={pairs}", f"--model={tiny.model}", f"--sft={sft}", *LAST[method]]
    assert main([*words, "--checkpoint_every", "1", "--output_dir", "out"]) == 0
    stage = here / "out" / method
    policy = (stage / "policy" / "adapter_model.safetensors").read_bytes()
    rows = timeless(RunFolder.open(stage).metrics())
    *_, earlier, last = sorted(
        int(path.name.rpartition("-")[2]) for path in stage.glob("checkpoints/checkpoint-*")
    )
    assert main([method, "--resume", "out", *own_code(method), "--at", str(earlier)]) == 0
    assert timeless(RunFolder.open(stage).metrics()) == rows and len(rows) == last
    assert (stage / "policy" / "adapter_model.safetensors").read_bytes() == policy
