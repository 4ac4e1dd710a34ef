"""Responses on disk, and what is made of several samples of a prompt."""

import json

import numpy as np
import pytest
import torch

from marlhf_lite.evaluation.responses import (
    Key,
    Store,
    first_samples,
    matrix,
    prompt_ids,
    restore,
    sample_means,
    write_rows,
)
from marlhf_lite.training.rollout import Sampling, generate
from marlhf_lite.utils.errors import InputError

SETTINGS = {"temperature": 0.8, "fingerprint": "abc", "top_k": 50}


def row(id="p", sample=0, **more):
    plain = {"prompt": f"prompt {id}", "method": "PPO", "response": "yes", "token_ids": [5, 1], "ended": True}
    return {"id": id, "sample": sample, "seed": 0, "temperature": 0.8} | plain | more


# Stores


def test_what_was_added_is_there_again(tmp_path):
    store = Store.of(tmp_path, "PPO", SETTINGS)
    assert store.rows == {} and not list(tmp_path.iterdir())
    store.add([row("a"), row("b", response="né\ud83d")])
    store.add([row("a", 1, rm_score=0.5)])
    again = Store.of(tmp_path, "PPO", SETTINGS)
    assert again.rows == store.rows and list(again.rows) == [Key("a", 0, 0), Key("b", 0, 0), Key("a", 1, 0)]
    assert json.loads((again.folder / "settings.json").read_text()) == {"method": "PPO", **SETTINGS}


def test_every_setting_has_a_folder_of_its_own(tmp_path):
    settings = [SETTINGS, SETTINGS | {"temperature": 1.0}, SETTINGS | {"fingerprint": "abd"}, SETTINGS | {"top_k": 0}]
    folders = {Store.of(tmp_path, "MA-PPO n=∞ / ../x", s).folder for s in settings}
    assert len(folders) == 4 and all(folder.parent == tmp_path for folder in folders)
    assert Store.of(tmp_path, "PPO", SETTINGS).folder.name.startswith("PPO-T0.8-")


def test_a_line_cut_off_by_a_crash_is_made_again(tmp_path):
    store = Store.of(tmp_path, "PPO", SETTINGS)
    store.add([row("a"), row("b")])
    store.path.write_bytes(store.path.read_bytes()[:-9])
    again = Store.of(tmp_path, "PPO", SETTINGS)
    assert list(again.rows) == [Key("a", 0, 0)]
    again.add([row("c")])
    assert [key.id for key in Store.of(tmp_path, "PPO", SETTINGS).rows] == ["a", "c"]


def test_replacing_keeps_order_and_the_others(tmp_path):
    store = Store.of(tmp_path, "PPO", SETTINGS)
    store.add([row("a"), row("b")])
    store.replace([row("a", rm_score=2.0)])
    assert [r.get("rm_score") for r in Store.of(tmp_path, "PPO", SETTINGS).rows.values()] == [2.0, None]
    assert sorted(path.name for path in store.folder.iterdir()) == ["samples.jsonl", "settings.json"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a"), row("b"), row("a")], "row 3: id a of PPO stands in row 1 too"),
        ([row("a"), {k: v for k, v in row().items() if k != "response"}], "row 2: no response"),
        ([{k: v for k, v in row().items() if k != "id"}], "row 1: no id"),
        ([row(token_ids=None)], "row 1: no token_ids"),
    ],
)
def test_faulty_stores_are_named(tmp_path, rows, words):
    path = Store.of(tmp_path, "PPO", SETTINGS).path
    path.parent.mkdir()
    write_rows(path, rows)
    with pytest.raises(InputError, match=f"{path}, {words}"):
        Store.of(tmp_path, "PPO", SETTINGS)


def test_ids_come_from_the_text_and_repeats_are_told_apart():
    ids = prompt_ids(["a", "b", "a", "\ud800"])
    assert len(set(ids)) == 4 and ids[2] == f"{ids[0]}-2"
    assert prompt_ids(["b", "a"]) == [ids[1], ids[0]]


def test_restored_responses_are_the_very_tokens(moved, tokenizer, texts):
    torch.manual_seed(0)
    rollout = generate(moved.policy.eval().model, tokenizer, texts.prompts, Sampling(8))
    rows = [
        {"prompt": p, "response": r, "token_ids": ids[m].tolist(), "ended": bool(e)}
        for p, r, ids, m, e in zip(
            rollout.prompts, rollout.responses, rollout.response_ids, rollout.mask, rollout.ended
        )
    ]
    again = restore(tokenizer, rows)
    assert again.prompts == rollout.prompts and again.responses == rollout.responses
    for name in ("attention_mask", "mask", "ended"):
        assert torch.equal(getattr(again, name), getattr(rollout, name))
    attended = rollout.attention_mask.bool()
    assert torch.equal(again.tokens[attended], rollout.tokens[attended])


# Several samples and temperatures


ROWS = [
    row(id, k, method=method, temperature=t, rm_score=float(k + 10 * (id == "b")), kl=None if t else 1.0)
    for method in ("SFT", "PPO")
    for t in (0.4, 0.8)
    for id in "ab"
    for k in range(3)
]


def test_first_samples_are_named_with_temperatures_where_there_are_several():
    found = first_samples(ROWS)
    assert [r["method"] for r in found[::2]] == ["SFT T=0.4", "SFT T=0.8", "PPO T=0.4", "PPO T=0.8"]
    assert len(found) == 8 and all(r["sample"] == 0 for r in found)
    assert {r["method"] for r in first_samples([r for r in ROWS if r["temperature"] == 0.4])} == {"SFT", "PPO"}
    assert first_samples([{"prompt": "x", "method": "PPO", "response": ""}])[0]["method"] == "PPO"


def test_means_over_samples():
    found = sample_means([r for r in ROWS if r["temperature"] == 0.8], ("rm_score",))
    assert [(r["method"], r["id"], r["rm_score"], r["samples"]) for r in found] == [
        ("SFT", "a", 1.0, 3), ("SFT", "b", 11.0, 3), ("PPO", "a", 1.0, 3), ("PPO", "b", 11.0, 3),
    ]  # fmt: skip
    single = [row("a", rm_score=3.0)]
    assert sample_means(single) == single and "response" in sample_means(single)[0]


def test_matrix_is_ordered_by_sample():
    rows = [row("a", 1, x=1), row("b", 0, x=5), row("a", 0, x=0), row("b", 1, x=7)]
    ids, values = matrix(rows, "x")
    assert ids == ["a", "b"] and values.tolist() == [[0, 1], [5, 7]] and values.dtype == np.float64
    with pytest.raises(InputError, match=r"PPO: prompts have \[1, 2\] samples"):
        matrix(rows[:3], "x")
    with pytest.raises(InputError, match="PPO: a response without y"):
        matrix(rows, "y")
