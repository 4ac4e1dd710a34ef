import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lite.tasks import templates
from marlhf_lite.utils.errors import InputError

GOOD = {"prompt": "Why?", "chosen": " Because.", "rejected": " No."}


def fails(rows, *parts, **options):
    with pytest.raises(InputError) as caught:
        templates.to_preferences(rows, "pairs.jsonl", **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


def test_tldr_prompt():
    expected = "POST Subreddit: r/cats\nMy cat sleeps.\nTL;DR:"
    assert templates.tldr_prompt("cats", "My cat sleeps.\n") == expected
    assert templates.tldr_prompt("r/cats", "My cat sleeps.") == expected


def test_hh_prompt():
    assert templates.hh_prompt("Hi") == "\n\nHuman: Hi\n\nAssistant:"
    assert (
        templates.hh_prompt(["Hi", "Hello ", "Why?"])
        == "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"
    )
    for turns in ([], ["Hi", "Hello"]):
        with pytest.raises(InputError, match=f"{len(turns)} dialogue turns: give an odd number"):
            templates.hh_prompt(turns)


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("Cats sleep [1]. Dogs run [2, 3].", "Cats sleep. Dogs run."),
        ("Both[1][2] do.", "Both do."),
        ("Cats [1] sleep.", "Cats sleep."),
        ("[1] Cats sleep.\n[2][3] Dogs run.", "Cats sleep.\nDogs run."),
        ("Range [4-6] and [7–9], [1; 2]", "Range and,"),
        ("An [aside], a list [], [1a] and [1.5] stay", "An [aside], a list [], [1a] and [1.5] stay"),
        ("line\n\nline", "line\n\nline"),
    ],
)
def test_strip_citations(text, stripped):
    assert templates.strip_citations(text) == stripped


def test_webgpt_prompt():
    assert templates.webgpt_prompt("Why do cats purr [1]?") == "\n\nHuman: Why do cats purr?\n\nAssistant:"
    assert templates.webgpt_prompt("Why [1]?", "released") == " Human: Why [1]? Assistant:"


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("Cats (all of them) sleep [1].", "Cats sleep."),
        ("A (b (c) [d] e) f.", "A f."),
        ("(a) b [note] (c)", " b"),
        ("An open ( and a ] stay", "An open ( and a ] stay"),
    ],
)
def test_strip_brackets(text, stripped):
    assert templates.strip_brackets(text) == stripped


turn = st.text(alphabet="ab \n:", max_size=8)
tail = st.lists(st.one_of(turn, st.sampled_from(["\n\nHuman:", "\n\nAssistant:"])), max_size=6).map("".join)


@given(shared=tail, chosen=tail, rejected=tail)
def test_split_transcripts_round_trip(shared, chosen, rejected):
    chosen, rejected = (f"\n\nHuman: q{shared}\n\nAssistant:{end}" for end in (chosen, rejected))
    prompt, good, bad = templates.split_transcripts(chosen, rejected)
    assert (prompt + good, prompt + bad) == (chosen, rejected)
    assert prompt.endswith("\n\nAssistant:")
    # the prompt is at the last shared turn: no longer one would do
    assert "\n\nAssistant:" not in os.path.commonprefix([chosen, rejected])[len(prompt) - len("\n\nAssistant:") + 1 :]  # noqa: RUF071


def test_split_transcripts_that_part_early():
    start = "\n\nHuman: Hi\n\nAssistant:"
    chosen, rejected = start + " Hello\n\nHuman: Why?\n\nAssistant: So.", start + " Yes"
    prompt, good, bad = templates.split_transcripts(chosen, rejected)
    assert (prompt, good, bad) == (start, " Hello\n\nHuman: Why?\n\nAssistant: So.", " Yes")


def test_split_transcripts_without_a_shared_turn():
    pair = "\n\nHuman: a\n\nAssistant: x", "\n\nHuman: b\n\nAssistant: x"
    with pytest.raises(InputError, match=r"^'chosen' and 'rejected' share no .* begin both with the same prompt"):
        templates.split_transcripts(*pair)


def test_three_columns():
    rows = [{**GOOD, "chosen": " Because. \n", "score": 3}]
    assert templates.to_preferences(rows, "x") == ([GOOD], {"read": 1, "kept": 1})


def test_two_transcripts():
    start = "\n\nHuman: Hi\n\nAssistant:"
    pairs, counts = templates.to_preferences([{"chosen": start + " Hello", "rejected": start + " Go\n"}], "x")
    assert pairs == [{"prompt": start, "chosen": " Hello", "rejected": " Go"}]
    assert counts == {"read": 1, "kept": 1}


def test_chats():
    def user(text):
        return {"role": "user", "content": text}

    def assistant(text):
        return {"role": "assistant", "content": text}

    expected = {"prompt": templates.hh_prompt(["Hi", "Hello", "Why?"]), "chosen": " So.", "rejected": " No."}
    before = [user("Hi"), assistant("Hello"), user("Why?")]
    whole = {"chosen": [*before, assistant("So.")], "rejected": [*before, assistant("No.")]}
    apart = {"prompt": before, "chosen": [assistant("So.")], "rejected": [assistant("No.")]}
    for row in (whole, {**whole, "prompt": "Why?"}, apart):
        assert templates.to_preferences([row], "x")[0] == [expected]
    system = {**whole, "chosen": [{"role": "system", "content": "Be kind"}, *whole["chosen"]]}
    fails([system], "row 1", "'chosen' has a message that is not a user's or assistant's text")
    fails([{"chosen": [assistant("So.")], "rejected": [assistant("No.")]}], "row 1", "from a user's to an assistant's")
    fails([{**whole, "rejected": "No."}], "row 1", "'rejected' is not a list of messages")
    blank = {**apart, "chosen": [assistant("")]}
    assert templates.to_preferences([apart, blank], "x")[1] == {"read": 2, "kept": 1, "empty_response": 1}


def test_missing_columns():
    expected = "pairs.jsonl: columns found: question, answer; expected: prompt, chosen, rejected"
    assert fails([{"question": "a", "answer": "b"}], "add the missing columns").startswith(expected)
    fails([{"prompt": "a", "chosen": "b"}], "columns found: prompt, chosen; expected", bad_rows="drop")
    fails([{}], "columns found: none")


TRANSCRIPTS = {"chosen": "\n\nHuman: a\n\nAssistant: x", "rejected": "\n\nHuman: b\n\nAssistant: y"}
BAD = [
    ("missing_column", {"prompt": "a", "chosen": "b"}, "no 'rejected'"),
    ("not_text", {**GOOD, "chosen": 3}, "'chosen' is not text but int"),
    ("missing_column", {**GOOD, "prompt": None}, "no 'prompt'"),
    ("not_text", {**GOOD, "rejected": " x\ud83d"}, "'rejected' has half a surrogate pair at character 3"),
    ("empty_prompt", {**GOOD, "prompt": " \n"}, "the prompt is empty"),
    ("empty_prompt", {**GOOD, "prompt": "\n\nAssistant:"}, "the prompt is empty"),
    ("equal_pair", {**GOOD, "rejected": "Because.\n"}, "'chosen' and 'rejected' are equal"),
]


@pytest.mark.parametrize(("reason", "row", "message"), BAD)
def test_bad_rows(reason, row, message):
    text = fails([GOOD, row], f"pairs.jsonl: row 2: {message}", "correct or delete the row", "--bad_rows drop")
    assert text.startswith("pairs.jsonl")
    pairs, counts = templates.to_preferences([GOOD, row, row], "x", bad_rows="drop")
    assert pairs == [GOOD] and counts == {"read": 3, "kept": 1, reason: 2}


def test_no_shared_turn():
    good = {**TRANSCRIPTS, "rejected": "\n\nHuman: a\n\nAssistant: y"}
    fails([good, TRANSCRIPTS], "pairs.jsonl: row 2: 'chosen' and 'rejected' share no")
    counts = templates.to_preferences([good, TRANSCRIPTS], "x", bad_rows="drop")[1]
    assert counts == {"read": 2, "kept": 1, "no_shared_turn": 1}


def test_empty_responses_are_always_dropped():
    rows = [GOOD, {**GOOD, "chosen": " "}, {**GOOD, "rejected": ""}]
    for bad_rows in ("error", "drop"):
        pairs, counts = templates.to_preferences(rows, "x", bad_rows=bad_rows)
        assert pairs == [GOOD] and counts == {"read": 3, "kept": 1, "empty_response": 2}


def test_no_row_left():
    fails([{**GOOD, "chosen": ""}] * 2, "pairs.jsonl: no row can be used (empty_response 2)")
    fails([], "no row can be used (no rows)")


def test_bad_rows_option():
    fails([GOOD], "--bad_rows 'skip': choose error or drop", bad_rows="skip")
