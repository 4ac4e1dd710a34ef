"""If memory ends: the same work again, with half the rows at a time. While it does not: what is freed is kept."""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from accelerate.state import GradientState
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from tqdm.auto import tqdm

from marlhf_lite.utils.errors import InputError

Result = TypeVar("Result")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def with_less_memory(
    work: Callable[[int], Result],
    size: int,
    what: str,
    *,
    no_process_waits: bool = True,
    share: int = 0,
    start_over: Callable[[], None] = lambda: None,
) -> tuple[Result, int]:
    """Return `work(size)` and the size with which it was done: half as many rows each time that memory ends.

    Args:
        work: gets the number of rows that go through a model at a time, on which its result does not depend.
        what: the size in words, such as "--micro_batch_size {}".
        no_process_waits: whether no other process waits for this one in the middle of the work, so that this one can
            begin it again by itself.
        share: a number of rows that every smaller size must divide; 0 for none.
        start_over: takes back what unfinished work left.

    Raises `InputError` if one row does not fit, and if memory ends while other processes wait.
    """
    while True:
        try:
            return work(size), size
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            # it ended between two passes of a step? all trainers share this
            GradientState().sync_gradients = True
            now = what.format(size)
            size = size // 2
            if size and share:
                size = rows_a_pass(size, share)
            if not size or not no_process_waits:
                fix = "shorten the texts or --max_response_length, or use a smaller model"
                if size:
                    fix = f"give {size}"
                raise InputError(f"out of memory with {now}: {fix}") from error
        tqdm.write(f"out of memory with {now}: {size} from here on")
        # after `except`, which holds what was allocated
        clear_device_cache(garbage_collection=True)
        start_over()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next pass, instead of giving pages back and asking for zeroed ones again.

    Tensors of 32 MiB or more are still given back. A user's own variables (MALLOC_TRIM_THRESHOLD_ and others) win.
    """
    is_set_by_user = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if is_set_by_user or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # other C libraries lack it
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that it takes


def in_batches(
    work: Callable[[slice], Result], count: int, size: int, no_process_waits: bool = True
) -> tuple[list[Result], int]:
    """Return `work(rows)` for slices of `size` of `count` responses, and the size, which is halved when memory ends.

    The work must not depend on which rows share a slice. Raises as `with_less_memory`.
    """
    results = []
    done = 0
    while done < count:
        asked = min(size, count - done)
        result, rows = with_less_memory(
            lambda rows, start=done: work(slice(start, start + rows)),
            asked,
            "{} responses at a time",
            no_process_waits=no_process_waits,
        )
        results.append(result)
        done += rows
        if rows != asked:  # memory ended: the smaller size from here on
            size = rows
    return results, size


def rows_a_pass(asked: int, share: int) -> int:
    """Return the most rows within `asked` (0: no limit) that divide `share`, a process's rows of a step, 1 at least."""
    most = min(asked or share, share)
    return next(rows for rows in range(most, 0, -1) if share % rows == 0)
