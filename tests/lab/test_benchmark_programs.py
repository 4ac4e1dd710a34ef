"""Every program in `benchmarks/` starts, and runs at its smallest size; `gpu.py` does so in test_on_card.py."""

import dataclasses
import importlib
import importlib.util
import json
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import early_letters
from transformers import AutoTokenizer

import marlhf_lab
from marlhf_lab.corpora import make_rows
from marlhf_lab.studies.register import MEASURED
from marlhf_lab.studies.study import load_study, plan
from marlhf_lite.experiments import pipeline
from marlhf_lite.extras.programs import EXECUTORS
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.shipped import shipped

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


def run_program(name, words, patch, **constants):
    """Run a program's `main` with these options; `constants` are sizes that were fixed for its record."""
    program = module(name, patch)
    for constant, value in constants.items():
        patch.setattr(program, constant, value)
    patch.setattr(sys, "argv", [name, *map(str, words)])
    return program.main()


def cells_of(record):
    """The measurements of a record that is complete."""
    written = json.loads(record.read_text(encoding="utf-8"))
    assert written["complete"]
    return written


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


# -- programs that train, on what they share ---------------------------------------------------------------------------


PROTOCOL = """
seeds: [5]
target_method: as in summaries
baseline: as in summaries
shared:
  size: 60
  sft_epochs: 0.1
  max_response_length: 64
  rm_loss: all
  rm_epochs: 0.1
  updates: 3
  batch_size: 4
  critic_init: rm
  objective: vc_ppo
  critic_warmup: 1
  eval_prompts: 2
  checkpoint_every: 0
methods:
  as in summaries: {command: ppo, options: {n: 1}}
"""
POLICIES = """
methods:
  SFT: {command: sft}
  PPO: {command: ppo, options: {n: 1}}
  PPO-0.99: {command: ppo, options: {n: 1, lam: 0.99}}
  MA-PPO: {command: ppo, options: {n: 5}}
"""


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """A run of `critic_replay.py`: its record, and a folder with the SFT model, the reward model and PPO's run."""
    folder = tmp_path_factory.mktemp("replay")
    protocol = folder / "protocol.yaml"
    protocol.write_text(PROTOCOL, encoding="utf-8")
    record = folder / "record.json"
    words = [f"--study={protocol}", f"--folder={folder}", f"--out={record}"]
    with pytest.MonkeyPatch.context() as patch:
        run_program("critic_replay", words, patch)
    return record, folder


def test_critic_replay_at_its_smallest_size(replayed):
    record, _ = replayed
    cell = cells_of(record)["cells"]["seed 5"]
    assert len(cell["curve"]) == 3  # updates
    assert cell["mean"] == pytest.approx(sum(cell["curve"][1:]) / 2)  # without that of the warm-up
    assert pipeline.PPOTrainer is PPOTrainer


def test_critic_at_its_smallest_size(replayed, tmp_path, monkeypatch):
    _, folder = replayed
    rm = folder / "models-5" / "rm"
    words = [f"--sft={folder / 'models-5' / 'sft'}", f"--rm={rm}", f"--rm_all={rm}"]
    words += ["--fit=12", "--held_out=6", f"--out={tmp_path / 'critic.json'}"]
    run_program("critic", words, monkeypatch)
    rows = json.loads((tmp_path / "critic.json").read_text(encoding="utf-8"))["rows"]
    kinds = {row["critic"] for row in rows if row["target"] == "gold score"}
    assert kinds == {
        "truth",
        "readout of SFT",
        "RM itself",
        "RM on all tokens itself",
        "fitted from SFT",
        "fitted from RM on all tokens",
    }


def test_temperature_at_its_smallest_size(replayed, tmp_path, monkeypatch):
    """All policies of the seed are one run here: what differs between them is tested below by plain loops."""
    _, folder = replayed
    protocol = tmp_path / "protocol.yaml"
    head = PROTOCOL.replace("as in summaries", "PPO").partition("methods:")[0]
    protocol.write_text(head + POLICIES, encoding="utf-8")
    for run in plan(load_study(str(protocol))):
        start = tmp_path / "runs" / run.start
        if not start.exists():
            shutil.copytree(folder / "models-5", start)
        if run.command == "ppo":
            shutil.copytree(folder / "replay-5", tmp_path / "runs" / run.folder / "training")
    record = tmp_path / "record.json"
    words = [f"--study={protocol}", f"--work={tmp_path / 'runs'}", f"--folder={tmp_path / 'out'}"]
    words += ["--prompts=2", "--samples=2", f"--out={record}"]
    run_program("temperature", words, monkeypatch, TEMPERATURES=(0.8, 1.0, 1.2), SIZES=(1, 2))
    means = cells_of(record)["found"]["means"]
    assert set(means) == {"SFT", "PPO", "PPO-0.99", "MA-PPO"}
    assert {tuple(of_method) for of_method in means.values()} == {("0.8", "1", "1.2")}


@pytest.fixture(scope="module")
def talker(tiny, tmp_path_factory):
    """A folder with the random model and a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(tiny.model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}<mask>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<mask>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def questions(tmp_path):
    """A folder with a few of the questions of `data/sentiment`."""
    folder = tmp_path / "questions"
    folder.mkdir()
    for name, count in (("train", 12), ("test", 4)):
        lines = (shipped("sentiment") / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        (folder / f"{name}.jsonl").write_text("\n".join(lines[:count]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    append_lines(path, make_rows("tiny-tldr", 120, 3))
    return path


def test_default_rates_at_its_smallest_size(tiny, pairs, tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    words = [f"--model={tiny.model}", f"--data={pairs}"]
    words += [f"--folder={tmp_path / 'trained'}", f"--out={record}"]
    sizes = {"ROWS": 8, "HELD_OUT": 4, "BATCH": 4, "SFT_RATES": (1e-3, 1e-2), "RM_RATES": (1e-3,)}
    run_program("default_rates", words, monkeypatch, **sizes)
    written = cells_of(record)
    assert set(written["cells"]) == {"sft 0.001", "sft 0.01", "rm 0.001"}
    assert written["chosen"]["sft"] in (1e-3, 1e-2) and written["chosen"]["rm"] == 1e-3


def test_real_update_at_its_smallest_size(tiny, pairs, tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    words = [f"--model={tiny.model}", f"--data={pairs}", "--rounds=1", f"--out={record}"]
    sizes = {"PROMPTS": 4, "LONGEST": 200, "RESPONSE": 4, "SIZES": (4, 2), "BEST": 2}
    run_program("real_update", words, monkeypatch, **sizes)
    written = cells_of(record)
    assert written["ratio"]["4"] == 1 and written["ratio"]["2"] > 0
    for phase in ("generation", "scoring", "training"):
        assert written["cells"]["profile"][phase]["rate"] > 0


def test_policy_rates_at_its_smallest_size(talker, questions, tmp_path, monkeypatch):
    pytest.importorskip("vaderSentiment", reason="vaderSentiment is not installed")
    record = tmp_path / "record.json"
    words = [f"--model={talker}", f"--folder={tmp_path / 'trained'}", f"--out={record}"]
    sizes = {"DATA": questions, "RATES": (1e-3,), "UPDATES": 2, "BATCH": 2}
    run_program("policy_rates", words, monkeypatch, **sizes)
    cell = cells_of(record)["cells"]["ppo 0.001"]
    assert cell["reward"] == pytest.approx(np.mean(cell["rewards"]))


def test_reward_model_rates_at_its_smallest_size(talker, questions, tmp_path, monkeypatch):
    pytest.importorskip("vaderSentiment", reason="vaderSentiment is not installed")
    record = tmp_path / "record.json"
    words = [f"--model={talker}", f"--folder={tmp_path / 'trained'}", f"--out={record}"]
    run_program("reward_model_rates", words, monkeypatch, DATA=questions, RATES=(1e-3,))
    cell = cells_of(record)["cells"]["rm 0.001"]
    assert 0 < cell["pairs"] <= 12 and 0 < cell["held_out"] <= 4


def test_gradient_signal_at_its_smallest_size(talker, sft, questions, tmp_path, monkeypatch):
    """Random texts have hardly a word that VADER knows, so their letters are paid."""
    record = tmp_path / "record.json"
    words = [f"--model={talker}", f"--sft={sft}", f"--folder={tmp_path / 'parts'}"]
    words += [f"--out={record}", "--batches=4", "--size=2"]
    sizes = {"DATA": questions, "PAID": {"first": early_letters}}
    run_program("gradient_signal", words, monkeypatch, **sizes)
    written = cells_of(record)
    for from_slopes, from_gradient in written["checks"]:
        assert from_slopes == pytest.approx(from_gradient, rel=0.1)
    run_program("gradient_signal", [*words, "--afterwards"], monkeypatch, **sizes)
    afterwards = cells_of(record.with_stem("record_afterwards"))
    assert "MA-PPO, first value" in afterwards["found"]["zero, trained"]["over_PPO"]


# -- programs that time ------------------------------------------------------------------------------------------------


def test_scaling_at_its_smallest_size(tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    axes = {
        "response": ("response length (tokens)", [2, 4], {"batch": 2, "vocabulary": 64}),
        "batch": ("responses in an update", [2, 4], {"response": 2, "vocabulary": 64}),
        "vocabulary": ("tokens in the vocabulary", [64, 128], {"batch": 2, "response": 2}),
    }
    words = ["--rounds=1", "--updates=1", "--prompt=4", "--micro_batch=2"]
    words += [f"--out={record}", f"--figure={tmp_path / 'figure.png'}"]
    run_program("scaling", words, monkeypatch, AXES=axes)
    assert set(cells_of(record)["axes"]) == set(axes)
    assert (tmp_path / "figure.png").is_file()


def test_speed_at_its_smallest_size(tmp_path, monkeypatch, capsys):
    record = tmp_path / "record.json"
    words = ["--pairs=2", "--cases=LoRA, 1 epoch", *SMALL_UPDATE, f"--out={record}"]
    assert run_program("speed", words, monkeypatch) == 0
    assert len(cells_of(record)["cells"]) == 2  # prompts of one length, and of several
    assert "an update" in capsys.readouterr().out


def test_programs_at_its_smallest_size(monkeypatch, capsys):
    """An executor that is not installed is left out, with its reason."""
    run_program("programs", ["--programs=10", "--workers=1"], monkeypatch)
    shown = capsys.readouterr().out
    for name in EXECUTORS:
        assert f"{name}: " in shown or f"--executor {name}" in shown
    assert "ran)" in shown


def test_ours_beside_trl_at_its_smallest_size(tmp_path, monkeypatch):
    """MA-PPO beside PPO needs no TRL: two processes that take turns."""
    record = tmp_path / "record.json"
    monkeypatch.syspath_prepend(str(BENCHMARKS / "trl_ppo"))
    program = module("run", monkeypatch)
    case = dataclasses.replace(program.CASES[4], updates=3, limit=float("inf"))
    assert case.other == "macro"
    words = [*SMALL_UPDATE, "--cases=MA-PPO", f"--out={record}"]
    missing = tmp_path / "no TRL"
    assert run_program("run", words, monkeypatch, CASES=[case], THEIRS=missing) == 0
    (row,) = cells_of(record)["rows"]
    assert row["ratio"] > 0 and not missing.exists()


# -- programs that need what is not there ------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch):
    """pip finds no package."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.mark.parametrize("name", ["run", "long_context"])
def test_a_missing_trl_is_named_in_one_line(name, no_network, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "trl_ppo"))
    monkeypatch.setattr(module("run", monkeypatch), "THEIRS", tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_program(name, [f"--out={tmp_path / 'record.json'}"], monkeypatch)
    assert f"trl==1.12.0 could not be installed in {tmp_path}: " in str(ended.value)
    assert "\n" not in str(ended.value)


@pytest.mark.skipif(
    importlib.util.find_spec("trl.experimental.ppo") is not None, reason="this TRL has PPO"
)
def test_theirs_says_that_this_trl_has_no_ppo(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "trl_ppo"))
    with pytest.raises(SystemExit, match="trl .* has no PPO trainer: start run.py"):
        runpy.run_path(str(BENCHMARKS / "trl_ppo" / "theirs.py"), run_name="__main__")


def test_the_vllm_server_says_how_it_is_called():
    script = BENCHMARKS / "vllm_server.sh"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert done.returncode and "usage: vllm_server.sh ENVIRONMENT MODEL" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_carry_says_what_it_could_not_download(no_network, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="could not be downloaded: see above, fix it"):
        run_program("carry", [f"--folder={tmp_path / 'gpu'}"], monkeypatch)
    assert (tmp_path / "gpu" / "tree" / "benchmarks" / "gpu.py").is_file()


def test_carry_with_wheels_that_are_there(tmp_path, monkeypatch, capsys):
    """Real pip, and wheels that hold nothing but their names; of bitsandbytes one CUDA is kept."""
    program = module("carry", monkeypatch)
    store = tmp_path / "store"
    store.mkdir()
    lines = (BENCHMARKS.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line.partition("==")[0] in program.PINNED]
    for pin in [*pinned, program.TRL_WITH_PPO, "liger-kernel==0.8.0", "bitsandbytes==0.46.0"]:
        name, _, version = pin.replace("-", "_").partition("==")
        with zipfile.ZipFile(store / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            about = f"{name}-{version}.dist-info"
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            if name == "bitsandbytes":
                for library in ("cuda130", "cuda118", "rocm60", "cpu"):
                    wheel.writestr(f"{name}/lib_{library}.so", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(store))
    folder = tmp_path / "gpu"
    assert run_program("carry", [f"--folder={folder}"], monkeypatch) == 0
    assert f"MiB in {folder}, of " in capsys.readouterr().out
    assert len(list((folder / "wheels").glob("*.whl"))) == len(pinned) + 2
    assert [path.name[:9] for path in (folder / "trl").iterdir()] == ["trl-1.12."]
    with zipfile.ZipFile(folder / "wheels" / "bitsandbytes-0.46.0-py3-none-any.whl") as wheel:
        libraries = {name.rpartition("/")[2] for name in wheel.namelist() if name.endswith(".so")}
    assert libraries == {"lib_cuda130.so", "lib_cpu.so"}
    assert subprocess.run(["sh", "-n", str(folder / "run.sh")]).returncode == 0
