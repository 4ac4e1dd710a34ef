"""The parsers: embedded grammar and Python, link-grammar and stanza's of the examples. Those not installed skip."""

import importlib
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nltk
import pytest
import torch
from conftest import fails
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import Pieces

from marlhf_lab.corpora.tiny_tldr import Quality, make_post, make_summary, summary_text
from marlhf_lite.config.options import MacroConfig
from marlhf_lite.experiments.named_rules import make_parser, make_rule
from marlhf_lite.extras.parsers.python_code import PythonParser
from marlhf_lite.parsing import GrammarParser, Leaf, ParsedSentence, Parsing
from marlhf_lite.parsing.base import leaves
from marlhf_lite.tasks.tiny_tldr.grammar import detokenize

EXAMPLES = Path(__file__).parents[1] / "examples"
needs_link = pytest.mark.skipif(
    shutil.which("link-parser") is None,
    reason="link-parser is not installed (apt-get install link-grammar)",
)


def check(sentences, text, whole=True):
    """Check that spans are in order, leaves equal their text, and leaves have all characters except white space."""
    edges = [edge for s in sentences for edge in (s.start, s.end)]
    assert edges == sorted(edges) and all(0 <= edge <= len(text) for edge in edges)
    for s in (s for s in sentences if s.tree is not None):
        words, inside = leaves(s.tree), text[s.start : s.end]
        assert all(isinstance(w, Leaf) and w == inside[w.start : w.end] for w in words)
        edges = [edge for w in words for edge in (w.start, w.end)]
        assert edges == sorted(edges) and all(0 <= edge <= len(inside) for edge in edges)
        assert not whole or "".join("".join(w.split()) for w in words) == "".join(inside.split())


# The embedded grammar


@pytest.fixture(scope="module")
def grammar_parser():
    return GrammarParser()


def test_grammar_gives_the_trees_that_text_was_made_from(grammar_parser):
    rng = random.Random(3)
    posts = [make_post(rng) for _ in range(40)]
    for trees in [
        *(post.trees for post in posts),
        *(make_summary(rng, p, Quality(1.0, 0.2, 0.8)) for p in posts),
    ]:
        text = summary_text(trees)
        found = grammar_parser(text)
        check(found, text)
        assert [s.tree for s in found] == list(trees)
        assert [text[s.start : s.end] for s in found] == list(map(detokenize, trees))


@pytest.mark.parametrize(
    ("sentence", "phrase"),
    [
        ("She moved to Xyzzyville.", "(PP (IN to) (NP (NNP Xyzzyville)))"),  # no such place
        ("He waited 7 days.", "(NP (CD 7) (NNS days))"),
        (
            "My boss Tol visited Marwick with Bruna.",
            "(NP (NP (NNP Marwick)) (PP (IN with) (NP (NNP Bruna))))",
        ),
        ("She lost the cat.", "(NP (DT the) (NN cat))"),  # no template, but the grammar's
    ],
)
def test_grammar_reads_what_models_make_of_it(grammar_parser, sentence, phrase):
    (found,) = grammar_parser(sentence)
    check([found], sentence)
    assert phrase in found.tree.pformat(margin=999)


@given(st.text(max_size=60))
def test_grammar_takes_any_text(grammar_parser, text):
    check(grammar_parser(text), text)
    for other in (
        "She moved to",
        "He zzz.",
        "to moved She.",
        "She moved to Marwick .. .",
        "?",
        "é",
    ):
        assert all(s.tree is None for s in grammar_parser(other))


# link-grammar, an example


@pytest.fixture
def link_phrases(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("link_phrases")
    sys.modules.pop("link_phrases")


@pytest.fixture
def link(link_phrases):
    return link_phrases.LinkGrammarParser(time_limit=20)


@needs_link
def test_link_parses_english(link):
    text = " Sure, I can help you with that!  The old cat sat on the mat. I'm sorry; it’s “broken”, isn't it?\n"
    found = link(text)
    check(found, text)
    assert len(found) == 3 and all(s.tree is not None for s in found)
    assert (
        found[1].tree.pformat(margin=999) == "(S (NP The old cat) (VP sat (PP on (NP the mat))) .)"
    )
    assert "it’s" not in found[2].tree.leaves() and "’s" in found[2].tree.leaves()


ODD_SENTENCES = [
    "!verbosity=3", "!exit", "%comment", "* star", ":) Nice", "This (really) is [sic] a {brace}.", "(S (NP x))",
    "asdf qwer 12.5 zxcv.", "Yes", "...", "a\tb", "x" * 300, "你好 😀", "\\", "walls set to 0", "nul\x00l bell\x07",
    "\x00", "The of of the.", "$5.00, 20% & more <b>", "\ud800", "", " ",
]  # fmt: skip


@needs_link
def test_link_takes_any_sentence(link):
    parsed = link.parse(
        [text for sentence in ODD_SENTENCES for text in (sentence, f"It works, {len(sentence)}.")]
    )
    for sentence in ODD_SENTENCES:
        found = parsed[sentence]
        check(found, sentence, whole=False)
        if sentence.startswith(("!", "%")):  # a word to be parsed, not a command
            assert "".join(found[0].tree.leaves()) == sentence
        number = str(len(sentence))
        # still in step
        assert parsed[f"It works, {number}."][0].tree.leaves() == ["It", "works", ",", number, "."]


@needs_link
def test_link_gives_up_after_its_time_limit(link_phrases):
    parser = link_phrases.LinkGrammarParser(time_limit=1)
    hard = "but the man who I saw in the park with the dog and that you know when it rains or " * 20
    found = parser(f"One cat sat. {hard}. Two cats sat.")
    assert [s.tree is None for s in found] == [False, True, False]


@pytest.mark.parametrize("end", ["time.sleep(60)", "sys.exit(1)"])
def test_link_sentences_without_a_reply_have_no_tree(link_phrases, tmp_path, monkeypatch, end):
    command = tmp_path / "fake-parser"
    command.write_text(f"""#!{sys.executable}
import sys, time
for line in sys.stdin:
    if "stop" in line:
        {end}
    print("walls set to 0" if line[0] == "!" else f"(S {{line.strip()}})", flush=True)""")
    command.chmod(0o755)
    parser = link_phrases.LinkGrammarParser(command=str(command))
    monkeypatch.setattr(link_phrases, "START_SECONDS", 0.1)
    found = parser("Fine. Do stop. Never asked.")
    assert [s.tree is None for s in found] == [False, True, True]
    rule = Parsing(parser)
    tokens = Pieces("Fine.", " Do", " stop.", " Never", " asked.")
    rule(torch.ones(1, 5, dtype=torch.bool), token_ids=torch.arange(5)[None], tokenizer=tokens)
    assert rule.metrics()["fallback_rate"] == 2 / 3


@needs_link
def test_link_s_parser_is_a_rule_by_its_name(link_phrases, tmp_path, monkeypatch):
    """One process parses the sentences of all responses."""
    rule = make_rule(MacroConfig(termination="link_phrases:Phrases"))
    started, run = [], subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **rest: started.append(args) or run(*args, **rest)
    )
    tokens = Pieces(
        "The", " old", " cat", " sat", " on", " the", " mat", ".", " A", " dog", " barked"
    )
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 7, 8, 9, 10, 7]])
    macros = rule(torch.ones(2, 8, dtype=torch.bool), token_ids=ids, tokenizer=tokens)
    assert len(started) == 1 and rule.metrics()["fallback_rate"] == 0
    assert macros.spans() == [[(0, 3), (3, 8)], [(0, 4), (4, 8)]]
    monkeypatch.setenv("PATH", str(tmp_path))
    name = MacroConfig(termination="link_phrases:Phrases")
    fails(
        lambda: make_rule(name),
        "--termination link_phrases:Phrases",
        "apt-get install link-grammar",
    )
    fails(lambda: link_phrases.LinkGrammarParser(command="/bin/false"), "dictionary")


def test_link_replies_are_read(link_phrases):
    read_constituents, align = link_phrases.read_constituents, link_phrases.align
    reply = "\n(S (NP the cat.n) (VP sat.v-d (PP on (NP the mat.n))) .)\n\n(S (NP second))"
    assert read_constituents(reply).leaves() == [
        "the",
        "cat.n",
        "sat.v-d",
        "on",
        "the",
        "mat.n",
        ".",
    ]
    assert read_constituents("(ADJP (S (NP it) .))\n\n").leaves() == ["it", "."]
    for none in ("", "No linkages\n", "(S (NP the", "(S"):
        assert read_constituents(none) is None
    words = [
        "the",
        "asdf{?}.n",
        "{of}",
        "12.5{!}",
        "Mr..x",
        "'s.v",
        "{",
        "{}}",
        "U.S",
        ".",
        "....v",
    ]
    text = "The asdf of 12.5  Mr.'s {} U.S. ..."
    spans = align(words, text)
    assert [text[a:b] for a, b in spans] == [
        "The",
        "asdf",
        "of",
        "12.5",
        "Mr.",
        "'s",
        "{",
        "}",
        "U.S",
        ".",
        "...",
    ]
    assert (
        align(["the", "cat"], "The dog") is None
        and align(["the"], "The dog") is None
        and align([], "x") is None
    )


# stanza, an example


@pytest.fixture
def phrases(monkeypatch):
    """The example's module, with an empty module in place of stanza, which need not be installed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(sys.modules, "stanza", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "stanza_phrases", raising=False)
    yield importlib.import_module("stanza_phrases")
    sys.modules.pop("stanza_phrases")


def tree_of(bracket):
    """Stands in for stanza's tree, which has these two attributes."""
    if isinstance(bracket, str):
        return SimpleNamespace(label=bracket, children=())
    return SimpleNamespace(label=bracket.label(), children=tuple(map(tree_of, bracket)))


def stanza_sentence(tokens, bracket):
    """`tokens`: (start, end, its words, each a text or (text, start, end))."""
    made = []
    for start, end, words in tokens:
        pairs = [(w, None, None) if isinstance(w, str) else w for w in words]
        words = [SimpleNamespace(text=t, start_char=a, end_char=b) for t, a, b in pairs]
        made.append(SimpleNamespace(start_char=start, end_char=end, words=words))
    return SimpleNamespace(
        tokens=made, constituency=bracket and tree_of(nltk.Tree.fromstring(bracket))
    )


@pytest.mark.parametrize(
    ("words", "spans"),
    # as newer models do
    [(["do", "n't"], [(2, 7), (7, 7)]), ([("do", 4, 6), ("n't", 6, 9)], [(2, 4), (4, 7)])],
)
def test_stanza_sentences_are_read(phrases, words, spans):
    bracket = "(ROOT (S (NP (PRP I)) (VP (VBP do) (RB n't) (VP (VB go))) (. .)))"
    tokens = [
        (2, 3, [("I", 2, 3)]),
        (4, 9, words),
        (10, 12, [("go", 10, 12)]),
        (12, 13, [(".", 12, 13)]),
    ]
    got = phrases.read_sentence(stanza_sentence(tokens, bracket))
    assert (got.start, got.end, got.tree.pformat(margin=99)) == (2, 13, bracket)
    assert [(w.start, w.end) for w in got.tree.leaves()] == [(0, 1), *spans, (8, 10), (10, 11)]
    assert phrases.read_sentence(stanza_sentence(tokens, None)) == ParsedSentence(2, 13, None)
    # not of these words
    assert phrases.read_sentence(stanza_sentence(tokens, "(ROOT (S I go))")).tree is None


def test_the_example_s_parser_is_a_rule_by_its_name(phrases, monkeypatch):
    """Its phrases have fewer than five tokens; a text that is only white space is not parsed."""
    words = [
        (a, a + 1, [(word, a, a + 1)]) for a, word in zip(range(0, 18, 2), "abcdefghi", strict=True)
    ]
    sentence = stanza_sentence(words, "(ROOT (S (NP a b c) (VP d e f g)) (. h i))")
    pipeline = {"a b c d e f g h i": SimpleNamespace(sentences=[sentence])}.__getitem__
    monkeypatch.setattr(
        phrases.stanza, "Pipeline", lambda language, **options: pipeline, raising=False
    )
    rule, tokens = (
        make_rule(MacroConfig(termination="stanza_phrases:Phrases")),
        [f" {word}" for word in "bcdefghi"],
    )
    macros = rule(
        torch.ones(1, 9, dtype=torch.bool),
        token_ids=torch.arange(9)[None],
        tokenizer=Pieces("a", *tokens),
    )
    assert macros.spans() == [[(0, 3), (3, 7), (7, 9)]] and rule.metrics()["fallback_rate"] == 0
    assert phrases.StanzaParser()(" \n") == []


# Python


@pytest.fixture(scope="module")
def python():
    pytest.importorskip("tree_sitter_python", reason="tree-sitter is not installed")
    return PythonParser()


PROGRAM = "def f(x):\n    # twice\n    return x * 2\n\nprint(f('é😀'), end=\"\")\n"


@settings(max_examples=200)
@given(st.one_of(st.text(max_size=80), st.text("()[]{}:=\n\t #'\"\\fordef xé0😀", max_size=80)))
@example("(" * 3000)
@example("\ud800 = 1")
@example("if x:\n" * 200)
@example("\x00")
def test_python_takes_any_text(python, text):
    found = python(text)
    check(found, text, whole=False)
    assert len(found) == bool(text.strip())


def test_python_cuts_at_statements(python, tokenizer):
    ids = tokenizer(PROGRAM, add_special_tokens=False)["input_ids"]
    mask, tensor = torch.ones(1, len(ids), dtype=torch.bool), torch.tensor([ids])
    (spans,) = Parsing(python, 1000)(mask, token_ids=tensor, tokenizer=tokenizer).spans()
    assert spans == [(0, len(ids))]
    (spans,) = Parsing(python, 24)(mask, token_ids=tensor, tokenizer=tokenizer).spans()
    pieces = [tokenizer.decode(ids[a:b]) for a, b in spans]
    assert len(pieces) > 2 and any("return x * 2" in p and "def" not in p for p in pieces)


def test_a_parser_that_is_not_there_says_what_to_install(monkeypatch):
    make_parser.cache_clear()
    monkeypatch.setitem(sys.modules, "tree_sitter_python", None)
    named = "parser python", "pip install tree-sitter"
    fails(lambda: make_rule(MacroConfig(termination="parsing", parser="python")), *named)
