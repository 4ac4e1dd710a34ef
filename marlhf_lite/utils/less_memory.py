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
    """Return `work(size)` and the size with which it was done; each time that memory ends, half the size is tried.

    Args:
        work: gets the number of rows that go through a model at a time, on which its result must not depend.
        what: what messages call the size, with {} for the number, such as "--micro_batch_size {}".
        no_process_waits: whether no other process waits for this one in the middle of the work. Only then this one can
            begin the work again by itself.
        share: a number of rows that every smaller size must divide; 0 for none.
        start_over: undoes what unfinished work has left behind.

    Raises `InputError` if one row does not fit, and if memory ends while other processes wait.
    """
    while True:
        try:
            return work(size), size
        except RuntimeError as error:
            if not should_reduce_batch_size(error):  # another error than that memory ended
                raise
            # Memory may have ended between two passes of a step, while this is False. All trainers share the state.
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
        # Only here, after `except`: until then the error keeps alive what the work has allocated.
        clear_device_cache(garbage_collection=True)
        start_over()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next pass, instead of giving pages back and asking for zeroed ones again.

    Tensors of 32 MiB or more are still given back. If the user has set variables of glibc, such as
    MALLOC_TRIM_THRESHOLD_, nothing is changed.
    """
    is_set_by_user = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if is_set_by_user or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # other C libraries lack it
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # give the end of the heap back only beyond 2 GiB
        mallopt(M_MMAP_THRESHOLD, 2**25)  # 32 MiB, the most that glibc takes


def in_batches(
    work: Callable[[slice], Result], count: int, size: int, no_process_waits: bool = True
) -> tuple[list[Result], int]:
    """Do `work(rows)` for `count` responses, `size` at a time; return its results in order, and the last size.

    `rows` is a slice of range(count). If memory ends, the size is halved from there on, so the work must not depend on
    which rows share a slice. Raises as `with_less_memory`.
    """
    results = []
    done = 0
    while done < count:
        asked = min(size, count - done)
        result, rows = with_less_memory(
            lambda rows, start=done: work(slice(start, start + rows)),  # `done` as it is now
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
    """Return the largest number of rows that divides `share` and is at most `asked` (0: no limit).

    `share` is a process's number of rows in a step, 1 or more.
    """
    most = min(asked or share, share)
    return next(rows for rows in range(most, 0, -1) if share % rows == 0)
