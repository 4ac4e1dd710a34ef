"""The explorer, driven by its widgets' values as a user would by hand."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from marlhf_lite.macro import FixedNGram, RandomizedNGram, Whole, macro_values
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.plotting import explorer as module
from marlhf_lite.plotting.explorer import Explorer, explore, headless
from marlhf_lite.utils.errors import InputError

pytest.importorskip("ipywidgets")
TEXTS = {
    "one": " My sister Marla moved to Tolwick and waited 34 days.",
    "two": " She owed me 12 dollars. She left on Monday.",
}


def ramp(ids):
    return torch.linspace(-1, 0, len(ids))


def zigzag(ids):
    return -torch.tensor([1.0, 0.2, 0.1, 2.0, 0.5]).repeat(len(ids))[: len(ids)]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-gemma")


@pytest.fixture
def tool(tokenizer):
    yield Explorer(tokenizer, TEXTS, ramp, zigzag)
    plt.close("all")


def choose(tool, **choices):
    for name, value in choices.items():
        tool.controls[name].value = value
    return tool.view()


def test_picking_a_text_fills_it_in_and_redraws(tool):
    before = tool.output.value
    tool.controls["pick"].value = TEXTS["two"]
    assert tool.controls["text"].value == TEXTS["two"] and tool.output.value != before
    assert "".join(tool.view().pieces) == TEXTS["two"] + "<eos>"


def test_rules_and_their_parameters(tool):
    count = len(tool.view().pieces)
    mask = torch.ones(1, count, dtype=torch.bool)
    for choices, expected in (
        ({"rule": "fixed", "n": 3}, FixedNGram(3)(mask)),
        ({"n": 33}, Whole()(mask)),
        ({"rule": "randomized", "lengths": "1,4", "seed": 7}, RandomizedNGram((1, 4), 3, 7)(mask)),
        ({"rule": "whole"}, Whole()(mask)),
        ({"rule": "sentence"}, Whole()(mask)),
    ):
        assert torch.equal(choose(tool, **choices).macro.ids, expected.ids), choices
    few = choose(tool, rule="parsing", cutoff=40).macro
    assert few.lengths.tolist() == [[count]]
    assert choose(tool, cutoff=8).macro.mask.sum() > 1
    assert choose(tool, rule="perplexity", perplexity_rule="token").macro.mask.sum() > 1


def test_only_the_parameters_of_the_rule_are_shown(tool):
    for rule, shown in (("fixed", {"n"}), ("parsing", {"parser", "cutoff", "inclusive"}), ("whole", set())):
        tool.controls["rule"].value = rule
        hidden = {name for name, control in tool.controls.items() if control.layout.display == "none"}
        every = {"n", "lengths", "seed", "perplexity_rule", "parser", "cutoff", "inclusive"}
        assert every - hidden == shown


@pytest.mark.parametrize("sigma", ["equal", "unit", "position", "position_reversed"])
def test_values_are_pooled_by_sigma(tool, sigma):
    view = choose(tool, sigma=sigma)
    assert torch.equal(view.pooled, macro_values(view.values[None], view.macro, sigma)[0])


def test_page_has_spans_lengths_and_an_inline_picture(tool):
    tool.controls["text"].value = " <script>alert(1)</script>"
    page = tool.output.value
    assert "<script" not in page and "mean length" in page and 'src="data:image/png;base64,' in page
    assert "http" not in page
    assert not plt.get_fignums(), "figures are closed once drawn"


def test_bad_input_is_one_line_on_the_page(tool):
    for name, bad, part in (("text", "  ", "empty"), ("lengths", "2,x", "--lengths 2,x")):
        tool.controls["rule"].value = "randomized"
        good, tool.controls[name].value = tool.controls[name].value, bad
        assert 'role="alert"' in tool.output.value and part in tool.output.value
        tool.controls[name].value = good
        assert "alert" not in tool.output.value


def test_numbers_must_be_one_for_each_token(tokenizer):
    wrong = Explorer(tokenizer, TEXTS, lambda ids: torch.zeros(2))
    assert "values: returned shape (2,)" in wrong.output.value


def test_numbers_are_asked_for_once(tokenizer):
    calls = []
    tool = Explorer(tokenizer, TEXTS, lambda ids: calls.append(1) or ramp(ids))
    choose(tool, n=2)
    choose(tool, sigma="unit")
    assert len(calls) == 1


def test_without_log_probabilities_there_is_no_perplexity_rule(tokenizer):
    assert "perplexity" not in Explorer(tokenizer, TEXTS, ramp).controls["rule"].options
    shown = Explorer(tokenizer, TEXTS, logprobs=zigzag)
    assert "log-probability" in shown.label
    for arguments in (({}, ramp), (TEXTS,)):
        with pytest.raises(InputError):
            Explorer(tokenizer, *arguments)


def test_static_figure_without_a_browser(tokenizer, monkeypatch):
    figure = explore(tokenizer, TEXTS, ramp, zigzag, interactive=False)
    assert isinstance(figure, Figure) and len(figure.axes) == 2
    assert figure.axes[1].get_xlabel() and figure.axes[1].get_ylabel()
    assert not plt.get_fignums(), "shown once, by whoever returns it"
    monkeypatch.setattr(module, "headless", lambda: True)
    assert isinstance(explore(tokenizer, TEXTS, ramp), Figure)
    monkeypatch.setattr(module, "headless", lambda: False)
    assert explore(tokenizer, TEXTS, ramp).children


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "/usr/bin/jupyter-nbconvert", "--execute", "x.ipynb"], True),
        (["python", "-m", "papermill", "x.ipynb"], True),
        (["python", "-m", "jupyterlab"], False),
        (["jupyter-lab", "--no-browser"], False),
    ],
)
def test_who_started_the_kernel(monkeypatch, command, expected):
    psutil = pytest.importorskip("psutil")
    parent = SimpleNamespace(cmdline=lambda: command)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    assert headless() is expected


def test_importing_it_needs_no_widgets():
    code = "import sys, marlhf_lite.plotting.explorer; sys.exit('ipywidgets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
