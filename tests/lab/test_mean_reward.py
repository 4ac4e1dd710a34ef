"""Differences of mean rewards and their power, on made-up curves, against scipy and simulation."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from scipy import stats

from marlhf_lab.studies import mean_reward, numbers_in_texts
from marlhf_lab.studies.contrasts import ratio_of_updates
from marlhf_lab.studies.could_be_seen import seen
from marlhf_lab.studies.mean_reward import (
    difference_of_means,
    differences,
    interaction,
    mean_reward_report,
)
from marlhf_lab.studies.power import minimum_detectable, visible_gap, visible_ratio
from marlhf_lab.studies.results import stored_results, t_interval
from marlhf_lab.studies.study import load_study
from marlhf_lite.utils.tables import interval

SPAN, RNG = [3, 5], np.random.default_rng(0)
SHIFT = {"PPO": 0.0, "MA-PPO": 0.2, "PPO lam^(1/5)": 0.1}


def run(method, seed):
    rows = [
        {
            "update": u,
            "score_mean": SHIFT[method] + RNG.normal() * 0.1 + 9 * (u < 3),
            "kl_k1": u / 10,
        }
        | {"score_explained_variance": 0.1, "response_length": 64.0, "value_noise": 0.05}
        | {"gold_mean": RNG.normal()}  # another score, which is not trained on
        for u in range(1, 6)
    ]
    return {"method": method, "seed": seed, "curve": rows, "options": {}}


@pytest.fixture(scope="module")
def results():
    return [run(method, seed) for seed in range(6) for method in SHIFT]


def means(results, method):
    rows = [r["curve"] for r in results if r["method"] == method]
    return np.array([[row["score_mean"] for row in curve[2:]] for curve in rows]).mean(1)


def test_a_difference_is_paired_by_seed_and_of_these_updates_alone(results):
    gaps = means(results, "MA-PPO") - means(results, "PPO")
    found = difference_of_means(results, ["MA-PPO", "PPO"], SPAN)
    low, high = stats.ttest_rel(
        means(results, "MA-PPO"), means(results, "PPO")
    ).confidence_interval()
    assert found["by_seed"] == pytest.approx(gaps) and found["seeds"] == list(range(6))
    assert [found[key] for key in ("mean", "low", "high")] == pytest.approx(
        [gaps.mean(), low, high]
    )
    fewer = difference_of_means(results[1:], ["MA-PPO", "PPO"], SPAN)  # seed 0 has no PPO
    assert fewer["seeds"] == list(range(1, 6)) and fewer["by_seed"] == pytest.approx(gaps[1:])


def test_an_interaction_has_welch_s_interval():
    """Against its formulas."""
    far, near = RNG.normal(0.2, 0.1, 9), RNG.normal(0.1, 0.3, 5)
    parts = far.var(ddof=1) / 9, near.var(ddof=1) / 5
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 8 + parts[1] ** 2 / 4)
    half = stats.t.ppf(0.975, freedom) * sum(parts) ** 0.5
    found = interaction(far, near)
    middle = far.mean() - near.mean()
    assert [found[key] for key in ("mean", "low", "high")] == pytest.approx(
        [middle, middle - half, middle + half]
    )
    assert found["visible"] == pytest.approx(minimum_detectable(sum(parts) ** 0.5, freedom))


@pytest.mark.parametrize(("seeds", "low"), [(24, 1.01), (10, 1.03), (5, 1.083), (3, 1.217)])
def test_power_is_that_of_simulated_studies(seeds, low):
    """Of 20,000 studies with the visible effect, made larger by what its docstring says, 90 % find it."""
    gaps = RNG.normal(size=(20_000, seeds))
    effect = minimum_detectable(1 / seeds**0.5, seeds - 1)
    found = stats.ttest_1samp(gaps + low * effect, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.9, abs=0.01)
    assert visible_gap(gaps[0]) == pytest.approx(effect * gaps[0].std(ddof=1))
    assert visible_ratio(np.exp(gaps[0])) == pytest.approx(np.exp(visible_gap(gaps[0])))


def test_the_size_that_a_study_could_have_seen():
    """From its primary contrast, in its own unit; one seed has none."""
    ratios = ratio_of_updates(
        stored_results("critic_head"), ["blind MA-PPO, zero", "blind MA-PPO"], 0.8, 3
    )["by_seed"]
    assert seen("critic_head") == f"ratio {visible_ratio(ratios):.2f}"
    assert (
        seen("sentiment_near") == "0.069 in reward"
        and seen("gemma_hh") == seen("sentiment_rates") == "-"
    )
    gaps = difference_of_means(stored_results("turns"), ["MA-PPO turn", "PPO"], (41, 80))["by_seed"]
    assert seen("turns") == f"{visible_gap(gaps):.2g} in reward"


def test_figure_of_differences(results):
    """A line for each contrast: its seeds and its mean; the interaction has no seeds of its own."""
    pair = {"difference": ["MA-PPO", "PPO"]}
    study = SimpleNamespace(mean_updates=SPAN, contrasts={"paired": pair, "far - near": pair})
    paired = difference_of_means(results, pair["difference"], SPAN)
    far = interaction(paired["by_seed"], [gap / 2 for gap in paired["by_seed"]])
    (axes,) = differences(study, {"paired": paired, "far - near": far})
    assert [label.get_text() for label in axes.get_yticklabels()] == ["paired", "far - near"]
    seeds = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "."]
    assert seeds == [paired["by_seed"], []]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"] == [
        paired["mean"],
        far["mean"],
    ]


def test_report(results, tmp_path, monkeypatch):
    """The first contrast is the primary outcome; one may be taken from the same difference in a stored study."""
    contrasts = {
        "MA-PPO - PPO": {"difference": ["MA-PPO", "PPO"]},
        "far - near": {"difference": ["MA-PPO", "PPO"]},
    }
    contrasts["far - near"]["subtracted_from"] = "far"
    keys = {
        "methods": {name: {"command": "ppo"} for name in SHIFT},
        "contrasts": contrasts,
        "mean_updates": SPAN,
    }
    (tmp_path / "small.yaml").write_text(
        yaml.safe_dump({"seeds": list(range(7)), "equal_kl": ["MA-PPO", "PPO"]} | keys)
    )
    monkeypatch.setattr(mean_reward, "stored_results", lambda name: {"far": results}[name])
    study = load_study(str(tmp_path / "small.yaml"))
    text = mean_reward_report(study, results, tmp_path, tmp_path / "figures")
    first, second = text.split("\n")[2:4]
    assert "| primary outcome |" in first and "far - near | exploration" in second
    assert "6 of 7 planned seeds are there: unfinished" in text and "updates 3 to 5" in text
    assert "MA-PPO minus PPO:" in text.split("\n")[-1]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["contrasts"]["far - near"]["mean"] == pytest.approx(0)
    assert summary["means"]["mean reward"]["PPO"]["3"] == pytest.approx(means(results, "PPO")[3])
    assert summary["means"]["KL at the end"]["PPO"]["3"] == pytest.approx(0.3)
    assert "| 0.40 | 0.10 | 0.05 | 0.30 |" in text  # KL of updates 3 to 5, and of all five
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert names == {"learning_curves", "differences", "score_over_kl"}
    # Its cells in docs/results.md: nothing of six seeds where seven are planned.
    monkeypatch.setattr(numbers_in_texts, "shipped", lambda name: tmp_path.parent)
    names = "contrast|MA-PPO - PPO|+.3f mean|PPO|KL|.1f mean|PPO|KL at the end|.1f"
    row = " | ".join("{" + name + "}" for name in re.split(r" (?=contrast|mean\|)", names))
    value = summary["contrasts"]["MA-PPO - PPO"]
    for seeds, cells in ((7, "- | - | -"), (6, f"{interval(value, '+.3f')} | 0.4 | 0.3")):
        planned = replace(study, seeds=list(range(seeds)))
        monkeypatch.setattr(numbers_in_texts, "load_study", lambda name, planned=planned: planned)
        numbers_in_texts._mean_rewards.cache_clear()
        assert numbers_in_texts.fill(row, tmp_path.name) == cells


def test_a_report_of_one_seed_shows_differences_without_intervals(results, tmp_path, monkeypatch):
    """A pilot: `--seeds 0`. One seed has no interval, and so nothing that it could have seen."""
    pair = {"difference": ["MA-PPO", "PPO"]}
    keys = {"methods": {name: {"command": "ppo"} for name in SHIFT}, "mean_updates": SPAN}
    keys["contrasts"] = {"paired": pair, "far - near": pair | {"subtracted_from": "far"}}
    (tmp_path / "pilot.yaml").write_text(yaml.safe_dump({"seeds": [0, 1]} | keys, sort_keys=False))
    monkeypatch.setattr(mean_reward, "stored_results", lambda name: results)
    study, one = load_study(str(tmp_path / "pilot.yaml")), [r for r in results if r["seed"] == 0]
    text = mean_reward_report(study, one, tmp_path, tmp_path / "figures")
    gap = means(one, "MA-PPO")[0] - means(one, "PPO")[0]
    assert f"| paired | primary outcome | {gap:+.3f} ({gap:+.2f}) | - |" in text
    assert "| far - near | exploration | - | - |" in text and "1 of 2 planned seeds" in text


def test_report_without_contrasts(results, tmp_path):
    """Figures and the table of methods; what a method has not is a dash."""
    few = [
        r | {"curve": [{k: x for k, x in row.items() if "v" not in k} for row in r["curve"]]}
        for r in results[::3]
    ]
    keys = {
        "methods": {"RLOO": {"command": "rloo"}, "PPO": {"command": "ppo"}},
        "mean_updates": SPAN,
    }
    (tmp_path / "few.yaml").write_text(yaml.safe_dump({"seeds": list(range(6))} | keys))
    study, both = (
        load_study(str(tmp_path / "few.yaml")),
        [r | {"method": "RLOO"} for r in few] + results[::3],
    )
    text = mean_reward_report(study, both, tmp_path, tmp_path / "figures")
    legend, rest = text.split("\n\n")
    assert (
        "updates 3 to 5" in legend
        and "6 of 6 planned seeds are there." in legend
        and "paired" not in legend
    )
    reward = interval(t_interval([*means(results, "PPO")]))
    assert (
        f"| RLOO | {reward} | 0.40 | - | - | 0.30 |" in rest
        and f"| PPO | {reward} | 0.40 | 0.10 | 0.05 |" in rest
    )
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"learning_curves"}
