"""Studies: protocols, which runs they make, processes that fail or are killed, result files, and what they say."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import filelock
import numpy as np
import pytest
import yaml
from made_up_results import made_up

from marlhf_lite.cli import COMMANDS, main
from marlhf_lite.config.options import StudyConfig
from marlhf_lite.lab.studies import study as study_module
from marlhf_lite.lab.studies.results import read_result, study_table
from marlhf_lite.lab.studies.study import STAGES, Commands, changed_option, load_study, log_end, plan, run_study
from marlhf_lite.tasks.tiny_tldr.gold import Report
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.shipped import shipped

SHIPPED = ("main", "ablations", "tuning")
SMALL = {
    "size": 40,
    "sft_epochs": 0.3,
    "sft_batch_size": 4,
    "rm_epochs": 0.3,
    "rm_batch_size": 8,
    "updates": 2,
    "batch_size": 4,
    "micro_batch_size": 4,
    "num_generations": 2,
    "dpo_batch_size": 8,
    "checkpoint_every": 1,
    "eval_prompts": 3,
    "max_response_length": 6,
}
METHODS = {
    "SFT": {"command": "sft"},
    "PPO": {"command": "ppo", "options": {"n": 1}},
    "best-of-3": {"command": "best_of_n", "samples": 3},
    "DPO": {"command": "dpo", "options": {"eval_every": 2, "test_prompts": 2}},
    "RLOO=2": {"command": "rloo"},
}


def write(path, **values):
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.fixture
def small(tmp_path):
    """Writes a small study and returns its file's name; keyword arguments replace its keys."""

    def make(**changes):
        return write(tmp_path / "small.yaml", **{"seeds": [0], "methods": METHODS, "shared": SMALL} | changes)

    return make


# -- protocols --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_studies_are_whole(name):
    study = load_study(name)
    runs = plan(study)
    assert len(runs) == len(study.methods) * len(study.seeds) == len({run.name for run in runs})
    assert {run.start for run in runs if run.seed == study.seeds[0]} == {runs[0].start}
    assert len({json.dumps(run.options) for run in runs}) == len(runs)  # no two methods are the same
    assert study.target_method in study.methods
    assert study.baseline in study.methods or name == "tuning"
    rates = [(r.options["policy_learning_rate"], r.options["critic_learning_rate"]) for r in runs if r.command == "ppo"]
    assert rates and all(critic == pytest.approx(1.5 * policy) for policy, critic in rates)


def test_tuning_sees_neither_seeds_nor_prompts_of_the_others():
    tuning, others = load_study("tuning"), [load_study("main"), load_study("ablations")]
    assert len(plan(tuning)) <= 9
    for other in others:
        assert not set(tuning.seeds) & set(other.seeds)
        assert tuning.first_prompt >= other.first_prompt + other.shared["eval_prompts"]
        assert len(other.seeds) >= 3


def test_all_methods_of_the_main_study_share_rate_kl_and_budget():
    runs = [run for run in plan(load_study("main"), [0]) if run.command in ("ppo", "rloo", "grpo")]
    for name in ("kl_coef", "updates", "batch_size", "eval_prompts"):
        assert len({run.options[name] for run in runs}) == 1
    rates = {run.options["policy_learning_rate"] for run in runs}
    assert len(rates) == 1 and {run.command for run in runs} == {"ppo", "rloo", "grpo"}


def test_starts_are_shared_by_what_makes_them(small):
    study = load_study(small())
    starts = {run.start for run in plan(study)}
    assert len(starts) == 1
    assert {run.start for run in plan(load_study(small(shared=SMALL | {"updates": 9, "n": 7})))} == starts
    assert {run.start for run in plan(load_study(small(shared=SMALL | {"rm_epochs": 0.5})))}.isdisjoint(starts)
    assert {run.start for run in plan(study, [1])}.isdisjoint(starts)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"metods": {}}, "unknown key metods: did you mean methods"),
        ({"methods": {}}, "nothing to run: give methods"),
        ({"methods": {"A": {"command": "po"}}}, "method A: give a command"),
        ({"methods": {"A": {"command": "ppo", "option": {}}}}, "method A: give a command"),
        ({"methods": {"A": {"command": "ppo", "options": {"lamda": 1}}}}, "method A: .*--lamda.*did you mean --lam"),
        ({"methods": {"A": {"command": "ppo", "options": {"lam": 2}}}}, "method A: --lam 2.0: it must be"),
        ({"methods": {"A": {"command": "ppo", "options": {"n": 0}}}}, "method A: --n 0: give whole numbers"),
        ({"methods": {"A": {"command": "rloo", "options": {"num_generations": 3}}}}, "method A: --num_generations 3"),
        ({"methods": {"A": {"command": "ppo", "preset": "E9"}}}, "method A: preset: unknown preset 'E9'"),
        (
            {"methods": {"A": {"command": "rloo", "preset": "estimators/E4"}}},
            "method A: .*unknown option --termination",
        ),
        ({"methods": {"A": {"command": "rloo", "options": {"n": 3}}}}, "method A: marlhf rloo: unknown option --n"),
        ({"methods": {"A": {"command": "sft", "options": {"n": 3}}}}, "method A: marlhf evaluate: unknown option --n"),
        ({"methods": {"A": {"command": "rloo", "options": {"lam": 1}}}}, "method A: .*unknown option --lam"),
        ({"methods": {"A": {"command": "dpo", "options": {"updates": 9}}}}, "method A: .*unknown option --updates"),
        ({"shared": {"updats": 3}}, "shared: unknown option updats: did you mean updates"),
        ({"methods": {"A b": {"command": "sft"}, "A-b": {"command": "sft"}}}, "differ in punctuation"),
        ({"figures": {"all": ["B"]}}, "figures, all: .*: give a list of methods"),
        ({"figures": {"all": "PPO"}}, "figures, all: PPO: give a list of methods"),
        ({"methods": {1: {"command": "sft"}}}, "method 1: put its name in quotes"),
        ({"figures": ["PPO"]}, "figures .*: give a dict"),
        ({"baseline": "STF"}, "baseline: no method is called STF: choose from "),
        ({"target_method": "PP"}, "no method is called PP"),
        ({"first_prompt": "x"}, "first_prompt 'x': give a int"),
        ({"shared": ["updates"]}, "shared .*: give a dict"),
        ({"shared": {"seed": 3}}, "seed: the study sets this itself: leave it out"),
        (
            {"methods": {"A": {"command": "ppo", "options": {"output_dir": "x"}}}},
            "method A: output_dir: the study sets",
        ),
        ({"methods": {"A": {"command": "ppo", "options": ["n"]}}}, "method A: give a command, and a preset"),
        ({"methods": {"A": {"command": "ppo", "samples": 0}}}, "method A: samples 0: give a whole number from 1 up"),
        ({"methods": {"A": {"command": "best_of_n"}}}, "method A: samples 1: give a whole number from 2 up"),
        ({"seeds": None}, "nothing to run: .*seeds"),
        ({"seeds": 3}, "seeds 3: give a list"),
        ({"seeds": [0, 1, 0]}, "seeds .0, 1, 0.: give each once"),
    ],
)
def test_faulty_protocols(small, changes, words):
    with pytest.raises(InputError, match=words):
        plan(load_study(small(**changes)))


@pytest.mark.parametrize("text", ["hello", "- 1"])
def test_a_file_without_names_and_values(tmp_path, text):
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(InputError, match="my.yaml: a .*: write a line `name: value`"):
        load_study(str(tmp_path / "my.yaml"))


def test_an_empty_key_is_as_if_it_were_not_there(small):
    assert load_study(small(shared=None, figures=None)) == load_study(small(shared={}, figures={}))


def test_shared_options_may_do_nothing_in_some_methods(small):
    found = {run.method: run.options.get("lam") for run in plan(load_study(small(shared=SMALL | {"lam": 0.5})))}
    assert found["PPO"] == 0.5 and found["RLOO=2"] is None


@pytest.mark.parametrize(
    "given, words",
    [
        ({"name": "mian"}, "--name mian: no such study: choose from ablations, .*main, .*tuning"),
        ({"only": "PPO,PPP"}, "--only PPP: no such method"),
        ({"seeds": "1,x"}, "--seeds 1,x: give whole numbers"),
        ({"seeds": "1,1", "dry_run": True}, "give each once"),
    ],
)
def test_faulty_options(given, words):
    with pytest.raises(InputError, match=words):
        run_study(StudyConfig(**given))


# -- results that are there already --------------------------------------------------------------------------------


def fill(name, folder, seeds=(0,), **changes):
    """Result files of every run of a study, made up."""
    for run in plan(load_study(name), seeds):
        result = made_up(run.method, run.seed, [0.1 * len(run.method)] * 4) | {"options": run.options}
        path = Path(folder) / f"{run.name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result | changes))


def options(name, tmp_path, **changes):
    return StudyConfig(name=name, output_dir=str(tmp_path / "results"), **changes)


def test_what_is_done_is_not_done_again(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = small()
    fill(name, tmp_path / "results")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    run_study(options(name, tmp_path))
    assert "5 runs, 5 done already" in capsys.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert before.items() <= after.items() and set(after) - set(before) == {"table.md", "summary.json", "figures"}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", SHIPPED)
def test_stored_results_count_as_done(name, capsys):
    run_study(StudyConfig(name=name, output_dir=str(shipped(f"results/{name}")), dry_run=True))
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.endswith(" done") for line in lines) and last == f"{len(lines)} runs, {len(lines)} done"


def test_changed_options_are_refused_and_nothing_is_touched(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(small(), tmp_path / "results")
    changed = METHODS | {"PPO": {"command": "ppo", "options": {"n": 1, "kl_coef": 0.5}}}
    with pytest.raises(InputError, match="PPO-seed0.json: kl_coef was 0.05, now 0.5: delete it, or give another"):
        run_study(options(small(methods=changed), tmp_path))
    assert not (tmp_path / "runs").exists()


def test_what_does_not_change_results_is_no_change(small):
    run = plan(load_study(small()))[1]
    other = plan(load_study(small(shared=SMALL | {"checkpoint_every": 2})))[1]
    stored = {"options": json.loads(json.dumps(run.options))}
    assert changed_option(other, stored) == ""
    del stored["options"]["gamma"]  # written before there was such an option
    assert changed_option(run, stored) == ""
    stored["options"]["cliprange"] = 0.3
    assert changed_option(run, stored) == "cliprange was 0.3, now 0.2"


def test_damaged_result(small, tmp_path):
    fill(small(), tmp_path / "results")
    (tmp_path / "results" / "PPO-seed0.json").write_text('{"method": "PP')
    with pytest.raises(InputError, match=r"PPO-seed0.json: damaged: delete it"):
        run_study(options(small(), tmp_path))


def test_dry_run_lists_and_does_nothing(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(small(), tmp_path / "results")
    (tmp_path / "results" / "DPO-seed0.json").unlink()
    changed = METHODS | {"PPO": {"command": "ppo", "options": {"n": 3}}}
    run_study(options(small(methods=changed), tmp_path, dry_run=True))
    shown = capsys.readouterr().out
    states = {line.split()[0]: line.split(maxsplit=2)[2] for line in shown.splitlines()[:-1]}
    assert states == {
        "SFT-seed0": "done",
        "PPO-seed0": "n was 1, now 3",
        "best-of-3-seed0": "done",
        "DPO-seed0": "to do",
        "RLOO=2-seed0": "done",
    }
    assert shown.splitlines()[-1] == "5 runs, 3 done"
    assert not (tmp_path / "runs").exists()


# -- processes --------------------------------------------------------------------------------

TOY = """
import os, pathlib, signal, sys
name, code = sys.argv[1:3]
pathlib.Path(name + ".pid.new").write_text(str(os.getpid()))
os.rename(name + ".pid.new", name + ".pid")
print("first line\\n\\nlast line", flush=True)
if code == "forever":
    signal.pause()
sys.exit(int(code))
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """In place of `marlhf`, a command that writes its process id and then ends with a status, or does not end."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study_module, "MARLHF", [sys.executable, str(tmp_path / "toy.py")])


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pid_of(name):
    path = Path(f"{name}.pid")
    until(path.exists)
    return int(path.read_text())


def test_a_command_that_fails_shows_the_end_of_its_log(toy, tmp_path):
    commands, log = Commands(), tmp_path / "x.log"
    commands.run(["fine", "0"], log)
    with pytest.raises(InputError, match="marlhf bad failed; .*x.log ends:\n  first line\n  last line\n  first"):
        commands.run(["bad", "3"], log)
    assert log_end(log, 1) == "  last line" and not commands.running


def test_stop_ends_what_runs_and_lets_nothing_begin(toy, tmp_path):
    commands, log = Commands(), tmp_path / "x.log"
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(commands.run, [name, "forever"], log) for name in ("one", "two")]
        pids = [pid_of("one"), pid_of("two")]
        commands.stop()
        assert all("failed" in str(job.exception()) for job in jobs)
    assert not any(map(alive, pids))
    with pytest.raises(InputError, match="interrupted"):
        commands.run(["three", "0"], log)
    assert not Path("three.pid").exists()


STUDY = """
import signal
import sys
from pathlib import Path
from marlhf_lite.cli import main
from marlhf_lite.cli import COMMANDS
from marlhf_lite.config.options import StudyConfig
from marlhf_lite.lab.studies import study

def make_start(run, folder, commands, reward_model):
    commands.run([run.start, "forever"], Path("x.log"))

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
study.make_start = make_start
study.MARLHF = [sys.executable, "toy.py"]
study.run_study(StudyConfig(name=sys.argv[1], workers=1))
"""


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv, which ties processes to their parent")
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_commands_do_not_outlive_their_study(toy, small, kill):
    name = small()
    path = os.pathsep.join([str(Path(study_module.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", STUDY, name]
    study = subprocess.Popen(words, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, text=True)
    pid = pid_of(plan(load_study(name))[0].start)
    assert alive(pid)
    study.send_signal(kill)
    _, errors = study.communicate(timeout=120)
    until(lambda: not alive(pid))
    assert ("KeyboardInterrupt" in errors) == (kill == signal.SIGINT) and study.returncode != 0


def test_a_study_runs_once_at_a_time(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "study-small").mkdir(parents=True)
    with (
        filelock.FileLock("runs/study-small/lock"),
        pytest.raises(InputError, match="this study is running already"),
    ):
        run_study(options(small(), tmp_path))


# -- runs --------------------------------------------------------------------------------


def test_commands_have_the_options_that_the_command_line_gives_them():
    for name, groups in STAGES.items():
        assert sorted(COMMANDS[name].groups) == sorted(groups), name


def run_here(self, words, log):
    """In place of `Commands.run`: the same command, in this process, which has imported everything already."""
    with open(log, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        if main([str(word) for word in words]):
            raise InputError(f"marlhf {words[0]} failed")


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    """A folder with a study of every kind of method, whose results are made. One asks for too many prompts."""
    folder = tmp_path_factory.mktemp("study")
    model = {"model": tiny.model, "lora_r": tiny.lora_r, "lora_alpha": tiny.lora_alpha}
    methods = METHODS | {"bad": {"command": "sft", "options": {"eval_prompts": 500}}}
    write(folder / "small.yaml", seeds=[0], methods=methods, shared=SMALL | model)
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(Commands, "run", run_here)
        patch.chdir(folder)
        with pytest.raises(InputError, match="1 of 6 runs"):
            run_study(StudyConfig(name="small.yaml", output_dir="results", workers=1))
    return folder, shown.getvalue()


def read(folder):
    return {name: read_result(next((folder / "results").glob(f"{name}-seed0.json"))) for name in METHODS}


def test_a_study_goes_on_past_a_method_that_fails(place):
    folder, shown = place
    assert "bad-seed0: 500 held-out prompts are asked for" in shown
    assert "results; the table needs 1 more, such as bad-seed0" in shown
    assert {path.name for path in (folder / "results").iterdir()} == {f"{name}-seed0.json" for name in METHODS}


def test_results_hold_what_is_compared(place):
    found = read(place[0])
    for result in found.values():
        assert list(result) == list(json.loads((shipped("results/main") / "PPO-seed0.json").read_text()))
        assert result["final"]["prompts"] == found["SFT"]["final"]["prompts"]
        assert all(len(result["final"][name]) == 3 for name in ("rm_score", "gold", "tokens", "ended"))
        assert len(result["samples"]) == 3 and result["samples"][0]["prompt"]
        assert result["start"] == found["SFT"]["start"] and 0 <= result["start"]["rm_accuracy"] <= 1
        assert result["environment"]["torch"] and result["options"]["seed"] == 0
        seconds = sum(row["seconds"] for row in result["curve"]) + result["seconds_evaluation"]
        assert result["seconds_total"] == pytest.approx(seconds, rel=1e-3)
    assert [row["update"] for row in found["PPO"]["curve"]] == [1, 2]
    assert found["PPO"]["curve"][0].keys() >= {"rm_score_mean", "gold_mean", "kl_k1", "advantage_norm", "q_rms"}
    assert found["RLOO=2"]["curve"][1]["generated_tokens"] > found["RLOO=2"]["curve"][0]["generated_tokens"] > 0
    scores = [row["rm_score_mean"] for row in found["DPO"]["curve"]]
    assert scores[0] is None and scores[-1] is not None  # of tests on held-out prompts
    assert found["SFT"]["curve"] == [] and set(found["SFT"]["final"]["kl"]) == {0.0}
    best, one = (np.array(found[name]["final"]["rm_score"]) for name in ("best-of-3", "SFT"))
    assert (best >= one).all() and "kl" not in found["best-of-3"]["final"]  # the first of the three is SFT's own
    assert found["best-of-3"]["final"]["generated_tokens"] > found["SFT"]["final"]["generated_tokens"]
    assert study_table(list(found.values()))[0]["method"] == "SFT"


def test_results_hold_what_the_gold_score_is_made_of(place):
    for name in ("SFT", "PPO", "best-of-3"):
        final = read(place[0])[name]["final"]
        counts = zip(*(final[f"gold_{part.name}"] for part in fields(Report)), strict=True)
        assert final["gold"] == pytest.approx([Report(*row).score for row in counts], rel=1e-4, abs=1e-4)


def timeless(result):
    curve = [{k: v for k, v in row.items() if k != "seconds"} for row in result["curve"]]
    return curve, result["final"], result["samples"]


def test_a_run_that_was_stopped_resumes(place, tmp_path, monkeypatch):
    """As after a kill between the two updates of PPO: its last checkpoint, evaluation and result are missing."""
    monkeypatch.setattr(Commands, "run", run_here)
    shutil.copytree(place[0], tmp_path / "again")
    with contextlib.chdir(tmp_path / "again"):
        (run,) = Path("runs/study-small").glob("PPO-seed0-*")
        shutil.rmtree(run / "evaluation")
        shutil.rmtree(run / "training/ppo/checkpoints/update-000002")
        shutil.rmtree(run / "training/ppo/policy")
        Path("results/PPO-seed0.json").unlink()
        run_study(StudyConfig(name="small.yaml", output_dir="results", only="PPO", workers=1))
        first = [row["seconds"] for result in (read(place[0]), read(Path())) for row in result["PPO"]["curve"]][::2]
        assert first[0] == first[1]  # the first update was not made again
        assert timeless(read(Path())["PPO"]) == timeless(read(place[0])["PPO"])


def test_a_study_may_begin_at_a_later_prompt(place, tmp_path):
    """In a process of its own. The first prompts are answered too, with the same noise, and not counted."""
    shutil.copytree(place[0], tmp_path / "again")
    with contextlib.chdir(tmp_path / "again"):
        protocol = yaml.safe_load(Path("small.yaml").read_text()) | {"first_prompt": 1}
        protocol["shared"]["eval_prompts"] = 2
        write(Path("small.yaml"), **protocol)
        run_study(StudyConfig(name="small.yaml", output_dir="later", only="SFT", workers=1))
        later, before = json.loads(Path("later/SFT-seed0.json").read_text()), read(place[0])["SFT"]
    assert later["final"]["rm_score"] == before["final"]["rm_score"][1:]
    assert later["samples"] == before["samples"][1:]
