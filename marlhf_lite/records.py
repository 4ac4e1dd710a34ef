"""A run is a folder: what was asked (config.yaml), what happened (metrics.jsonl), what was written (samples.jsonl).

Pictures, reports and notebooks read these files, never a terminal's output.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from marlhf_lite.errors import InputError

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "marlhf_lite")
CONFIG, METRICS, SAMPLES = "config.yaml", "metrics.jsonl", "samples.jsonl"


class RunFolder:
    """One run on disk, at `path`; `config` is what config.yaml holds. Make it with `create` or `open`."""

    def __init__(self, path: Path, config: dict):
        self.path = path
        self.config = config

    @classmethod
    def create(cls, path: str | Path, config: Mapping, overwrite: bool = False) -> "RunFolder":
        """A new folder with config.yaml: the config as given and an `environment` block (see `environment`).

        Args:
            path: a folder that is empty or not there yet; its parents are made.
            config: names to numbers, strings, lists or dicts. Tuples become lists, paths and names become strings.
                An `environment` from an earlier run is replaced.
            overwrite: empties the folder first, if it holds a run; checkpoints and all.

        Raises:
            InputError: the folder has something in it, `overwrite` would remove something that is no run, or the
                config holds something YAML cannot.
        """
        path = Path(path)
        config = _plain(dict(config), "config", strict=False) | {"environment": environment()}
        _make_empty(path, overwrite)
        _write_atomically(path / CONFIG, yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode())
        return cls(path, config)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run, to read or to log more into. Raises InputError if it or its config is missing or broken."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            what = f"it has no {CONFIG}" if path.is_dir() else "there is no such folder"
            raise InputError(f"{path} is not a run ({what}): give the --output_dir of a training run")
        return cls(path, _read_config(path / CONFIG))

    def log_metrics(self, row: Mapping) -> None:
        """Adds a line to metrics.jsonl: names to numbers, also tensors or numpy's. NaN and ±inf become null.

        Raises InputError for a value that JSON cannot hold.
        """
        _append(self.path / METRICS, [row])

    def log_samples(self, rows: Iterable[Mapping]) -> None:
        """Adds a line to samples.jsonl for each row; see `log_metrics`."""
        _append(self.path / SAMPLES, rows)

    def metrics(self) -> list[dict]:
        """The rows of metrics.jsonl, in order; none if nothing was logged yet. A cut-off last line is left out.

        Raises InputError for a broken line, with its file and number.
        """
        return _read_lines(self.path / METRICS)

    def samples(self) -> list[dict]:
        """The rows of samples.jsonl; see `metrics`."""
        return _read_lines(self.path / SAMPLES)


def write_json(path: str | Path, obj: Any) -> None:
    """Writes `obj` as strict JSON, for result files: whole or not at all, never half; NaN and ±inf become null.

    Takes what `RunFolder.log_metrics` takes, and raises as it does; parents are made.
    """
    path = Path(path)
    text = json.dumps(_plain(obj, path.name, strict=True), ensure_ascii=False, allow_nan=False, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_atomically(path, _encode(text))


def environment() -> dict:
    """What a result depends on besides its config: versions, commit, date (UTC), platform and threads.

    A package that is missing has version None; outside a git checkout `git_commit` and `git_dirty` are None. Dirty
    means that a tracked file differs from the commit.
    """
    import torch  # here, because reading records needs no torch

    commit = _git("rev-parse", "HEAD") if _git("ls-files", "--error-unmatch", Path(__file__).name) else None
    status = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "git_commit": commit,
        "git_dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git says in this file's folder; None if it fails, is not there, or takes too long."""
    # Without the lock, asking never gets in the way of a commit made at the same time.
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _make_empty(path: Path, overwrite: bool) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        inside = list(path.iterdir())
    except OSError as error:
        raise InputError(f"--output_dir {path} cannot be made ({error.strerror}): choose another name") from None
    if inside and not overwrite:
        raise InputError(f"--output_dir {path} exists already: choose another name, or add --overwrite")
    if inside and not _is_run(path):
        raise InputError(f"--output_dir {path} holds something that is not a run: choose another name, or empty it")
    # The config goes last: interrupted here, the rest is still a run that can be overwritten.
    for item in sorted(inside, key=lambda item: item.name == CONFIG):
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()


def _is_run(path: Path) -> bool:
    """Many projects have a config.yaml; ours says which environment wrote it."""
    try:
        return "environment" in _read_config(path / CONFIG)
    except (OSError, InputError):
        return False


def _read_config(path: Path) -> dict:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML ({' '.join(str(error).split())}): mend it") from None
    if isinstance(config, dict):
        return config
    raise InputError(f"{path} holds no names and values: mend it")


def _write_atomically(path: Path, data: bytes) -> None:
    """A reader, or a run that is killed, sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _append(path: Path, rows: Iterable[Mapping]) -> None:
    lines = [_encode(json.dumps(_plain(row, path.name, strict=True), ensure_ascii=False) + "\n") for row in rows]
    # Unbuffered: each write is one call to the system, which a signal or a kill does not split.
    with open(path, "a+b", buffering=0) as file:
        _mend_end(file)
        for line in lines:
            if file.write(line) != len(line):
                raise OSError(f"{path}: only part of a line was written; is the disk full?")


def _mend_end(file: Any) -> None:
    """Cuts off a last line that a crash left unfinished; ends one that only lacks its line break."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    last = file.read().rsplit(b"\n", 1)[-1]
    if _parse(last) is None:
        file.truncate(end - len(last))
    else:
        file.write(b"\n")


def _read_lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    rows = [_parse(line) for line in lines]
    if None in rows:
        raise InputError(f"{path}, line {rows.index(None) + 1}: not a JSON object: mend or delete the line")
    unfinished = _parse(last)
    return rows if unfinished is None else [*rows, unfinished]


def _parse(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    return row if isinstance(row, dict) else None


def _encode(text: str) -> bytes:
    # A model may emit half a surrogate pair, which UTF-8 has no bytes for; its escape reads back as the same.
    return text.encode("utf-8", errors="backslashreplace")


def _plain(value: Any, where: str, strict: bool) -> Any:
    """`value` of plain Python types alone; `strict` JSON has no NaN or ±inf."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}: {key}", strict) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, strict) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return _plain(value.tolist(), where, strict)
    if isinstance(value, float):
        return None if strict and not math.isfinite(value) else float(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | str):
        return int(value) if isinstance(value, int) else str.__str__(value)  # YAML takes no subclass, such as an enum
    raise InputError(f"{where} is a {type(value).__name__}: give numbers, strings, lists or dicts of them")
