"""People as judges, in a terminal and in a notebook, and the command that runs any judge."""

import io
import json
import os
import pty
import re
import termios
import threading
import time

import pytest

from marlhf_lite.config.options import DataConfig, EndpointConfig, InputConfig, JudgeConfig, ModelConfig
from marlhf_lite.evaluation.judges import CRITERIA, HumanJudge, Pair, combine, judge_pairs, read_verdicts, summary
from marlhf_lite.evaluation.judges.command import find_answers, run_judge
from marlhf_lite.evaluation.judges.human import printable, read_key
from marlhf_lite.plotting.judging import JudgingWidget, judge_by_hand
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.run_folder import RunFolder

PAIRS = [Pair(str(i), f"post {i}", f"first {i}", f"second {i}", ("MA-PPO", "PPO")) for i in range(30)]


def sit(keys, tmp_path, name="anna", pairs=PAIRS, **options):
    """A sitting in a terminal: verdicts and what was shown."""
    out = io.StringIO()
    judge = HumanJudge(name, CRITERIA["tldr"], io.StringIO(keys), out)
    return judge_pairs(judge, pairs, tmp_path, **options), out.getvalue()


def shown_first(text):
    """Pair id to the response that stood as number 1."""
    found = re.findall(r"post (\d+)\n\nsummary 1\n-+\n(\w+) \d+\n\nsummary 2\n-+\n(\w+) ", text)
    assert all({one, other} == {"first", "second"} for _, one, other in found)
    return {name: one for name, one, _ in found}


# Terminal


def test_keys_become_verdicts_on_methods(tmp_path):
    verdicts, text = sit("1\n2\nt\ns\nx\n\n1\nq\n", tmp_path)
    first = shown_first(text)
    other = {"first": "second", "second": "first"}
    assert [v.winner for v in verdicts] == [first["0"], other[first["1"]], "tie", "skipped", first["4"]]
    assert [v.shown for v in verdicts] == [first[v.pair] for v in verdicts]
    assert {v.judge for v in verdicts} == {"human-anna"} and all(v.seconds >= 0 for v in verdicts)
    counts = summary(verdicts)
    assert counts["win"] + counts["lose"] == 3 and (counts["tie"], counts["skipped"]) == (1, 1)


def test_it_is_blind(tmp_path):
    _, text = sit("1\n" * 30, tmp_path)
    assert "PPO" not in text and all(aspect in text for aspect in CRITERIA["tldr"].aspects)
    assert set(shown_first(text).values()) == {"first", "second"}


def test_a_sitting_goes_on_where_the_last_one_stopped(tmp_path):
    before, _ = sit("1\n2\nq\n", tmp_path)
    after, text = sit("t\n" * 40, tmp_path)
    assert len(before) == 2 and after[:2] == before and len(after) == 30
    assert "post 0" not in text and "post 1\n" not in text and "(1 of 28)" in text
    assert sit("", tmp_path) == (after, "")  # nothing left: nothing is shown or read
    assert read_verdicts(tmp_path / "human-anna.jsonl") == after


def test_every_annotator_has_an_order_and_a_file(tmp_path):
    orders = {}
    for name in ("anna", "ben"):
        orders[name] = shown_first(sit("1\n" * 30, tmp_path, name)[1])
    assert orders["anna"] != orders["ben"]
    assert {path.name for path in tmp_path.iterdir()} == {"human-anna.jsonl", "human-ben.jsonl"}
    assert shown_first(sit("1\n" * 30, tmp_path / "again", "anna")[1]) == orders["anna"]
    assert shown_first(sit("1\n" * 30, tmp_path / "more", "anna", seed=1)[1]) != orders["anna"]


@pytest.mark.parametrize("name", ["../../x", "a/b", "...", "Zoë 1"])
def test_no_name_leaves_the_folder(tmp_path, name):
    sit("1\nq\n", tmp_path / "in", name)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    assert path.parent == tmp_path / "in" and path.suffix == ".jsonl"
    assert read_verdicts(path)[0].judge == f"human-{name}"


def test_a_name_there_must_be():
    with pytest.raises(InputError, match="--annotator"):
        HumanJudge("  ", CRITERIA["tldr"])


def test_a_response_cannot_drive_the_terminal(tmp_path):
    evil = "\x1b[2J\x1b]0;title\x07 red \u202e\r over \x9b31m"
    _, text = sit("1\n", tmp_path, pairs=[Pair("1", "p", evil, "fair")])
    assert not set(text) & set("\x1b\x07\u202e\r\x9b") and " red " in text
    assert printable("a\n\tb é 中 \u00df") == "a\n\tb é 中 \u00df"


def test_single_keys_of_a_terminal():
    ours, theirs = pty.openpty()

    def press(key):
        while termios.tcgetattr(theirs)[3] & termios.ICANON:  # until a single key is waited for
            time.sleep(0.01)
        os.write(ours, key)  # no line break

    with open(theirs, closefd=False) as stream:
        seen = []
        for key in (b"2", b"T", b"\x1b[1~", b"1", b"\x04"):  # the third is Home
            finger = threading.Thread(target=press, args=(key,), daemon=True)
            finger.start()
            seen.append(read_key(stream))
            finger.join(10)
            assert termios.tcgetattr(theirs)[3] & termios.ICANON  # as it was
    os.close(ours)
    os.close(theirs)
    assert seen == ["2", "t", "\x1b", "1", ""]


# Notebook


def test_buttons_and_keys_do_the_same_as_a_terminal(tmp_path):
    widget = JudgingWidget(PAIRS, tmp_path / "widget", "anna")
    for key in ("1", "2"):
        widget.buttons[key].click()
    for typed in ("t", "S", "x", " 1"):
        widget.keys.value = typed
        assert widget.keys.value == ""
    verdicts, _ = sit("1\n2\nt\ns\n1\nq\n", tmp_path / "terminal")
    assert [(v.pair, v.winner, v.shown, v.raw) for v in widget.verdicts()] == [
        (v.pair, v.winner, v.shown, v.raw) for v in verdicts
    ]


def test_widget_and_terminal_share_their_verdicts(tmp_path):
    sit("1\nq\n", tmp_path)
    widget = JudgingWidget(PAIRS, tmp_path, "anna")
    assert widget.current().pair == PAIRS[1] and "1 of 30 done" in widget.output.value
    widget.buttons["t"].click()
    assert "2 of 30 done" in widget.output.value
    verdicts, text = sit("q\n", tmp_path)
    assert len(verdicts) == 2 and "post 2" in text


def test_each_click_is_on_disk(tmp_path):
    widget = JudgingWidget(PAIRS, tmp_path, "anna")
    for count in range(1, 4):
        widget.buttons["2"].click()
        assert len(read_verdicts(tmp_path / "human-anna.jsonl")) == count


def test_the_page_is_blind_and_escapes_what_it_shows(tmp_path):
    evil = "<script>alert(1)</script> <img src=x onerror=y> & \x1b[31m"
    widget = JudgingWidget([Pair("1", evil, evil, "fair", ("MA-PPO", "PPO"))], tmp_path)
    page = widget.output.value
    assert "<script" not in page and "<img" not in page and page.count("&lt;script&gt;") == 2 and "\x1b" not in page
    assert "PPO" not in page


def test_the_end(tmp_path):
    widget = JudgingWidget(PAIRS[:1], tmp_path, "anna")
    assert not widget.buttons["1"].disabled
    widget.buttons["1"].click()
    assert widget.current() is None and "thank you" in widget.output.value and widget.buttons["1"].disabled
    widget.answer("1")
    assert len(widget.verdicts()) == 1


def test_without_a_browser_a_page_without_buttons(tmp_path):
    page = judge_by_hand(PAIRS, tmp_path, interactive=False).data
    assert "post 0" in page and judge_by_hand(PAIRS, tmp_path, interactive=True).children
    with pytest.raises(InputError, match="tldr, hh, webgpt"):
        JudgingWidget(PAIRS, tmp_path, criteria="taste")


# Command


def answers(method, texts, **more):
    return [{"prompt": f"POST {i}", "method": method, "response": text, **more} for i, text in enumerate(texts)]


@pytest.fixture
def stored(tmp_path):
    """A run with two methods' answers, and a file with a third's."""
    run = RunFolder.create(tmp_path / "run", {})
    run.log_samples([*answers("PPO", ["a"] * 6), *answers("MA-PPO", ["bb"] * 6)])
    append_lines(tmp_path / "sft.jsonl", answers("SFT", ["a", "b", "c", "d", "e", "f"]))
    return tmp_path


def run(stored, judge="rm", data=None, **options):
    places = {"judge_answers": f"{stored / 'run'},{stored / 'sft.jsonl'}", "judge_folder": str(stored / "verdicts")}
    chosen = JudgeConfig(**({"judge": judge, "judge_methods": "MA-PPO, PPO"} | places | options))
    return run_judge(chosen, EndpointConfig(), seed=3, data=data)


def test_a_person_by_command(stored, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n2\nt\ns\n1\n1\n"))
    verdicts, counts = run(stored, human=True, judge="gold", annotator="eva")
    assert len(verdicts) == 6 and counts["tie"] == 1 and counts["skipped"] == 1 and counts["seed"] == 3
    assert "human-eva: MA-PPO against PPO, 6 pairs" in capsys.readouterr().out
    kept = json.loads((stored / "verdicts" / "human-eva-MA-PPO-against-PPO.json").read_text())
    assert kept == json.loads(json.dumps(counts))
    wins, judged = counts["win"] + counts["tie"] / 2, counts["judged"]
    assert counts["win_rate"]["low"] < counts["win_rate"]["mean"] == wins / judged < counts["win_rate"]["high"]
    assert read_verdicts(stored / "verdicts" / "human-eva.jsonl") == verdicts


def test_a_person_who_stops_at_once_changes_nothing_and_one_who_stops_later_sees_how_much_is_left(
    stored, monkeypatch, capsys
):
    kept = stored / "verdicts" / "human-eva-MA-PPO-against-PPO.json"
    for keys, done, there in (("q\n", 0, False), ("1\n2\nq\n", 2, True)):
        monkeypatch.setattr("sys.stdin", io.StringIO(keys))
        run(stored, human=True, annotator="eva")
        assert f"human-eva: {done} of 6 pairs so far" in capsys.readouterr().out and kept.exists() == there
    before = kept.read_bytes()
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    run(stored, human=True, annotator="eva", judge_criteria="hh")  # other questions, of which none is answered
    assert kept.read_bytes() == before


def test_gold_by_command(stored, capsys):
    _, counts = run(stored, judge="gold", judge_methods="PPO,SFT", judge_size=4)
    assert counts["pairs"] == 4 and counts["judge"] == "gold" and counts["methods"] == ["PPO", "SFT"]
    assert "4 pairs" in capsys.readouterr().out


def test_models_by_command(stored, tiny, rm, capsys):
    options = JudgeConfig(
        judge_methods="MA-PPO,PPO",
        judge_answers=str(stored / "run"),
        judge_folder=str(stored / "v"),
        judge_order="both",
    )
    tiny = ModelConfig(model=tiny.model)
    for judge, name in (("rm", "rm"), ("local", "local-gemma")):
        options.judge = judge
        verdicts, counts = run_judge(
            options, EndpointConfig(), model=tiny, data=DataConfig(), inputs=InputConfig(rm=str(rm))
        )
        assert counts["judge"] == name and counts["pairs"] == 6 == len(combine(verdicts))


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
        ({"judge": "gold", "data": DataConfig(dataset="mine.jsonl")}, "mine.jsonl has no known truth"),
        ({"judge": "local", "judge_folder": __file__}, f"--judge_folder {__file__} cannot be made"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_judged(stored, options, words):
    with pytest.raises(InputError) as caught:
        run(stored, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value) and not (stored / "verdicts").exists()


def test_a_run_given_twice_or_one_without_answers(stored):
    with pytest.raises(InputError, match="twice"):
        run(stored, judge_answers=f"{stored / 'run'},{stored / 'run'}")
    RunFolder.create(stored / "empty", {})
    with pytest.raises(InputError, match="no answers"):
        find_answers(str(stored / "empty"))
