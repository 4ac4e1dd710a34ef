"""The explorer, driven by its widgets' values as a user would by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from figure_checks import unlabelled
from jupyter_client.manager import start_new_kernel
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from marlhf_lab.figures.explorer import explore, rule_figure
from marlhf_lite.config.options import MacroConfig
from marlhf_lite.macro import FixedNGram, RandomizedNGram, Whole
from marlhf_lite.models.loading import load_tokenizer

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
def draw(tokenizer):
    """A function of the options of macro actions that gives the figure of a text."""
    return lambda seed=0, text=TEXTS["one"], **how: rule_figure(
        tokenizer, text, MacroConfig(**how), seed, ramp, zigzag, "value"
    )


def spans(figure):
    """(start, end) of the macro actions, as they are drawn over the values."""
    found = [line.get_xdata() for line in figure.axes[1].lines[1:]]
    return [(round(a + 0.45), round(b + 0.55)) for a, b in found]


RULES = [
    ({"n": "3"}, FixedNGram(3)),
    ({"n": "inf"}, Whole()),
    ({"termination": "randomized", "lengths": "1,4", "seed": 7}, RandomizedNGram((1, 4), 3, 7)),
    ({"termination": "parsing", "cutoff": 40}, Whole()),
]


@pytest.mark.parametrize(("options", "rule"), RULES)
def test_rules_and_their_parameters(draw, tokenizer, options, rule):
    figure, count = draw(**options), len(tokenizer.tokenize(TEXTS["one"])) + 1
    macro = rule(torch.ones(1, count, dtype=torch.bool))
    assert spans(figure) == macro.spans()[0]
    assert f"{len(spans(figure))} macro actions of {count} tokens" in figure.axes[1].get_title(
        loc="left"
    )
    assert len({box.get_gid() for box in figure.axes[0].patches}) == len(spans(figure))
    assert not unlabelled(figure) and not plt.get_fignums(), "shown once, by whoever returns it"


def test_double_brackets_are_a_hole(draw, tokenizer):
    parts = ["I will try", " too low", " seven"]
    counts = [len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts]
    figure = draw(text="{}[[{}]]{}".format(*parts), termination="turn")
    assert spans(figure) == [(0, counts[0]), (counts[0] + counts[1], sum(counts) + 1)]
    shown = np.isfinite(np.asarray(figure.axes[1].lines[0].get_ydata(), dtype=float)).sum()
    assert shown == counts[0] + counts[2] + 1, "a hole has no value"


@pytest.fixture
def panel(tokenizer, monkeypatch):
    """The widgets by name, and what the last choice showed: a figure, or a line that says what is wrong."""
    shown, calls = [], []
    monkeypatch.setattr("IPython.display.display", shown.append)
    box = explore(
        tokenizer, TEXTS, lambda ids: calls.append(1) or ramp(ids), zigzag, interactive=True
    )
    box.update()
    assert {widget.style.description_width for widget in box.kwargs_widgets} == {"initial"}, (
        "names are shown whole"
    )

    def choose(**choices):
        for name, value in choices.items():
            box.kwargs_widgets[names.index(name)].value = value
        return shown[-1]

    names = [widget._kwarg for widget in box.kwargs_widgets]
    return SimpleNamespace(choose=choose, calls=calls)


def test_every_choice_draws_again_and_asks_for_numbers_once_and_bad_input_is_one_line(panel):
    first = panel.choose(n=2)
    assert isinstance(first, Figure) and len(spans(first)) > len(spans(panel.choose(n=33))) == 1
    assert len(spans(panel.choose(n=6, sigma="unit"))) > 1 and len(panel.calls) == 1
    assert "owed" in str(
        [text.get_text() for text in panel.choose(example=TEXTS["two"]).axes[0].texts]
    )
    assert " The" in [text.get_text() for text in panel.choose(own=" The cat").axes[0].texts]
    page = panel.choose(termination="randomized", lengths="<2>").data
    assert 'role="alert"' in page and "--lengths &lt;2&gt;" in page
    assert isinstance(panel.choose(lengths="2,3"), Figure)


ASK = "from marlhf_lab.figures.notebook import headless; print(headless())"


def test_a_kernel_of_jupyterlab_shows_widgets():
    said = []
    manager, client = start_new_kernel()
    try:
        client.execute_interactive(
            ASK, timeout=60, output_hook=lambda message: said.append(message["content"])
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "False\n" in [content.get("text") for content in said]
