"""People as judges, in a terminal and in a notebook, and the command that runs any judge."""

import io
import json
import re
from types import SimpleNamespace

import pytest

from marlhf_lite.cli import main
from marlhf_lite.config.options import EndpointConfig, JudgeConfig, LengthConfig, ModelConfig, RMInputConfig, SeedConfig
from marlhf_lite.evaluation.judge_prompts import CRITERIA
from marlhf_lite.evaluation.judges import HumanJudge, find_answers, printable, run_judge, wrap
from marlhf_lite.evaluation.judgments import Comparison, combine, judge_pairs, read_judgments, summary
from marlhf_lite.evaluation.responses import fingerprint
from marlhf_lite.lab.figures.judging import judge_by_hand
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.run_folder import RunFolder

PAIRS = [Comparison(str(i), f"post {i}", f"first {i}", f"second {i}", ("MA-PPO", "PPO")) for i in range(30)]


def sit(keys, tmp_path, name="anna", pairs=PAIRS, **options):
    """A sitting in a terminal: judgments and what was shown."""
    lines, given = [], iter(keys.split())

    def ask(question):
        key = next(given, None)
        if key is None:
            raise EOFError
        return key

    judge = HumanJudge(name, CRITERIA["tldr"], ask, lines.append)
    return judge_pairs(judge, pairs, tmp_path, **options), "\n".join(lines)


def shown_first(text):
    """Pair id to the response that stood as number 1."""
    found = re.findall(r"post (\d+)\n\nsummary 1\n-+\n(\w+) \d+\n\nsummary 2\n-+\n(\w+) ", text)
    assert all({one, other} == {"first", "second"} for _, one, other in found)
    return {name: one for name, one, _ in found}


# Terminal


def test_keys_become_judgments_on_methods(tmp_path):
    judgments, text = sit("1 2 T s x 1 q", tmp_path)
    first = shown_first(text)
    other = {"first": "second", "second": "first"}
    assert [row["winner"] for row in judgments] == [first["0"], other[first["1"]], "tie", "skipped", first["4"]]
    assert [row["shown"] for row in judgments] == [first[row["pair"]] for row in judgments]
    assert {row["judge"] for row in judgments} == {"human-anna"}
    counts = summary(judgments)
    assert counts["win"] + counts["lose"] == 3 and (counts["tie"], counts["skipped"]) == (1, 1)


def test_it_is_blind(tmp_path):
    _, text = sit("1 " * 30, tmp_path)
    assert "PPO" not in text and all(aspect in text for aspect in CRITERIA["tldr"].aspects)
    assert set(shown_first(text).values()) == {"first", "second"}


def test_a_sitting_goes_on_where_the_last_one_stopped(tmp_path):
    before, _ = sit("1 2", tmp_path)  # the end of the input stops as q does
    after, text = sit("t " * 40, tmp_path)
    assert len(before) == 2 and after[:2] == before and len(after) == 30
    assert "post 0" not in text and "post 1\n" not in text and "28 pairs" in text
    assert sit("", tmp_path) == (after, "")  # nothing left: nothing is shown or read
    assert read_judgments(tmp_path / "human-anna.jsonl") == after


def test_every_annotator_has_an_order_and_a_file(tmp_path):
    orders = {name: shown_first(sit("1 " * 30, tmp_path, name)[1]) for name in ("anna", "ben")}
    assert orders["anna"] != orders["ben"]
    assert {path.name for path in tmp_path.iterdir()} == {"human-anna.jsonl", "human-ben.jsonl"}
    assert shown_first(sit("1 " * 30, tmp_path / "again", "anna")[1]) == orders["anna"]
    assert shown_first(sit("1 " * 30, tmp_path / "more", "anna", seed=1)[1]) != orders["anna"]


@pytest.mark.parametrize("name", ["../../x", "a/b", "...", "Zoë 1"])
def test_no_name_leaves_the_folder(tmp_path, name):
    sit("1 q", tmp_path / "in", name)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    assert path.parent == tmp_path / "in" and path.suffix == ".jsonl"
    assert read_judgments(path)[0]["judge"] == f"human-{name}"


def test_a_response_cannot_drive_the_terminal(tmp_path):
    evil = "\x1b[2J\x1b]0;title\x07 red \u202e\r over \x9b31m"
    _, text = sit("1", tmp_path, pairs=[Comparison("1", "p", evil, "fair")])
    assert not set(text) & set("\x1b\x07\u202e\r\x9b") and " red " in text
    assert printable("a\n\tb é 中 \u00df") == "a\n\tb é 中 \u00df"


def test_texts_are_wrapped_at_words_to_the_width_of_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    response = "These words are to be read by people in narrow terminals. " * 3
    _, text = sit("1", tmp_path, pairs=[Comparison("1", "a line\n\nanother", response, "fair")])
    assert max(map(len, text.splitlines())) <= 40 and "a line\n\nanother" in text
    words = {word for line in text.splitlines() for word in line.split()}
    assert set(response.split()) <= words  # none was cut
    assert wrap("x" * 50) == "x" * 40 + "\n" + "x" * 10


# Notebook


def click(box, *keys):
    for key in keys:
        box.children[1].children["12ts".index(key)].click()


def test_buttons_do_the_same_as_a_terminal_and_share_its_judgments(tmp_path):
    box = judge_by_hand(PAIRS, tmp_path / "widget", "anna")
    for count, key in enumerate("12ts1", 1):
        click(box, key)  # each click is on disk
        assert len(read_judgments(tmp_path / "widget" / "human-anna.jsonl")) == count
    assert f"<p>{count} of 30" in box.children[0].value
    judgments, _ = sit("1 2 t s 1 q", tmp_path / "terminal")
    assert read_judgments(tmp_path / "widget" / "human-anna.jsonl") == judgments
    assert "5 of 30" in judge_by_hand(PAIRS, tmp_path / "terminal", "anna").children[0].value
    both, text = sit("1 q", tmp_path / "widget")
    assert both[:5] == judgments and "post 5" in text


def test_the_page_is_blind_and_escapes_what_it_shows(tmp_path):
    evil = "<script>alert(1)</script> <img src=x onerror=y> & \x1b[31m"
    box = judge_by_hand([Comparison("1", evil, evil, "fair", ("MA-PPO", "PPO"))], tmp_path)
    page = box.children[0].value
    assert "<script" not in page and "<img" not in page and page.count("&lt;script&gt;") == 2 and "\x1b" not in page
    assert "PPO" not in page


def test_the_end(tmp_path):
    box = judge_by_hand(PAIRS[:1], tmp_path, "anna")
    assert not box.children[1].children[0].disabled
    click(box, "1")
    assert "Stored in" in box.children[0].value and box.children[1].children[0].disabled
    with pytest.raises(InputError, match="tldr, hh, webgpt"):
        judge_by_hand(PAIRS, tmp_path, criteria="taste")


# Command


def answers(method, texts, **more):
    return [{"prompt": f"POST {i}", "method": method, "response": text, **more} for i, text in enumerate(texts)]


@pytest.fixture
def stored(tmp_path):
    """A run with two methods' answers, and a file with a third's."""
    folder = RunFolder.create(tmp_path / "run", {})
    folder.log_samples([*answers("PPO", ["a"] * 6), *answers("MA-PPO", ["bb"] * 6)])
    append_lines(tmp_path / "sft.jsonl", answers("SFT", ["a", "b", "c", "d", "e", "f"], gold=1.0))
    return tmp_path


def run(stored, judge="rm", rm="", model="no/such-model", **options):
    places = {"judge_answers": f"{stored / 'run'},{stored / 'sft.jsonl'}", "output_dir": str(stored / "kept")}
    return run_judge(
        SimpleNamespace(
            judge=JudgeConfig(**({"judge": judge, "judge_methods": "MA-PPO, PPO"} | places | options)),
            endpoint=EndpointConfig(),
            rm_input=RMInputConfig(rm=str(rm)),
            model=ModelConfig(model=model),
            length=LengthConfig(),
            seed=SeedConfig(seed=3),
        )
    )


def test_a_person_by_command(stored, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n2\nt\ns\n1\n1\n"))
    judgments, counts = run(stored, judge="human")
    assert len(judgments) == 6 and counts["tie"] == 1 and counts["skipped"] == 1 and counts["seed"] == 3
    assert "human-annotator-1: MA-PPO against PPO, 6 pairs" in capsys.readouterr().out
    kept = json.loads((stored / "kept" / "human-annotator-1-MA-PPO-against-PPO.json").read_text())
    assert kept == json.loads(json.dumps(counts))
    wins, judged = counts["win"] + counts["tie"] / 2, counts["judged"]
    assert counts["win_rate"]["low"] < counts["win_rate"]["mean"] == wins / judged < counts["win_rate"]["high"]
    assert read_judgments(stored / "kept" / "human-annotator-1.jsonl") == judgments


def test_a_person_who_stops_at_once_changes_nothing_and_one_who_stops_later_sees_how_much_is_left(
    stored, monkeypatch, capsys
):
    kept = stored / "kept" / "human-annotator-1-MA-PPO-against-PPO.json"
    for keys, done, there in (("q\n", 0, False), ("1\n2\nq\n", 2, True)):
        monkeypatch.setattr("sys.stdin", io.StringIO(keys))
        run(stored, judge="human")
        assert f"{done} of 6 pairs so far" in capsys.readouterr().out and kept.exists() == there
    before = kept.read_bytes()
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    run(stored, judge="human", judge_criteria="hh")  # other questions, of which none is answered
    assert kept.read_bytes() == before


@pytest.mark.parametrize("judge", ["gold", "auto"])
def test_identical_pairs_are_announced_and_counted(stored, capsys, judge):
    append_lines(stored / "gold.jsonl", answers("M", ["a", "x", "c", "y", "z", "f"], gold=2.0))
    places = f"{stored / 'sft.jsonl'},{stored / 'gold.jsonl'}"
    _, counts = run(stored, judge, judge_answers=places, judge_methods="M,SFT")
    assert (counts["judge"], counts["win"], counts["tie"], counts["identical"]) == ("gold", 3, 3, 3)
    assert "3 of 6 pairs are the same text" in capsys.readouterr().out
    _, counts = run(stored, judge, judge_answers=places, judge_methods="SFT,M", size=4)
    assert counts["pairs"] == 4 and counts["win"] == 0 and counts["methods"] == ["SFT", "M"]


def test_answers_without_gold_scores_have_no_gold_judge_and_the_reward_model_by_default(stored, capsys):
    command = ["judge", "--judge_answers", str(stored / "run"), "--judge_methods", "MA-PPO,PPO"]
    command += ["--output_dir", str(stored / "kept")]
    for judge, words in ((["--judge", "gold"], "no gold score"), ([], "--rm: not given")):
        assert main([*command, *judge]) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1 and not (stored / "kept").exists()


def test_scores_of_the_same_reward_model_are_not_made_again(stored, rm, tiny, monkeypatch):
    scored = [
        row | {"rm_score": score, "rm": fingerprint(rm)}
        for method, score in (("M", 1.0), ("P", 2.0))
        for row in answers(method, [f"{method} {i}" for i in range(4)])
    ]
    append_lines(stored / "scored.jsonl", scored)
    places = {"judge_answers": str(stored / "scored.jsonl"), "judge_methods": "M,P"}
    for judge, folder in (("auto", ""), ("rm", rm)):  # the model does not exist, so it is not loaded
        _, counts = run(stored, judge, folder, **places)
        assert (counts["judge"], counts["lose"]) == ("rm", 4)
    append_lines(stored / "other.jsonl", [row | {"rm": "another"} for row in scored])
    places["judge_answers"] = str(stored / "other.jsonl")
    judgments, _ = run(stored, "rm", rm, tiny.model, **places)
    assert all(row["scores"]["first"]["score"] != 1.0 for row in judgments)


@pytest.mark.parametrize("judge, name", [("rm", "rm"), ("local", "local-gemma")])
def test_models_by_command(stored, tiny, rm, judge, name):
    judgments, counts = run(stored, judge, rm, tiny.model, judge_order="both")
    assert counts["judge"] == name and counts["pairs"] == 6 == len(combine(judgments))


def test_methods_are_taken_at_the_training_temperature_or_the_one_asked_for(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"temperature": 0.8})
    for name, better in (("SFT", 0.0), ("MA-PPO", 1.0)):
        for temperature in (0.4, 0.8):
            texts, about = [f"{name} {temperature} {i}" for i in range(3)], {"temperature": temperature}
            folder.log_samples(answers(f"{name} T={temperature}", texts, gold=better * (temperature - 0.6), **about))
    places = {"judge_answers": str(tmp_path / "run")}
    _, counts = run(tmp_path, "gold", judge_methods="MA-PPO,SFT", **places)
    assert counts["methods"] == ["MA-PPO T=0.8", "SFT T=0.8"] and counts["win"] == 3
    _, counts = run(tmp_path, "gold", judge_methods="MA-PPO T=0.4, SFT", **places)
    assert counts["methods"] == ["MA-PPO T=0.4", "SFT T=0.8"] and counts["lose"] == 3
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(InputError, match=re.escape("no method 'MA-PPO'; there are: SFT T=0.4, SFT T=0.8, MA-PPO T")):
        run(tmp_path, "gold", judge_methods="MA-PPO,SFT", **places)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"judge_methods": "PPO"}, "--judge_methods"),
        ({"judge_methods": "PPO,XPO"}, "no method 'XPO'; there are: PPO, MA-PPO, SFT"),
        ({"judge_answers": ""}, "--judge_answers: not given"),
        ({"judge_answers": "/no/such.jsonl"}, "/no/such.jsonl"),
        ({"judge_answers": "/no/such"}, "/no/such: no such"),
        ({"judge": "endpoint"}, "--judge_model"),
        ({"judge": "rm"}, "--rm: not given"),
        ({"judge": "local", "output_dir": __file__}, f"--output_dir {__file__} cannot be made"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_judged(stored, options, words):
    with pytest.raises(InputError) as caught:
        run(stored, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value) and not (stored / "kept").exists()


def test_a_run_given_twice_or_one_without_answers(stored):
    with pytest.raises(InputError, match="twice"):
        run(stored, judge_answers=f"{stored / 'run'},{stored / 'run'}")
    RunFolder.create(stored / "empty", {})
    with pytest.raises(InputError, match="no answers"):
        find_answers(str(stored / "empty"))
