"""Judges that are models or functions on this machine: gold scorer, reward model, causal LM."""

import copy

import pytest
import torch

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.evaluation.judge_prompts import CRITERIA, letter_prompt
from marlhf_lite.evaluation.judges import LocalJudge, ScoreJudge, hash_weights, reward_judge
from marlhf_lite.evaluation.judgments import Comparison, combine, judge_pairs, summary
from marlhf_lite.models.actor_critic import ScalarHeadModel
from marlhf_lite.models.loading import load_base, load_score_model, load_tokenizer
from marlhf_lite.tasks.tiny_tldr.corpus import EMBEDDED
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


def test_a_reward_model_judges_by_its_score_at_the_last_token(reward, tokenizer, tmp_path):
    judgments = judge_pairs(reward_judge(reward, tokenizer, limit=5), DIFFERENT, tmp_path)
    for row, pair in zip(judgments, DIFFERENT, strict=True):
        scores = {}
        for side in ("first", "second"):
            ids = tokenizer(getattr(pair, side), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            scores[side] = score(reward.role, tokenizer(pair.prompt)["input_ids"] + ids[:5])
            assert row["scores"][side]["score"] == pytest.approx(scores[side], abs=1e-4)
        assert row["winner"] == max(scores, key=scores.get)


def test_a_cut_answer_is_read_as_it_was_sampled_without_an_eos(reward, tokenizer, tmp_path):
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in "these"]  # its text has fewer tokens than were sampled
    text = tokenizer.decode(ids)
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) < len(ids) == 5
    row = {"prompt": "p", "method": "M", "response": text, "token_ids": ids, "ended": False}
    pair = [Comparison("1", "p", text, "no")]
    (judgment,) = judge_pairs(reward_judge(reward, tokenizer, 5, [row]), pair, tmp_path)
    assert judgment["scores"]["first"]["score"] == pytest.approx(
        score(reward.role, tokenizer("p")["input_ids"] + ids), abs=1e-5
    )
    (other,) = judge_pairs(reward_judge(reward, tokenizer, 5), pair, tmp_path)
    assert abs(other["scores"]["first"]["score"] - judgment["scores"]["first"]["score"]) > 1e-3
    assert other["scores"]["second"] == judgment["scores"]["second"]


def test_a_reward_model_is_asked_once_and_after_training_again(reward, tokenizer, tmp_path):
    calls = []

    class Counting(ModelReward):
        def __call__(self, rollout):
            calls.append(len(rollout))
            return super().__call__(rollout)

    for count in (2 * len(DIFFERENT), 0):
        calls.clear()
        judge_pairs(reward_judge(Counting(reward.role), tokenizer, 5), DIFFERENT, tmp_path)
        assert len(calls) == count
    trained = copy.deepcopy(reward.role)
    with torch.no_grad():
        next(p for n, p in trained.named_parameters() if "lora" in n).add_(1e-4)
    judge_pairs(reward_judge(Counting(trained), tokenizer, 5), DIFFERENT, tmp_path)
    assert len(calls) == 2 * len(DIFFERENT)


def test_hashes_tell_models_apart(base, reward):
    assert hash_weights(base) == hash_weights(copy.deepcopy(base)) != hash_weights(reward.role)


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
    chat.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<model>"
    plain, talking = (LocalJudge(model, t, CRITERIA["hh"]) for t in (tokenizer, chat))
    text = f"<user>{letter_prompt(CRITERIA['hh'], 'p', 'a', 'b')}\n<model>"
    after = by_hand(model, chat(text, add_special_tokens=False)["input_ids"])
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
