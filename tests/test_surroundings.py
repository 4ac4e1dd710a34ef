"""Odd surroundings: narrow output, text in other encodings, versions, names that look like formulas, links."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import fails

from marlhf_lite.cli import main
from marlhf_lite.config.options import PPOTrainerConfig
from marlhf_lite.evaluation.statistics import few_prompts
from marlhf_lite.experiments.reports import run_report
from marlhf_lite.utils.libraries import check_versions
from marlhf_lite.utils.seals import atomic_folder


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_letters_that_the_output_lacks_are_written_in_another_way(tmp_path, encoding):
    rows = [{"prompt": f"今天？{i}", "chosen": " 是的。", "rejected": " 不是。"} for i in range(20)]
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words, environment = (
        [sys.executable, "-m", "marlhf_lite", "data", str(path)],
        os.environ | {"PYTHONUTF8": "0"},
    )
    done = subprocess.run(
        words, capture_output=True, env=environment | {"PYTHONIOENCODING": encoding}
    )
    assert done.returncode == 0 and b"\\ufffd" in done.stdout and not done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_messages_that_cannot_be_written_change_no_exit_code():
    code = (
        "import sys; from marlhf_lite.cli import main; "
        "print('x' * 9999, file=sys.stderr); sys.exit(main(sys.argv[1:]))"
    )
    for words, expected in ((["presets"], 0), (["nothing"], 2)):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", code.replace("print", "main(['--version']); print"), *words],
                stderr=full,
            )
        assert done.returncode == expected


def test_a_prompt_in_another_encoding_is_one_line(sft, tiny, monkeypatch, capsys):
    for errors in ("strict", "surrogateescape"):
        stream = io.TextIOWrapper(
            io.BytesIO("café".encode("latin-1")), encoding="utf-8", errors=errors
        )
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["generate", "--model", tiny.model, "--policy", str(sft)]) == 2
        assert capsys.readouterr().err.startswith("marlhf: error: --prompt: not UTF-8")


SMALL_RUN = (
    "ppo --reward gold --critic_init sft --updates {} --batch_size 2 --micro_batch_size 2 --size 40 "
    "--lora_r 2 --max_response_length 4 --checkpoint_every 1 --eval_every 9 --output_dir run"
)


def started(words, folder, **more):
    """A command in its own process and folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "marlhf_lite", *words.split()],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def test_a_reader_that_ends_does_not_end_the_command(tiny, pairs, tmp_path):
    """As in `marlhf sft ... | head -1`: the run goes on, and says nothing of it."""
    words = f"sft --model {tiny.model} --dataset {pairs} --sft_epochs 1 --max_response_length 4"
    process = started(f"{words} --output_dir run", tmp_path)
    process.stdout.close()
    _, errors = process.communicate()
    assert process.returncode == 0 and b"rror" not in errors, errors
    assert (tmp_path / "run" / "sft" / "adapter_config.json").is_file()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_one_line_at_most(closed, tmp_path):
    """Of the standard output and input: a command that has nowhere to write does not begin."""
    program = f"{sys.executable} -m marlhf_lite"
    for words in ("presets", "data no.jsonl", f"generate --policy {tmp_path}"):
        done = subprocess.run(
            ["bash", "-c", f"{program} {words} {closed}"], capture_output=True, text=True
        )
        is_refused = words != "presets" or ">&-" in closed.split()
        assert done.returncode == (2 if is_refused else 0)
        assert len(done.stderr.splitlines()) == (0 if "2>&-" in closed or not is_refused else 1)


def test_no_prompt_and_no_input_is_one_line(sft, tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--model", tiny.model, "--policy", str(sft)]) == 2
    assert "--prompt: not given, and the standard input is closed" in capsys.readouterr().err


def test_a_run_folder_that_vanishes_is_one_line(sft, tiny, tmp_path):
    words = f"{SMALL_RUN.format(500)} --model {tiny.model} --sft {sft}"
    process = started(words, tmp_path)
    metrics = tmp_path / "run" / "ppo" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    (tmp_path / "run").rename(tmp_path / "moved")
    errors = process.communicate(timeout=100)[1].decode()
    assert process.returncode == 2 and "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("marlhf: error: run: the run's folder is gone")


def test_words_that_this_system_cannot_read_are_refused_before_anything_is_made(tmp_path):
    """Else the run would end when it saves its tokenizer."""
    ascii_alone = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "größe").mkdir()
    for folder, words in ((".", "sft --output_dir größe/x"), ("größe", "sft --output_dir x")):
        errors = started(words, tmp_path / folder, env=ascii_alone).communicate()[1].decode()
        (line,) = errors.splitlines()
        assert line.startswith("marlhf: error: ") and line.endswith("set PYTHONUTF8=1")
    latin = subprocess.Popen(
        [sys.executable, "-m", "marlhf_lite", "generate", "--prompt", "café".encode("latin-1")],
        stderr=subprocess.PIPE,
    )
    assert b"not UTF-8: convert it" in latin.communicate()[1]
    assert not list((tmp_path / "größe").iterdir())


NAMELESS = """
import os, pwd, sys

def nameless(number):
    raise KeyError(number)

pwd.getpwuid = nameless
from marlhf_lite.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_user_without_name_and_home_and_a_notebook_s_way_to_draw(sft, tiny, tmp_path):
    """As in a container, and in a notebook whose environment is another one."""
    surroundings = {k: v for k, v in os.environ.items() if k not in ("HOME", "USER", "LOGNAME")}
    words = f"evaluate --model {tiny.model} --sft {sft} --size 40 --eval_prompts 2 --max_response_length 4"
    done = subprocess.run(
        [sys.executable, "-c", NAMELESS, *words.split(), "--output_dir", "run"],
        cwd=tmp_path,
        env=surroundings | {"MPLBACKEND": "no_such_backend"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run" / "figures").glob("*.png"))


def test_numbers_are_finite():
    for value in (float("inf"), float("-inf"), float("nan")):
        fails(lambda: PPOTrainerConfig(kl_coef=value), f"--kl_coef {value}", "finite")  # noqa: B023


def test_versions_that_will_not_do_are_named(tmp_path, monkeypatch):
    """With what is installed, and what is needed."""
    check_versions("marlhf-lite")
    check_versions("a-package-that-nobody-has")
    (folder := tmp_path / "trl-0.9.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fails(
        lambda: check_versions("marlhf-lite"), "trl 0.9 is installed", "needs", "pip install 'trl"
    )


def test_few_prompts_get_a_note_and_a_name_like_a_formula_a_figure(tmp_path):
    scores = {"SFT": [0.1, 0.2, 0.3, 0.4], r"$\frac{x$": [0.3, 0.2, 0.5, 0.4]}
    rows = [
        {
            "method": name,
            "prompt": f"p{i}",
            "response": "r",
            "rm_score": x,
            "tokens": 3,
            "ended": True,
            "temperature": 1.0,
        }
        for name, values in scores.items()
        for i, x in enumerate(values)
    ]
    text = run_report(tmp_path, pd.DataFrame(rows), {}, tmp_path, {})
    assert r"$\frac{x$" in text and (tmp_path / "rm_score_distribution.png").is_file()
    assert few_prompts(4).startswith("\nnote: 4 prompts: ") and few_prompts(20) == ""


def test_a_folder_behind_a_link_is_written_to_where_it_is(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "policy").symlink_to(tmp_path / "elsewhere")
    for text in ("one", "two"):
        with atomic_folder(tmp_path / "policy") as place:
            place.mkdir()
            (place / "file").write_text(text)
        assert (tmp_path / "elsewhere" / "file").read_text() == text and (
            tmp_path / "policy"
        ).is_symlink()
