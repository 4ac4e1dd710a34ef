"""Speed of learning: medians, censored runs, paired differences, contrasts and predictions on made-up curves."""

import json
import math
import re

import pytest
import yaml

from marlhf_lab.studies.answer import FIGURE, answer_figure, answer_table
from marlhf_lab.studies.contrasts import ratio_of_updates, ratio_to_final_score
from marlhf_lab.studies.learning import learning_report, learning_table
from marlhf_lab.studies.result_tables import MARKED
from marlhf_lab.studies.study import STUDIES, load_study

OPTIONS = {
    "dataset": "tiny-umbrella",
    "part": "L8-first",
    "lam": 0.95,
    "sigma": "equal",
    "objective": "",
}
GROUPS = {"L8": ["L8 E0", "L8 E4"]}


def result(method, seed, scores, **options):
    seen = {"credit_seen": 0.5, "score_explained_variance": 0.1}
    curve = [
        {"update": u, "gold_mean": score, "kl_k1": u / 10} | seen
        for u, score in enumerate(scores, 1)
    ]
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
    # a run that never gets there counts with its six
    assert second["updates_difference"]["by_seed"] == [-2, -2]
    assert second["area_difference"]["by_seed"] == pytest.approx([1 / 3, 5 / 6])
    assert first["kept"] == pytest.approx([0.95**12, 0.5 + 0.5 * 0.95**12, 1.0])  # 13 tokens
    assert second["kept"] == pytest.approx([0.95**2, 0.1 + 0.5 * 0.95**2, 0.2])  # 3 macro actions
    warm = result("a", 0, [1, 1, 0, 0, 1, 1, 1], critic_warmup=2, n="5", termination="sentence")
    (row,) = learning_table({"": ["a"]}, [warm], 0.8)  # the critic's own updates do not count
    assert (
        row["updates"]["by_seed"] == [5]
        and row["area"]["mean"] == pytest.approx(0.6)
        and "kept" not in row
    )


def test_credit_kept_is_given_where_the_formula_holds():
    def kept(**options):
        return (
            "kept"
            in learning_table({"": ["a"]}, [result("a", 0, [1] * 6, n="5", **options)], 0.8)[0]
        )

    assert all(
        kept(objective=name) for name in ("", "sae", "vc_ppo", "released,vc_ppo=0.9")
    ) and kept(sigma="start")
    for name in ("vapo", "sae,vapo=0.1", "mine:MonteCarlo", "mine:essae"):
        assert not kept(objective=name)
    assert not any(kept(sigma=name) for name in ("unit", "position", "position_reversed"))
    assert not kept(last_token_alone=True)


def test_ratios_of_updates(results):
    """Against plain logarithms: seed 0 6/4, seed 1 (never: 6)/4; of one update, 3/2 and 5/2."""
    assert ratio_of_updates(results, ["L8 E0", "L8 E4"], 0.8, 3)["by_seed"] == pytest.approx(
        [1.5, 1.5]
    )
    found = ratio_of_updates(
        [*results[:1], result("L8 E0", 1, [0] * 10), *results[2:]], ["L8 E0", "L8 E4"], 0.8, 1
    )
    logs = [math.log(4 / 2), math.log(10 / 2)]
    half = 12.7062047 * abs(logs[0] - logs[1]) / 2
    ends = [math.exp(sum(logs) / 2 + sign * half) for sign in (-1, 1)]
    assert found["mean"] == pytest.approx(10**0.5) and [
        found["low"],
        found["high"],
    ] == pytest.approx(ends)
    twice = ratio_of_updates(results, ["L8 E0", "L8 E4", "L8 E4", "L8 E0"], 0.8, 3)
    assert twice["by_seed"] == pytest.approx([2.25, 2.25])


def test_report_begins_with_the_primary_outcome(results, tmp_path):
    contrasts = {
        "E0 over E4": {"ratio": GROUPS["L8"]},
        "equal": {"ratio": GROUPS["L8"][::-1], "margin": 1.6},
    }
    keys = {
        "methods": {name: {"command": "ppo"} for name in GROUPS["L8"]},
        "figures": GROUPS,
        "contrasts": contrasts,
    }
    keys["equal_kl"] = GROUPS["L8"]
    (tmp_path / "small.yaml").write_text(
        yaml.safe_dump({"seeds": [0, 1, 2], "threshold": 0.8} | keys)
    )
    text = learning_report(
        load_study(str(tmp_path / "small.yaml")), results, tmp_path, tmp_path / "figures"
    )
    first, second = text.split("\n")[2:4]
    assert (
        "primary outcome | 1.50 (1.50; 1.50) | above 1" in first and "equal within 1.6 |" in second
    )
    assert "2 of 3 planned seeds" in text and "never (6; never)" in text and "4 (4; 4)" in text
    assert json.loads((tmp_path / "summary.json").read_text())["threshold"] == 0.8
    assert "L8 E0 minus L8 E4: -" in text.split("\n")[-1]
    names = ("differences", "learning_curves", "score_over_kl")
    figures = {f"{name}{ending}" for name in names for ending in (".png", ".pdf")}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == figures


def test_the_answer_of_one_screen_is_what_the_records_say():
    """In README and results alike: the same paragraphs, in this order, with the table and the figure."""
    root = STUDIES.parents[2]
    for page in ("README.md", "docs/results.md"):
        text = (root / page).read_text("utf-8")
        (section,) = re.findall(r"## Does it work, and when\?\n(.*?)\n## ", text, re.S)
        parts = [found[2] for found in MARKED.finditer(section)]
        assert parts[:4] == ["answer", "one_screen", "table_note", "advice"]
        assert answer_table() in section and FIGURE in section


def test_the_figure_of_the_answer_has_the_numbers_of_the_table():
    """A dot for each cell, at the number that the table prints; hollow dots are the cells with a star."""
    axes = answer_figure()
    names = [text.get_text() for text in axes[0].figure.legends[0].get_texts()]
    assert names == ["MA-PPO", "PPO-0.99"]
    dots = [line for ax in axes for line in ax.lines if line.get_marker() in ("o", "s")]
    cells = re.findall(r"([+−]?\d\.\d+) \[[^]]*\](\*?)", answer_table())
    assert len(dots) == len(cells) == 13
    for dot, (text, star) in zip(dots, cells, strict=True):
        digits = len(text.split(".")[1])
        assert round(float(dot.get_xdata()[0]), digits) == float(text.replace("−", "-"))
        assert (dot.get_markerfacecolor() == "white") == bool(star)


def test_updates_to_the_final_score_of_a_method():
    curves = {
        "PPO": [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0],
        "MA-PPO": [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    }
    results = [
        {"method": name, "seed": seed, "options": {}, "curve": [{"score_mean": x} for x in curve]}
        for name, curve in curves.items()
        for seed in (0, 1)
    ]
    # PPO's last five are 0.88 on average, which it has at its eighth update, and MA-PPO at its sixth.
    assert ratio_to_final_score(results, ["PPO", "MA-PPO"])["by_seed"] == pytest.approx([8 / 6] * 2)
