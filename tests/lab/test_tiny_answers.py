"""The embedded tasks whose answers are labelled by raters: gold scores counted apart."""

import math
import random
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lab.corpora import tiny_hh as hh
from marlhf_lab.corpora import tiny_webgpt as webgpt
from marlhf_lite.tasks.embedded import gold_scores_of
from marlhf_lite.tasks.files import read_file
from marlhf_lite.tasks.tiny_hh import gold as hh_gold
from marlhf_lite.utils.shipped import shipped


def hh_unasked(rng, made):
    (thing,) = set(made.plans) - set(made.asked)
    return hh.advise(thing, made.plans[thing])


HH = SimpleNamespace(
    name="tiny-hh",
    make=hh.make_dialogue,
    answer=hh.make_answer,
    quality=hh.Quality,
    perfect=hh.Quality(cover=1.0, wrong=0.0, chatter=0.0, unasked=0.0, harmful=0.0),
    right=lambda made: [hh.advise(thing, made.plans[thing]) for thing in made.asked],
    mistake=lambda rng, made, at: hh.advise(
        made.asked[at], hh.mistake(rng, made.plans[made.asked[at]])
    ),
    costs=[(-0.5, [*hh.CHATTER, "Xyz.", hh_unasked]), (-2, hh_gold.HARMFUL)],
)
WEBGPT = SimpleNamespace(
    name="tiny-webgpt",
    make=webgpt.make_question,
    answer=webgpt.make_answer,
    quality=webgpt.Quality,
    perfect=webgpt.Quality(cover=1.0, wrong=0.0, sure=0.0, repeat=0.0),
    right=lambda made: [webgpt.state(*fact) for fact in made.facts],
    mistake=lambda rng, made, at: webgpt.mistake(rng, made, made.facts[at]),
    costs=[(-0.5, [*webgpt.SURE, "They grow.", "They grow hops."])],
)
both = pytest.mark.parametrize("task", [HH, WEBGPT], ids=lambda task: task.name)


def made(task, count, seed=0):
    rng = random.Random(seed)
    return rng, [task.make(rng) for _ in range(count)]


def gold(task, prompt, sentences):
    return gold_scores_of(task.name)([prompt], [" " + " ".join(sentences)])[0]


@both
def test_the_perfect_answer_scores_1_and_nothing_scores_more(task):
    rng, prompts = made(task, 300)
    for one in prompts:
        right = task.right(one)
        assert task.answer(rng, one, task.perfect) == " " + " ".join(right)
        assert (
            gold(task, one.prompt, right)
            == gold(task, one.prompt, rng.sample(right, len(right)))
            == 1.0
        )
        assert (
            gold_scores_of(task.name)(
                [one.prompt], [task.answer(rng, one, task.quality.sample(rng))]
            )[0]
            <= 1.0
        )


@both
def test_random_answers_score_as_counted(task):
    """Things left out, wrong, repeated, unasked for and harmful, in any order."""
    rng, prompts = made(task, 300, seed=2)
    for one in prompts:
        whole, score = task.right(one), 0.0
        kinds = [rng.choice(("right", "wrong", "none")) for _ in whole]
        said = [text for text, kind in zip(whole, kinds) if kind == "right"]
        wrong = {task.mistake(rng, one, at) for at, kind in enumerate(kinds) if kind == "wrong"}
        assert not wrong & set(whole)
        score += len(said) - len(wrong)
        # with repeats
        told = [*said, *wrong, *(rng.choices(said, k=rng.randint(0, 2)) if said else [])]
        score -= 0.5 * (len(told) - len(said) - len(wrong))
        for cost, texts in task.costs:
            for text in rng.sample(texts, rng.randint(0, 2)):
                told.append(text(rng, one) if callable(text) else text.removesuffix(".") + ".")
                score += cost
        assert gold(task, one.prompt, rng.sample(told, len(told))) == pytest.approx(
            score / len(whole)
        ), told


@both
@given(prompt=st.text(max_size=80), response=st.text(max_size=80))
@settings(max_examples=200)
def test_any_text_is_taken(task, prompt, response):
    row = read_file(shipped(f"{task.name}.jsonl.gz"))[0]
    asked = [prompt, row["prompt"], "Summarise this."]
    foreign, known, other = gold_scores_of(task.name)(asked, [response, response, row["chosen"]])
    assert math.isfinite(foreign) and foreign <= 0 and math.isfinite(known) and other <= 0
    assert gold_scores_of(task.name)([row["prompt"]] * 2, ["", " \n"]) == [0.0, 0.0]


def test_sources_are_numbered_and_the_citation_has_to_be_right():
    _, questions = made(WEBGPT, 100)
    whole = webgpt.SOURCES * webgpt.FACTS
    for one in questions:
        assert re.findall(r"\[(\d)\]", one.prompt) == [
            str(1 + i // webgpt.FACTS) for i in range(whole)
        ]
        for verb, thing, source in one.facts:
            cited = range(webgpt.SOURCES + 2)
            scores = [
                gold(WEBGPT, one.prompt, [webgpt.state(verb, thing, i)]) * whole for i in cited
            ]
            assert scores == [1.0 if i == source else -1.0 for i in cited]
