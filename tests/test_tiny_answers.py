"""The embedded tasks whose answers are labelled by raters: gold scores counted apart, raters, words and lengths."""

import math
import random
import re
from statistics import mean
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.config.embedded import EMBEDDED_DEFAULTS
from marlhf_lite.lab.corpora import tiny_hh as hh
from marlhf_lite.lab.corpora import tiny_tldr as tldr
from marlhf_lite.lab.corpora import tiny_webgpt as webgpt
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks.embedded import STORED
from marlhf_lite.tasks.files import read_file
from marlhf_lite.tasks.tiny_hh import gold as hh_gold
from marlhf_lite.tasks.tiny_webgpt import gold as webgpt_gold
from marlhf_lite.tasks.tokenization import encode_prompts, encode_responses
from marlhf_lite.utils.shipped import shipped

PAIRS = {name: read_file(shipped(f"{name}.jsonl.gz"))[:1500] for name in ("tiny-tldr", "tiny-hh", "tiny-webgpt")}


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
    mistake=lambda rng, made, at: hh.advise(made.asked[at], hh.mistake(rng, made.plans[made.asked[at]])),
    costs={-1 - hh_gold.WRONG: None, -hh_gold.OTHER: [*hh.CHATTER, "Xyz.", hh_unasked], -hh_gold.HARM: hh_gold.HARMFUL},
    inspect=hh_gold.inspect,
    words=[*sum(hh.WORDS.values(), ()), *hh.CHATTER, *hh_gold.HARMFUL],
    tokens=(80, 110),
)
WEBGPT = SimpleNamespace(
    name="tiny-webgpt",
    make=webgpt.make_question,
    answer=webgpt.make_answer,
    quality=webgpt.Quality,
    perfect=webgpt.Quality(cover=1.0, wrong=0.0, sure=0.0, repeat=0.0),
    right=lambda made: [webgpt.state(*fact) for fact in made.facts],
    mistake=lambda rng, made, at: webgpt.mistake(rng, made, made.facts[at]),
    costs={-1 - webgpt_gold.UNSUPPORTED: None, -webgpt_gold.OTHER: [*webgpt.SURE, "They grow.", "They grow hops."]},
    inspect=webgpt_gold.inspect,
    words=[*sum(webgpt.OBJECTS.values(), ()), *webgpt.OBJECTS, *webgpt.TOWNS, *webgpt.SURE],
    tokens=(45, 60),
)
both = pytest.mark.parametrize("task", [HH, WEBGPT], ids=lambda task: task.name)


def made(task, count, seed=0):
    rng = random.Random(seed)
    return rng, [task.make(rng) for _ in range(count)]


def gold(task, prompt, sentences):
    return STORED[task.name]([prompt], [" " + " ".join(sentences)])[0]


@both
def test_the_perfect_answer_scores_1_and_nothing_scores_more(task):
    rng, prompts = made(task, 300)
    for one in prompts:
        right = task.right(one)
        assert task.answer(rng, one, task.perfect) == " " + " ".join(right)
        assert gold(task, one.prompt, right) == gold(task, one.prompt, rng.sample(right, len(right))) == 1.0
        assert STORED[task.name]([one.prompt], [task.answer(rng, one, task.quality.sample(rng))])[0] <= 1.0


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
        wrong_cost, *other = task.costs
        score += len(said) + (wrong_cost + 1) * len(wrong)
        told = [*said, *wrong, *(rng.choices(said, k=rng.randint(0, 2)) if said else [])]  # with repeats
        score -= 0.5 * (len(told) - len(said) - len(wrong))
        for cost in other:
            for text in rng.sample(list(task.costs[cost]), rng.randint(0, 2)):
                told.append(text(rng, one) if callable(text) else text.removesuffix(".") + ".")
                score += cost
        assert gold(task, one.prompt, rng.sample(told, len(told))) == pytest.approx(score / len(whole)), told


@both
@given(prompt=st.text(max_size=80), response=st.text(max_size=80))
@settings(max_examples=200)
def test_any_text_is_taken(task, prompt, response):
    row, foreign = PAIRS[task.name][0], task.inspect(prompt, response)
    assert math.isfinite(foreign.score) and foreign.score <= 0
    assert math.isfinite(task.inspect(row["prompt"], response).score)
    assert task.inspect("Summarise this.", row["chosen"]).score <= 0
    assert STORED[task.name]([row["prompt"]] * 2, ["", " \n"]) == [0.0, 0.0]


def test_sources_are_numbered_and_the_citation_has_to_be_right():
    _, questions = made(WEBGPT, 100)
    whole = webgpt.SOURCES * webgpt.FACTS
    for one in questions:
        assert re.findall(r"\[(\d)\]", one.prompt) == [str(1 + i // webgpt.FACTS) for i in range(whole)]
        for verb, thing, source in one.facts:
            cited = range(webgpt.SOURCES + 2)
            scores = [gold(WEBGPT, one.prompt, [webgpt.state(verb, thing, i)]) * whole for i in cited]
            assert scores == [1.0 if i == source else -webgpt_gold.UNSUPPORTED for i in cited]


# Raters


@pytest.mark.parametrize(("name", "sharpness"), [("tiny-tldr", tldr.RATER_SHARPNESS), ("tiny-hh", hh.RATER_SHARPNESS)])
def test_labels_follow_bradley_terry(name, sharpness):
    prompts = [row["prompt"] for row in PAIRS[name]]
    chosen, rejected = (STORED[name](prompts, [row[side] for row in PAIRS[name]]) for side in ("chosen", "rejected"))
    gaps = [a - b for a, b in zip(chosen, rejected) if abs(a - b) > 1e-9]
    chances = [1 / (1 + math.exp(-sharpness * abs(gap))) for gap in gaps]
    spread = math.sqrt(sum(p * (1 - p) for p in chances)) / len(chances)
    assert mean(gap > 0 for gap in gaps) == pytest.approx(mean(chances), abs=4 * spread)
    assert 0.65 < mean(chances) < 0.95 and len(gaps) > 0.8 * len(prompts)  # raters err; few ties
    for low, high in ((0, 1), (1, 2), (2, 4), (4, 99)):  # and not only on average
        inside = [(gap > 0, p) for gap, p in zip(gaps, chances) if low < sharpness * abs(gap) <= high]
        assert mean(won for won, _ in inside) == pytest.approx(mean(p for _, p in inside), abs=0.1)
    longer = mean(len(row["chosen"]) > len(row["rejected"]) for row in PAIRS[name])
    assert 0.4 < longer < 0.7  # length does not give it away


def test_raters_in_a_hurry_check_only_part_and_like_length_more_than_truth():
    rng, (one, *_) = made(WEBGPT, 2, seed=4)
    score = lambda told: webgpt.hurried_score(rng, one.prompt, " " + " ".join(told))  # noqa: E731
    wrong, whole = [webgpt.state(verb, "nothing", source) for verb, _, source in one.facts], len(one.facts)
    trusted = [score([text]) * whole for text in wrong for _ in range(500)]
    assert set(trusted) == {1.0, -1.0}
    assert mean(value < 0 for value in trusted) == pytest.approx(webgpt.CHECKED, abs=0.04)  # 5 standard errors
    right = WEBGPT.right(one)
    assert score([*right, webgpt.SURE[0], right[0]]) == (whole + 3) / whole  # what gold takes off is liked
    rows = PAIRS["tiny-webgpt"]
    gaps = [
        WEBGPT.inspect(r["prompt"], r["chosen"]).score - WEBGPT.inspect(r["prompt"], r["rejected"]).score for r in rows
    ]
    longer = [r["chosen"].count(".") - r["rejected"].count(".") for r in rows]
    assert 0.55 < mean(gap > 0 for gap in gaps if gap) < 0.7 < mean(gap > 0 for gap in longer if gap) < 0.95


# Words and lengths


@both
def test_every_word_is_reached_and_answers_fit(task):
    text = " ".join(row["prompt"] + row["chosen"] + row["rejected"] for row in PAIRS[task.name])
    assert all(word in text for word in task.words)
    options = EMBEDDED_DEFAULTS[task.name]
    tokenizer, (rng, prompts) = load_tokenizer(options["model"]), made(task, 200)
    best = encode_responses(tokenizer, [task.answer(rng, one, task.perfect) for one in prompts], 10_000)
    least, most = task.tokens
    assert least <= mean(map(len, best)) <= most and max(map(len, best)) < options["max_response_length"]
    texts = [row["prompt"] + row["chosen"] for row in PAIRS[task.name][:50]]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True) == texts
    assert max(map(len, encode_prompts(tokenizer, [one.prompt for one in prompts]))) <= 128
