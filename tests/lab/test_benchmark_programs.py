"""Every program in `benchmarks/` starts, and those that take seconds run at their smallest size."""

import dataclasses
import importlib
import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import marlhf_lab
from marlhf_lab.studies.register import MEASURED
from marlhf_lite.utils.jsonl import append_lines

BENCHMARKS = Path(marlhf_lab.__file__).parents[1] / "benchmarks"
# The TRL that trl_ppo/run.py installs beside itself is not ours.
PROGRAMS = sorted(
    path
    for path in [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("trl_ppo/*.py")]
    if "__main__" in path.read_text(encoding="utf-8")
)
NEEDS_A_TRL_WITH_PPO = {"theirs.py"}  # it runs in an environment of its own
# All in one process: each would import transformers again. A program that needs CUDA says so after its options.
START_ALL = """
import contextlib, io, runpy, sys, traceback
path, failed = list(sys.path), []
for program in sys.argv[1:]:
    sys.path[:] = [program.rpartition("/")[0], *path]
    sys.argv = [program, "--help"]
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        if ended.code == 0 and "usage:" in shown.getvalue():
            continue
    except BaseException:
        traceback.print_exc()
    failed.append(program)
sys.exit(str(failed) if failed else 0)
"""


def test_every_program_starts():
    assert len(PROGRAMS) > 15
    has_ppo = importlib.util.find_spec("trl.experimental.ppo")
    started = [path for path in PROGRAMS if has_ppo or path.name not in NEEDS_A_TRL_WITH_PPO]
    command = [sys.executable, "-c", START_ALL, *map(str, started)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_the_register_names_is_a_program():
    names = {path.stem for path in PROGRAMS}
    assert set(MEASURED) <= names


SMALL_UPDATE = ["--batch=2", "--micro_batch=2", "--prompt=4", "--response=4"]


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("macro_ops", ["--batch=2", "--tokens=8", "--repeats=1", "--loop-repeats=1"]),
        ("logprobs", "--vocabularies 64 --lengths 4 --batch 2 --hidden 8 --repeats 1".split()),
        ("threads", ["--rounds=1", "--updates=1", *SMALL_UPDATE]),
        ("update", ["--updates=1", "--pairs=2", "--settings=2M", *SMALL_UPDATE]),
    ],
)
def test_a_program_at_its_smallest_size(program, options, tmp_path, monkeypatch, capsys):
    threads = torch.get_num_threads()
    record = tmp_path / "record.json"
    writes_record = program in ("threads", "update")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [program, *options] + [f"--out={record}"] * writes_record)
    runpy.run_path(str(BENCHMARKS / f"{program}.py"), run_name="__main__")
    torch.set_num_threads(threads)
    assert "ratio" in capsys.readouterr().out
    assert not writes_record or json.loads(record.read_text())["complete"]


def module(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """24 answers of the small model to a short text, and a critic that takes few steps."""
    with pytest.MonkeyPatch.context() as patch:
        scored_answers = module("scored_answers", patch)
    setting = dataclasses.replace(
        scored_answers.UMBRELLA_WITH_TRAINED_CRITIC,
        data={"dataset": "tiny-umbrella", "part": "L8-first", "size": 40},
        length=16,
        batch=12,
        passes=1,
        updates=2,
    )
    folder = tmp_path_factory.mktemp("answers")
    return scored_answers.ScoredAnswers(setting, folder, model="", answers=24, seed=3)


def test_signal_apart_at_its_smallest_size(answers, monkeypatch, capsys):
    """Parts share no answer, projections are of the evaluated answers, and what is kept is not computed again."""
    program = module("signal_apart", monkeypatch)
    monkeypatch.setattr(program, "SPLITS", 2)
    measured = program.Apart(answers)
    cells = {program.cell_name("umbrella", i): measured.measure_split(i) for i in range(2)}
    assert "split-1-placebo" in capsys.readouterr().out
    again = program.Apart(answers).measure_split(1)
    assert again == cells["umbrella: split 1"] and not capsys.readouterr().out
    split = measured.split(0)
    assert cells["umbrella: split 0"]["evaluation"] == split.evaluation.tolist()
    found = program.found_in(cells, "umbrella", 24)
    assert {"S - M", "SAE - S"} <= set(found["contrasts"])

    # The direction is the gradient of a loss of the direction part alone, by autograd over all its answers at once.
    rollout = measured.rollout.select(torch.as_tensor(split.direction))
    weights = (rollout.scores - rollout.scores.mean())[:, None]
    loss = (weights * answers.logprobs(rollout))[rollout.mask].sum()
    grads = torch.cat([g.flatten() for g in torch.autograd.grad(loss, answers.parameters)])
    direction = measured.directions()[0, "score"]
    assert torch.allclose(direction, grads / grads.norm(), atol=1e-5)

    # With permuted scores the same answers are evaluated.
    placebo = measured.scored(0, "placebo").scores
    assert sorted(placebo.tolist()) == sorted(measured.rollout.scores.tolist())
    assert np.array_equal(measured.scored(0, "score").tokens, measured.rollout.tokens)


def test_baseline_signal_at_its_smallest_size(answers, monkeypatch):
    program = module("baseline_signal", monkeypatch)
    monkeypatch.setattr(program, "LAGS", 4)  # the answers are short
    cell = program.TwoHalves(answers).measure()
    assert {len(rows) for rows in cell["projections"].values()} == {24}
    assert set(program.found(cell)["signal"]) == set(program.ESTIMATORS)


def test_temperature_against_plain_loops(tmp_path, monkeypatch):
    """Means of answers and of the best of four, and by how much a change differs from another, by hand."""
    program = module("temperature", monkeypatch)
    monkeypatch.setattr(program, "SIZES", (1, 4))
    rng = np.random.default_rng(5)
    scores = {}  # seed, method, temperature -> [prompts, samples]
    seeds = []
    for seed in range(3):
        rows = []
        for method in ("SFT", "PPO", "PPO-0.99", "MA-PPO"):
            for temperature in (0.8, 1.0, 1.2):
                scores[seed, method, temperature] = drawn = rng.normal(size=(5, 4))
                for (prompt, sample), score in np.ndenumerate(drawn):
                    row = {"id": str(prompt), "sample": sample, "prompt": f"p {prompt}"}
                    row |= {"method": method, "temperature": temperature, "response": "a"}
                    row |= {"seed": seed, "token_ids": [1], "tokens": 1, "ended": True}
                    rows.append(row | {"rm_score": score, "gold": -score})
        append_lines(tmp_path / f"seed{seed}.jsonl", rows)
        seeds.append(program.means_by_temperature(tmp_path / f"seed{seed}.jsonl"))

    best = seeds[1]["PPO"]["1.2"]["4"]
    highest = scores[1, "PPO", 1.2].max(axis=1).mean()  # four of four: all of them
    assert best["rm_score"] == pytest.approx(highest, abs=1e-3)
    assert best["gold"] == pytest.approx(-highest, abs=1e-3)

    gaps = []
    for seed in range(3):
        change = {}
        for method in ("PPO-0.99", "MA-PPO"):
            warm, cool = scores[seed, method, 1.0].mean(), scores[seed, method, 0.8].mean()
            change[method] = warm - cool
        gaps.append(change["MA-PPO"] - change["PPO-0.99"])
    found = program.found_in({f"seed {i}": means for i, means in enumerate(seeds)})
    contrast = found["contrasts"]["MA-PPO - PPO-0.99, 0.8 to 1.0"]["rm_score"]
    assert contrast["by_seed"] == pytest.approx(gaps, abs=2e-3)
    assert contrast["mean"] == pytest.approx(np.mean(gaps), abs=2e-3)
    assert program.PRIMARY in found["contrasts"]
