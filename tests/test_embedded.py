"""The embedded task: its grammar, its truth, its raters, and the embedded tokenizer and model it is made for."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lab.corpora.tiny_tldr import make_post
from marlhf_lite.tasks.tiny_tldr import grammar as g
from marlhf_lite.tasks.tiny_tldr.gold import FREE_WORDS, LONG, PADDING, WRONG, gold_scores, inspect

SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>", "<mask>")
# Tokenizers of this family write a space as U+2581, so that character alone does not come back.
TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=80
).filter(lambda text: not any(token in text for token in SPECIAL))


def posts(count, seed=0):
    rng = random.Random(seed)
    return [make_post(rng) for _ in range(count)]


# Grammar


# Gold scorer, against counts taken while the text is made


def write(post, facts, fillers=(), who_again=0):
    """A summary that states `facts` in order, one a sentence, and the gold score it should get."""
    trees, true = [], set(post.facts)
    for i, (kind, values) in enumerate(facts):
        trees.append(
            g.sentence(g.subject(post.who, i <= who_again), [g.fill(g.FACTS[kind], values)])
        )
    trees += [g.fill(g.FILLERS[i]) for i in fillers]
    text = " " + " ".join(map(g.detokenize, trees))
    right = 1 + len(set(facts) & true)
    repeats = len(facts) - len(set(facts)) + min(who_again, len(facts) - 1)
    # the full stop is no word
    excess = max(0, sum(len(tree.leaves()) - 1 for tree in trees) - FREE_WORDS)
    score = (
        right - WRONG * len(set(facts) - true) - PADDING * (repeats + len(fillers)) - LONG * excess
    )
    return text, score


def gold(post, text):
    return gold_scores([post.prompt], [text])[0]


def test_random_summaries_score_as_counted():
    rng = random.Random(2)
    for post in posts(300, seed=1):
        facts = [
            (
                k,
                tuple(rng.choice(g.LEXICON[slot]) for slot in g.slots(g.FACTS[k]))
                if rng.random() < 0.3
                else v,
            )
            for k, v in rng.sample(post.facts, rng.randint(1, 5))
        ]
        facts += rng.choices(facts, k=rng.randint(0, 3))  # repeats
        fillers = rng.sample(range(len(g.FILLERS)), rng.randint(0, 4))
        text, score = write(post, facts, fillers, who_again=rng.randint(0, 2))
        assert gold(post, text) == pytest.approx(score), text


OTHER = {  # text -> score
    **dict.fromkeys(("", " ", "\n\n", "...", "!?.", " " * 50_000 + "\n" * 50_000), 0),
    "\0": -PADDING,
    " La casa es azul. El perro come!": -2 * PADDING,
    " My sister Nobody moved to Nowhere.": -2 * WRONG,  # another person, and what she did not do
}


@pytest.mark.parametrize(("text", "score"), OTHER.items(), ids=[repr(text[:20]) for text in OTHER])
def test_other_texts(text, score):
    assert gold(posts(1)[0], text) == score and gold_scores(["no post at all"], [text]) == [score]


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_gold_takes_any_text(prompt, response):
    (score,) = gold_scores([prompt], [response])
    assert math.isfinite(score) and score <= inspect(prompt, response)["total"]


# Tokenizer and model


@given(text=TEXT)
@settings(max_examples=300, deadline=None)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
