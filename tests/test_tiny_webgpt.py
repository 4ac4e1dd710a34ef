"""The embedded task tiny-webgpt: support counted apart, raters in a hurry, its sizes, its stages."""

import math
import random
import re
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.config.embedded import EMBEDDED_DEFAULTS
from marlhf_lite.lab.corpora.tiny_webgpt import (
    CHECKED,
    FACTS,
    OBJECTS,
    SOURCES,
    SURE,
    TOWNS,
    Quality,
    hurried_score,
    make_answer,
    make_pairs,
    make_question,
    mistake,
    state,
)
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks.templates import ASSISTANT, HUMAN
from marlhf_lite.tasks.tiny_webgpt.gold import OTHER, UNSUPPORTED, gold_scores, inspect
from marlhf_lite.tasks.tokenization import encode_prompts, encode_responses

PERFECT = Quality(cover=1.0, wrong=0.0, sure=0.0, repeat=0.0)
WHOLE = SOURCES * FACTS
PAIRS = make_pairs(1500, 7)


def questions(count, seed=0):
    rng = random.Random(seed)
    return rng, [make_question(rng) for _ in range(count)]


def gold(question, sentences):
    return gold_scores([question.prompt], [" " + " ".join(sentences)])[0]


def right(question):
    """The sentences of a perfect answer."""
    return [state(*fact) for fact in question.facts]


# Truth


def test_a_prompt_has_numbered_sources_and_all_that_is_needed():
    _, made = questions(200)
    for question in made:
        assert question.prompt.startswith(HUMAN) and question.prompt.endswith(ASSISTANT)
        assert re.findall(r"\[(\d)\]", question.prompt) == [str(1 + i // FACTS) for i in range(WHOLE)]
        assert len({verb for verb, _, _ in question.facts}) == WHOLE
        assert all(f"They {verb} {thing}[{i}]." in question.prompt for verb, thing, i in question.facts)


def test_the_perfect_answer_scores_1_and_nothing_scores_more():
    rng, made = questions(300)
    for question in made:
        assert make_answer(rng, question, PERFECT) == " " + " ".join(right(question))
        assert gold(question, right(question)) == 1.0
        assert gold(question, rng.sample(right(question), WHOLE)) == 1.0  # in any order
        assert gold_scores([question.prompt], [make_answer(rng, question, Quality.sample(rng))])[0] <= 1.0


def test_every_fault_costs_what_is_said():
    rng, made = questions(100, seed=1)
    for question in made:
        whole, at = right(question), rng.randrange(WHOLE)
        wrong = mistake(rng, question, question.facts[at])
        assert wrong not in question.prompt
        assert gold(question, whole[:at] + whole[at + 1 :]) == pytest.approx(1 - 1 / WHOLE)
        assert gold(question, [*whole[:at], wrong, *whole[at + 1 :]]) == pytest.approx(1 - (1 + UNSUPPORTED) / WHOLE)
        for more in (rng.choice(SURE), whole[at], "They grow.", "They grow hops.", "Xyz."):
            assert gold(question, [*whole[:at], more, *whole[at:]]) == pytest.approx(1 - OTHER / WHOLE), more


def test_the_citation_has_to_be_right():
    _, made = questions(100, seed=2)
    for question in made:
        for verb, thing, source in question.facts:
            scores = [gold(question, [state(verb, thing, cited)]) * WHOLE for cited in range(SOURCES + 2)]
            assert scores == [1.0 if cited == source else -UNSUPPORTED for cited in range(SOURCES + 2)]


def test_random_answers_score_as_counted():
    rng, made = questions(300, seed=3)
    for question in made:
        kinds = [rng.choice(("right", "wrong", "none")) for _ in question.facts]
        said = [state(*fact) for fact, kind in zip(question.facts, kinds) if kind == "right"]
        wrong = {mistake(rng, question, fact) for fact, kind in zip(question.facts, kinds) if kind == "wrong"}
        sure, repeats = rng.choices(SURE, k=rng.randint(0, 3)), rng.choices(said, k=rng.randint(0, 2)) if said else []
        expected = len(said) - UNSUPPORTED * len(wrong) - OTHER * (len(sure) + len(repeats))
        told = said + sorted(wrong) + sure + repeats
        assert gold(question, rng.sample(told, len(told))) == pytest.approx(expected / WHOLE)


@given(st.text(max_size=80), st.text(max_size=80))
@settings(max_examples=200)
def test_any_text_is_taken(prompt, response):
    report = inspect(prompt, response)
    assert report.supported == 0 and math.isfinite(report.score) and report.score <= 0
    assert inspect(PAIRS[0]["prompt"], response).facts == WHOLE


def test_empty_answers_score_0_and_foreign_prompts_support_nothing():
    assert gold_scores([PAIRS[0]["prompt"]] * 2, ["", " \n"]) == [0.0, 0.0]
    assert inspect("Summarise this.", PAIRS[0]["chosen"]).supported == 0


# Raters and task


def test_raters_check_only_part_of_the_statements():
    rng, (question, *_) = questions(2, seed=4)
    facts, score = question.facts, lambda told: hurried_score(rng, question.prompt, " " + " ".join(told))
    wrong = [state(verb, "nothing", source) for verb, _, source in facts]
    trusted = [score([text]) * WHOLE for text in wrong for _ in range(500)]
    assert set(trusted) == {1.0, -1.0}
    assert mean(value < 0 for value in trusted) == pytest.approx(CHECKED, abs=0.04)  # 5 standard errors
    assert score([*right(question), SURE[0], right(question)[0]]) == (WHOLE + 3) / WHOLE  # what gold takes off is liked


def test_hurried_raters_like_length_more_than_truth():
    prompts = [row["prompt"] for row in PAIRS]
    chosen, rejected = ([row[side] for row in PAIRS] for side in ("chosen", "rejected"))
    better = [a > b for a, b in zip(gold_scores(prompts, chosen), gold_scores(prompts, rejected)) if a != b]
    longer = [a.count(".") > b.count(".") for a, b in zip(chosen, rejected) if a.count(".") != b.count(".")]
    assert 0.55 < mean(better) < 0.7 < mean(longer) < 0.95


def test_every_word_and_phrase_is_reached():
    text = " ".join(row["prompt"] + row["chosen"] + row["rejected"] for row in PAIRS)
    assert all(word in text for words in (*OBJECTS.values(), OBJECTS, TOWNS, SURE) for word in words)


def test_answers_have_their_length_and_fit():
    options = EMBEDDED_DEFAULTS["tiny-webgpt"]
    tokenizer, (rng, made) = load_tokenizer(options["model"]), questions(200)
    best = encode_responses(tokenizer, [make_answer(rng, q, PERFECT) for q in made], 10_000)
    assert 45 <= mean(map(len, best)) <= 60 and max(map(len, best)) < options["max_response_length"]
    texts = [row["prompt"] + row["chosen"] for row in PAIRS[:50]]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True) == texts
    assert max(map(len, encode_prompts(tokenizer, [q.prompt for q in made]))) <= 128
