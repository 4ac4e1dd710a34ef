"""Figures that lessons draw in one call show the numbers that they are given."""

import numpy as np
import pytest

from marlhf_lite.lab.figures import lines, macro_actions
from marlhf_lite.macro import FixedNGram, MacroActions
from marlhf_lite.plotting.styles import METHODS


def drawn(ax) -> dict[str, list]:
    return {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}


def test_lines_have_their_numbers_places_and_method():
    panels = {"one": {"PPO, λ": [3, 1], "MA-PPO dots": [[0.5, 2], [7, 8]]}, "two": {"MA-PPO": [4, 4]}}
    first, second = lines.line_panels(panels, "update", "score", at=[10, 20], ylim=(0, 9))
    assert drawn(first) == {"PPO, λ": [[10, 3], [20, 1]], "MA-PPO dots": [[0.5, 7], [2, 8]]}
    assert drawn(second) == {"MA-PPO": [[10, 4], [20, 4]]}
    assert [line.get_color() for line in first.get_lines()] == [METHODS[x].colour for x in ("PPO", "MA-PPO")]
    assert first.get_ylim() == (0, 9) and (first.get_ylabel(), second.get_xlabel()) == ("score", "update")
    assert drawn(lines.line_figure({"x": [5, 6]}, "t", "v")) == {"x": [[1, 5], [2, 6]]}


def test_rules_as_a_table_and_as_a_map():
    whole = MacroActions.from_lengths([[5], [2]])
    cuts = {"one": whole, "n = 2": FixedNGram(2)(whole.token_mask)}
    rows = macro_actions.rule_table(cuts).splitlines()[2:]
    assert rows == ["| one | 1.0 | 3.5 | 0% |", "| n = 2 | 2.0 | 1.8 | 25% |"]
    ax = macro_actions.boundary_map(["a", "b"], np.array([[0.8, -0.001], [-0.001, 0.9]]))
    assert [text.get_text() for text in ax.texts] == ["0.80", "0.00", "0.00", "0.90"]


def test_surprise_is_drawn_with_the_mean_of_each_macro_action():
    ax = macro_actions.surprise_figure([2.0, 0.0, 1.0, 3.0], [(0, 2), (2, 4)], [" a", "b", " ", "c"])
    tokens, first, second = (line.get_ydata() for line in ax.get_lines())
    assert tokens == pytest.approx([2, 1e-6, 1, 3]) and (first[0], second[0]) == (1, 2)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b", "␣", "c"]
