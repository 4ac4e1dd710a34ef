"""Memory that ends: one helper for PPO, SFT, reward model, baselines, sampling and evaluation."""

import itertools

import pytest
import torch
from accelerate.state import GradientState
from conftest import fails

from marlhf_lite.utils.less_memory import in_batches, with_less_memory

MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


def work_of(fits, tried, message=MEMORY):
    def work(size):
        tried.append(size)
        if size > fits:
            GradientState().sync_gradients = False
            raise torch.OutOfMemoryError(message)
        return f"done with {size}"

    return work


@pytest.mark.parametrize(
    ("size", "fits", "share", "sizes"),
    [
        (8, 8, 0, [8]),
        (8, 3, 0, [8, 4, 2]),
        (7, 1, 0, [7, 3, 1]),
        (12, 5, 12, [12, 6, 3]),
        (6, 2, 15, [6, 3, 1]),  # 2 does not divide 15
    ],
)
def test_half_as_many_until_they_fit(size, fits, share, sizes, capsys):
    tried, undone = [], []
    result, done = with_less_memory(
        work_of(fits, tried),
        size,
        "--size {}",
        share=share,
        start_over=lambda: undone.append(tried[-1]),
    )
    assert (
        tried == sizes
        and done == sizes[-1]
        and result == f"done with {done}"
        and undone == sizes[:-1]
    )
    said = "".join(capsys.readouterr()).splitlines()
    assert said == [
        f"out of memory with --size {a}: {b} from here on" for a, b in itertools.pairwise(sizes)
    ]
    assert GradientState().sync_gradients


@pytest.mark.parametrize(
    ("size", "no_process_waits", "parts"),
    [
        (1, True, ["with --size 1: shorten"]),
        (1, False, ["with --size 1: shorten"]),
        (8, False, ["--size 8: give 4"]),
    ],
)
def test_one_row_that_does_not_fit_and_processes_that_wait_end_in_a_line(
    size, no_process_waits, parts
):
    fails(
        lambda: with_less_memory(
            work_of(0, []), size, "--size {}", no_process_waits=no_process_waits
        ),
        "out of memory",
        *parts,
    )
    assert GradientState().sync_gradients


def test_another_error_is_raised_as_it_is():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        with_less_memory(work_of(0, [], "mat1 and mat2 shapes cannot be multiplied"), 4, "{}")


@pytest.mark.parametrize(
    ("count", "size", "fits"), [(0, 4, 4), (7, 4, 4), (7, 4, 1), (7, 9, 3), (5, 2, 1)]
)
def test_batches_cover_all_rows_once_in_order(count, size, fits):
    def work(rows):
        if rows.stop - rows.start > fits:
            raise torch.OutOfMemoryError(MEMORY)
        return list(range(count))[rows]

    parts, done = in_batches(work, count, size)
    assert [*itertools.chain(*parts)] == list(range(count)) and (done <= fits or not count)
    assert all(len(part) <= fits for part in parts)
