"""Figures of training: the numbers that they show, their colours, and that all is in place."""

from itertools import combinations

import numpy as np
import pytest
from conftest import fails
from figure_checks import check_layout, lines, shapes
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import (
    METHODS,
    OUTCOMES,
    PALE_SPANS,
    PROGRAMS,
    SERIES,
    SPANS,
    TABLE,
    method_styles,
)


def run(seed, gain, actions, updates=60):
    """A run as the trainer logs it: a score that rises and levels off, a gold score that turns, falling norms."""
    noise, rows = np.random.default_rng(seed), []
    for update in range(1, updates + 1):
        done = 1 - np.exp(-update * gain / 25)
        kl = 6 * done + noise.normal(0, 0.1)
        advantage, q = (
            0.4 - 0.2 * done + noise.normal(0, 0.02),
            1 - 0.3 * done + noise.normal(0, 0.03),
        )
        row = {
            "update": update,
            "kl_k1": kl,
            "response_length": 20 + 5 * done,
            "advantage_rms": advantage,
            "q_rms": q,
        }
        row |= {"advantage_norm": advantage * actions**0.5, "q_norm": q * actions**0.5}
        row["score_mean"] = None if update == 20 else -1.2 + 0.9 * done + noise.normal(0, 0.07)
        row["gold_mean"] = None if update % 2 else -0.9 + 0.6 * done - 0.05 * max(0, kl - 4) ** 2
        rows.append(row)
    return rows


ONE = {"PPO": [run(0, 0.7, 1280)], "MA-PPO": [run(1, 1.4, 256)]}
SEEDS = {
    "PPO": [run(s, 0.7, 1280) for s in (0, 1, 2)],
    "MA-PPO": [run(s, 1.4, 256) for s in (3, 4, 5)],
}


pytestmark = pytest.mark.usefixtures("figures_apart")


def values(rows, metric):
    pairs = [(row["update"], row[metric]) for row in rows if row[metric] is not None]
    return np.array(pairs).T


def smoothed(series, window=5):
    return np.array(
        [series[max(0, end - window) : end].mean() for end in range(1, len(series) + 1)]
    )


ALL = {
    "both": lambda: plots.reward_curves(ONE | {"RLOO": SEEDS["PPO"]}),
    "length": lambda: plots.reward_curves(SEEDS, "response_length"),
    "norms": lambda: plots.l2_norms(SEEDS),
}


@pytest.mark.parametrize("name", ALL)
def test_every_figure_is_labelled_captioned_and_in_place(name, tmp_path):
    axes = np.ravel(ALL[name]())
    assert plt.imread(plots.save(axes, tmp_path / "x.png")).shape[1] >= 640
    for ax in axes:
        assert (
            "_" not in ax.get_xlabel() + ax.get_ylabel()
            and ax.xaxis.get_gridlines()[0].get_visible()
        )
        assert len(ax.get_xticks()) >= 3 and len(ax.get_yticks()) >= 3
    assert len(axes[0].figure.legends) == 1 and not any(ax.get_legend() for ax in axes)
    check_layout(axes[0].figure)


def test_seeds_show_mean_band_and_each():
    ax = plots.reward_curves(SEEDS, smooth=3)
    for name, runs in SEEDS.items():
        each = np.stack([smoothed(values(rows, "score_mean")[1], 3) for rows in runs])
        ((x, y),) = lines(ax, name)
        assert y == pytest.approx(each.mean(0))
        assert [line[1, -1] for line in lines(ax, name, bold=False)] == pytest.approx(each[:, -1])
        (corners,) = shapes(ax, name)
        for update, middle, spread in zip(x, y, each.std(0, ddof=1), strict=True):
            edges = corners[corners[:, 0] == update, 1]
            assert (edges.min(), edges.max()) == pytest.approx((middle - spread, middle + spread))


def rows(*pairs):
    return [{"update": update, "score_mean": score} for update, score in pairs]


def test_seeds_are_averaged_over_the_updates_that_all_have_and_of_two_rows_the_last_counts():
    runs = [rows((3, 5), (1, 1), (2, 9), (2, 2)), rows((2, 4), (3, 7), (4, 100))]
    (line,) = lines(plots.reward_curves({"PPO": runs}, smooth=1), "PPO")
    assert line.tolist() == [[2, 3], [3, 6]]


# What stands together in a figure, and must be told apart by colour-blind readers.
TOGETHER = """SFT PPO MA-PPO E1 RLOO DPO best-of- n=inf GRPO
PPO n=2 n=3 MA-PPO n=8 n=10 n=15 n=20 n=inf
PPO MA-PPO randomized perplexity cutpoints parsing sentence lines n=inf
MA-PPO|sigma unit|sigma position|sigma reversed|E3
MA-PPO|E5|ratio macro|value macro
PPO E1 E2 E3 MA-PPO E5 lam=1 RLOO VC
SFT PPO MA-PPO lines E1 lam=1 VC RLOO
PPO E1 MA-PPO turn"""
SEEN_BY = {  # matrices of Machado and others (2009) on linear RGB
    "everyone": np.eye(3),
    "deuteranopes": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopes": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
}


def lab(colour, matrix):
    """CIELAB of a colour as some eyes see it."""
    rgb = np.array(to_rgb(colour))
    linear = np.clip(
        matrix @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1
    )
    xyz = (
        np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        @ linear
    )
    x, y, z = np.cbrt(xyz / [0.9505, 1, 1.089] + 1e-9)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_no_colour_of_the_table_has_two_meanings():
    colours = [style.colour for style in METHODS.values()]
    colours += [*SERIES, *OUTCOMES.values(), *PROGRAMS.values(), *SPANS, *PALE_SPANS]
    assert len(set(colours)) == len(colours) == len(TABLE)
    assert (
        min(
            np.linalg.norm(lab(a, np.eye(3)) - lab(b, np.eye(3)))
            for a, b in combinations(colours, 2)
        )
        > 8
    )


@pytest.mark.parametrize(
    "names", [line.split("|" if "|" in line else None) for line in TOGETHER.splitlines()]
)
@pytest.mark.parametrize("eyes", SEEN_BY)
def test_methods_of_one_figure_are_told_apart_by_all_eyes_and_in_grey_print(names, eyes):
    for a, b in combinations(names, 2):
        assert METHODS[a][1:] != METHODS[b][1:], (a, b)
        distance = np.linalg.norm(
            lab(METHODS[a].colour, SEEN_BY[eyes]) - lab(METHODS[b].colour, SEEN_BY[eyes])
        )
        assert distance > 9, (a, b, distance)


def test_variants_share_a_colour_and_unknown_names_have_no_methods():
    variants = method_styles(["SFT", "PPO 0.05", "PPO 0.01", "PPO with early stop"])
    assert len({style["color"] for style in variants.values()}) == 2
    assert len({str(style) for style in variants.values()}) == 4
    assert variants["PPO 0.05"] == method_styles(["PPO"])["PPO"]
    own = method_styles(["b", "PPO", "a", *(f"run {k}" for k in range(9))])
    assert (
        len({str(style) for style in own.values()}) == 12 and own["a"] == method_styles(["a"])["a"]
    )
    assert {own[name]["color"] for name in own if name != "PPO"} == set(SERIES)


def test_a_name_that_only_begins_like_a_method_is_another_method():
    names = ["PPO", "PPO-0.99", "PPO_b", "MA-PPO", "MA-PPO-long", "PPO-0.9"]
    styles = method_styles(names)
    assert len({style["color"] for style in styles.values()}) == len(names)
    for name in names[:4:3]:
        assert styles[name]["color"] == METHODS[name].colour
    for same in ("PPO λ=0.99", "PPO with λ = 0.99", "PPO lam^(1/5)"):
        assert method_styles([same])[same]["color"] == styles["PPO-0.99"]["color"]


def test_a_figure_is_written_as_pdf_too_and_its_bytes_stay(tmp_path):
    ax = plots.reward_curves(ONE)
    first, again = (plots.save(ax, tmp_path / f"{i}.pdf").read_bytes() for i in (1, 2))
    assert first.startswith(b"%PDF") and first == again


def test_bad_input_is_named_and_leaves_no_figure():
    fails(lambda: plots.reward_curves(ONE, "reward"), "PPO: no 'reward'")
    for runs in (ONE["PPO"][0], [[]], [rows((1, np.inf))], [rows((1, 1)), rows((2, 2))]):
        fails(lambda: plots.reward_curves({"PPO": runs}), "PPO: ")  # noqa: B023
    assert not plt.get_fignums()


def test_norms_and_their_root_mean_squares_are_saved_as_the_same_bytes(tmp_path):
    axes = plots.l2_norms(ONE)
    for ax, metric in zip(
        axes.flat, ["advantage_norm", "q_norm", "advantage_rms", "q_rms"], strict=True
    ):
        for name, (run,) in ONE.items():
            assert lines(ax, name)[0][1] == pytest.approx(smoothed(values(run, metric)[1]))
    first = plots.save(axes, tmp_path / "new" / "a.png").read_bytes()
    assert plots.save(axes[0, 0].figure, tmp_path / "b.png").read_bytes() == first
    plt.close("all")
    assert plots.save(plots.l2_norms(ONE)[1, 1], tmp_path / "c.png").read_bytes() == first
    assert b"matplotlib" not in first.lower()
