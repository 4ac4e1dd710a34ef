"""Summaries and tables of responses, distributions and shifts, by hand-made rows with known numbers."""

import math

import numpy as np
import pandas as pd
import pytest
from conftest import fails

from marlhf_lite.evaluation.distributions import distributions, score_table, shifts
from marlhf_lite.evaluation.scores import (
    prompt_ids,
    reward_column,
    score_matrix,
    summarise,
    table,
    to_frame,
    to_records,
)
from marlhf_lite.evaluation.statistics import bootstrap_mean, paired_bootstrap, wilson
from marlhf_lite.training.rewards import FunctionReward

SCORES = {"SFT": [0.0, 1.0, 2.0, 3.0], "PPO": [1.0, 2.0, 3.0, 4.0], "MA-PPO": [0.0, 3.0, 2.0, 5.0]}


def rows_of(scores):
    return [
        {
            "prompt": f"p{i}",
            "method": method,
            "tokens": 10 * (i + 1),
            "ended": i > 0,
            "kl": 0.5,
            "rm_score": score,
        }
        for method, values in scores.items()
        for i, score in enumerate(values)
    ]


# Summaries


def test_means_of_each_method_and_gains_by_prompt():
    sft, ppo, macro = summarise(rows_of(SCORES))
    for row, (method, values) in zip((sft, ppo, macro), SCORES.items(), strict=True):
        assert (row["method"], row["rm_score"]) == (method, np.mean(values)) and "gold" not in row
        assert (row["prompts"], row["tokens"], row["ended"], row["kl"]) == (4, 25.0, 0.75, 0.5)
    assert "rm_score_gain" not in sft and summarise([]) == []
    # every prompt gains 1: no doubt at all, though the scores themselves are far apart
    assert ppo["rm_score_gain"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "level": 0.95}
    gain = paired_bootstrap(SCORES["MA-PPO"], SCORES["SFT"])._asdict()
    assert macro["rm_score_gain"] == gain
    rows = rows_of(SCORES)
    assert summarise(rows[:8] + rows[8:][::-1])[2] == macro  # whatever the order of the rows


def test_scores_only_where_all_have_them():
    rows = [{k: v for k, v in row.items() if k != "rm_score"} for row in rows_of(SCORES)]
    assert all("rm_score" not in row and "rm_score_gain" not in row for row in summarise(rows))
    some = rows_of(SCORES)
    some[5]["rm_score"] = None
    sft, ppo, macro = summarise(some)
    assert "rm_score" not in ppo and "rm_score_gain" not in ppo and ppo["tokens"] == 25.0
    assert sft["rm_score"] == 1.5 and macro["rm_score_gain"]["mean"] == 1.0
    for count in (3, 5):
        fails(lambda: summarise(rows_of(SCORES | {"PPO": [1.0] * count})), "PPO")  # noqa: B023


# Frames


def row(id="p", sample=0, **more):
    return {
        "id": id,
        "sample": sample,
        "prompt": f"prompt {id}",
        "method": "PPO",
        "temperature": 0.8,
    } | more


def test_rows_without_ids_go_by_prompt():
    rows = [
        {"prompt": p, "method": m, "response": "né\ud83d"}
        for m in ("A", "B")
        for p in ("x\ud83d", "y", "y")
    ]
    frame = to_frame([*rows, row(id="own")])
    assert frame["id"].tolist() == [*prompt_ids(["x\ud83d", "y", "y"]) * 2, "own"]
    assert (
        frame["response"].tolist()[:6] == ["né\ud83d"] * 6
        and frame["temperature"].isna().sum() == 6
    )
    assert to_frame(frame).equals(frame) and frame["id"][2] == f"{frame['id'][1]}-2"
    assert to_records(frame)[0] == rows[0] | {"id": frame["id"][0], "sample": 0}


def test_matrix_is_ordered_by_prompt_and_sample():
    rows = [row("b", 1, x=7), row("a", 1, x=1), row("b", 0, x=5), row("a", 0, x=0)]
    values = score_matrix(rows, "x")
    assert values.index.tolist() == ["b", "a"] and values.to_numpy().tolist() == [[5, 7], [0, 1]]
    assert values.to_numpy().dtype == np.float64
    assert score_matrix(pd.DataFrame(rows), "x").equals(values)
    fails(lambda: score_matrix(rows[:3], "x"), "PPO: prompts have [1, 2] samples")
    fails(lambda: score_matrix(rows, "y"), "PPO: a response without y")
    fails(
        lambda: score_matrix([*rows[:3], rows[3] | {"x": None}], "x"), "PPO: a response without x"
    )


# Tables


def test_tables_show_the_estimate_of_kl_that_is_never_below_0_where_there_is_one():
    rows = [row(str(i), kl=-0.5, kl_k3=0.25, tokens=1, ended=True) for i in range(4)]
    assert "| 0.25 |" in table(summarise(rows)) and "-0.5" not in table(summarise(rows))
    assert "| -0.50 |" in table(
        summarise([{k: v for k, v in r.items() if k != "kl_k3"} for r in rows])
    )


def test_tables_mark_what_is_missing_and_show_intervals():
    summary = [
        {"method": "SFT", "rm_score": 1.0},
        {"method": "PPO", "rm_score": None, "updates_to_ppo": 12},
    ]
    lines = table(summary).split("\n")
    assert lines[0] == "| method | RM score | updates to PPO's final training score |"
    assert lines[2:] == ["| SFT | 1.00 | - |", "| PPO | - | 12 |"]
    own = [
        {"who": "a", "share": {"mean": 0.5, "low": 0.25, "high": 0.75, "level": 0.9}},
        {"who": "b", "more": 1},
    ]
    lines = table(own, {"who": "rater", "share": "wins", "absent": "x"}).split("\n")
    assert lines == ["| rater | wins |", "| --- | --- |", "| a | 0.50 [0.25, 0.75] |", "| b | - |"]
    # of raters who only know one verdict
    undefined = {"kappa": dict.fromkeys(("mean", "low", "high"), math.nan)}
    assert table([undefined], {"kappa": "κ"}).split("\n")[2] == "| - |"


# -- distributions and shifts -----------------------------------------------------------------------------------------


SFT = np.random.default_rng(0).normal(0, 1, (40, 3))
PPO = SFT + np.random.default_rng(1).normal(1, 0.2, (40, 3))


def rows(method, table, ids=None):
    cells = [
        (i, k) for i in (range(len(table)) if ids is None else ids) for k in range(len(table[i]))
    ]
    plain = {"prompt": "x", "method": method, "response": ""}
    return [{"id": f"p{i}", "sample": k, "rm_score": float(table[i][k])} | plain for i, k in cells]


def frame(**methods):
    index = pd.MultiIndex.from_product(
        [[f"p{i}" for i in range(40)], range(3)], names=["id", "sample"]
    )
    return pd.DataFrame({name: values.ravel() for name, values in methods.items()}, index=index)


def test_tables_have_the_same_prompts_in_the_same_order():
    table = score_table(rows("SFT", SFT) + rows("PPO", PPO, reversed(range(40))))
    pd.testing.assert_frame_equal(table, frame(SFT=SFT, PPO=PPO), check_index_type=False)


def test_a_table_of_scores_mixes_no_temperatures():
    cold = [row | {"temperature": 0.0} for row in rows("PPO", PPO)]
    warm = [row | {"temperature": 0.8} for row in rows("SFT", SFT)]
    fails(lambda: score_table(cold + warm), "temperatures (0.0, 0.8)", "rows['temperature']")
    assert list(score_table(warm)) == ["SFT"]


@pytest.mark.parametrize("name", ["tokens", "response", "kl", "reward", "path"])
def test_a_reward_of_a_taken_name_hides_no_column(name):
    assert reward_column(FunctionReward(len, name)) == f"reward {name}"
    assert reward_column(FunctionReward(len, "my:rule")) == "my:rule"


def test_distributions():
    sft, ppo = distributions(frame(SFT=SFT, PPO=PPO))
    low, quarter = np.quantile(SFT, [0.05, 0.25])
    for found, values in ((sft, SFT), (ppo, PPO)):
        assert found["mean"] == pytest.approx(bootstrap_mean(values.mean(1))._asdict())
        assert found["std"] == pytest.approx(values.std())
        assert found["quantiles"] == pytest.approx(
            {q: np.quantile(values, q) for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
        )
        for below, threshold in zip(found["below"], (low, quarter)):
            assert below["threshold"] == pytest.approx(threshold)
            assert below["share"] == pytest.approx(
                wilson((values < threshold).sum() / 3, 40)._asdict()
            )
    assert "change" not in sft["below"][0]
    change = paired_bootstrap((quarter > PPO).mean(1), (quarter > SFT).mean(1))
    assert ppo["below"][1]["change"] == pytest.approx(change._asdict()) and change.high < 0
    # SFT, else the first
    for names, base in (({"PPO": PPO, "SFT": SFT}, SFT), ({"PPO": PPO, "DPO": SFT}, PPO)):
        assert distributions(frame(**names))[0]["below"][0]["threshold"] == pytest.approx(
            np.quantile(base, 0.05)
        )


def test_shifts_are_by_prompt_and_sample():
    moved = shifts(frame(PPO=PPO, SFT=SFT))
    assert list(moved) == ["PPO"] and np.array_equal(moved["PPO"], (PPO - SFT).ravel())


def test_methods_that_cannot_be_compared_are_refused():
    others = (
        rows("PPO", PPO[:39]),
        rows("PPO", PPO[:, :2]),
        rows("PPO", PPO, range(1, 40)),
        [{"prompt": "x", "method": "SFT"}],
    )
    for other in others:
        fails(lambda: score_table(rows("SFT", SFT) + other), "SFT")  # noqa: B023
