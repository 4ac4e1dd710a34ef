"""Scores at equal KL, against closed forms."""

import numpy as np
import pytest
from made_up_results import made_up

from marlhf_lab.studies import equal_kl
from marlhf_lab.studies.results import t_quantile
from marlhf_lite.plotting import training as plots


def run(method, seed, kls, slope):
    """A run whose score is `slope` times its KL."""
    result = made_up(method, seed, [0.0])
    rows = [{"update": u, "kl_k1": kl, "gold_mean": slope * kl} for u, kl in enumerate(kls, 1)]
    return result | {"curve": rows, "options": {}}


@pytest.fixture
def results():
    """MA-PPO goes twice as far; its score per nat is higher by 1, 2 and 3."""
    pairs = zip((0, 1, 2), (2.0, 3.0, 4.0), strict=True)
    found = [run("MA-PPO", seed, np.linspace(0, 4, 30), slope) for seed, slope in pairs]
    return found + [run("PPO", seed, np.linspace(0, 2, 20), 1.0) for seed in (2, 0, 1)]


def test_difference_against_its_closed_form(results):
    # of PPO's path; of a line the mean is in the middle
    end = np.linspace(0, 2, 20)[-equal_kl.WINDOW :].mean()
    expected = np.array([1, 2, 3]) * 0.75 * end
    found = equal_kl.difference_at_kl(results, "MA-PPO", "PPO")
    assert found["kl"] == pytest.approx([end] * 3)
    assert found["by_seed"] == pytest.approx(expected)
    half = t_quantile(2) * expected.std(ddof=1) / 3**0.5
    assert [found["low"], found["high"]] == pytest.approx(
        [expected.mean() - half, expected.mean() + half]
    )
    turned = equal_kl.difference_at_kl(results, "PPO", "MA-PPO")
    assert turned["mean"] == pytest.approx(-found["mean"])


def test_where_a_kl_falls_the_path_stays(results):
    kl, score = equal_kl.path_of(run("PPO", 0, [0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 9], 1.0))
    assert (np.diff(kl) >= 0).all() and kl[4] == kl[9] == 2.0
    assert score[9] == 0.0 and score[-1] == pytest.approx(9 / 5)


def test_line_and_figure(results):
    line = equal_kl.equal_kl_line(results, "MA-PPO", "PPO")
    assert "MA-PPO minus PPO: +" in line and "(1.8; 1.8; 1.8 nats)" in line
    ax = equal_kl.score_over_kl(results, ["PPO", "MA-PPO"])
    assert len(ax.lines) == 2 * (3 + 1)
    longest = [max(line.get_xdata()) for line in ax.lines if line.get_label() in ("PPO", "MA-PPO")]
    assert longest[1] > 1.9 * longest[0]
    plots.plt.close(ax.figure)


def test_a_reward_model_s_score_is_not_called_gold(results):
    """Data without a gold score: what is compared is what was trained on. A function's score is gold by itself."""
    scored = [
        r | {"curve": [row | {"score_mean": row["gold_mean"]} for row in r["curve"]]}
        for r in results
    ]
    alone = [
        r | {"curve": [{k: x for k, x in row.items() if k != "gold_mean"} for row in r["curve"]]}
        for r in scored
    ]
    for runs, reward, name in (
        (scored, "rm", "gold"),
        (alone, "rm", "RM"),
        (alone, "mine:short", "gold"),
    ):
        runs = [r | {"options": {"reward": reward}} for r in runs]
        assert f"At equal KL, {name} score of" in equal_kl.equal_kl_line(runs, "MA-PPO", "PPO")
        ax = equal_kl.score_over_kl(runs, ["PPO", "MA-PPO"])
        assert ax.get_ylabel() == f"{name} score of training batches"
        plots.plt.close(ax.figure)
