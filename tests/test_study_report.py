"""Study reports: gains, differences and costs against plain sums, coverage of intervals, tables, figures."""

import json
import math
import statistics

import numpy as np
import pytest
import yaml
from made_up_results import made_up

from marlhf_lite.lab.studies.reports import COST_LEGEND, LEGEND, markdown, study_figures, study_report
from marlhf_lite.lab.studies.results import by_method, crossed_interval, stored_results, student, study_table
from marlhf_lite.lab.studies.study import load_study
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.shipped import shipped

METHOD = {"command": "ppo"}


@pytest.fixture
def protocol(tmp_path):
    """Writes a study of these keys and returns its file's name."""

    def make(**keys):
        (tmp_path / "small.yaml").write_text(yaml.safe_dump({"seeds": [0]} | keys))
        return str(tmp_path / "small.yaml")

    return make


@pytest.fixture
def results():
    """Two seeds on four prompts. PPO ends at 4 and 14; MA-PPO gets there in seed 0 alone."""
    climbs = {0: [0, 1, 2, 3, 4, 4, 4, 4, 4], 1: [10, 11, 12, 13, 14, 14, 14, 14, 14]}
    fast = {0: [0, 3, 5, 5, 5, 5, 5, 5, 5], 1: [10] * 9}
    out = []
    for seed in (0, 1):
        base = [10.0 * seed + x for x in (0, 1, 2, 3)]
        out += [made_up("SFT", seed, base)]
        out += [made_up("PPO", seed, [x + 1 + seed for x in base], climbs[seed])]
        out += [made_up("MA-PPO", seed, [x + y for x, y in zip(base, (1, 2, 3, 4))], fast[seed])]
    return out


def test_table_against_plain_sums(results):
    rows = {row["method"]: row for row in study_table(results)}
    assert rows["PPO"]["rm_score"]["by_seed"] == [2.5, 13.5]
    assert rows["PPO"]["rm_score"]["std"] == pytest.approx(11 / 2**0.5)
    assert rows["PPO"]["rm_score_gain"]["by_seed"] == [1.0, 2.0] and rows["PPO"]["rm_score_gain"]["mean"] == 1.5
    half = 12.7062047 * 0.5  # t(1) * s / sqrt(2): all prompts gain alike
    assert rows["PPO"]["rm_score_gain"]["high"] == pytest.approx(1.5 + half)
    assert rows["MA-PPO"]["gold_gain"]["mean"] == pytest.approx(1.25)
    assert "rm_score_gain" not in rows["SFT"] and "updates" not in rows["SFT"]
    assert rows["PPO"]["updates"]["by_seed"] == [9, 9]  # the first mean of five that is the last five's
    # 0+3+5+5+5 = 18 < 20 <= 23: the sixth update
    assert rows["MA-PPO"]["updates"]["by_seed"] == [6, None] and rows["MA-PPO"]["updates"]["mean"] is None
    assert rows["MA-PPO"]["generated_tokens"]["by_seed"] == [60, None]
    assert rows["MA-PPO"]["seconds"]["by_seed"] == [12.0, None]


def test_interval_of_costs_is_students(results):
    for seed, late in ((2, 1), (3, 2)):
        curve = [0] * late + [9] * 8
        results += [made_up("PPO", seed, [1, 2, 3, 4], [9] * 9), made_up("late", seed, [1, 2, 3, 4], curve)]
    row = study_table(results)[-1]
    assert row["method"] == "late" and row["updates"]["by_seed"] == [6, 7]
    half = 12.7062047 * 0.5**0.5 / 2**0.5  # t(1) * s / sqrt(2)
    assert row["updates"]["high"] == pytest.approx(6.5 + half)
    assert row["updates"]["low"] == pytest.approx(6.5 - half) and row["updates"]["low"] > 0


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
    assert (got.low, got.high) == pytest.approx((mean - student(freedom) * error, mean + student(freedom) * error))
    assert student(1) >= student(freedom) >= student(1e9)


def test_students_t():
    """Against the closed forms for one and two degrees of freedom, the normal limit, and a printed table."""
    p = 0.975
    assert [student(0.5), student(1)] == pytest.approx([math.tan(math.pi * (p - 0.5))] * 2)
    assert student(2) == pytest.approx((2 * p - 1) * (2 / (4 * p * (1 - p))) ** 0.5)
    assert student(1e12) == pytest.approx(statistics.NormalDist().inv_cdf(p))
    assert [student(10), student(30)] == pytest.approx([2.228, 2.042], abs=5e-4)


def test_a_sure_gain_and_single_seeds_and_prompts():
    assert crossed_interval(np.full((3, 5), 2.0))[:3] == (2.0, 2.0, 2.0)
    values = np.array([1.0, 2.0, 4.0])
    half = 4.30265273 * values.std(ddof=1) / 3**0.5
    for table in (values[:, None], values[None]):  # the other seeds of one prompt; the other prompts of one seed
        got = crossed_interval(table)
        assert (got.low, got.high) == pytest.approx((values.mean() - half, values.mean() + half))
    assert crossed_interval(np.array([[3.0]]))[:3] == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("seeds, prompts, rest", [(1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.2, 3.0, 5.0)])
def test_crossed_interval_holds_the_truth_about_as_often_as_it_says(seeds, prompts, rest):
    """Three seeds drawn from the model. (A bootstrap holds the truth in 70 to 80 % where seeds differ.)"""
    generator, held = np.random.default_rng(1), 0
    for _ in range(1500):
        gaps = 0.7 + seeds * generator.normal(size=(3, 1)) + prompts * generator.normal(size=(1, 40))
        got = crossed_interval(gaps + rest * generator.normal(size=(3, 40)))
        held += got.low <= 0.7 <= got.high
    assert 0.92 <= held / 1500 <= 0.995


def test_seeds_with_another_zero_do_not_widen_a_gain():
    results = [made_up(m, s, [100.0 * s + d] * 4) for s in range(3) for m, d in (("SFT", 0), ("PPO", 1))]
    row = study_table(results)[1]
    assert row["rm_score"]["std"] == 100
    assert [row["rm_score_gain"][k] for k in ("mean", "low", "high")] == [1.0, 1.0, 1.0]


def test_differences_from_the_target_method_and_costs_in_all(results):
    rows = {row["method"]: row for row in study_table(results)}
    assert "rm_score_difference" not in rows["PPO"] and rows["SFT"]["rm_score_difference"]["by_seed"] == [-1.0, -2.0]
    assert rows["MA-PPO"]["rm_score_difference"]["by_seed"] == [1.5, 0.5]
    assert rows["MA-PPO"]["gold_difference"]["by_seed"] == [0.75, 0.25]
    assert "cost_updates" not in rows["SFT"]
    assert [rows["PPO"][f"cost_{cost}"] for cost in ("updates", "generated_tokens", "seconds")] == [9, 90, 18]


def test_explained_variance_is_a_mean_over_updates_and_seeds():
    results = [made_up("PPO", seed, [1.0], curve=[0.0, 1.0]) for seed in (0, 1)]
    for result in results:
        for step in result["curve"]:
            step["score_explained_variance"] = 0.1 * step["update"] + result["seed"]
    rows = study_table([*results, made_up("RLOO", 0, [1.0], curve=[0.0])])
    assert rows[0]["score_explained_variance"] == pytest.approx(0.65) and "score_explained_variance" not in rows[1]
    (line,) = (line for line in markdown(rows).split("\n\n")[2].splitlines() if line.startswith("| PPO"))
    assert "| 0.65 |" in line


def test_where_no_reward_model_trained_its_score_is_left_out(protocol, results, tmp_path):
    rewarded = [result | {"options": {"reward": "gold"} if result["method"] != "SFT" else {}} for result in results]
    row = study_table(rewarded)[1]
    assert "gold_gain" in row and not any(key.startswith("rm_score") for key in row)
    study = load_study(protocol(methods=dict.fromkeys(("SFT", "PPO", "MA-PPO"), METHOD)))
    names = {path.name for path in study_figures(study, rewarded, study_table(rewarded), tmp_path)}
    assert "gold_mean.png" in names and "rm_score_mean.png" not in names


def test_results_that_cannot_be_compared(results):
    with pytest.raises(InputError, match="PPO with seed 1 is there twice"):
        by_method([*results, made_up("PPO", 1, [1])])
    with pytest.raises(InputError, match="other, seed 0 and SFT, seed 0 answered different prompts"):
        study_table([*results, made_up("other", 0, [1], prompts="q")])


def test_markdown_shows_every_seed(results):
    text = markdown(study_table(results))
    lines = {line.split(" | ")[0].strip("| "): line for line in text.split("\n\n")[0].splitlines()}
    assert "(2.50; 13.50)" in lines["PPO"] and "1.50 [-4.85, 7.85] (1.00; 2.00)" in lines["PPO"]
    scores, legend, costs, cost_legend = text.split("\n\n")
    assert (legend, cost_legend) == (LEGEND, COST_LEGEND)  # each table explains its brackets
    assert "(6; never)" in costs and "| SFT |" in scores and "| SFT |" not in costs
    for part in (scores, costs):
        assert len({line.count("|") for line in part.splitlines()}) == 1


def test_report_without_baseline_or_target_method(protocol, results, tmp_path):
    study = load_study(protocol(methods={"MA-PPO": METHOD}))
    text = study_report(study, [r for r in results if r["method"] == "MA-PPO"], tmp_path, tmp_path / "figures")
    assert "MA-PPO" in text and "gain" not in text and LEGEND in text and COST_LEGEND not in text.split(LEGEND)[0]
    assert json.loads((tmp_path / "summary.json").read_text())["methods"][0]["seeds"] == [0, 1]


def test_figures_of_each_group(protocol, results, tmp_path):
    names = ("SFT", "PPO", "MA-PPO")
    methods = {name: METHOD for name in names}
    study = load_study(protocol(methods=methods, figures={"a": ["SFT", "PPO"], "b": list(names)}))
    paths = study_figures(study, results, study_table(results), tmp_path)
    kinds = ("final_scores", "differences", "costs", "rm_score_mean", "gold_mean")
    assert sorted(path.name for path in paths) == sorted(f"{g}_{kind}.png" for g in "ab" for kind in kinds)
    assert all(path.stat().st_size > 1000 for path in paths)


def leaves(value, path=""):
    """Path -> number or text, of anything nested."""
    if not isinstance(value, dict | list):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: leaf for name, item in items for key, leaf in leaves(item, f"{path}/{name}").items()}


@pytest.mark.parametrize("name", ["main", "ablations", "tuning", "steps"])
def test_stored_summaries_come_out_again(name):
    """From the stored results, to rounding, by the names that their keys have now."""
    study, stored = load_study(name), shipped(f"results/{name}/summary.json").read_text(encoding="utf-8")
    order = list(study.methods)
    results = sorted(stored_results(name), key=lambda result: order.index(result["method"]))
    stored = stored.replace("_lead", "_difference").replace("spent_", "cost_")
    rows = study_table(results, study.baseline, study.target_method)
    ours, before = leaves(rows), leaves(json.loads(stored)["methods"])
    numbers = {path for path, value in before.items() if isinstance(value, float)}
    assert {path: ours[path] for path in before.keys() - numbers} == {p: before[p] for p in before.keys() - numbers}
    assert [ours[path] for path in numbers] == pytest.approx([before[path] for path in numbers], rel=1e-5, abs=1e-9)
    assert ours.keys() == before.keys()


def test_results_that_are_not_there():
    with pytest.raises(InputError, match="marlhf study --name nothing"):
        stored_results("nothing")
