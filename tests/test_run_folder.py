import datetime
import errno
import fcntl
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import fails
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marlhf_lite.cli import main
from marlhf_lite.utils import run_folder
from marlhf_lite.utils.errors import InputError, disk_fault
from marlhf_lite.utils.jsonl import append_lines, write_json
from marlhf_lite.utils.run_folder import (
    RunFolder,
    RunLock,
    check_output_dir,
    environment,
    is_run,
    run_of,
)
from marlhf_lite.utils.seals import atomic_folder

CONFIG = {
    "task": "tldr",
    "n": 5,
    "learning_rate": 1e-5,
    "lengths": (2, 3),
    "clip": None,
    "name": "größer",
}


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "x", CONFIG)


def test_config_is_written_in_order_with_what_ran(run):
    text = (run.path / "config.yaml").read_text(encoding="utf-8")
    found = yaml.safe_load(text)
    assert list(found) == [*CONFIG, "versions"] and "größer" in text
    assert {key: found[key] for key in CONFIG} == CONFIG | {"lengths": [2, 3]}
    assert found == run.config == RunFolder.open(run.path).config
    assert sorted(os.listdir(run.path)) == ["config.yaml", "manifest.json"]
    versions = found["versions"]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3])) and versions["processor"]
    assert (versions["torch"], versions["threads"]) == (
        metadata.version("torch"),
        torch.get_num_threads(),
    )
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(versions["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=1)


HOLDS = """
import sys, time
from pathlib import Path
from marlhf_lite.utils.run_folder import RunLock

lock = RunLock()
lock.take(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


def test_a_run_is_used_by_one_process_and_a_killed_one_blocks_nobody(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        check_output_dir(tmp_path)  # a lock alone is no content
        fails(
            lambda: RunLock().take(tmp_path),
            f"{tmp_path}: another process works in it",
            "stop it",
            "delete .lock",
        )
        other.kill()
    with RunLock() as lock:
        lock.take(tmp_path)
        lock.take(tmp_path)  # its own does not keep it out
        RunFolder.create(tmp_path, CONFIG)
        fails(lambda: RunLock().take(tmp_path), "another process")
    with RunLock() as lock:
        lock.take(tmp_path)


def test_git_commit_and_dirty(git, tmp_path, monkeypatch):
    """Results of studies, untracked files and another project's commit do not count."""
    copy, result = (
        tmp_path / "package" / "records.py",
        tmp_path / "data" / "results" / "result.json",
    )
    for file in (copy, result):
        file.parent.mkdir(parents=True)
        file.write_text("")
    monkeypatch.setattr(run_folder, "__file__", str(copy))

    def found():
        return environment()["git_commit"], environment()["git_dirty"]

    assert found() == (None, None)
    git("init")
    git("commit", "--allow-empty", "-m", "another project, with this package installed inside it")
    assert found() == (None, None)
    git("add", ".")
    git("commit", "-m", "this project")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("")
    result.write_text("of another run")
    assert found() == (commit, False)
    copy.write_text("changed")
    assert found() == (commit, True)
    monkeypatch.setenv("PATH", "")
    assert found() == (None, None)


def test_what_is_there_is_never_overwritten(run, tmp_path):
    """Neither a run, also one that a process works in, nor an exported model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for folder in (run.path, model):
        for make in (check_output_dir, lambda path: RunFolder.create(path, CONFIG)):
            fails(
                lambda m=make, f=folder: m(f),
                f"{folder}: exists already",
                "choose another name, or delete",
            )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "task is missing, but the run has tldr"),
        ("task: tldr\nn: 5\n", "learning_rate is missing"),
        ("a: [1", "config.yaml: not YAML"),
        ("just words", "config.yaml: a str"),
    ],
)
def test_a_config_that_is_not_as_it_was_written_is_named_and_not_read(run, text, said):
    """Neither an empty file, nor half of one, nor an edited one may pass for the options of the run."""
    file = run.path / "config.yaml"
    whole = file.read_text()
    file.write_text(text)
    fails(lambda: RunFolder.open(run.path), str(file), said)
    file.write_text(whole.replace("n: 5", "n: 6"))
    fails(
        lambda: RunFolder.open(run.path),
        "config.yaml: n is 6, but the run has 5: restore it, or delete config.yaml",
    )
    file.unlink()  # as after a kill
    again = RunFolder.open(run.path)
    assert again.config == run.config
    again.update_config({"n": 7})
    assert yaml.safe_load(file.read_text())["n"] == RunFolder.open(run.path).config["n"] == 7


def test_a_run_without_its_manifest_is_refused(run, tmp_path):
    fails(lambda: RunFolder.open(tmp_path / "none"), "no such folder")
    fails(lambda: RunFolder.open(tmp_path), "not a run (it has no manifest.json)")
    manifest = run.path / "manifest.json"
    whole = manifest.read_text()
    for text in ("", whole[: len(whole) // 2]):
        manifest.write_text(text)
        for use in (RunFolder.open, is_run, run_of):
            fails(lambda u=use: u(run.path), "manifest.json is damaged", "make the run again")
    for text in ("[]", '{"options": {}}'):  # another project's
        manifest.write_text(text)
        assert not is_run(run.path)
    manifest.unlink()
    fails(lambda: RunFolder.open(run.path), "not a run (it has no manifest.json)")


CRAFTED = [
    ("options", None),
    ("options", ["n"]),
    ("date", 5),
    ("date", "tomorrow"),
    ("contents", []),
    ("contents", {"data": "text"}),
    ("contents", {"data": {"place": "x"}}),
    ("contents", {"data": {"place": "x", "hash": 1}}),
    ("accepted", {}),
    ("accepted", ["data"]),
    ("command", 3),
    ("options", {"versions": "1.0"}),
]


@pytest.mark.parametrize(("name", "value"), CRAFTED)
def test_a_manifest_of_other_types_is_damaged(run, name, value):
    """Whatever it was made for: later steps find what they rely on, or the reader says so in one line."""
    manifest = json.loads((run.path / "manifest.json").read_text())
    (run.path / "manifest.json").write_text(json.dumps(manifest | {name: value}))
    for use in (RunFolder.open, is_run, run_of):
        fails(lambda u=use: u(run.path), "manifest.json is damaged", "make the run again")


def test_lists_that_lie_deep_are_damage_and_no_traceback(run):
    deep = "[" * 100_000 + "]" * 100_000
    (run.path / "manifest.json").write_text(f'{{"options": {deep}}}')
    fails(lambda: RunFolder.open(run.path), "manifest.json is damaged")
    for text in (f"n: {deep}", "day: 2026-13-45"):
        (run.path / "my.yaml").write_text(text)
        fails(lambda: run_folder.read_yaml(run.path / "my.yaml"), "my.yaml: not YAML")


def test_what_a_killed_writer_leaves_is_removed_by_the_next_command_in_its_run(tmp_path):
    """Be it the start of the run, a file of a stage, or a folder of weights; nothing else is removed."""
    run = tmp_path / "run"
    for killed_in_the_first_write in (True, False):
        subprocess.run([sys.executable, "-c", DIES, run], check=False)
        (half,) = (run / ".unfinished").iterdir()
        assert half.name.endswith(".tmp") and is_run(run) != killed_in_the_first_write
        if killed_in_the_first_write:
            check_output_dir(run)
            with RunLock() as lock:
                lock.take(run)
                assert RunFolder.create(run, CONFIG).config == RunFolder.open(run).config
        else:
            (run / ".mine.tmp").touch()
            with RunLock() as lock:
                lock.take(run)
                left = {path.name for path in run.iterdir()}
                assert left == {".lock", ".mine.tmp", "manifest.json"}
    assert not (run / ".unfinished").exists()


DIES = """
import os, signal, sys
from pathlib import Path
from marlhf_lite.utils import jsonl
from marlhf_lite.utils.run_folder import RunFolder, RunLock

run = Path(sys.argv[1])
lock = RunLock()
lock.take(run)
jsonl.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
RunFolder.open(run).update_config({"n": 7}) if (run / "manifest.json").exists() else RunFolder.create(run, {"n": 5})
"""


def test_no_command_removes_a_file_that_it_did_not_write(tmp_path, monkeypatch, capsys):
    """A user's hidden files, and what another run writes just now: `judge` in the folder above, and the same run."""
    other = tmp_path / "runs" / "live"
    with RunLock() as live:
        live.take(other)
        RunFolder.create(other, CONFIG)
        with atomic_folder(other / "policy") as half, RunLock() as lock:
            half.mkdir()
            mine = [tmp_path / ".notes.tmp", tmp_path / "deep" / ".session.tmp" / "keep"]
            mine[1].mkdir(parents=True)
            mine[0].touch()
            lock.take(tmp_path)
            monkeypatch.chdir(tmp_path)
            assert main(["judge", "--output_dir", "deep"]) == 2
            assert half.is_dir() and all(path.exists() for path in mine)
            assert capsys.readouterr().err
    assert (other / "policy").is_dir()
    with RunLock() as lock:
        lock.take(other)
        assert (other / "policy").is_dir()


def test_a_lock_that_cannot_be_taken_is_an_error_and_a_disk_without_locks_a_note(
    tmp_path, monkeypatch, capsys
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    (tmp_path / ".lock").symlink_to(elsewhere)
    fails(lambda: RunLock().take(tmp_path), f"{tmp_path}/.lock: cannot be locked", "delete it")
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()
    fails(lambda: RunLock().take(tmp_path), f"{tmp_path}/.lock: cannot be locked")
    (tmp_path / ".lock").rmdir()
    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO, errno.EACCES):
        (tmp_path / ".lock").unlink(missing_ok=True)
        failing_lock(monkeypatch, number)
        lock = RunLock()
        if number in (errno.EIO, errno.EACCES):
            fails(lambda lock=lock: lock.take(tmp_path), ".lock: cannot be locked")
        else:
            lock.take(tmp_path)
            assert not lock.taken and "this disk has no locks" in capsys.readouterr().out


def failing_lock(monkeypatch, number):
    """The operating system refuses every lock with this error."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    if number == errno.EACCES:  # at the opening of another user's lock
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.setattr(fcntl, "flock", refuse)


def test_rows_come_back_as_plain_strict_json(run):
    assert run.metrics() == run.samples() == []
    row = {
        "update": np.int64(1),
        "loss": torch.tensor(0.5, requires_grad=True),
        "half": torch.tensor(0.25, dtype=torch.bfloat16),
        "norm": np.float32("inf"),
        "kl": float("nan"),
        "curve": np.array([1.0, np.nan]),
        "done": np.True_,
    }
    run.log("metrics", [row, {"update": 2}])
    first = {
        "update": 1,
        "loss": 0.5,
        "half": 0.25,
        "norm": None,
        "kl": None,
        "curve": [1.0, None],
        "done": True,
    }
    assert run.metrics() == RunFolder.open(run.path).metrics() == [first, {"update": 2}]
    text = (run.path / "metrics.jsonl").read_text()
    assert text.count("\n") == 2 and "NaN" not in text and "Infinity" not in text
    assert type(run.metrics()[0]["update"]) is int


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(codec=None, exclude_categories=()), max_size=20))
@example("a\nb\r\u2028\x85c\ud800 ’")
def test_any_text_comes_back(tmp_path_factory, text):
    run = RunFolder(tmp_path_factory.mktemp("run"), {})
    run.log("samples", [{"response": text}, {"response": "next"}])
    assert run.samples() == [{"response": text}, {"response": "next"}]


@pytest.mark.parametrize("row", [{"model": object()}, {"deep": {"set": {1}}}, {"bytes": b""}])
def test_what_json_cannot_hold_is_named(run, row):
    fails(lambda: run.log("metrics", [row]), "metrics.jsonl: a value of type ")
    assert run.metrics() == []
    fails(lambda: RunFolder.create(run.path.parent / "y", row), "config: a value of type ")
    assert not (run.path.parent / "y").exists()


@given(cut=st.integers(0, 60))
def test_a_cut_last_line_is_skipped_and_the_next_append_begins_a_new_one(tmp_path_factory, cut):
    run = RunFolder(tmp_path_factory.mktemp("run"), {})
    rows = [{"update": update, "text": "größer"} for update in (1, 2)]
    for row in rows:
        run.log("metrics", [row])
    file = run.path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: max(0, len(whole) - cut)])
    left = run.metrics()
    assert left == rows[: len(left)] and len(left) == (
        2 if cut <= 1 else 1 if cut <= len(whole) // 2 + 1 else 0
    )
    run.log("metrics", [{"update": 3}])
    assert run.metrics() == [*left, {"update": 3}]


@pytest.mark.parametrize("broken", ['{"update": 2', "[1]", "", "\udcff"])
def test_broken_line_in_the_middle_is_named(run, broken):
    line = broken.encode(errors="surrogateescape")
    (run.path / "metrics.jsonl").write_bytes(b'{"update": 1}\n' + line + b'\n{"update": 3}\n')
    with pytest.raises(InputError, match="metrics.jsonl, line 2: "):
        run.metrics()


def test_write_json_is_strict_and_atomic(tmp_path, monkeypatch):
    path = tmp_path / "results" / "x.json"
    write_json(path, {"score": np.float32(0.5), "curve": (1.0, float("inf")), 5: path})
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "score": 0.5,
        "curve": [1.0, None],
        "5": str(path),
    }
    before = path.read_bytes()
    with pytest.raises(InputError, match="x.json: a value of type object"):
        write_json(path, {"model": object()})
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"score": 1})
    assert path.read_bytes() == before and os.listdir(path.parent) == ["x.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_no_silent_loss(run):
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    for write in (
        lambda: run.log("metrics", [{"update": 1}]),
        lambda: append_lines(Path("/dev/full"), [{"update": 1}]),
    ):
        with pytest.raises(OSError) as error:
            write()
        assert "free some disk space" in disk_fault(
            error.value
        ) and error.value.filename in disk_fault(error.value)


@pytest.mark.skipif(
    not os.path.exists("/proc/self"),
    reason="needs a folder that takes no files, whatever its rights",
)
def test_a_folder_that_takes_no_files_is_named(tmp_path, monkeypatch):
    for path in (Path("/proc/x"), Path("/proc/x/y")):
        fails(
            lambda: check_output_dir(path),  # noqa: B023
            f"--output_dir {path}: cannot be made",
            "written in /proc",
            "choose",
        )

    def read_only(**unused):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(run_folder.tempfile, "TemporaryFile", read_only)
    fails(
        lambda: check_output_dir(tmp_path / "x"),
        f"written in {tmp_path}",
        "choose a folder that can be written",
    )
