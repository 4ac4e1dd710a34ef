"""Tokenise prompts and responses in the same way in every stage; a response ends with EOS."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import datasets  # PPO needs none of it


def encode_prompts(tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts, with the special tokens that the tokenizer puts first (BOS for Gemma).

    What it puts last, such as EOS, is left out: the response follows. A prompt that a chat template wrote
    (`chats.expect_chats`) has its special tokens in it, BOS among them.
    """
    if getattr(tokenizer, "expects_chats", False):
        return tokenizer(list(prompts), add_special_tokens=False, split_special_tokens=False)["input_ids"]
    plain = tokenizer(list(prompts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    first = _leading_special_tokens(tokenizer)
    return [[*first, *ids] for ids in plain]


def _leading_special_tokens(tokenizer) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    text, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next(i for i in range(len(text)) if text[i : i + len(plain)] == plain)
    return text[:start]


def encode_responses(tokenizer, responses: Sequence[str], limit: int) -> list[list[int]]:
    """Return the token ids of responses, ended by EOS; longer ones are cut to `limit` tokens and have no EOS."""
    ids = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
    return [(row + [tokenizer.eos_token_id])[:limit] for row in ids]


def encode_answers(
    tokenizer, prompts: Sequence[str], answers: Sequence[str], limit: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of prompts and of their answers, as in `encode_responses`.

    What a chat template wrote is one text, with special tokens in the answer too: a tokenizer may begin a text of its
    own in another way than the same text behind a prompt.
    """
    ids = encode_prompts(tokenizer, prompts)
    if not getattr(tokenizer, "expects_chats", False):
        return ids, encode_responses(tokenizer, answers, limit)
    wholes = encode_prompts(tokenizer, [p + a for p, a in zip(prompts, answers, strict=True)])
    alone = encode_prompts(tokenizer, answers)
    behind = [w[len(p) :] if w[: len(p)] == p else a for p, w, a in zip(ids, wholes, alone, strict=True)]
    return ids, [(row + [tokenizer.eos_token_id])[:limit] for row in behind]


def sft_dataset(tokenizer, rows: "datasets.Dataset", limit: int) -> "datasets.Dataset":
    """Return columns `input_ids` and `completion_mask` (1 on the chosen response), as `trl.SFTTrainer` takes them.

    Rows with a `dialogue`, texts of policy and environment in turn, teach the policy's turns.
    """
    if "dialogue" in rows.column_names:
        prompts = encode_prompts(tokenizer, rows["prompt"])
        chosen, masks = zip(*(_encode_dialogue(tokenizer, texts, limit) for texts in rows["dialogue"]), strict=True)
    else:
        prompts, chosen = encode_answers(tokenizer, rows["prompt"], rows["chosen"], limit)
        masks = [[1] * len(ids) for ids in chosen]
    return type(rows).from_dict(
        {
            "input_ids": [p + c for p, c in zip(prompts, chosen, strict=True)],
            "completion_mask": [[0] * len(p) + mask for p, mask in zip(prompts, masks, strict=True)],
        }
    )


def _encode_dialogue(tokenizer, texts: Sequence[str], limit: int) -> tuple[list[int], list[int]]:
    """Return the token ids of texts of policy and environment in turn, and a mask, 1 on those of the policy."""
    ids, mask = [], []
    for turn, text in enumerate(texts):
        acts = turn % 2 == 0
        more = encode_responses(tokenizer, [text], limit)[0] if acts else encode_observation(tokenizer, text, ids[-1:])
        ids, mask = ids + more, mask + [int(acts)] * len(more)
    return ids, mask


def pair_dataset(tokenizer, rows: "datasets.Dataset", limit: int) -> "datasets.Dataset":
    """Return columns `chosen_ids` and `rejected_ids` (prompt and response), as `trl.RewardTrainer` takes them."""
    sides = {side: encode_answers(tokenizer, rows["prompt"], rows[side], limit) for side in ("chosen", "rejected")}
    return type(rows).from_dict(
        {f"{side}_ids": [p + r for p, r in zip(*ids, strict=True)] for side, ids in sides.items()}
    )


def pad(rows: Sequence[Sequence[int]], value: int, left: bool) -> tuple[Tensor, Tensor]:
    """Return `(ids [B, L], mask [B, L])`, padded on one side; the mask comes from the lengths, never from the ids."""
    width = max(map(len, rows), default=0)
    gaps = [[value] * (width - len(row)) for row in rows]
    ids = [[*gap, *row] if left else [*row, *gap] for gap, row in zip(gaps, rows, strict=True)]
    positions = torch.arange(width)
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    mask = positions >= width - lengths if left else positions < lengths
    return torch.tensor(ids), mask.long()


def encode_observation(tokenizer, text: str, before: Sequence[int], limit: int | None = None) -> list[int]:
    """Return the token ids of what an environment says, the first `limit` of the text, as data: none is special.

    Where a chat template wrote the prompt, it is a message of a tool, or of the user where the template has no tools,
    with all that the template puts around it. `before` holds the last token, in case it ends a turn already.
    """
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"][:limit]
    if not ids or not getattr(tokenizer, "expects_chats", False):
        return ids
    head, tail = _around_observations(tokenizer, tokenizer.chat_template)
    return head[list(before) == head[:1] :] + ids + tail


@functools.lru_cache
def _around_observations(tokenizer, template: str) -> tuple[list[int], list[int]]:
    """Token ids between an assistant's answer and an observation, and behind it; none where neither role is known."""
    as_tokens = {"add_special_tokens": False, "split_special_tokens": False}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ANSWER"}]
    for role in ("tool", "user"):
        try:
            messages = [*said, {"role": role, "content": "OBSERVATION"}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template may raise what it likes
            continue
        head, found, tail = text.partition("OBSERVATION")
        if found and "ANSWER" in head:
            parts = (head.rpartition("ANSWER")[2], tail)
            return tuple(tokenizer(part, **as_tokens)["input_ids"] for part in parts)
    return [], []
