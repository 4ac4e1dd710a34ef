"""Study reports: gains, differences and costs against plain sums, coverage of intervals, tables, figures."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import fails
from made_up_results import made_up

from marlhf_lab.studies.command import StudyCommand
from marlhf_lab.studies.learning import learning_table
from marlhf_lab.studies.mean_reward import contrasts_of
from marlhf_lab.studies.reports import study_figures, study_report
from marlhf_lab.studies.results import (
    by_method,
    crossed_interval,
    stored_results,
    study_table,
    t_quantile,
)
from marlhf_lab.studies.study import Study, load_study
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import interval

STUDY = Study("small", {name: {"command": "ppo"} for name in ("SFT", "PPO", "MA-PPO")}, [0])


@pytest.fixture
def results():
    """Two seeds on four prompts. PPO ends at 4 and 14; MA-PPO gets there in seed 0 alone."""
    climbs = {0: [0, 1, 2, 3, 4, 4, 4, 4, 4], 1: [10, 11, 12, 13, 14, 14, 14, 14, 14]}
    fast = {0: [0, 3, 5, 5, 5, 5, 5, 5, 5], 1: [10] * 9}
    out, noted = [], "score_explained_variance"
    for seed in (0, 1):
        base = [10.0 * seed + x for x in (0, 1, 2, 3)]
        out += [made_up("SFT", seed, base)]
        out += [made_up("PPO", seed, [x + 1 + seed for x in base], climbs[seed])]
        out += [made_up("MA-PPO", seed, [x + y for x, y in zip(base, (1, 2, 3, 4))], fast[seed])]
        out[-2]["curve"] = [
            step | {noted: 0.1 * step["update"] + seed} for step in out[-2]["curve"]
        ]
    return out


def test_table_against_plain_sums(results):
    rows = {row["method"]: row for row in study_table(results)}
    assert rows["PPO"]["rm_score"]["by_seed"] == [2.5, 13.5]
    assert rows["PPO"]["rm_score"]["std"] == pytest.approx(11 / 2**0.5)
    assert (
        rows["PPO"]["rm_score_gain"]["by_seed"] == [1.0, 2.0]
        and rows["PPO"]["rm_score_gain"]["mean"] == 1.5
    )
    half = 12.7062047 * 0.5  # t(1) * s / sqrt(2): all prompts gain alike
    assert rows["PPO"]["rm_score_gain"]["high"] == pytest.approx(1.5 + half)
    assert rows["MA-PPO"]["gold_gain"]["mean"] == pytest.approx(1.25)
    assert "rm_score_gain" not in rows["SFT"] and "updates" not in rows["SFT"]
    # the first mean of five that is the last five's
    assert rows["PPO"]["updates"]["by_seed"] == [9, 9]
    # 0+3+5+5+5 = 18 < 20 <= 23: the sixth update
    assert (
        rows["MA-PPO"]["updates"]["by_seed"] == [6, None]
        and rows["MA-PPO"]["updates"]["mean"] is None
    )
    assert rows["MA-PPO"]["generated_tokens"]["by_seed"] == [60, None]
    assert rows["MA-PPO"]["seconds"]["by_seed"] == [12.0, None]
    assert "rm_score_difference" not in rows["PPO"] and rows["SFT"]["rm_score_difference"][
        "by_seed"
    ] == [-1.0, -2.0]
    assert (
        rows["MA-PPO"]["gold_difference"]["by_seed"] == [0.75, 0.25]
        and "cost_updates" not in rows["SFT"]
    )
    assert (
        rows["PPO"]["score_explained_variance"] == pytest.approx(1)
        and "score_explained_variance" not in rows["SFT"]
    )
    assert [rows["PPO"][f"cost_{cost}"] for cost in ("updates", "generated_tokens", "seconds")] == [
        9,
        90,
        18,
    ]


def two_way(gaps):
    """The interval in plain loops: mean squares of a two-way table, Satterthwaite's degrees of freedom."""
    S, P = len(gaps), len(gaps[0])
    rows = [sum(row) / P for row in gaps]
    columns = [sum(row[p] for row in gaps) / S for p in range(P)]
    mean = sum(rows) / S
    seeds = P * sum((a - mean) ** 2 for a in rows) / (S - 1)
    prompts = S * sum((b - mean) ** 2 for b in columns) / (P - 1)
    rest = sum((gaps[s][p] - rows[s] - columns[p] + mean) ** 2 for s in range(S) for p in range(P))
    rest /= (S - 1) * (P - 1)
    total = max(seeds + prompts - rest, seeds, prompts)
    freedom = total**2 / (seeds**2 / (S - 1) + prompts**2 / (P - 1) + rest**2 / ((S - 1) * (P - 1)))
    return mean, (total / (S * P)) ** 0.5, freedom


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_crossed_interval_against_a_loop(spread):
    gaps = np.random.default_rng(0).normal(size=(3, 20)) + spread * np.array([[0.0], [0.5], [1.0]])
    mean, error, freedom = two_way(gaps.tolist())
    got = crossed_interval(gaps)
    assert got.mean == pytest.approx(mean)
    assert (got.low, got.high) == pytest.approx(
        (mean - t_quantile(freedom) * error, mean + t_quantile(freedom) * error)
    )
    assert t_quantile(1) >= t_quantile(freedom) >= t_quantile(1e9)


def test_a_sure_gain_and_single_seeds_and_prompts():
    assert crossed_interval(np.full((3, 5), 2.0))[:3] == (2.0, 2.0, 2.0)
    values = np.array([1.0, 2.0, 4.0])
    half = 4.30265273 * values.std(ddof=1) / 3**0.5
    # the other seeds of one prompt; the other prompts of one seed
    for table in (values[:, None], values[None]):
        got = crossed_interval(table)
        assert (got.low, got.high) == pytest.approx((values.mean() - half, values.mean() + half))
    assert crossed_interval(np.array([[3.0]]))[:3] == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    "seeds, prompts, rest", [(1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.2, 3.0, 5.0)]
)
def test_crossed_interval_holds_the_truth_about_as_often_as_it_says(seeds, prompts, rest):
    """Three seeds drawn from the model. (A bootstrap holds the truth in 70 to 80 % where seeds differ.)"""
    generator, held = np.random.default_rng(1), 0
    for _ in range(1500):
        gaps = (
            0.7 + seeds * generator.normal(size=(3, 1)) + prompts * generator.normal(size=(1, 40))
        )
        got = crossed_interval(gaps + rest * generator.normal(size=(3, 40)))
        held += got.low <= 0.7 <= got.high
    assert 0.92 <= held / 1500 <= 0.995


def test_where_no_reward_model_trained_its_score_is_left_out(results, figures_apart):
    rewarded = [
        result | {"options": {"reward": "gold"} if result["method"] != "SFT" else {}}
        for result in results
    ]
    rows = study_table(rewarded)
    assert "gold_gain" in rows[1] and not any(key.startswith("rm_score") for key in rows[1])
    names = study_figures(STUDY, rewarded, rows)
    assert "gold_mean" in names and "score_mean" not in names


def test_results_that_cannot_be_compared(results):
    fails(lambda: by_method([*results, made_up("PPO", 1, [1])]), "PPO with seed 1")
    fails(
        lambda: study_table([*results, made_up("other", 0, [1], prompts="q")]),
        "other, seed 0 and SFT, seed 0",
    )
    fails(lambda: stored_results("nothing"), "--name nothing")


def test_tables_show_every_seed_and_each_group_has_figures(results, tmp_path):
    study = dataclasses.replace(STUDY, figures={"a": ["SFT", "PPO"], "b": list(STUDY.methods)})
    scores, _, costs, _ = study_report(study, results, tmp_path, tmp_path / "figures").split("\n\n")
    lines = {line.split(" | ")[0].strip("| "): line for line in scores.splitlines()}
    assert "(2.50; 13.50)" in lines["PPO"] and "1.50 [-4.85, 7.85] (1.00; 2.00)" in lines["PPO"]
    assert "(6; never)" in costs and "| SFT |" in scores and "| SFT |" not in costs
    assert json.loads((tmp_path / "summary.json").read_text())["methods"][0]["seeds"] == [0, 1]
    kinds = ("final_scores", "differences", "costs", "score_mean", "gold_mean")
    expected = sorted(f"{group}_{kind}" for group in "ab" for kind in kinds)
    for ending in ("png", "pdf"):  # to look at, and to print
        drawn = sorted(path.stem for path in (tmp_path / "figures").glob(f"*.{ending}"))
        assert drawn == expected


def test_an_interval_has_the_digits_that_its_ends_need():
    texts = {
        (0.005, -0.0005, 0.0105): "+0.005 [-0.001, +0.011]",
        (1.0, 0.5, 1.5): "+1.00 [+0.50, +1.50]",
    }
    for ends, text in (texts | {(2.0, 2.0, 2.0): "+2.00", (2.0, None, None): "+2.00"}).items():
        assert interval(dict(zip(("mean", "low", "high"), ends, strict=True)), "+.2f") == text
    assert interval({"mean": 0.1, "low": -0.001, "high": 0.29}, "+.0%") == "+10.0% [-0.1%, +29.0%]"
    ratio = {"mean": 1.037, "low": 1.003, "high": 1.073}
    assert (interval(ratio, beside=1), interval(ratio)) == (
        "1.037 [1.003, 1.073]",
        "1.04 [1.00, 1.07]",
    )


def leaves(value, path=""):
    """Path -> number or text, of anything nested; numbers to rounding."""
    if not isinstance(value, dict | list):
        return {
            path: pytest.approx(value, rel=1e-5, abs=1e-9) if isinstance(value, float) else value
        }
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        key: leaf for name, item in items for key, leaf in leaves(item, f"{path}/{name}").items()
    }


STORED = sorted(path.parent.name for path in shipped("results").glob("*/summary.json"))


@pytest.mark.parametrize("name", STORED)
def test_stored_summaries_come_out_again_from_results_of_the_protocol(name, capsys):
    study, stored = (
        load_study(name),
        json.loads(shipped(f"results/{name}/summary.json").read_text(encoding="utf-8")),
    )
    StudyCommand(name=name, output_dir=str(shipped(f"results/{name}")), dry_run=True).run()
    *lines, _ = capsys.readouterr().out.splitlines()
    # none of an option that changed
    assert lines and all(line.endswith((" done", " to do")) for line in lines)
    order = list(study.methods)
    results = sorted(
        stored_results(name), key=lambda result: (order.index(result["method"]), result["seed"])
    )
    part = "methods"
    if study.mean_updates:
        part, rows = "contrasts", contrasts_of(study, results)
    elif study.threshold is None:
        rows = study_table(results, study.baseline, study.target_method)
    else:
        rows = learning_table(study.figures or {"": order}, results, study.threshold, study.window)
    before, ours = leaves(stored[part]), leaves(json.loads(json.dumps(rows)))
    assert {path: getattr(value, "expected", value) for path, value in ours.items()} == before
