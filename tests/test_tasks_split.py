import hashlib
import itertools

import pytest
from conftest import fails
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lab.studies.results import stored_results
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.tasks.splits import Task, split_rows
from marlhf_lite.utils.errors import InputError


def make(prompts):
    return [
        {"prompt": str(p), "chosen": f"c{i}", "rejected": f"r{i}"} for i, p in enumerate(prompts)
    ]


def sizes(splits):
    return {part: len(split) for part, split in splits.items()}


GROUPS = [p for p in range(200) for _ in range(1 + p % 5)]  # pairs of a prompt stay together
SIZES = [
    (range(1000), {}, [180, 360, 360, 100]),  # exact, where all prompts differ
    (range(4), {}, [1, 1, 1, 1]),
    (range(5), {"test_fraction": 0.9}, [1, 1, 1, 2]),
    (range(100), {"fractions": (0.2, 0, 0.8)}, [18, 0, 72, 10]),  # a part without share stays empty
    (GROUPS, {}, [108, 216, 216, 60]),
]


@pytest.mark.parametrize(("prompts", "options", "expected"), SIZES)
def test_sizes(prompts, options, expected):
    splits, other = (split_rows(make(prompts), seed, **options) for seed in (1, 2))
    assert list(sizes(splits).items()) == list(zip(("sft", "rm", "ppo", "test"), expected))
    assert splits["rm"].column_names == ["prompt", "chosen", "rejected"]
    order = [int(prompt) for prompt in splits["ppo"]["prompt"]]
    assert len(order) < 3 or (
        order != sorted(order) and order != list(map(int, other["ppo"]["prompt"]))
    )


def test_a_test_part_with_the_prompts_of_all_other_rows_is_named():
    fails(
        lambda: split_rows(make(range(9)), test=make(range(9))),
        "all 9 rows have a prompt of the test",
    )


@settings(max_examples=60)
@given(
    prompts=st.lists(st.sampled_from([*"abcdefgh", "a ", " b"]), min_size=4, max_size=40),
    seed=st.integers(0, 5),
    test_fraction=st.sampled_from([0.05, 0.1, 0.5]),
)
def test_split_is_a_partition_without_leaks(prompts, seed, test_fraction):
    rows = make(prompts)
    if len({prompt.strip() for prompt in prompts}) < 4 or len(rows) < 4:
        with pytest.raises(InputError, match="at least"):
            split_rows(rows, seed, test_fraction=test_fraction)
        return
    splits = split_rows(rows, seed, test_fraction=test_fraction)
    assert list(splits) == ["sft", "rm", "ppo", "test"]
    found = [row for split in splits.values() for row in split]
    assert sorted(found, key=str) == sorted(rows, key=str)
    assert all(len(split) for split in splits.values())
    seen = {part: {prompt.strip() for prompt in split["prompt"]} for part, split in splits.items()}
    assert all(not seen[a] & seen[b] for a, b in itertools.combinations(seen, 2))
    again = split_rows(rows, seed, test_fraction=test_fraction)
    assert all(split.to_list() == again[part].to_list() for part, split in splits.items())


def test_separate_test_set():
    rows, test = make(range(50)), make([3, 4, 99])
    splits = split_rows(rows, test=test)
    assert sorted(splits["test"]["prompt"]) == sorted(row["prompt"] for row in test)
    assert sizes(splits) == {"sft": 10, "rm": 19, "ppo": 19, "test": 3}
    trained = {prompt for part in ("sft", "rm", "ppo") for prompt in splits[part]["prompt"]}
    assert trained == {str(p) for p in range(50)} - {"3", "4"}


@pytest.mark.parametrize(
    ("prompts", "options", "least"),
    [(range(3), {}, 4), ([], {}, 4), ("aaabbbccc", {}, 4), (range(2), {"test": make("x")}, 3)],
)
def test_too_few(prompts, options, least):
    fails(lambda: split_rows(make(prompts), **options), f"at least {least}")


# Held-out prompts


def posts(count: int) -> Task:
    """A task whose separate test set has its posts in order, three comparisons of each."""
    splits = split_rows(make(range(1000, 1050)), test=make(n // 3 for n in range(3 * count)))
    return Task("posts", splits, None, {})


def test_held_out_rows_are_a_random_sample_without_repeated_prompts():
    drawn = posts(100).held_out(30)
    prompts = [int(prompt) for prompt in drawn["prompt"]]
    assert len(set(prompts)) == 30 and max(prompts) > 70 and prompts != sorted(prompts)
    assert (
        drawn.to_list()
        == posts(100).held_out(30).to_list()
        == posts(100).held_out(50).to_list()[:30]
    )
    assert sorted(map(int, posts(100).held_out(999)["prompt"])) == list(range(100))


@pytest.mark.parametrize(
    ("study", "first", "count"), [("main", 0, 256), ("ablations", 0, 128), ("tuning", 256, 240)]
)
def test_stored_results_answered_the_prompts_of_the_sample(study, first, count):
    prompts = list(load_task("tiny-tldr").held_out(first + count)["prompt"])[first:]
    digest = hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:12]
    assert {result["final"]["prompts"] for result in stored_results(study)} == {digest}
