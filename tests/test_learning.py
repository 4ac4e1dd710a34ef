"""Speed of learning: medians, censored runs, paired differences and predictions on made-up curves."""

import json

import pytest
import yaml
from matplotlib import pyplot as plt
from scipy import stats

from marlhf_lite.config.options import StudyConfig
from marlhf_lite.lab.studies.learning import learning_figures, learning_report, learning_table, sweep
from marlhf_lite.lab.studies.results import stored_results, t_interval
from marlhf_lite.lab.studies.study import load_study, plan, run_study
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.shipped import shipped

OPTIONS = {"dataset": "tiny-umbrella", "part": "L8-first", "lam": 0.95, "sigma": "equal", "gae_over": "macro_actions"}
GROUPS = {"L8": ["L8 E0", "L8 E4"]}


def result(method, seed, scores, **options):
    seen = {"credit_seen": 0.5, "score_explained_variance": 0.1}
    curve = [{"update": u, "gold_mean": score} | seen for u, score in enumerate(scores, 1)]
    return {"method": method, "seed": seed, "curve": curve, "options": OPTIONS | options}


@pytest.fixture
def results():
    """E4 is two updates faster with seed 0; with seed 1, E0 never gets there."""
    slow, fast, never = [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0] * 6
    out = [result("L8 E0", 0, slow, n="1"), result("L8 E0", 1, never, n="1")]
    return out + [result("L8 E4", 0, fast, n="5"), result("L8 E4", 1, fast, n="5")]


def test_table(results):
    first, second = learning_table(GROUPS, results, 0.8)
    assert first["updates"] == {"median": None, "by_seed": [6, None]}
    assert second["updates"] == {"median": 4, "by_seed": [4, 4]}
    assert first["area"]["by_seed"] == [0.5, 0.0] and "area_difference" not in first
    assert second["updates_difference"]["by_seed"] == [-2, -2]  # a run that never gets there counts with its six
    assert second["area_difference"]["by_seed"] == pytest.approx([1 / 3, 5 / 6])
    assert first["credit_seen"] == 0.5
    assert first["kept"] == pytest.approx([0.95**12, 0.5 + 0.5 * 0.95**12, 1.0])  # 13 tokens
    assert second["kept"] == pytest.approx([0.95**2, 0.1 + 0.5 * 0.95**2, 0.2])  # 3 macro actions


def test_a_warm_up_of_the_critic_is_not_counted():
    warm = result("a", 0, [1, 1, 0, 0, 1, 1, 1], critic_warmup=2, n="1")
    (row,) = learning_table({"": ["a"]}, [warm], 0.8)
    assert row["updates"]["by_seed"] == [5] and row["area"]["mean"] == pytest.approx(0.6)


def test_interval_is_students():
    gaps = [1.0, 2.0, 4.0]
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval()
    assert [t_interval(gaps)[key] for key in ("low", "high")] == pytest.approx([low, high])
    assert t_interval([3.0]) == {"mean": 3.0, "low": None, "high": None, "by_seed": [3.0]}


@pytest.fixture
def protocol(tmp_path):
    def make(command="ppo", threshold=0.8, **options):
        methods = {name: {"command": command, "options": options} for name in GROUPS["L8"]}
        keys = {"seeds": [0, 1], "threshold": threshold, "methods": methods, "figures": GROUPS}
        (tmp_path / "small.yaml").write_text(yaml.safe_dump(keys | {"shared": {"dataset": "tiny-umbrella"}}))
        return str(tmp_path / "small.yaml")

    return make


def test_report(protocol, results, tmp_path):
    text = learning_report(load_study(protocol()), results, tmp_path, tmp_path / "figures")
    assert "never (6; never)" in text and "4 (4; 4)" in text and "-2.0 [-2.0, -2.0]" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["threshold"] == 0.8
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == ["differences.png", "learning_curves.png"]


def test_a_sweep_over_n_has_a_figure_of_its_own(tmp_path):
    groups = {"n": ["n=1", "n=2", "n=inf"]}
    results = [result(name, seed, [0, seed, 1, 1], n=name[2:]) for name in groups["n"] for seed in (0, 1)]
    rows = learning_table(groups, results, 0.8)
    assert [row["n"] for row in rows] == ["1", "2", "inf"]
    names = [path.name for path in learning_figures(groups, results, rows, tmp_path)]
    assert names == ["learning_curves.png", "differences.png", "n_sweep.png"]
    axes = sweep({row["n"]: row for row in rows}, 4)
    assert [line.get_ydata()[0] for line in axes[0].lines if line.get_marker() == "x"] == [4, 4, 4]  # seed 0: never
    assert axes[1].lines[0].get_ydata() == pytest.approx([0.95**12, 0.95**6, 1.0])
    plt.close("all")


def test_sentences_have_no_prediction():
    (row,) = learning_table({"": ["a"]}, [result("a", 0, [0, 1], n="5", termination="sentence")], 0.8)
    assert "kept" not in row and "n" not in row


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"command": "sft"}, "threshold: sft has no curve"),
        ({}, "no reward model is trained"),
        ({"reward": "gold"}, "critic_init: sft"),
        ({"threshold": "high"}, "threshold 'high': give a float"),
    ],
)
def test_faulty_protocols(protocol, changes, words):
    with pytest.raises(InputError, match=words) as error:
        plan(load_study(protocol(**changes)))
    assert len(str(error.value).splitlines()) == 1
    plan(load_study(protocol(reward="gold", critic_init="sft")))


@pytest.mark.parametrize("name", ["umbrella", "umbrella_seeing", "umbrella_noise", "n_sweep", "critic"])
def test_stored_results_are_those_of_the_protocol(name, capsys):
    study, results = load_study(name), stored_results(name)
    run_study(StudyConfig(name=name, output_dir=str(shipped(f"results/{name}")), dry_run=True))
    *lines, _ = capsys.readouterr().out.splitlines()
    assert lines and all(line.endswith((" done", " to do")) for line in lines)  # none of an option that changed
    order = list(study.methods)
    results = sorted(results, key=lambda result: (order.index(result["method"]), result["seed"]))
    stored = json.loads(shipped(f"results/{name}/summary.json").read_text(encoding="utf-8"))
    there = {result["method"] for result in results}
    groups = {group: [name for name in names if name in there] for group, names in study.figures.items()}
    assert json.loads(json.dumps(learning_table(groups, results, study.threshold))) == stored["methods"]
