"""The embedded task tiny-hh: the helpfulness of answers counted apart, its raters, its sizes, its stages."""

import math
import random
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.config.embedded import EMBEDDED_DEFAULTS
from marlhf_lite.lab.corpora.tiny_hh import (
    ASKED,
    CHATTER,
    PLANS,
    RATER_SHARPNESS,
    WORDS,
    Quality,
    advise,
    make_answer,
    make_dialogue,
    make_pairs,
    mistake,
)
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks.templates import ASSISTANT, HUMAN
from marlhf_lite.tasks.tiny_hh.gold import HARM, HARMFUL, OTHER, THINGS, WRONG, gold_scores, inspect
from marlhf_lite.tasks.tokenization import encode_prompts, encode_responses

PERFECT = Quality(cover=1.0, wrong=0.0, chatter=0.0, unasked=0.0, harmful=0.0)
PAIRS = make_pairs(1500, 7)


def dialogues(count, seed=0):
    rng = random.Random(seed)
    return rng, [make_dialogue(rng) for _ in range(count)]


def gold(dialogue, sentences):
    return gold_scores([dialogue.prompt], [" " + " ".join(sentences)])[0]


def helpful(dialogue):
    """The sentences of a perfect answer."""
    return [advise(thing, dialogue.plans[thing]) for thing in dialogue.asked]


# Truth


def test_a_prompt_has_two_human_turns_and_all_that_is_needed():
    _, made = dialogues(200)
    for dialogue in made:
        assert dialogue.prompt.count(HUMAN) == dialogue.prompt.count(ASSISTANT) == 2
        assert dialogue.prompt.startswith(HUMAN) and dialogue.prompt.endswith(ASSISTANT)
        told, asked = dialogue.prompt.split(HUMAN)[1:]
        assert len(dialogue.plans) == PLANS and len(set(dialogue.asked)) == ASKED
        assert [thing for thing in THINGS if thing in asked] == [t for t in THINGS if t in dialogue.asked]
        assert all(f"{value}" in told for values in dialogue.plans.values() for value in values.values())


def test_the_perfect_answer_scores_1_and_nothing_scores_more():
    rng, made = dialogues(300)
    for dialogue in made:
        assert make_answer(rng, dialogue, PERFECT) == " " + " ".join(helpful(dialogue))
        assert gold(dialogue, helpful(dialogue)) == 1.0
        assert gold(dialogue, rng.sample(helpful(dialogue), ASKED)) == 1.0  # in any order
        assert gold_scores([dialogue.prompt], [make_answer(rng, dialogue, Quality.sample(rng))])[0] <= 1.0


def test_every_fault_costs_what_is_said():
    rng, made = dialogues(100, seed=1)
    for dialogue in made:
        whole, (unasked,) = helpful(dialogue), set(dialogue.plans) - set(dialogue.asked)
        at = rng.randrange(ASKED)
        wrong = advise(dialogue.asked[at], mistake(rng, dialogue.plans[dialogue.asked[at]]))
        assert gold(dialogue, whole[:at] + whole[at + 1 :]) == pytest.approx(1 - 1 / ASKED)
        assert gold(dialogue, [*whole[:at], wrong, *whole[at + 1 :]]) == pytest.approx(1 - (1 + WRONG) / ASKED)
        for more in (advise(unasked, dialogue.plans[unasked]), rng.choice(CHATTER), whole[at], "Xyz."):
            assert gold(dialogue, [*whole[:at], more, *whole[at:]]) == pytest.approx(1 - OTHER / ASKED), more
        assert gold(dialogue, [*whole, f"{rng.choice(HARMFUL)}."]) == pytest.approx(1 - HARM / ASKED)


def test_random_answers_score_as_counted():
    rng, made = dialogues(300, seed=2)
    for dialogue in made:
        kinds = {thing: rng.choice(("right", "wrong", "none")) for thing in dialogue.asked}
        right, wrong = ([thing for thing in kinds if kinds[thing] == kind] for kind in ("right", "wrong"))
        chatter, harmful = rng.sample(CHATTER, rng.randint(0, 3)), rng.sample(HARMFUL, rng.randint(0, 2))
        said = [advise(thing, dialogue.plans[thing]) for thing in right] + chatter + [f"{text}." for text in harmful]
        said += [advise(thing, mistake(rng, dialogue.plans[thing])) for thing in wrong]
        expected = len(right) - WRONG * len(wrong) - OTHER * len(chatter) - HARM * len(harmful)
        assert gold(dialogue, rng.sample(said, len(said))) == pytest.approx(expected / ASKED)


def test_the_same_words_for_another_plan_are_wrong():
    """The value has to be that of the plan: a name that another plan has does not count."""
    _, (dialogue,) = dialogues(1)
    dialogue = replace(dialogue, plans={"the gift": {"name": "Anna", "hobby": "chess"}}, asked=("the gift", "the cake"))
    dialogue.plans["the cake"] = {"name": "Bruno", "fruit": "plum"}
    swapped = [advise("the gift", {"name": "Bruno", "hobby": "chess"}), advise("the cake", dialogue.plans["the cake"])]
    assert gold(dialogue, helpful(dialogue)) == 1 and gold(dialogue, swapped) == (1 - WRONG) / 2


@given(st.text(max_size=80), st.text(max_size=80))
@settings(max_examples=200)
def test_any_text_is_taken(prompt, response):
    report = inspect(prompt, response)
    assert report.right == 0 and math.isfinite(report.score) and report.score <= 0
    assert inspect(PAIRS[0]["prompt"], response).asked == ASKED


def test_empty_answers_score_0_and_foreign_prompts_help_nobody():
    assert gold_scores([PAIRS[0]["prompt"]] * 2, ["", " \n"]) == [0.0, 0.0]
    assert inspect("Summarise this.", PAIRS[0]["chosen"]).right == 0


# Raters and task


def test_labels_follow_bradley_terry():
    prompts = [row["prompt"] for row in PAIRS]
    chosen, rejected = (gold_scores(prompts, [row[side] for row in PAIRS]) for side in ("chosen", "rejected"))
    gaps = [a - b for a, b in zip(chosen, rejected) if abs(a - b) > 1e-9]
    chances = [1 / (1 + math.exp(-RATER_SHARPNESS * abs(gap))) for gap in gaps]
    spread = math.sqrt(sum(p * (1 - p) for p in chances)) / len(chances)
    assert mean(gap > 0 for gap in gaps) == pytest.approx(mean(chances), abs=4 * spread)
    assert 0.7 < mean(chances) < 0.95 and len(gaps) > 0.8 * len(PAIRS)


def test_every_template_and_word_is_reached():
    text = " ".join(row["prompt"] + row["chosen"] + row["rejected"] for row in PAIRS)
    assert all(word in text for words in WORDS.values() for word in words)
    assert all(sentence in text for sentence in (*CHATTER, *HARMFUL))


def test_answers_have_their_length_and_fit():
    options = EMBEDDED_DEFAULTS["tiny-hh"]
    tokenizer, (rng, made) = load_tokenizer(options["model"]), dialogues(200)
    best = encode_responses(tokenizer, [make_answer(rng, d, PERFECT) for d in made], 10_000)
    assert 80 <= mean(map(len, best)) <= 110 and max(map(len, best)) < options["max_response_length"]
    texts = [row["prompt"] + row["chosen"] for row in PAIRS[:50]]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True) == texts
    assert max(map(len, encode_prompts(tokenizer, [d.prompt for d in made]))) <= 128
