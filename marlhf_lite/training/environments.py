"""Responses in turns: the policy and a user's environment speak alternately.

An environment is a class without arguments, with two methods; all lists have an entry for each dialogue::

    reset(prompts) -> states                                    # any objects; `step` may change them
    reset(prompts, answer, **row) -> states                     # also other columns of the rows, each a list
    step(states, texts) -> (observations, rewards, dones)       # texts, numbers, truth values

The policy's tokens are kept as they were sampled. An observation is tokenised once and appended, and its text never
becomes a special token. The last observation is left out: nobody would read it.
"""

from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from torch.nn.utils.rnn import pad_sequence

from marlhf_lite.tasks.answers import encode_continuation
from marlhf_lite.tasks.observations import make_message
from marlhf_lite.tasks.padding import pad
from marlhf_lite.tasks.prompts import RowColumns
from marlhf_lite.tasks.tokenization import decode_continuation, encode_prompts
from marlhf_lite.training.distributed import is_sharded, raise_on_all_ranks
from marlhf_lite.training.rollout import Rollout, Sampling, from_tokens, sample
from marlhf_lite.utils.contents import code_hash
from marlhf_lite.utils.errors import ServerError, one_line
from marlhf_lite.utils.user_code import line_of

Result = TypeVar("Result")
# What `step` returns for a dialogue, in this order: its name -> what it must be, in words and as a test. Sums of
# rewards are in float32, and texts are written as UTF-8. A value is also wrong if its test raises, as `encode` does for
# a text that UTF-8 cannot write.
MOST = torch.finfo(torch.float32).max
PARTS = {
    "the observation": (
        "a text that UTF-8 can write",
        lambda x: isinstance(x, str) and x.encode() is not None,
    ),
    "the reward": ("a finite number", lambda x: not isinstance(x, str) and abs(float(x)) <= MOST),
    "done": ("True or False", lambda x: x in (True, False)),
}


@dataclass
class Dialogue:
    """A prompt, and what was said since.

    Each of the `turns` has the `span` [start, end] of the policy's tokens in `ids` (end excluded), the `response` and
    the `reward`. All but the last also have the `observation`, as far as the policy reads it; if it was cut,
    `observation_cut` is the number of tokens left out.
    """

    prompt: str
    ids: list[int] = field(default_factory=list)  # all tokens after the prompt
    turns: list[dict] = field(default_factory=list)
    done: bool = False  # whether the environment ended it
    state: Any = None  # the environment's


@dataclass(frozen=True)
class Dialogues:
    """Samples responses in turns: a `Sampler`.

    A response ends when the environment says that it is done, at the latest after `max_turns` turns. A turn has at most
    `max_new_tokens` of the sampling; an observation is cut after `max_observation_length` tokens.

    Raises `ServerError`, which names the turn and the prompt, if the environment raises, or does not return what the
    top of this file asks for.
    """

    environment: Any
    name: str = "environment"
    max_turns: int = 8
    max_observation_length: int = 64
    draws_from_policy = True  # of every such sampler; not a field

    @property
    def key(self) -> str:
        """What the environment's answers depend on; an edited environment has another key."""
        sizes = f"{self.max_turns} turns, {self.max_observation_length} tokens an observation"
        return f"{self.name} {code_hash(self.name)[:12]}".rstrip() + f", {sizes}"

    def __call__(self, model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
        """One response to each prompt."""
        # If processes share each layer (FSDP2), each waits for the others in every pass. So all take the same number of
        # turns, until the dialogues of all are done, and an error in one ends all.
        sharded = is_sharded(model)

        def call(work: Callable[..., Result], *arguments) -> Result:
            if sharded:
                return raise_on_all_ranks(work, *arguments)
            return work(*arguments)

        states = call(self._reset, prompts)
        dialogues = []
        for prompt, state in zip(prompts, states, strict=True):
            dialogues.append(Dialogue(prompt, state=state))

        for turn in range(1, self.max_turns + 1):
            open_rows = [row for row, dialogue in enumerate(dialogues) if not dialogue.done]
            open_rows_of_all = gather_object(open_rows) if sharded else open_rows
            if not open_rows_of_all:
                break
            # A process whose dialogues are all done still has to make the passes of this turn: it speaks in its first
            # dialogue, and its reply is dropped below (`open_rows` is empty).
            speaking_rows = open_rows or [0]
            replies = self._speak(
                model,
                tokenizer,
                [dialogues[row] for row in speaking_rows],
                sampling.of_turn(turn, speaking_rows),
            )
            call(
                self._step_environment,
                tokenizer,
                [dialogues[row] for row in open_rows],
                replies[: len(open_rows)],
                turn,
            )
        return from_turns(tokenizer, dialogues).to(next(model.parameters()).device)

    def _speak(
        self, model, tokenizer, dialogues: list[Dialogue], sampling: Sampling
    ) -> list[list[int]]:
        """The tokens of the policy's next turn in each dialogue."""
        prompts = encode_prompts(tokenizer, [dialogue.prompt for dialogue in dialogues])
        said = [prompt + dialogue.ids for prompt, dialogue in zip(prompts, dialogues, strict=True)]
        ids, attention_mask = pad(said, tokenizer.pad_token_id, left=True)
        tokens, mask, _ = sample(model, tokenizer, ids, attention_mask, sampling)
        new_tokens = tokens[:, ids.shape[1] :].tolist()  # padded on the right
        counts = mask.sum(1).tolist()
        return [row[:count] for row, count in zip(new_tokens, counts, strict=True)]

    def _step_environment(
        self, tokenizer, dialogues: list[Dialogue], replies: list[list[int]], turn: int
    ) -> None:
        """Append the policy's turns, `replies` as token ids, to the dialogues, and the environment's answers."""
        if not dialogues:  # those of this process are all done
            return
        texts = decode_continuation(tokenizer, replies)
        answers = self._step(dialogues, texts, turn)
        for dialogue, reply, response, answer in zip(
            dialogues, replies, texts, answers, strict=True
        ):
            observation, reward, done = answer
            start = len(dialogue.ids)
            dialogue.ids = dialogue.ids + reply
            dialogue.done = done
            dialogue.turns.append(
                {"span": [start, len(dialogue.ids)], "response": response, "reward": reward}
            )
            # Nobody would read an observation after the last turn.
            if not done and turn < self.max_turns:
                self._append_observation(tokenizer, dialogue, observation, turn)

    def _append_observation(self, tokenizer, dialogue: Dialogue, text: str, turn: int) -> None:
        """Append the environment's `text` to a dialogue, cut after `max_observation_length` tokens.

        Raises `ServerError` if that gives no token to read.
        """
        (ids,) = encode_continuation(tokenizer, [text])
        ids_that_are_read = ids[: self.max_observation_length]
        record: dict[str, Any] = {"observation": text}
        if len(ids_that_are_read) < len(ids):
            (record["observation"],) = decode_continuation(tokenizer, [ids_that_are_read])
            record["observation_cut"] = len(ids) - len(ids_that_are_read)

        # If a chat template wrote the prompt, this adds its marks around the observation.
        message = make_message(tokenizer, ids_that_are_read, before=dialogue.ids[-1:])
        if not message:
            raise self._fault(
                turn, [dialogue.prompt], "the observation is empty: say something, or be done"
            )
        dialogue.turns[-1] |= record
        dialogue.ids = dialogue.ids + message

    def longest_response(self, tokenizer, new_tokens: int) -> int:
        """The most tokens after a prompt: all turns, of at most `new_tokens` each, and the observations between."""
        # An empty message is the marks of the chat template, which come with each observation.
        between = self.max_observation_length + len(make_message(tokenizer, [], []))
        return self.max_turns * new_tokens + (self.max_turns - 1) * between

    # -- the user's class ---------------------------------------------------------------------------------------------

    @property
    def columns(self) -> RowColumns:
        """The columns of the row that `reset` takes."""
        return RowColumns(self.environment.reset, 1, f"--environment {self.name}")

    def _reset(self, prompts: Sequence[str]) -> list:
        """Return the environment's states, one for each prompt. In messages this is turn 0."""
        columns = self.columns.arguments(prompts)
        states = self._call(self.environment.reset, 0, prompts, [*map(str, prompts)], **columns)
        if not isinstance(states, Sequence) or len(states) != len(prompts):
            reason = f"reset returned {states!r:.60} for {len(prompts)} prompts: return a list with a state for each"
            raise self._fault(0, prompts, reason)
        return list(states)

    def _step(
        self, dialogues: list[Dialogue], texts: list[str], turn: int
    ) -> list[tuple[str, float, bool]]:
        """Return what the environment answers to these texts: an observation, a reward and whether it is done."""
        prompts = [dialogue.prompt for dialogue in dialogues]
        states = [dialogue.state for dialogue in dialogues]
        answer = self._call(self.environment.step, turn, prompts, states, list(texts))

        # 1. Three lists with an entry for each dialogue: observations, rewards and whether it is done.
        sizes: list[int | None] = []  # of the three lists; None for a part that is not a list
        for part in answer if isinstance(answer, Sequence) else ():
            is_list = isinstance(part, Sized) and not isinstance(part, str)
            sizes.append(len(part) if is_list else None)
        expected_sizes = [len(prompts)] * len(PARTS)
        if sizes != expected_sizes:
            fix = f"return (observations, rewards, dones), each with {len(prompts)} entries"
            raise self._fault(turn, prompts, f"step returned {answer!r:.60}: {fix}")

        # 2. Each entry is what it should be.
        checked = []
        observations, rewards, are_done = answer
        for prompt, *parts in zip(prompts, observations, rewards, are_done, strict=True):
            reason = _wrong_part(parts)
            if reason:
                raise self._fault(turn, [prompt], reason)
            observation, reward, done = parts
            checked.append((observation, float(reward), bool(done)))
        return checked

    def _call(self, method: Callable, turn: int, prompts: Sequence[str], *arguments, **columns):
        """Call a method of the user's class. Raises `ServerError` that names turn and prompt if the method raises."""
        try:
            return method(*arguments, **columns)
        except (Exception, SystemExit) as error:  # a user's class may raise anything
            reason = f"{method.__name__} raised {one_line(error)}{line_of(self.name, error)}"
            raise self._fault(turn, prompts, reason) from error

    def _fault(self, turn: int, prompts: Sequence[str], reason: str) -> ServerError:
        """Make the error of a turn; `prompts` are those of the dialogues in which it may have come up."""
        prompt = repr(prompts[0][:60])
        if len(prompts) > 1:
            prompt += f", or of one of {len(prompts) - 1} more"
        return ServerError(f"--environment {self.name}: turn {turn} of {prompt}: {reason}")


def _wrong_part(parts: Sequence) -> str:
    """Say what is wrong with an observation, a reward and a truth value, `parts`; return "" if nothing is."""
    for part, (name, (what_it_must_be, is_valid)) in zip(parts, PARTS.items(), strict=True):
        valid = False
        with suppress(Exception):  # a test may fail on what it does not expect, such as an array
            valid = is_valid(part)
        if not valid:
            return f"{name} is {part!r:.40}: return {what_it_must_be}"
    return ""


def from_turns(tokenizer, dialogues: Sequence[Dialogue]) -> Rollout:
    """Make a rollout of dialogues. Its mask is True on what the policy said, and has holes at the observations."""
    all_tokens = from_tokens(
        tokenizer,
        [dialogue.prompt for dialogue in dialogues],
        [dialogue.ids for dialogue in dialogues],
        ends=[],  # no token ends a dialogue: `ended` is set below
    )
    mask = torch.zeros_like(all_tokens.mask)
    rewards = []
    for row, dialogue in enumerate(dialogues):
        for turn in dialogue.turns:
            start, end = turn["span"]
            mask[row, start:end] = True
        rewards.append(torch.tensor([turn["reward"] for turn in dialogue.turns]))
    return replace(
        all_tokens,
        mask=mask,
        ended=torch.tensor([dialogue.done for dialogue in dialogues], dtype=torch.bool),
        turn_rewards=pad_sequence(rewards, batch_first=True),
        turns=[dialogue.turns for dialogue in dialogues],
    )
