"""Judges that are models or functions on this machine: gold scorer, reward model, causal LM."""

import copy

import pytest
import torch

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.evaluation.judge_prompts import CRITERIA, letter_prompt
from marlhf_lite.evaluation.judges import LocalJudge, ScoreJudge, hash_weights, score_answers
from marlhf_lite.evaluation.judgments import Comparison, combine, judge_pairs, summary
from marlhf_lite.models.actor_critic import ScalarHeadModel
from marlhf_lite.models.loading import load_base, load_score_model, load_tokenizer
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.utils.errors import InputError

PAIRS = [Comparison(str(i), f"post {i}", "a" * (i % 4), "b" * (i % 3), ("M", "P")) for i in range(12)]
DIFFERENT = [pair for pair in PAIRS if pair.first != pair.second]


def lengths(prompts, responses):
    assert len(prompts) == len(responses)
    return [len(r) for r in responses]


# Scorers


def test_the_higher_score_wins(tmp_path):
    judgments = judge_pairs(ScoreJudge(lengths, "n"), DIFFERENT, tmp_path, "both")
    for row, pair in zip(judgments, DIFFERENT, strict=True):
        gap = len(pair.first) - len(pair.second)
        assert row["winner"] == ("tie" if gap == 0 else "first" if gap > 0 else "second")
        assert row["scores"] == {"first": {"score": len(pair.first)}, "second": {"score": len(pair.second)}}
        assert row["shown"] == "none"  # asked once, for the order is nothing to it
    counts = summary(judgments)
    assert counts["win"] and counts["lose"] and counts["tie"] and counts["position"]["first_shown_share"] is None


def test_the_gold_scorer_of_the_embedded_task_prefers_the_chosen_summary(tmp_path):
    task = EMBEDDED["tiny-tldr"](60, 1234)
    rows = task.splits["rm"]
    pairs = [Comparison(str(i), r["prompt"], r["chosen"], r["rejected"]) for i, r in enumerate(rows)]
    counts = summary(judge_pairs(ScoreJudge(task.gold), pairs, tmp_path))
    assert counts["win"] > counts["lose"] and counts["judged"] == len(pairs)


@pytest.mark.parametrize(
    "scores, word", [([1.0], "2 responses"), ([1.0, float("nan")], "nan"), (["x", 1.0], "numbers")]
)
def test_scores_that_cannot_be_compared(tmp_path, scores, word):
    with pytest.raises(InputError, match=word):
        judge_pairs(ScoreJudge(lambda prompts, responses: scores), PAIRS[1:2], tmp_path)


def test_an_edited_function_is_asked_again(tmp_path):
    before = judge_pairs(ScoreJudge(lengths), PAIRS, tmp_path)
    after = judge_pairs(ScoreJudge(lambda p, r: [-len(x) for x in r]), PAIRS, tmp_path)
    turned = {"first": "second", "second": "first", "tie": "tie"}
    assert [v["winner"] for v in after] == [turned[v["winner"]] for v in before]


@pytest.fixture
def reward(base, rm):
    return ModelReward(ScalarHeadModel(load_score_model(base, rm)))


def score(role, tokens):
    """The score at the last of these tokens, without padding."""
    tokens = torch.tensor([tokens])
    with torch.no_grad():
        return role(tokens, torch.ones_like(tokens))[0, -1].item()


def test_answers_are_scored_at_the_last_token_and_a_cut_one_has_no_eos(reward, tokenizer):
    pieces = [tokenizer.convert_tokens_to_ids(piece) for piece in "these"]  # its text has fewer tokens than it has
    text = tokenizer.decode(pieces)
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) < len(pieces) == 5
    sampled = {"prompt": "p", "response": text, "token_ids": pieces, "ended": False}
    rows = [sampled, *({"prompt": pair.prompt, "response": pair.first} for pair in PAIRS)]
    for row, scored in zip(rows, score_answers(reward, tokenizer, rows, limit=5), strict=True):
        ids = tokenizer(row["response"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        tokens = tokenizer(row["prompt"])["input_ids"] + row.get("token_ids", ids[:5])
        with torch.no_grad():  # without padding
            expected = reward.model(torch.tensor([tokens]), torch.ones(1, len(tokens)).long())[0, -1].item()
        assert scored == row | {"rm_score": pytest.approx(expected, abs=1e-4)}


def test_hashes_tell_models_apart(base, reward):
    assert hash_weights(base) == hash_weights(copy.deepcopy(base)) != hash_weights(reward.model)


# A local causal LM


@pytest.fixture(scope="module")
def embedded():
    options = ModelConfig()
    return load_base(options), load_tokenizer(options.model)


@pytest.fixture
def local(embedded):
    return LocalJudge(*embedded, CRITERIA["hh"])


def by_hand(model, ids):
    """Log-probabilities of the next token after `ids`."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1].double(), -1)


@pytest.mark.parametrize("texts", [("Why?", "yes", "no"), ("A longer question, is it not?", "It is so.", "no no no")])
def test_log_probabilities_of_the_letters_where_the_answer_stands(local, embedded, texts):
    model, tokenizer = embedded
    judgment = local(*texts)
    after = by_hand(model, tokenizer(letter_prompt(CRITERIA["hh"], *texts))["input_ids"])
    for letter in "AB":
        (token,) = tokenizer(f" {letter}", add_special_tokens=False)["input_ids"]
        assert judgment.scores[letter]["logprob"] == pytest.approx(after[token].item(), abs=1e-4)
    assert judgment.winner == max("AB", key=lambda letter: judgment.scores[letter]["logprob"])


def test_both_orders_average_out_a_lean_to_one_letter(local, tmp_path):
    judgments = judge_pairs(local, DIFFERENT[:5], tmp_path, "both")
    for row in combine(judgments):
        scores = [each["scores"] for each in judgments if each["pair"] == row["pair"]]
        gap = sum(each["first"]["logprob"] - each["second"]["logprob"] for each in scores)
        assert row["winner"] == ("first" if gap > 0 else "second")
    assert 0 <= summary(judgments)["position"]["first_shown_share"] <= 1
    assert summary(judgments)["tie"] == 0


def test_a_text_longer_than_the_model_takes_is_skipped_alone(local, embedded, tmp_path):
    room = embedded[0].config.max_position_embeddings
    pairs = [DIFFERENT[0], Comparison("long", "x" * 3 * room, "a", "b"), DIFFERENT[1]]
    judgments = judge_pairs(local, pairs, tmp_path)
    assert [row["winner"] == "skipped" for row in judgments] == [False, True, False]
    assert f"the model takes {room}" in judgments[1]["raw"]


def test_a_chat_template_is_used(embedded):
    model, tokenizer = embedded
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<model>"
    plain, talking = (LocalJudge(model, t, CRITERIA["hh"]) for t in (tokenizer, chat))
    text = f"<user>{letter_prompt(CRITERIA['hh'], 'p', 'a', 'b')}\n<model>"
    after = by_hand(model, [chat.bos_token_id, *chat(text, add_special_tokens=False)["input_ids"]])
    judgment = talking("p", "a", "b")
    for letter in "AB":
        (token,) = chat(letter, add_special_tokens=False)["input_ids"]
        assert judgment.scores[letter]["logprob"] == pytest.approx(after[token].item(), abs=1e-4)
    assert plain.identity != talking.identity


def test_letters_behind_a_shared_first_token_and_letters_that_are_none(embedded):
    model, _ = embedded

    class Wrapped:
        chat_template = None

        def __init__(self, letters):
            self.letters = letters

        def __call__(self, text, **options):
            return {"input_ids": self.letters[text.strip()]}

    judge = LocalJudge(model, Wrapped({"A": [7, 8], "B": [7, 9]}), CRITERIA["hh"])
    assert (judge.lead, judge.letters) == ([7], [8, 9])
    for letters in ({"A": [7, 8], "B": [9]}, {"A": [7], "B": [7]}, {"A": [1, 2], "B": [3, 4]}):
        with pytest.raises(InputError, match="another model"):
            LocalJudge(model, Wrapped(letters), CRITERIA["hh"])


def test_a_local_judge_is_asked_once(local, embedded, tmp_path, monkeypatch):
    before = judge_pairs(local, DIFFERENT[:3], tmp_path)
    monkeypatch.setattr(LocalJudge, "__call__", None)
    assert judge_pairs(LocalJudge(*embedded, CRITERIA["hh"]), DIFFERENT[:3], tmp_path) == before
