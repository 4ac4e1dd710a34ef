"""A run is a folder: what was asked (config.yaml), what happened (metrics.jsonl), what was written (samples.jsonl).

Pictures, reports and notebooks read these files, never a terminal's output.
"""

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines, plain, read_lines, write_atomically

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "marlhf_lite")
CONFIG, METRICS, SAMPLES, TESTS = "config.yaml", "metrics.jsonl", "samples.jsonl", "tests.jsonl"


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
        config = plain(dict(config), "config", strict=False) | {"environment": environment()}
        _make_empty(path, overwrite)
        _write_config(path, config)
        return cls(path, config)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run, to read or to log more into. Raises InputError if it or its config is missing or broken."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            what = f"it has no {CONFIG}" if path.is_dir() else "there is no such folder"
            raise InputError(f"{path} is not a run ({what}): give the --output_dir of a training run")
        return cls(path, _read_config(path / CONFIG))

    def amend(self, changes: Mapping) -> None:
        """Writes config.yaml again with these values; its `environment` stays that of the start."""
        self.config |= plain(dict(changes), "config", strict=False)
        _write_config(self.path, self.config)

    def log_metrics(self, row: Mapping) -> None:
        """Adds a line to metrics.jsonl: names to numbers, also tensors or numpy's. NaN and ±inf become null.

        Raises InputError for a value that JSON cannot hold.
        """
        append_lines(self.path / METRICS, [row])

    def log_samples(self, rows: Iterable[Mapping]) -> None:
        """Adds a line to samples.jsonl for each row; see `log_metrics`."""
        append_lines(self.path / SAMPLES, rows)

    def metrics(self) -> list[dict]:
        """The rows of metrics.jsonl, in order; none if nothing was logged yet. A cut-off last line is left out.

        Raises InputError for a broken line, with its file and number.
        """
        return read_lines(self.path / METRICS)

    def samples(self) -> list[dict]:
        """The rows of samples.jsonl; see `metrics`."""
        return read_lines(self.path / SAMPLES)

    def log_tests(self, row: Mapping) -> None:
        """Adds a line to tests.jsonl, the scores on held-out prompts while training; see `log_metrics`."""
        append_lines(self.path / TESTS, [row])

    def tests(self) -> list[dict]:
        """The rows of tests.jsonl; see `metrics`."""
        return read_lines(self.path / TESTS)

    def position(self) -> dict[str, int]:
        """How many bytes each of the logs holds: what a checkpoint remembers."""
        paths = {name: self.path / name for name in (METRICS, SAMPLES, TESTS)}
        return {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}

    def rewind(self, position: Mapping[str, int]) -> None:
        """Cuts the logs back to an earlier `position`, when a run goes on from there.

        Raises InputError where a log is shorter than it was: then it is not the checkpoint's.
        """
        now = self.position()
        for name, size in position.items():
            if now.get(name, 0) < size:
                raise InputError(f"{self.path / name} is shorter than its checkpoint says: it was edited, start again")
        for name, size in position.items():
            if now[name] > size:
                os.truncate(self.path / name, size)


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
    if inside and not is_run(path):
        raise InputError(f"--output_dir {path} holds something that is not a run: choose another name, or empty it")
    # The config goes last: interrupted here, the rest is still a run that can be overwritten.
    for item in sorted(inside, key=lambda item: item.name == CONFIG):
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()


def is_run(path: Path) -> bool:
    """Many projects have a config.yaml; ours says which environment wrote it."""
    try:
        return "environment" in _read_config(path / CONFIG)
    except (OSError, InputError):
        return False


def _write_config(path: Path, config: dict) -> None:
    write_atomically(path / CONFIG, yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode())


def _read_config(path: Path) -> dict:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML ({' '.join(str(error).split())}): mend it") from None
    if isinstance(config, dict):
        return config
    raise InputError(f"{path} holds no names and values: mend it")
