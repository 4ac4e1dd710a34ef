"""Studies: protocols, which runs they make, processes that fail or are killed, result files, and what they say."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from made_up_results import made_up

from marlhf_lite.config.options import StudyConfig
from marlhf_lite.experiments import study_pool
from marlhf_lite.experiments.results import read_result, study_table
from marlhf_lite.experiments.study import difference, load_study, plan, run_study
from marlhf_lite.experiments.study_pool import Job, execute, log_end
from marlhf_lite.experiments.study_worker import make_run, make_start
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.utils.errors import InputError

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
    "RLOO": {"command": "rloo"},
}


def write(path, **values):
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


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
    assert study.goal in study.methods
    assert study.baseline in study.methods or name == "tuning"
    policy = {r.method: (r.options["policy_learning_rate"], r.options["critic_learning_rate"]) for r in runs}
    assert all(critic == pytest.approx(1.5 * rate) for rate, critic in policy.values())


def test_tuning_sees_neither_seeds_nor_prompts_of_the_others():
    tuning, others = load_study("tuning"), [load_study("main"), load_study("ablations")]
    assert len(plan(tuning)) <= 9
    for other in others:
        assert not set(tuning.seeds) & set(other.seeds)
        assert tuning.first_prompt >= other.first_prompt + other.shared["eval_prompts"]
        assert len(other.seeds) >= 3


def test_all_methods_of_the_main_study_share_rate_kl_and_budget():
    runs = [run for run in plan(load_study("main"), [0]) if run.command in ("ppo", "rloo", "grpo")]
    for name in ("policy_learning_rate", "kl_coef", "updates", "batch_size", "eval_prompts"):
        assert len({run.options[name] for run in runs}) == 1
    assert {r.options["group_learning_rate"] for r in runs if "group_learning_rate" in r.options} == {
        runs[0].options["policy_learning_rate"]
    }


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
        ({"methods": {}}, "methods: none"),
        ({"methods": {"A": {"command": "po"}}}, "method A: give a command"),
        ({"methods": {"A": {"command": "ppo", "option": {}}}}, "method A: give a command"),
        ({"methods": {"A": {"command": "ppo", "options": {"lamda": 1}}}}, "method A: .*--lamda.*did you mean --lam"),
        ({"methods": {"A": {"command": "ppo", "options": {"lam": 2}}}}, "method A: --lam 2.0: it must be"),
        ({"methods": {"A": {"command": "ppo", "options": {"n": 0}}}}, "method A: --n 0: give whole numbers"),
        ({"methods": {"A": {"command": "rloo", "options": {"num_generations": 3}}}}, "method A: --num_generations 3"),
        ({"methods": {"A": {"command": "sft", "options": {"n": 3}}}}, "method A: .*unknown option --n"),
        ({"shared": {"updats": 3}}, "unknown option --updats: did you mean --updates"),
        ({"methods": {"A b": {"command": "sft"}, "A-b": {"command": "sft"}}}, "differ in punctuation"),
        ({"figures": {"all": ["B"]}}, "no method is called B"),
        ({"figures": {"all": "PPO"}}, "figures, all 'PPO': give a list of methods"),
        ({"figures": ["PPO"]}, "figures .*: give a list of methods for each name"),
        ({"baseline": "STF"}, "baseline: no method is called STF: there are "),
        ({"goal": "PP"}, "goal: no method is called PP"),
        ({"first_prompt": "x"}, "first_prompt 'x': give a whole number"),
        ({"shared": ["updates"]}, "shared .*: give names and values of options"),
        ({"shared": {"seed": 3}}, "shared: seed: the study says that itself: leave it out"),
        (
            {"methods": {"A": {"command": "ppo", "options": {"output_dir": "x"}}}},
            "method A: output_dir: the study says",
        ),
        ({"methods": {"A": {"command": "ppo", "options": ["n"]}}}, "method A: options .*: give names and values"),
        ({"methods": {"A": {"command": "ppo", "samples": 0}}}, "method A: samples 0: give a whole number from 1 up"),
        ({"methods": {"A": {"command": "best_of_n"}}}, "method A: samples 1: give a whole number from 2 up"),
        ({"methods": {1: {"command": "sft"}}}, "method 1: put its name in quotes"),
        ({"methods": {"A": {"command": "rloo", "options": {"lam": 1}}}}, "method A: .*unknown option --lam"),
        ({"methods": {"A": {"command": "dpo", "options": {"updates": 9}}}}, "method A: .*unknown option --updates"),
        ({"seeds": []}, "no seeds"),
        ({"seeds": None}, "no seeds"),
        ({"seeds": 3}, "seeds 3: give whole numbers"),
        ({"seeds": [0, 1, 0]}, "seed 0 twice: give each once"),
    ],
)
def test_faulty_protocols(small, changes, words):
    with pytest.raises(InputError, match=words):
        plan(load_study(small(**changes)))


@pytest.mark.parametrize("text", ["", "hello", "- 1"])
def test_a_file_without_names_and_values(tmp_path, text):
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(InputError, match="my.yaml: no names and values"):
        load_study(str(tmp_path / "my.yaml"))


def test_an_empty_key_is_as_if_it_were_not_there(small):
    assert load_study(small(shared=None, figures=None)) == load_study(small(shared={}, figures={}))


def test_shared_options_may_do_nothing_in_some_methods(small):
    """lam is PPO's alone, and comes to RLOO all the same."""
    found = {run.method: run.options["lam"] for run in plan(load_study(small(shared=SMALL | {"lam": 0.5})))}
    assert found["PPO"] == found["RLOO"] == 0.5


@pytest.mark.parametrize(
    "given, words",
    [
        ({"name": "mian"}, "--name mian: no such study: choose from ablations, main, tuning"),
        ({"only": "PPO,PPP"}, "--only PPP: no such method"),
        ({"seeds": "1,x"}, "--seeds 1,x: give whole numbers"),
        ({"seeds": "1,1", "dry_run": True}, "seed 1 twice"),
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


def options(small, tmp_path, **changes):
    return StudyConfig(name=small, results=str(tmp_path / "results"), **changes)


def test_what_is_done_is_not_done_again(small, tmp_path, capsys):
    name = small()
    fill(name, tmp_path / "results")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    run_study(options(name, tmp_path))
    assert "5 runs, 5 done already" in capsys.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert before.items() <= after.items() and set(after) - set(before) == {"table.md", "summary.json"}
    assert not (tmp_path / "runs").exists()


def test_changed_options_are_refused_and_nothing_is_touched(small, tmp_path):
    fill(small(), tmp_path / "results")
    changed = METHODS | {"PPO": {"command": "ppo", "options": {"n": 1, "kl_coef": 0.5}}}
    with pytest.raises(InputError, match="PPO-seed0.json: kl_coef was 0.05, now 0.5: delete it"):
        run_study(options(small(methods=changed), tmp_path))
    assert not (tmp_path / "runs").exists()


def test_what_does_not_change_results_is_no_difference(small):
    run = plan(load_study(small()))[1]
    other = plan(load_study(small(shared=SMALL | {"checkpoint_every": 2})))[1]
    stored = {"options": json.loads(json.dumps(run.options))}
    assert difference(other, stored) == ""
    del stored["options"]["gamma"]  # written before there was such an option
    assert difference(run, stored) == ""


def test_damaged_result(small, tmp_path):
    fill(small(), tmp_path / "results")
    (tmp_path / "results" / "PPO-seed0.json").write_text('{"method": "PP')
    with pytest.raises(InputError, match=r"PPO-seed0.json: damaged: delete it"):
        run_study(options(small(), tmp_path))


def test_dry_run_lists_and_does_nothing(small, tmp_path, capsys):
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
        "RLOO-seed0": "done",
    }
    assert "5 runs, 3 done; SFT and reward model to make first: 1" in shown
    assert not (tmp_path / "runs").exists()


# -- processes --------------------------------------------------------------------------------

TOY = """
import json, os, pathlib, sys, time
from marlhf_lite.experiments.study_pool import leave_with_parent
leave_with_parent()
spec = json.loads(sys.argv[1])
mark = pathlib.Path(spec["mark"])
mark.with_suffix(".pid").write_text(str(os.getpid()))
print("first line\\n\\nlast line", flush=True)
begin = time.monotonic()
time.sleep(spec["sleep"])
mark.write_text(json.dumps([begin, time.monotonic()]))
sys.exit(spec.get("code", 0))
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Makes jobs of a worker that sleeps and says when."""
    (tmp_path / "toy_worker.py").write_text(TOY)
    roots = [str(tmp_path), str(Path(study_pool.__file__).parents[2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(roots))
    monkeypatch.setattr(study_pool, "WORKER", "toy_worker")

    def make(name, sleep=0.3, after=None, **more):
        return Job(name, {"mark": str(tmp_path / name), "sleep": sleep} | more, tmp_path / f"{name}.log", after)

    return make


def times(job):
    path = Path(job.spec["mark"])
    return json.loads(path.read_text()) if path.exists() else None


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pid_of(job):
    path = Path(job.spec["mark"]).with_suffix(".pid")
    until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_no_more_at_a_time_than_workers_and_starts_first(toy):
    start = toy("start")
    jobs = [start, *(toy(f"run{i}", after=start) for i in range(3)), toy("alone")]
    assert execute(jobs, workers=2) == ([], [])
    spans = {job.name: times(job) for job in jobs}
    assert all(spans[f"run{i}"][0] > spans["start"][1] for i in range(3))
    for begin, _ in spans.values():
        assert sum(a <= begin < b for a, b in spans.values()) <= 2


def test_a_failure_stops_only_what_needs_it(toy):
    bad, good = toy("bad", code=3, sleep=0), toy("good", sleep=0)
    needs, other = toy("needs", after=bad), toy("other", after=good, sleep=0)
    assert execute([bad, good, needs, other], workers=1) == ([bad], [needs])
    assert times(good) and times(other) and times(needs) is None
    assert log_end(bad.log, 2) == "  first line\n  last line"


def test_an_interrupt_stops_the_workers(toy):
    jobs = [toy("one", sleep=60), toy("two", sleep=60), toy("three")]

    def interrupt():
        pids.extend(map(pid_of, jobs[:2]))
        os.kill(os.getpid(), signal.SIGINT)

    pids: list[int] = []
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        execute(jobs, workers=2)
    assert len(pids) == 2 and not any(map(alive, pids))
    assert times(jobs[2]) is None


def test_workers_do_not_outlive_a_killed_study(toy):
    job = toy("orphan", sleep=60)
    code = f"""
from pathlib import Path
from marlhf_lite.experiments import study_pool
study_pool.WORKER = "toy_worker"
study_pool.execute([study_pool.Job("orphan", {job.spec!r}, Path({str(job.log)!r}))], 1)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    pid = pid_of(job)
    assert alive(pid)
    parent.kill()
    parent.wait()
    until(lambda: not alive(pid))


# -- runs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny):
    return {"model": tiny.model, "lora_r": tiny.lora_r, "lora_alpha": tiny.lora_alpha}


@pytest.fixture(scope="module")
def start(model, tmp_path_factory):
    """The study's file, its folder, and runs by method; the adapters they start from are made."""
    folder = tmp_path_factory.mktemp("study")
    name = write(folder / "small.yaml", seeds=[0], methods=METHODS, shared=SMALL | model)
    runs = {run.method: run for run in plan(load_study(name))}
    made = folder / "starts" / runs["SFT"].start
    make_start({"command": "sft", "words": runs["SFT"].words, "start": str(made)})
    return name, folder, runs


def spec_of(start, method, folder):
    """What a worker is told."""
    _, root, runs = start
    run = runs[method]
    about = {"study": "small", "method": method, "seed": 0, "options": run.options}
    place = {"start": str(root / "starts" / run.start), "folder": str(folder / "run")}
    return place | {"command": run.command, "words": run.words, "about": about, "result": str(folder / "out.json")}


def result_of(start, method, folder):
    spec = spec_of(start, method, folder)
    make_run(spec)
    return read_result(Path(spec["result"]))


def test_results_hold_what_is_compared(start, tmp_path):
    found = {method: result_of(start, method, tmp_path / method) for method in METHODS}
    for result in found.values():
        assert result["final"]["prompts"] == found["SFT"]["final"]["prompts"]
        assert all(len(result["final"][name]) == 3 for name in ("rm_score", "gold", "tokens", "ended"))
        assert len(result["samples"]) == 3 and result["samples"][0]["prompt"]
        assert result["start"] == found["SFT"]["start"] and 0 <= result["start"]["rm_accuracy"] <= 1
        assert result["environment"]["torch"] and result["options"]["seed"] == 0
        spent = sum(row["seconds"] for row in result["curve"]) + result["seconds_evaluation"]
        assert result["seconds_total"] == pytest.approx(spent, rel=1e-3)
    assert [row["update"] for row in found["PPO"]["curve"]] == [1, 2]
    assert found["PPO"]["curve"][0].keys() >= {"rm_score_mean", "gold_mean", "kl_k1", "advantage_norm", "q_rms"}
    assert found["RLOO"]["curve"][1]["generated_tokens"] > found["RLOO"]["curve"][0]["generated_tokens"] > 0
    scores = [row["rm_score_mean"] for row in found["DPO"]["curve"]]
    assert scores[0] is None and scores[-1] is not None  # of tests on held-out prompts
    assert found["SFT"]["curve"] == [] and set(found["SFT"]["final"]["kl"]) == {0.0}
    best, one = (np.array(found[name]["final"]["rm_score"]) for name in ("best-of-3", "SFT"))
    assert (best >= one).all() and "kl" not in found["best-of-3"]["final"]  # the first of the three is SFT's own
    assert found["best-of-3"]["final"]["generated_tokens"] > found["SFT"]["final"]["generated_tokens"]
    assert study_table(list(found.values()))[0]["method"] == "SFT"


def timeless(result):
    curve = [{k: v for k, v in row.items() if k != "seconds"} for row in result["curve"]]
    return curve, result["final"], result["samples"]


def test_a_run_that_was_stopped_goes_on(start, tmp_path, monkeypatch):
    whole, plain, rounds = result_of(start, "PPO", tmp_path / "whole"), PPOTrainer.update, []

    def update(self, prompts):
        rounds.append(len(rounds) + 1)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return plain(self, prompts)

    monkeypatch.setattr(PPOTrainer, "update", update)
    with pytest.raises(KeyboardInterrupt):
        make_run(spec_of(start, "PPO", tmp_path / "stopped"))
    assert not (tmp_path / "stopped" / "out.json").exists()
    assert timeless(result_of(start, "PPO", tmp_path / "stopped")) == timeless(whole)
    assert len(rounds) == 3  # the first update was not made again


def test_a_study_goes_on_past_a_method_that_fails(start, model, tmp_path, capsys):
    """In processes of its own: one method asks for more held-out prompts than there are."""
    _, folder, runs = start
    methods = {"SFT": METHODS["SFT"], "bad": {"command": "sft", "options": {"eval_prompts": 500}}}
    name = write(tmp_path / "small.yaml", seeds=[0], methods=methods, shared=SMALL | model)
    given = options(name, tmp_path, workers=2)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "starts").symlink_to(folder / "starts")
    before = (folder / "starts" / runs["SFT"].start / "rm" / "accuracy.json").stat().st_mtime_ns
    with pytest.raises(InputError, match="1 failed, see above"):
        run_study(given)
    shown = capsys.readouterr().out
    assert "error: --eval_prompts 500" in shown and "results; the table needs 1 more, such as bad-seed0" in shown
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["SFT-seed0.json"]
    after = (folder / "starts" / runs["SFT"].start / "rm" / "accuracy.json").stat().st_mtime_ns
    assert after == before
