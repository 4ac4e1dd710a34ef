"""An environment speaks between the policy's turns: who scores or judges an answer gets the policy's words alone."""

import torch
from conftest import fails
from small_runs import build

from marlhf_lite.config.commands import PPOCommand
from marlhf_lite.evaluation.scores import score_rollout
from marlhf_lite.experiments.named_rewards import asked_columns
from marlhf_lite.extras.judges.judges import first_answers
from marlhf_lite.tasks.prompts import Prompt
from marlhf_lite.training.environments import Dialogues
from marlhf_lite.training.rewards import FunctionReward, ModelReward, score_responses
from marlhf_lite.training.rollout import Sampling, from_tokens
from marlhf_lite.utils.jsonl import append_lines

PROMPTS = ["a", "The cat sat on the mat.", "Why?"]
SAID_BY_ENVIRONMENT = " SECRET 42 SECRET"


class Talker:
    """Says the same after each turn, and ends each dialogue after as many turns as its prompt has words."""

    def reset(self, prompts):
        return [[len(prompt.split())] for prompt in prompts]

    def step(self, states, texts):
        for state in states:
            state[0] -= 1
        dones = [state[0] == 0 for state in states]
        return [SAID_BY_ENVIRONMENT] * len(states), [1.0] * len(states), dones


def play(roles, tokenizer, prompts=PROMPTS):
    torch.manual_seed(0)
    dialogues = Dialogues(Talker(), max_turns=3)
    return dialogues(roles.policy.model, tokenizer, prompts, Sampling(5, 1.0))


class Listener:
    """A function of a user that remembers what it got."""

    __name__ = "listener"

    def __init__(self):
        self.heard = []

    def __call__(self, prompts, responses):
        self.heard += responses
        return [float("42" in response) for response in responses]


def words_of(rollout):
    return ["\n".join(turn["response"] for turn in turns) for turns in rollout.turns]


def test_every_function_hears_the_policy_alone(roles, tokenizer):
    """As a reward, called directly or by its checks, as a gold score, and as a function of rollouts."""
    rollout = play(roles, tokenizer)
    assert any("42" in response for response in rollout.responses)  # which the records keep
    ways = {
        "a reward": lambda hear: FunctionReward(hear)(rollout),
        "a checked reward": lambda hear: score_responses(FunctionReward(hear), rollout).tolist(),
        "a function of a rollout": lambda hear: score_responses(
            lambda given: hear(given.prompts, given.responses), rollout
        ).tolist(),
        "a gold score": lambda hear: score_rollout(rollout, gold=hear)["gold"],
    }
    for name, score in ways.items():
        listener = Listener()
        assert score(listener) == [0.0] * len(PROMPTS), name
        assert listener.heard == words_of(rollout), name


def test_training_and_its_gold_score_hear_the_policy_alone(roles, tokenizer):
    reward, gold = Listener(), Listener()
    trainer = build(
        roles,
        tokenizer,
        reward=FunctionReward(reward),
        gold=gold,
        sampler=Dialogues(Talker(), max_turns=3),
        updates=1,
    )
    (row,) = trainer.train()
    assert row["score_mean"] == row["gold_mean"] == 0.0
    assert reward.heard and not any("SECRET" in text for text in reward.heard + gold.heard)


def test_a_reward_model_reads_the_tokens_of_the_policy_alone(roles, tokenizer):
    rollout = play(roles, tokenizer)
    own = [ids[mask].tolist() for ids, mask in zip(rollout.response_ids, rollout.mask, strict=True)]
    alone = from_tokens(tokenizer, PROMPTS, own, ends=[])
    reward = ModelReward(roles.reward)
    expected = reward(alone)
    torch.testing.assert_close(score_responses(reward, rollout), expected)
    assert not torch.allclose(reward(rollout), expected)  # with the environment's words it differs
    read = rollout.of_the_policy_alone()
    assert read.lengths.tolist() == rollout.lengths.tolist()
    assert [
        ids[mask].tolist() for ids, mask in zip(read.response_ids, read.mask, strict=True)
    ] == own
    assert read.of_the_policy_alone().responses == read.responses


def test_a_function_can_ask_for_the_turns(roles, tokenizer):
    prompts = [Prompt(text, '{"turns": "of the row", "answer": 7}') for text in PROMPTS]
    rollout = play(roles, tokenizer, prompts)

    def reward(prompts, responses, answer, turns):
        assert answer == [7] * len(prompts)
        said = [turn.get("observation") for turn in turns[1]]
        assert said == [SAID_BY_ENVIRONMENT] * 2 + [None]
        turns[1].clear()  # its own copy
        return [len(dialogue) for dialogue in turns]

    assert FunctionReward(reward)(rollout) == [1, 0, 1]
    assert len(rollout.turns[1]) == 3


def test_turns_are_a_column_unless_an_environment_makes_them(tmp_path, monkeypatch):
    (tmp_path / "of_turns.py").write_text(
        "def reward(prompts, responses, turns):\n    return [0.0] * len(turns)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = PPOCommand(reward="of_turns:reward", dataset="tiny-guess")
    (asked,) = asked_columns(options, sampler=None)
    assert asked.choose(["turns", "answer"]) == ["turns"]
    fails(lambda: asked.choose(["answer"]), "--reward of_turns:reward", "turns")
    _, asked = asked_columns(options, sampler=Dialogues(Talker()))
    assert asked.choose(["answer"]) == []


def test_judges_read_the_policy_alone(tmp_path):
    turns = [
        {"response": " four?", "observation": SAID_BY_ENVIRONMENT, "reward": 0.0, "span": [0, 2]},
        {"response": " two", "reward": 1.0, "span": [9, 11]},
    ]
    row = {"prompt": "p", "method": "PPO", "response": " four? SECRET 42 SECRET two"}
    append_lines(tmp_path / "samples.jsonl", [row | {"turns": turns}, row | {"method": "SFT"}])
    with_turns, without = first_answers(str(tmp_path / "samples.jsonl"))
    assert with_turns["response"] == " four?\n two"
    assert without["response"] == row["response"]
