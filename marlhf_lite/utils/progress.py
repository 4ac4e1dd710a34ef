"""Progress bars. Within a job of several stages, a bar also says how long all stages together take from here."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from tqdm.auto import tqdm


class Job:
    """A job of several stages, such as `marlhf run`, and the time that it has left.

    Args:
        work: stage -> its work in seconds, as estimated for some machine. On this one, the seconds that the work took
            so far tell the pace of the rest.
        pace: seconds that a second of work takes here, until that is measured; None where nobody can know.
    """

    current: ClassVar["Job | None"] = None

    def __init__(self, work: Mapping[str, float], pace: float | None = None):
        self.work, self.pace = dict(work), pace  # what is left of each stage
        self.name, self.done, self.spent, self.since = "", 0.0, 0.0, 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The bar that is made in here is that of this stage. Afterwards nothing of it is left."""
        Job.current, self.name, self.since = self, name, time.monotonic()
        try:
            yield
        finally:
            Job.current, self.work[name] = None, 0.0

    def advance(self, share: float) -> None:
        """Count a share of what is left of the present stage as done."""
        now, part = time.monotonic(), self.work[self.name] * min(share, 1.0)
        self.spent, self.since = self.spent + now - self.since, now
        self.work[self.name] -= part
        self.done += part
        self.pace = self.spent / self.done

    def left(self) -> str:
        """The time that is left, as minutes:seconds; a question mark where nothing is measured yet."""
        return "?" if self.pace is None else tqdm.format_interval(int(self.pace * sum(self.work.values())))


class _JobBar(tqdm):
    """The bar of a job's stage. What an earlier run has done of it is no work any more."""

    def __init__(self, **options):
        self.job = Job.current
        look = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, all stages {left}{postfix}]"
        super().__init__(bar_format=look, **options)
        self.job.work[self.job.name] *= 1 - self.n / max(self.total, 1)

    @property
    def format_dict(self) -> dict:
        return super().format_dict | {"left": self.job.left()}

    def update(self, n: int = 1) -> bool | None:
        self.job.advance(n / max(self.total - self.n, 1))
        return super().update(n)


def bar(**options) -> tqdm:
    """A progress bar; the options are tqdm's."""
    return _JobBar(**options) if Job.current else tqdm(**options)
