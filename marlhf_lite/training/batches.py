"""Rows that go through a model some at a time: half as many where memory ends."""

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from tqdm.auto import tqdm

from marlhf_lite.utils.errors import InputError

Result = TypeVar("Result")


def in_batches(work: Callable[[slice], Result], count: int, size: int, alone: bool = True) -> tuple[list[Result], int]:
    """Return `work(rows)` for slices of `size` of `count` responses, and the size, which is halved where memory ends.

    For work that does not depend on what is in a slice. Raises `InputError` where one response does not fit, and, not
    `alone`, where another process may wait for this one in the middle of `work`.
    """
    results, done = [], 0
    while done < count:
        rows = slice(done, min(done + size, count))
        try:
            results.append(work(rows))
        except RuntimeError as error:
            size = _half(error, rows.stop - done, alone)
        else:
            done = rows.stop
            continue
        clear_device_cache(garbage_collection=True)  # after `except`, which holds what was allocated
        tqdm.write(f"out of memory: {size} responses at a time from here on")
    return results, size


def _half(error: RuntimeError, size: int, alone: bool) -> int:
    if not should_reduce_batch_size(error):
        raise error
    if size == 1 or not alone:
        fix = "shorten --max_response_length, or use a smaller model"
        raise InputError(f"out of memory with {size} responses at a time: {fix}") from error
    return size // 2
