"""Distributions and shifts, by hand."""

import numpy as np
import pandas as pd
import pytest
from conftest import fails

from marlhf_lite.evaluation.distributions import distributions, score_table, shift_summary, shifts
from marlhf_lite.evaluation.statistics import bootstrap_mean, paired_bootstrap, wilson

SFT = np.random.default_rng(0).normal(0, 1, (40, 3))
PPO = SFT + np.random.default_rng(1).normal(1, 0.2, (40, 3))


def rows(method, table, ids=None):
    cells = [(i, k) for i in (range(len(table)) if ids is None else ids) for k in range(len(table[i]))]
    plain = {"prompt": "x", "method": method, "response": ""}
    return [{"id": f"p{i}", "sample": k, "rm_score": float(table[i][k])} | plain for i, k in cells]


def frame(**methods):
    index = pd.MultiIndex.from_product([[f"p{i}" for i in range(40)], range(3)], names=["id", "sample"])
    return pd.DataFrame({name: values.ravel() for name, values in methods.items()}, index=index)


def test_tables_have_the_same_prompts_in_the_same_order():
    table = score_table(rows("SFT", SFT) + rows("PPO", PPO, reversed(range(40))))
    pd.testing.assert_frame_equal(table, frame(SFT=SFT, PPO=PPO), check_index_type=False)


def test_distributions():
    sft, ppo = distributions(frame(SFT=SFT, PPO=PPO))
    low, quarter = np.quantile(SFT, [0.05, 0.25])
    for found, values in ((sft, SFT), (ppo, PPO)):
        assert found["mean"] == pytest.approx(bootstrap_mean(values.mean(1))._asdict())
        assert found["std"] == pytest.approx(values.std())
        assert found["quantiles"] == pytest.approx({q: np.quantile(values, q) for q in (0.05, 0.25, 0.5, 0.75, 0.95)})
        for below, threshold in zip(found["below"], (low, quarter)):
            assert below["threshold"] == pytest.approx(threshold)
            assert below["share"] == pytest.approx(wilson((values < threshold).sum() / 3, 40)._asdict())
    assert "change" not in sft["below"][0]
    change = paired_bootstrap((quarter > PPO).mean(1), (quarter > SFT).mean(1))
    assert ppo["below"][1]["change"] == pytest.approx(change._asdict()) and change.high < 0
    for names, base in (({"PPO": PPO, "SFT": SFT}, SFT), ({"PPO": PPO, "DPO": SFT}, PPO)):  # SFT, else the first
        assert distributions(frame(**names))[0]["below"][0]["threshold"] == pytest.approx(np.quantile(base, 0.05))


def test_shifts_are_by_prompt_and_sample():
    moved = shifts(frame(PPO=PPO, SFT=SFT))
    assert list(moved) == ["PPO"] and np.array_equal(moved["PPO"], (PPO - SFT).ravel())
    (found,) = shift_summary(frame(SFT=SFT, PPO=PPO))
    assert found["mean"] == pytest.approx(paired_bootstrap(PPO.mean(1), SFT.mean(1))._asdict())
    assert found["quantiles"][0.5] == pytest.approx(np.quantile(PPO - SFT, 0.5))
    assert found["below"][0]["share"]["mean"] == pytest.approx((PPO - SFT < 0).mean())
    assert shift_summary(frame(SFT=SFT)) == []


def test_methods_that_cannot_be_compared_are_refused():
    others = (
        rows("PPO", PPO[:39]),
        rows("PPO", PPO[:, :2]),
        rows("PPO", PPO, range(1, 40)),
        [{"prompt": "x", "method": "SFT"}],
    )
    for other in others:
        fails(lambda: score_table(rows("SFT", SFT) + other), "SFT")  # noqa: B023
