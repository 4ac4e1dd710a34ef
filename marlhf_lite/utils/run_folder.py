"""A run is a folder: what it was made from (manifest.json), what was asked (config.yaml), what happened (*.jsonl).

The manifest makes a folder a run. It is written first, and holds

- command: the name of the command that made it, as `ppo` of `marlhf ppo`;
- options: those of the run, with the `versions` of the start. config.yaml is a copy for readers: an edited copy is an
  error, a missing one is written again;
- date: the day that chat templates see as today (`tasks.chats`), fixed when the run starts;
- contents: what the run reads, each by its place and a hash (`experiments.manifest`);
- accepted: the differences that --accept_changed accepted.

A folder without a manifest is no run: adapters and models from elsewhere need none.
Figures, reports and notebooks read the other files: metrics.jsonl, tests.jsonl, samples.jsonl.
"""

import datetime
import errno
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import filelock
import yaml

from marlhf_lite import __version__
from marlhf_lite.utils.errors import DISK_FAULTS, InputError
from marlhf_lite.utils.jsonl import (
    LOCK,
    UNFINISHED,
    append_lines,
    read_lines,
    to_jsonable,
    write_atomically,
)

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")
CONFIG, METRICS, SAMPLES, TESTS = "config.yaml", "metrics.jsonl", "samples.jsonl", "tests.jsonl"
MANIFEST = "manifest.json"
# What makes a file a manifest -> its type.
KEYS_OF_A_MANIFEST = {"options": dict, "date": str, "contents": dict, "accepted": list}
# Errors of disks and systems that have no locks: a run goes on there without one.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def split_paths(text: str) -> list[str]:
    """Return the paths, or entries `name=path`, that commas separate in a text; a path holds no comma."""
    return [path.strip() for path in text.split(",") if path.strip()]


class RunLock(ExitStack):
    """Keep other processes out of a run's folder, from `take` to the end of the `with` block.

    The operating system frees the lock when this process ends, even if it is killed.
    """

    taken = False  # whether this object has locked a folder

    def take(self, path: Path) -> None:
        """Lock a folder, which is made if it is missing. If it is a run, remove what killed writers have left in it.

        On a disk without locks a note is printed, and nothing is locked. Raises `InputError` if another process has
        locked the folder, if it cannot be locked, as with a lock of another user or a link in its place, and for a link
        in a run that leads out of it.
        """
        if self.taken:
            return
        path.mkdir(parents=True, exist_ok=True)
        if is_run(path):
            _check_no_link_leads_out(path)
        lock = _locked(path / LOCK)
        if lock is None:
            print(f"note: {path}: this disk has no locks: start one command at a time in it")
            return
        self.taken = True
        # At the end of the `with` block these are called in reverse order: the lock is freed last.
        self.callback(lock.release)
        self.callback(_remove_if_empty, path / UNFINISHED)
        if is_run(path):
            shutil.rmtree(path / UNFINISHED, ignore_errors=True)


def _locked(file: Path) -> filelock.BaseFileLock | None:
    """Take the lock of this file and return it; return None on a disk without locks.

    Raises `InputError` if another process has the lock, or if the file cannot be locked.
    """
    lock = filelock.FileLock(file)
    try:
        # filelock warns of a disk without locks. The caller prints a note instead.
        with warnings.catch_warnings(action="ignore"):
            lock.acquire(timeout=0)
    except filelock.Timeout:
        what = "another process works in it: wait until it ends, or stop it"
        raise InputError(
            f"{file.parent}: {what} (if no machine runs one, delete {file.name} there)"
        ) from None
    except NotImplementedError:  # how filelock 3 says ENOSYS: the system has no locks
        return None
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        what = f"cannot be locked ({error.strerror}): delete it, or choose another folder"
        raise InputError(f"{file}: {what}") from None
    # For ENOSYS filelock 4 takes a mere file for a lock, which would stay if this process is killed.
    if isinstance(lock, filelock.SoftFileLock):
        lock.release()
        return None
    return lock


def _check_no_link_leads_out(run: Path) -> None:
    """Raise `InputError` for a link inside a run that leads out of it.

    A command writes its logs and replaces folders in a run. If the run came from somebody else and had such a link, the
    command would shorten files and delete folders of the user that are not in the run.
    """
    inside = run.resolve()
    for place in run.rglob("*"):  # which does not follow links
        if place.is_symlink() and not place.resolve().is_relative_to(inside):
            fix = "put a copy of what it leads to in its place"
            raise InputError(f"{place}: a link that leads out of the run: {fix}")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


class RunFolder:
    """One run on disk, at `path`; `config` is the content of config.yaml, and `manifest` the rest of the manifest.

    Make it with `create` or `open`.
    """

    def __init__(self, path: Path, config: dict, manifest: Mapping | None = None):
        self.path = path
        self.config = config
        today = datetime.date.today().isoformat()
        empty = {"command": "", "date": today, "contents": {}, "accepted": []}
        self.manifest = empty | dict(manifest or {})

    @classmethod
    def create(
        cls, path: str | Path, config: Mapping, manifest: Mapping | None = None
    ) -> "RunFolder":
        """Create a run folder with its manifest and config.yaml: the config as given and a `versions` block.

        Args:
            path: a folder that is empty or does not exist yet; parents are created.
            config: names to numbers, strings, lists or dicts. Tuples become lists, paths become strings.
                The `versions` of an earlier run are replaced.
            manifest: the date, the contents of models and data, and the accepted differences. By default the date is
                today, and the rest is empty.

        Raises:
            InputError: the folder cannot be used (see `check_output_dir`), or YAML cannot hold the config.
        """
        path = Path(path)
        config = to_jsonable(dict(config), "config", allow_nan=True) | {"versions": environment()}
        check_output_dir(path)
        path.mkdir(parents=True, exist_ok=True)
        # What a killed start left; `check_output_dir` lets it pass.
        shutil.rmtree(path / UNFINISHED, ignore_errors=True)
        run = cls(path, {}, manifest)
        run.update_config(config)  # writes both files
        return run

    @property
    def is_evaluation(self) -> bool:
        """Whether `marlhf evaluate` made this run.

        Runs of version 1.0 have no `command`. Of these, evaluations are the ones with an option `policies`.
        """
        command = self.manifest["command"]
        return command == "evaluate" or (not command and "policies" in self.config)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open an existing run. Its config.yaml may be missing, because the manifest has the options.

        Raises `InputError` if the run or its manifest is missing or damaged, or if config.yaml was edited.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        if not manifest:
            reason = f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"
            fix = "give the --output_dir of a training run"
            raise InputError(f"{path}: not a run ({reason}): {fix}")
        options = manifest.pop("options")
        if (path / CONFIG).exists():
            _check_copy_of_options(path / CONFIG, options)
        return cls(path, options, manifest)

    def update_config(self, changes: Mapping) -> None:
        """Write manifest and config.yaml again with these values; `versions` stay those of the start."""
        plain = to_jsonable(dict(changes), "config", allow_nan=True)
        self.config |= plain
        # The old config.yaml goes first, so that a kill in between leaves no two files that differ.
        (self.path / CONFIG).unlink(missing_ok=True)
        manifest = self.manifest | {"options": self.config}
        write_atomically(self.path / MANIFEST, json.dumps(manifest, indent=1).encode())
        text = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True)
        write_atomically(self.path / CONFIG, text.encode())

    def log(self, name: str, rows: Iterable[Mapping]) -> None:
        """Append rows to metrics.jsonl, samples.jsonl, or tests.jsonl (scores on held-out prompts during training).

        A row is names to numbers, texts, tensors or arrays; NaN and ±inf become null. Raises `InputError` for a value
        that JSON cannot hold, and `OSError` if the disk is full.
        """
        append_lines(self.path / f"{name}.jsonl", rows)

    def metrics(self) -> list[dict]:
        """Read the rows of metrics.jsonl; none if nothing was logged yet. See `read_lines`."""
        return read_lines(self.path / METRICS)

    def samples(self) -> list[dict]:
        """Read the rows of samples.jsonl; see `metrics`."""
        return read_lines(self.path / SAMPLES)

    def tests(self) -> list[dict]:
        """Read the rows of tests.jsonl; see `metrics`."""
        return read_lines(self.path / TESTS)

    def position(self) -> dict[str, int]:
        """Return the place at which each log ends now: its size in bytes, which a checkpoint stores."""
        position = {}
        for name in (METRICS, SAMPLES, TESTS):
            log = self.path / name
            position[name] = log.stat().st_size if log.exists() else 0
        return position

    def truncate_logs(self, position: Mapping[str, int]) -> None:
        """Cut the logs back to an earlier `position`, which `check_logs` accepts, before a run resumes from there."""
        for name, size in position.items():
            if self.position()[name] > size:
                os.truncate(self.path / name, size)

    def check_logs(self, position: Mapping[str, int]) -> None:
        """Raise `InputError` if a log is shorter than it was at `position`."""
        for name, size in self.position().items():
            if size < position.get(name, 0):
                raise InputError(
                    f"{name} has {size} bytes instead of {position[name]} or more: it was edited"
                )


def _check_copy_of_options(file: Path, options: Mapping) -> None:
    """Raise `InputError` if config.yaml, a copy of a run's options for readers, says something else."""
    shown = read_yaml(file)
    for name in {**options, **shown}:
        # Compared as text, because NaN is not equal to itself, and True is equal to 1.
        if repr(options.get(name)) != repr(shown.get(name)):
            found = shown.get(name, "missing")
            what = f"{name} is {found}, but the run has {options.get(name)}"
            fix = f"restore it, or delete {CONFIG}: the manifest has the options"
            raise InputError(f"{file}: {what}: {fix}")


def check_output_dir(path: Path) -> None:
    """Raise `InputError` if a folder cannot be made or holds anything but a lock and what a killed start left."""
    check_writable("--output_dir", path)
    if path.exists() and any(item.name not in (LOCK, UNFINISHED) for item in path.iterdir()):
        raise InputError(
            f"--output_dir {path}: exists already: choose another name, or delete the folder"
        )


def check_writable(option: str, path: Path) -> None:
    """Raise `InputError` if the folder `path`, which `option` names, cannot be created or written to."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir():
        reason = f"{nearest} is a file"
        raise InputError(f"{option} {path}: cannot be made ({reason}): choose another name")
    try:
        # A file is made as a test, because rights do not tell: an administrator has all of them, even in /proc.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        reason = f"nothing can be written in {nearest}"
        fix = DISK_FAULTS.get(error.errno, "choose another folder")
        raise InputError(f"{option} {path}: cannot be made ({reason}): {fix}") from None


def is_run(path: Path) -> bool:
    """Return whether `path` holds a run of this library. Raises `InputError` for a damaged manifest."""
    return bool(_read_manifest(path))


def _read_manifest(path: Path) -> dict:
    """Return the manifest of a run. It is empty if the file is missing or another project's.

    Raises `InputError` if the manifest is damaged.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError):
        raise _damaged_manifest(path) from None
    is_ours = isinstance(manifest, dict) and KEYS_OF_A_MANIFEST.keys() <= manifest.keys()
    if not is_ours:
        return {}
    if not _has_types_of_a_manifest(manifest):
        raise _damaged_manifest(path)
    return manifest


def _damaged_manifest(path: Path) -> InputError:
    what = "is damaged, which tells what the run was made from"
    return InputError(f"{path}: {MANIFEST} {what}: make the run again, or delete it")


def _has_types_of_a_manifest(manifest: dict) -> bool:
    """Return whether the values in a manifest have the types that a run writes.

    Later steps rely on these types, and a manifest that was edited, or made to harm, may hold anything.
    """
    for name, kind in KEYS_OF_A_MANIFEST.items():
        if not isinstance(manifest[name], kind):
            return False
    if not isinstance(manifest.get("command", ""), str):
        return False
    if not isinstance(manifest["options"].get("versions", {}), dict):
        return False
    for entry in manifest["contents"].values():
        if not isinstance(entry, dict) or not isinstance(entry.get("place"), str):
            return False
        if not isinstance(entry.get("hash"), str):
            return False
    if not all(isinstance(entry, dict) for entry in manifest["accepted"]):
        return False
    try:
        datetime.date.fromisoformat(manifest["date"])
    except ValueError:
        return False
    return True


@contextmanager
def vanished_run_named(path: Path) -> Iterator[None]:
    """Make any error in this block an `InputError` that says so if the run at `path` is no longer there.

    Somebody may have deleted or moved its folder, or its disk may be gone. What fails first then is a matter of chance.
    """
    try:
        yield
    except Exception as error:
        if is_run(path):
            raise
        what = "the run's folder is gone, in which this command writes"
        raise InputError(f"{path}: {what}: give the command again") from error


def run_of(folder: Path) -> Path | None:
    """Return the run that a folder is, or in which it is the folder of a stage or a policy; None if there is none."""
    for place in (folder, *folder.parents[:2]):  # at most run / stage / policy
        if is_run(place):
            return place
    return None


def read_yaml(path: Path, source: str = "") -> dict:
    """Read names and values from a YAML file. Raises `InputError` that begins with `source`, or else with the path."""
    source = source or str(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror}): check the path") from None
    # PyYAML lets errors of Python through: ValueError for a date in month 13, RecursionError for lists 1,000 deep.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{source}: not YAML in UTF-8: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(
            f"{source}: a {type(values).__name__}: write a line `name: value` for each option"
        )
    return values


def environment() -> dict:
    """Return what a result depends on in addition to its config: versions, commit, date (UTC), platform, threads.

    Outside a git checkout `git_commit` and `git_dirty` are None. Dirty means that a tracked file differs from the
    commit; results and figures do not count, because studies write them and no run reads them.
    """
    import torch  # here, because reading run folders needs no torch

    # None unless git tracks this very file, as it does in a checkout.
    is_in_git = _git("ls-files", "--error-unmatch", Path(__file__).name)
    commit = _git("rev-parse", "HEAD") if is_in_git else None
    is_dirty = None
    if commit:
        not_read = [f":(top,exclude){folder}" for folder in ("data/results", "figures")]
        status = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *not_read)
        is_dirty = None if status is None else bool(status)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        **versions,
        "marlhf_lite": __version__,
        "git_commit": commit,
        "git_dirty": is_dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "processor": _processor(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    """Return the processor's model. Another model may sum in another order, so a stored run could not be repeated.

    On Linux /proc/cpuinfo tells more than Python does: family, model and stepping.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    facts = {}
    of_first_core = text.split("\n\n")[0]
    for line in of_first_core.splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    words = []
    for name in ("model name", "cpu family", "model", "stepping"):
        if name in facts:
            words.append(f"{name} {facts[name]}".removeprefix("model name "))  # it needs no label
    return ", ".join(words)


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in this file's folder; None if it fails or takes too long."""
    # Without the lock, a query never disturbs a commit made at the same time.
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
