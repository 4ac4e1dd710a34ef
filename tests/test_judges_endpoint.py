"""The endpoint judge against a real HTTP server on loopback that speaks the chat-completions format."""

import contextlib
import functools
import json
import logging
import os
import re
import signal
import socket
import threading
import time
import zlib
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("openai")

from marlhf_lite.cli import main
from marlhf_lite.config.options import EndpointConfig
from marlhf_lite.extras import servers
from marlhf_lite.extras.judges import judges
from marlhf_lite.extras.judges.judges import EndpointJudge, report
from marlhf_lite.extras.judges.judgments import Comparison, judge_pairs, read_judgments, summary
from marlhf_lite.extras.judges.prompts import CRITERIA
from marlhf_lite.utils.errors import InputError

KEY = "sk-a-very-secret-key-0123456789"
TLDR = CRITERIA["tldr"]
PAIRS = [
    Comparison(str(i), f"post {i}", f"one {'x' * (i % 3)}", f"two {'y' * (i % 2)}")
    for i in range(9)
]


def verdict(winner, a=5, b=5, **more):
    scores = {"A": dict.fromkeys(TLDR.aspects, a), "B": dict.fromkeys(TLDR.aspects, b)}
    return json.dumps({"reason": "r", "scores": scores, "winner": winner} | more)


def longer(prompt, a, b):
    return verdict("A" if len(a) > len(b) else "B" if len(b) > len(a) else "tie", len(a), len(b))


def completion(content):
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


class Endpoint(ThreadingHTTPServer):
    """Answer by `decide(prompt, a, b)`; the first requests get the entries of `script` instead.

    An entry is None (as usual), a status, (status, body), bytes (a body), or a function to call first.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.decide, self.script, self.requests, self.lock = longer, [], [], threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        with server.lock:
            server.requests.append((self.path, self.headers, body))
            entry = server.script.pop(0) if server.script else None
        entry = entry() if callable(entry) else entry
        if entry is None:
            entry = json.dumps(completion(server.decide(*texts(body)))).encode()
        entry = (200, entry) if isinstance(entry, bytes) else entry
        status, data = entry if isinstance(entry, tuple) else (entry, b"{}")
        self.send_response(status)
        for header in (
            ("Content-Type", "application/json"),
            ("Content-Length", len(data)),
            ("retry-after-ms", 1),
        ):
            self.send_header(*map(str, header))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def texts(body):
    """The prompt and both responses, as the marks give them."""
    content = body["messages"][-1]["content"]
    return [
        m[2] for m in re.finditer(r"<([A-Z ]+ [0-9a-f]{10})>\n(.*?)\n</\1>", content, re.DOTALL)
    ]


@pytest.fixture
def endpoint(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    server = Endpoint()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def judge(endpoint):
    """A function that makes a judge of this endpoint."""

    def make(criteria=TLDR, retries=3, **options):
        options = {"judge_url": endpoint.url, "judge_model": "m-1"} | options
        return EndpointJudge(EndpointConfig(**options), criteria, retries)

    return make


def ended(judge, tmp_path, pairs=PAIRS):
    with pytest.raises(InputError) as caught:
        judge_pairs(judge, pairs, tmp_path)
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)
    return str(caught.value)


def stored(tmp_path):
    return read_judgments(tmp_path / "m-1.jsonl")


# What is sent and what comes back


def test_the_request(endpoint, judge, tmp_path, monkeypatch):
    for options, key in (({}, KEY), ({"judge_max_tokens": 0}, "k-1")):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        judge_pairs(judge(**options), PAIRS[:1], tmp_path)
        path, headers, body = endpoint.requests[-1]
        assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {key}"
        assert body["model"] == "m-1"
        assert (body.get("temperature"), body.get("max_tokens")) == (
            (None, None) if options else (0, 400)
        )
        (message,) = body["messages"]  # models without a system role take it, too
        assert message["role"] == "user" and all(
            name in message["content"] for name in TLDR.aspects
        )
        prompt, a, b = texts(body)
        assert prompt == PAIRS[0].prompt and {a, b} == {PAIRS[0].first, PAIRS[0].second}
        assert not any(name in "".join(texts(body)) for name in PAIRS[0].methods)
    monkeypatch.delenv("OPENAI_API_KEY")
    judge_pairs(judge(judge_model="m/1"), PAIRS[:1], tmp_path)
    assert endpoint.requests[-1][1]["Authorization"] == "Bearer none"


def test_wrong_answers_are_malformed_paid_for_once_counted_apart_and_shown(
    endpoint, judge, tmp_path
):
    evil = "A is\n\x1b[2J better" + " !" * 999
    wrong = iter([evil, None, verdict("A")[:-5], verdict("A", a=11)])
    endpoint.decide = lambda *_: next(wrong, verdict("tie"))
    judgments = judge_pairs(judge(workers=1), PAIRS, tmp_path)
    counts = summary(judgments)
    assert (counts["malformed"], counts["tie"], counts["win"], counts["lose"]) == (4, 5, 0, 0)
    assert counts["judged"] == 5
    assert summary(judge_pairs(judge(), PAIRS, tmp_path)) == counts and len(endpoint.requests) == 9
    text = report(counts, judgments)
    assert (
        re.search(r"^malformed: A is .\[2J better[ !]+\.\.\.$", text, re.MULTILINE)
        and "\x1b" not in text
    )


def test_a_judge_that_gives_no_verdicts_ends_the_run_before_all_pairs_are_paid_for(
    endpoint, judge, tmp_path
):
    """All wrong: five requests. Half wrong: all are asked."""
    pairs = [Comparison(str(i), f"post {i}", "one", "two") for i in range(40)]
    for count, (right, asked) in enumerate({0: 5, 3: 10, 20: 40}.items()):
        answers = iter([verdict("A"), "I like\x1b A"] * right)
        endpoint.decide = lambda *_, answers=answers: next(answers, "I like\x1b A")
        before, folder = len(endpoint.requests), tmp_path / str(count)
        if right < 20:
            message = ended(judge(workers=1), folder, pairs)
            assert "5 answers in a row" in message and "I like� A" in message and "kept" in message
        else:
            judge_pairs(judge(workers=1), pairs, folder)
        assert len(endpoint.requests) - before == asked == len(read_judgments(folder / "m-1.jsonl"))


def test_few_pairs_without_a_verdict_end_not_well_and_show_why(endpoint, tmp_path, capfd):
    answers = [
        {"prompt": f"p {i}", "method": name, "response": f"{name} {i}"}
        for i in range(3)
        for name in "xy"
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    words = ["--judge_answers", str(tmp_path / "answers.jsonl"), "--judge_methods", "x,y"]
    words += [
        "--judge_url",
        endpoint.url,
        "--judge_model",
        "m-1",
        "--output_dir",
        str(tmp_path / "judging"),
    ]
    endpoint.decide = lambda *_: "A!"
    for asked in (True, False):  # the second time nothing is asked
        assert main(["judge", *words]) == 2
        shown = capfd.readouterr()
        announced = re.search(r"^m-1: 3 requests, about \d+ tokens and at most 1200", shown.out)
        assert bool(announced) == asked
        assert "3 malformed" in shown.out and "malformed: A!" in shown.out
        assert "3 of 3 pairs have no verdict: take" in shown.err
    assert len(endpoint.requests) == 3


def refusal(message):
    return 400, json.dumps({"error": {"message": message}}).encode()


def test_a_model_that_refuses_the_settings_takes_the_plain_request(endpoint, judge, tmp_path):
    """In the words of OpenAI's newer models."""
    words = (
        "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    )
    endpoint.script = [refusal(words)] * 5
    message = ended(judge(workers=1), tmp_path)
    assert (
        "'max_tokens' is not supported" in message
        and "--judge_max_tokens" in message
        and "0 for a plain" in message
    )
    assert summary(judge_pairs(judge(judge_max_tokens=0), PAIRS, tmp_path))["judged"] == 9
    for _, _, body in endpoint.requests[5:]:
        assert body.keys() == {"model", "messages"}


# Trouble


def test_what_may_pass_is_tried_again(endpoint, judge, tmp_path):
    endpoint.script = [429, None, 503, 408, 500]
    judgments = judge_pairs(judge(workers=1), PAIRS[:3], tmp_path)
    assert len(endpoint.requests) == 7 and summary(judgments)["judged"] == 3


@pytest.mark.parametrize(
    "entry",
    [
        (500, b"{}"),
        b'{"choices": [{"mess',
        b"",
        b"null",
        b'{"choices": []}',
        b'{"error": "x"}',
        b"\xff\xfe",
    ],
)
def test_a_pair_that_cannot_be_judged_is_skipped_and_asked_again_next_time(
    endpoint, judge, tmp_path, entry
):
    endpoint.script = [None, entry]
    counts = summary(judge_pairs(judge(workers=1, retries=0), PAIRS[:3], tmp_path))
    assert (counts["judged"], counts["skipped"]) == (2, 1) and len(stored(tmp_path)) == 2
    assert (
        summary(judge_pairs(judge(), PAIRS[:3], tmp_path))["judged"] == 3
        and len(endpoint.requests) == 4
    )


@pytest.mark.parametrize("status, tries", [(500, 2), (400, 1)])
def test_an_endpoint_that_breaks_down_ends_the_run_and_loses_nothing(
    endpoint, judge, tmp_path, status, tries
):
    body = json.dumps({"error": {"message": f"no field of this name, {KEY}"}}).encode()
    endpoint.script = [None] * 4 + [(status, body)] * 99
    message = ended(judge(workers=1, retries=1), tmp_path)
    assert (
        f"HTTP {status}" in message
        and "no field of this name, [key]" in message
        and "kept" in message
    )
    assert len(stored(tmp_path)) == 4 and len(endpoint.requests) == 4 + 5 * tries
    endpoint.script = []
    assert summary(judge_pairs(judge(), PAIRS, tmp_path))["judged"] == 9
    assert len(endpoint.requests) == 4 + 5 * tries + 5


def test_an_error_with_status_200_is_shown(endpoint, judge, tmp_path):
    endpoint.script = [
        json.dumps({"error": {"message": f"no credits\nfor {KEY}", "code": 429}}).encode()
    ] * 99
    message = ended(judge(workers=1, retries=0), tmp_path)
    assert "no credits" in message and not stored(tmp_path)


DEEP = b"[" * 10**6 + b"]" * 10**6


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        b'{"error": ' + DEEP + b"}",
        b'{"choices": ' + b'{"a":' * 990 + b"1" + b"}" * 991,
        b"1" * 9999,
        b"[1]",
        b'"x"',
    ]
    + [
        json.dumps(completion(content)).encode()
        for content in (["A"], {"A": 1}, 7, '{"a":' * 10**4)
    ],
)
def test_an_answer_of_any_other_form_is_no_verdict(endpoint, judge, tmp_path, body):
    endpoint.script = [None, body]
    counts = summary(judge_pairs(judge(workers=1, retries=0), PAIRS[:3], tmp_path))
    assert counts["judged"] == 2 and counts["skipped"] + counts["malformed"] == 1


def flood(handler, pieces, **headers):
    """Send pieces for as long as the other side takes them."""
    handler.send_response(200)
    for name, value in {
        "Content-Type": "application/json",
        "Connection": "close",
        **headers,
    }.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.close_connection = True
    with contextlib.suppress(OSError):
        for piece in pieces:
            handler.wfile.write(piece)


@functools.cache
def bomb():
    """A quarter of a GiB of zeros in a quarter of a megabyte."""
    packer = zlib.compressobj(1, wbits=31)
    return [*(packer.compress(bytes(2**20)) for _ in range(2**8)), packer.flush()]


def drip():
    for _ in range(400):  # ends by itself after twenty seconds
        time.sleep(0.05)
        yield b" "


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    ("send", "why"),
    [
        (lambda handler: flood(handler, [bytes(2**20)] * 3000), "more than 16 MB"),
        (lambda handler: flood(handler, bomb(), **{"Content-Encoding": "gzip"}), "compressed"),
        (lambda handler: flood(handler, drip()), "did not end within 1 seconds"),
    ],
    ids=["3 GB", "gzip bomb", "drip"],
)
def test_an_answer_without_bounds_is_cut_off_and_not_asked_for_again(
    endpoint, judge, tmp_path, monkeypatch, send, why, status
):
    monkeypatch.setattr(servers, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(
        Handler, "do_POST", lambda handler: (endpoint.requests.append(0), send(handler))
    )
    if status == 500:
        plain = Handler.send_response
        monkeypatch.setattr(Handler, "send_response", lambda handler, _: plain(handler, 500))
    message = ended(judge(workers=1), tmp_path)
    assert why in message and "5 answers in a row" in message and len(endpoint.requests) == 5


def test_a_head_without_an_end_ends_the_run(endpoint, judge, tmp_path, monkeypatch):
    def drips(handler):
        with contextlib.suppress(OSError):
            for piece in drip():
                handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: " + piece)

    monkeypatch.setattr(judges, "PATIENCE", 1.0)
    monkeypatch.setattr(Handler, "do_POST", drips)
    assert "no whole answer within 1 seconds" in ended(judge(workers=1), tmp_path, PAIRS[:2])


def test_what_cannot_pass_ends_the_run_with_one_request(endpoint, judge, tmp_path):
    body = json.dumps({"error": {"message": f"bad key {KEY}", "code": "x"}}).encode()
    for asked, (status, word) in enumerate(
        {401: "OPENAI_API_KEY", 404: "--judge_model"}.items(), 1
    ):
        endpoint.script = [(status, body)] * 99
        message = ended(judge(workers=8), tmp_path)
        assert f"HTTP {status}" in message and word in message and len(endpoint.requests) == asked
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    assert f"{url}: cannot be reached" in ended(judge(judge_url=url, retries=0), tmp_path)


def test_ctrl_c_keeps_the_answers_that_are_under_way(endpoint, judge, tmp_path):
    def interrupt():
        # an executor that is interrupted while it starts a thread does not wait for that thread
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)

    endpoint.script = [None, lambda: time.sleep(1), interrupt]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with pytest.raises(KeyboardInterrupt):
        judge_pairs(judge(workers=2), PAIRS, tmp_path)
    assert 3 <= len(stored(tmp_path)) == len(endpoint.requests) <= 9
    assert len(judge_pairs(judge(), PAIRS, tmp_path)) == 9 and len(endpoint.requests) == 9


# Requests at the same time


def test_requests_at_the_same_time(endpoint, judge, tmp_path):
    # breaks, and ends the connection, unless three wait for it
    together = threading.Barrier(3, timeout=30)
    endpoint.script = [None] + [lambda: (together.wait(), None)[1]] * 3
    judgments = judge_pairs(judge(workers=3, retries=0), PAIRS, tmp_path, "both")
    assert len(endpoint.requests) == len(judgments) == 2 * len(PAIRS)
    for row in judgments:
        a, b = len(PAIRS[int(row["pair"])].first), len(PAIRS[int(row["pair"])].second)
        assert row["winner"] == ("first" if a > b else "second" if b > a else "tie")
        assert row["scores"] == {
            "first": dict.fromkeys(TLDR.aspects, a),
            "second": dict.fromkeys(TLDR.aspects, b),
        }


# The key


def test_the_key_is_nowhere(endpoint, judge, tmp_path, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    for name in ("openai", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.DEBUG)
    echo = json.dumps({"error": {"message": f"{KEY} is wrong"}}).encode()
    answers = iter([f"Bearer {KEY}"] * 3)
    endpoint.decide = lambda *_: next(answers, verdict("tie"))
    endpoint.script = [None, 500, (400, echo), (429, echo)]
    found = judge()
    judgments = judge_pairs(found, PAIRS, tmp_path)
    print(judgments, found, found.identity, found.options)
    endpoint.script = [(401, echo)]
    print(ended(found, tmp_path, [Comparison("new", "p", "a", "b")]))
    written = "".join(path.read_text() for path in tmp_path.rglob("*"))
    shown = capfd.readouterr()
    assert (
        "Bearer [key]" in written and Counter(row["winner"] for row in judgments)["malformed"] == 3
    )
    assert caplog.records  # the libraries did log
    logged = "".join(
        f"{record.getMessage()} {record.args} {record.exc_text}" for record in caplog.records
    )
    for text in (written, shown.out, shown.err, caplog.text, logged):
        assert KEY not in text and "very-secret" not in text


def test_options_that_cannot_work(judge, monkeypatch):
    urls = ["localhost:8000", "ftp://x/v1", "http://[::1/v1", "http://x:99999/v1", "http://é..b/v1"]
    faults = [("judge_model", " "), *(("judge_url", url) for url in urls)]
    faults += [
        ("judge_url", f"https://me:{KEY}@host/v1"),
        ("judge_url", f"https://host/v1?api-key={KEY}"),
    ]
    for option, value in faults:
        with pytest.raises(InputError, match=f"--{option}") as caught:
            judge(**{option: value})
        assert KEY not in str(caught.value) and "\n" not in str(caught.value)
    for value in (f"{KEY}\n{KEY}", f"{KEY}ä"):
        monkeypatch.setenv("OPENAI_API_KEY", value)
        with pytest.raises(InputError, match="OPENAI_API_KEY") as caught:
            judge()
        assert KEY not in str(caught.value)
