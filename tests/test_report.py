"""What a finished run leaves: table, summary file, figures, and how soon a method reaches PPO's final score."""

import json

import numpy as np
import pytest
from matplotlib import pyplot as plt

from marlhf_lite.evaluation.scores import to_frame
from marlhf_lite.experiments.reports import caption, run_report
from marlhf_lite.plotting import training


def history(scores, **more):
    names = ("advantage_norm", "q_norm", "advantage_rms", "q_rms")
    return [
        {"update": i + 1, "score_mean": score} | dict.fromkeys(names, 1.0 + i) | more
        for i, score in enumerate(scores)
    ]


def answers(**methods):
    return [
        {
            "prompt": f"p{i}",
            "method": name.replace("_", "-"),
            "tokens": 5,
            "ended": True,
            "kl": 0.0,
            "rm_score": score,
        }
        for name, scores in methods.items()
        for i, score in enumerate(scores)
    ]


SLOW = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]  # the last five: 2
FAST = [0.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]  # mean of 2 to 6: 2
ROWS = answers(SFT=[0.0, 1.0], PPO=[1.0, 2.0], MA_PPO=[2.0, 3.0])
BOTH = {"PPO": history(SLOW), "MA-PPO": history(FAST)}


def write(tmp_path, rows, histories):
    """The report's table, its summary, and the names of its figures."""
    text = run_report(
        tmp_path, to_frame(rows), histories, tmp_path / "pictures", {"seed": 7, "n": "5"}
    )
    assert not plt.get_fignums() and (tmp_path / "table.md").read_text() == text + "\n"
    return (
        text,
        json.loads((tmp_path / "summary.json").read_text()),
        {p.stem for p in tmp_path.glob("pictures/*.png")},
    )


def test_updates_to_the_final_score_of_ppo(tmp_path):
    histories = BOTH | {"flat": history([0.0] * 10)}
    text, saved, _ = write(tmp_path, [*ROWS, *answers(flat=[0.0, 0.0])], histories)
    updates = {row["method"]: row.get("updates_to_ppo", "no entry") for row in saved["methods"]}
    assert updates == {"SFT": "no entry", "PPO": 9, "MA-PPO": 6, "flat": None}
    assert [line.split("|")[-2].strip() for line in text.split("\n")[2:]] == ["-", "9", "6", "-"]


def test_no_target_a_null_in_a_curve_and_a_single_update(tmp_path):
    _, saved, _ = write(tmp_path, ROWS, {"MA-PPO": history(FAST)})  # without PPO there is no target
    assert all("updates_to_ppo" not in row for row in saved["methods"])
    _, saved, _ = write(tmp_path, ROWS, BOTH | {"PPO": history([*SLOW[:-1], None])})
    assert saved["methods"][2]["updates_to_ppo"] == 6
    _, saved, _ = write(tmp_path, answers(SFT=[0.0], PPO=[1.0]), {"PPO": history([1.0])})
    assert saved["methods"][1]["updates_to_ppo"] == 1
    assert saved["methods"][1]["rm_score_gain"] == {
        "mean": 1.0,
        "low": 1.0,
        "high": 1.0,
        "level": 0.95,
    }


CURVES = {"reward_curves", "l2_norms"}
GOLD = {"PPO": history(SLOW, gold_mean=1.0), "MA-PPO": history(FAST, gold_mean=2.0)}
SCORED = [row | {"gold": 1.0 + i % 3} for i, row in enumerate(ROWS)]
BARE = [{k: v for k, v in row.items() if k != "rm_score"} for row in ROWS]
FIGURES = [  # rows of answers, histories -> figures of what is known
    (ROWS, BOTH, CURVES | {"rm_score_distribution"}),
    (SCORED, GOLD, CURVES | {"gold_curves", "rm_score_distribution", "gold_distribution"}),
    (ROWS, {}, {"rm_score_distribution"}),  # an evaluation alone
    (BARE, {}, set()),
    (BARE, GOLD | {"MA-PPO": []}, CURVES | {"gold_curves"}),  # a method without updates is left out
]


@pytest.mark.parametrize(("rows", "histories", "expected"), FIGURES)
def test_figures_are_of_what_is_known(tmp_path, rows, histories, expected):
    assert write(tmp_path, rows, histories)[2] == expected


@pytest.mark.parametrize(
    ("reward", "label"),
    [
        ("rm", "reward model score"),
        ("my:short_one", "my:short_one"),
        ("tests", "reward of tests"),
        ("gold", "gold score"),
        ("environment", "my:Game"),
    ],
)
def test_curves_are_named_after_the_reward(tmp_path, monkeypatch, reward, label):
    labels = {}
    monkeypatch.setattr(
        training,
        "save",
        lambda axes, path: labels.update({path.stem: np.ravel(axes)[0].get_ylabel()}),
    )
    config = {"reward": reward, "environment": "my:Game"}
    run_report(tmp_path, to_frame(ROWS), BOTH, tmp_path, config)
    assert labels["reward_curves"] == label


def test_gold_is_called_what_it_is_if_the_policy_was_trained_on_it(tmp_path):
    for reward, heading in [
        ("rm", "| gold score |"),
        ("gold", "| gold score, trained on |"),
        ("tests", "| share of tests passed, trained on |"),
    ]:
        text = run_report(tmp_path, to_frame(SCORED), {}, tmp_path, {"reward": reward})
        assert heading in text


def test_a_reward_has_its_own_name_in_table_summary_and_figure(tmp_path):
    """Also if no method has a gain over another, and as files that a reader takes out of the folder."""
    rows = [
        {k: v for k, v in row.items() if k != "rm_score"}
        | {"my:short_one": row["rm_score"], "reward": "my:short_one, 1a2b"}
        for row in ROWS
    ]
    text, saved, figures = write(tmp_path, rows, {})
    assert "| my:short_one |" in text and "gold" not in text + json.dumps(saved)
    assert saved["methods"][1]["my:short_one_gain"]["mean"] == 1.0
    assert figures == {"reward_distribution"} == {p.stem for p in tmp_path.glob("pictures/*.pdf")}
    alone, _, _ = write(tmp_path, [row for row in rows if row["method"] == "SFT"], {})
    assert "| my:short_one |" in alone


def test_gains_are_at_the_same_temperature(tmp_path):
    rows = [
        row | {"temperature": t, "rm_score": row["rm_score"] + 10 * t}
        for row in ROWS
        for t in (0, 1)
    ]
    _, saved, _ = write(tmp_path, rows, {})
    gains = {row["method"]: row.get("rm_score_gain", {}).get("mean") for row in saved["methods"]}
    assert gains["PPO T=0.0"] == gains["PPO T=1.0"] == 1.0
    assert gains["SFT T=0.0"] is gains["SFT T=1.0"] is None
    assert "gain over SFT at the same temperature" in caption(to_frame(rows), 2)
    assert "at the same" not in caption(to_frame(ROWS), 2)
