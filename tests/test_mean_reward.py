"""Differences of mean rewards and their power, on made-up curves, against scipy and simulation."""

import json

import numpy as np
import pytest
import yaml
from scipy import stats

from marlhf_lite.lab.studies import mean_reward
from marlhf_lite.lab.studies.mean_reward import difference_of_means, interaction, mean_reward_report
from marlhf_lite.lab.studies.power import power_of, visible, visible_gap, visible_ratio
from marlhf_lite.lab.studies.study import load_study

SPAN, RNG = [3, 5], np.random.default_rng(0)
SHIFT = {"PPO": 0.0, "MA-PPO": 0.2, "PPO lam^(1/5)": 0.1}


def run(method, seed):
    rows = [
        {"update": u, "rm_score_mean": SHIFT[method] + RNG.normal() * 0.1 + 9 * (u < 3), "kl_k1": u / 10}
        | {"score_explained_variance": 0.1, "response_length": 64.0, "value_noise": 0.05}
        for u in range(1, 6)
    ]
    return {"method": method, "seed": seed, "curve": rows, "options": {}}


@pytest.fixture(scope="module")
def results():
    return [run(method, seed) for seed in range(6) for method in SHIFT]


def means(results, method):
    rows = [r["curve"] for r in results if r["method"] == method]
    return np.array([[row["rm_score_mean"] for row in curve[2:]] for curve in rows]).mean(1)


def test_a_difference_is_paired_by_seed_and_of_these_updates_alone(results):
    gaps = means(results, "MA-PPO") - means(results, "PPO")
    found = difference_of_means(results, ["MA-PPO", "PPO"], SPAN)
    low, high = stats.ttest_rel(means(results, "MA-PPO"), means(results, "PPO")).confidence_interval()
    assert found["by_seed"] == pytest.approx(gaps) and found["seeds"] == list(range(6))
    assert [found[key] for key in ("mean", "low", "high")] == pytest.approx([gaps.mean(), low, high])
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
    assert [found[key] for key in ("mean", "low", "high")] == pytest.approx([middle, middle - half, middle + half])
    assert power_of(found["visible"], sum(parts) ** 0.5, freedom) == pytest.approx(0.9)


def test_power_is_that_of_simulated_studies():
    """Of 20,000 studies with six seeds and the visible effect, 90 % find it."""
    gaps = RNG.normal(size=(20_000, 6))
    effect = visible(1 / 6**0.5, 5)
    found = stats.ttest_1samp(gaps + effect, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.9, abs=0.01)
    assert visible_gap(gaps[0]) == pytest.approx(effect * gaps[0].std(ddof=1))
    assert visible_ratio(np.exp(gaps[0])) == pytest.approx(np.exp(visible_gap(gaps[0])))
    assert visible(0.0, 5) == 0 and visible(2.0, 5) == pytest.approx(2 * visible(1.0, 5))


def test_report(results, tmp_path, monkeypatch):
    """The first contrast is the primary outcome; one may be taken from the same difference in a stored study."""
    contrasts = {"MA-PPO - PPO": {"difference": ["MA-PPO", "PPO"]}, "far - near": {"difference": ["MA-PPO", "PPO"]}}
    contrasts["far - near"]["subtracted_from"] = "far"
    keys = {"methods": {name: {"command": "ppo"} for name in SHIFT}, "contrasts": contrasts, "mean_updates": SPAN}
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
    assert summary["means"]["gold_mean"]["PPO"]["3"] == pytest.approx(means(results, "PPO")[3])
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"learning_curves.png", "score_over_kl.png"}
