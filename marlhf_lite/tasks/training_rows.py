"""What SFT and the reward model train on: rows of token ids, as TRL's trainers take them."""

from collections.abc import Sequence

import datasets

from marlhf_lite.tasks.answers import encode_answers, encode_continuation, encode_responses
from marlhf_lite.tasks.observations import make_message
from marlhf_lite.tasks.tokenization import encode_prompts


def sft_dataset(tokenizer, rows: datasets.Dataset, limit: int) -> datasets.Dataset:
    """Return columns `input_ids` and `completion_mask` (1 on the chosen response), as `trl.SFTTrainer` takes them.

    Rows with a `dialogue`, texts of policy and environment in turn, teach only the policy's turns.
    """
    if "dialogue" in rows.column_names:
        prompts = encode_prompts(tokenizer, rows["prompt"])
        chosen, masks = zip(
            *(_encode_dialogue(tokenizer, texts, limit) for texts in rows["dialogue"]), strict=True
        )
    else:
        prompts, chosen = encode_answers(tokenizer, rows["prompt"], rows["chosen"], limit)
        masks = [[1] * len(ids) for ids in chosen]
    ids = [p + c for p, c in zip(prompts, chosen, strict=True)]
    masks = [[0] * len(p) + mask for p, mask in zip(prompts, masks, strict=True)]
    return type(rows).from_dict({"input_ids": ids, "completion_mask": masks})


def _encode_dialogue(tokenizer, texts: Sequence[str], limit: int) -> tuple[list[int], list[int]]:
    """Return the token ids of texts of policy and environment in turn, and a mask that is 1 on the policy's."""
    ids, mask = [], []
    for turn, text in enumerate(texts):
        acts = turn % 2 == 0
        if acts:
            (more,) = encode_responses(tokenizer, [text], limit)
        else:
            more = make_message(tokenizer, encode_continuation(tokenizer, [text])[0], ids[-1:])
        ids, mask = ids + more, mask + [int(acts)] * len(more)
    return ids, mask


def pair_dataset(tokenizer, rows: datasets.Dataset, limit: int) -> datasets.Dataset:
    """Return columns `chosen_ids` and `rejected_ids` (prompt and response), as `trl.RewardTrainer` takes them."""
    sides = {
        side: encode_answers(tokenizer, rows["prompt"], rows[side], limit)
        for side in ("chosen", "rejected")
    }
    whole = {
        f"{side}_ids": [p + r for p, r in zip(*ids, strict=True)] for side, ids in sides.items()
    }
    return type(rows).from_dict(whole)
