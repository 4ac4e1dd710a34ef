"""Coloured spans, length histograms and trees with their cut."""

import nltk
import pytest
import torch
from figure_checks import check_figures
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt

from marlhf_lite.lab.figures.macro_actions import draw_spans, length_histograms, spans_html, token_pieces
from marlhf_lite.lab.figures.trees import tree_cut, tree_text
from marlhf_lite.macro import FixedNGram, MacroActions, Whole
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.parsing import GrammarParser, Parsing

PIECES = [" My", " sis", "ter", " left", " <b>", "&", "\n", "$x$", ""]
TREE = nltk.Tree.fromstring(
    "(S (NP (PRP$ My) (NN sister) (NNP Marla)) (VP (VBD moved) (PP (IN to) (NP (NNP Tolwick)))) (. .))"
)


def test_long_responses_go_on_in_another_line():
    ax = plt.figure().subplots()
    draw_spans(ax, ["word "] * 30, MacroActions.from_lengths([[13, 17]]), columns=60)
    boxes = [(patch.get_gid(), patch.get_y(), patch.get_x()) for patch in ax.patches]
    for t, (name, y, x) in enumerate(boxes):  # 12 tokens to a line
        assert name == f"macro action {int(t >= 13)}" and int(y) == t // 12
        assert x == pytest.approx(5 * (t % 12) + 0.12 * (t in (0, 13)))
    ax = plt.figure().subplots()
    draw_spans(ax, PIECES, FixedNGram(4)(torch.ones(1, len(PIECES), dtype=torch.bool)))
    assert [text.get_text() for text in ax.texts] == [*PIECES[:6], "↵", "$x$", "·"]
    assert len({patch.get_gid() for patch in ax.patches}) == 3
    ax.figure.draw_without_rendering()


def test_html_is_escaped_and_needs_nothing_from_outside():
    page = spans_html(PIECES, {"<i>rule</i>": MacroActions.from_lengths([[9]])})
    assert "<b>" not in page and "&lt;b&gt;" in page and "&amp;" in page
    assert "<i>" not in page and "<script" not in page
    assert not any(word in page for word in ("http", "src=", "url(", "class="))
    assert 'title="9 tokens"' in page
    assert ";color:#" not in page, "text keeps the colour of the page, light or dark"


def test_pieces_spell_the_text_and_name_special_tokens():
    tokenizer = load_tokenizer("tiny-gemma")
    text = " My sister Zoë paid 34 € on Monday. 🙂"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_pieces(tokenizer, torch.tensor([*ids, tokenizer.eos_token_id]))
    assert len(pieces) == len(ids) + 1 and pieces[-1] == tokenizer.eos_token
    assert "".join(pieces[:-1]) == tokenizer.decode(ids)


def test_histograms_share_out_all_tokens():
    mask = torch.arange(40) < torch.tensor([40, 23])[:, None]
    axes = length_histograms({"fixed 5": FixedNGram(5)(mask), "whole": Whole()(mask)})
    heights = [[bar.get_height() for bar in ax.patches] for ax in axes]
    assert [sum(h) for h in heights] == pytest.approx([1, 1])
    assert heights[0][4] == pytest.approx(60 / 63) and heights[1][15] == pytest.approx(1)
    check_figures()


# Trees


@given(st.integers(1, 20), st.lists(st.integers(1, 5), min_size=7, max_size=7))
def test_cut_is_a_partition_and_the_text_tells_the_same(most, counts):
    ends, runs = tree_cut(TREE, counts, most)
    assert [leaf for run in runs for leaf in range(*run)] == list(range(7))
    lines = tree_text(TREE, counts, most).splitlines()
    assert sum("■" in line for line in lines) == len(runs)
    assert sum("■" in line or "+" in line for line in lines) == len(ends)


@pytest.mark.parametrize("cutoff", [2, 4, 6, 9, 30])
def test_cut_is_that_of_the_rule(cutoff):
    tokenizer, text = load_tokenizer("tiny-gemma"), " My sister Marla moved to Tolwick and waited 34 days."
    tree = GrammarParser()(text)[0].tree
    counts = [len(tokenizer.tokenize(("" if leaf == "." else " ") + leaf)) for leaf in tree.leaves()]
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    rule = Parsing(GrammarParser(), cutoff)
    macro = rule(torch.ones_like(ids, dtype=torch.bool), token_ids=ids, tokenizer=tokenizer)
    assert [sum(counts[a:b]) for a, b in tree_cut(tree, counts, cutoff - 1)[1]] == macro.lengths[0].tolist()
