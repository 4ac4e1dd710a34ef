"""Jobs in processes of their own, a few at a time: `python -m marlhf_lite.experiments.study_worker` for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

WORKER = "marlhf_lite.experiments.study_worker"


@dataclass(frozen=True, eq=False)
class Job:
    """What a worker is told, where it writes its log, and the job that must be done before it."""

    name: str
    spec: dict
    log: Path
    after: Job | None = None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def execute(jobs: list[Job], workers: int = 0) -> tuple[list[Job], list[Job]]:
    """Run all jobs, `workers` at a time (0: one for each core): those that failed, and those that waited for them.

    However this ends, no process that it started goes on: an interrupt stops them, and a worker whose parent is gone
    leaves by itself.
    """
    waiting, running, failed, lost = list(jobs), {}, [], []
    often = {"miniters": 0, "mininterval": 10, "smoothing": 0}  # its clock goes on between runs; in a log, few lines
    with tqdm(total=len(jobs), desc="runs", unit="run", dynamic_ncols=True, disable=not jobs, **often) as bar:
        try:
            while waiting or running:
                without = [job for job in waiting if job.after in failed]
                lost += without
                bar.update(len(without))
                waiting = [job for job in waiting if job not in without]
                ready = [job for job in waiting if job.after not in waiting and job.after not in running]
                for job in ready[: (workers or cores()) - len(running)]:
                    waiting.remove(job)
                    running[job] = _launch(job)
                names = ", ".join(job.name for job in running)
                if bar.postfix != names:
                    bar.set_postfix_str(names)
                failed += _collect(running, bar)
        finally:
            _stop(running)
    return failed, lost


def _launch(job: Job) -> subprocess.Popen:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_MININTERVAL": "30"}
    with job.log.open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, json.dumps(job.spec)],
            stdin=subprocess.PIPE,  # closes when this process ends, however it does
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | one_thread,
            start_new_session=True,  # an interrupt comes to us alone
        )


def _collect(running: dict[Job, subprocess.Popen], bar: tqdm) -> list[Job]:
    """Waits a little; takes out what has ended and returns what failed of it."""
    time.sleep(0.2)
    ended = [job for job, process in running.items() if process.poll() is not None]
    failed = []
    for job in ended:
        process = running.pop(job)
        process.stdin.close()
        if process.returncode:
            failed.append(job)
            bar.write(f"{job.name} failed: {job.log}")
        bar.update()
    return failed


def _stop(running: dict[Job, subprocess.Popen]) -> None:
    for process in running.values():
        process.terminate()
    for process in running.values():
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()


def leave_with_parent() -> None:
    """In a worker: end this process as soon as the one that started it is gone, were it killed."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    # Nothing comes, until the parent's end of the pipe closes. Reading sys.stdin would lock the interpreter's exit.
    while os.read(0, 1):
        pass
    os._exit(1)


def log_end(path: Path, lines: int = 5) -> str:
    """The last lines of a log that are not empty."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return "\n".join(f"  {line}" for line in found[-lines:]) or "  (nothing)"
