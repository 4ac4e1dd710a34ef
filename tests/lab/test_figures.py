"""Coloured spans, trees with their cut, and the case study as a browser reads it."""

import warnings
from html.parser import HTMLParser

import nltk
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import font_manager
from matplotlib import pyplot as plt

from marlhf_lab.figures.case_study import case_study
from marlhf_lab.figures.macro_actions import _fonts, draw_spans, spans_html
from marlhf_lab.figures.trees import tree_cut
from marlhf_lite.macro import FixedNGram, MacroActions, Turn, Whole
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.parsing import GrammarParser, Parsing

PIECES = [" My", " sis", "ter", " left", " <b>", "&", "\n", "$x$", ""]
TREE = nltk.Tree.fromstring(
    "(S (NP (PRP$ My) (NN sister) (NNP Marla)) (VP (VBD moved) (PP (IN to) (NP (NNP Tolwick)))) (. .))"
)


def test_html_is_escaped_and_needs_nothing_from_outside():
    page = spans_html(PIECES, {"<i>rule</i>": MacroActions.from_lengths([[9]])})
    assert "<b>" not in page and "&lt;b&gt;" in page and "&amp;" in page
    assert "<i>" not in page and "<script" not in page
    assert not any(word in page for word in ("http", "src=", "url(", "class="))
    assert 'title="9 tokens"' in page
    assert ";color:#" not in page, "text keeps the colour of the page, light or dark"


def test_what_an_environment_says_is_in_no_macro_action():
    mask = torch.tensor([[True, True, True, False, False, True, True, True, True]])
    page = spans_html(PIECES, {"turn": Turn()(mask)})
    assert (
        page.count('title="3 tokens"')
        == page.count('title="4 tokens"')
        == page.count('title="environment"')
        == 1
    )
    assert page.index("ter") < page.index("&lt;b&gt;") < page.index("&amp;")
    ax = plt.subplots()[1]
    draw_spans(ax, PIECES, Turn()(mask))
    assert {text.get_text() for text in ax.texts if text.get_style() == "italic"} == {
        " left",
        " <b>",
    }


def test_characters_that_monospace_lacks_come_from_another_font_or_one_warning_names_them(
    monkeypatch,
):
    names = ("DejaVu Sans", "DejaVu Sans Mono", "Last Resort High-Efficiency")
    dejavu = [font for font in font_manager.fontManager.ttflist if font.name in names]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", dejavu)
    _fonts.cache_clear()
    for pieces, families, messages in (
        ([" a", "\u05d0"], ["monospace", "DejaVu Sans"], []),
        (
            ["\u732b", "\u597d"],
            ["monospace"],
            ["no font has \u597d: install one such as Noto Sans CJK, then restart"],
        ),
    ):
        figure, ax = plt.subplots()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            draw_spans(ax, pieces, MacroActions.from_lengths([[2]]))
            figure.canvas.draw()
        assert [text.get_family() for text in ax.texts] == [families] * 2
        assert [str(warning.message) for warning in caught] == messages
    assert ax.patches[0].get_width() > 1.5, "a character of East Asia is two columns wide"
    _fonts.cache_clear()


# Trees


@given(st.integers(1, 20), st.lists(st.integers(1, 5), min_size=7, max_size=7))
def test_cut_is_a_partition(most, counts):
    _, runs = tree_cut(TREE, counts, most)
    assert [leaf for run in runs for leaf in range(*run)] == list(range(7))


@pytest.mark.parametrize("cutoff", [2, 4, 6, 9, 30])
def test_cut_is_that_of_the_rule(cutoff):
    tokenizer, text = (
        load_tokenizer("tiny-gemma"),
        " My sister Marla moved to Tolwick and waited 34 days.",
    )
    tree = GrammarParser()(text)[0].tree
    counts = [
        len(tokenizer.tokenize(("" if leaf == "." else " ") + leaf)) for leaf in tree.leaves()
    ]
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    rule = Parsing(GrammarParser(), cutoff)
    macro = rule(torch.ones_like(ids, dtype=torch.bool), token_ids=ids, tokenizer=tokenizer)
    assert [sum(counts[a:b]) for a, b in tree_cut(tree, counts, cutoff - 1)[1]] == macro.lengths[
        0
    ].tolist()


# -- the case study ---------------------------------------------------------------------------------------------------


METHODS = ("SFT", "PPO", "MA-PPO", "SFT best-of-8")
NASTY = ' <script>alert("1 & 2")</script> it\'s'


class Reader(HTMLParser):
    """Tags, and the text in each table row's cells; fails on tags that do not close."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.text, self.titles = [], [], "", []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.titles += [value for name, value in attributes if name == "title"]
        if tag not in ("br", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def rows(tokenizer):
    responses = [" My sister left.", NASTY, " My sister left on Tuesday.", " Thanks."]
    return [
        {"id": f"p{i}", "prompt": f"prompt {i} <b>&", "method": method, "response": response, "ended": True,
         "token_ids": [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id],
         "rm_score": -0.5 * i, "gold": 2.0, "tokens": 7}
        for i in range(5) for method, response in zip(METHODS, responses)
    ]  # fmt: skip


def test_every_method_answers_every_chosen_prompt(rows, tokenizer):
    some = [row for row in rows if row["id"] in ("p1", "p3")]
    page = Reader(case_study(some, tokenizer))
    assert page.tags.count("section") == page.tags.count("table") == 2
    assert page.tags.count("tr") == 2 * (1 + len(METHODS))
    assert "prompt 3 <b>&" in page.text and page.text.index("prompt 1") < page.text.index(
        "prompt 3"
    )
    assert "prompt 2" not in page.text
    assert all(page.text.count(method) >= 2 for method in METHODS)
    assert page.text.count("RM score: −1.50") == page.text.count("RM score: −0.50") == 4
    assert (
        page.text.count("EOS: yes") == 8
        and "gold score: 2.00" in page.text
        and "tokens: 7" in page.text
    )


def test_all_text_is_escaped(rows, tokenizer):
    rules = {method: FixedNGram(3) for method in METHODS}
    for page in (case_study(rows, tokenizer), case_study(rows, tokenizer, rules)):
        read = Reader(page)
        assert "script" not in read.tags and "b" not in read.tags and "script" in read.text
        assert "<script" not in page and "http" not in page
    named = [row | {"method": "<i>&"} for row in rows if row["method"] == "PPO"]
    assert "<i>&" in Reader(case_study(named, tokenizer)).text


def test_macro_actions_are_those_of_the_rule(rows, tokenizer):
    (row,) = [row for row in rows if row["id"] == "p0" and row["method"] == "MA-PPO"]
    count = len(row["token_ids"])
    some = [row for row in rows if row["id"] == "p0"]
    page = Reader(case_study(some, tokenizer, {"PPO": Whole(), "MA-PPO": FixedNGram(5)}))
    lengths = [f"{n} token{'s' * (n != 1)}" for n in [5] * (count // 5) + [count % 5] if n]
    assert page.titles[1:] == lengths and len(page.titles) == 1 + len(lengths)
    assert f"{len(lengths)} macro actions" in page.text and "<eos>" in page.text
    assert page.tags.count("table") == 1 + 2
