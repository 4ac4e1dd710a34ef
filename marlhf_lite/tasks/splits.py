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
    source_of_prompt: Mapping[str, str | list[dict]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # columns that nothing reads
    unused_splits: tuple[str, ...] = ()  # splits not asked for
    # rows of which a thought, in a key of its own beside a message's content, is not read: no chat template writes it
    thoughts_dropped: int = 0
    # what is in the files that were read; none for data of the hub
    files: tuple[FileAccount, ...] = ()
    left_out_files: tuple[str, ...] = ()  # files of a folder that were not read

    def held_out(self, count: int) -> datasets.Dataset:
        """Return the first `count` test rows with different prompts: a random sample, since rows are in random order.

        A prompt may be in several rows: TL;DR compares many summaries of a post. Equal prompts count as different if
        their rows differ in columns that a user's function takes.
        """
        first_row_of: dict[tuple[str, str], int] = {}
        for row, prompt in enumerate(prompts_of(self.splits["test"])):
            columns = getattr(prompt, "row", "")  # only if a function takes columns
            first_row_of.setdefault((prompt, columns), row)
        return self.splits["test"].select(list(first_row_of.values())[:count])


def check_part_is_known(dataset: str, part: str, known: Collection[str] = ()) -> None:
    """Raise `InputError` for a `--part` that the data set does not have; an empty `part` is the test part."""
    if part and part not in known:
        hint = "leave it out"
        if known:
            hint = f"choose from {', '.join(known)}, or leave it out"
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
    prompts_of_test = {_key(row) for row in test or ()}
    rows_given = len(rows)
    rows = [row for row in rows if _key(row) not in prompts_of_test]
    if rows_given and not rows:
        fix = "give a test set of other prompts, or none"
        raise InputError(f"all {rows_given} rows have a prompt of the test set: {fix}")
    has_test_set = test is not None
    if has_test_set:
        test_fraction = 0  # no other rows are held out
    sizes = _sizes(len(rows), fractions, test_fraction)
    rows_of_part = _divide([_key(row) for row in rows], sizes, seed)
    table = datasets.Dataset.from_list(rows)
    splits = datasets.DatasetDict()
    for part, numbers in rows_of_part.items():
        splits[part] = table.select(numbers)
    if has_test_set:
        splits["test"] = datasets.Dataset.from_list(draw(test, size=None, seed=seed))
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
    """Return the task of these rows, split by `split_rows(**options)`. Raises `InputError` if rows are too few.

    Args:
        counts: how many rows were `read`, `kept` and dropped by reason, before some were drawn; None: `rows` are all.
            Kept rows that are in no part are counted, too: `beyond_size` were not drawn, and the prompts of
            `prompt_in_test` are in the separate test set.
        gold: see `Task`.
    """
    try:
        splits = split_rows(rows, seed, **options)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    drawn = len(rows) + len(options.get("test") or ())
    all_counts = dict(counts or {"read": drawn, "kept": drawn})
    sizes = {part: len(split) for part, split in splits.items()}
    all_counts["beyond_size"] = all_counts["kept"] - drawn
    all_counts["prompt_in_test"] = drawn - sum(sizes.values())  # `split_rows` leaves out no others
    return Task(name, splits, gold, all_counts | sizes)


def draw(rows: Iterable, size: int | None, seed: int) -> list:
    """Return `size` rows (None: all) in an order drawn by `seed`."""
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return rows[:size]


def _key(row: dict) -> str:
    """Return the key of a row, its prompt without outer white space: rows with one key stay in one part."""
    return row["prompt"].strip()


def _sizes(total: int, fractions: Sequence[float], test_fraction: float) -> dict[str, int]:
    """Return the number of rows of sft, rm, ppo and test: they add up to `total`.

    `fractions` are the shares of sft, rm and ppo in the rows that are no test rows. A part whose share is above 0 gets
    at least one row. Raises `InputError` if rows are too few for that.
    """
    # 1. Test rows: their share, but each training part keeps a row if possible, and there is at least one test row.
    training_parts = sum(share > 0 for share in fractions)
    test = 0
    if test_fraction:
        most = total - training_parts
        test = max(min(round(total * test_fraction), most), 1)
    left = total - test
    if left < training_parts:
        fix = f"give at least {training_parts + test}, or a higher --size"
        raise InputError(
            f"{total} rows are too few for {training_parts} training parts and {test} test rows: {fix}"
        )

    # 2. Round the other sizes down, and give the rows that are left to the parts with the largest remainders.
    exact: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for part, share in zip(TRAIN_PARTS, fractions, strict=True):
        exact[part] = left * share / sum(fractions)
        sizes[part] = int(exact[part] + 1e-9)  # a product such as 8.999999999 is 9
    by_remainder = sorted(sizes, key=lambda part: sizes[part] - exact[part])
    not_given = left - sum(sizes.values())
    for part in by_remainder[:not_given]:
        sizes[part] += 1

    # 3. A part with a share that got no row takes one from the largest part.
    for part in sizes:
        has_share = exact[part] > 0
        if has_share and sizes[part] == 0:
            largest = max(sizes, key=sizes.get)
            sizes[largest] -= 1
            sizes[part] = 1
    return sizes | {"test": test}


def _divide(keys: Sequence[str], sizes: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """Return the numbers of the rows of each part, in an order drawn by `seed`; rows with the same key stay together.

    The groups of rows with the same key are placed from the largest on: each in a part with room for it, and if several
    parts have room, in the one with the largest share of its rows still to come. If no part has room, the group goes
    where it has the fewest rows too many. Raises `InputError` if there are fewer groups than parts.

    Args:
        keys: the key of each row.
        sizes: the number of rows that each part should get; a part of size 0 stays empty.
    """
    order = draw(range(len(keys)), size=None, seed=seed)
    groups = Counter(keys[number] for number in order).most_common()  # the largest first
    room = {part: size for part, size in sizes.items() if size}  # rows still to come
    if len(groups) < len(room):
        fault = f"{len(keys)} rows have {len(groups)} different prompts, too few for the parts {', '.join(room)}"
        raise InputError(f"{fault}: give at least {len(room)} different prompts")

    part_of: dict[str, str] = {}
    parts_without_group = list(room)
    for placed, (key, rows_of_group) in enumerate(groups):
        candidates = list(room)
        groups_left = len(groups) - placed
        # As many parts without a group as groups are left: no part may stay empty.
        if groups_left <= len(parts_without_group):
            candidates = parts_without_group
        rows_too_many = {part: max(rows_of_group - room[part], 0) for part in candidates}
        chosen = max(candidates, key=lambda part: (-rows_too_many[part], room[part] / sizes[part]))
        part_of[key] = chosen
        room[chosen] -= rows_of_group
        if chosen in parts_without_group:
            parts_without_group.remove(chosen)

    rows_of_part: dict[str, list[int]] = {part: [] for part in sizes}
    for number in order:
        rows_of_part[part_of[keys[number]]].append(number)
    return rows_of_part
