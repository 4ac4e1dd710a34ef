"""The umbrella task: its texts, its gold score and its parts."""

import re
from statistics import mean, pstdev

import pytest
from conftest import fails

from marlhf_lab.credit.signal_kept import decisive_token
from marlhf_lite.cli import main
from marlhf_lite.tasks.tiny_umbrella.gold import DECISIONS, PLACES, RIGHT, decision, gold_scores
from marlhf_lite.tasks.tiny_umbrella.stories import LENGTHS, load_tiny_umbrella, parse_part
from marlhf_lite.utils.run_folder import RunFolder

PARTS = [
    f"L{length}-{place}{noise}"
    for length in LENGTHS
    for place in PLACES
    for noise in ("", "-noise")
]
RAIN = "Forecast for Mia on Monday: rain. Write 1 line, umbrella first:"
LINE = " At one Tom sells the old chair."


def words(text):
    """Words and full stops."""
    return re.findall(r"\w+|\.", text)


@pytest.mark.parametrize("part", PARTS)
def test_length_and_place_are_those_of_the_part(part):
    length, place, kappa = parse_part(part)
    task = load_tiny_umbrella(60, 0, part)
    for rows in task.splits.values():
        for row in rows:
            for text in (row["chosen"], row["rejected"]):
                tokens = words(text)
                where = [i for i, word in enumerate(tokens) if word in ("Take", "Leave")]
                assert len(tokens) == length + 4 and len(where) == 1
                # with EOS
                assert place == "random" or (*where, len(tokens) + 1) == decisive_token(part)
                assert decision(text, place) == decision(text, "random") in DECISIONS
    assert kappa == float("noise" in part) and (decisive_token(part) is None) == (place == "random")


def right_share(responses, place):
    return mean(decision(response, place) == RIGHT for response in responses)


@pytest.mark.parametrize("part", ["", "L8-last", "L128-random"])
def test_sft_rows_decide_at_chance_and_preferences_are_right(part):
    task, place = load_tiny_umbrella(400, 3, part), parse_part(part)[1]
    again, other = (load_tiny_umbrella(400, seed, part).splits["rm"].to_list() for seed in (3, 4))
    assert task.splits["rm"].to_list() == again != other
    shares = {name: right_share(rows["chosen"], place) for name, rows in task.splits.items()}
    assert shares == {"sft": 0.5, "rm": 1.0, "ppo": 1.0, "test": 1.0}
    for rows in task.splits.values():
        assert right_share(rows["chosen"], place) + right_share(rows["rejected"], place) == 1.0


@pytest.mark.parametrize(
    "response, place, score",
    [
        (" Take the umbrella." + LINE, "first", 1),
        (" Leave the umbrella." + LINE, "first", -1),
        (LINE + " Take the umbrella.", "first", -1),
        (LINE + " Take the umbrella.", "last", 1),
        (" Take the umbrella." + LINE, "last", -1),
        (" Take the umbrella." + LINE, "random", 1),
        (" Take the umbrella. Leave the umbrella.", "random", -1),
        (" Take the umbrella" + LINE, "first", -1),
        ("", "random", -1),
    ],
)
def test_gold(response, place, score):
    assert gold_scores([RAIN], [response], place) == [score]


@pytest.mark.parametrize("length", LENGTHS)
def test_noise_has_mean_0_and_deviation_1_and_is_a_function_of_the_text(length):
    task = load_tiny_umbrella(600, 0, f"L{length}-first-noise")
    rows = [row for rows in task.splits.values() for row in rows]
    prompts, responses = [row["prompt"] for row in rows], [row["rejected"] for row in rows]
    scores, plain = task.gold(prompts, responses), gold_scores(prompts, responses, "first")
    noise = [a - b for a, b in zip(scores, plain, strict=True)]
    assert abs(mean(noise)) < 4 / len(rows) ** 0.5 and pstdev(noise) == pytest.approx(1, abs=0.15)
    assert scores == task.gold(prompts, responses)


@pytest.mark.parametrize(
    "part", ["L9-first", "L8", "first", "L8-middle", "L8-first-noisy", "l8-first"]
)
def test_faulty_parts(part):
    fails(lambda: load_tiny_umbrella(None, 0, part), f"--part {part}")


def test_stored_answers_are_scored_again_by_the_gold_score_of_another_part(tmp_path):
    """A part with noise has the prompts of the one without."""
    sizes = "--dataset tiny-umbrella --size 40 --max_response_length 8 --output_dir"
    assert main([*f"sft --sft_epochs 0 {sizes}".split(), str(tmp_path / "sft")]) == 0
    for part in ("L32-first-noise", "", "L32-first-noise"):  # the default is L32-first
        words = f"evaluate --sft {tmp_path / 'sft'} --eval_prompts 4 --part={part} {sizes}"
        assert main([*words.split(), str(tmp_path / "answers")]) == 0
        rows, (_, place, kappa) = RunFolder.open(tmp_path / "answers").samples(), parse_part(part)
        prompts, texts = ([row[name] for row in rows] for name in ("prompt", "response"))
        assert [row["gold"] for row in rows] == pytest.approx(
            gold_scores(prompts, texts, place, kappa)
        )
