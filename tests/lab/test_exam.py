"""The exam that a seed draws: its answers against plain arithmetic, and its pages."""

import random
import re

import pytest

from marlhf_lab import exam

SEEDS = range(40)


def numbers_in(text: str) -> list[float]:
    return [float(x.replace("−", "-")) for x in re.findall(r"[−-]?\d+(?:\.\d+)?", text)]


def gae_by_hand(values: list[float], score: float, lam: float) -> list[float]:
    """Advantages of steps with these values; the score comes at the last one."""
    advantages = []
    following = 0.0
    next_value = 0.0
    for step in reversed(range(len(values))):
        reward = score if step == len(values) - 1 else 0.0
        delta = reward + next_value - values[step]
        following = delta + lam * following
        next_value = values[step]
        advantages.insert(0, following)
    return advantages


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_are_those_of_plain_loops(seed):
    question = exam.ask_advantages_of_tokens(random.Random(seed))
    *values, score, lam = numbers_in(question.text.replace("four", ""))
    assert numbers_in(question.answer)[:4] == pytest.approx(
        gae_by_hand(values, score, lam), abs=6e-4
    )

    question = exam.ask_advantages_of_macro_actions(random.Random(seed))
    *values, score, lam = numbers_in(question.text)
    averaged = [(values[0] + values[1]) / 2, (values[2] + values[3]) / 2]
    by_action = gae_by_hand(averaged, score, lam)
    by_token = [by_action[0], by_action[0], by_action[1], by_action[1]]
    assert numbers_in(question.answer)[:6] == pytest.approx(by_action + by_token, abs=6e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_words_that_become_more_probable_do_so_after_a_small_step(seed):
    question = exam.ask_gradient_of_logits(random.Random(seed))
    probabilities = numbers_in(question.text)[:3]
    advantage = float(
        re.search(r"advantage is ([−\d.]+)\.", question.text)[1].replace("−", "-").rstrip(".")
    )
    names = ("first", "second", "third")
    sampled = names.index(re.search(r"The (\w+) is sampled", question.text)[1])
    gradient = [advantage * ((i == sampled) - p) for i, p in enumerate(probabilities)]
    assert numbers_in(question.answer)[:3] == pytest.approx(gradient, abs=6e-4)
    # Take the step, and compare the probabilities.
    raised = [p * 2.718281828 ** (1e-3 * g) for p, g in zip(probabilities, gradient, strict=True)]
    after = [p / sum(raised) for p in raised]
    rising = [name for name, p, q in zip(names, probabilities, after, strict=True) if q > p + 1e-9]
    assert f"the {' and the '.join(rising)} word" in question.answer


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_share_kl_and_kappa_are_those_of_plain_arithmetic(seed):
    question = exam.ask_clip(random.Random(seed))
    _, ratio, size, _ = numbers_in(question.text.replace("gradient 0", ""))
    for advantage, found in zip((size, -size), numbers_in(question.answer)[1:4:2], strict=True):
        assert found == pytest.approx(
            min(ratio * advantage, max(0.8, min(ratio, 1.2)) * advantage), abs=6e-4
        )

    question = exam.ask_share_that_arrives(random.Random(seed))
    lam, tokens, n = numbers_in(question.text)[:3]
    found = numbers_in(question.answer)
    assert found[2] == pytest.approx(lam ** (tokens - 1), abs=6e-4)
    assert found[6] == pytest.approx(lam ** ((tokens - 1) / n), abs=6e-4)

    question = exam.ask_kl_of_a_macro_action(random.Random(seed))
    *ratios, beta = numbers_in(question.text)
    found = numbers_in(question.answer)
    assert found[:2] == pytest.approx(
        [-beta * sum(ratios), -beta * sum(ratios) / len(ratios)], abs=6e-6
    )

    question = exam.ask_value_loss(random.Random(seed))
    old, now, target, _ = numbers_in(question.text)
    kept = min(max(now, old - 0.2), old + 0.2)
    loss = max((now - target) ** 2, (kept - target) ** 2) / 2
    assert numbers_in(question.answer)[2] == pytest.approx(loss, abs=6e-5)

    question = exam.ask_kappa(random.Random(seed))
    person, _, judge, agree = numbers_in(question.text)
    chance = (person * judge + (100 - person) * (100 - judge)) / 1e4
    assert numbers_in(question.answer)[-3] == pytest.approx(
        (agree / 100 - chance) / (1 - chance), abs=6e-3
    )


def test_a_seed_fixes_both_pages_and_the_points_add_up(tmp_path, monkeypatch, capsys):
    questions = exam.draw_questions(7)
    assert sum(question.points for question in questions) == 50 and len(questions) == 10
    assert exam.exam_page(7, questions) == exam.exam_page(7, exam.draw_questions(7))
    assert exam.exam_page(7, questions) != exam.exam_page(8, exam.draw_questions(8))
    monkeypatch.setattr("sys.argv", ["exam", "--seed", "7", "--output_dir", str(tmp_path)])
    exam.main()
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert written.keys() == {"exam_7.md", "answers_7.md"}
    assert (
        "*Points:*" not in written["exam_7.md"] and written["answers_7.md"].count("*Points:*") == 10
    )
    assert capsys.readouterr().out.count(str(tmp_path)) == 2
