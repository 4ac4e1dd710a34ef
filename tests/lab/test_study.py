"""Studies: protocols, which runs they make, processes that fail or are killed, result files, and what they say."""

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import fails
from made_up_results import made_up

from marlhf_lab.studies import study as study_module
from marlhf_lab.studies.command import StudyCommand
from marlhf_lab.studies.results import (
    JOINED,
    RESULT,
    join_results,
    read_results,
    stored_results,
    write_result,
)
from marlhf_lab.studies.study import STUDIES, Commands, changed_option, load_study, plan
from marlhf_lite.cli import main
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines, read_lines
from marlhf_lite.utils.run_folder import RunLock

SMALL = yaml.safe_load("""{size: 40, sft_epochs: 0.3, sft_batch_size: 4, rm_epochs: 0.3, rm_batch_size: 8, updates: 2,
batch_size: 4, micro_batch_size: 4, num_generations: 2, dpo_batch_size: 8, checkpoint_every: 1, eval_prompts: 3,
max_response_length: 16}""")
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
        return write(
            tmp_path / "small.yaml", **{"seeds": [0], "methods": METHODS, "shared": SMALL} | changes
        )

    return make


# -- protocols --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.yaml")))
def test_the_project_s_studies_are_whole(name):
    """No two runs have one file or the same options, and rates are 2 to 3; in `turns` they are equal."""
    study = load_study(name)
    runs = plan(study)
    assert (
        len({run.name for run in runs})
        == len({json.dumps(run.options) for run in runs})
        == len(runs)
    )
    assert study.threshold is None or len(study.methods) > 1
    rates = [
        (r.options["policy_learning_rate"], r.options["critic_learning_rate"])
        for r in runs
        if r.command == "ppo"
    ]
    ratio = 1.0 if name == "turns" else 1.5
    assert rates and all(critic == pytest.approx(ratio * policy) for policy, critic in rates)


def test_the_project_s_studies_find_their_data():
    found = {
        run.options["dataset"]
        for name in STUDIES.glob("*.yaml")
        for run in plan(load_study(name.stem))
    }
    # its texts are no part of the project
    for dataset in found - {"hh_rlhf_harmless_1600.jsonl.gz"}:
        assert load_task(dataset).splits["ppo"]


def test_starts_are_shared_by_what_makes_them(small):
    def starts(seeds=(), **shared):
        return {run.start for run in plan(load_study(small(shared=SMALL | shared)), seeds)}

    assert len(starts()) == 1 and starts(updates=9, n=7) == starts()
    assert starts(rm_epochs=0.5).isdisjoint(starts()) and starts([1]).isdisjoint(starts())


def test_a_preset_stands_below_the_shared_options_and_those_of_a_method(small):
    shared = {"preset": "gemma-2b/tldr,lora-t4-16gb", "dataset": "mine.jsonl", "batch_size": 8}
    own = {"sft_batch_size": 4, "updates": 2}
    methods = {"PPO": {"command": "ppo", "options": own}, "RLOO": {"command": "rloo"}}
    ppo, rloo = plan(load_study(small(shared=shared, methods=methods)))
    given = {
        "model": "google/gemma-2b",
        "load_in_4bit": True,
        "finetune": "lora",
        "dataset": "mine.jsonl",
    }
    assert given.items() <= ppo.options.items() and given.items() <= rloo.options.items()
    assert (
        ppo.options["sft_batch_size"],
        ppo.options["batch_size"],
        rloo.options["sft_batch_size"],
    ) == (4, 8, 64)
    # the preset's passes give way
    assert (ppo.options["updates"], ppo.options["prompt_epochs"]) == (2, None)
    assert rloo.options["prompt_epochs"] == 1.0


PPO = {"command": "ppo"}
FAULTS = [  # (keys of the protocol, what the message names)
    ({"metods": {}}, "metods: did you mean methods"),
    ({"methods": {}}, "methods"),
    ({"methods": {"A": {"command": "po"}}}, "method A: give a command"),
    ({"methods": {"A": PPO | {"options": ["n"]}}}, "method A: give a command"),
    ({"methods": {"A": PPO | {"options": {"lamda": 1}}}}, "method A: .*--lamda.*--lam"),
    ({"methods": {"A": PPO | {"options": {"lam": 2}}}}, "method A: --lam 2"),
    ({"methods": {"A": PPO | {"options": {"output_dir": "x"}}}}, "method A: output_dir"),
    ({"methods": {"A": PPO | {"preset": "E9"}}}, "method A: preset: .*E9"),
    ({"methods": {"A": PPO | {"preset": "lora-t4-16gb"}}}, "method A: .*belongs below shared"),
    ({"shared": {"preset": "E9"}}, "small.yaml: shared: preset: .*E9"),
    ({"methods": {"A": {"command": "best_of_n"}}}, "method A: samples 1"),
    (
        {"methods": {"A": {"command": "rloo", "options": {"num_generations": 3}}}},
        "method A: --num_generations 3",
    ),
    (
        {"methods": {"A": {"command": "rloo", "preset": "estimators/E4"}}},
        "method A: .*--termination",
    ),
    ({"methods": {"A": {"command": "dpo", "options": {"updates": 9}}}}, "method A: .*--updates"),
    ({"methods": {"A b": {"command": "sft"}, "A-b": {"command": "sft"}}}, "methods: two names"),
    ({"methods": {1: {"command": "sft"}}}, "method 1: .*quotes"),
    ({"shared": {"updats": 3}}, "shared: .*updats: did you mean updates"),
    ({"shared": {"seed": 3}}, "seed: the study sets this"),
    ({"figures": {"all": ["B"]}}, "figures, all"),
    ({"baseline": "STF"}, "baseline: .*STF"),
    ({"first_prompt": "x"}, "first_prompt 'x'"),
    ({"seeds": None}, "seeds"),
    ({"seeds": [0, 1, 0]}, "seeds .0, 1, 0."),
    ({"threshold": "high"}, "threshold 'high'"),
    ({"threshold": 0.8, "methods": {"SFT": {"command": "sft"}}}, "threshold: sft"),
    ({"threshold": 0.8, "methods": {"A": PPO}}, "reward: gold, .*critic_init: sft"),
    ({"threshold": 0.8, "contrasts": {"c": {"ratio": ["PPO", "B"]}}}, "contrasts, c"),
    ({"contrasts": {"c": {"ratio": ["PPO", "SFT"]}}}, "contrasts, c"),
    (
        {"threshold": 0.8, "contrasts": {"c": {"ratio": 2}}},
        "contrasts, c: .*give a ratio of two or four",
    ),
    ({"threshold": 0.8, "window": 0}, "window 0: give a whole number from 1 up"),
    ({"equal_kl": ["PPO", "B"]}, "equal_kl"),
    *(
        ({"equal_kl": [name, "PPO"]}, f"method {name}: equal_kl: .* no kl_k1")
        for name in ("SFT", "DPO", "best-of-3")
    ),
    (
        {"equal_kl": ["G", "H"], "methods": {"G": {"command": "grpo"}, "H": PPO}},
        "method G: equal_kl: grpo",
    ),
    (
        {"equal_kl": ["PPO", "RLOO=2"], "shared": SMALL | {"kl_coef": 0.0}},
        "RLOO=2: equal_kl: rloo without kl_coef",
    ),
    (
        {"mean_updates": [1, 3], "shared": SMALL, "methods": {"A": PPO}},
        "method A: mean_updates: .1, 3.: it has 2 up",
    ),
    *(
        (
            keys | {"methods": {"A": PPO | {"options": {"kl_ceiling": 1.0}}}},
            "method A: kl_ceiling: .*stops early",
        )
        for keys in ({"threshold": 0.8}, {"mean_updates": [1, 2]})
    ),
    *(
        ({"mean_updates": span}, "mean_updates: .*16, 30")
        for span in ([5], [5, 4], [0, 3], ["a", 3])
    ),
    ({"mean_updates": [1, 2], "methods": {"SFT": {"command": "sft"}}}, "mean_updates: sft"),
    ({"mean_updates": [1, 2], "contrasts": {"c": {"ratio": ["PPO", "SFT"]}}}, "contrasts, c"),
    ({"contrasts": {"c": {"difference": ["PPO", "SFT"]}}}, "contrasts, c"),
    (
        {"shared": {"reward": "wishs:few", "critic_init": "sft"}, "methods": {"A": PPO}},
        "wishs:few: cannot be imported",
    ),
    ({"methods": {"A": PPO | {"options": {"reward": "json:fw"}}}}, "json:fw: cannot be imported"),
    *(  # with unit tests or a function for a reward there is no reward model
        (
            {"shared": {"dataset": "tiny-code", "reward": reward}, "methods": {"A": method}},
            "method A: no reward model",
        )
        for method in (
            {"command": "dpo"},
            METHODS["best-of-3"],
            PPO | {"options": {"critic_init": "rm"}},
        )
        for reward in ("tests", "words:few")
    ),
]


@pytest.mark.parametrize("changes, words", FAULTS)
def test_faulty_protocols(small, changes, words):
    with pytest.raises(InputError, match=words) as error:
        plan(load_study(small(**changes)))
    assert len(str(error.value).splitlines()) == 1


def test_a_threshold_may_be_a_whole_number(small):
    study = load_study(small(threshold=1))
    assert study.threshold == 1.0 and isinstance(study.threshold, float)
    fails(lambda: load_study(small(threshold=True)), "threshold True: give a float")


def test_faulty_options():
    fails(lambda: StudyCommand(name="mian").run(), "--name mian")
    fails(lambda: StudyCommand(only="PPO,PPP").run(), "--only PPP")
    fails(lambda: StudyCommand(seeds="1,x").run(), "--seeds 1,x")


def test_a_study_of_the_project_starts_from_a_committed_protocol(
    git, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(study_module, "STUDIES", tmp_path)
    path = tmp_path / "small.yaml"
    git("init")
    git("commit", "--allow-empty", "-m", "empty")
    for text in ("first", "second"):
        path.write_text(text)
        fails(lambda: study_module.check_committed(path), "small.yaml: not committed")
        git("add", ".")
        git("commit", "-m", text)
        study_module.check_committed(path)
    (tmp_path / "own").mkdir()
    study_module.check_committed(tmp_path / "own" / "small.yaml")  # a user's own: a note
    assert capsys.readouterr().out.startswith("note: ")


# -- results that are there already --------------------------------------------------------------------------------


def fill(name, folder, seeds=(0,), **changes):
    """Result files of every run of a study, made up."""
    for run in plan(load_study(name), seeds):
        result = made_up(run.method, run.seed, [0.1 * len(run.method)] * 4) | {
            "options": run.options
        }
        write_result(Path(folder) / f"{run.name}{RESULT}", result | changes)


def options(name, tmp_path, **changes):
    return StudyCommand(name=name, output_dir=str(tmp_path / "results"), **changes)


def test_what_is_done_is_not_done_again(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = small()
    results = tmp_path / "results"
    fill(name, results)
    (results / "PPO-seed0.json.gz").write_text('{"method": "PP')
    fails(lambda: options(name, tmp_path).run(), "PPO-seed0.json.gz: damaged")
    fill(name, results)
    before = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    options(name, tmp_path).run()
    assert "5 runs, 5 done already" in capsys.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    assert before.items() <= after.items() and set(after) - set(before) == {
        "table.md",
        "summary.json",
        "figures",
    }
    assert not (tmp_path / "runs").exists()


def test_a_complete_study_is_one_file_that_says_the_same(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, results = small(seeds=[0, 1]), tmp_path / "results"
    fill(name, results, [0, 1])
    size = sum(path.stat().st_size for path in results.iterdir())
    options(name, tmp_path).run()
    before, tables = (
        read_results(results),
        [(results / x).read_bytes() for x in ("table.md", "summary.json")],
    )
    assert len(before) == 10
    join_results(results)
    assert {path.name for path in results.iterdir()} == {
        JOINED,
        "table.md",
        "summary.json",
        "figures",
    }
    assert read_results(results) == before and [*read_results(results)] == [*before]
    assert (results / JOINED).stat().st_size < size / 2
    capsys.readouterr()
    options(name, tmp_path).run()
    assert "10 runs, 10 done already" in capsys.readouterr().out
    assert [(results / x).read_bytes() for x in ("table.md", "summary.json")] == tables
    changed = small(
        seeds=[0, 1], methods=METHODS | {"PPO": {"command": "ppo", "options": {"n": 3}}}
    )
    fails(lambda: options(changed, tmp_path).run(), f"{JOINED}: PPO-seed0: n was 1, now 3")
    fill(name, results, [1], seconds_total=7)  # a run that was done again; its own file wins
    assert [result.get("seconds_total") for result in read_results(results).values()].count(7) == 5
    (results / JOINED).write_bytes(b"no archive")
    fails(lambda: options(name, tmp_path).run(), f"{JOINED}: damaged")


def test_a_table_has_all_complete_seeds_whichever_are_asked_for(
    small, tmp_path, capsys, monkeypatch
):
    """Neither one seed of those that are stored nor a new one takes the others out of the table."""
    monkeypatch.chdir(tmp_path)
    name, results = small(seeds=[0, 1, 2, 3]), tmp_path / "results"
    fill(name, results, [1])
    (results / f"DPO-seed1{RESULT}").unlink()  # incomplete
    for asked, filled, shown in (("0", [0], [0]), ("7", [2, 7], [0, 2, 7]), ("2", [2], [0, 2])):
        fill(name, results, filled)
        options(name, tmp_path, seeds=asked).run()
        assert f"seeds: {', '.join(map(str, shown))}\n" in capsys.readouterr().out
        summary = json.loads((results / "summary.json").read_text(encoding="utf-8"))
        assert [row["seeds"] for row in summary["methods"]] == [shown] * 5
    before = (results / "table.md").read_bytes()
    changed = small(
        seeds=[0, 1, 2, 3], methods=METHODS | {"PPO": {"command": "ppo", "options": {"n": 3}}}
    )
    fails(
        lambda: options(changed, tmp_path, seeds="4", only="SFT").run(),
        "PPO-seed0.json.gz: n was 1, now 3",
    )
    assert (results / "table.md").read_bytes() == before


def test_a_changed_option_is_shown_and_refused_and_nothing_runs(
    small, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    fill(small(), tmp_path / "results")
    (tmp_path / "results" / "DPO-seed0.json.gz").unlink()
    methods = METHODS | {"PPO": {"command": "ppo", "options": {"n": 3}}}
    changed = small(methods=methods, shared=SMALL | {"save_total_limit": 1})
    options(changed, tmp_path, dry_run=True).run()
    *lines, last = capsys.readouterr().out.splitlines()
    states = [line.split(maxsplit=2)[2] for line in lines]
    assert sorted(states) == ["done"] * 3 + ["n was 1, now 3", "to do"] and last == "5 runs, 3 done"
    fails(lambda: options(changed, tmp_path).run(), "PPO-seed0.json.gz: n was 1, now 3")
    assert not (tmp_path / "runs").exists()


def test_an_option_that_an_older_result_has_not_stored_had_its_default(small):
    asked = {"n": 1, "objective": "k3"}
    run = next(
        run
        for run in plan(load_study(small(methods={"PPO": {"command": "ppo", "options": asked}})))
    )
    older = {
        name: value
        for name, value in run.options.items()
        if name not in ("objective", "min_response_length")
    }
    assert changed_option(run, {"options": older}) == "objective was , now k3"
    assert not changed_option(run, {"options": older | {"objective": "k3"}})


def test_different_prompts_are_counted_and_not_rows(small, tmp_path):
    """Several rows may have one prompt, which is answered once. Older files have the number of rows alone."""
    study, start = load_study(small()), Future()
    run = plan(study)[0]
    start.set_result(study_module.Start(tmp_path / "sft", rm=None))
    (tmp_path / "sft").mkdir()
    for counts in ({"test": 9, "test_prompts": 2}, {"test": 2}):
        (tmp_path / "sft" / "data.json").write_text(json.dumps(counts))
        words = "3 held-out prompts, but only 2 exist"
        fails(lambda: study_module.make_result(study, run, start, tmp_path, tmp_path, None), words)


# -- processes --------------------------------------------------------------------------------


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


STUDY = """
import signal
import sys
from pathlib import Path
from marlhf_lite.cli import main
from marlhf_lab.studies import study

TOY = "import os, signal; open('new', 'w').write(str(os.getpid())); os.rename('new', 'pid'); signal.pause()"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
study.make_start = lambda study, run, folder, commands: commands.run(["sft"], Path("x.log"))
study.MARLHF = [sys.executable, "-c", TOY]
sys.exit(main(["study", f"--name={sys.argv[1]}", "--workers=1"]))
"""


@pytest.mark.skipif(
    not shutil.which("setpriv"), reason="needs setpriv, which ties processes to their parent"
)
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_commands_do_not_outlive_their_study(small, tmp_path, monkeypatch, kill):
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join(
        [str(Path(study_module.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    words = [sys.executable, "-c", STUDY, small()]
    study = subprocess.Popen(
        words, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, text=True
    )
    until(Path("pid").exists)
    pid = int(Path("pid").read_text())
    assert alive(pid)
    study.send_signal(kill)
    _, errors = study.communicate(timeout=120)
    until(lambda: not alive(pid))
    assert study.returncode == (-kill if kill == signal.SIGKILL else 130)
    assert kill == signal.SIGKILL or errors.endswith(
        "is done so far is kept: the same command continues\n"
    )


def test_a_study_runs_once_at_a_time(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunLock() as lock:
        lock.take(Path("runs/study-small"))
        fails(
            lambda: options(small(), tmp_path).run(),
            "runs/study-small: another process works in it",
        )


def test_folders_of_a_study_are_tried_before_it_runs(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, file = small(), tmp_path / "file"
    file.touch()
    fails(
        lambda: StudyCommand(name=name, output_dir=f"{file}/results").run(),
        f"--output_dir {file}/results: cannot",
    )
    for folder, what in (
        ("runs", "runs of the study: runs/study-small"),
        ("figures", "figures: figures/small"),
    ):
        file.rename(folder)
        fails(
            lambda: StudyCommand(name=name).run(),
            f"{what}: cannot be made ({folder} is a file)",
        )
        Path(folder).rename(file)
    StudyCommand(name=name, output_dir=f"{file}/results", dry_run=True).run()


def test_a_run_that_cannot_be_written_says_why(small, tmp_path, monkeypatch, capsys):
    def full(study, run, *places):
        raise OSError(errno.ENOSPC, "No space left on device", f"{run.name}.json.gz")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study_module, "make_start", lambda *places: None)
    monkeypatch.setattr(study_module, "make_result", full)
    fails(lambda: options(small(), tmp_path, workers=1).run(), "5 of 5 runs failed")
    assert (
        "PPO-seed0.json.gz: not written or read (No space left on device): free"
        in capsys.readouterr().out
    )


def test_a_seed_is_finished_before_the_next_begins(small, tmp_path, monkeypatch):
    """Its start alone is made ahead, so that no worker waits for it."""
    monkeypatch.chdir(tmp_path)
    done = []
    monkeypatch.setattr(
        study_module, "make_start", lambda study, run, *places: done.append(("start", run.seed))
    )
    monkeypatch.setattr(
        study_module, "make_result", lambda study, run, *places: done.append((run.method, run.seed))
    )
    options(small(seeds=[3, 1, 2]), tmp_path, workers=1).run()
    of_seed = {seed: [(method, seed) for method in sorted(METHODS)] for seed in (3, 1, 2)}
    assert done == [("start", 3), ("start", 1), *of_seed[3], ("start", 2), *of_seed[1], *of_seed[2]]


# -- runs --------------------------------------------------------------------------------


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
    write(folder / "small.yaml", seeds=[0], methods=methods, shared=SMALL | model, first_prompt=1)
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(Commands, "run", run_here)
        patch.chdir(folder)
        with pytest.raises(InputError, match="1 of 6 runs"):
            StudyCommand(name="small.yaml", output_dir="results", workers=1).run()
    return folder, shown.getvalue()


def read(folder):
    """Method -> its result."""
    return {name: read_results(folder / "results")[f"{name}-seed0"] for name in METHODS}


def test_results_hold_what_is_compared_and_a_method_that_fails_stops_no_other(place):
    folder, shown = place
    assert (
        "bad-seed0: 501 held-out prompts" in shown
        and "the table needs 1 more, such as bad-seed0" in shown
    )
    assert {path.name for path in (folder / "results").iterdir()} == {
        f"{name}-seed0.json.gz" for name in METHODS
    }
    found = read(folder)
    for result in found.values():
        final, first = result["final"], found["SFT"]
        assert list(result) == list(stored_results("main")[-1])
        assert (final["prompts"], result["start"]) == (first["final"]["prompts"], first["start"])
        assert (
            {len(final[name]) for name in ("rm_score", "gold", "tokens", "ended")}
            == {len(result["samples"])}
            == {3}
        )
        seconds = sum(row["seconds"] for row in result["curve"]) + result["seconds_evaluation"]
        assert result["seconds_total"] == pytest.approx(seconds, rel=1e-3)
        counts = zip(
            *(final[f"gold_{name}"] for name in ("correct", "wrong", "padding", "words")),
            strict=True,
        )
        scores = [
            right - wrong - padding / 2 - max(0, words - 36) / 20
            for right, wrong, padding, words in counts
        ]
        assert final["gold"] == pytest.approx(scores, rel=1e-4, abs=1e-4)
    (answers,) = folder.glob("runs/study-small/SFT-seed0-*/evaluation/samples.jsonl")
    # the protocol begins at the second prompt
    later = [row["rm_score"] for row in read_lines(answers)][1:]
    assert found["SFT"]["final"]["rm_score"] == pytest.approx(later, rel=1e-3, abs=1e-4)
    assert [row["update"] for row in found["PPO"]["curve"]] == [1, 2]
    assert found["PPO"]["curve"][0].keys() >= {
        "score_mean",
        "gold_mean",
        "kl_k1",
        "advantage_norm",
        "q_rms",
    }
    first, *_, last = found["DPO"]["curve"]
    assert "score_mean" not in first and "score_mean" in last  # of tests on held-out prompts
    assert found["SFT"]["curve"] == [] and set(found["SFT"]["final"]["kl"]) == {0.0}
    best, one = (np.array(found[name]["final"]["rm_score"]) for name in ("best-of-3", "SFT"))
    # the first of the three is SFT's own
    assert (best >= one).all() and "kl" not in found["best-of-3"]["final"]


def timeless(result):
    curve = [{k: v for k, v in row.items() if k != "seconds"} for row in result["curve"]]
    return curve, result["final"], result["samples"]


def test_prompts_alone_are_scored_by_one_s_own_function(tiny, tmp_path, monkeypatch, capsys):
    """No reward model is trained, and the function's score is the outcome."""
    monkeypatch.setattr(Commands, "run", run_here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    Path("wishes.py").write_text(
        "def few(prompts, responses):\n    return [-len(r) for r in responses]\n"
    )
    append_lines(Path("prompts.jsonl"), [{"prompt": f"Tell of {i} cats."} for i in range(40)])
    shared = SMALL | {
        "dataset": "prompts.jsonl",
        "reward": "wishes:few",
        "critic_init": "sft",
        "model": tiny.model,
    }
    name = write(
        tmp_path / "small.yaml",
        seeds=[0],
        methods={k: METHODS[k] for k in ("SFT", "PPO")},
        shared=shared,
    )
    options(name, tmp_path, dry_run=True).run()
    options(name, tmp_path, workers=1).run()
    assert "2 runs, 0 done\n" in capsys.readouterr().out and not list(tmp_path.glob("runs/**/rm"))
    # the study is complete
    assert {path.name for path in (tmp_path / "results").glob("*.gz")} == {JOINED}
    for method in ("SFT", "PPO"):
        result = read_results(tmp_path / "results")[f"{method}-seed0"]
        assert result["options"]["reward"] == "wishes:few" and "rm_score" not in result["final"]
        samples = result["samples"]
        assert "gold" not in result["final"] and len(samples) == 3
        assert [row["reward"] for row in samples] == [-len(row["response"]) for row in samples]


def test_all_seeds_start_from_the_models_that_the_protocol_names(place, tmp_path, monkeypatch):
    """One SFT model and one reward model, trained before the study: it trains neither."""
    monkeypatch.setattr(Commands, "run", run_here)
    (trained,) = (place[0] / "runs/study-small").glob("seed0-*/sft")
    models = {"sft": str(trained), "rm": str(trained.with_name("rm"))}
    small = yaml.safe_load((place[0] / "small.yaml").read_text())
    keys = {"seeds": [5, 6], "shared": small["shared"], "methods": {"PPO": METHODS["PPO"]}}
    name = write(tmp_path / "given.yaml", **keys, **models)
    monkeypatch.chdir(tmp_path)
    options(name, tmp_path, workers=1).run()
    assert sorted(path.name.split("-")[0] for path in Path("runs/study-given").glob("*/")) == [
        "PPO",
        "PPO",
    ]
    found = read_results(tmp_path / "results")
    assert [*found] == ["PPO-seed5", "PPO-seed6"]
    for result in found.values():
        assert models.items() <= result["options"].items() and result["start"]["rm_pairs"] > 0
        assert "sft_epochs" not in result["options"]  # this study trains none
    trains_its_own = load_study(write(tmp_path / "given.yaml", **keys, rm=models["rm"]))
    assert plan(trains_its_own)[0].options["rm"] == models["rm"]
    copied = shutil.copytree(trained, tmp_path / "copied")
    moved = load_study(write(tmp_path / "given.yaml", **keys, **models | {"sft": str(copied)}))
    assert changed_option(plan(moved)[0], found["PPO-seed5"]).startswith("sft was ")


def test_a_model_to_start_from_that_is_not_there(small, tmp_path):
    fails(lambda: load_study(small(sft=str(tmp_path / "none"))), "no adapter there")
    fails(lambda: load_study(small(rm="x", threshold=0.5)), "leave rm out")
    shared = SMALL | {"sft": "x"}
    fails(lambda: plan(load_study(small(shared=shared))), "sft: write it beside seeds and methods")


def test_a_run_that_was_stopped_resumes(place, tmp_path, monkeypatch):
    """As after a kill between the two updates of PPO: its last checkpoint, evaluation and result are missing."""
    monkeypatch.setattr(Commands, "run", run_here)
    shutil.copytree(place[0], tmp_path / "again")
    with contextlib.chdir(tmp_path / "again"):
        (run,) = Path("runs/study-small").glob("PPO-seed0-*")
        shutil.rmtree(run / "evaluation")
        (run / "training/ppo/checkpoints/update-000002.pt").unlink()
        shutil.rmtree(run / "training/ppo/policy")
        Path("results/PPO-seed0.json.gz").unlink()
        StudyCommand(name="small.yaml", output_dir="results", only="PPO", workers=1).run()
        first = [
            row["seconds"]
            for result in (read(place[0]), read(Path()))
            for row in result["PPO"]["curve"]
        ][::2]
        assert first[0] == first[1]  # the first update was not made again
        assert timeless(read(Path())["PPO"]) == timeless(read(place[0])["PPO"])
