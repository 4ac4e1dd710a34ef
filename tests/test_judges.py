"""Scores and people as judges, and the command `marlhf judge` with a model at an endpoint."""

import errno
import itertools
import json
import re
import shutil

import pytest
from conftest import fails
from test_judges_endpoint import Endpoint, verdict

from marlhf_lab.figures.judging import judge_by_hand
from marlhf_lite.cli import main
from marlhf_lite.extras.judges import judgments
from marlhf_lite.extras.judges.judges import EndpointJudge, ScoreJudge
from marlhf_lite.extras.judges.judgments import Comparison, judge_pairs, read_judgments, summary
from marlhf_lite.extras.judges.prompts import CRITERIA
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.run_folder import RunFolder, RunLock

PAIRS = [
    Comparison(str(i), f"post {i}", f"first {i}", f"second {i}", ("MA-PPO", "PPO"))
    for i in range(30)
]

# Scores


def test_the_higher_score_wins_whatever_the_order(tmp_path):
    pairs = [Comparison(str(i), "p", "a" * (i % 4), "b" * (i % 3 + 1)) for i in range(12)]
    judge = ScoreJudge(lambda prompts, responses: list(map(len, responses)))
    judgments = judge_pairs(judge, pairs, tmp_path, "both")
    for row, pair in zip(judgments, (pair for pair in pairs for _ in range(2)), strict=True):
        gap = len(pair.first) - len(pair.second)
        assert row["winner"] == ("tie" if gap == 0 else "first" if gap > 0 else "second")
        assert row["scores"] == {
            "first": {"score": len(pair.first)},
            "second": {"score": len(pair.second)},
        }


@pytest.mark.parametrize("scores", [[1.0], [1.0, float("nan")], [1.0, "x"]])
def test_scores_that_cannot_be_compared(tmp_path, scores):
    judge = ScoreJudge(lambda prompts, responses: scores, "mine")
    fails(lambda: judge_pairs(judge, PAIRS[:1], tmp_path), "judge mine")


# A person, in a notebook


def sit(keys, folder, name="anna"):
    """A sitting of a person who clicks: the page, its buttons, and the judgments that are stored."""
    page, row = judge_by_hand(PAIRS, folder, name).children
    shown = []
    for key in keys:
        shown.append(page.value)
        row.children["12ts".index(key)].click()
    path = folder / f"human-{name}.jsonl"
    return (
        read_judgments(path) if path.exists() else [],
        "\n".join([*shown, page.value]),
        row.children,
    )


def shown_first(text):
    """Pair id to the response that stood as number 1."""
    found = re.findall(r"post (\d+)<.*?>(first|second) \d+<.*?>(first|second) ", text)
    assert all({one, other} == {"first", "second"} for _, one, other in found)
    return {name: one for name, one, _ in found}


def test_clicks_become_judgments_on_methods_whose_names_are_not_shown(tmp_path):
    judgments, text, buttons = sit("12ts1", tmp_path)
    first = shown_first(text)
    other = {"first": "second", "second": "first"}
    assert [row["winner"] for row in judgments] == [
        first["0"],
        other[first["1"]],
        "tie",
        first["4"],
    ]
    assert [row["shown"] for row in judgments] == [first[row["pair"]] for row in judgments]
    assert "PPO" not in text and all(aspect in text for aspect in CRITERIA["tldr"].aspects)
    assert "5 of 30" in text and not buttons[0].disabled


def test_a_sitting_goes_on_where_the_last_one_stopped(tmp_path):
    before, *_ = sit("12", tmp_path)
    after, text, buttons = sit("t" * 28, tmp_path)
    assert len(before) == 2 and after[:2] == before and len(after) == 30 and buttons[0].disabled
    assert "post 0" not in text and "post 1<" not in text and "2 of 30" in text
    assert sit("", tmp_path)[0] == after


def test_every_annotator_has_an_order_and_a_file(tmp_path):
    orders = {name: shown_first(sit("1" * 30, tmp_path, name)[1]) for name in ("anna", "ben")}
    assert orders["anna"] != orders["ben"] and set(orders["anna"].values()) == {"first", "second"}
    assert {path.name for path in tmp_path.iterdir()} == {"human-anna.jsonl", "human-ben.jsonl"}
    assert shown_first(sit("1" * 30, tmp_path / "again", "anna")[1]) == orders["anna"]


def test_a_name_leads_out_of_no_folder(tmp_path):
    for name in ("../../x", "a/b", "..."):
        judge_by_hand(PAIRS, tmp_path / "in", name).children[1].children[0].click()
    assert {
        row["judge"] for path in (tmp_path / "in").iterdir() for row in read_judgments(path)
    } == {f"human-{name}" for name in ("../../x", "a/b", "...")}


def test_the_page_is_blind_and_escapes_what_it_shows(tmp_path):
    evil = "<script>alert(1)</script> <img src=x onerror=y> & \x1b[31m"
    box = judge_by_hand([Comparison("1", evil, evil, "fair", ("MA-PPO", "PPO"))], tmp_path)
    page = box.children[0].value
    assert (
        "<script" not in page
        and "<img" not in page
        and page.count("&lt;script&gt;") == 2
        and "\x1b" not in page
    )
    assert "PPO" not in page


# Command


def answers(method, texts, **more):
    return [
        {"prompt": f"POST {i}", "method": method, "response": text, **more}
        for i, text in enumerate(texts)
    ]


@pytest.fixture
def server(monkeypatch):
    """A model at an endpoint that prefers the first response."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-key")
    server = Endpoint()
    server.decide = lambda prompt, a, b: verdict("A")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(server, tmp_path, capsys):
    """Runs `marlhf judge` on a run with two methods' answers and a file with a third's: status, counts, words."""
    folder = RunFolder.create(tmp_path / "run", {"temperature": 0.8})
    folder.log("samples", [*answers("PPO", ["a"] * 6), *answers("MA-PPO", ["bb"] * 6)])
    append_lines(tmp_path / "sft.jsonl", answers("SFT", ["a", "b", "c", "d", "e", "f"], gold=1.0))
    kept = tmp_path / "kept"

    def judge(places="", methods="MA-PPO, PPO", **options):
        options = {
            "output_dir": kept,
            "seed": 3,
            "judge_url": server.url,
            "judge_model": "m",
            "workers": 1,
        } | options
        places = places or f"{tmp_path / 'run'},{tmp_path / 'sft.jsonl'}"
        command = ["judge", f"--judge_answers={places}", f"--judge_methods={methods}"]
        status = main([*command, *(f"--{name}={value}" for name, value in options.items())])
        words = capsys.readouterr()
        files = sorted(kept.glob("*-against-*.json"))
        return status, json.loads(files[0].read_text()) if files else None, words.out + words.err

    judge.folder = tmp_path
    return judge


def test_a_command_that_is_refused_goes_on_and_repeats_nothing(run, server):
    server.script = [None, None, (401, b"{}")]
    status, counts, words = run()
    assert (
        status == 2
        and counts is None
        and "HTTP 401" in words
        and "judgments so far are kept" in words
    )
    server.script, asked = [], len(server.requests)
    status, counts, _ = run()
    assert (
        status == 0
        and counts["pairs"] == 6
        and counts["seed"] == 3
        and len(server.requests) == asked + 4
    )
    wins, judged = counts["win"] + counts["tie"] / 2, counts["judged"]
    assert (
        counts["win_rate"]["low"]
        < counts["win_rate"]["mean"]
        == wins / judged
        < counts["win_rate"]["high"]
    )
    assert summary(read_judgments(run.folder / "kept" / "m.jsonl")).items() <= counts.items()


def test_a_folder_is_judged_by_one_process_at_a_time_and_a_full_disk_is_one_line(run, monkeypatch):
    def full(*unused):
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunLock() as lock:
        lock.take(run.folder / "kept")
        status, counts, words = run()
        assert status == 2 and counts is None and "another process works in it" in words
    with monkeypatch.context() as patch:
        patch.setattr(judgments, "append_lines", full)
        status, counts, words = run()
    assert (
        status == 2
        and counts is None
        and "free some disk space" in words
        and words.count("marlhf: error") == 1
    )
    assert run()[1]["judged"] == 6


def test_ctrl_c_keeps_the_judgments_so_far(run, monkeypatch):
    ask = EndpointJudge.__call__

    def interrupted(self, *texts):
        if (run.folder / "kept" / "m.jsonl").exists():
            raise KeyboardInterrupt
        return ask(self, *texts)

    with monkeypatch.context() as patch:
        patch.setattr(EndpointJudge, "__call__", interrupted)
        status, _, words = run()
    assert status == 130 and words.endswith(
        "marlhf: interrupted; what is done so far is kept: the same command continues\n"
    )
    status, counts, _ = run()
    assert status == 0 and counts["pairs"] == 6


def test_identical_pairs_are_ties_and_a_draw_repeats(run, server):
    append_lines(run.folder / "m.jsonl", answers("M", ["a", "x", "c", "y", "z", "f"]))
    places = f"{run.folder / 'sft.jsonl'},{run.folder / 'm.jsonl'}"
    _, counts, _ = run(places, "M,SFT")
    assert (counts["win"] + counts["lose"], counts["tie"]) == (3, 3)
    drawn = []
    for place, seed in (("a", 3), ("b", 3), ("c", 4)):
        run(places, "M,SFT", size=4, seed=seed, output_dir=run.folder / place)
        judged = read_judgments(run.folder / place / "m.jsonl")
        drawn.append(sorted(row["pair"] for row in judged))
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) < 5


def test_methods_are_taken_at_the_temperature_asked_for(run, server):
    folder = RunFolder.create(run.folder / "heat", {"temperature": 0.8})
    for name, t in itertools.product(("SFT", "MA-PPO"), (0.4, 0.8)):
        folder.log("samples", answers(name, [f"{name} {t} {i}" for i in range(3)], temperature=t))
    for asked, methods in (
        ("MA-PPO T=0.8,SFT T=0.8", ["MA-PPO T=0.8", "SFT T=0.8"]),
        ("MA-PPO T=0.4, SFT T=0.8", ["MA-PPO T=0.4", "SFT T=0.8"]),
    ):
        server.requests.clear()
        _, counts, _ = run(run.folder / "heat", asked)
        sent = " ".join(body["messages"][-1]["content"] for *_, body in server.requests)
        assert counts["methods"] == methods and counts["judged"] == 3
        assert all(
            f"{method.replace('T=', '')} {i}" in sent for method in methods for i in range(3)
        )
        shutil.rmtree(run.folder / "kept")


def test_what_is_missing_is_said_in_one_line_before_anything_is_judged(run, server):
    faults = [
        ({"methods": "PPO"}, "--judge_methods"),
        ({"methods": "PPO,PPO"}, "--judge_methods"),
        ({"methods": "PPO,XPO"}, "PPO, MA-PPO, SFT"),
        ({"places": ","}, "--judge_answers"),
        ({"places": "/no/such.jsonl"}, "/no/such.jsonl"),
        ({"judge_model": ""}, "--judge_model"),
        ({"output_dir": __file__}, f"--output_dir {__file__}"),
    ]
    for options, words in faults:
        status, counts, said = run(**options)
        assert status == 2 and counts is None and words in said and len(said.splitlines()) == 1, (
            words
        )
    assert not server.requests
