"""The rewards of the sentiment studies, against the lexicon's own file."""

import string
from pathlib import Path

import pytest

pytest.importorskip("vaderSentiment")

import vaderSentiment

from marlhf_lab.corpora import sentiment
from marlhf_lite.utils.jsonl import read_lines

POLICIES = Path(__file__).parents[2] / "data" / "sentiment_policies"
STORED = POLICIES / "answers.jsonl"


def lexicon():
    text = (Path(vaderSentiment.__file__).parent / "vader_lexicon.txt").read_text(encoding="utf-8")
    return {
        line.split("\t")[0]: float(line.split("\t")[1])
        for line in text.splitlines()
        if line.strip()
    }


def test_valences_are_those_of_the_file():
    """Of all stored answers: words without the punctuation around them, each as the file has it.

    A word of which two characters or less would be left stays as it is, for it may be an emoticon: VADER's rule.
    """
    words, answers = lexicon(), [row["answer"] for row in read_lines(STORED)]

    def bare(word):
        return word.strip(string.punctuation) if len(word.strip(string.punctuation)) > 2 else word

    def valence(some):
        total = sum(words.get(bare(word).lower(), 0.0) for word in some)
        return min(max(total / 5, -1), 1)

    assert sentiment.first_valence([], answers) == pytest.approx(
        [valence(text.split()[:12]) for text in answers]
    )
    assert sentiment.last_valence([], answers) == pytest.approx(
        [valence(text.split()[-12:]) for text in answers]
    )
    settle = read_lines(POLICIES / "settle" / "answers.jsonl")
    assert [row["score"] for row in settle] == pytest.approx(
        [valence(row["answer"].split()[:12]) for row in settle]
    )
    assert {len(row["tokens"]) for row in settle} == {64}, "no answer ends before"


@pytest.mark.parametrize(
    ("answer", "first", "last"),
    [
        ("", 0.0, 0.0),
        ("good", 1.9 / 5, 1.9 / 5),
        ("Good, GOOD! x x x x x x x x x x bad x x x x x x x x x x x", 2 * 1.9 / 5, -2.5 / 5),
        ("not good", 1.9 / 5, 1.9 / 5),  # words alone, no rule of negation
        ("great " * 5, 1.0, 1.0),
        ("horrible " * 9, -1.0, -1.0),
    ],
)
def test_valence_of_first_and_last_words(answer, first, last):
    assert sentiment.first_valence([""], [answer]) == pytest.approx([first])
    assert sentiment.last_valence([""], [answer]) == pytest.approx([last])
