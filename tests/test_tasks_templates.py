import os

import pytest
from conftest import fails
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lite.tasks import shapes, templates

GOOD = {"prompt": "Why?", "chosen": " Because.", "rejected": " No."}


def refused(rows, *parts, **options):
    fails(lambda: shapes.to_preferences(rows, "pairs.jsonl", **options), *parts)


CITATIONS, BRACKETS = templates.strip_citations, templates.strip_brackets


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            templates.tldr_prompt("cats", "My cat sleeps.\n"),
            "POST Subreddit: r/cats\nMy cat sleeps.\nTL;DR:",
        ),
        (templates.tldr_prompt("r/cats", "Meow."), "POST Subreddit: r/cats\nMeow.\nTL;DR:"),
        (templates.hh_prompt("Hi"), "\n\nHuman: Hi\n\nAssistant:"),
        (
            templates.hh_prompt(["Hi", "Yes ", "So?"]),
            "\n\nHuman: Hi\n\nAssistant: Yes\n\nHuman: So?\n\nAssistant:",
        ),
        (templates.webgpt_prompt("Why [1]?"), "\n\nHuman: Why?\n\nAssistant:"),
        (templates.webgpt_prompt("Why [1]?", "released"), " Human: Why [1]? Assistant:"),
        (
            CITATIONS("Cats sleep [1]. Dogs [2] run[2, 3]. Both[1][2] do."),
            "Cats sleep. Dogs run. Both do.",
        ),
        (CITATIONS("[1] Cats sleep.\n[2][3] Dogs run.\n\n"), "Cats sleep.\nDogs run.\n\n"),
        (CITATIONS("Range [4-6] and [7–9], [1; 2]"), "Range and,"),
        (
            CITATIONS("An [aside], a list [], [1a] and [1.5] stay"),
            "An [aside], a list [], [1a] and [1.5] stay",
        ),
        (BRACKETS("Cats (all of them) sleep [1]. A (b (c) [d] e) f."), "Cats sleep. A f."),
        (BRACKETS("(a) b [note] (c), an open ( and a ]"), " b, an open ( and a ]"),
    ],
)
def test_prompts(made, expected):
    assert made == expected


turn = st.text(alphabet="ab \n:", max_size=8)
tail = st.lists(st.one_of(turn, st.sampled_from(["\n\nHuman:", "\n\nAssistant:"])), max_size=6).map(
    "".join
)


@given(shared=tail, chosen=tail, rejected=tail)
def test_split_transcripts_round_trip(shared, chosen, rejected):
    chosen, rejected = (f"\n\nHuman: q{shared}\n\nAssistant:{end}" for end in (chosen, rejected))
    prompt, good, bad = templates.split_transcripts(chosen, rejected)
    assert (prompt + good, prompt + bad) == (chosen, rejected)
    assert prompt.endswith("\n\nAssistant:")
    # the prompt is at the last shared turn: no longer one would do
    shared_text = os.path.commonprefix([chosen, rejected])  # noqa: RUF071
    assert "\n\nAssistant:" not in shared_text[len(prompt) - len("\n\nAssistant:") + 1 :]


OTHER = {"user": "human", "assistant": "gpt"}  # the names of the same in other data


def test_chats():
    def user(text):
        return {"role": "user", "content": text}

    def assistant(text):
        return {"role": "assistant", "content": text}

    expected = {
        "prompt": templates.hh_prompt(["Hi", "Hello", "Why?"]),
        "chosen": " So.",
        "rejected": " No.",
    }
    before = [user("Hi"), assistant("Hello"), user("Why?")]
    whole = {"chosen": [*before, assistant("So.")], "rejected": [*before, assistant("No.")]}
    apart = {"prompt": before, "chosen": [assistant("So.")], "rejected": [assistant("No.")]}
    other = {side: [turn | {"role": OTHER[turn["role"]]} for turn in whole[side]] for side in whole}
    for row in (whole, {**whole, "prompt": "Why?"}, apart, other):
        assert shapes.to_preferences([row], "x")[0] == [expected]
    system = {**whole, "chosen": [{"role": "system", "content": "Be kind"}, *whole["chosen"]]}
    alone = {"chosen": [assistant("So.")], "rejected": [assistant("No.")]}
    mixed = whole | {"rejected": "No."}
    for bad in (system, alone, mixed, whole | {"chosen": before}, whole | {"chosen": [{}]}):
        refused([bad], "row 1: ")
        reason = "no_shared_turn" if bad in (system, alone, mixed) else "bad_chat"
        assert shapes.to_preferences([bad, whole], "x", "drop")[1] == {
            "read": 2,
            "kept": 1,
            reason: 1,
        }
    blank = {**apart, "chosen": [assistant("")]}
    assert shapes.to_preferences([apart, blank], "x")[1] == {
        "read": 2,
        "kept": 1,
        "empty_response": 1,
    }


START = "\n\nHuman: Hi\n\nAssistant:"
WHOLE = {"chosen": f"{START} So.\n\nHuman: Why?\n\nAssistant: Yes.", "rejected": f"{START} No\n"}
APART = {"chosen": "\n\nHuman: a\n\nAssistant: x", "rejected": "\n\nHuman: b\n\nAssistant: y"}
BAD = [
    ("missing_column", {"prompt": "a", "chosen": "b"}, "no 'rejected'"),
    ("not_text", GOOD | {"chosen": 3}, "'chosen' is not text but int"),
    (
        "not_text",
        GOOD | {"rejected": " x\ud83d"},
        "'rejected' has half a surrogate pair at character 3",
    ),
    ("empty_prompt", GOOD | {"prompt": "\n\nAssistant:"}, "the prompt is empty"),
    ("no_shared_turn", APART, "'chosen' and 'rejected' share no"),
    ("empty_response", GOOD | {"chosen": " "}, ""),  # in the published data: dropped in any case
    ("equal_pair", GOOD | {"rejected": "Because.\n"}, ""),
]


@pytest.mark.parametrize(("reason", "row", "message"), BAD)
def test_bad_rows(reason, row, message):
    good = WHOLE if reason == "no_shared_turn" else GOOD
    if message:
        refused([good, row], f"pairs.jsonl: row 2: {message}", "--bad_rows drop")
    pairs, counts = shapes.to_preferences(
        [good, row, row], "x", bad_rows="drop" if message else "error"
    )
    assert len(pairs) == 1 and counts == {"read": 3, "kept": 1, reason: 2}


def test_columns():
    kept = {"prompt": START, "chosen": " So.\n\nHuman: Why?\n\nAssistant: Yes.", "rejected": " No"}
    for row, expected in ((GOOD | {"chosen": " Because. \n", "score": 3}, GOOD), (WHOLE, kept)):
        assert shapes.to_preferences([row], "x") == ([expected], {"read": 1, "kept": 1})
    refused(
        [{"question": "a", "b": "c"}],
        "pairs.jsonl: columns found: question, b; expected: prompt, chosen",
    )
    refused(
        [{"prompt": "a", "chosen": "b"}], "columns found: prompt, chosen; expected", bad_rows="drop"
    )
    refused([{}], "columns found: none")
    refused([GOOD | {"chosen": ""}] * 2, "pairs.jsonl: no row can be used (empty_response 2)")
    refused([], "no row can be used (no rows)")
