"""The record of `baseline_signal` as a table and a figure: numbers and curves are where the record has them."""

import numpy as np
import pytest

from marlhf_lab.figures.baseline_signal import SHOWN, response_figure, signal_table
from marlhf_lab.studies import register


@pytest.fixture
def record():
    value = {"mean": 0.5, "low": 0.25, "high": 0.75}
    contrasts = {
        name: {"mean": -0.1, "low": -0.2, "high": 0.3} for name in ("S - M", "D - L", "fitted - L")
    }
    signals = dict(zip(("T", "L", "M", "S", "D", "fitted"), np.arange(6) / 10))
    response = [{"mean": 0.2 / 2**k, "low": 0.0, "high": 1.0} for k in range(2 * SHOWN)]
    cell = {
        "variance_saved": value,
        "credit": value,
        "response": response,
        "score": {"deviation": 2.0},
    }
    settings = ("umbrella", "SmolLM2")
    found = {"signal": signals, "contrasts": contrasts}
    return {
        "primary": "SmolLM2",
        "found": dict.fromkeys(settings, found),
        "cells": dict.fromkeys(settings, cell),
    }


def test_a_line_for_each_setting(record):
    line = "0.00 | 0.10 | 0.20 | 0.30 | 0.40 | 0.50 | −0.100 [−0.200, +0.300]"
    table = signal_table(record)
    assert f"| umbrella | {line}" in table and f"| **SmolLM2** | {line}" in table
    assert table.endswith("| 0.50 [0.25, 0.75] |")


def test_the_figure_has_responses_in_deviations_of_the_score(record):
    after, taken = response_figure(record)
    response, interval, credit = (line.get_ydata() for line in after.lines[:3])
    assert list(response[:3]) == pytest.approx([0.1, 0.05, 0.025]) and len(response) == SHOWN
    assert list(interval) == [0.125, 0.375] and list(credit) == [0.25]
    # n = 5: the first token loses a fifth of four responses, the last one nothing.
    assert list(taken.lines[0].get_ydata()) == pytest.approx([0.0375, 0.035, 0.03, 0.02, 0.0])


def test_a_measurement_that_is_not_there_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(register, "shipped", lambda name: tmp_path / name)
    assert register.measured("baseline_signal") == "not there yet"
