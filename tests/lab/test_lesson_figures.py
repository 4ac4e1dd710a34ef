"""Figures that lessons draw in one call show the numbers that they are given."""

from types import SimpleNamespace

import numpy as np
import pytest

from marlhf_lab.figures import critic, lines, macro_actions, memory, token_counts
from marlhf_lite.evaluation.statistics import Interval
from marlhf_lite.macro import FixedNGram, MacroActions
from marlhf_lite.plotting.styles import METHODS


def drawn(ax) -> dict[str, list]:
    return {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}


def test_lines_have_their_numbers_places_and_method():
    panels = {
        "one": {"PPO, λ": [3, 1], "MA-PPO": [[0.5, 2], [7, 8]]},
        "two": {"gold": [4, 4], "words": [5, 5]},
    }
    dots = {"one": {"MA-PPO": [6, 6], "best-of-8": [2, 2]}}
    first, second = lines.line_panels(
        panels, "update", "score", at=[10, 20], dots=dots, ylim=(0, 9)
    )
    ppo, macro, dotted, _ = first.get_lines()
    assert ppo.get_xydata().tolist() == [[10, 3], [20, 1]] and macro.get_xydata().tolist() == [
        [0.5, 7],
        [2, 8],
    ]
    assert dotted.get_xydata().tolist() == [[10, 6], [20, 6]] and dotted.get_linestyle() == "None"
    colours = [METHODS[name].colour for name in ("PPO", "MA-PPO", "MA-PPO", "best-of-")]
    assert [line.get_color() for line in first.get_lines()] == colours
    assert [text.get_text() for text in first.figure.legends[0].get_texts()] == [
        "PPO, λ",
        "MA-PPO",
        "best-of-8",
    ]
    assert [line.get_linestyle() for line in second.get_lines()] == ["-", "--"], (
        "not by colour alone"
    )
    assert first.get_ylim() == (0, 9) and (first.get_ylabel(), second.get_xlabel()) == (
        "score",
        "update",
    )
    assert drawn(lines.line_figure({"x": [5, 6]}, "t", "v")) == {"x": [[1, 5], [2, 6]]}


def test_bars_show_the_sign_of_numbers_that_are_far_apart():
    ax = lines.signed_bars(
        {"truth": [0.1, -0.005], "estimate": [0.0, -1e-6]}, "turn", "push", 0.001
    )
    truth, estimate = ax.containers
    assert [bar.get_height() for bar in (*truth, *estimate)] == [0.1, -0.005, 0.0, -1e-6]
    first, second = (bar.get_window_extent().height for bar in truth)
    assert 0.2 < second / first < 1, "on a linear axis it would be a twentieth"
    assert {text.get_text() for text in ax.texts} == {"+0.100", "−0.005", "+0.000"}
    assert truth[1].get_x() + truth[1].get_width() < estimate[1].get_x(), "side by side"


def test_rules_as_a_table_and_as_a_map():
    whole = MacroActions.from_lengths([[5], [2]])
    cuts = {"one": whole, "n = 2": FixedNGram(2)(whole.token_mask)}
    rows = macro_actions.rule_table(cuts).splitlines()[2:]
    assert rows == ["| one | 1.0 | 3.5 | 0% |", "| n = 2 | 2.0 | 1.8 | 25% |"]
    ax = macro_actions.boundary_map(["a", "b"], np.array([[0.8, -0.001], [-0.001, 0.9]]))
    assert [text.get_text() for text in ax.texts] == ["0.80", "0.00", "0.00", "0.90"]


def test_surprise_is_drawn_with_the_mean_of_each_macro_action():
    ax = macro_actions.surprise_figure(
        [2.0, 0.0, 1.0, 3.0], [(0, 2), (2, 4)], [" a", "b", " ", "c"]
    )
    tokens, first, second = (line.get_ydata() for line in ax.get_lines())
    assert tokens == pytest.approx([2, 1e-6, 1, 3]) and (first[0], second[0]) == (1, 2)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b", "␣", "c"]


def test_lengths_labels_and_limits_of_a_data_set():
    parts = {"sft": {"prompt": [4, 6], "chosen": [3, 5], "rejected": [2, 2]}}
    parts["test"] = {"prompt": [8], "chosen": [9], "rejected": [1]}
    counts = {part: {side: np.array(n) for side, n in row.items()} for part, row in parts.items()}
    rows = token_counts.length_table("mine", counts).splitlines()
    assert rows[2:] == [
        "| sft | 2 | 5.0 | 6 | 4.0 | 5 | 2.0 | 2 |",
        "| test | 1 | 8.0 | 8 | 9.0 | 9 | 1.0 | 1 |",
    ]
    assert rows[0].count("|") == rows[2].count("|")
    prompts = token_counts.limit_figure(counts, 5).get_lines()[0].get_xydata()
    assert np.allclose(prompts, [[4, 1 / 3], [6, 2 / 3], [8, 1]])
    left, right = token_counts.length_figure(counts)
    assert (
        np.allclose([line.get_xdata()[0] for line in right.get_lines()], [17 / 3, 5 / 3])
        and left.patches
    )
    size, seen = np.array([0.2] * 5 + [2.5] * 10 + [5.0]), [True] * 15 + [False]
    bars = token_counts.label_figure(seen, size).containers[0][0].get_xydata()
    assert np.allclose(bars, [[0.2, 1], [2.5, 1]]), "a bin with few pairs is left out"


def test_values_sight_and_memory():
    takes, leaves = np.array([[0.0, 1.0], [0.2, 1.0]]), np.array([[0.0, -1.0]])
    ax = critic.value_paths([0, 5], {"takes": takes, "leaves": leaves})
    assert drawn(ax)["takes"] == [[0, 0.1], [5, 1]] and drawn(ax)["leaves"] == [[0, 0], [5, -1]]
    seen = [Interval(x, x - 0.1, x + 0.1, 0.95) for x in (0.0, 0.6)]
    paths = drawn(critic.sight_figure([{"s": s, "explained": [s] * 4} for s in seen]))
    assert (
        paths["s, share of the credit seen"]
        == paths["explained variance, quarter 4"]
        == [[0, 0], [1, 0.6]]
    )
    run = SimpleNamespace(weights=2e9, adapters=1e9, optimizer=1e9, generation=4e9, training=3e9)
    bars = memory.memory_bars({"LoRA": run}, card=16e9).patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [
        (0, 2),
        (2, 2),
        (4, 4),
        (0, 2),
        (2, 2),
        (4, 3),
    ]
