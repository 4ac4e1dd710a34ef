import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.tasks.splits import split_rows
from marlhf_lite.utils.errors import InputError


def make(prompts):
    return [{"prompt": str(p), "chosen": f"c{i}", "rejected": f"r{i}"} for i, p in enumerate(prompts)]


def sizes(splits):
    return {part: len(split) for part, split in splits.items()}


def test_sizes_are_exact_for_different_prompts():
    assert sizes(split_rows(make(range(1000)))) == {"sft": 180, "rm": 360, "ppo": 360, "test": 100}
    assert sizes(split_rows(make(range(4)))) == {"sft": 1, "rm": 1, "ppo": 1, "test": 1}
    assert sizes(split_rows(make(range(103)), test_fraction=3)) == {"sft": 20, "rm": 40, "ppo": 40, "test": 3}
    assert sizes(split_rows(make(range(5)), test_fraction=0.9)) == {"sft": 1, "rm": 1, "ppo": 1, "test": 2}


def test_a_part_without_share_stays_empty():
    splits = split_rows(make(range(100)), fractions=(0.2, 0, 0.8), test_fraction=0.1)
    assert sizes(splits) == {"sft": 18, "rm": 0, "ppo": 72, "test": 10}
    assert splits["rm"].column_names == ["prompt", "chosen", "rejected"]


def test_groups_of_pairs_keep_the_sizes_close():
    prompts = [p for p in range(200) for _ in range(1 + p % 5)]
    found = sizes(split_rows(make(prompts)))
    assert found == {"sft": 108, "rm": 216, "ppo": 216, "test": 60}


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.sampled_from([*"abcdefgh", "a ", " b"]), min_size=4, max_size=40),
    seed=st.integers(0, 5),
    test_fraction=st.sampled_from([0.05, 0.1, 0.5, 1, 2]),
)
def test_split_is_a_partition_without_leaks(prompts, seed, test_fraction):
    rows = make(prompts)
    if len({prompt.strip() for prompt in prompts}) < 4 or len(rows) < 3 + test_fraction:
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


def test_seed_matters_and_rows_are_shuffled():
    rows = make(range(100))
    one, two = split_rows(rows, seed=1), split_rows(rows, seed=2)
    assert one["ppo"]["prompt"] != two["ppo"]["prompt"]
    order = [int(prompt) for prompt in one["ppo"]["prompt"]]
    assert order != sorted(order)


def test_separate_test_set():
    rows, test = make(range(50)), make([3, 4, 99])
    splits = split_rows(rows, test=test)
    assert splits["test"].to_list() == test
    assert sizes(splits) == {"sft": 10, "rm": 19, "ppo": 19, "test": 3}
    trained = {prompt for part in ("sft", "rm", "ppo") for prompt in splits[part]["prompt"]}
    assert trained == {str(p) for p in range(50)} - {"3", "4"}


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (range(3), {}, "3 rows are too few for 3 training parts and 1 test rows: give at least 4"),
        ([], {}, "0 rows are too few .* give at least 4"),
        ("aaabbbccc", {}, "9 rows have 3 different prompts, too few for .* give at least 4 different prompts"),
        (range(12), {"test_fraction": 10}, "12 rows are too few .* 10 test rows: give at least 13"),
        (range(2), {"test": make("x")}, "2 rows are too few for 3 training parts and 0 test rows: give at least 3"),
        (range(9), {"test": []}, "the test set has no rows"),
        (range(9), {"test_fraction": 0}, "test_fraction 0: give a share"),
        (range(9), {"test_fraction": 2.5}, "test_fraction 2.5: give a share"),
        (range(9), {"fractions": (0.5, 0.5)}, "give three shares"),
        (range(9), {"fractions": (0.5, 0.5, 0.5)}, "add up to 1"),
        (range(9), {"fractions": (-0.5, 1, 0.5)}, "give three shares"),
    ],
)
def test_errors(prompts, options, message):
    with pytest.raises(InputError, match=message):
        split_rows(make(prompts), **options)
