"""Judges that are models or functions on this machine: gold scorer, reward model, causal LM."""

import copy

import pytest
import torch

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.evaluation.judges import (
    CRITERIA,
    LocalJudge,
    Pair,
    Question,
    ScoreJudge,
    combine,
    judge_pairs,
    reward_judge,
    summary,
)
from marlhf_lite.evaluation.judges.criteria import letter_prompt
from marlhf_lite.evaluation.judges.scorers import fingerprint
from marlhf_lite.models.actor_critic import ScalarHeadModel
from marlhf_lite.models.loading import load_base, load_score_model, load_tokenizer
from marlhf_lite.tasks.tiny_tldr.corpus import EMBEDDED
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.utils.errors import InputError

PAIRS = [Pair(str(i), f"post {i}", "a" * (i % 4), "b" * (i % 3), ("M", "P")) for i in range(12)]


def lengths(prompts, responses):
    assert len(prompts) == len(responses)
    return [len(r) for r in responses]


# Scorers


def test_the_higher_score_wins(tmp_path):
    for margin in (0.0, 1.0):
        for verdict, pair in zip(judge_pairs(ScoreJudge(lengths, "n", margin, 5), PAIRS, tmp_path, "both"), PAIRS):
            if pair.first == pair.second:
                continue
            gap = len(pair.first) - len(pair.second)
            assert verdict.winner == ("tie" if abs(gap) <= margin else "first" if gap > 0 else "second")
            assert verdict.scores == {"first": {"score": len(pair.first)}, "second": {"score": len(pair.second)}}
            assert verdict.shown == "none"  # asked once, for the order is nothing to it
    counts = summary(judge_pairs(ScoreJudge(lengths), PAIRS, tmp_path))
    assert counts["win"] and counts["lose"] and counts["tie"] and counts["position"]["first_shown_share"] is None


def test_the_gold_scorer_of_the_embedded_task_prefers_the_chosen_summary(tmp_path):
    task = EMBEDDED["tiny-tldr"](60, 1234)
    rows = task.splits["rm"]
    pairs = [Pair(str(i), r["prompt"], r["chosen"], r["rejected"]) for i, r in enumerate(rows)]
    counts = summary(judge_pairs(ScoreJudge(task.gold), pairs, tmp_path))
    assert counts["win"] > counts["lose"] and counts["judged"] == len(pairs)


@pytest.mark.parametrize("scores, word", [([1.0], "one each"), ([1.0, float("nan")], "nan"), (["x", 1.0], "numbers")])
def test_scores_that_are_none(tmp_path, scores, word):
    with pytest.raises(InputError, match=word):
        judge_pairs(ScoreJudge(lambda prompts, responses: scores), PAIRS[1:2], tmp_path)


def test_an_edited_function_is_asked_again(tmp_path):
    before = judge_pairs(ScoreJudge(lengths), PAIRS, tmp_path)
    after = judge_pairs(ScoreJudge(lambda p, r: [-len(x) for x in r]), PAIRS, tmp_path)
    turned = {"first": "second", "second": "first", "tie": "tie"}
    assert [v.winner for v in after] == [turned[v.winner] for v in before]


@pytest.fixture
def reward(base, rm):
    return ModelReward(ScalarHeadModel(load_score_model(base, rm)))


def test_a_reward_model_judges_by_its_score_at_the_last_token(reward, tokenizer, tmp_path):
    verdicts = judge_pairs(reward_judge(reward, tokenizer, limit=5, batch_size=5), PAIRS[1:], tmp_path)
    for verdict, pair in zip(verdicts, PAIRS[1:]):
        if pair.first == pair.second:
            continue
        scores = {}
        for side in ("first", "second"):  # one at a time, without padding
            ids = tokenizer(getattr(pair, side), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            ids = tokenizer(pair.prompt)["input_ids"] + ids[:5]
            tokens = torch.tensor([ids])
            with torch.no_grad():
                scores[side] = reward.role(tokens, torch.ones_like(tokens))[0, -1].item()
            assert verdict.scores[side]["score"] == pytest.approx(scores[side], abs=1e-4)
        assert verdict.winner == max(scores, key=scores.get)


def test_a_reward_model_is_asked_once_and_after_training_again(reward, tokenizer, tmp_path):
    calls = []

    class Counting(ModelReward):
        def __call__(self, rollout):
            calls.append(len(rollout))
            return super().__call__(rollout)

    pairs = [pair for pair in PAIRS if pair.first != pair.second]
    for more in (1, 0):
        judge_pairs(reward_judge(Counting(reward.role), tokenizer, 5, batch_size=99), pairs, tmp_path)
        assert calls.pop() == 2 * len(pairs) if more else not calls
    trained = copy.deepcopy(reward.role)
    with torch.no_grad():
        next(p for n, p in trained.named_parameters() if "lora" in n).add_(1e-4)
    judge_pairs(reward_judge(Counting(trained), tokenizer, 5, batch_size=99), pairs, tmp_path)
    assert calls == [2 * len(pairs)]


def test_fingerprints_tell_models_apart(base, reward):
    assert fingerprint(base) == fingerprint(copy.deepcopy(base)) != fingerprint(reward.role)


# A local causal LM


@pytest.fixture(scope="module")
def embedded():
    options = ModelConfig()
    return load_base(options), load_tokenizer(options.model)


@pytest.fixture
def local(embedded):
    return LocalJudge(*embedded, CRITERIA["hh"], batch_size=5)


def by_hand(model, ids):
    """Log-probabilities of the next token after `ids`, without padding or mask."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1].double(), -1)


def test_log_probabilities_of_the_letters_where_the_answer_stands(local, embedded, tmp_path):
    model, tokenizer = embedded
    pairs = [Pair("1", "Why?", "yes", "no"), Pair("2", "A longer question, is it not?", "It is so.", "no no no")]
    questions = [Question(pair, shown) for pair in pairs for shown in ("first", "second")]
    for question, answer in zip(questions, local(questions)):
        after = by_hand(model, tokenizer(letter_prompt(CRITERIA["hh"], question))["input_ids"])
        for letter in "AB":
            (token,) = tokenizer(f" {letter}", add_special_tokens=False)["input_ids"]
            assert answer.scores[letter]["logprob"] == pytest.approx(after[token].item(), abs=1e-4)
        assert answer.choice == max("AB", key=lambda letter: answer.scores[letter]["logprob"])


def test_both_orders_average_out_a_lean_to_one_letter(local, tmp_path):
    verdicts = judge_pairs(local, PAIRS[1:6], tmp_path, "both")
    for verdict in combine(verdicts):
        mine = [v for v in verdicts if v.pair == verdict.pair]
        gap = sum(v.scores["first"]["logprob"] - v.scores["second"]["logprob"] for v in mine)
        assert verdict.winner == ("first" if gap > 0 else "second")
    assert 0 <= summary(verdicts)["position"]["first_shown_share"] <= 1
    assert summary(verdicts)["tie"] == 0


def test_a_text_longer_than_the_model_takes_is_skipped_alone(local, embedded, tmp_path):
    model, _ = embedded
    room = model.config.max_position_embeddings
    pairs = [PAIRS[1], Pair("long", "x" * 3 * room, "a", "b"), PAIRS[2]]
    verdicts = judge_pairs(local, pairs, tmp_path)
    assert [v.winner == "skipped" for v in verdicts] == [False, True, False]
    assert f"the model takes {room}" in verdicts[1].raw


def test_a_chat_template_is_used(embedded):
    model, tokenizer = embedded
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<model>"
    plain, talking = (LocalJudge(model, t, CRITERIA["hh"]) for t in (tokenizer, chat))
    question = Question(Pair("1", "p", "a", "b"), "first")
    ids = chat(f"<user>{letter_prompt(CRITERIA['hh'], question)}\n<model>", add_special_tokens=False)["input_ids"]
    after = by_hand(model, ids)
    (answer,) = talking([question])
    for letter in "AB":
        (token,) = chat(letter, add_special_tokens=False)["input_ids"]
        assert answer.scores[letter]["logprob"] == pytest.approx(after[token].item(), abs=1e-4)
    assert plain.identity() != talking.identity()


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


def test_a_local_judge_is_asked_once(local, tmp_path):
    before = judge_pairs(local, PAIRS[1:4], tmp_path)
    local._read = None
    assert judge_pairs(local, PAIRS[1:4], tmp_path) == before
