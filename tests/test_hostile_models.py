"""Code in a model's folder never runs, and no escape sequence of data, answers or errors reaches a terminal."""

import io
import json
import re
import shutil
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lite.cli import main
from marlhf_lite.evaluation.compare import comparison_table
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.printable import PrintableStream, printable
from marlhf_lite.utils.tables import markdown

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import {names}
class Own{config}({config}):
    model_type = "own"
class OwnModel({model}):
    config_class = Own{config}
class OwnTokenizer({tokenizer}):
    pass
"""
NAMES = {
    "config": "GemmaConfig",
    "model": "GemmaForCausalLM",
    "tokenizer": "PreTrainedTokenizerFast",
}
AUTO = {"AutoConfig": "own.OwnGemmaConfig", "AutoModelForCausalLM": "own.OwnModel"}
AUTO |= {"AutoModelForSequenceClassification": "own.OwnModel"}


@pytest.fixture
def hostile(tiny, tmp_path):
    """A function that makes a model's folder with code in it, and names the file that the code would make."""

    def make(part):
        folder, mark = tmp_path / "hostile", tmp_path / "it-ran"
        shutil.copytree(tiny.model, folder)
        (folder / "own.py").write_text(
            CODE.format(mark=str(mark), names=", ".join(NAMES.values()), **NAMES)
        )
        file = folder / ("tokenizer_config.json" if part == "tokenizer" else "config.json")
        values = json.loads(file.read_text())
        if part == "tokenizer":
            values |= {
                "tokenizer_class": "OwnTokenizer",
                "auto_map": {"AutoTokenizer": ["own.OwnTokenizer"] * 2},
            }
        else:
            values |= {"auto_map": AUTO}
            values |= (
                {"model_type": "own", "architectures": ["OwnModel"]} if part == "model" else {}
            )
        file.write_text(json.dumps(values))
        return folder, mark

    return make


COMMANDS = {
    "sft": "sft --dataset {data} --output_dir {out} --sft_epochs 0.1",
    "full": "sft --finetune full --dataset {data} --output_dir {out} --sft_epochs 0.1",
    "memory": "memory",
    "export": "export --policy {sft} --output_dir {out}",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_needs_its_own_code_gets_one_line(
    hostile, sft, pairs, tmp_path, monkeypatch, capsys, command
):
    """Also if standard input says yes to whatever is asked, as `yes |` does."""
    folder, mark = hostile("model")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    words = COMMANDS[command].format(data=pairs, sft=sft, out=tmp_path / "out").split()
    assert main([*words, "--model", str(folder)]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and str(folder) in shown.err and "code" in shown.err, (
        shown.err
    )
    assert not mark.exists() and "[y/N]" not in shown.out


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_a_model_that_transformers_knows_loads_without_its_own_code(
    hostile, sft, pairs, tmp_path, monkeypatch, part
):
    folder, mark = hostile(part)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    assert not main(
        [
            "export",
            "--policy",
            str(sft),
            "--model",
            str(folder),
            "--output_dir",
            str(tmp_path / "out"),
        ]
    )
    assert not main(["data", str(pairs), "--model", str(folder)])
    assert not mark.exists()


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eright\x08\r"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@given(st.text())
def test_printable_text_has_no_controls_and_keeps_the_rest(text):
    shown = printable(text)
    assert not CONTROL.search(shown) and printable(shown) == shown
    shown.encode()
    plain = re.sub("\ufffd", "", shown)
    assert plain == re.sub("\ufffd", "", CONTROL.sub("", text.replace("\r\n", "\n")))


def test_text_of_many_scripts_stays(capsys):
    text = "日本\u3000語\tفارسی\u200cها 👩\u200d🔬 naïve\u00a0!\n"
    PrintableStream(sys.stdout).write(text + EVIL)
    assert capsys.readouterr().out.startswith(text) and printable(text) == text


def test_escape_sequences_reach_neither_terminal_nor_table(tmp_path, capsys):
    rows = [
        {"prompt": f"p {i} {EVIL}", "chosen": f"yes {EVIL}", "rejected": "no"} for i in range(40)
    ]
    append_lines(tmp_path / "rows.jsonl", rows)
    assert not main(["data", str(tmp_path / "rows.jsonl")])
    shown = capsys.readouterr()
    assert "r|i|g|h|t" in shown.out and not CONTROL.search(shown.out + shown.err)
    assert main(["data", str(tmp_path / f"no{EVIL}.jsonl")]) == 2
    shown = capsys.readouterr()
    assert "right" in shown.err and not CONTROL.search(shown.out + shown.err)
    assert not CONTROL.search(markdown(["method", EVIL], [[EVIL, "1"]]))
    assert not CONTROL.search(comparison_table([{"method": EVIL, "answers": 1}]))


def test_generate_and_run_print_no_escape_sequence(tmp_path, capsys):
    """An answer may hold whatever the prompt's tokens hold: here the data teach it nothing else."""
    rows = [
        {"prompt": f"{i} {EVIL}", "chosen": f" {EVIL} yes", "rejected": " no"} for i in range(60)
    ]
    append_lines(tmp_path / "rows.jsonl", rows)
    words = f"run --dataset {tmp_path}/rows.jsonl --updates 1 --batch_size 4 --sft_epochs 0.2 --rm_epochs 0.2"
    words += f" --max_response_length 8 --lora_r 4 --eval_prompts 4 --output_dir {tmp_path}/run"
    assert not main(words.split())
    out = capsys.readouterr().out
    assert "prompt: ..." in out and not CONTROL.search(out) and "\ufffd" in out
    for path in (tmp_path / "run").rglob("*.md"):
        assert not CONTROL.search(path.read_text())
    assert not main(["generate", "--policy", str(tmp_path / "run"), "--prompt", EVIL])
    assert not CONTROL.search(capsys.readouterr().out)
