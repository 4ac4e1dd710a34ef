"""Split rows for the pipeline: SFT 20 %, reward model 40 %, PPO 40 % (paper, Appendix B.2), and a test part."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import datasets

from marlhf_lite.tasks.files import FileAccount
from marlhf_lite.tasks.prompts import prompts_of
from marlhf_lite.utils.errors import InputError

TRAIN_PARTS = ("sft", "rm", "ppo")


@dataclass(frozen=True)
class Task:
    """Preference data, ready for the pipeline."""

    name: str
    # sft, rm, ppo, test; strings prompt, chosen, rejected (APPS: tests, difficulty)
    splits: datasets.DatasetDict
    # (prompts, responses) → true scores, if known
    gold: Callable[[list[str], list[str]], list[float]] | None
    counts: dict[str, int]  # rows read, kept, dropped by reason, and in each part
    chats: bool = False  # whether a chat template wrote the prompts
    # (prompts, responses) → outcomes of unit tests, when they are ready to run
    tests: Callable | None = None
    shape: str = ""  # the shape that the rows were read as
    digests: Mapping[str, str] = field(default_factory=dict)  # of the rows of each part
    # Prompt that a chat template wrote -> what the data have: messages, or a text that became a user's message.
    said: Mapping[str, str | list[dict]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # columns that nothing reads
    unused_splits: tuple[str, ...] = ()  # splits not asked for
    thoughts_dropped: int = (
        0  # rows whose thoughts nothing writes, because there is no chat template
    )
    files: tuple[
        FileAccount, ...
    ] = ()  # what lies in the files that were read; none for data of the hub
    left_out_files: tuple[str, ...] = ()  # files of a folder that were not read

    def held_out(self, count: int) -> datasets.Dataset:
        """Return the first `count` test rows with different prompts: a random sample, since rows are in random order.

        TL;DR compares many summaries of a post. Prompts also differ by the columns that functions ask for.
        """
        first: dict[tuple[str, str], int] = {}
        for row, prompt in enumerate(prompts_of(self.splits["test"])):
            first.setdefault((prompt, getattr(prompt, "row", "")), row)
        return self.splits["test"].select(list(first.values())[:count])


def check_part(dataset: str, part: str, known: Collection[str] = ()) -> None:
    """Raise `InputError` for a `--part` that the data set does not have; an empty one is the test part."""
    if part and part not in known:
        hint = f"choose from {', '.join(known)}, or leave it out" if known else "leave it out"
        raise InputError(f"--part {part}: {dataset} has no such part to evaluate on: {hint}")


def split_rows(
    rows: Sequence[dict],
    seed: int = 1234,
    fractions: Sequence[float] = (0.2, 0.4, 0.4),
    test_fraction: float = 0.1,
    test: Sequence[dict] | None = None,
) -> datasets.DatasetDict:
    """Split rows (dicts with a `prompt`) into `sft`, `rm`, `ppo` and `test`, in an order drawn by `seed`.

    Rows with the same prompt (up to outer white space) go to the same part, so no part sees a prompt of another. Sizes
    are exact if all prompts differ, else as close as placing the largest groups first gets them.

    Args:
        fractions: shares of sft, rm and ppo in the training rows; a part with share 0 stays empty.
        test_fraction: the share of the rows to hold out, between 0 and 1.
        test: a separate test set; rows whose prompt is in it are left out of the other parts.

    Raises `InputError` if rows or different prompts are too few for every part to get one.
    """
    seen = {_key(row) for row in test or ()}
    rows = [row for row in rows if _key(row) not in seen]
    sizes = _sizes(len(rows), fractions, test_fraction if test is None else 0)
    parts = _divide([_key(row) for row in rows], sizes, seed)
    table = datasets.Dataset.from_list(rows)
    splits = datasets.DatasetDict({part: table.select(indices) for part, indices in parts.items()})
    if test is not None:
        splits["test"] = datasets.Dataset.from_list(draw(test, None, seed))
    return splits


def make_task(
    name: str,
    rows: Sequence[dict],
    seed: int,
    *,
    counts: Mapping[str, int] | None = None,
    gold: Callable | None = None,
    **options,
) -> Task:
    """Return the task of these rows, split by `split_rows(**options)`; `counts`: rows read, kept and dropped.

    Raises `InputError`, which names the task, if rows are too few.
    """
    try:
        splits = split_rows(rows, seed, **options)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    used = len(rows) + len(options.get("test") or ())
    sizes = {part: len(split) for part, split in splits.items()}
    counts = dict(counts or {"read": used, "kept": used})
    counts["beyond_size"] = counts["kept"] - used
    counts["prompt_in_test"] = used - sum(sizes.values())
    return Task(name, splits, gold, counts | sizes)


def draw(rows: Iterable, size: int | None, seed: int) -> list:
    """Return `size` rows (None: all) in an order drawn by `seed`."""
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return rows[:size]


def _key(row: dict) -> str:
    return row["prompt"].strip()


def _sizes(total: int, fractions: Sequence[float], test_fraction: float) -> dict[str, int]:
    """Return the number of rows of each part: they add up to `total`, and only a part with fraction 0 has none."""
    wanted = sum(share > 0 for share in fractions)
    test = 0
    if test_fraction:
        test = max(min(round(total * test_fraction), total - wanted), 1)
    left = total - test
    if left < wanted:
        fix = f"give at least {wanted + test}, or a higher --size"
        raise InputError(
            f"{total} rows are too few for {wanted} training parts and {test} test rows: {fix}"
        )
    exact = {
        part: left * share / sum(fractions)
        for part, share in zip(TRAIN_PARTS, fractions, strict=True)
    }
    # Round down, and give the rows that are left to the parts with the largest remainders.
    sizes = {part: int(size + 1e-9) for part, size in exact.items()}
    by_remainder = sorted(sizes, key=lambda part: sizes[part] - exact[part])
    for part in by_remainder[: left - sum(sizes.values())]:
        sizes[part] += 1
    # A part with a share gets at least one row, from the largest part.
    for part in sizes:
        if exact[part] and not sizes[part]:
            sizes[max(sizes, key=sizes.get)] -= 1
            sizes[part] = 1
    return sizes | {"test": test}


def _divide(keys: Sequence[str], sizes: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """Return the shuffled row indices of each part; rows with the same key stay together.

    The groups are placed from the largest on, each in a part with room for it, of several in the emptiest.
    """
    order = draw(range(len(keys)), None, seed)
    groups = Counter(keys[index] for index in order).most_common()
    free = {part: size for part, size in sizes.items() if size}
    if len(groups) < len(free):
        fault = f"{len(keys)} rows have {len(groups)} different prompts, too few for the parts {', '.join(free)}"
        raise InputError(f"{fault}: give at least {len(free)} different prompts")
    part_of: dict[str, str] = {}
    empty_parts = list(free)
    for done, (key, count) in enumerate(groups):
        # The last groups go to parts that have none yet, so that none stays empty.
        groups_left = len(groups) - done
        open_parts = empty_parts if groups_left <= len(empty_parts) else list(free)
        part = max(
            open_parts, key=lambda part: (min(free[part] - count, 0), free[part] / sizes[part])
        )
        part_of[key] = part
        free[part] -= count
        empty_parts = [other for other in empty_parts if other != part]
    return {part: [index for index in order if part_of[keys[index]] == part] for part in sizes}
