"""Responses in turns: the policy speaks, an environment of the user's answers, and so on.

An environment is a class without arguments, with two methods; all lists have an entry for each dialogue::

    reset(prompts) -> states                                    # any objects; `step` may change them
    step(states, texts) -> (observations, rewards, dones)       # texts, numbers, truth values

The policy's tokens are kept as they were sampled. An observation is tokenised once and appended, and no text in it
becomes a special token; the last one, which nobody would read, is left out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from marlhf_lite.tasks.tokenization import encode_observation, encode_prompts, pad
from marlhf_lite.training.rollout import Rollout, Sampling, sample
from marlhf_lite.utils.errors import ServerError, one_line


@dataclass
class Dialogue:
    """A prompt, and what was said since."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)  # all tokens behind the prompt
    turns: list[dict] = field(default_factory=list)  # span in `ids`, response, reward, and observation but for the last
    done: bool = False  # whether the environment ended it


@dataclass(frozen=True)
class Dialogues:
    """Samples responses in turns; a `generator` of `PPOTrainer`.

    A response ends where the environment says that it is done, else after `max_turns` turns. A turn has at most
    `max_new_tokens` of the sampling; of a longer observation the first `max_observation_length` tokens are kept.

    Raises `ServerError`, which names the turn and the prompt, where the environment raises or returns something else
    than what it should.
    """

    environment: Any
    name: str = "environment"
    max_turns: int = 8
    max_observation_length: int = 64

    def __call__(self, model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
        """One response to each prompt, by torch's global random state."""
        return self.play(model, tokenizer, prompts, lambda turn, rows: sampling)

    def longest(self, turn: int) -> int:
        """The most response tokens that there can be, where a turn has so many."""
        return self.max_turns * turn + (self.max_turns - 1) * self.max_observation_length

    def play(self, model, tokenizer, prompts: Sequence[str], sampling: Callable[[int, list[int]], Sampling]) -> Rollout:
        """One response to each prompt; `sampling(turn, rows)` is that of a turn, from 1, in those that are not done."""
        pairs = zip(prompts, encode_prompts(tokenizer, prompts), strict=True)
        dialogues, states = [Dialogue(*pair) for pair in pairs], self._reset(prompts)
        for turn in range(1, self.max_turns + 1):
            rows = [row for row, one in enumerate(dialogues) if not one.done]
            if rows:
                going_on = [dialogues[row] for row in rows]
                replies = self._speak(model, tokenizer, going_on, sampling(turn, rows))
                answers = self._step([states[row] for row in rows], replies, turn, [one.prompt for one in going_on])
                self._hear(tokenizer, going_on, answers, turn)
        everything = [(one.prompt, one.ids, one.turns, one.done) for one in dialogues]
        return from_turns(tokenizer, *zip(*everything, strict=True)).to(next(model.parameters()).device)

    def _speak(self, model, tokenizer, dialogues: list[Dialogue], sampling: Sampling) -> list[str]:
        """The policy's next turn in each dialogue."""
        ids, read = pad([one.prompt_ids + one.ids for one in dialogues], tokenizer.pad_token_id, left=True)
        tokens, mask, _ = sample(model, tokenizer, ids, read, sampling)
        new = zip(tokens[:, ids.shape[1] :].tolist(), mask.sum(1).tolist(), strict=True)
        replies = [row[:count] for row, count in new]
        texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
        for one, reply, text in zip(dialogues, replies, texts, strict=True):
            one.turns.append({"span": [len(one.ids), len(one.ids) + len(reply)], "response": text})
            one.ids = one.ids + reply
        return texts

    def _hear(self, tokenizer, dialogues: list[Dialogue], answers: list[tuple[str, float, bool]], turn: int) -> None:
        """Note the environment's answers."""
        for one, (text, reward, done) in zip(dialogues, answers, strict=True):
            one.turns[-1]["reward"], one.done = reward, done
            if not done and turn < self.max_turns:
                observation = encode_observation(tokenizer, text, one.ids[-1:], self.max_observation_length)
                if not observation:
                    raise self._fault(turn, one.prompt, "the observation is empty: say something, or be done")
                one.turns[-1]["observation"] = text
                one.ids = one.ids + observation

    # -- the user's class ---------------------------------------------------------------------------------------------

    def _reset(self, prompts: Sequence[str]) -> list:
        states = self._call(self.environment.reset, 0, prompts, list(prompts))
        if not isinstance(states, Sequence) or len(states) != len(prompts):
            reason = f"reset returned {states!r:.60} for {len(prompts)} prompts: return a list with a state for each"
            raise self._fault(0, prompts[0], reason)
        return list(states)

    def _step(self, states: list, texts: list[str], turn: int, prompts: list[str]) -> list[tuple[str, float, bool]]:
        answer = self._call(self.environment.step, turn, prompts, states, list(texts))
        try:
            sizes = [len(part) for part in answer]
        except TypeError:
            sizes = []
        if sizes != [len(prompts)] * 3:
            fix = f"return (observations, rewards, dones), each with {len(prompts)} entries"
            raise self._fault(turn, prompts[0], f"step returned {answer!r:.60}: {fix}")
        for prompt, observation, reward, _ in zip(prompts, *answer, strict=True):
            if not isinstance(observation, str):
                raise self._fault(turn, prompt, f"the observation is {observation!r:.40}: return a text")
            if isinstance(reward, str) or not math.isfinite(self._call(float, turn, [prompt], reward)):
                raise self._fault(turn, prompt, f"the reward is {reward!r:.40}: return a finite number")
        return [(observation, float(reward), bool(done)) for observation, reward, done in zip(*answer, strict=True)]

    def _call(self, method: Callable, turn: int, prompts: Sequence[str], *arguments):
        try:
            return method(*arguments)
        except Exception as error:  # a user's class may raise anything
            more = f", or of one of {len(prompts) - 1} more" if len(prompts) > 1 else ""
            raise self._fault(turn, prompts[0], f"{method.__name__} raised {one_line(error)}", more) from error

    def _fault(self, turn: int, prompt: str, reason: str, more: str = "") -> ServerError:
        return ServerError(f"--environment {self.name}: turn {turn} of {prompt[:60]!r}{more}: {reason}")


def from_turns(
    tokenizer,
    prompts: Sequence[str],
    response_ids: Sequence[list[int]],
    turns: Sequence[list[dict]],
    ended: Sequence[bool],
) -> Rollout:
    """A rollout of dialogues: `response_ids` are all tokens behind each prompt, `turns` those of `Dialogue`."""
    ids, prompt_mask = pad(encode_prompts(tokenizer, prompts), tokenizer.pad_token_id, left=True)
    tokens, read = pad(response_ids, tokenizer.pad_token_id, left=False)
    mask = torch.zeros_like(read, dtype=torch.bool)
    for row, one in enumerate(turns):
        for turn in one:
            mask[row, slice(*turn["span"])] = True
    rewards = [torch.tensor([turn["reward"] for turn in one]) for one in turns]
    return Rollout(
        prompts=list(prompts),
        responses=tokenizer.batch_decode(list(response_ids), skip_special_tokens=True),
        tokens=torch.cat([ids, tokens], 1),
        attention_mask=torch.cat([prompt_mask, read], 1),
        mask=mask,
        ended=torch.tensor(ended, dtype=torch.bool),
        turn_rewards=pad_sequence(rewards, batch_first=True),
        turns=list(turns),
    )
