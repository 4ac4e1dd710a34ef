import numpy as np
import pytest
from figure_checks import check_layout, lines, shapes
from matplotlib import pyplot as plt

from marlhf_lite.lab.figures.programs import outcome_shares
from marlhf_lite.plotting import training as plots
from marlhf_lite.utils.errors import InputError


def run(seed, gain, actions, updates=60):
    """A run as the trainer logs it: a score that rises and levels off, a gold score that turns, falling norms."""
    noise, rows = np.random.default_rng(seed), []
    for update in range(1, updates + 1):
        done = 1 - np.exp(-update * gain / 25)
        kl = 6 * done + noise.normal(0, 0.1)
        advantage, q = 0.4 - 0.2 * done + noise.normal(0, 0.02), 1 - 0.3 * done + noise.normal(0, 0.03)
        row = {"update": update, "kl_k1": kl, "response_length": 20 + 5 * done, "advantage_rms": advantage, "q_rms": q}
        row |= {"advantage_norm": advantage * actions**0.5, "q_norm": q * actions**0.5}
        row["rm_score_mean"] = None if update == 20 else -1.2 + 0.9 * done + noise.normal(0, 0.07)
        row["gold_mean"] = None if update % 2 else -0.9 + 0.6 * done - 0.05 * max(0, kl - 4) ** 2
        rows.append(row)
    return rows


ONE = {"PPO": [run(0, 0.7, 1280)], "MA-PPO": [run(1, 1.4, 256)]}
SEEDS = {"PPO": [run(s, 0.7, 1280) for s in (0, 1, 2)], "MA-PPO": [run(s, 1.4, 256) for s in (3, 4, 5)]}


pytestmark = pytest.mark.usefixtures("figures_apart")


def values(rows, metric):
    pairs = [(row["update"], row[metric]) for row in rows if row[metric] is not None]
    return np.array(pairs).T


def smoothed(series, window=5):
    return np.array([series[max(0, end - window) : end].mean() for end in range(1, len(series) + 1)])


ALL = {
    "one run": lambda: plots.reward_curves(ONE),
    "seeds": lambda: plots.reward_curves(SEEDS),
    "both": lambda: plots.reward_curves(ONE | {"RLOO": SEEDS["PPO"]}),
    "length": lambda: plots.reward_curves(ONE, "response_length"),
    "norms": lambda: plots.l2_norms(SEEDS),
}


@pytest.mark.parametrize("name", ALL)
def test_every_figure_is_labelled_captioned_and_in_place(name, tmp_path):
    axes = np.ravel(ALL[name]())
    assert plt.imread(plots.save(axes, tmp_path / "x.png")).shape[1] >= 640
    for ax in axes:
        assert "_" not in ax.get_xlabel() + ax.get_ylabel() and ax.xaxis.get_gridlines()[0].get_visible()
        assert len(ax.get_xticks()) >= 3 and len(ax.get_yticks()) >= 3
    assert len(axes[0].figure.legends) == 1 and not any(ax.get_legend() for ax in axes)
    check_layout(axes[0].figure)


def test_one_run_shows_raw_and_trailing_average():
    ax = plots.reward_curves(ONE)
    for name, (rows,) in ONE.items():
        updates, scores = values(rows, "rm_score_mean")
        assert len(updates) == 59
        for bold, expected in ((False, scores), (True, smoothed(scores))):
            (line,) = lines(ax, name, bold)
            assert line == pytest.approx(np.array([updates, expected]))
    (bold,) = lines(plots.reward_curves(ONE, smooth=1), "PPO")
    assert bold[1] == pytest.approx(values(ONE["PPO"][0], "rm_score_mean")[1])


def test_seeds_show_mean_band_and_each():
    ax = plots.reward_curves(SEEDS, smooth=3)
    for name, runs in SEEDS.items():
        each = np.stack([smoothed(values(rows, "rm_score_mean")[1], 3) for rows in runs])
        ((x, y),) = lines(ax, name)
        assert y == pytest.approx(each.mean(0))
        assert [line[1, -1] for line in lines(ax, name, bold=False)] == pytest.approx(each[:, -1])
        (corners,) = shapes(ax, name)
        for update, middle, spread in zip(x, y, each.std(0, ddof=1), strict=True):
            edges = corners[corners[:, 0] == update, 1]
            assert (edges.min(), edges.max()) == pytest.approx((middle - spread, middle + spread))


def test_seeds_are_averaged_over_the_updates_that_all_have_and_of_two_rows_the_last_counts():
    def rows(*pairs):
        return [{"update": update, "rm_score_mean": score} for update, score in pairs]

    runs = [rows((3, 5), (1, 1), (2, 9), (2, 2)), rows((2, 4), (3, 7), (4, 100))]
    (line,) = lines(plots.reward_curves({"PPO": runs}, smooth=1), "PPO")
    assert line.tolist() == [[2, 3], [3, 6]]
    with pytest.raises(InputError, match="DPO: its runs have no update in common"):
        plots.reward_curves({"DPO": [rows((1, 1)), rows((2, 2))]})


def test_methods_keep_their_colours_and_differ_in_both_cues():
    known = ["SFT", "PPO", "MA-PPO", "MA-PPO n=inf", "PPO lam^(1/5)", "RLOO", "GRPO", "DPO", "best-of-8"]
    styles = plots.method_styles(known + [f"variant {k}" for k in range(19)])
    assert len({(style["color"], style["linestyle"]) for style in styles.values()}) == 28
    for names in (known, [f"n={n}" for n in (3, 10, "inf")]):
        alone = plots.method_styles(names)
        assert list(alone) == names and len({style["color"] for style in alone.values()}) == len(names)
    assert all(plots.method_styles([name])[name] == styles[name] for name in known)
    assert plots.method_styles(["b", "a"]) == plots.method_styles(["a", "b"])
    same = {"best-of-16": "best-of-8", "n=1": "PPO", "n=5": "MA-PPO", "n=inf": "MA-PPO n=inf"}
    assert plots.method_styles(same) == {name: styles[other] for name, other in same.items()}


def test_norms_and_their_root_mean_squares():
    axes = plots.l2_norms(ONE)
    assert axes.shape == (2, 2)
    for ax, metric in zip(axes.flat, ["advantage_norm", "q_norm", "advantage_rms", "q_rms"], strict=True):
        for name, (rows,) in ONE.items():
            assert lines(ax, name)[0][1] == pytest.approx(smoothed(values(rows, metric)[1]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: plots.reward_curves({"PPO": ONE["PPO"][0]}),
        lambda: plots.reward_curves({"PPO": [[]]}),
        lambda: plots.reward_curves(ONE, "reward"),
        lambda: plots.reward_curves({"PPO": [[{"update": 1, "rm_score_mean": np.inf}]]}),
    ],
)
def test_bad_input_is_named_and_leaves_no_figure(call):
    with pytest.raises(InputError, match="PPO"):
        call()
    assert not plt.get_fignums()


def test_caption_is_wrapped_and_replaced():
    ax = plots.reward_curves(ONE)
    long = "It costs $5 and $6 to read, and  goes on\nfor longer than one line has room at this width. " * 2
    plots.caption(ax.figure, long)
    (item,) = ax.figure.texts
    assert item.get_text().count("\n") >= 2 and item.get_text().split() == long.split()
    plots.caption(ax.figure, "Short.")
    assert [text.get_text() for text in ax.figure.texts] == ["Short."]


def test_saved_pictures_are_the_same_bytes(tmp_path):
    axes = plots.l2_norms(ONE)
    first = plots.save(axes, tmp_path / "new" / "a.png").read_bytes()
    assert plots.save(axes[0, 0].figure, tmp_path / "b.png").read_bytes() == first
    plt.close("all")
    assert plots.save(plots.l2_norms(ONE)[1, 1], tmp_path / "c.png").read_bytes() == first
    assert b"matplotlib" not in first.lower()


def test_outcomes_of_programs_are_stacked_means():
    def run(passed, late, updates):
        rest = {"share_compile_error": 0.1, "share_runtime_error": 0.2, "share_timeout": late, "share_unsupported": 0.0}
        rows = range(1, updates + 1)
        return [{"update": u, **rest, "share_passed": passed, "share_failed": 0.7 - passed - late} for u in rows]

    axes = outcome_shares(
        {"PPO": [run(0.3, 0.1, 4), run(0.5, 0.1, 5)], "MA-PPO": [run(0.4, 0.0, 4)], "RLOO": [run(0.2, 0.0, 4)]}
    )
    assert axes.shape == (2, 2) and not axes[1, 1].axison
    edges = [area.get_paths()[0].vertices for area in axes[0, 0].collections]
    assert [edge[:, 1].max() for edge in edges] == pytest.approx([0.4, 0.6, 0.9, 1.0])  # passed, failed, error, compile
    assert [edge[:, 0].max() for edge in edges] == [4] * 4
    assert axes[0, 1].collections[2].get_paths()[0].vertices[:, 1].max() == pytest.approx(0.9)
    check_layout(axes[0, 0].figure)
