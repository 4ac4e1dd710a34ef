"""Termination by parsing and by sentences: cuts against a reference written from the rule's definition."""

import itertools
import random
import re
from collections import Counter

import nltk
import pytest
import torch
from conftest import fails
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import NAMES, Pieces, small_tokenizer

from marlhf_lab.corpora.tiny_tldr import Quality, make_post, make_summary, summary_text
from marlhf_lite.macro import MacroActions, TerminationRule
from marlhf_lite.parsing import (
    GrammarParser,
    Leaf,
    ParsedSentence,
    Parsing,
    Sentence,
    TokenText,
    split_sentences,
    termination,
)
from marlhf_lite.parsing.base import place_leaves


def batch(rows):
    """mask and ids of lists of token ids."""
    width = max(map(len, rows), default=0) + 1
    mask = torch.tensor([[t < len(r) for t in range(width)] for r in rows])
    return mask, torch.tensor([[*r, *[0] * (width - len(r))] for r in rows])


def words_of(rule, tokenizer, *rows):
    """Each response's macro actions as text."""
    mask, ids = batch(rows)
    macro = rule(mask, token_ids=ids, tokenizer=tokenizer)
    assert isinstance(macro, MacroActions) and torch.equal(macro.token_mask, mask)
    return [
        ["".join(tokenizer.decode([i]) for i in r[a:b]) for a, b in s]
        for r, s in zip(rows, macro.spans())
    ]


def places(words, text):
    """Where these words stand in the text, one behind the other."""
    spans, end = [], 0
    for word in words:
        start = text.index(word, end)
        end = start + len(word)
        spans.append((start, end))
    return spans


def trees(bracket):
    """A parser with this tree, by its words; other sentences have none."""
    tree = nltk.Tree.fromstring(bracket)
    words = tree.leaves()

    def read(sentence):
        return (
            place_leaves(tree, places(words, sentence), words)
            if words == re.findall(r"\w+|\.", sentence)
            else None
        )

    return lambda text: [
        ParsedSentence(start, end, read(text[start:end])) for start, end in split_sentences(text)
    ]


CAT = "(S (NP (DT The) (NN cat)) (VP (VBD sat) (PP (IN on) (NP (DT the) (NN mat)))) (. .))"
DOG = "(S (NP (PRP It)) (VP (VBD slept)) (. .))"
CAT_TOKENS = ["The", " cat", " sat", " on", " the", " mat", "."]


# By hand


@pytest.mark.parametrize(
    ("cutoff", "inclusive", "expected"),
    [
        # single leaves join what stands before them, all the way
        (1, False, ["The cat sat on the mat."]),
        (3, False, ["The cat sat on", " the mat."]),
        (4, False, ["The cat sat", " on the mat."]),
        (4, True, ["The cat", " sat on the mat."]),
        (7, False, ["The cat", " sat on the mat."]),
        (7, True, ["The cat sat on the mat."]),
    ],
)
def test_cutoff_by_hand(cutoff, inclusive, expected):
    rule = Parsing(trees(CAT), cutoff, inclusive)
    assert words_of(rule, Pieces(*CAT_TOKENS), list(range(7))) == [expected]


def test_end_of_text_and_other_tokens_without_text():
    tokenizer = small_tokenizer("byte_level")
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    ids = [i for (i,) in tokenizer(CAT_TOKENS, add_special_tokens=False)["input_ids"]]
    cat = Parsing(trees(CAT), 5)
    assert words_of(cat, tokenizer, [*ids, eos]) == [["The cat", " sat on the mat.<eos>"]]
    # not counted: seven tokens with text stay below 8, whatever stands around them
    (whole,) = words_of(Parsing(trees(CAT), 8), tokenizer, [bos, *ids, eos, eos])
    assert whole == ["<bos>The cat sat on the mat.<eos><eos>"]
    assert words_of(cat, tokenizer, [bos, *ids[:2], bos, *ids[2:]]) == [
        ["<bos>The cat<bos>", " sat on the mat."]
    ]
    assert words_of(cat, tokenizer, [eos], [], [bos, eos]) == [["<eos>"], [], ["<bos>", "<eos>"]]
    found = words_of(Sentence(), tokenizer, [eos], [], [bos, *ids, eos])
    assert found == [["<eos>"], [], ["<bos>The cat sat on the mat.<eos>"]]


# Falling back


def test_sentence_without_a_tree_is_cut_at_every_token(monkeypatch):
    tokens = Pieces("It", " slept", ".", " Gr", "mpf", " x", " <eos>", " It")
    rule = Parsing(trees(DOG), 4)
    rule.check()  # nothing was parsed yet
    got = words_of(rule, tokens, [0, 1, 2, 3, 4, 2, 7, 1, 2], [3, 4, 2], [7, 1, 2])
    assert got == [
        ["It slept.", " Gr", "mpf", ".", " It slept."],
        [" Gr", "mpf", "."],
        [" It slept."],
    ]
    assert rule.metrics() == {"fallback_rate": 2 / 5}
    with monkeypatch.context() as patch:  # another process has five sentences, all with trees
        patch.setattr(termination, "gather_object", lambda ours: [*ours, Counter(sentences=5)])
        assert rule.metrics() == {"fallback_rate": 2 / 10}
    rule.check()
    words_of(rule, tokens, [0, 1, 2, 3, 4, 2, 3, 2])
    # mostly token-level PPO in disguise
    fails(rule.check, "function", "67%", "link_phrases:Phrases")
    # one process alone does not stop, as the others would wait for it
    with monkeypatch.context() as patch:
        patch.setattr(termination, "gather_object", lambda ours: [*ours, Counter(sentences=5)])
        rule.check()
    # a single leaf joins the token before it, also where that one fell back
    assert words_of(Parsing(trees(DOG), 2), tokens, [3, 4, 2, 7, 1, 2]) == [
        [" Gr", "mpf", ". It slept."]
    ]


def test_text_that_no_sentence_covers_falls_back():
    tree = place_leaves(nltk.Tree.fromstring("(S (A b) (B c))"), [(0, 1), (2, 3)], ["b", "c"])
    tokens = Pieces("a", " b", " c", " d", " ")
    rule = Parsing(lambda text: [ParsedSentence(2, 5, tree)], 3)
    assert words_of(rule, tokens, [0, 1, 2, 3, 4]) == [["a", " b c", " d", " "]]
    assert rule.metrics()["fallback_rate"] == pytest.approx(2 / 3)
    # white space behind a tree goes with it
    assert words_of(rule, tokens, [0, 1, 2, 4]) == [["a", " b c "]]


# Against a reference, on generated sentences


def owners_of(trees, text, offsets):
    """For each token the number of its leaf. `offsets` are the tokenizer's own."""
    leaves = places([word for tree in trees for word in tree.leaves()], text)

    def owner(token):
        a, b = offsets[token]
        while a < b and text[a].isspace():
            a += 1
        over = [i for i, (start, end) in enumerate(leaves) if start < b and a < end]
        behind = [i for i, (start, _) in enumerate(leaves) if start >= b]
        return (over or behind)[0]

    return [owner(t) for t in range(len(offsets))]


def reference(trees, owners, cutoff, inclusive):
    """Lists of token numbers, one a macro action: a plain recursion."""
    actions, next_leaf = [], 0

    def visit(node):
        nonlocal next_leaf
        count = len(node.leaves()) if isinstance(node, nltk.Tree) else 1
        mine = [t for t, o in enumerate(owners) if next_leaf <= o < next_leaf + count]
        if count > 1 and len(mine) >= cutoff and not (inclusive and len(mine) == cutoff):
            for child in node:
                visit(child)
            return
        if mine and actions and count == 1:
            actions[-1] += mine
        elif mine:
            actions.append(mine)
        next_leaf += count

    for tree in trees:
        visit(tree)
    return actions


@pytest.fixture(scope="module")
def corpus():
    """Trees and text of responses."""
    rng = random.Random(11)
    made = [make_summary(rng, make_post(rng), Quality(0.9, 0.1, 0.6)) for _ in range(50)]
    return [(trees, summary_text(trees)) for trees in made]


@pytest.mark.parametrize("name", ["embedded", "byte_level", "byte_fallback", "merged_spaces"])
@pytest.mark.parametrize("inclusive", [False, True])
def test_generated_sentences_are_cut_as_the_reference_cuts_them(corpus, tokenizer, name, inclusive):
    tokenizer = tokenizer if name == "embedded" else small_tokenizer(name)
    coded = tokenizer(
        [text for _, text in corpus], add_special_tokens=False, return_offsets_mapping=True
    )
    mask, ids = batch([[*ids, tokenizer.eos_token_id] for ids in coded["input_ids"]])
    parser = GrammarParser()
    owners = [owners_of(*made, offsets) for made, offsets in zip(corpus, coded["offset_mapping"])]
    for cutoff in (1, 2, 4, 5, 9, 40):
        rule = Parsing(parser, cutoff, inclusive)
        spans = rule(mask, token_ids=ids, tokenizer=tokenizer).spans()
        assert rule.metrics()["fallback_rate"] == 0
        for (trees, text), owned, got in zip(corpus, owners, spans):
            expected = reference(trees, owned, cutoff, inclusive)
            expected[-1].append(len(owned))  # EOS
            assert [list(range(a, b)) for a, b in got] == expected, (cutoff, text)


# Any text, any tokens, any tree


def random_parser(seed):
    """Cuts text into sentences and words anywhere and puts random trees over them."""

    def tree(rng, leaves):
        if len(leaves) <= 1 or rng.random() < 0.2:
            return nltk.Tree("X", list(leaves))
        k = rng.randrange(len(leaves) + 1)
        return nltk.Tree(
            "X",
            [part if rng.random() < 0.1 else tree(rng, [part]) for part in leaves[:k]]
            + [tree(rng, leaves[k:])],
        )

    def parse(text):
        rng = random.Random(f"{seed}{text}")
        edges = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        found = []
        for start, end in zip(edges[::2], edges[1::2]):
            inner = sorted(rng.randrange(end - start + 1) for _ in range(2 * rng.randrange(7)))
            leaves = [
                Leaf(text[start + a : start + b], a, b) for a, b in zip(inner[::2], inner[1::2])
            ]
            found.append(
                ParsedSentence(start, end, tree(rng, leaves) if rng.random() < 0.8 else None)
            )
        return found

    return parse


texts = st.one_of(st.text(max_size=40), st.text("ab. \n!?é😀'", max_size=60))


@settings(max_examples=150)
@given(
    st.lists(texts, min_size=1, max_size=4), st.integers(0, 99), st.integers(1, 12), st.booleans(),
    st.sampled_from(NAMES), st.data(),
)  # fmt: skip
def test_any_text_any_tree_any_mask_gives_a_partition(texts, seed, cutoff, inclusive, name, data):
    tokenizer = small_tokenizer(name)
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    mask, ids = batch([[*row, tokenizer.eos_token_id] for row in rows])
    mask &= torch.arange(mask.shape[1]) < torch.tensor(
        [[data.draw(st.integers(0, mask.shape[1]))] for _ in rows]
    )
    for rule in (Parsing(random_parser(seed), cutoff, inclusive), Sentence()):
        macro = rule(mask, token_ids=ids, tokenizer=tokenizer)
        assert isinstance(macro, MacroActions) and torch.equal(macro.token_mask, mask)


# Tokens and their characters

SAMPLES = [
    " My sister Marla moved to Marwick. She waited 56 days, didn't she?",
    "The old cat sat on the mat",
    "def f(x):\n    return x + 1  # café\n\n",
    "Naïve 你好 prices: 5 € for 😀👍 “soup” …",
    "",
    " ",
]


@pytest.mark.parametrize("name", [*NAMES, "embedded"])
def test_text_is_what_the_tokenizer_decodes_and_spans_are_its_offsets(tokenizer, name):
    tokenizer = tokenizer if name == "embedded" else small_tokenizer(name)
    read, exact = TokenText(tokenizer), name not in ("word_piece", "metaspace")
    for text in SAMPLES:
        coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = [*coded["input_ids"], tokenizer.eos_token_id]
        got, spans = read(ids)
        assert got == tokenizer.decode(ids, skip_special_tokens=True) and spans[-1] == (
            len(got),
            len(got),
        )
        assert not exact or (
            got == text and (not text.strip() or spans[:-1] == coded["offset_mapping"])
        )
        assert read(ids) == (got, spans)


# Sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("  One.\n\nTwo\nThree.  ", ["One.", "Two", "Three."]),
        ('He said "No." Then he left.', ['He said "No."', "Then he left."]),
        (
            "Mr. Smith, e.g. J. Doe (the U.S. vs. all). Yes.",
            ["Mr. Smith, e.g. J. Doe (the U.S. vs. all).", "Yes."],
        ),
        ("Well... maybe. Wait... No?!", ["Well... maybe.", "Wait...", "No?!"]),
        ("1. First\n2. Second. third", ["1. First", "2. Second.", "third"]),
        ("So am I. You too", ["So am I.", "You too"]),
        ("At 5 p.m. on Monday, etc. Then", ["At 5 p.m. on Monday, etc.", "Then"]),
        ("a.b.c. d3.50", ["a.b.c.", "d3.50"]),
        (
            "猫睡了。狗在跑！「为什么？」他问。好",
            ["猫睡了。", "狗在跑！", "「为什么？」", "他问。", "好"],
        ),
        ("你好吗?很好!!谢谢.3.5元...好", ["你好吗?", "很好!!", "谢谢.3.5元...好"]),
        ("谢谢.再见", ["谢谢.", "再见"]),
        ("文です．値は３．５です．次", ["文です．", "値は３．５です．", "次"]),
        ("हाँ।ठीक है।", ["हाँ।", "ठीक है।"]),
        ("هل أنت بخير؟نعم۔لا", ["هل أنت بخير؟", "نعم۔", "لا"]),
        (
            "„Ja.“ Er ging. «Oui.» Il part. »Nein.« So",
            ["„Ja.“", "Er ging.", "«Oui.»", "Il part.", "»Nein.«", "So"],
        ),
        (
            "Er kommt z.B. her. A Ph.D. in art. Gen. Lee, U.S. Army.",
            ["Er kommt z.B. her.", "A Ph.D. in art.", "Gen. Lee, U.S. Army."],
        ),
        ("猫は寝た。犬は走る！？そう", ["猫は寝た。", "犬は走る！？", "そう"]),
        ("نام القط. لماذا؟ لأنه تعب۔ نعم", ["نام القط.", "لماذا؟", "لأنه تعب۔", "نعم"]),
        ("बिल्ली सोई। कुत्ता दौड़ा॥ हाँ", ["बिल्ली सोई।", "कुत्ता दौड़ा॥", "हाँ"]),
        ("ᠰᠠᠶᠢᠨ᠃ ᠪᠠᠶᠢ᠃", ["ᠰᠠᠶᠢᠨ᠃", "ᠪᠠᠶᠢ᠃"]),
        ("ᱡᱚᱦᱟᱨ᱾ ᱪᱮᱫ᱾ ꯅꯨꯡ꯫ꯅꯨꯡ꯫", ["ᱡᱚᱦᱟᱨ᱾", "ᱪᱮᱫ᱾", "ꯅꯨꯡ꯫", "ꯅꯨꯡ꯫"]),
        ("བདེ་མོ། བདེ་པོ།", ["བདེ་མོ།", "བདེ་པོ།"]),
        ("Τι κάνεις\u037e Καλά.", ["Τι κάνεις\u037e", "Καλά."]),
        (" \n ", []),
        ("...", ["..."]),
    ],
)
def test_sentences(text, expected):
    assert [text[a:b] for a, b in split_sentences(text)] == expected


@settings(max_examples=200)
@given(texts)
def test_sentences_lose_only_white_space(text):
    spans = split_sentences(text)
    assert "".join(word for a, b in spans for word in text[a:b].split()) == "".join(text.split())
    assert all(a < b <= c for (a, b), (c, _) in itertools.pairwise(spans))
    assert all(text[a:b] == text[a:b].strip() for a, b in spans)


# Arguments and errors


def test_each_text_is_parsed_once(corpus, tokenizer):
    inner, seen = GrammarParser(), []

    def parser(text):
        seen.append(text)
        return inner(text)

    coded = tokenizer([text for _, text in corpus] * 2, add_special_tokens=False)["input_ids"]
    mask, ids = batch(coded)
    Parsing(parser)(mask, token_ids=ids, tokenizer=tokenizer)
    assert sorted(seen) == sorted({text for _, text in corpus})


MASK, IDS, X = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2).long(), Pieces("x")


BAD = [
    (lambda: Sentence()(MASK), "token_ids [B,T]"),
    (lambda: Parsing(GrammarParser())(MASK, token_ids=IDS), "the tokenizer"),
]


@pytest.mark.parametrize(("run", "part"), BAD)
def test_faults_name_the_argument(run, part):
    fails(run, part)


@pytest.mark.parametrize("rule", [Parsing(GrammarParser()), Sentence()])
def test_empty_batches(rule):
    assert isinstance(rule, TerminationRule)
    for shape in ((0, 0), (0, 4), (2, 0), (2, 4)):
        macro = rule(
            torch.zeros(shape, dtype=torch.bool),
            token_ids=torch.zeros(shape).long(),
            tokenizer=X,
            step=2,
        )
        assert macro.spans() == [[]] * shape[0]


def test_deep_trees_are_no_trouble():
    tree = nltk.Tree("S", [Leaf("a", 0, 1), Leaf("b", 1, 2)])
    for _ in range(20_000):
        tree = nltk.Tree("S", [tree])
    rule = Parsing(lambda text: [ParsedSentence(0, 2, tree)], 2)
    assert words_of(rule, Pieces("a", "b"), [0, 1]) == [["ab"]]
    while isinstance(tree[0], nltk.Tree):  # taken apart here, since the interpreter would recurse
        tree = tree.pop(0)
