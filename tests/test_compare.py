"""Stored answers side by side: what is read, what is paired, what is refused."""

import json

import numpy as np
import pytest
from conftest import fails

from marlhf_lite.cli import main
from marlhf_lite.evaluation.compare import compare
from marlhf_lite.evaluation.responses import KEY, ResponseStore, read_responses, write_rows
from marlhf_lite.evaluation.scores import prompt_ids, to_frame
from marlhf_lite.evaluation.statistics import paired_bootstrap, wilson
from marlhf_lite.extras.judges.judges import first_answers
from marlhf_lite.utils.run_folder import split_paths

PROMPTS = [f"prompt {i}" for i in range(8)]
BASE = np.random.default_rng(0).normal(0, 1, 8)
BETTER = BASE + np.array([1, 1, 1, 1, 1, -1, 0, 1])


def answers(method, scores, prompts=PROMPTS, **more):
    """As `marlhf evaluate` has always written them."""
    return [
        {
            "prompt": p,
            "method": method,
            "response": "yes",
            "tokens": 4,
            "ended": True,
            "kl": 0.5,
            "rm_score": float(x),
        }
        | more
        for p, x in zip(prompts, scores)
    ]


def stored(method, tables, temperature=0.8, **more):
    """As `evaluate_checkpoints` stores them; tables [prompt][sample]."""
    return [
        {"id": id, "sample": k, "seed": 0, "temperature": temperature, "prompt": p, "method": method, "response": "no",
         "token_ids": [4, 1], "ended": True, "tokens": 2, "rm_score": float(x)} | more
        for id, p, scores in zip(prompt_ids(PROMPTS), PROMPTS, tables) for k, x in enumerate(scores)
    ]  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def run(name, rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return run


def test_paths_stand_apart_by_commas(write, tmp_path, capsys):
    files = [
        write("a b/one.jsonl", answers("PPO", BASE)),
        write("c.jsonl", answers("MA-PPO", BETTER)),
    ]
    assert split_paths(" a/b c, PPO=d ,,x") == ["a/b c", "PPO=d", "x"]
    assert not main(["compare", f"--answers={files[1]},{files[0]}"])
    assert "| MA-PPO |" in capsys.readouterr().out


def test_two_files_are_paired_by_prompt(write):
    a = write("a.jsonl", answers("PPO", BASE))
    b = write("b.jsonl", answers("MA-PPO", BETTER)[::-1])
    first, second = compare([a, b])
    assert (first["method"], first["prompts"], first["samples"]) == ("PPO", 8, 1)
    assert first["rm_score"] == pytest.approx(BASE.mean()) and "rm_score_gain" not in first
    assert second["rm_score_wins"] == wilson(6.5, 8)._asdict()
    gain = paired_bootstrap(BETTER[::-1], BASE[::-1])
    assert second["rm_score_gain"] == pytest.approx(gain._asdict())
    assert (second["kl"], second["tokens"], second["ended"]) == (0.5, 4, 1.0)
    assert compare([a, b], baseline="MA-PPO")[0]["rm_score_wins"]["mean"] == 1.5 / 8
    new = write("new.jsonl", stored("MA-PPO", BETTER[:, None]))  # with ids, and samples
    assert compare([a, new])[1]["rm_score_gain"]["mean"] == pytest.approx(0.625)


def test_kls_to_different_sft_models_are_not_compared(write, capsys):
    one = write("one.jsonl", answers("PPO", BASE, reference="abc"))
    for name, more, shown in (("same", {"reference": "abc"}, True), ("other", {"reference": "abd"}, False),
                              ("unknown", {}, True)):  # fmt: skip
        assert not main(
            [
                "compare",
                f"--answers={one},{write(f'{name}.jsonl', answers('MA-PPO', BETTER, **more))}",
            ]
        )
        assert ("KL (nats)" in capsys.readouterr().out) == shown


def test_the_same_method_of_two_runs_is_told_apart(write, tmp_path):
    for name, scores in (("one", BASE), ("two", BETTER)):
        write(f"{name}/samples.jsonl", answers("PPO", scores))
    found = compare([tmp_path / "one", tmp_path / "two", tmp_path / "one"])
    assert [row["method"] for row in found] == [
        f"{tmp_path / 'one'}: PPO",
        f"{tmp_path / 'two'}: PPO",
    ]


def test_stores_with_samples_and_temperatures(tmp_path):
    tables = np.random.default_rng(1).normal(0, 1, (8, 3))
    for method, shift in (("PPO", 0.0), ("MA-PPO", 0.5)):
        for temperature in (0.4, 1.0):
            store = ResponseStore(
                tmp_path / "run" / "responses", method, {"temperature": temperature}
            )
            store.add(
                to_frame(stored(method, tables + shift * temperature, temperature)).set_index(KEY)
            )
    for path in (tmp_path / "run", tmp_path / "run" / "responses"):
        found = {row["method"]: row for row in compare([path], baseline="PPO T=0.4")}
        assert set(found) == {"PPO T=0.4", "PPO T=1.0", "MA-PPO T=0.4", "MA-PPO T=1.0"}
        row = found["MA-PPO T=1.0"]
        assert (row["prompts"], row["samples"]) == (8, 3)
        assert row["rm_score_gain"]["mean"] == pytest.approx(0.5)
        wins = [
            np.mean([(a + 0.5 > b) + (a + 0.5 == b) / 2 for a in line for b in line])
            for line in tables
        ]
        assert row["rm_score_wins"] == pytest.approx(wilson(sum(wins), 8)._asdict())


def test_a_method_is_the_baseline_at_each_temperature(write, capsys):
    rows = []
    for method, shift in (("PPO", 0.0), ("MA-PPO", 0.5)):
        for t in (0.4, 1.0):
            rows += stored(method, BASE[:, None] + shift + 10 * t, t)
    path = write("samples.jsonl", rows)
    for baseline in ("", "PPO"):
        found = {row["method"]: row for row in compare([path], baseline)}
        for t in (0.4, 1.0):
            assert found[f"PPO T={t}"]["baseline"] == found[f"MA-PPO T={t}"]["baseline"]
            assert found[f"MA-PPO T={t}"]["rm_score_gain"]["mean"] == pytest.approx(0.5)
            assert "rm_score_gain" not in found[f"PPO T={t}"]
    assert not main(["compare", "--answers", str(path), "--baseline", "PPO"])
    assert "gain over PPO T=0.4, PPO T=1.0, at the same temperature" in capsys.readouterr().out
    fails(lambda: compare([path], "SFT"), "--baseline SFT", "PPO T=0.4")


def test_a_reward_is_compared_under_its_name_also_in_files_that_called_it_gold(write, capsys):
    mark = {"reward": "words:few, 3f"}
    old = [
        {k: v for k, v in row.items() if k != "rm_score"} | {"gold": row["rm_score"]} | mark
        for row in answers("PPO", BASE)
    ]
    new = [
        {k: v for k, v in row.items() if k != "rm_score"} | {"words:few": row["rm_score"]} | mark
        for row in answers("MA-PPO", BETTER)
    ]
    paths = [write("old.jsonl", old), write("new.jsonl", new)]
    _, row = compare(paths)
    assert "gold" not in row and row["words:few_gain"]["mean"] == pytest.approx(0.625)
    assert not main(["compare", "--answers", ",".join(map(str, paths))])
    assert "| words:few | wins by words:few |" in capsys.readouterr().out
    new[3]["words:few"] = "much"
    fails(lambda: compare([paths[0], write("bad.jsonl", new)]), "row 4", "words:few", "'much'")


def test_folders_at_different_temperatures_are_named_by_them(tmp_path):
    for method, temperature in (("PPO", 0.4), ("MA-PPO", 0.8)):
        store = ResponseStore(tmp_path / method, method, {"temperature": temperature})
        store.add(to_frame(stored(method, BASE[:, None], temperature)).set_index(KEY))
    found = compare([tmp_path / "PPO", tmp_path / "MA-PPO"])
    assert [(row["method"], row["baseline"]) for row in found] == [
        (m, "PPO T=0.4") for m in ("PPO T=0.4", "MA-PPO T=0.8")
    ]


def test_a_run_at_several_temperatures_names_each(write):
    path = write("run/samples.jsonl", [])
    write_rows(
        path, to_frame([*stored("SFT", BASE[:, None], 0.0), *stored("SFT", BETTER[:, None], 0.8)])
    )
    assert set(read_responses(path)["method"]) == {"SFT"}
    assert [row["method"] for row in compare([path.parent])] == ["SFT T=0.0", "SFT T=0.8"]
    assert compare([path.parent], "SFT T=0.8")[0]["baseline"] == "SFT T=0.8"
    assert {row["method"] for row in first_answers(str(path.parent))} == {"SFT T=0.0", "SFT T=0.8"}


def test_faults_are_named_in_one_line(write, tmp_path):
    ok, rows = write("a.jsonl", answers("PPO", BASE, rm="abc")), stored("DPO", BASE[:, None])
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "c.jsonl"
    broken.write_text(json.dumps(rows[0]) + "\nnot json\n")
    faults = {
        "PPO": [ok],
        "x.jsonl": [ok, tmp_path / "x.jsonl"],
        "empty": [ok, tmp_path / "empty"],
        "DPO lacks 1": [ok, write("b1.jsonl", answers("DPO", BASE[:7], PROMPTS[:7]))],
        "PPO lacks 1": [ok, write("b2.jsonl", answers("DPO", [*BASE, 1], [*PROMPTS, "other"]))],
        "b3.jsonl: id ": [ok, write("b3.jsonl", [*rows, rows[0]])],
        "--rm": [ok, write("b4.jsonl", answers("DPO", BASE, rm="abd"))],
        "--reward": [
            write("a2.jsonl", answers("PPO", BASE, gold=1.0, reward="words:few, 3f")),
            write("b7.jsonl", answers("DPO", BASE, gold=1.0, reward="words:few, 4e")),
        ],
        "the data's gold score": [
            write("a3.jsonl", answers("PPO", BASE, gold=1.0)),
            write("b8.jsonl", answers("DPO", BASE, gold=1.0, reward="L32-first-noise")),
        ],
        "b5.jsonl, row 2": [
            ok,
            write("b5.jsonl", [rows[0], {"prompt": "x", "response": "y", "update": 3}]),
        ],
        "c.jsonl, line 2": [ok, broken],
        "--baseline SFT": [ok, write("b6.jsonl", rows), "SFT"],
    }
    for words, (*paths, last) in faults.items():
        more = ("SFT",) if last == "SFT" else ()
        fails(lambda: compare(paths if more else [*paths, last], *more), words)  # noqa: B023
