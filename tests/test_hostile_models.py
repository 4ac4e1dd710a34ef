"""Code in a model's folder never runs, and no escape sequence of data, answers or errors reaches a terminal."""

import copy
import io
import json
import os
import pickle
import re
import shutil
import sys
import time
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from marlhf_lite.cli import main
from marlhf_lite.evaluation.compare import comparison_table
from marlhf_lite.models.shards import read_metadata, torch_reads_no_code, write_shards
from marlhf_lite.tasks import chats
from marlhf_lite.tasks.chat_templates import render
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.printable import PrintableStream, printable
from marlhf_lite.utils.run_folder import RunFolder, RunLock
from marlhf_lite.utils.seals import seal
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
    "export full": "export --finetune full --policy {sft} --output_dir {out}",
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


def test_a_reward_model_that_needs_its_own_code_gets_one_line(
    hostile, tiny, sft, pairs, tmp_path, monkeypatch, capsys
):
    folder, mark = hostile("model")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    words = f"ppo --dataset {pairs} --model {tiny.model} --sft {sft} --critic_init sft --updates 1"
    assert main([*words.split(), "--rm", str(folder), "--output_dir", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and str(folder) in shown.err, shown.err
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


# -- shards of several processes that would run a command -------------------------------------------------------------

WEIGHT = (
    "weights.policy.model.lm_head.weight"  # as a checkpoint of PPO names a weight of its policy
)


class Runs:
    """Something whose pickle makes a folder when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def by_a_dotted_name(folder, mark):
    """A pickle of protocol 4, whose names may lead from an allowed module to any other."""
    opcodes = b"\x80\x04"
    for word in ("torch.distributed.checkpoint.filesystem", "os.mkdir"):
        opcodes += b"\x8c" + bytes([len(word)]) + word.encode()  # pushes a short text
    opcodes += b"\x93"  # takes module and name
    opcodes += b"X" + len(str(mark)).to_bytes(4, "little") + str(mark).encode()  # pushes a text
    (folder / ".metadata").write_bytes(opcodes + b"\x85R.")  # calls


def metadata_of(entry, place="__0_0.distcp", length=1):
    """Metadata of one weight whose bytes are at a place."""
    stored = {MetadataIndex(WEIGHT, torch.Size([0])): _StorageInfo(place, 0, length)}
    stored |= {MetadataIndex(WEIGHT): _StorageInfo(place, 0, length)}
    return Metadata({WEIGHT: entry}, storage_data=stored)


def tensor_entry(size=1):
    whole = ChunkStorageMetadata(torch.Size([0]), torch.Size([size]))
    return TensorStorageMetadata(TensorProperties(), torch.Size([size]), [whole])


def by_an_entry_of_bytes(folder, mark):
    """Metadata of torch's own classes: torch unpickles an entry of bytes, which here claims the size of a tensor."""
    torch.save(Runs(mark), folder / "__0_0.distcp")
    entry = BytesStorageMetadata()
    entry.size, entry.properties = torch.Size([1]), TensorProperties()
    length = (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata_of(entry, length=length)))


def by_a_function_in_the_metadata(folder, mark):
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(mark)))


SHARDS = [by_a_dotted_name, by_an_entry_of_bytes, by_a_function_in_the_metadata]
WITH_SHARDS = {
    "generate": "generate --policy {evil} --prompt hi",
    "export": "export --policy {evil} --output_dir {out}",
    "evaluate": "evaluate --policies p={evil} --sft {evil} --dataset {data} --eval_prompts 2 --output_dir {out}",
    "ppo": "ppo --sft {evil} --dataset tiny-tldr --size 40 --reward gold --updates 1 --batch_size 4 --output_dir {out}",
    "reward model": "ppo --sft {evil} --rm {evil} --dataset {data} --updates 1 --batch_size 4 --output_dir {out}",
}


@pytest.fixture
def evil(tiny, tmp_path):
    """A function that makes a folder which looks like a checkpoint of several processes, by one of `SHARDS`."""

    def make(way):
        folder, mark = tmp_path / "evil", tmp_path / "it-ran"
        folder.mkdir()
        shutil.copy(f"{tiny.model}/config.json", folder)
        way(folder, mark)
        return folder, mark

    return make


@pytest.mark.parametrize("way", SHARDS)
def test_the_attack_by_shards_works_on_a_reader_without_doors(evil, way):
    """Else the tests below would pass whatever the doors do."""
    folder, mark = evil(way)
    if way is by_an_entry_of_bytes:
        torch.load(folder / "__0_0.distcp", weights_only=False)
    else:
        with open(folder / ".metadata", "rb") as file:
            pickle.load(file)
    assert mark.is_dir()


@pytest.mark.parametrize("command", WITH_SHARDS)
@pytest.mark.parametrize("way", SHARDS)
def test_no_shard_runs_code(evil, tiny, pairs, tmp_path, capsys, way, command):
    folder, mark = evil(way)
    words = WITH_SHARDS[command].format(evil=folder, data=pairs, out=tmp_path / "out").split()
    assert main([*words, "--model", tiny.model, "--finetune", "full"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert not mark.exists() and str(folder) in error, error


def test_resume_reads_no_code_in_shards(tiny, sft, tmp_path, capsys):
    """Of a run that somebody else gave away, whose last checkpoint is a folder of shards."""
    words = (
        f"ppo --sft {sft} --dataset tiny-tldr --size 40 --reward gold --updates 1 --batch_size 4"
    )
    run, mark = tmp_path / "run", tmp_path / "it-ran"
    assert not main([*words.split(), "--model", tiny.model, "--output_dir", str(run)])
    (whole,) = run.rglob("update-000001.pt")
    for way in SHARDS:
        folder = whole.with_name("update-000002")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        way(folder, mark)
        state = torch.load(whole, weights_only=True)
        del state["tensors"]
        torch.save(state, folder / "state.pt")
        seal(folder)
        (run / "ppo" / "done.json").unlink(missing_ok=True)
        assert main(["ppo", "--resume", str(run), "--updates", "3"]) == 2
        assert "update-000002: it is damaged" in capsys.readouterr().err and not mark.exists()


@pytest.mark.parametrize("way", SHARDS)
def test_torch_reads_no_code_while_a_stage_is_resumed(evil, way):
    """Accelerate reads the checkpoints of stages by torch's own reader, numbers of an optimizer among them."""
    folder, mark = evil(way)
    with torch_reads_no_code(), pytest.raises(checkpoint.api.CheckpointException):
        checkpoint.load({WEIGHT: 0.0}, checkpoint_id=str(folder))
    assert not mark.exists()
    shutil.rmtree(folder)
    checkpoint.save({"lr": 0.5, "betas": [1, 2], WEIGHT: torch.ones(2)}, checkpoint_id=str(folder))
    read = {"lr": 0.0, "betas": [0, 0], WEIGHT: torch.zeros(2)}
    with torch_reads_no_code():
        checkpoint.load(read, checkpoint_id=str(folder))
    assert read["lr"] == 0.5 and read["betas"] == [1, 2] and read[WEIGHT].tolist() == [1, 1]


def _with(**changes):
    """Metadata of a weight with a changed part of its entry."""
    entry = tensor_entry()
    vars(entry).update(changes)
    return metadata_of(entry)


class Subclass(TensorStorageMetadata):
    pass


NOT_OF_THE_FOLDER = {
    "above": lambda: metadata_of(tensor_entry(), "../outside.distcp"),
    "absolute": lambda: metadata_of(tensor_entry(), "/etc/passwd"),
    "not a path": lambda: metadata_of(tensor_entry(), 3),
    "larger than its files": lambda: metadata_of(tensor_entry(10**15)),
    "bytes": lambda: metadata_of(BytesStorageMetadata()),
    "a subclass": lambda: metadata_of(Subclass(TensorProperties(), torch.Size([0]), [])),
    "not a dtype": lambda: _with(properties=TensorProperties(dtype="float32")),
    "a part of it is nowhere": lambda: _with(chunks=[]),
    "no metadata": lambda: {WEIGHT: tensor_entry()},
}


@pytest.mark.parametrize("what", NOT_OF_THE_FOLDER)
def test_metadata_describe_tensors_in_their_folder_alone(tmp_path, what):
    write_shards({WEIGHT: torch.ones(1)}, tmp_path)
    assert read_metadata(tmp_path).state_dict_metadata[WEIGHT].size == torch.Size([1])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(NOT_OF_THE_FOLDER[what]()))
    with pytest.raises(InputError, match="damaged"):
        read_metadata(tmp_path)


# -- other pickles, kernels of the hub, and links out of a run ---------------------------------------------------------

WEIGHTS_AS_PICKLES = {
    "adapter": "generate --model {base} --policy {evil} --prompt Hi",
    "base": "sft --model {evil} --dataset {data} --output_dir {out}",
    "base of all weights": "sft --finetune full --model {evil} --dataset {data} --output_dir {out}",
}


@pytest.mark.parametrize("what", WEIGHTS_AS_PICKLES)
def test_no_file_of_weights_runs_code(what, tiny, sft, pairs, tmp_path, capsys):
    """Nor does the line tell how to run it, as torch's own message does."""
    source, name = (sft, "adapter_model") if what == "adapter" else (tiny.model, "pytorch_model")
    folder, mark = shutil.copytree(source, tmp_path / "evil"), tmp_path / "it-ran"
    for file in (*folder.glob("*.safetensors"), *folder.glob("hashes.json")):
        file.unlink()
    torch.save(Runs(mark), folder / f"{name}.bin")
    words = WEIGHTS_AS_PICKLES[what]
    words = words.format(base=tiny.model, evil=folder, data=pairs, out=tmp_path / "out")
    assert main(words.split()) == 2 and not mark.exists()
    error = capsys.readouterr().err.splitlines()[-1]
    assert "holds more than numbers" in error and ".safetensors" in error
    assert "weights_only" not in error


@pytest.mark.parametrize("command", ["ppo", "dpo"])
def test_no_file_of_a_checkpoint_runs_code(command, tiny, sft, pairs, tmp_path, capsys):
    """Of a run that somebody else gave away, with the right seal; the trainers of transformers read four files."""
    run, mark = tmp_path / "run", tmp_path / "it-ran"
    words = f"{command} --model {tiny.model} --sft {sft} --dataset {pairs} --output_dir {run}"
    if command == "ppo":
        words += " --critic_init sft --updates 1 --batch_size 4"
        words += " --max_response_length 4 --reward tests_reward:short"
    else:
        words += " --dpo_batch_size 4"
    sys.modules["tests_reward"] = types.ModuleType("tests_reward")
    sys.modules["tests_reward"].short = short_is_better
    assert not main([*words.split(), "--checkpoint_every", "1"])
    (run / command / "done.json").unlink()
    shutil.rmtree(run / command / "policy")
    *earlier, place = sorted((run / command / "checkpoints").iterdir())
    files = [place]
    if command == "dpo":  # one before the end, from which something is left to train
        shutil.rmtree(place)
        place = earlier[-1]
    if place.is_dir():
        files = [place / "optimizer.pt", place / "scheduler.pt", place / "rng_state.pth"]
    for file in files:
        whole = file.read_bytes()
        torch.save(Runs(mark), file)
        seal(place)
        again = [command, "--resume", str(run)]
        if command == "ppo":
            again += ["--reward", "tests_reward:short", "--updates", "2"]
        assert main(again) == 2 and not mark.exists()
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"{place}: " in error and "more than numbers" in error, error
        file.write_bytes(whole)


def short_is_better(prompts, responses):
    return [-len(response) / 50 for response in responses]


def test_a_config_that_names_a_kernel_of_the_hub_is_refused(tiny, pairs, tmp_path, capsys):
    folder = shutil.copytree(tiny.model, tmp_path / "evil")
    values = json.loads((folder / "config.json").read_text())
    for name in ("attn_implementation", "_attn_implementation"):
        (folder / "config.json").write_text(json.dumps(values | {name: "somebody/kernel"}))
        words = f"sft --model {folder} --dataset {pairs} --output_dir {tmp_path}/out"
        for finetune in ("lora", "full"):
            assert main([*words.split(), "--finetune", finetune]) == 2
            error = capsys.readouterr().err.splitlines()[-1]
            assert "names code of the hub (somebody/kernel)" in error, error


LINKS = ["ppo/policy", "ppo/samples.jsonl", "ppo/checkpoints", "ppo"]


@pytest.mark.parametrize("link", LINKS)
def test_a_link_out_of_a_run_is_not_followed(link, tmp_path):
    """A command that goes on there would shorten files, and delete folders, of its user."""
    run, home = tmp_path / "run", tmp_path / "home"
    RunFolder.create(run, {})
    home.mkdir()
    (home / "diary").write_text("Dear diary")
    (run / link).parent.mkdir(exist_ok=True)
    (run / link).symlink_to(home)
    with RunLock() as lock, pytest.raises(InputError, match="a link that leads out of the run"):
        lock.take(run)
    assert [file.name for file in home.iterdir()] == ["diary"]
    (run / link).unlink()
    (run / "inside").symlink_to(run / "manifest.json")  # this one may be
    with RunLock() as lock:
        lock.take(run)


# -- chat templates that compute without end --------------------------------------------------------------------------

WITHOUT_END = {
    "a power": "{{ 3 ** (10 ** 8) }}",
    "a power of a name": "{% set n = 10 ** 8 %}{{ 3 ** n }}",
    "squares": "{% set x = namespace(n=9) %}{% for i in range(60) %}{% set x.n = x.n * x.n %}{% endfor %}",
    "a long text": "{{ 'a' * 10 ** 10 }}",
    "a doubled text": "{% set x = namespace(t='ab') %}{% for i in range(60) %}{% set x.t = x.t + x.t %}{% endfor %}",
    "a wide format": "{{ '%09999999999d' % 1 }}",
    "loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}"
    + "{% endfor %}" * 3,
}


@pytest.mark.parametrize("what", WITHOUT_END)
def test_a_template_that_computes_without_end_is_one_line(what, tokenizer, monkeypatch):
    """Where one operation takes long, neither a signal nor Ctrl-C would be heard before it ends."""
    monkeypatch.setattr(chats, "SECONDS", 0.5)
    own = copy.deepcopy(tokenizer)
    own.chat_template = WITHOUT_END[what] + "{{ messages[0].content }}"
    begin = time.monotonic()
    with pytest.raises(InputError, match="--chat_template auto: "):
        chats.chat_writer(own, "auto")([{"role": "user", "content": "Hi"}])
    assert time.monotonic() - begin < 5


CHAT = (
    "{% for m in messages %}{{ bos_token if loop.first }}<{{ m.role }}>{{ '-' * 3 + m.content }}"
    "{{ '%s!' % loop.index0 }}{{ eos_token }}{{ 2 ** 3 * 4 }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("prompts", [False, True])
def test_templates_write_what_transformers_writes(tokenizer, prompts):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So."}]
    right = tokenizer.apply_chat_template(
        messages, chat_template=CHAT, tokenize=False, add_generation_prompt=prompts
    )
    assert render(tokenizer, messages, CHAT, add_generation_prompt=prompts) == right


# -- escape sequences -------------------------------------------------------------------------------------------------

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
