"""The numbers that the figures of evaluation show, and that every figure is labelled, captioned and in place."""

import numpy as np
import pytest
from conftest import fails
from figure_checks import check_layout, lines, shapes
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from marlhf_lab.figures.agreement import agreement_map, agreement_table, win_rates
from marlhf_lite.evaluation.best_of_n import best_of_n
from marlhf_lite.evaluation.distributions import score_table, shifts
from marlhf_lite.evaluation.statistics import bootstrap_mean, win_rate
from marlhf_lite.plotting import evaluation as plots
from marlhf_lite.plotting.training import make_words_on_cells_readable
from marlhf_lite.utils.jsonl import append_lines

METHODS = {"SFT": 0.0, "PPO": 0.8, "MA-PPO": 1.0}
TEMPERATURES = (0.0, 0.4, 1.2)


def answers(seed=0, prompts=6, samples=4):
    draw = np.random.default_rng(seed)
    plain = {"response": "a b a b a b", "tokens": 7, "ended": True, "kl": 0.1}
    rows = [
        {"id": f"p{i}", "prompt": f"prompt {i}", "method": method, "temperature": t, "sample": k, **plain,
         "rm_score": draw.normal(shift - 0.2 * t, 0.5)}
        for method, shift in METHODS.items() for t in TEMPERATURES for i in range(prompts)
        for k in range(samples if t else 1)
    ]  # fmt: skip
    return [row | {"gold": 3 - row["rm_score"]} for row in rows]


def run(seed):
    draw = np.random.default_rng(seed)
    done = [(u, u / 20) for u in range(1, 21)]
    return [
        {"update": u, "score_mean": x + draw.normal(0, 0.02), "gold_mean": 1 - (x - 0.6) ** 2}
        for u, x in done
    ]


def raters(count):
    draw = np.random.default_rng(1).choice(["first", "tie", "second"], (count, 40)).tolist()
    return {f"rater {i}": {str(j): x for j, x in enumerate(line)} for i, line in enumerate(draw)}


ROWS = answers()
CELLS = best_of_n(ROWS, (1, 2, 4))
TABLES = score_table([row for row in ROWS if row["temperature"] == 0.4])
RATES = {
    "MA-PPO against PPO, judged by gold": win_rate(["first"] * 5 + ["tie"] * 2 + ["second"] * 3),
    "MA-PPO against SFT": win_rate(["first"] * 9),
}
AT_ONE = [
    row | {"kl": -0.1, "kl_k3": 0.5 + len(row["method"]) + 0.1 * row["sample"]}
    for row in ROWS
    if row["temperature"] == 0.4
]
ALL = {
    "best of n": lambda: plots.best_of_n_map(CELLS),
    "temperatures": lambda: plots.temperature_sweep(ROWS),
    "shift": lambda: plots.shift_histogram(TABLES),
    "shift of four": lambda: plots.shift_histogram(
        TABLES.assign(DPO=TABLES["PPO"] + 0.1, RLOO=TABLES["PPO"] - 1)
    ),
    "quantiles": lambda: plots.score_quantiles(dict(TABLES.items()), [0.0]),
    "best of n, a curve": lambda: plots.best_of_n_curve(AT_ONE),
    "reward against KL": lambda: plots.reward_against_kl(AT_ONE),
    "over-optimisation": lambda: plots.over_optimisation(
        {"PPO": [run(0), run(1)], "MA-PPO": [run(2), run(3)]}
    ),
    "agreement": lambda: agreement_map(agreement_table(raters(4))),
    "win rates": lambda: win_rates(RATES),
}


pytestmark = pytest.mark.usefixtures("figures_apart")


@pytest.mark.parametrize("name", ALL)
def test_every_figure_is_labelled_captioned_and_in_place(name):
    figure = np.ravel(ALL[name]())[0].figure
    words = [ax.get_xlabel() + ax.get_ylabel() for ax in figure.axes] + [figure.get_supxlabel()]
    assert any(words) and not any("_" in word for word in words)
    check_layout(figure)


@pytest.mark.parametrize("score", ["rm_score", "gold"])
def test_best_of_n_shows_every_cell_on_one_scale(score):
    axes, cells = plots.best_of_n_map(CELLS, score), [c for c in CELLS if c["temperature"]]
    means = [c[score]["mean"] for c in cells]
    for ax, method in zip(axes, METHODS, strict=True):
        (mesh,) = ax.collections
        expected = [
            [c[score]["mean"] for c in cells if (c["method"], c["n"]) == (method, n)]
            for n in (1, 2, 4)
        ]
        assert np.asarray(mesh.get_array()).reshape(3, 2) == pytest.approx(np.array(expected))
        assert ax.get_title(loc="left") == method and mesh.get_clim() == (min(means), max(means))
    assert [t.get_text() for t in axes[-1].get_xticklabels()] == ["0.4", "1.2"]


def test_best_of_n_over_n_is_that_of_its_cells_and_stops_at_the_samples(tmp_path):
    append_lines(tmp_path / "samples.jsonl", AT_ONE)
    for responses in (AT_ONE, tmp_path, str(tmp_path / "samples.jsonl")):
        ax = plots.best_of_n_curve(responses, "gold")
        for method in METHODS:
            (line,) = lines(ax, method)
            assert line[0].tolist() == [1, 2, 4]
            cells = [c for c in CELLS if (c["method"], c["temperature"]) == (method, 0.4)]
            assert line[1] == pytest.approx([c["gold"]["mean"] for c in cells])
    assert "best reward model score" in ax.figure.texts[0].get_text()
    assert plots.best_of_n_curve(AT_ONE).get_ylabel() == "reward model score"


def test_reward_against_kl_has_a_point_for_each_method():
    ax = plots.reward_against_kl(AT_ONE)
    for method in METHODS:
        rows = [row for row in AT_ONE if row["method"] == method]
        (line,) = lines(ax, method)
        expected = [np.mean([row[name] for row in rows]) for name in ("kl_k3", "rm_score")]
        assert line[:, 0] == pytest.approx(expected)
    own = [row | {"my:rule": -row["rm_score"], "reward": "my:rule, 1a"} for row in AT_ONE]
    for row in own:
        del row["rm_score"]
    assert plots.reward_against_kl(own).get_ylabel() == "my:rule"
    fails(lambda: plots.reward_against_kl(ROWS), "temperatures", "rows['temperature']")
    bare = [{k: v for k, v in row.items() if "kl" not in k} for row in AT_ONE]
    fails(lambda: plots.reward_against_kl(bare), "no KL", "--sft")


def test_temperatures_with_intervals_over_prompts():
    ax = plots.temperature_sweep(ROWS, "gold")
    for method in METHODS:
        (line,), (corners,) = lines(ax, method), shapes(ax, method)
        assert line[0].tolist() == list(TEMPERATURES)
        for t, mean in line.T:
            rows = [row for row in ROWS if row["method"] == method and row["temperature"] == t]
            groups = [[row["gold"] for row in rows if row["id"] == f"p{i}"] for i in range(6)]
            interval = bootstrap_mean(sorted(np.mean(group) for group in groups), 2000)
            edges = corners[corners[:, 0] == t, 1]
            assert (mean, edges.min(), edges.max()) == pytest.approx(interval[:3])


def test_shifts_share_bins_and_say_how_many_are_better():
    axes = plots.shift_histogram(TABLES)
    moved = shifts(TABLES)
    bins = np.histogram_bin_edges(moved, 30)
    for ax, (method, values) in zip(axes, moved.items()):
        (outline,) = shapes(ax, method)
        assert np.unique(outline[:, 1]) == pytest.approx(
            np.unique(np.histogram(values, bins)[0] / values.size)
        )
        assert ax.get_title(loc="left") == f"{method}: {100 * (values > 0).mean():.0f} % better"
        assert lines(ax, method, bold=False)[0][0] == pytest.approx([values.mean()] * 2)


def test_quantiles_are_the_distribution_function():
    ax = plots.score_quantiles({"PPO": [-1.5, -0.5], "SFT": [-0.001]})
    assert [x.get_text() for x in ax.figure.legends[0].get_texts()] == [
        "PPO, mean −1.00",
        "SFT, mean 0.00",
    ]
    ax = plots.score_quantiles(dict(TABLES.items()), [0.0, 0.5])
    for name, values in TABLES.items():
        ((x, y),) = lines(ax, name)
        for point in (-0.5, 0.0, 0.7):
            assert y[x <= point].max(initial=0) == pytest.approx((values <= point).mean())
    assert [line.get_xdata()[0] for line in ax.lines[-2:]] == [0.0, 0.5]


def test_win_rates_are_shares_that_add_up():
    ax = win_rates(RATES)
    widths = [[bar.get_width() for bar in bars] for bars in ax.containers]
    assert widths == [pytest.approx([0.5, 1]), pytest.approx([0.2, 0]), pytest.approx([0.3, 0])]
    rate = RATES["MA-PPO against SFT"].rate
    low = f"{100 * rate.low:.0f} %"
    assert ax.get_yticklabels()[1].get_text() == f"MA-PPO against SFT\n100 % [{low}, 100 %]"


def test_words_on_cells_of_a_heat_map_stand_out_on_every_colour():
    ax = plots.best_of_n_map(CELLS)[0]
    (cells,) = ax.collections
    cells.set_array(np.linspace(0, 1, 6))  # all lightnesses of the scale, as far as six cells go
    cells.set_clim(0, 1)
    cells.update_scalarmappable()
    make_words_on_cells_readable(ax)
    for words, colour in zip(ax.texts, cells.get_facecolors(), strict=True):
        light, dark = sorted([luminance(words.get_color()), luminance(colour)], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # the contrast that WCAG 2 asks of words


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    total = 0
    for channel, weight in zip(to_rgb(colour), (0.2126, 0.7152, 0.0722), strict=True):
        total += weight * (
            channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        )
    return total


def test_bad_input_leaves_no_figure():
    fails(lambda: plots.best_of_n_map([c for c in CELLS if not c["temperature"]]), "rm_score")
    fails(lambda: plots.temperature_sweep(ROWS, "bleu"), "bleu")
    fails(lambda: plots.score_quantiles({"PPO": [np.nan]}), "PPO")
    assert not plt.get_fignums()
